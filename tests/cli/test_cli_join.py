"""`healthd gate --join` as its users have it: hooks, daemons and an aggregator as processes of their own."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.aggregator.cluster import AGGREGATOR, Cluster
from tests.aggregator.service import Command, Service, until
from tests.cli.cli_kit import healthd
from tests.patience import PATIENCE

# Nothing here is about a node that is silent, and on a busy machine one may be for a while.
PATIENT = AGGREGATOR.replace('silent = "6s"', 'silent = "60s"')
POLICY = PATIENT + 'tuning.member = "20s"\njoin = "75s"\ncollective = false\n'
RECREATED = POLICY.replace(
    'tuning.member = "20s"', 'tuning.member = "4s"'
)  # so long one that was killed is in the way of the next
NODES = ("n0", "n1", "n2")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


def join(
    cluster: Cluster, aggregator: Service, rank: int, *more: str, size: int = len(NODES), node: str = ""
) -> Command:
    who = ("--join", "train", "--size", str(size), "--rank", str(rank), "--node", node or f"n{rank}")
    return cluster.start("gate", "--aggregator", aggregator.url, *who, "--wait", "90s", *more)


def waiting(aggregator: Service) -> str:
    """What the newest gate waits for, or why it is decided."""
    gates = aggregator.get("/v1/gates").json()["gates"]
    told = aggregator.get(f"/v1/gates/{gates[0]['id']}").json() if gates else {}
    return "; ".join(reason["message"] for reason in told.get("reasons", ()))


def test_three_hooks_of_which_one_is_late_and_one_is_recreated_start_together(cluster: Cluster) -> None:
    aggregator = cluster.fleet(*NODES, config=RECREATED)
    hooks = {rank: join(cluster, aggregator, rank) for rank in (0, 1)}
    until(lambda: "missing: rank 2" in waiting(aggregator))
    hooks[1].process.kill()
    hooks[1].process.communicate()
    hooks[1] = join(cluster, aggregator, 1)
    until(lambda: "2 of 3 members have joined" in waiting(aggregator))
    assert all(hook.process.poll() is None for hook in hooks.values()), "nobody starts before all have come"
    hooks[2] = join(cluster, aggregator, 2, "--json")
    said = {rank: hook.said() for rank, hook in hooks.items()}
    assert {rank: one.code for rank, one in said.items()} == dict.fromkeys(range(3), 0), said
    assert [node["node"] for node in said[2].json["nodes"]] == list(NODES)
    for name in NODES:
        (lease,) = cluster.services[name].get("/v1/node").json()["leases"]
        assert lease["gate"] == said[2].json["id"]


def test_a_node_that_is_bad_keeps_all_from_starting_and_each_is_told_which(cluster: Cluster) -> None:
    aggregator = cluster.fleet("n0", "n1", config=POLICY)
    cluster.prove(0.5)
    for name in ("n0", "n1"):
        cluster.aged(name)
    hooks = [join(cluster, aggregator, rank, "--max-age", "1s", size=2) for rank in (0, 1)]
    for hook in hooks:
        said = hook.said()
        assert said.code == 75, said.err
        assert "SlowDevice" in said.out + said.err


def test_a_hook_that_is_stopped_leaves_its_group_at_once(cluster: Cluster) -> None:
    aggregator = cluster.fleet("n0", config=POLICY)
    hook = join(cluster, aggregator, 0, size=2)
    until(lambda: "1 of 2 members have joined" in waiting(aggregator))
    hook.process.send_signal(signal.SIGTERM)
    said = hook.said(5)
    assert said.code == 75
    assert "stopped by SIGTERM; its group is informed" in said.err
    until(lambda: "0 of 2 members have joined" in waiting(aggregator))


def test_a_hook_that_is_stopped_after_it_has_confirmed_takes_the_others_back_at_once(cluster: Cluster) -> None:
    """Else they would start without it, or wait for as long as a confirmation may take."""
    aggregator = cluster.aggregator(config=POLICY + '[aggregator]\nhandshake = "10m"\n').start()
    for name in ("n0", "n1"):
        cluster.node(name, aggregator=aggregator.url).start(ready=False)
    cluster.healthy("n0", "n1")
    hook = join(cluster, aggregator, 0, size=2)
    with httpx.Client(trust_env=False, verify=False, timeout=60, base_url=aggregator.url) as http:
        body = {"job": "train", "wait_seconds": 90.0}
        body["join"] = {"group": "train", "size": 2, "rank": 1, "member": "other", "node": "n1"}
        until(lambda: http.post("/v1/gates?wait=1", json=body).json()["decision"] == "admit")
        gate = http.get("/v1/gates").json()["gates"][0]["id"]
        path = f"/v1/gates/{gate}/handshake?wait=0"
        until(lambda: http.post(path, json={"node": "n1", "event": "wait"}).json()["missing"] == ["n1"])
        hook.process.send_signal(signal.SIGTERM)
        said = hook.said(5)
        assert (said.code, "its group is informed" in said.err) == (75, True), said
        told = http.post(path, json={"node": "n1", "event": "acknowledge"}).json()
    assert (told["go"], told["missing"]) == (False, ["n0"])
    until(lambda: cluster.services["n0"].get("/v1/node").json()["leases"] == [])


@pytest.mark.thorough
def test_a_rank_that_comes_after_the_others_have_started_is_left_out(cluster: Cluster) -> None:
    aggregator = cluster.fleet("n0", "n1", config=POLICY.replace('join = "75s"', 'join = "2s"'))
    alone = join(cluster, aggregator, 0, "--min-nodes", "1", size=2).said()
    assert alone.code == 0, alone.err
    late = join(cluster, aggregator, 1, "--min-nodes", "1", size=2).said()
    assert late.code == 75
    assert "rank 1 on n1 is left out; the others start without it: rank 1 of group train did not come" in late.err


@pytest.mark.thorough
def test_a_member_that_is_lost_between_the_answer_and_the_start_takes_all_back_together(cluster: Cluster) -> None:
    """Both are admitted, one is killed before it could confirm: the other does not start alone, and asks anew."""
    aggregator = cluster.aggregator(config=POLICY + '[aggregator]\nhandshake = "2s"\n').start()
    for name in ("n0", "n1"):
        cluster.node(name, aggregator=aggregator.url).start(ready=False)
    cluster.healthy("n0", "n1")
    other = {"group": "train", "size": 2, "rank": 1, "member": "dies", "node": "n1"}
    hook = join(cluster, aggregator, 0, size=2)
    body = {"job": "train", "wait_seconds": 90.0, "join": other}
    end = time.monotonic() + 20 * PATIENCE
    while time.monotonic() < end:
        told = httpx.post(
            f"{aggregator.url}/v1/gates?wait=1", json=body, trust_env=False, verify=False, timeout=60
        ).json()
        if told["decision"] == "admit":
            break
    assert told["decision"] == "admit", told
    again = join(cluster, aggregator, 1, size=2)
    first, second = hook.said(), again.said()
    assert (first.code, second.code) == (0, 0), (first, second)
    assert "n1 did not confirm the start; the group gathers again" in first.err


# --- usage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (("--join", "g", "--rank", "0"), {}, "--size is missing, and no launcher's variables provide it"),
        (("--join", "g", "--size", "2"), {}, "--rank is missing"),
        (("--join", "g", "--size", "2", "--rank", "2"), {}, "--rank 2 must be from 0 to 1"),
        (("--join", "g", "--size", "2", "--rank", "0", "--pool", "p"), {}, "--pool cannot be combined with --join"),
        (("--join", "g", "--size", "2", "--rank", "0", "--node", "a", "--node", "b"), {}, "takes exactly one --node"),
        (("--join", "g", "--size", "2", "--rank", "0", "--min-nodes", "3"), {}, "--min-nodes must be between 1 and 2"),
        (("--job", "j", "--node", "n", "--size", "2"), {}, "--size needs --join GROUP"),
        (("--job", "j", "--node", "n", "--execute"), {}, "--execute needs --join GROUP"),
        (("--join", "g"), {"JOB_COMPLETION_INDEX": "1"}, "use --nnodes N (--size N with --join)"),
    ],
)
def test_usage_is_one_clear_line(
    arguments: tuple[str, ...], variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    done = healthd(tmp_path, "gate", "--aggregator", "http://127.0.0.1:1", *arguments, env=variables)
    assert done.code == 2, done.err
    assert said in done.err


def test_half_set_variables_of_a_launcher_do_not_matter_to_who_says_all_itself(tmp_path: Path) -> None:
    whole = ("--join", "g", "--size", "4", "--rank", "1", "--min-nodes", "3", "--wait", "1s")
    done = healthd(tmp_path, "gate", "--aggregator", "http://127.0.0.1:1", *whole, env={"JOB_COMPLETION_INDEX": "1"})
    assert done.code == 75, done.err
    assert "JOB_COMPLETIONS" not in done.err


# --- the hook as executor ---------------------------------------------------------------------------------------------


def executing(cluster: Cluster, aggregator: Service, rank: int, *more: str, size: int = 2) -> Command:
    """A hook that runs the checks itself, with the settings of its node."""
    name = f"n{rank}"
    cluster.node(name)  # its files; nobody starts it here
    run = cluster.folder / f"{name}-container"
    run.mkdir(exist_ok=True)
    config = ("--config", str(cluster.folder / f"{name}.toml"), "--run-dir", str(run))
    return join(cluster, aggregator, rank, "--execute", *config, *more, size=size)


def test_without_any_daemon_hooks_check_their_own_nodes_and_start_together(cluster: Cluster) -> None:
    aggregator = cluster.aggregator(config=POLICY).start()
    hooks = [executing(cluster, aggregator, rank, "--json") for rank in (0, 1)]
    for hook in hooks:
        said = hook.said()
        assert said.code == 0, said.err
        assert [node["node"] for node in said.json["nodes"]] == ["n0", "n1"]
    gate = said.json["id"]
    states = aggregator.get(f"/v1/gates/{gate}/evidence").json()["states"]
    assert {result["executor"] for state in states for result in state["results"]} == {"hook:train"}
    assert {result["check"] for result in states[0]["results"]} >= {"proof"}


@pytest.mark.thorough
def test_three_executing_hooks_of_which_one_is_late_and_one_is_recreated_start_together(cluster: Cluster) -> None:
    aggregator = cluster.aggregator(config=RECREATED).start()
    hooks = {rank: executing(cluster, aggregator, rank, size=3) for rank in (0, 1)}
    until(lambda: "missing: rank 2" in waiting(aggregator), 25)
    hooks[1].process.kill()
    hooks[1].process.communicate()
    hooks[1] = executing(cluster, aggregator, 1, size=3)
    hooks[2] = executing(cluster, aggregator, 2, "--json", size=3)
    said = {rank: hook.said(60) for rank, hook in hooks.items()}
    assert {rank: one.code for rank, one in said.items()} == dict.fromkeys(range(3), 0), said
    assert [node["node"] for node in said[2].json["nodes"]] == list(NODES)


def test_an_executing_hook_that_is_stopped_leaves_its_group_and_nothing_behind(cluster: Cluster) -> None:
    aggregator = cluster.aggregator(config=POLICY).start()
    hook = executing(cluster, aggregator, 0)
    until(lambda: "1 of 2 members have joined" in waiting(aggregator), 25)
    until(lambda: any("worker.py" in line for line in cluster.alive().values()))
    hook.process.send_signal(signal.SIGTERM)
    said = hook.said(10)
    assert said.code == 75
    assert "its group is informed" in said.err
    until(lambda: "0 of 2 members have joined" in waiting(aggregator))


def test_a_fault_that_a_hook_finds_keeps_all_from_starting(cluster: Cluster) -> None:
    aggregator = cluster.aggregator(config=POLICY).start()
    hooks = [executing(cluster, aggregator, rank) for rank in (0, 1)]
    cluster.prove(0.5)
    for hook in hooks:
        said = hook.said()
        assert said.code == 75, said.err
        assert "SlowDevice" in said.out + said.err


@pytest.mark.thorough
def test_the_next_job_gets_a_node_without_a_daemon_again(cluster: Cluster) -> None:
    aggregator = cluster.aggregator(config=POLICY).start()
    for job in ("first", "second"):
        said = executing(cluster, aggregator, 0, "--job", job, size=1).said()
        assert said.code == 0, said.err


def test_beside_a_daemon_the_hook_checks_and_the_daemon_keeps_the_lease(cluster: Cluster) -> None:
    """The same node name from two processes, and neither is taken for a duplicate of the other."""
    aggregator = cluster.aggregator(config=POLICY).start()
    hooks = []
    for rank in (0, 1):
        cluster.node(f"n{rank}", aggregator=aggregator.url).start(ready=False)
    cluster.healthy("n0", "n1")
    daemons = {name: cluster.services[name] for name in ("n0", "n1")}
    hooks = [executing(cluster, aggregator, rank, "--json") for rank in (0, 1)]
    cluster.services.update(daemons)
    said = [hook.said() for hook in hooks]
    assert [one.code for one in said] == [0, 0], [one.err for one in said]
    states = aggregator.get(f"/v1/gates/{said[0].json['id']}/evidence").json()["states"]
    by_executor = {(r["check"], r["executor"]) for state in states for r in state["results"]}
    assert ("proof", "hook:train") in by_executor
    assert ("memory_free", "daemon") in by_executor, "the daemon keeps its word on what it alone can know"
    for name in ("n0", "n1"):
        state = daemons[name].get("/v1/node").json()
        assert [lease["job"] for lease in state["leases"]] == ["train"]
        assert not any(reason["code"] == "DuplicateNode" for reason in state["reasons"])


@pytest.mark.thorough
@pytest.mark.system("unshare", root=True)
def test_beside_a_daemon_that_cannot_see_who_holds_the_devices_the_job_is_admitted(cluster: Cluster) -> None:
    """As in a container without the host's processes: the hook, in the job's container, knows who has them."""
    aggregator = cluster.aggregator(config=POLICY).start()
    cluster.job(cluster.run_dir("n0") / "devices" / "cpu0")  # of another container: the daemon cannot see it
    daemon = cluster.node("n0", aggregator=aggregator.url)
    daemon.command[:0] = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    daemon.start()
    try:
        until(lambda: [one["by"] for one in daemon.get("/v1/node").json()["allocated"]] == ["unseen"], why=daemon.said)
        alone = cluster.gate(aggregator.url, "alone", "--node", "n0", wait="1s")
        assert (alone.code, "holders of the devices cannot be seen" in alone.out) == (75, True), alone
        said = executing(cluster, aggregator, 0, "--json", size=1).said()
        assert said.code == 0, said
        assert [lease["job"] for lease in daemon.get("/v1/node").json()["leases"]] == ["train"]
    finally:
        daemon.kill()  # unshare does not pass SIGTERM on


@pytest.mark.thorough
def test_a_daemon_that_sees_the_ranks_of_its_hook_on_the_devices_takes_the_lease_once_they_are_gone(
    tmp_path: Path,
) -> None:
    """As on a real host: hook and daemon see the same devices, and ranks are kept for the next round of a search."""
    more = "[checks.all_reduce]\nsizes_bytes = [1024]\niterations = 2\n"
    patient = 'collective_checks = ["all_reduce"]\ncollective_start = "180s"\ntuning.collective_contact = "90s"'
    policy = POLICY.replace("collective = false", patient)
    with Cluster(tmp_path, checks=("memory_free", "proof", "all_reduce")) as cluster:
        aggregator = cluster.aggregator(config=policy).start()
        names = ("n0", "n1")
        for name in names:
            cluster.node(name, aggregator=aggregator.url, extra=more).start(ready=False)
        cluster.healthy(*names)
        hooks = []
        for rank, name in enumerate(names):
            where = ("--config", str(tmp_path / f"{name}.toml"), "--run-dir", str(cluster.run_dir(name)))
            hooks.append(join(cluster, aggregator, rank, "--execute", *where, "--wait", "200s", "--json", size=2))
        said = [hook.said(100) for hook in hooks]
        assert [one.code for one in said] == [0, 0], [one.out + one.err for one in said]
        runs = aggregator.get(f"/v1/validations/{said[0].json['id']}").json()["validations"]
        assert [[one["outcome"] for one in run["history"]] for run in runs] == [["pass"]]
        for name in names:
            # It ends soon: the ranks count as the job, and here devices need to be free for a second alone.
            assert "job train attempt 0 has the node" in cluster.services[name].said()


def test_a_quarantined_node_is_out_whatever_its_hook_finds(cluster: Cluster) -> None:
    aggregator = cluster.aggregator(config=POLICY).start()
    body = {"reason": "a person looks at it", "owner": "ops"}
    told = httpx.put(
        f"{aggregator.url}/v1/nodes/n0/quarantine?unseen=true", json=body, trust_env=False, verify=False, timeout=60
    )
    assert told.status_code in (200, 204), told.text
    said = executing(cluster, aggregator, 0, size=1).said()
    assert said.code == 75
    assert "Quarantined" in said.out + said.err


def test_nobody_speaks_for_a_node_without_an_open_gate_that_says_so(cluster: Cluster) -> None:
    aggregator = cluster.aggregator(config=POLICY).start()
    url = f"{aggregator.url}/v1/nodes/n0/sync?wait=0&executor=stranger"
    body = {
        "protocol": 1,
        "incarnation": "i",
        "seq": 1,
        "last_answer": None,
        "since_answer_seconds": None,
        "state": None,
        "digest": "d",
        "ages": {},
        "orders": {},
        "issuer": None,
    }
    told = httpx.post(
        url, json=body, headers={"X-Healthd-Node-Key": "k" * 20}, trust_env=False, verify=False, timeout=60
    )
    assert told.status_code == 409
    assert "no open gate has member 'stranger' as its executor" in told.json()["detail"]
