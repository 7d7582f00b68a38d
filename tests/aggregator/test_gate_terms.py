"""What the settings ask is a floor: a hook's token may ask for more, and for less only where the settings allow it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from checks.contract import Status, Tier
from healthd.aggregator.engine.admission import less_than_policy
from healthd.aggregator.identity.tokens import Scope
from healthd.aggregator.policy import Policy, Tuning
from healthd.aggregator.process import aggregator
from healthd.aggregator.settings import AggregatorSettings
from healthd.core.model import GateRequest, GateTerm, Join, Mode
from healthd.core.wire import convert
from tests.aggregator.api_kit import POLICY, Daemon, living
from tests.aggregator.described import check_later
from tests.cli.cli_gate_kit import aggregator as served
from tests.cli.cli_gate_kit import nodes
from tests.cli.cli_kit import healthd
from tests.every import every
from tests.patience import PATIENCE
from tests.ui.stage import tokens

TERMS: tuple[GateTerm, ...] = get_args(GateTerm)
LESS: Mapping[GateTerm, Mapping[str, Any]] = {
    "mode": {"mode": "observe"},
    "tier": {"tier": "passive"},
    "max_age": {"max_age_seconds": 3601.0},
    "collective": {"nodes": ["n1", "n2"], "collective": False},
    "lease": {"lease": False},
}
"""By term: a request that asks for less of it than the default settings do."""


def asked(**changes: Any) -> GateRequest:
    return convert({"job": "train", "nodes": ["n1"], **changes}, GateRequest, what="request")


def test_every_term_is_found_where_less_of_it_is_asked() -> None:
    assert LESS.keys() == set(TERMS)
    for term, less in LESS.items():
        assert less_than_policy(asked(**less), Policy()).keys() == {term}


@every(
    ("request_of", "policy"),
    [
        ({}, {}),
        ({"mode": "enforce"}, {"mode": Mode.OBSERVE}),
        ({"mode": "observe"}, {"mode": Mode.OBSERVE}),
        ({"tier": "deep"}, {}),
        ({"tier": "passive"}, {"tier": Tier.PASSIVE}),
        ({"max_age_seconds": 3600.0, "wait_seconds": 1.0}, {}),
        ({"collective": False}, {}),  # one node runs none anyway
        ({"nodes": ["n1", "n2"], "collective": True}, {"collective": False}),
        ({"nodes": ["n1", "n2"], "collective": False}, {"collective": False}),
        ({"nodes": ["n1", "n2"], "tier": "deep"}, {}),
        ({"nodes": ["n1", "n2"], "min_nodes": 1}, {}),
    ],
)
def test_the_same_and_more_is_not_less(request_of: dict[str, Any], policy: dict[str, Any]) -> None:
    assert less_than_policy(asked(**request_of), Policy(**policy)) == {}


def test_steps_of_training_in_the_place_of_collectives_and_a_group_without_them_are_less() -> None:
    training = asked(nodes=["n1", "n2"], kind="training", tier="deep")
    assert less_than_policy(training, Policy())["collective"].startswith("collectives without all_reduce")
    join = Join(group="g", size=2, rank=0, member="m", node="n1")
    joined = GateRequest(job="train", join=join, collective=False)
    assert less_than_policy(joined, Policy()).keys() == {"collective"}


@contextlib.asynccontextmanager
async def guarded(
    folder: Path, *callers_may: GateTerm, policy: Policy = POLICY
) -> AsyncIterator[Mapping[Scope, httpx.AsyncClient]]:
    """An aggregator with tokens, and a client with a token of each scope."""
    file, made = tokens(folder, **{scope.value: scope for scope in Scope})
    settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=folder, token_table=file)
    async with contextlib.AsyncExitStack() as stack:
        address, _ = await stack.enter_async_context(aggregator(settings, policy, callers_may=callers_may))
        clients = {}
        for scope in Scope:
            client = httpx.AsyncClient(
                base_url=f"http://{address}",
                timeout=60.0,
                trust_env=False,
                headers={"authorization": f"Bearer {made[scope.value]}"},
                event_hooks={"response": [check_later]},
            )
            clients[scope] = await stack.enter_async_context(client)
        yield clients


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 20 * PATIENCE))


def test_a_hooks_token_cannot_have_an_unhealthy_node_admitted_by_asking_to_observe(tmp_path: Path) -> None:
    async def test() -> None:
        async with guarded(tmp_path) as as_, living(as_[Scope.SYNC], "n1", status=Status.FAIL):
            question = {"job": "train", "nodes": ["n1"], "mode": "observe"}
            refused = await as_[Scope.GATE].post("/v1/gates?wait=5", json=question)
            assert refused.status_code == 403, refused.text
            told = refused.json()["detail"]
            assert "token 'gate' may not weaken the aggregator's settings: mode observe" in told
            assert "policy.mode is enforce" in told
            assert '[gate] callers_may = ["mode"]' in told
            assert (await as_[Scope.GATE].get("/v1/gates")).json()["gates"] == [], "nothing was opened"
            rejected = await as_[Scope.GATE].post("/v1/gates?wait=5", json={"job": "train", "nodes": ["n1"]})
            assert rejected.json()["decision"] == "reject"
            by_admin = await as_[Scope.ADMIN].post("/v1/gates?wait=5", json={**question, "job": "demo"})
            assert by_admin.json()["decision"] == "admit"

    run(test())


@pytest.mark.parametrize("term", TERMS)
def test_each_term_is_refused_to_a_hook_allowed_to_an_admin_and_can_be_opened_alone(
    tmp_path: Path, term: GateTerm
) -> None:
    question = {"job": "train", "nodes": ["n1"], **LESS[term]}
    for name in ("others", "open"):
        (tmp_path / name).mkdir()

    async def statuses(folder: Path, *callers_may: GateTerm) -> tuple[int, int, str]:
        policy = Policy(tuning=Tuning(settle_seconds=0.0), recovery_seconds=0.0)
        async with guarded(folder, *callers_may, policy=policy) as as_:
            hook = await as_[Scope.GATE].post("/v1/gates", json=question)
            admin = await as_[Scope.ADMIN].post("/v1/gates", json=question)
            return hook.status_code, admin.status_code, hook.json().get("detail", "")

    async def test() -> None:
        others = tuple(one for one in TERMS if one != term)
        hook, admin, told = await statuses(tmp_path / "others", *others)
        assert (hook, admin) == (403, 200), told
        assert all(f'"{one}"' in told for one in TERMS), "the setting is said whole, with what is open already"
        assert await statuses(tmp_path / "open", term) == (200, 200, "")

    run(test())


def test_a_decided_gate_shows_what_was_asked_and_what_was_applied(tmp_path: Path) -> None:
    async def test() -> None:
        async with guarded(tmp_path) as as_:
            daemon = Daemon(as_[Scope.SYNC], "n1", aliases=("slurm-1",))
            await daemon.sync()
            await daemon.sync()
            question = {"job": "train", "nodes": ["slurm-1"], "max_age_seconds": 60.0, "lease": True}
            await as_[Scope.ADMIN].put("/v1/nodes/n1/quarantine", json={"reason": "fan is loud"})
            got = (await as_[Scope.GATE].post("/v1/gates?wait=5", json=question)).json()
            assert got["decision"] == "reject"
            request = got["request"]
            assert (request["nodes"], request["max_age_seconds"]) == (["slurm-1"], 60.0)
            assert (request["mode"], request["tier"]) == (None, None), "left to the settings"
            assert (got["policy"]["mode"], got["policy"]["tier"]) == ("enforce", "quick")
            assert got["policy"]["max_age_seconds"] == 60.0

    run(test())


def test_healthd_gate_that_may_not_ask_so_ends_with_2_and_names_the_setting(tmp_path: Path) -> None:
    file, made = tokens(tmp_path, gate=Scope.GATE, admin=Scope.ADMIN)
    for name, token in made.items():
        (tmp_path / name).write_text(token)
    (tmp_path / "open.toml").write_text('[gate]\ncallers_may = ["tier"]\n')
    with served(tmp_path, "--token-table", str(file), "--config", str(tmp_path / "open.toml")) as world:
        for options in (nodes("n1"), ("--join", "g", "--size", "1", "--rank", "0")):
            hook = ("gate", "--job", "j", "--wait", "0s", *options, "--token-file", str(tmp_path / "gate"))
            refused = world.run(*hook, "--mode", "observe", "--on-unreachable", "admit")
            assert (refused.code, refused.out) == (2, ""), refused
            assert refused.err.count("\n") == 1
            assert '[gate] callers_may = ["tier", "mode"]' in refused.err
        assert world.gate("k", *nodes("n1"), "--tier", "passive", "--token-file", str(tmp_path / "gate")).code in (
            1,
            75,
        )
        admin = world.gate("l", *nodes("n1"), "--mode", "observe", "--token-file", str(tmp_path / "admin"), wait="0s")
        assert admin.code == 0, admin


def test_a_term_that_there_is_not_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text('[gate]\ncallers_may = ["modes"]\n')
    said = healthd(tmp_path, "aggregator", "--config", str(tmp_path / "wrong.toml"), "--listen", "127.0.0.1:0")
    assert (said.code, said.err.count("\n")) == (2, 1), said
    assert "gate.callers_may" in said.err
    assert "mode, tier, max_age, collective, lease" in said.err
