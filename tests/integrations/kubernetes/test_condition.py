"""The node's health as a condition of its Kubernetes node: what it says, and how it is written."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from checks.contract import Action, Blame, Status
from checks.discover import builtin_checks
from checks.system.kernel_log import kernel_log
from healthd.clients.kubernetes import STRATEGIC, KubernetesError, api_server
from healthd.core.errors import ConfigError
from healthd.core.evidence import judge_health
from healthd.core.model import Allocation, CheckSpec, Health, NodeState, Quarantine, Reason
from healthd.integrations.kubernetes.condition import ACCELERATED_HARDWARE_READY, conditions
from healthd.integrations.kubernetes.condition_writer import ConditionWriter
from healthd.integrations.kubernetes.settings import KubernetesSettings
from healthd.node.state.store import NodeStore
from tests.clients.api_server_kit import Cluster, cluster
from tests.every import every
from tests.hosts.machine import Machine
from tests.node.node_kit import BOOT, MovedClock, result, settings, specs, state
from tests.patience import PATIENCE

OWN = "healthd.internal/Fit"
PLAIN = KubernetesSettings(condition=OWN)
ALL = tuple(
    CheckSpec(
        name=check.name,
        tier=check.tier,
        interval_seconds=check.interval_seconds,
        timeout_seconds=check.timeout_seconds,
        expires_seconds=None,
        scope=check.scope,
        doc="",
        accelerators=check.accelerators,
        accelerator_faults=check.accelerator_faults,
    )
    for check in builtin_checks().values()
)
BOTH = KubernetesSettings(condition=OWN, accelerated_hardware_ready=True)


def why(code: str = "EccErrors", **changes: Any) -> Reason:
    values: dict[str, Any] = {
        "code": code,
        "message": "neuron:3 has 2 uncorrected errors, limit 0",
        "status": Status.FAIL,
        "blame": Blame.NODE,
        "action": Action.REPLACE,
        "check": "neuron_counters",
        "target": "neuron:3",
    }
    return Reason(**{**values, **changes})


def seen(health: Health, *reasons: Reason, **changes: Any) -> NodeState:
    return state(**{"health": health, "reasons": reasons, "checks": ALL, **changes})


def own(of: NodeState) -> tuple[str, str]:
    (one,) = conditions(of, PLAIN)
    return one.status, one.reason


def accelerated(of: NodeState) -> tuple[str, str]:
    one = next(one for one in conditions(of, BOTH) if one.type == ACCELERATED_HARDWARE_READY)
    return one.status, one.reason


# --- what it says ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("health", "reasons", "told"),
    [
        (Health.HEALTHY, (), ("True", "Healthy")),
        (Health.DEGRADED, (why("LowMemory", status=Status.WARN),), ("True", "LowMemory")),
        (Health.UNKNOWN, (why("Timeout", status=Status.UNKNOWN, blame=Blame.CHECK),), ("Unknown", "Timeout")),
        (Health.UNKNOWN, (), ("Unknown", "Unknown")),
        (Health.UNHEALTHY, (why(),), ("False", "EccErrors")),
    ],
)
def test_condition_is_true_only_of_a_node_that_is_known_to_be_fit(
    health: Health, reasons: tuple[Reason, ...], told: tuple[str, str]
) -> None:
    assert own(seen(health, *reasons)) == told


def test_quarantined_node_is_not_fit_however_healthy() -> None:
    kept = Quarantine(reason="fan noise", owner="ada", owner_kind="person", since=0.0, until=None)
    (one,) = conditions(seen(Health.HEALTHY, quarantine=kept), PLAIN)
    assert (one.status, one.reason, one.message) == ("False", "Quarantined", "ada: fan noise")


def test_node_with_a_job_is_as_fit_as_without() -> None:
    taken = (Allocation(by="process", holder="python (4711)"),)
    assert own(seen(Health.HEALTHY, allocated=taken)) == ("True", "Healthy")


def test_message_names_check_target_and_that_it_is_injected() -> None:
    (one,) = conditions(seen(Health.UNHEALTHY, why(injected=True)), PLAIN)
    assert one.message == "injected: neuron_counters on neuron:3: neuron:3 has 2 uncorrected errors, limit 0"


@given(code=st.text(max_size=300), message=st.text(max_size=2000), health=st.sampled_from(Health))
def test_whatever_a_check_calls_its_fault_the_condition_is_one_that_kubernetes_takes(
    code: str, message: str, health: Health
) -> None:
    for one in conditions(seen(health, why(code, message=message)), BOTH):
        assert one.status in ("True", "False", "Unknown")
        assert one.reason
        assert one.reason.isascii()
        assert " " not in one.reason
        assert len(one.message) <= 512
        assert "\n" not in one.message
        assert health in (Health.HEALTHY, Health.DEGRADED) or one.status != "True"


def test_nothing_is_written_unless_asked_for() -> None:
    assert conditions(seen(Health.HEALTHY), KubernetesSettings()) == ()
    assert not KubernetesSettings().on
    assert [one.type for one in conditions(seen(Health.HEALTHY), PLAIN)] == [OWN]


# --- the one that has instances replaced ----------------------------------------------------------------------------


def test_a_real_hardware_fault_on_a_free_node_is_said_to_be_not_ready() -> None:
    assert accelerated(seen(Health.UNHEALTHY, why())) == ("False", "EccErrors")


@every(
    "of",
    [
        seen(Health.UNHEALTHY, why(injected=True)),
        seen(Health.UNHEALTHY, why(), allocated=(Allocation(by="unseen", holder="nobody can tell"),)),
        seen(Health.UNHEALTHY, why(), maintenance="taint medik8s.io/drain"),
        seen(Health.UNHEALTHY, why("DiskFull", action=Action.INSPECT)),
        seen(Health.UNHEALTHY, why(blame=Blame.PATH)),
        seen(Health.UNKNOWN, why(status=Status.UNKNOWN)),
        seen(Health.UNKNOWN),
    ],
)
def test_an_instance_is_never_given_up_for_less(of: NodeState) -> None:
    status, _ = accelerated(of)
    assert status == "Unknown"


@every(
    ("check", "code", "target", "action"),
    [
        ("efa", "MissingDevice", "node", Action.REBOOT),  # the launch template's, and the next instance has it as well
        ("efa", "MissingDevice", "efa:0000:10:1d.0", Action.REBOOT),
        ("instance_type", "MissingDevice", "node", Action.REBOOT),  # an image without the driver
        ("device_count", "MissingDevice", "node", Action.REBOOT),
        ("matmul", "MissingDevice", "cuda:3", Action.REBOOT),  # a torch that cannot see it
        ("processes", "StuckProcesses", "node", Action.REBOOT),  # a shared file system that hangs, on all nodes at once
        ("disk_space", "Stuck", "node", Action.REBOOT),
        ("matmul", "Stuck", "neuron:3", Action.REBOOT),
        ("mounts", "ReadOnlyMount", "path:/fsx", Action.REBOOT),
        ("neuron_versions", "VersionMismatch", "node", Action.REBOOT),
        ("gpu_memory", "VersionMismatch", "node", Action.REBOOT),
        ("mine", "WrongResult", "neuron:3", Action.REPLACE),
    ],
)
def test_what_is_no_fault_of_an_accelerator_gives_up_no_instance(
    check: str, code: str, target: str, action: Action
) -> None:
    of = seen(Health.UNHEALTHY, why(code, check=check, target=target, action=action))
    assert accelerated(of) == ("Unknown", code)
    assert own(of) == ("False", code)


@every(
    ("check", "code", "target"),
    [
        ("matmul", "WrongResult", "neuroncore:7"),
        ("digest", "SilentCorruption", "cuda:3"),
        ("memory", "MemoryCorruption", "cuda:3"),
        ("gpu_memory", "EccErrors", "cuda:3"),
        ("neuron_counters", "HardwareErrors", "neuron:3"),
        ("all_reduce", "DeviceLost", "neuron:3"),
        ("device_count", "MissingDevice", "neuron:3"),
    ],
)
def test_fault_of_an_accelerator_is_said_whatever_else_is_wrong(check: str, code: str, target: str) -> None:
    disk = why("DiskFull", check="disk_space", target="path:/tmp", action=Action.INSPECT)
    fault = why(code, check=check, target=target, message=f"{check} {target}: the driver does not show it")
    assert accelerated(seen(Health.UNHEALTHY, disk, fault)) == ("False", code)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "False"),
        ("NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR instance-id=i-0 nd-id=4", "False"),
        ("NEURON_HW_ERR=DMA_ABORT", "False"),
        ("INFO: task python:4711 blocked for more than 120 seconds.", "Unknown"),
        ("blk_update_request: I/O error, dev nvme1n1, sector 12345 op 0x0:(READ)", "Unknown"),
        ("kernel BUG at mm/slub.c:381!", "Unknown"),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0", "Unknown"),
    ],
)
def test_of_the_kernel_log_only_lines_of_accelerators_give_up_an_instance(
    line: str, status: str, tmp_path: Path
) -> None:
    """From the line to the condition, because the kind of a fault is told in words."""
    machine = Machine(tmp_path / "machine")
    machine.write("/dev/kmsg", f"[  4999.0] {line}\n")
    found = result("disk", *machine.findings(kernel_log))
    one = dataclasses.replace(found, check="kernel_log")
    spec = dataclasses.replace(specs()[0], name="kernel_log", accelerator_faults=kernel_log.accelerator_faults)
    blank = state(health=Health.UNKNOWN, checks=(spec,), results=(one,))
    health, reasons = judge_health(blank)
    assert health is Health.UNHEALTHY
    assert accelerated(dataclasses.replace(blank, health=health, reasons=reasons)) == (status, "KernelFault")


def test_healthy_node_is_said_to_be_ready() -> None:
    assert accelerated(seen(Health.HEALTHY)) == ("True", "Healthy")


# --- writing it -----------------------------------------------------------------------------------------------------


@pytest.fixture(name="kube")
def _kube(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path / "account") as made:
        made.add("n1")
        yield made


def writer(kube: Cluster, tmp_path: Path, **pace: float) -> tuple[ConditionWriter, NodeStore, MovedClock]:
    moved = MovedClock()
    book = NodeStore(settings(tmp_path), specs(), clock=moved.clock, boot_id=BOOT)
    return ConditionWriter(book, PLAIN, kube.server, clock=moved.clock, seed=1, **pace), book, moved


def test_condition_joins_those_of_the_kubelet(kube: Cluster, tmp_path: Path) -> None:
    made, _, _ = writer(kube, tmp_path)
    asyncio.run(made.write())
    one = kube.condition("n1", OWN)
    assert one is not None
    assert (one["status"], one["reason"]) == ("Unknown", "NotYetRun")
    assert kube.condition("n1", "Ready") is not None
    (call,) = kube.writes()
    assert (call.path, call.kind) == ("/api/v1/nodes/n1/status", STRATEGIC)
    assert set(call.body) == {"status"}
    assert set(call.body["status"]) == {"conditions"}


def test_refresh_moves_the_heartbeat_and_not_the_transition(kube: Cluster, tmp_path: Path) -> None:
    made, _, moved = writer(kube, tmp_path)
    asyncio.run(made.write())
    first = dict(kube.condition("n1", OWN) or {})
    moved.move(300.0)
    asyncio.run(made.write())
    second = kube.condition("n1", OWN)
    assert second is not None
    assert second["lastTransitionTime"] == first["lastTransitionTime"]
    assert second["lastHeartbeatTime"] > first["lastHeartbeatTime"]


def test_restarted_daemon_leaves_the_transition_where_it_was(kube: Cluster, tmp_path: Path) -> None:
    asyncio.run(writer(kube, tmp_path)[0].write())
    before = dict(kube.condition("n1", OWN) or {})
    again, _, moved = writer(kube, tmp_path)
    moved.move(3600.0)
    asyncio.run(again.write())
    after = kube.condition("n1", OWN)
    assert after is not None
    assert after["lastTransitionTime"] == before["lastTransitionTime"]


def test_change_of_status_is_a_transition(kube: Cluster, tmp_path: Path) -> None:
    made, book, moved = writer(kube, tmp_path)
    asyncio.run(made.write())
    before = dict(kube.condition("n1", OWN) or {})
    moved.move(10.0)
    book.set_quarantine(Quarantine(reason="fan", owner="ada", owner_kind="person", since=0.0, until=None))
    asyncio.run(made.write())
    after = kube.condition("n1", OWN)
    assert after is not None
    assert after["status"] == "False"
    assert after["lastTransitionTime"] > before["lastTransitionTime"]


def telling(kube: Cluster, tmp_path: Path) -> tuple[ConditionWriter, NodeStore]:
    moved = MovedClock()
    book = NodeStore(settings(tmp_path), specs(), clock=moved.clock, boot_id=BOOT)
    wanted = dataclasses.replace(PLAIN, events=True)
    return ConditionWriter(book, wanted, kube.server, clock=moved.clock, seed=1), book


def test_what_befalls_a_node_is_an_event_of_it_once(kube: Cluster, tmp_path: Path) -> None:
    made, book = telling(kube, tmp_path)
    asyncio.run(made.write())
    book.set_quarantine(Quarantine(reason="fan", owner="ada", owner_kind="person", since=0.0, until=None))
    asyncio.run(made.write())
    asyncio.run(made.write())  # a heartbeat
    assert [one["reason"] for one in kube.events] == ["NotYetRun", "Quarantined"]
    last = kube.events[-1]
    assert (last["type"], last["involvedObject"]["name"], last["involvedObject"]["uid"]) == ("Warning", "n1", "n1")
    assert "ada: fan" in last["message"]
    kubernetes_validate.validate(last | {"metadata": {"name": "n1.x", "namespace": "default"}}, "1.35", strict=True)


def test_restarted_daemon_makes_no_event_of_what_was_said_before(kube: Cluster, tmp_path: Path) -> None:
    asyncio.run(telling(kube, tmp_path)[0].write())
    asyncio.run(telling(kube, tmp_path)[0].write())
    assert len(kube.events) == 1


def test_event_that_is_not_allowed_leaves_the_condition_as_it_is(
    kube: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kube.rights.discard("create on events")
    made, book = telling(kube, tmp_path)
    asyncio.run(made.write())
    book.set_quarantine(Quarantine(reason="fan", owner="ada", owner_kind="person", since=0.0, until=None))
    asyncio.run(made.write())
    assert (kube.condition("n1", OWN) or {})["status"] == "False"
    assert [one.message for one in caplog.records if "right to create on events" in one.message] != []


def test_replaced_token_is_used_from_the_next_call_on(kube: Cluster, tmp_path: Path) -> None:
    made, _, _ = writer(kube, tmp_path)
    asyncio.run(made.write())
    kube.tokens = {"second"}
    kube.token("second")
    asyncio.run(made.write())
    assert kube.calls[-1].token == "second"


def test_token_that_was_replaced_between_reading_and_asking_is_read_again(kube: Cluster, tmp_path: Path) -> None:
    made, _, _ = writer(kube, tmp_path)
    kube.said = [(401, {}, b'{"kind":"Status","message":"Unauthorized"}')]
    asyncio.run(made.write())
    assert kube.condition("n1", OWN) is not None


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (lambda kube: kube.rights.discard("patch on nodes/status"), "right to patch on nodes/status"),
        (lambda kube: kube.tokens.clear(), "does not accept the token"),
        (lambda kube: kube.nodes.clear(), 'nodes "n1" not found'),
        (lambda kube: kube.said.extend([(429, {"Retry-After": "7"}, b"")]), "HTTP 429"),
        (lambda kube: kube.said.extend([(500, {}, b"<html>")]), "HTTP 500"),
        (lambda kube: kube.said.extend([(200, {}, b"[1, 2")]), "its answer"),
        (lambda kube: kube.said.extend([(200, {}, b"null")]), "its answer"),
        (lambda kube: (kube.folder / "token").unlink(), "the token cannot be read"),
        (lambda kube: (kube.folder / "token").write_text(""), "contains no token"),
        (lambda kube: (kube.folder / "ca.crt").write_text("nonsense"), "not a CA file"),
    ],
)
def test_what_goes_wrong_is_one_clear_line(kube: Cluster, tmp_path: Path, break_it: Any, told: str) -> None:
    made, _, _ = writer(kube, tmp_path)
    break_it(kube)
    with pytest.raises(KubernetesError, match=told) as caught:
        asyncio.run(made.write())
    assert "\n" not in str(caught.value)
    assert "first" not in str(caught.value), "the token"


def test_server_of_another_ca_is_not_trusted_with_the_token(kube: Cluster, tmp_path: Path) -> None:
    made, _, _ = writer(kube, tmp_path)
    trustme.CA().cert_pem.write_to_path(kube.folder / "ca.crt")
    with pytest.raises(KubernetesError, match=r"cannot be reached.*certificate"):
        asyncio.run(made.write())
    assert kube.calls == []


def test_pauses_grow_and_heed_what_the_server_asks_for(kube: Cluster, tmp_path: Path) -> None:
    made, _, _ = writer(kube, tmp_path)
    busy = KubernetesError("busy", status=429, retry_after_seconds=90.0)
    away = KubernetesError("away")
    assert made.pause(busy, 1) >= 90.0
    assert made.pause(KubernetesError("absurd", status=429, retry_after_seconds=99999.0), 1) <= 300.0 * 1.25
    assert made.pause(away, 1) < 3.0
    assert 150.0 < made.pause(away, 50) <= 300.0 * 1.25
    assert 40.0 < made.pause(KubernetesError("no right", status=403), 1) < 80.0


def test_loop_writes_a_change_at_once_and_complains_once(
    kube: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    kube.said = [(503, {}, b"")] * 3

    async def scene() -> None:
        made, book, _ = writer(kube, tmp_path, least_seconds=0.01, first_pause_seconds=0.02)
        task = asyncio.create_task(made.run())
        await _until(lambda: kube.condition("n1", OWN) is not None)
        written = len(kube.writes())
        book.set_quarantine(Quarantine(reason="fan", owner="ada", owner_kind="person", since=0.0, until=None))
        await _until(lambda: (kube.condition("n1", OWN) or {})["status"] == "False")
        assert len(kube.writes()) == written + 1
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(scene())
    assert len([r for r in caplog.records if "HTTP 503" in r.getMessage()]) == 1


async def _until(true: Any, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds * PATIENCE):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["status", "conditions", "type", "lastTransitionTime", "x"]), inner)
        ),
        max_leaves=8,
    )
)
def test_whatever_the_node_looks_like_it_is_read_or_it_is_a_clear_error(answer: object) -> None:
    from healthd.clients.kubernetes import records

    for one in records(json.loads(json.dumps(answer)), "status", "conditions"):
        assert isinstance(one, dict)


# --- the daemon -----------------------------------------------------------------------------------------------------


def daemon(folder: Path, **variables: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEALTHD_", "KUBERNETES_"))}
    ours = {f"HEALTHD_NODE_KUBERNETES_{name.upper()}": value for name, value in variables.items()}
    where = ["--state-dir", str(folder / "state"), "--run-dir", str(folder / "run"), "--listen", "127.0.0.1:0"]
    return subprocess.Popen(
        [sys.executable, "-m", "healthd", "node", "--name", "n1", *where],
        env={**kept, **ours, "HEALTHD_NODE_CHECKS": "load", "HEALTHD_NODE_ACTIVE_UNPROMPTED": "off"},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_daemon_of_a_pod_keeps_the_condition_of_its_node(kube: Cluster, tmp_path: Path) -> None:
    account = {"service_account": str(kube.folder), "api_server": kube.url}
    process = daemon(tmp_path, condition=OWN, **account)
    try:
        # Unknown until the first check has run, then True: the second word comes five seconds after the first.
        asyncio.run(_until(lambda: (kube.condition("n1", OWN) or {}).get("status") == "True", 30.0))
    finally:
        process.terminate()
        _, said = process.communicate(timeout=15 * PATIENCE)
    assert process.returncode == 0, said
    assert f"condition {OWN} is being written to node n1" in said


def test_daemon_outside_of_a_cluster_says_so_and_does_not_start(tmp_path: Path) -> None:
    process = daemon(tmp_path, condition=OWN)
    _, said = process.communicate(timeout=30 * PATIENCE)
    assert process.returncode == 2
    assert said.splitlines()[-1].startswith("healthd: node.kubernetes: no API server")
    assert "Traceback" not in said


def test_message_of_a_check_is_escaped() -> None:
    (one,) = conditions(seen(Health.UNHEALTHY, why(message="\x1b[2J all is well \x9b1A")), PLAIN)
    assert one.message.isprintable()
    assert "\\u001b[2J" in one.message


# --- where the server is --------------------------------------------------------------------------------------------


def test_pod_finds_its_api_server(tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.100.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    assert api_server(environ, tmp_path).url == "https://10.100.0.1:443"
    assert api_server({**environ, "KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path).url == "https://[fd00::1]:443"


def test_outside_of_a_pod_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set api_server"):
        api_server({}, tmp_path)
    with pytest.raises(ConfigError, match="must begin with https"):
        api_server({}, tmp_path, "http://api.example.com")


@pytest.mark.parametrize("name", ["Ready", "AcceleratedHardwareReady", "x y/z", "/Fit", "Domain.Internal/Fit"])
def test_condition_needs_a_domain_of_its_own(name: str) -> None:
    with pytest.raises(ValueError, match="condition"):
        KubernetesSettings(condition=name)


def test_heartbeat_that_would_burden_the_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="heartbeat"):
        KubernetesSettings(condition=OWN, heartbeat_seconds=1.0)
