"""One redaction for bundles, records, errors and logs: what is a secret goes, and what is needed stays."""

from __future__ import annotations

import ast
import io
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.cli.terminal.log import LogFormatter
from healthd.core.errors import ConfigError, HealthdError
from healthd.core.pseudonyms import Redactor, redact_line, redact_mounts, redact_output
from healthd.core.redaction import GONE, is_secret_name, redact
from tests.core.secret_forms import FORMS, HARMLESS, SECRET
from tests.every import every
from tests.hooks.inside import run_inside
from tests.hooks.preflight_kit import free_port


def in_log(text: str) -> str:
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setFormatter(LogFormatter())
    handler.emit(logging.LogRecord("x", logging.INFO, "x.py", 1, "plug-in said: %s", (text,), None))
    return said.getvalue()


OUTLETS = {
    "text": redact,
    "bundle": Redactor().text,
    "bundle, in a member": lambda text: str(Redactor().plain({"checks": [{"message": text}]})),
    "error": lambda text: str(HealthdError(f"plug-in: {text}")),
    "log": in_log,
    "record, kernel log": redact_line,
    "record, mounts": redact_mounts,
    "record, tools": redact_output,
}


@every("outlet", OUTLETS)
def test_no_form_of_a_secret_gets_out(outlet: str) -> None:
    assert len({text for text, _ in FORMS}) >= 50
    for text, secret in FORMS:
        for around in ("{}", "check mine: it said {} (exit code 2)", "\n{}\n", '"{}"'):
            assert secret not in OUTLETS[outlet](around.replace("{}", text)), text


def messages() -> Iterator[str]:
    """The texts of the errors that healthd raises, with a word for each value."""
    for file in (Path(__file__).parents[2] / "healthd").rglob("*.py"):
        for raised in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for part in ast.walk(raised) if isinstance(raised, ast.Raise | ast.Return) else ():
                if isinstance(part, ast.JoinedStr):
                    yield "".join(str(one.value) if isinstance(one, ast.Constant) else "7" for one in part.values)
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def test_our_own_messages_come_out_whole() -> None:
    every = set(messages())
    assert "must be pid:NUMBER or pid:NUMBER@START, START in clock ticks after boot" in every
    assert [text for text in every if redact(text) != text] == []


def test_what_is_no_secret_stays() -> None:
    for text in HARMLESS:
        assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"AWS_SECRET_ACCESS_KEY={SECRET} python train.py", f"AWS_SECRET_ACCESS_KEY={GONE} python train.py"),
        (f'{{"password": "{SECRET}", "user": "ann"}}', f'{{"password": "{GONE}", "user": "ann"}}'),
        (f"train.py --password {SECRET} --epochs 3", f"train.py --password {GONE} --epochs 3"),
        (f"Authorization: Basic {SECRET}==", f"Authorization: Basic {GONE}"),
        (f"postgresql://ann:{SECRET}@db:5432/h", f"postgresql://{GONE}@db:5432/h"),
    ],
)
def test_what_is_around_a_secret_can_still_be_read(text: str, clean: str) -> None:
    assert redact(text) == clean
    assert redact(clean) == clean


@given(st.text(max_size=200))
def test_nothing_breaks_it_and_twice_is_once(text: str) -> None:
    assert redact(redact(text)) == redact(text)


@every("unit", ["token", "password=", "a-", "-u x", "://a@", "mysql ", "key_", '"', "wandb ", "eyJ."])
def test_long_lines_take_no_long_time(unit: str) -> None:
    """Kept linear: a plug-in's output may be tens of kilobytes of the same."""
    began = time.process_time()
    redact((unit * 20_000)[:20_000])
    assert time.process_time() - began < 2.0


def test_members_are_known_by_their_names() -> None:
    for name in ("password", "PGPASSWORD", "apiKey", "client_secret", "HF_TOKEN", "db_pass", "credentials"):
        assert is_secret_name(name), name
    for name in ("pass", "token_file", "tokens", "max_tokens", "key", "bypass", "state", "node"):
        assert not is_secret_name(name), name


def test_password_in_an_address_shows_in_no_error(tmp_path: Path) -> None:
    url = f"http://ann:{SECRET}@127.0.0.1:{free_port()}"
    file = tmp_path / "hook.toml"
    file.write_text(f'[gate]\nlocal_url = "{url}"\n')
    asked = ("gate", "--job", "j", "--node", "n1", "--wait", "0s", "--config", str(file))
    for rule in ("hold", "local", "admit"):
        said = run_inside(*asked, "--aggregator", url, "--on-unreachable", rule)
        assert SECRET not in said.err + said.out
        assert f"http://{GONE}@127.0.0.1" in said.err
    for wrong in (f"ftp://ann:{SECRET}@head", f"ann:{SECRET}@head"):
        said = run_inside(*asked, "--aggregator", wrong)
        assert said.code == 2
        assert SECRET not in said.err
    said = run_inside("aggregator", "--database", f"postgresql+psycopg://ann:{SECRET}@127.0.0.1:x/h")
    assert (said.code, SECRET in said.err) == (2, False), said
    assert SECRET not in str(ConfigError(f"database postgresql://ann:{SECRET}@db: no"))
