"""Text from outside is bounded in depth, wherever it is decoded, and never ends a process."""

from __future__ import annotations

import ast
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from checks.accelerators.neuron import ls as neuron_ls
from checks.accelerators.neuron import monitor
from checks.collective.nccom.run import read_report
from checks.host.machine import Host, HostError
from checks.json_text import MAX_DEPTH, TooDeepError, parse_json, require_shallow
from checks.worker import protocol
from healthd.cli.settings.tree import Settings
from healthd.core import wire
from healthd.core.config import load, parse_toml
from healthd.core.errors import BadInputError, ConfigError
from healthd.core.model import SyncAnswer

ROOT = Path(__file__).parent.parent.parent
DEEP = b"[" * 50_000 + b"]" * 50_000
OPEN = b"[" * 50_000
HIDDEN = b'{"answer": "a", "extra": ' + b'{"a":[' * 25_000 + b"]}" * 25_000 + b"}"


@pytest.mark.parametrize("body", [DEEP, OPEN, HIDDEN, b"[" * 50_000 + b"}" * 50_000], ids=["deep", "open", "x", "y"])
def test_what_is_nested_too_deep_is_refused_before_it_is_decoded(body: bytes) -> None:
    with pytest.raises(TooDeepError, match="nested more than 64 deep"):
        require_shallow(body)
    with pytest.raises(BadInputError, match="its answer: nested more than"):
        wire.decode(body, SyncAnswer, what="its answer")
    with pytest.raises(ValueError, match="nested"):
        parse_json(body)


def test_depth_is_counted_and_not_brackets() -> None:
    wide = b"[" + b",".join([b"[[],{}]"] * 10_000) + b"]"
    assert len(parse_json(wide)) == 10_000
    just = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    require_shallow(just)
    require_shallow(b"[" + just[1:-1] + b"," + b"[1]," * 100 + b"1]")
    with pytest.raises(TooDeepError):
        require_shallow(b"[" + just + b"]")


@pytest.mark.parametrize(
    "text", [r'"\"[[["', r'"\\"', r'"\\\"' + "[" * 200 + '"', '"' + "{[" * 500 + '"', r'"\\\\", "' + "[" * 100 + '"']
)
def test_brackets_in_strings_do_not_count(text: str) -> None:
    body = f"[{text}]".encode()
    require_shallow(body)
    parse_json(body)


@pytest.mark.parametrize(
    "body", [b'"' + rb"\"" * 500_000, b'"' * 1_000_001, b"[" * 1_000_000, b"[]" * 500_000, b"]" * 999_999 + b"["]
)
def test_hostile_megabytes_take_no_time(body: bytes) -> None:
    before = time.process_time()
    with contextlib.suppress(TooDeepError):
        require_shallow(body + b"[" * 65)
    assert time.process_time() - before < 1.0


def of_config(text: bytes) -> None:
    parse_toml(f"a = {text.decode()}")


@pytest.mark.parametrize(
    ("decode", "raised"),
    [
        (protocol.decode, protocol.ProtocolError),
        (lambda body: neuron_ls.parse(body.decode()), ValueError),
        (of_config, ValueError),
    ],
    ids=["worker", "neuron-ls", "toml"],
)
def test_every_decoder_of_foreign_text_refuses_depth_in_its_own_way(
    decode: Callable[[bytes], object], raised: type[Exception]
) -> None:
    with pytest.raises(raised):
        decode(DEEP)


def test_report_of_a_tool_that_is_nested_too_deep_is_none() -> None:
    assert read_report(DEEP.decode()) is None
    assert monitor.parse_monitor(DEEP.decode()) is None


def test_toml_of_dotted_keys_is_bounded_although_its_parser_needs_no_stack() -> None:
    assert parse_toml("a.b.c = [1, {d = 2}]") == {"a": {"b": {"c": [1, {"d": 2}]}}}
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        parse_toml(f"{'.'.join('a' * 2_000)} = 1")


def test_machine_as_a_directory_may_say_anything(tmp_path: Path) -> None:
    (tmp_path / "host.json").write_bytes(DEEP)
    with pytest.raises(HostError, match=r"host\.json"):
        Host(tmp_path).clock()


def test_text_from_outside_is_decoded_in_one_place() -> None:
    """Whoever calls a decoder directly forgets the bound."""
    bare = {"json.loads", "json.load", "msgspec.json.decode", "msgspec.json.Decoder", "tomllib.loads", "tomllib.load"}
    found = []
    for folder in ("checks", "healthd"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            found += [str(path.relative_to(ROOT)) for call in calls if ast.unparse(call.func) in bare]
    ours = {  # what our processes say to each other, and a file of the package
        "checks/worker/fork_server.py",
        "healthd/postmortem/catalogue.py",
        "healthd/postmortem/parent.py",
        "healthd/runner/workers/fork_server.py",
    }
    assert set(found) - ours == {"checks/json_text.py", "healthd/core/config.py", "healthd/core/wire.py"}


def test_error_of_a_settings_file_names_it(tmp_path: Path) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text(f"a = {DEEP.decode()}")
    with pytest.raises(ConfigError, match=r"healthd\.toml:1: not TOML: nested more than 64 deep"):
        load(Settings, file=file, environ={}, arguments={})
