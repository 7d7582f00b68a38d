"""The node health hook of NVRx over real gRPC, read as its client reads it; the messages are encoded by the kit."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from checks.contract import Status, Tier
from healthd.core.errors import ConfigError, HealthdError
from healthd.core.model import Quarantine
from healthd.integrations.nvrx.hook import MAX_FAILURES, health_hook, response
from healthd.integrations.nvrx.settings import NvrxSettings
from healthd.node.protobuf import fields
from healthd.node.state.store import NodeStore
from tests.node.allocation_kit import field
from tests.node.node_api_kit import healthy, node
from tests.node.node_daemon_kit import until
from tests.node.node_kit import MovedClock, finding, lease, result

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install grpcio")

CALL = "/nvhcd.HealthCheckService/RunHealthCheck"
REQUEST = field(1, "--no-slurm")  # what the client sends
pytestmark = pytest.mark.anyio


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose name leaves room for a socket's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


def read(answer: bytes) -> dict[str, Any]:
    """The response's fields as the generated code has them: what is missing is false, 0 or empty."""
    found: dict[int, Any] = dict(fields(answer))
    texts = {number: found.get(number, b"").decode() for number in (3, 4)}
    return {
        "success": bool(found.get(1, 0)),
        "exit_code": found.get(2, 0),
        "output": json.loads(texts[3]),
        "error": texts[4],
    }


def taken_for_healthy(told: dict[str, Any]) -> bool:
    """As NodeHealthCheck of nvidia_resiliency_ext decides."""
    return told["success"] and told["output"].get("fail_count") == 0


def ask(path: Path, seconds: float = 20.0) -> dict[str, Any]:
    with grpc.insecure_channel(f"unix://{path}") as channel:
        return read(channel.unary_unary(CALL)(REQUEST, timeout=seconds))


async def served(store: NodeStore, settings: NvrxSettings) -> dict[str, Any]:
    async with health_hook(store, settings, stop_seconds=1.0):
        assert settings.socket is not None
        assert stat.S_IMODE(os.stat(settings.socket).st_mode) == 0o666, "launchers are other users"
        return await anyio.to_thread.run_sync(ask, settings.socket)


async def test_healthy_node_is_taken_for_healthy(folder: Path) -> None:
    told = await served(healthy(folder), NvrxSettings(socket=folder / "hook.sock"))
    assert taken_for_healthy(told)
    assert (told["exit_code"], told["error"]) == (0, "")
    assert told["output"]["node"] == "n1"
    assert not (folder / "hook.sock").exists(), "it goes with the daemon"


async def test_fault_is_a_failure_that_names_the_check(folder: Path) -> None:
    store = healthy(folder)
    store.record(result("matmul", finding(Status.FAIL, target="cpu:0"), tier=Tier.QUICK))
    told = await served(store, NvrxSettings(socket=folder / "hook.sock"))
    assert not taken_for_healthy(told)
    assert told["exit_code"] == 1
    assert told["output"]["fail_count"] == 1
    assert told["output"]["failed_checks"] == [told["error"]]
    assert told["error"].startswith("matmul: ")


def test_not_knowing_is_a_failure(tmp_path: Path) -> None:
    told = read(response(node(tmp_path).snapshot(), None))
    assert not taken_for_healthy(told)
    assert told["exit_code"] == 3
    assert told["output"]["fail_count"] == 3, "three checks have not run yet"


def test_warning_passes_and_a_quarantine_does_not(tmp_path: Path) -> None:
    store = healthy(tmp_path)
    store.record(result("load", finding(Status.WARN)))
    assert taken_for_healthy(read(response(store.snapshot(), None)))
    store.set_quarantine(Quarantine(owner="ann", owner_kind="person", reason="link flaps", since=0.0, until=None))
    told = read(response(store.snapshot(), None))
    assert (told["exit_code"], told["error"]) == (1, "quarantine: ann: link flaps")


async def test_evidence_of_active_checks_lasts_while_a_job_has_the_node_unless_it_is_demanded(folder: Path) -> None:
    time = MovedClock()
    store = healthy(folder, time)
    store.set_leases(((lease(), time.at),))
    time.move(3 * 86400.0)
    for name in ("disk", "load"):
        store.record(result(name))
    assert taken_for_healthy(await served(store, NvrxSettings(socket=folder / "hook.sock")))
    demanding = NvrxSettings(socket=folder / "hook.sock", tier=Tier.QUICK, max_age_seconds=3600.0)
    told = await served(store, demanding)
    assert not taken_for_healthy(told)
    assert "matmul" in told["error"]


def test_answer_is_bounded_and_counts_all(tmp_path: Path) -> None:
    store = healthy(tmp_path)
    findings = [finding(Status.FAIL, target=f"cpu:{number}") for number in range(40)]
    store.record(result("matmul", *findings, tier=Tier.QUICK))
    output = read(response(store.snapshot(), None))["output"]
    assert (len(output["failed_checks"]), output["fail_count"]) == (MAX_FAILURES, 40)


async def test_without_a_socket_nothing_is_served(folder: Path) -> None:
    async with health_hook(healthy(folder), NvrxSettings(), stop_seconds=1.0):
        assert not [name for name in os.listdir(folder) if name.endswith(".sock")]


async def test_socket_of_another_daemon_is_refused(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "hook.sock"))
        other.listen()
        with pytest.raises(HealthdError, match="another daemon listens there"):
            await served(healthy(folder), NvrxSettings(socket=folder / "hook.sock"))


async def test_socket_that_a_killed_daemon_left_is_replaced(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "hook.sock"))
    assert taken_for_healthy(await served(healthy(folder), NvrxSettings(socket=folder / "hook.sock")))


async def test_without_the_library_the_setting_is_an_error_that_names_the_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ConfigError, match=r"^node\.nvrx\.socket: needs grpcio; run 'pip install grpcio' in"):
        await served(healthy(folder), NvrxSettings(socket=folder / "hook.sock"))


def test_daemon_serves_the_hook_from_its_own_checks(folder: Path) -> None:
    """The whole way: settings, the daemon, a check that fails by injection, the end by SIGTERM."""
    hook = folder / "hook.sock"
    words = ("node", "--name=n1", "--listen=127.0.0.1:0", f"--state-dir={folder}/state", f"--run-dir={folder}/run")
    environ = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HEALTHD_")},
        "HEALTHD_NODE_NVRX_SOCKET": str(hook),
        "HEALTHD_NODE_CHECKS": "load",
        "HEALTHD_NODE_FAULTS": "load=fail",
        "HEALTHD_PROBE_ACCELERATOR": "cpu",
    }
    with subprocess.Popen([sys.executable, "-m", "healthd", *words], env=environ, stderr=subprocess.PIPE) as daemon:
        try:
            until(lambda: hook.exists() or daemon.poll() is not None)
            until(lambda: ask(hook)["exit_code"] == 1)
            told = ask(hook)
            assert told["output"]["injected_faults"] == ["load=fail"]
            assert told["error"].startswith("load: ")
        finally:
            daemon.send_signal(signal.SIGTERM)
            _, errors = daemon.communicate(timeout=30)
    assert daemon.returncode == 0, errors
    assert not hook.exists()
