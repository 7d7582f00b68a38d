"""The reporter in the job: never blocks, never raises, costs little, needs no daemon and nothing but Python."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from healthd.integrations.steps.datagram import RankEnd, StepReport, parse, parse_end
from healthd_steps import StepReporter
from healthd_steps.callbacks import LightningCallback, TrainerCallback
from tests import prepared
from tests.job import IN_A_JOB


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[socket.socket]:
    """The daemon's end of the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as found:
        found.bind(str(tmp_path / "steps.sock"))
        yield found


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[StepReporter]:
    """A rank's reporter, which finds the daemon where there is one."""
    found = StepReporter(job="train 1", rank=2, size=4, path=str(tmp_path / "steps.sock"))
    yield found
    found.close()


def received(daemon: socket.socket) -> StepReport:
    found = parse(daemon.recv(4096))
    assert found is not None
    return found


def test_step_is_reported_with_own_time_apart_from_waiting(daemon: socket.socket, mine: StepReporter) -> None:
    mine.begin()
    time.sleep(0.01)
    with mine.waiting:
        time.sleep(0.05)
    mine.end(7, work=4096)
    found = received(daemon)
    assert (found.job, found.rank, found.size, found.step, found.work) == ("train_1", 2, 4, 7, 4096.0)
    assert found.own_seconds >= 0.01
    assert found.wait_seconds >= 0.05
    mine.begin()
    mine.ready()
    time.sleep(0.02)
    mine.end(8)
    found = received(daemon)
    assert found.wait_seconds >= 0.02
    assert found.work is None


def test_job_goes_on_where_no_daemon_is_and_finds_one_that_comes(tmp_path: Path, mine: StepReporter) -> None:
    for step in range(100):
        mine.report(step, 0.1, 0.0)
    assert mine.dropped == 100
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as daemon:
        daemon.bind(str(tmp_path / "steps.sock"))
        mine._retry_at = 0.0  # five seconds later
        mine.report(100, 0.1, 0.0)
        assert received(daemon).step == 100
    mine.report(101, 0.1, 0.0)  # the daemon is gone
    assert mine.dropped == 101


def test_daemon_that_reads_nothing_holds_nobody_up(daemon: socket.socket, mine: StepReporter) -> None:
    begun = time.monotonic()
    for step in range(5000):
        mine.report(step, 0.1, 0.0)
    assert time.monotonic() - begun < 2
    assert mine.dropped > 0
    assert received(daemon).step == 0


def test_environment_says_who_reports(daemon: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEALTHD_STEPS_SOCKET", str(tmp_path / "steps.sock"))
    monkeypatch.setenv("HEALTHD_JOB", "j")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = StepReporter()
    found.report(1, 0.5, 0.25)
    found.close()
    assert received(daemon) == StepReport("j", 5, 8, 1, 0.5, 0.25, None)


def test_import_brings_neither_torch_nor_the_service() -> None:
    code = (
        "before = set(sys.modules); import healthd_steps, healthd_steps.callbacks\n"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "    - set(sys.stdlib_module_names)), 'asyncio' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", IN_A_JOB + code], capture_output=True, text=True, check=True)
    assert done.stdout == "['healthd_steps'] False\n"


def test_callbacks_report_the_steps_of_their_frameworks(daemon: socket.socket, mine: StepReporter) -> None:
    """Called as Lightning 2 and transformers 4 call theirs: with every hook there is."""
    light = LightningCallback(mine)
    trainer = SimpleNamespace(global_step=11)
    light.setup(trainer, None, stage="fit")
    light.on_fit_start(trainer, None)
    light.on_train_batch_start(trainer, None, object(), 3)
    light.on_before_optimizer_step(trainer, None, None)
    light.on_train_batch_end(trainer, None, object(), object(), 3)
    assert received(daemon).step == 11
    assert light.state_dict() == {}
    face = TrainerCallback(mine)
    state = SimpleNamespace(global_step=12)
    face.on_init_end(None, state, None)
    face.on_step_begin(None, state, None, model=None)
    face.on_step_end(None, state, None, model=None)
    assert received(daemon).step == 12


def test_a_fork_of_the_job_does_not_confuse_the_reports(daemon: socket.socket, mine: StepReporter) -> None:
    """Data loaders fork the process; the child has the socket too, and uses it for nothing."""
    mine.report(1, 0.1, 0.0)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    mine.report(2, 0.1, 0.0)
    assert [received(daemon).step, received(daemon).step] == [1, 2]


END = (
    IN_A_JOB
    + """
import os, sys
from healthd_steps import StepReporter
reporter = StepReporter(job="j", rank=3, size=4, path=sys.argv[1])
reporter.report(1, 0.1, 0.0)
if os.fork() == 0:
    sys.exit()  # a child of the rank ends as any program does, and is not the rank
os.wait()
reporter.report(2, 0.1, 0.0)
"""
)


def test_the_end_of_the_rank_is_said_once_by_close_by_the_frameworks_and_by_the_process(
    daemon: socket.socket, tmp_path: Path, mine: StepReporter
) -> None:
    mine.close()  # nothing was reported
    mine.report(1, 0.1, 0.0)
    mine.close()
    mine.close()
    LightningCallback(mine).on_train_end(None, None)
    mine.report(2, 0.1, 0.0)  # a second training in the same process
    TrainerCallback(mine).on_train_end(None, None, None, model=None)
    said = [daemon.recv(512) for _ in range(4)]
    assert [parse_end(one) for one in said] == [None, RankEnd("train_1", 2), None, RankEnd("train_1", 2)]
    subprocess.run([sys.executable, "-c", END, str(tmp_path / "steps.sock")], check=True, timeout=60)
    said = [daemon.recv(512) for _ in range(3)]
    assert [parse_end(one) for one in said] == [None, None, RankEnd("j", 3)]
    with pytest.raises(BlockingIOError):
        daemon.recv(512)


DDP = (
    IN_A_JOB
    + """
import os, sys, time, warnings
warnings.simplefilter("ignore")
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from healthd_steps import StepReporter
from healthd_steps.callbacks import gradient_hook
rank, path, meet = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.init_process_group("gloo", init_method="file://" + meet, rank=rank, world_size=2)
reporter = StepReporter(job="ddp", rank=rank, size=2, path=path)

def gradients(hooked):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model = DistributedDataParallel(layers)
    if hooked:
        model.register_comm_hook(model.process_group, gradient_hook(reporter))
    for step in range(4):
        torch.manual_seed(100 * step + rank)
        model.zero_grad()
        if hooked:
            reporter.begin()
        time.sleep(0.5 * rank)
        model(torch.randn(8, 64)).sum().backward()
        reporter.end(step)
    return [parameter.grad.clone() for parameter in model.parameters()]

plain, hooked = gradients(False), gradients(True)
assert all(torch.equal(a, b) for a, b in zip(plain, hooked))
distributed.destroy_process_group()
"""
)


def test_hook_of_gradients_averages_as_the_default_and_tells_waiting_from_own_work(
    daemon: socket.socket, tmp_path: Path
) -> None:
    path = str(tmp_path / "steps.sock")
    ranks = [
        prepared.ScriptPopen(
            [sys.executable, "-c", DDP, str(rank), path, str(tmp_path / "meet")], stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
    said = [daemon.recv(512) for _ in range(10)]  # of each rank four steps and its end
    found = [one for text in said if (one := parse(text)) is not None]
    assert len(found) == 8
    hooked = {rank: [one for one in found if one.rank == rank] for rank in range(2)}
    # Rank 1 comes half a second later in each step; rank 0 waits for it, and is not slower by its own time. In the
    # forward pass of the second step all ranks agree on new buckets, which is a wait that no hook sees.
    own = {rank: sum(one.own_seconds for one in told if one.step >= 2) for rank, told in hooked.items()}
    wait = {rank: sum(one.wait_seconds for one in told if one.step >= 2) for rank, told in hooked.items()}
    assert own[1] > own[0] + 0.3, (own, wait)
    assert wait[0] > wait[1] + 0.3, (own, wait)
