"""The parent of a command is transparent: bytes, terminal, signals and exit code are as without it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from healthd.postmortem.catalogue import SIGNATURES, Kind, Strength
from healthd.postmortem.judge import judge
from healthd.postmortem.notes import Words, case_of, pack, unpack
from healthd.postmortem.parent import KEPT_BYTES, MAX_CHUNKS, RELEVANT_BYTES, Stream, is_relevant
from tests.aggregator.postmortems_kit import notes_of as notes_of_text
from tests.patience import PATIENCE
from tests.postmortem.case_kit import WATCHDOG
from tests.postmortem.parent_kit import children, end, read_until, wait_for

PARENT = Path(__file__).parent.parent.parent / "healthd/postmortem/parent.py"
SHELL_CODES = {"exit 0": 0, "exit 7": 7, "kill -TERM $$": 143, "kill -KILL $$": 137, "kill -SEGV $$": 139}
KEEP = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"


def line(*command: str, **options: object) -> list[str]:
    return [sys.executable, "-I", "-S", str(PARENT), json.dumps(options), "--", *command]


def run(*command: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(line(*command), capture_output=True, timeout=20 * PATIENCE, check=False, **more)


def notes_of(tmp_path: Path, *command: str, **more: Any) -> Any:
    """What the parent notes of a command that it ran to the end."""
    file = tmp_path / "notes.json"
    explain = [sys.executable, "-I", "-S", "-c", KEEP, str(file)]
    subprocess.run(line(*command, explain=explain, always=True), check=False, timeout=20 * PATIENCE, **more)
    return json.loads(file.read_text())


@contextlib.contextmanager
def started(*command: str, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A parent with pipes, which is gone at the end, and whose command is too."""
    with subprocess.Popen(
        line(*command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, **more
    ) as process:
        try:
            yield process
        finally:
            end(process)


@pytest.mark.parametrize(("script", "code"), SHELL_CODES.items())
def test_exit_code_is_the_commands(script: str, code: int) -> None:
    assert run("sh", "-c", script).returncode == code


def test_command_that_is_not_there_and_one_that_cannot_be_executed(tmp_path: Path) -> None:
    missing, folder = run("no-such-command"), run(str(tmp_path))
    assert (missing.returncode, missing.stderr) == (127, b"healthd: no-such-command: no such command\n")
    assert (folder.returncode, folder.stderr) == (126, f"healthd: {tmp_path}: Permission denied\n".encode())


def test_bytes_pass_unchanged_on_both_streams() -> None:
    script = (
        "import os,random,sys\n"
        "for number, seed in ((1, 1), (2, 2)):\n"
        "    data = random.Random(seed).randbytes(3_000_001)\n"
        "    while data: data = data[os.write(number, data[:70_001]):]\n"
    )
    alone = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    done = run(sys.executable, "-c", script)
    assert len(done.stdout) == 3_000_001
    assert [hashlib.sha256(text).hexdigest() for text in (done.stdout, done.stderr)] == [
        hashlib.sha256(text).hexdigest() for text in (alone.stdout, alone.stderr)
    ]


def test_order_of_both_streams_is_kept_where_they_are_one_pipe() -> None:
    script = "i=0; while [ $i -lt 500 ]; do echo out $i; echo err $i >&2; i=$((i+1)); done"
    done = subprocess.run(
        line("sh", "-c", script), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20 * PATIENCE, check=True
    )
    assert done.stdout == b"".join(b"out %d\nerr %d\n" % (number, number) for number in range(500))


def test_standard_input_is_the_commands() -> None:
    assert run("cat", input=b"\x00\xff" * 100_000).stdout == b"\x00\xff" * 100_000


def test_reader_that_goes_away_ends_the_command_as_it_would_alone() -> None:
    with started("sh", "-c", "yes; echo $? >&2") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        read_until(process.stdout.fileno(), b"y\n")
        process.stdout.close()
        assert read_until(process.stderr.fileno(), b"\n") in (b"141\n", b"yes: standard output: Broken pipe\n1\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGRTMIN])
def test_signals_are_passed_on(number: signal.Signals) -> None:
    script = (
        "import signal,sys\n"
        f"signal.signal({int(number)}, lambda n, _: (print('got', n, flush=True), sys.exit(9)))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    with started(sys.executable, "-c", script) as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"ready\n")
        process.send_signal(number)
        read_until(process.stdout.fileno(), b"got %d\n" % number)
        assert process.wait(20 * PATIENCE) == 9


def test_signal_to_stop_reaches_what_the_command_leaves_behind_and_is_waited_for() -> None:
    """As below torchrun, each of whose ranks has a session of its own."""
    rank = (
        "import os,signal\n"
        "signal.signal(15, lambda *_: (os.write(1, b'rank got 15\\n'), os.read(0, 1), os._exit(0)))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    launcher = (
        "import subprocess,sys\n"
        f"subprocess.Popen([sys.executable, '-I', '-S', '-c', {rank!r}], start_new_session=True).wait()\n"
    )
    with started(sys.executable, "-I", "-S", "-c", launcher) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"ready\n")
        process.terminate()
        read_until(process.stdout.fileno(), b"rank got 15\n")
        assert process.poll() is None, "its lease must not end while a rank is left"
        process.stdin.write(b"x")
        assert process.wait(20 * PATIENCE) == 143


@pytest.mark.parametrize("files", [6, 10])
def test_command_is_started_also_where_few_files_may_be_open(files: int) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    done = run("sh", "-c", "echo hello; exit 7", preexec_fn=limited)
    assert (done.returncode, done.stdout) == (7, b"hello\n")
    assert b"the output of the command is not read: Too many open files" in done.stderr
    assert run("no-such-command", preexec_fn=limited).returncode == 127


def test_command_has_a_group_of_its_own_and_the_signals_of_its_caller() -> None:
    script = (
        "import os,signal\n"
        "print(os.getpgrp() == os.getpid(), sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))\n"
        "print([row.split()[1] for row in open('/proc/self/status') if row.startswith('SigIgn')])\n"
        "print(os.listdir('/proc/self/fd'))\n"
    )
    out = run(sys.executable, "-I", "-c", f"import signal; signal.signal(13, signal.SIG_DFL)\n{script}").stdout.decode()
    alone = subprocess.run(
        [sys.executable, "-I", "-c", f"import signal; signal.signal(13, signal.SIG_DFL)\n{script}"],
        capture_output=True,
        text=True,
        start_new_session=True,
        check=True,
    ).stdout
    assert out == alone


def test_killed_parent_leaves_the_command_running_and_its_output_flowing() -> None:
    script = "import sys\nprint('ready', flush=True)\nsys.stdin.readline()\nprint('x' * 500_000, 'done', flush=True)"
    with started(sys.executable, "-c", script) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"ready\n")
        process.kill()
        assert process.wait(20 * PATIENCE) == -9
        process.stdin.write(b"go\n")
        assert len(read_until(process.stdout.fileno(), b"done\n")) == 500_006
        assert os.read(process.stdout.fileno(), 1) == b""  # and who stood by has ended too


def test_descendant_that_outlives_the_command_keeps_its_output() -> None:
    with started("sh", "-c", "exec 3<&0; (read x <&3; echo late $x) & exit 4") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.wait(20 * PATIENCE) == 4
        process.stdin.write(b"word\n")
        assert read_until(process.stdout.fileno(), b"\n") == b"late word\n"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Screen:
    """A terminal with a parent in it, as a person's shell would start it."""

    def __init__(self, *command: str) -> None:
        self.master, slave = os.openpty()
        termios.tcsetwinsize(slave, (33, 77))
        self.before = termios.tcgetattr(slave)
        script = f"import os,sys,termios,fcntl;fcntl.ioctl(0,{termios.TIOCSCTTY},0);os.execv(sys.argv[1],sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", script, *line(*command)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        self.slave = slave

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process)
        self.process.wait()
        os.close(self.slave)
        os.close(self.master)


def test_terminal_is_one_for_the_command_with_its_size_and_is_left_as_it_was() -> None:
    script = (
        "import os,sys\n"
        "print([os.isatty(n) for n in (0, 1, 2)], os.get_terminal_size(), flush=True)\n"
        "print(repr(input()), flush=True)\n"
    )
    with Screen(sys.executable, "-c", script) as screen:
        said = read_until(screen.master, b"\n")
        assert said == b"[True, True, True] os.terminal_size(columns=77, lines=33)\r\n"
        os.write(screen.master, b"hello\n")
        read_until(screen.master, b"'hello'\r\n")
        assert screen.process.wait(20 * PATIENCE) == 0
        assert termios.tcgetattr(screen.slave) == screen.before


def test_interrupt_typed_at_the_terminal_reaches_the_command_once() -> None:
    script = (
        "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [2])\n"
        "print('ready', flush=True)\n"
        "signal.sigwait([2]); print('interrupted', flush=True)\n"
        "print('left:', signal.sigpending(), flush=True)\n"
    )
    with Screen(sys.executable, "-c", script) as screen:
        read_until(screen.master, b"ready\r\n")
        os.write(screen.master, b"\x03")
        assert b"interrupted" in read_until(screen.master, b"left: set()\r\n")
        assert screen.process.wait(20 * PATIENCE) == 0


def test_new_size_of_the_terminal_reaches_the_command() -> None:
    script = (
        "import os,signal\n"
        "signal.signal(signal.SIGWINCH, lambda *_: print(os.get_terminal_size().columns, flush=True))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    with Screen(sys.executable, "-c", script) as screen:
        read_until(screen.master, b"ready\r\n")
        termios.tcsetwinsize(screen.slave, (20, 123))
        read_until(screen.master, b"123\r\n")


def test_command_that_is_stopped_at_the_terminal_stops_its_parent_and_goes_on_with_it() -> None:
    with Screen("sh", "-c", "echo ready; read x; echo went on") as screen:
        read_until(screen.master, b"ready\r\n")
        os.write(screen.master, b"\x1a")
        wait_for(lambda: state_of(screen.process.pid) == "T")
        assert termios.tcgetattr(screen.slave) == screen.before
        screen.process.send_signal(signal.SIGCONT)
        os.write(screen.master, b"\n")
        read_until(screen.master, b"went on\r\n")
        assert screen.process.wait(20 * PATIENCE) == 0


def test_terminal_of_a_killed_parent_is_restored() -> None:
    with Screen("sh", "-c", "echo ready; sleep 0.2; echo done") as screen:
        read_until(screen.master, b"ready\r\n")
        assert termios.tcgetattr(screen.slave) != screen.before
        screen.process.kill()
        read_until(screen.master, b"done")
        assert termios.tcgetattr(screen.slave) == screen.before


def test_notes_say_how_it_ended_and_its_last_words(tmp_path: Path) -> None:
    noted = notes_of(tmp_path, "sh", "-c", "echo first; echo last >&2; kill -KILL $$", env={**os.environ, "RANK": "3"})
    assert (noted["code"], noted["signal"], noted["environment"]["RANK"]) == (137, 9, "3")
    said = {stream["name"]: "".join(text for _, text in stream["chunks"]) for stream in noted["streams"]}
    assert said == {"stdout": "first\n", "stderr": "last\n"}
    (at, _), *_ = noted["streams"][0]["chunks"]
    assert noted["started"] <= at <= noted["ended"]


def test_last_words_are_bounded(tmp_path: Path) -> None:
    noted = notes_of(tmp_path, "sh", "-c", "yes | head -c 5000000; echo the end", stdout=subprocess.DEVNULL)
    (stream,) = [stream for stream in noted["streams"] if stream["name"] == "stdout"]
    kept = "".join(text for _, text in stream["chunks"])
    assert stream["bytes"] == 5_000_008
    assert KEPT_BYTES <= len(kept) < KEPT_BYTES + 2**17
    assert kept.endswith("the end\n")


def test_cause_is_kept_below_megabytes_of_what_other_ranks_print_when_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream("stderr", 0, 1)
    now = 1e9
    monkeypatch.setattr(time, "time", lambda: now)
    for step in range(4000):
        now += 1.0
        stream.keep(f"step {step} | loss 1.92 | lr 3.0e-04 | 41.2% MFU\n".encode() * 4)
    cause = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: bad batch\n'
    stream.keep(cause.encode())
    now += 600.0
    for rank in range(64):
        frames = "".join(f"frame #{n}: c10d::ProcessGroupNCCL::watchdogHandler() + 0x890 (0x7f5a)\n" for n in range(40))
        for each in WATCHDOG:
            stream.keep(f"[rank{rank}]:{each.format(rank)}\n{frames}".encode())
    noted: Any = stream.noted()
    size = sum(len(text) for _, text in noted["chunks"])
    assert size <= KEPT_BYTES + RELEVANT_BYTES + 2**17
    words = Words(name="stderr", bytes=stream.bytes, chunks=tuple((at, text) for at, text in noted["chunks"]))
    notes = dataclasses.replace(notes_of_text(""), streams=(words,))
    for kept in (notes, unpack(pack(dataclasses.replace(notes, environment={"RANK": "0", "WORLD_SIZE": "1"})), "n")):
        verdict = judge(case_of([kept]))
        assert (verdict.kind, verdict.evidence[0].text) == (Kind.SOFTWARE, "ValueError: bad batch")


def test_what_the_job_survived_is_told_also_where_its_steps_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream("stderr", 0, 1)
    now = 1e9
    monkeypatch.setattr(time, "time", lambda: now)
    stream.keep(b"OSError: [Errno 28] No space left on device\n")
    for step in range(4000):
        now += 1.0
        stream.keep(f"step {step} | loss 1.92 | lr 3.0e-04 | 41.2% MFU\n".encode() * 4)
    stream.keep(b"KeyError: 'labels'\n")
    stream.keep(b"[rank1]: Fatal Python error: Aborted\n" * 8000)
    noted: Any = stream.noted()
    words = Words(name="stderr", bytes=0, chunks=tuple((at, text) for at, text in noted["chunks"]))
    verdict = judge(case_of([dataclasses.replace(notes_of_text(""), streams=(words,))]))
    assert (verdict.kind, verdict.evidence[0].text) == (Kind.SOFTWARE, "KeyError: 'labels'")


def test_lines_of_every_signature_are_kept() -> None:
    for signature in SIGNATURES:
        for text in () if signature.kernel or signature.strength is Strength.MENTION else signature.examples:
            assert is_relevant(text.encode()), text


def test_words_that_come_one_by_one_for_days_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream("stdout", 0, 1)
    moments = itertools.count(1e9)
    monkeypatch.setattr(time, "time", lambda: next(moments))
    for _ in range(3 * MAX_CHUNKS):
        stream.keep(b".")
    chunks: Any = stream.noted()["chunks"]
    assert len(chunks) <= MAX_CHUNKS + 1  # and the beginning of the line that has not ended
    assert stream.bytes == 3 * MAX_CHUNKS


def test_notes_say_who_sent_a_signal(tmp_path: Path) -> None:
    file = tmp_path / "notes.json"
    explain = [sys.executable, "-I", "-S", "-c", KEEP, str(file)]
    with subprocess.Popen(
        line("sh", "-c", "echo ready; read x", explain=explain), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"ready\n")
        process.terminate()
        assert process.wait(20 * PATIENCE) == 143
    (told,) = json.loads(file.read_text())["signals"]
    assert (told["signal"], told["pid"], told["uid"]) == (15, os.getpid(), os.getuid())


def test_buffer_of_collectives_is_set_only_where_it_is_unset() -> None:
    script = "echo ${TORCH_FR_BUFFER_SIZE-none}"
    assert run("sh", "-c", script).stdout == b"2000\n"
    own = {**os.environ, "TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}
    assert run("sh", "-c", script, env=own).stdout == b"none\n"


def test_explanation_is_bounded_and_a_signal_ends_it() -> None:
    sleep = [sys.executable, "-I", "-S", "-c", "import sys,time; print('begun', flush=True); time.sleep(600)"]
    quick = subprocess.run(line("false", explain=sleep, seconds=0.2), capture_output=True, timeout=20, check=False)
    assert quick.returncode == 1
    with subprocess.Popen(line("false", explain=sleep), stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        read_until(process.stderr.fileno(), b"begun\n")
        process.terminate()
        assert process.wait(20 * PATIENCE) == 1


@pytest.mark.parametrize(("said", "code", "own"), [(75, 75, 3), (0, 3, 3), (1, 1, 75)])
def test_exit_code_of_a_verdict(said: int, code: int, own: int) -> None:
    explain = [sys.executable, "-I", "-S", "-c", f"raise SystemExit({said})"]
    options = {"explain": explain, "verdict_codes": [70, 75, 76, 79]}
    assert subprocess.run(line("sh", "-c", f"exit {own}", **options), timeout=20, check=False).returncode == code


def test_it_is_small_and_idle_while_the_command_runs() -> None:
    with started("sh", "-c", "echo ready; read x") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"ready\n")
        both = [process.pid, *children(process.pid)]
        ours = [pid for pid in both if "parent.py" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(ours) == 2
        assert sum(memory_of(pid) for pid in ours) < 20 * 2**20

        # The busy time of threads that wait is none: none of them wakes up by itself.
        def wakes() -> bool:
            before = [switches(pid) for pid in ours]
            time.sleep(0.5)
            return [switches(pid) for pid in ours] != before

        wait_for(lambda: not wakes())
        process.stdin.write(b"\n")
        assert process.wait(20 * PATIENCE) == 0


def memory_of(pid: int) -> int:
    """The memory of a process, of what it shares its part."""
    rolled = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(row.split()[1]) * 1024 for row in rolled.splitlines() if row.startswith("Pss:"))


def switches(pid: int) -> int:
    """How often the threads of a process have waited."""
    told = [Path(f"{task}/status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(row.split()[1]) for text in told for row in text.splitlines() if row.startswith("voluntary"))


def test_writing_where_nobody_reads_is_no_error_of_ours() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(line("no-such-command"), stderr=writing, timeout=20, check=False)
    finally:
        os.close(writing)
    assert done.returncode == 127
