"""What is to be found on a node: NCCL's RAS, by a server that speaks its protocol, and Neuron's core dumps."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from healthd.postmortem import collect
from healthd.postmortem.collect import MAX_RAS_BYTES, complete, read_ras
from healthd.postmortem.notes import RAS, Notes, case_of
from tests.aggregator.postmortems_kit import notes_of

# As NCCL 2.28 prints it, shortened; a rank has left the communicator.
STATUS = """NCCL version 2.28.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          2            1          2        2

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         2         2         2   RUNNING  INCOMPLETE

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 24401 on node 127.0.0.1 managing GPU 1
"""


@contextlib.contextmanager
def server(hello: bytes, status: bytes, *, stays: bool = False) -> Iterator[tuple[int, list[bytes]]]:
    """A program at a port that says `hello` to the first line and `status` to the second."""
    asked: list[bytes] = []
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                line, _ = listener.accept()
                with line, line.makefile("rb") as words:
                    asked.append(words.readline())
                    line.sendall(hello)
                    asked.append(words.readline())
                    line.sendall(status)
                    if stays:
                        over.wait(30)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1], asked
        over.set()
        thread.join(10)


def found(notes: Notes) -> Notes:
    return complete(notes, ())


def test_the_status_of_nccl_is_noted_and_not_judged() -> None:
    with server(b"SERVER PROTOCOL 2\n", STATUS.encode()) as (port, asked):
        notes = found(dataclasses.replace(notes_of("step 1\n"), environment={"NCCL_RAS_ADDR": f"127.0.0.1:{port}"}))
    assert asked == [b"CLIENT PROTOCOL 2\n", b"VERBOSE STATUS\n"]
    (ras,) = (words for words in notes.files if words.name == RAS)
    assert ras.chunks[0][1] == STATUS
    assert not any(line.source == RAS for line in case_of([notes]).lines)


def test_without_nccl_nobody_is_asked_and_where_nothing_lives_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(b"SERVER PROTOCOL 2\n", STATUS.encode()) as (port, asked):
        monkeypatch.setattr(collect, "RAS_ADDRESS", f"127.0.0.1:{port}")
        assert not found(notes_of("step 1\n")).files
        off = dataclasses.replace(notes_of("NCCL WARN x\n"), environment={"NCCL_RAS_ENABLE": "0"})
        assert not found(off).files
        assert asked == []
        assert found(notes_of("NCCL WARN x\n")).files
    gone = dataclasses.replace(notes_of("NCCL WARN x\n"), environment={"NCCL_RAS_ADDR": f"127.0.0.1:{port}"})
    notes = found(gone)
    assert not notes.files
    assert not any("RAS" in line for line in notes.unread)


def test_another_program_at_the_port_is_said_and_one_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(b"220 mail.example ESMTP\r\n", b"") as (port, _):
        notes = found(dataclasses.replace(notes_of(""), environment={"NCCL_RAS_ADDR": f"127.0.0.1:{port}"}))
    assert any("does not speak NCCL's RAS protocol" in line for line in notes.unread)
    with server(b"SERVER PROTOCOL 2\n", b"x" * 2 * MAX_RAS_BYTES) as (port, _):
        assert len(read_ras("127.0.0.1", port)) == MAX_RAS_BYTES
    monkeypatch.setattr(collect, "RAS_SECONDS", 0.3)
    with server(b"SERVER PROTOCOL 2\n", b"Job summary\n", stays=True) as (port, _):
        assert read_ras("127.0.0.1", port) == "Job summary\n"


def test_logs_in_core_dumps_of_neuron_are_read_and_those_of_an_earlier_job_are_not(tmp_path: Path) -> None:
    line = "2026-Nov-26 05:53:46.250 4711:4711 ERROR NRT:nrt_infodump  status=1201 NRT_EXEC_HW_ERR_HBM_UE\n"
    now = time.time()
    for folder, at in (("dt-20261126-cid-1", now), ("dt-20261125-cid-9", now - 9e4)):
        file = tmp_path / "dumps" / folder / "i-0123" / "nrt-i-0123-pid-4711.log"
        file.parent.mkdir(parents=True)
        file.write_text(line)
        os.utime(file, (at, at))
    place = {"NEURON_RT_LOCAL_CORE_DUMP_DIRECTORY": str(tmp_path / "dumps" / "dt-%d-cid-%c")}
    notes = found(dataclasses.replace(notes_of("", at=now), environment=place))
    assert [words.name.split("/")[-3] for words in notes.files] == ["dt-20261126-cid-1"]
    off = {"NEURON_RT_LOCAL_CORE_DUMP_DIRECTORY": ""}
    assert not found(dataclasses.replace(notes_of("", at=now), environment=off)).files
