"""`healthd gate`, `fleet`, `override`, `token` and `fault` against a real aggregator with nodes that speak sync."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from checks.contract import Status, Tier
from healthd.cli.hooks.gate import build_request
from healthd.cli.settings.gate import GateSettings
from healthd.core import wire
from healthd.core.model import Mode, SyncRequest
from tests import prepared
from tests.aggregator.parts import state
from tests.aggregator.service import free_port
from tests.cli.cli_gate_kit import GOOD, SpeakingNode, World, aggregator, nodes
from tests.cli.cli_kit import Said, end, environment, healthd, start
from tests.hooks.inside import run_inside
from tests.patience import PATIENCE


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("gate")
    with aggregator(folder) as world:
        states = [state(name) for name in GOOD] + [state("bad", status=Status.FAIL)]
        nodes = [SpeakingNode(world.url, made, None) for made in states]
        assert all(node.heard.wait(20 * PATIENCE) for node in nodes)
        yield world
        for node in nodes:
            node.stop()


def release(world: World, said: Said) -> None:
    httpx.delete(f"{world.url}/v1/gates/{said.json['id']}/lease", trust_env=False, verify=False).raise_for_status()


def test_good_nodes_are_admitted_and_written_to_a_hostfile(world: World) -> None:
    hosts, admitted = world.folder / "hosts", world.folder / "admitted"
    hosts.write_text("n1 slots=8\n# n9\n\nn2\n")
    said = world.gate("a", "--hostfile", str(hosts), "--hostfile-out", str(admitted), "--json")
    assert said.code == 0, said.err or said.out
    assert said.json["decision"] == "admit"
    assert admitted.read_text() == "n1\nn2\n"
    again = world.gate("a", "--hostfile", str(hosts), "--json")
    assert (again.code, again.json["id"]) == (0, said.json["id"]), "the same question has the same answer"
    other = world.gate("a", *nodes("n3"), "--json")
    assert other.code == 2, "another question under the same name is a mistake"
    release(world, said)


@pytest.mark.parametrize("way", ["json", "people", "hosts"])
def test_an_admission_that_cannot_be_told_is_taken_back_with_its_lease(world: World, way: str) -> None:
    job = f"untold-{way}"
    more = {"json": ("--json",), "people": (), "hosts": ("--hostfile-out", "/dev/full")}[way]
    line = ("gate", "--job", job, *nodes("n1"), "--aggregator", world.url, "--wait", "15s", *more)
    said = run_inside(*line, out=None if way == "hosts" else "/dev/full")
    assert said.code == 75
    assert "cannot be written: No space left" in said.err or "cannot write the host file: No space left" in said.err
    assert "its gate is withdrawn" in said.err
    assert said.err.count("\n") == 1
    again = world.gate(f"{job}-next", *nodes("n1"), "--json")
    assert again.code == 0, "the node is free for another job"
    release(world, again)


def test_an_admission_whose_json_nobody_reads_any_more_is_taken_back(world: World) -> None:
    line = [
        sys.executable,
        "-m",
        "healthd",
        "gate",
        "--job",
        "unread",
        *nodes("n2"),
        "--aggregator",
        world.url,
        "--json",
    ]
    with subprocess.Popen(
        line, env=environment(world.folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as hook:
        assert hook.stdout is not None
        hook.stdout.close()
        assert hook.stderr is not None
        err = hook.stderr.read()
    assert (hook.returncode, "its reader has closed; its gate is withdrawn" in err) == (75, True), err


def test_standard_error_that_cannot_be_written_changes_no_answer(world: World) -> None:
    line = [sys.executable, "-m", "healthd", "gate", "--job", "deaf", *nodes("n404"), "--aggregator", world.url]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*line, "--wait", "300ms", "--json"],
            env=environment(world.folder),
            stdout=subprocess.PIPE,
            stderr=full,
            timeout=40 * PATIENCE,
            check=False,
        )
    assert (done.returncode, json.loads(done.stdout)["decision"]) in ((75, "reject"), (1, "reject")), done


def test_a_bad_node_is_named_and_one_more_try_elsewhere_may_help(world: World) -> None:
    said = world.gate("b", *nodes("n1", "bad"), wait="2s")
    assert said.code == 75
    assert "REJECT" in said.out or "HOLD" in said.out
    assert "bad: WrongResult" in said.out
    assert "--attempt" not in said.out
    again = world.gate("b", *nodes("n1", "bad"), wait="2s")
    assert (again.code, "ask again with --attempt 1\n" in again.out) == (75, True)
    spare = world.gate("b2", *nodes("n1", "bad"), "--min-nodes", "1", "--json")
    assert spare.code == 0, spare.out
    assert [node["node"] for node in spare.json["nodes"]] == ["n1"]
    release(world, spare)


def test_what_can_never_be_is_1_and_what_cannot_be_meant_is_2(world: World) -> None:
    assert world.gate("c", "--pool", "no-such-pool", "--count", "1").code == 1
    assert world.gate("c2", "--pool", "train", "--count", "400").code == 1
    for arguments, said in (
        ((), "choose the nodes"),
        (("--pool", "train"), "--pool needs --count"),
        (("--count", "2", *nodes("n1")), "--count belongs to --pool"),
        (nodes("n1", "n1"), "node 'n1' is listed twice"),
        ((*nodes("n1"), "--min-nodes", "2"), "--min-nodes 2 is more than the 1 nodes"),
        ((*nodes("n1"), "--min-nodes", "-1"), "--min-nodes must be at least 1, not -1"),
        (("--hostfile", "/no/such/file"), "cannot be read"),
        (("--hostfile", "/dev/zero"), "cannot be read: larger than 64 MiB"),
        ((*nodes("n1"), "--max-age", "-5s"), "max_age"),
        ((*nodes("n1"), "--runtime", "400d"), "runtime"),
        ((*nodes("n1"), "--tier", "quik"), "tier"),
        ((*nodes("n1"), "--on-unreachable", "pray"), "on_unreachable"),
    ):
        ended = world.gate("usage", *arguments)
        assert (ended.code, ended.out) == (2, ""), (arguments, ended)
        assert said in ended.err, (arguments, ended.err)
        assert ended.err.count("\n") == 1


def test_gate_that_is_told_how_long_its_job_runs_takes_no_node_whose_events_are_not_known(world: World) -> None:
    """These nodes have never said what EC2 has scheduled for them."""
    said = world.gate("events", *nodes("n1"), "--runtime", "12h", "--json")
    assert said.code == 75, said.err
    (reason,) = said.json["excluded"][0]["reasons"]
    assert reason["code"] == "ScheduledEvent"
    assert "the job declares a runtime of 12 h, so this must be known" in reason["message"]
    assert said.json["policy"]["runtime_seconds"] == 43200.0


def test_host_files_of_launchers_name_each_node_once(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# by slots\nn1 slots=8\nn1\nn2:8\nfe80::1\n")
    asked = build_request(GateSettings(job="j", hostfile=hosts))
    assert asked.nodes == ("n1", "n2", "fe80::1")


def test_each_setting_that_a_request_has_too_is_asked_for() -> None:
    settings = GateSettings(
        job="j",
        attempt=3,
        pool="a",
        count=4,
        min_nodes=2,
        tier=Tier.DEEP,
        max_age_seconds=60.0,
        wait_seconds=5.0,
        runtime_seconds=7200.0,
        mode=Mode.OBSERVE,
        collective=False,
        workload="slurm:7",
        lease_seconds=3600.0,
    )
    asked, own = vars(build_request(settings)), vars(settings)
    both = asked.keys() & own.keys() - {"join"}
    assert len(both) == 13
    assert {name: asked[name] for name in both} == {name: own[name] for name in both}


@pytest.mark.parametrize("name", ["rack1/n7", "n\u00f6de", "x" * 300])
@pytest.mark.parametrize("fleet", [(), ("--aggregator", "http://127.0.0.1:1")], ids=["alone", "in a fleet"])
def test_a_daemon_whose_name_aggregator_and_hooks_would_refuse_does_not_start(
    tmp_path: Path, fleet: tuple[str, ...], name: str
) -> None:
    said = healthd(tmp_path, "node", "--name", name, *fleet, "--listen", "127.0.0.1:0")
    assert said.code == 2
    assert "cannot name a node" in said.err
    assert said.err.count("\n") == 1


def test_a_node_nobody_knows_is_waited_for_and_named(world: World) -> None:
    said = world.gate("d", *nodes("n1", "n404"), "--json", wait="1s")
    assert said.code in (1, 75)
    assert "n404" in json.dumps(said.json["reasons"])


@pytest.mark.parametrize(("rule", "code"), [("hold", 75), ("admit", 0), ("local", 75)])
def test_an_aggregator_that_is_away_is_answered_by_the_chosen_rule(tmp_path: Path, rule: str, code: int) -> None:
    told = ("--aggregator", f"http://127.0.0.1:{free_port()}", "--wait", "0s", "--on-unreachable", rule)
    env = {"HEALTHD_GATE_LOCAL_URL": f"http://127.0.0.1:{free_port()}"}
    said = healthd(tmp_path, "gate", "--job", "j", *nodes("n1"), *told, env=env)
    assert said.code == code
    assert "cannot be reached" in said.err
    assert said.out == ""


def test_an_aggregator_that_comes_back_while_the_hook_waits_answers_it(tmp_path: Path) -> None:
    port = free_port()
    with aggregator(tmp_path, port=port) as world:
        node = SpeakingNode(world.url, state("n1"), None)
        assert node.heard.wait(20 * PATIENCE)
    where = ("--aggregator", world.url, "--wait", "90s")
    with start(tmp_path, "gate", "--job", "j", *nodes("n1"), *where) as hook:
        assert hook.stderr is not None
        assert "trying again until the wait is over" in hook.stderr.readline()
        with aggregator(tmp_path, port=port):
            said = end(hook, timeout=30)
            node.stop()
    assert said.code == 0, said
    assert "ADMIT" in said.out


def test_a_hook_whose_server_never_answers_can_be_interrupted(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        line = [sys.executable, "-m", "healthd", "gate", "--job", "j", "--node", "n1", "--aggregator", url]
        with prepared.Popen(line, env=environment(tmp_path), stderr=subprocess.PIPE, text=True) as hook:
            silent.settimeout(20 * PATIENCE)
            held, _ = silent.accept()
            with held:
                held.settimeout(20 * PATIENCE)
                assert held.recv(1), "it has asked"
                assert hook.poll() is None
                hook.send_signal(signal.SIGINT)
                _, err = hook.communicate(timeout=10 * PATIENCE)
    assert hook.returncode == 75
    assert err.startswith("healthd: stopped by SIGINT; its gate could not be withdrawn")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_hook_that_is_stopped_withdraws_its_gate_so_that_nobody_is_admitted(world: World, number: int) -> None:
    job = f"stopped-{number}"
    holder = world.gate(f"holder-{number}", *nodes("n3"), "--json")
    line = [sys.executable, "-m", "healthd", "gate", "--job", job, *nodes("n3"), "--aggregator", world.url]
    env = {**environment(world.folder), "HEALTHD_GATE_WAIT": "180s"}
    http = httpx.Client(trust_env=False, verify=False, base_url=world.url)
    with http, prepared.Popen(line, env=env, stderr=subprocess.PIPE, text=True) as hook:
        for _ in range(600):
            if http.get("/v1/gates", params={"job": job}).json()["gates"]:
                break
            time.sleep(0.05)
        hook.send_signal(number)
        _, err = hook.communicate(timeout=10 * PATIENCE)
        (found,) = http.get("/v1/gates", params={"job": job}).json()["gates"]
    release(world, holder)
    assert hook.returncode == 75
    assert f"stopped by {signal.Signals(number).name}; its gate is withdrawn" in err
    assert (found["decision"], found["reasons"][0]["code"]) == ("reject", "Released")


def test_token_of_a_client_and_table_of_the_aggregator_have_names_of_their_own(tmp_path: Path) -> None:
    """One shell has the variables that the guide exports, and starts an aggregator."""
    made = healthd(tmp_path, "token", "me", "--scope", "admin", "--json").json
    table, token, config = tmp_path / "tokens.toml", tmp_path / "admin.token", tmp_path / "healthd.toml"
    table.write_text(made["entry"])
    table.chmod(0o600)
    token.write_text(made["token"])
    config.write_text(f'[aggregator]\ntoken_table = "{table}"\n[gate]\ntoken_file = "{tmp_path}/none"\n')
    exported = {"HEALTHD_TOKEN_FILE": str(token)}
    with aggregator(tmp_path, "--config", str(config), **exported) as world:
        asked = ("fleet", "status", "--config", str(config), "--aggregator", world.url, "--json")
        assert healthd(tmp_path, *asked, env=exported).json["nodes"] == []

        swapped = healthd(tmp_path, *asked, env={"HEALTHD_TOKEN_FILE": str(tmp_path / "away")})
        assert swapped.code == 2
        assert f"the variable HEALTHD_TOKEN_FILE overrides gate.token_file in {config}:4" in swapped.err
    swapped = healthd(tmp_path, "aggregator", "--config", str(config), env={"HEALTHD_TOKEN_TABLE": str(token)})
    assert swapped.code == 2
    assert f"the variable HEALTHD_TOKEN_TABLE overrides aggregator.token_table in {config}:2" in swapped.err
    assert healthd(tmp_path, "aggregator", "--token-file", str(table)).code == 2
    unknown = healthd(tmp_path, "aggregator", env={"HEALTHD_AGGREGATOR_TOKEN_FILE": str(table)})
    assert (unknown.code, "HEALTHD_AGGREGATOR_TOKEN_TABLE" in unknown.err) == (2, True), unknown


def test_wrong_and_missing_tokens_are_refused_in_one_line_and_right_ones_are_let_in(tmp_path: Path) -> None:
    made = healthd(tmp_path, "token", "ci", "--scope", "gate", "--json").json
    tokens, right, wrong = tmp_path / "tokens.toml", tmp_path / "right", tmp_path / "wrong"
    tokens.write_text(made["entry"])
    tokens.chmod(0o600)
    right.write_text(made["token"])
    wrong.write_text("wrong-token-of-some-length")
    with aggregator(tmp_path, "--token-table", str(tokens)) as world:
        for told in ((), ("--token-file", str(wrong))):
            said = world.gate("j", *nodes("n1"), *told, wait="0s")
            assert said.code == 2, "no second try can help, and it is none that is away"
            assert "--token-file" in said.err
            assert said.err.count("\n") == 1
            joined = world.run("gate", "--join", "g", "--size", "1", "--rank", "0", "--on-unreachable", "admit", *told)
            ended = world.run("gate", "outcome", "ok", "--job", "j", *told)
            assert (joined.code, ended.code) == (2, 2), (joined, ended)
            assert "--token-file" in joined.err
        assert world.run("fleet", "status", "--token-file", str(right), "--json").json["nodes"] == []
        refused = world.run("fleet", "quarantine", "n1", "--reason", "x", "--token-file", str(right))
        assert refused.code == 2
        assert "lacks scope" in refused.err


def test_people_see_the_fleet_keep_nodes_out_and_let_them_in_again(world: World) -> None:
    listed = world.run("fleet", "status", "--json").json
    assert [node["node"] for node in listed["nodes"]] == ["bad", "n1", "n2", "n3"]
    shown = world.run("fleet", "status")
    assert shown.code == 0
    assert "4 nodes" in shown.out
    assert "unhealthy" in shown.out.splitlines()[2], "the worst first"
    assert world.run("fleet").out == shown.out or "4 nodes" in shown.out
    assert "matmul" in world.run("fleet", "show", "bad").out
    assert world.run("fleet", "show", "bad", "--json").json["node"] == "bad"
    assert world.run("fleet", "show", "nobody").code == 1

    kept = world.run("fleet", "quarantine", "n3", "--reason", "new cable", "--for", "1h")
    assert (kept.code, kept.out) == (0, "n3 is quarantined for 1h: new cable\n")
    assert "new cable" in world.run("fleet", "status").out
    refused = world.run("fleet", "forget", "n3")
    assert (refused.code, refused.out, refused.err.count("\n")) == (1, "", 1), "it reports: it would come back without"
    assert "(new cable) and still reports" in refused.err
    assert "healthd fleet release n3" in refused.err
    assert world.run("fleet", "quarantine", "to-come", "--reason", "burn-in", "--unseen").code == 0
    gone = world.run("fleet", "forget", "to-come")
    assert gone.code == 0
    assert gone.out.startswith("to-come is removed, and with it its quarantine by ")
    assert gone.out.endswith(" (burn-in)\n")
    assert world.gate("q", *nodes("n3"), wait="0s").code == 75
    assert world.run("fleet", "release", "n3").code == 0
    admitted = world.gate("q2", *nodes("n3"), "--json")
    assert admitted.code == 0
    explained = world.run("fleet", "explain", "q2")
    assert explained.code == 0
    assert "ADMIT" in explained.out
    assert world.run("fleet", "explain", "q2", "--json").json["id"] == admitted.json["id"]
    assert world.run("fleet", "explain", "no-such-gate").code == 1
    assert world.run("fleet", "recover").code == 0
    assert world.run("fleet", "quarantine", "n3", "--reason", "x", "--for", "soon").code == 2
    release(world, admitted)


def test_a_slip_in_a_name_is_told_with_the_nearest_and_quarantines_nobody(world: World) -> None:
    said = world.run("fleet", "quarantine", "n33", "--reason", "new cable")
    assert (said.code, said.out) == (2, "")
    assert said.err.count("\n") == 1
    assert "no node 'n33' has ever reported; did you mean n3" in said.err
    assert "--unseen" in said.err
    assert [node["node"] for node in world.run("fleet", "status", "--json").json["nodes"]] == ["bad", "n1", "n2", "n3"]


def test_a_name_that_two_keys_claim_is_given_to_one_of_them_by_hand(world: World) -> None:
    first, second = (f"key-number-{n}-0123456789" for n in "12")

    def sync(key: str) -> int:
        request = SyncRequest(
            protocol=1,
            incarnation=key,
            seq=1,
            last_answer=None,
            since_answer_seconds=None,
            state=state("twice"),
            digest="d",
            ages={},
            orders={},
            issuer=None,
        )
        headers = {"X-Healthd-Node-Key": key, "Content-Type": "application/json"}
        with httpx.Client(trust_env=False, verify=False) as http:
            url = f"{world.url}/v1/nodes/twice/sync?wait=0"
            return http.post(url, content=wire.encode(request), headers=headers).status_code

    assert (sync(first), sync(second)) == (200, 409)
    assert "healthd fleet forget twice" in world.gate("w", *nodes("twice"), wait="2s").out
    assert world.run("fleet", "rekey", "twice").code == 0
    assert (sync(second), sync(first)) == (200, 409)
    assert world.run("fleet", "forget", "twice").out == "twice is removed\n"
    assert sync(first) == 200
    assert world.run("fleet", "forget", "twice").code == 0
    assert world.run("fleet", "rekey", "nobody").code == 1


def test_an_override_admits_whatever_the_nodes_say_until_it_is_taken_back(world: World) -> None:
    assert world.run("override", "o", "--reason", "demo", "--for", "1h").code == 0
    said = world.gate("o", *nodes("bad"), "--json")
    assert said.code == 0, said.out
    assert said.json["would"] == "reject"
    assert "override" in world.run("fleet", "status").out
    release(world, said)
    assert world.run("override", "o", "--reason", "demo", "--for", "1h", "--clear").code == 0
    assert world.run("override", "o", "--reason", "demo", "--for", "never").code == 2


def test_commands_of_the_fleet_say_in_one_line_that_nobody_is_there(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for words in (("status",), ("show", "n1"), ("release", "n1"), ("explain", "g"), ("recover",)):
        said = healthd(tmp_path, "fleet", *words, "--aggregator", url)
        assert (said.code, said.out) == (1, "")
        assert "cannot be reached" in said.err
        assert said.err.count("\n") == 1


def test_faults_are_set_and_cleared_in_a_running_daemon(tmp_path: Path) -> None:
    away = healthd(tmp_path, "fault", "set", "memory_free=fail")
    assert away.code == 1
    assert away.err.count("\n") == 1
    env = environment(tmp_path, HEALTHD_NODE_CHECKS="memory_free")
    line = [sys.executable, "-m", "healthd", "node", "--listen", f"127.0.0.1:{free_port()}"]
    with prepared.Popen(line, env=env, stderr=subprocess.DEVNULL) as node:
        try:
            for _ in range(600):
                if (tmp_path / "run" / "node.sock").exists():
                    break
                time.sleep(0.05)
            assert healthd(tmp_path, "fault", "set", "memory_free=fail").out == "active: memory_free=fail\n"
            assert healthd(tmp_path, "fault", "set", "memory_free=melt").code in (1, 2)
            assert healthd(tmp_path, "fault", "clear").out == "cleared\n"
        finally:
            node.terminate()
    assert node.returncode == 0


@pytest.mark.thorough
def test_doctor_says_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    well = healthd(tmp_path, "doctor", "--json")
    assert well.code == 0, well.out
    assert "ok" in {item["state"] for item in well.json if item["name"] == "torch"}
    for name, text in (
        ("without-torch", f'#!/bin/sh\nexec {sys.executable} -S "$@"\n'),
        ("hangs", "#!/bin/sh\nexec sleep 600\n"),
        ("absent", ""),
    ):
        python = tmp_path / name
        if text:
            python.write_text(text)
            python.chmod(0o755)
        env = {"HEALTHD_PROBE_PYTHON": str(python), "HEALTHD_PROBE_START": "0.5s"}
        said = healthd(tmp_path, "doctor", "--json", env=env)
        assert said.code == 1, name
        missing = [item for item in said.json if item["state"] == "missing"]
        assert missing
        assert missing[0]["remedy"]
        assert str(python) in json.dumps(missing)
    assert "Nothing is missing" not in healthd(tmp_path, "doctor", env=env).out


def test_the_checks_there_are_can_be_listed(tmp_path: Path) -> None:
    said = healthd(tmp_path, "checks", "--json")
    assert said.code == 0
    assert {"matmul", "all_reduce", "kernel_log"} <= {check["name"] for check in said.json}
    shown = healthd(tmp_path, "checks").out
    assert "all_reduce" in shown
    assert os.linesep * 2 not in shown


def test_what_rules_did_is_told_and_the_breaker_can_be_reset(world: World) -> None:
    told = world.run("fleet", "history", "bad")
    assert told.code == 0, told.err
    assert "failed" in told.out
    assert "matmul" in told.out
    first = world.run("fleet", "history", "bad", "--limit", "1", "--json").json
    assert len(first["events"]) == 1
    assert world.run("fleet", "history", "nobody").code == 1
    assert world.run("fleet", "breaker").out == "no breaker is open\n"
    assert world.run("fleet", "breaker", "reset").out == "no breaker is open\n"
    assert world.run("fleet", "breaker", "--json").json == {"open": {}}
    assert world.run("fleet", "breaker", "--pool", "train").out == "no breaker is open\n"
    slip = world.run("fleet", "breaker", "reset", "--pool", "tran")
    assert (slip.code, slip.out) == (2, "")
    assert "pool 'tran' has no nodes; did you mean 'train'?" in slip.err


def test_repairs_are_listed_and_decided(world: World) -> None:
    listed = world.run("fleet", "repairs")
    assert (listed.code, "WrongResult" in listed.out) == (0, True), listed.err
    said = world.run("fleet", "repairs", "accept", "bad", "--reason", "part ordered")
    assert said.out.startswith("bad: 1 repair accepted"), said.err
    (one,) = world.run("fleet", "repairs", "--json").json["repairs"]
    assert (one["state"], one["steps"][-1]["why"]) == ("accepted", "part ordered")
    assert world.run("fleet", "repairs", "accept", "bad").code == 2
    assert world.run("fleet", "repairs", "list", "bad").code == 2
    assert world.run("fleet", "repairs", "done", "bad", "--device", "gpu:9", "--reason", "r").code == 1


@pytest.mark.parametrize("what", ["stragglers", "digests", "steps"])
def test_that_nothing_was_compared_is_not_said_to_be_well(world: World, what: str) -> None:
    said = world.run("fleet", what)
    assert said.code == 3
    assert said.out.startswith("nothing was compared: ")
    assert world.run("fleet", what, "--json").code == 3


@pytest.mark.parametrize(
    "words",
    [
        ("fleet", "breaker"),
        ("fleet", "stragglers"),
        ("fleet", "digests"),
        ("fleet", "steps"),
        ("fleet", "validate", "n1", "n2"),
    ],
)
def test_an_answer_of_0_or_1_is_never_given_where_nothing_could_be_asked(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    said = healthd(tmp_path, *words, env={"HEALTHD_AGGREGATOR": "http://127.0.0.1:1"})
    assert said.code == 3
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--config", "F", "check", "matmul"), "--config belongs behind the command: healthd check --config F matmul"),
        (("version",), "use: healthd --version"),
        (("check", "no_such_check"), "no such check: 'no_such_check'"),
        (("check", "--tire", "quick"), "--tire"),
        (("fleet", "status", "--no-such-option"), "--no-such-option"),
        (("gate", "--job", "j"), "choose the nodes"),
        (("preflight", "--no-such-option"), "--no-such-option"),
        (("baseline", "/no/such/file"), "/no/such/file"),
    ],
)
def test_usage_is_2_for_every_command_and_says_what_would_be_right(
    tmp_path: Path, words: tuple[str, ...], hint: str
) -> None:
    said = healthd(tmp_path, *words)
    assert (said.code, said.out) == (2, "")
    assert hint in said.err
    assert said.err.count("\n") == 1


def test_a_release_has_its_reason_in_the_history(world: World) -> None:
    assert world.run("fleet", "quarantine", "n3", "--reason", "new cable").code == 0
    said = world.run("fleet", "release", "n3", "--reason", "the cable is in")
    assert (said.code, said.out) == (0, "n3 is released: the cable is in\n")
    assert "the cable is in" in world.run("fleet", "history", "n3").out
