"""Jobs that die for real below `healthd run`: what it says of each."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.server
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from healthd.aggregator.jobs.postmortem_records import Postmortem, PostmortemPhase, Told, state_of
from healthd.cli.postmortem import exit_code, outcome_word
from healthd.core import wire
from healthd.core.errors import BadInputError
from healthd.postmortem import EXIT_CODES
from healthd.postmortem.catalogue import Kind, Outlook
from healthd.postmortem.collect import complete
from healthd.postmortem.judge import Case, judge
from healthd.postmortem.notes import case_of, read_notes
from tests import prepared
from tests.aggregator.postmortems_kit import notes_of
from tests.cli.cli_kit import environment
from tests.patience import PATIENCE
from tests.postmortem.parent_kit import children, read_until, wait_for

FAULTS = str(Path(__file__).with_name("faults.py"))
SECONDS = 40 * PATIENCE

# Fault -> what is said of it, and whether that is only suspected where nothing was measured.
SAID = {
    "exception": ("software", True),
    "exception_with_a_cause": ("software", True),
    "import_error": ("software", True),
    "assertion": ("software", True),
    "recursion": ("software", True),
    "nan_loss": ("software", True),
    "exit_without_a_word": ("unknown", False),
    "killed": ("unknown", False),
    "child_killed": ("unknown", False),
    "segmentation_fault": ("software", True),
    "real_segmentation_fault": ("software", True),
    "abort": ("software", True),
    "bus_error": ("host", True),
    "full_disk": ("storage", True),
    "missing_file": ("storage", True),
    "permission": ("storage", True),
    "empty_shard": ("storage", True),
    "cut_shard": ("storage", True),
    "bad_json": ("data", True),
    "bad_text": ("data", True),
    "bad_gzip": ("data", True),
    "bad_zip": ("data", True),
    "open_files": ("host", True),
    "memory": ("host", True),
    "port_in_use": ("host", True),
    "peer_not_there": ("unknown", False),
    "peer_went_away": ("unknown", False),
    "name_not_resolved": ("network", True),
    "survived_then_exception": ("software", True),
}


@contextlib.contextmanager
def answering(answer: Callable[[str, Any], bytes]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """An aggregator that answers each path and body in this way: its URL, and what it was sent."""
    heard: list[tuple[str, Any]] = []

    class Aggregator(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(sent) if sent else None
            heard.append((self.path, body))
            said = answer(self.path, body)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_POST = answer  # noqa: N815  the names of the library

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Aggregator) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", heard
        finally:
            server.shutdown()


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    verdict: Any
    """As JSON; None where there is none."""


def healthd_run(folder: Path, *command: str, options: tuple[str, ...] = ("--no-measure",), **more: Any) -> Outcome:
    """Run a command to its end below `healthd run`."""
    said = folder / "verdict.json"
    with prepared.Popen(
        [sys.executable, "-m", "healthd", "run", *options, "--json-out", str(said), "--", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(folder, **more.pop("env", {})),
        **more,
    ) as process:
        out, err = process.communicate(timeout=SECONDS)
    verdict = json.loads(said.read_text()) if said.exists() else None
    return Outcome(process.returncode, out, err, verdict)


def job(fault: str) -> tuple[str, ...]:
    return (sys.executable, FAULTS, fault)


@pytest.mark.parametrize(("fault", "said"), SAID.items(), ids=SAID)
def test_what_is_said_of_a_job_that_died(fault: str, said: tuple[str, bool]) -> None:
    """Of the words and the end of a real process; how they come to the judge, the other tests show."""
    if fault == "permission" and os.geteuid() != 0:
        pytest.skip("needs root, to become a user that may not write in root's directory")
    done = subprocess.run(job(fault), capture_output=True, text=True, check=False, timeout=SECONDS)
    notes = notes_of(done.stderr, code=done.returncode if done.returncode >= 0 else 128 - done.returncode)
    verdict = judge(case_of([dataclasses.replace(notes, signal=-done.returncode if done.returncode < 0 else None)]))
    assert (verdict.kind.value, verdict.suspected) == said


def test_output_and_exit_code_are_the_commands_and_the_verdict_comes_after_them(tmp_path: Path) -> None:
    alone = subprocess.run(job("exception"), capture_output=True, text=True, check=False, timeout=SECONDS)
    done = healthd_run(tmp_path, *job("exception"))
    assert (done.code, done.out) == (alone.returncode, alone.stdout)
    assert done.err.startswith(f"{alone.stderr}healthd: why it died: SUSPECTED SOFTWARE")
    assert (done.verdict["kind"], done.verdict["suspected"]) == ("software", True)


def test_good_end_says_nothing(tmp_path: Path) -> None:
    done = healthd_run(tmp_path, sys.executable, "-c", "print('well')")
    assert (done.code, done.out, done.err, done.verdict) == (0, "well\n", "", None)


def namespaced(script: str) -> list[str]:
    """A command in a mount namespace of its own, which is gone with it."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no mount namespace can be made here")
    return [unshare, "-rm", "sh", "-ec", script]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "options"), [("full_file_system", "size=256k"), ("read_only_file_system", "ro,size=256k")]
)
def test_small_and_read_only_file_systems(fault: str, options: str, tmp_path: Path) -> None:
    place = tmp_path / "store"
    place.mkdir()
    script = f"mount -t tmpfs -o {options} none {place}; cd {place}; exec {sys.executable} {FAULTS} {fault}"
    done = healthd_run(tmp_path, *namespaced(script))
    assert (done.verdict["kind"], done.verdict["suspected"]) == ("storage", True)


@pytest.mark.thorough
def test_oom_kill_in_a_control_group(tmp_path: Path) -> None:
    group = memory_group()
    try:
        limit = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        (group / limit).write_text(str(160 * 2**20))
        script = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        said = tmp_path / "verdict.json"
        command = [sys.executable, "-m", "healthd", "run", "--no-measure", "--json-out", str(said), "--"]
        done = subprocess.run(
            ["sh", "-c", script, "sh", *command, *job("memory_of_the_group")],
            env=environment(tmp_path),
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
        verdict = json.loads(said.read_text())
        assert done.returncode == 137
        assert (verdict["kind"], verdict["suspected"], verdict["confidence"]) == ("host", False, "high")
    finally:
        wait_for(lambda: removed(group))


def removed(group: Path) -> bool:
    """The last process of the job's parent leaves the group a moment after its exit."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def memory_group() -> Path:
    """A new control group with a limit of memory below ours."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        controllers = line.split(":", 2)[1]
        if controllers == "" or "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup") / ("" if controllers == "" else "memory")
            group = root / f"healthd-test-{os.getpid()}"
            try:
                group.mkdir()
            except OSError:
                continue
            if any((group / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
                return group
            group.rmdir()
    pytest.skip("no control group with a limit of memory can be made here")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sender", "kind", "code"),
    [("slurmstepd", "stopped", 75), ("torchrun", "unknown", 143)],
)
def test_who_stopped_it_and_what_a_retry_can_do(sender: str, kind: str, code: int, tmp_path: Path) -> None:
    script = (
        "import os,sys; open('/proc/self/comm','w').write(sys.argv[1]); os.kill(int(sys.argv[2]), 15); os.read(0, 1)"
    )
    said = tmp_path / "verdict.json"
    options = ("--no-measure", "--exit-style", "verdict", "--json-out", str(said))
    with prepared.Popen(
        [sys.executable, "-m", "healthd", "run", *options, "--", *job("waits")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=environment(tmp_path),
    ) as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"ready\n")
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", script, sender, str(process.pid)], stdin=subprocess.PIPE
        ) as killer:
            assert process.wait(SECONDS) == code
            killer.kill()
    verdict = json.loads(said.read_text())
    assert (verdict["kind"], verdict["suspected"]) == (kind, False)
    assert any(f"signal 15 from {sender}" in each["text"] for each in verdict["evidence"])


def test_exit_code_says_no_more_than_is_known() -> None:
    def code(kind: Kind, outlook: Outlook, *, suspected: bool, measured: bool) -> int:
        verdict = dataclasses.replace(judge(Case()), kind=kind, outlook=outlook)
        return exit_code(dataclasses.replace(verdict, suspected=suspected, measured=measured))

    assert code(Kind.SOFTWARE, Outlook.NONE, suspected=False, measured=True) == 70
    assert code(Kind.SOFTWARE, Outlook.NONE, suspected=True, measured=True) == 0
    assert code(Kind.HARDWARE, Outlook.ELSEWHERE, suspected=True, measured=True) == 75
    assert code(Kind.STORAGE, Outlook.HERE, suspected=True, measured=True) == 76
    assert code(Kind.HARDWARE, Outlook.ELSEWHERE, suspected=True, measured=False) == 0
    assert code(Kind.HOST, Outlook.HERE, suspected=False, measured=False) == 76
    assert code(Kind.STOPPED, Outlook.STOPPED, suspected=False, measured=False) == 79
    assert code(Kind.UNKNOWN, Outlook.HERE, suspected=False, measured=True) == 0


def test_printed_verdict_is_not_older_than_what_was_measured_here(tmp_path: Path) -> None:
    """An aggregator that asks for a measurement, and does not take it in before the time is over."""
    old = dataclasses.replace(judge(Case()), kind=Kind.SOFTWARE, outlook=Outlook.NONE, name="old", sentence="old")
    told = Told(node="n1", rank=None, code=1, signal=None, ended_at=1.0, measures=True)
    phase = PostmortemPhase.MEASURING
    record = Postmortem(
        gate="g", job="train", attempt=0, phase=phase, first_told_at=1.0, nodes=("n1",), told={"n1": told}, verdict=old
    )
    answer = wire.encode(state_of(record, "n1"))
    gate = b'{"gates": [{"id": "g", "job": "train", "attempt": 0}], "next": null}'

    def of(path: str, body: Any) -> bytes:
        if body and "quick" in str(zlib.decompress(base64.b64decode(body["notes"]))):
            threading.Event().wait(float(path.partition("wait=")[2]))  # as an aggregator that waits for another node
        return answer if body else gate

    with answering(of) as (url, heard):
        options = ("--seconds", "6", "--job", "train", "--node", "n1", "--aggregator", url, "--exit-style", "verdict")
        done = healthd_run(tmp_path, *job("exception"), options=options, env={"HEALTHD_NODE_CHECKS": "shared_memory"})
    assert any("quick" in zlib.decompress(base64.b64decode(body["notes"])).decode() for _, body in heard if body)
    assert "this node is judged alone" in done.err
    assert done.verdict["name"] != "old"
    assert "ValueError" in str(done.verdict["evidence"])


def test_measurement_confirms_a_full_disk_by_the_settings_of_the_caller(tmp_path: Path) -> None:
    config = tmp_path / "healthd.toml"
    config.write_text('[node]\nchecks = ["disk_space"]\n[checks.disk_space]\nmin_available_ratio = 1.0\n')
    done = healthd_run(tmp_path, *job("full_disk"), options=("--seconds", "100", "--config", str(config)))
    assert (done.verdict["kind"], done.verdict["suspected"], done.verdict["confidence"]) == ("storage", False, "high")
    assert (done.code, done.verdict["outlook"]) == (1, "retry here")


@pytest.mark.thorough
def test_measurement_refutes_a_device(tmp_path: Path) -> None:
    text = "RuntimeError: CUDA error: device-side assert triggered"
    done = healthd_run(
        tmp_path, sys.executable, "-c", f"import sys; sys.exit({text!r})", options=("--seconds", "100"),
        env={"HEALTHD_NODE_CHECKS": "shared_memory,digest"},
    )  # fmt: skip
    assert (done.verdict["kind"], done.verdict["suspected"]) == ("software", False), done.verdict["measurement"]
    assert "healthd: measuring the devices of " in done.err


def test_words_in_log_files_count_and_those_of_an_earlier_job_do_not(tmp_path: Path) -> None:
    notes = notes_of("", at=time.time())
    old, new = tmp_path / "old.log", tmp_path / "rank-3.log"
    old.write_text("OSError: [Errno 28] No space left on device\n")
    os.utime(old, (1e9, 1e9))
    new.write_text("json.decoder.JSONDecodeError: Expecting value\n")
    verdict = judge(case_of([complete(notes, [str(tmp_path / "*.log")])]))
    assert (verdict.kind, verdict.rank) == (Kind.DATA, 3)


def test_dump_that_names_code_is_refused_and_said(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    dump = tmp_path / "fr_0"
    dump.write_bytes(pickle.dumps({"entries": [Bad()]}))
    place = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "fr_")}
    notes = complete(dataclasses.replace(notes_of("", at=time.time()), environment=place), [])
    why = "not a Flight Recorder dump: UnpicklingError: it refers to posix.mkdir"
    assert any(line.startswith(f"{dump}: {why}") for line in notes.unread)
    assert not (tmp_path / "made").exists()


def test_retry_examples_of_the_page_go_by_the_exit_codes() -> None:
    page = (Path(__file__).parent.parent.parent / "docs/postmortem.md").read_text()
    (batch,) = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL))
    retried = {int(rule["onExitCode"]) for rule in batch["evaluateOnExit"] if "onExitCode" in rule}
    assert retried == {EXIT_CODES["retry here"], EXIT_CODES["retry elsewhere"]}
    assert batch["evaluateOnExit"][-1] == {"onReason": "*", "action": "EXIT"}
    (pods,) = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    by_code = {code: rule["action"] for rule in pods["rules"] for code in rule.get("onExitCodes", {}).get("values", [])}
    outlooks = {outlook: by_code[code] for outlook, code in EXIT_CODES.items()}
    assert outlooks == {
        "retry elsewhere": "Ignore",
        "retry here": "Count",
        "do not retry": "FailJob",
        "stopped": "FailJob",
    }
    assert all(f"| {code} | {outlook} |" in page for outlook, code in EXIT_CODES.items())
    assert {each.value for each in Outlook} == set(EXIT_CODES)


def test_error_file_of_torch_counts(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": {"message": "ValueError: x", "extraInfo": {"timestamp": "1"}}}))
    place = {"TORCHELASTIC_ERROR_FILE": str(file), "RANK": "5"}
    notes = complete(dataclasses.replace(notes_of("", at=time.time()), environment=place), [])
    verdict = judge(case_of([notes]))
    assert (verdict.kind, verdict.rank) == (Kind.SOFTWARE, 5)


def test_the_aggregator_learns_of_a_good_end(tmp_path: Path) -> None:
    with answering(lambda *_: b'{"gates": [], "next": null}') as (url, heard):
        options = ("--no-measure", "--job", "train", "--attempt", "3")
        done = healthd_run(tmp_path, sys.executable, "-c", "", options=options, env={"HEALTHD_AGGREGATOR": url})
    assert done.code == 0
    assert "train" in heard[0][0]


def test_what_is_told_of_each_kind() -> None:
    def told(kind: Kind, outlook: Outlook, *, suspected: bool = False) -> str | None:
        verdict = judge(Case())
        return outcome_word(dataclasses.replace(verdict, kind=kind, outlook=outlook, suspected=suspected))

    assert told(Kind.HARDWARE, Outlook.ELSEWHERE) == "infra"
    assert told(Kind.HOST, Outlook.ELSEWHERE) == "infra"
    assert told(Kind.HOST, Outlook.HERE) == "failed"
    assert told(Kind.SOFTWARE, Outlook.NONE) == "failed"
    assert told(Kind.HARDWARE, Outlook.ELSEWHERE, suspected=True) is None
    assert told(Kind.STOPPED, Outlook.ELSEWHERE) is None
    assert told(Kind.UNKNOWN, Outlook.HERE) is None


def test_usage_is_told_before_the_command_is_started(tmp_path: Path) -> None:
    for options, words in (
        (("--seconds", "0"), "--seconds 0 must be between 1 and 3600"),
        (
            ("--notes-dir", str(tmp_path / "none")),
            f"--notes-dir: no such directory: {tmp_path / 'none'}; create it first",
        ),
    ):
        done = healthd_run(tmp_path, "touch", str(tmp_path / "started"), options=options)
        assert (done.code, done.err) == (2, f"healthd: {words}\n")
    assert not (tmp_path / "started").exists()


@pytest.mark.thorough
def test_what_cannot_be_read_as_notes_is_one_clear_line(tmp_path: Path) -> None:
    for content in (b"", b"{}", b"[]", b'{"version": 2}'):
        with pytest.raises(BadInputError, match=r"^n1\.json: "):
            read_notes(content, "n1.json")
    bad = tmp_path / "n1.json"
    bad.write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "healthd", "postmortem", str(bad)],
        capture_output=True, text=True, env=environment(tmp_path), check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"healthd: {bad}: ")
    assert done.stderr.count("\n") == 1


def test_signal_during_the_post_mortem_ends_it_with_the_commands_code(tmp_path: Path) -> None:
    def explains() -> bool:
        with contextlib.suppress(OSError):  # it may just have ended
            return any(b"postmortem\0" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(process.pid))
        return False

    script = "echo CUDA error: unknown error; exit 9"
    with prepared.Popen(
        [sys.executable, "-m", "healthd", "run", "--seconds", "600", "--", "sh", "-c", script],
        stdout=subprocess.DEVNULL,
        env=environment(tmp_path),
    ) as process:
        wait_for(explains)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 9
