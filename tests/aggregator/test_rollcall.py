"""The ranks of a preflight: started alike or told which was not, and waited for only when they have come."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from healthd.aggregator.engine.preflights import MOST_ASKED, RollCall, RollCallBody, difference
from healthd.aggregator.identity.tokens import Scope, new_token
from healthd.core.errors import BadInputError
from healthd.hooks.preflight.hook import with_hosts
from tests.aggregator.api_kit import living, scenario
from tests.every import every


def rank(number: int, nnodes: int, *, wait: float | None = None) -> RollCallBody:
    return RollCallBody(node=f"rank-{number}", rank=number, options={"--nnodes": str(nnodes)}, wait_seconds=wait)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({0: 3, 1: 3, 2: 3}, None),
        ({0: 3, 1: 4}, "--nnodes is 3 on rank 0 and 4 on rank 1; "),
        ({0: 3, 1: 4, 2: 3, 3: 4}, "--nnodes is 3 on ranks 0, 2 and 4 on ranks 1, 3; "),
        (dict.fromkeys(range(64), 64) | {7: 63}, "64 on ranks 0, 1, 2, 3, 4, 5, 6, 8 and 55 more and 63 on rank 7; "),
    ],
)
def test_difference_names_which_rank_says_which_number(sizes: dict[int, int], said: str | None) -> None:
    text = difference((number, {"--nnodes": str(size)}) for number, size in sizes.items())
    assert text is None if said is None else text is not None and said in text


def test_option_that_one_rank_has_not_is_a_difference() -> None:
    text = difference([(0, {"--nnodes": "2", "--min-nodes": "1"}), (1, {"--nnodes": "2"})])
    assert text is not None
    assert "--min-nodes is 1 on rank 0 and not given on rank 1" in text


def test_those_who_came_before_the_difference_are_told_when_they_ask_again() -> None:
    call = RollCall()
    assert call.answer(rank(1, 3)).wait_seconds is None, "the main node has not come"
    assert call.answer(rank(0, 3, wait=7.5)).wait_seconds == 7.5
    late = call.answer(rank(2, 4))
    assert late.difference is not None
    assert not late.all_told
    assert not call.answer(rank(0, 3)).all_told
    assert call.answer(rank(1, 3)).all_told


def test_processes_of_one_rank_are_compared_each() -> None:
    call = RollCall()
    for local, size in enumerate(("2", "3", "2")):
        body = RollCallBody(node="rank-0", rank=0, local_rank=local, options={"--nnodes": size})
        told = call.answer(body).difference
    assert told is not None
    assert "--nnodes is 2 on rank 0 and 3 on rank 0" in told
    call.answer(RollCallBody(node="rank-0", rank=0, local_rank=1, options={"--nnodes": "2"}))
    assert call.answer(rank(1, 2)).difference is None, "it was started anew, like the others"


def test_many_ranks_that_are_alike_cost_each_the_same() -> None:
    class Counted(dict[str, str]):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return super().__eq__(other)

        def __iter__(self) -> Iterator[str]:
            Counted.compared += 1
            return super().__iter__()

        __hash__ = None  # type: ignore[assignment]

    call = RollCall()
    for number in range(300):
        call.answer(RollCallBody(node=f"n{number}", rank=number, options=Counted({"--nnodes": "300"})))
    assert len(call.nodes) == 300
    assert Counted.compared <= 10 * 300


def test_standing_aggregator_has_no_roll_call(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        body = {"node": "rank-0", "rank": 0, "options": {}}
        assert (await client.post("/v1/preflight/ranks", json=body)).status_code == 404

    scenario(test, tmp_path)


@every(
    "wrong",
    [
        {"rank": -1},
        {"rank": 10**9},
        {"local_rank": -1},
        {"wait_seconds": -1.0},
        {"options": {"x" * 301: "1"}},
        {"options": {str(number): "1" for number in range(17)}},
        {"node": "a\nb"},
    ],
)
def test_roll_call_has_bounds(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInputError):
        RollCall().answer(RollCallBody(**({"node": "rank-0", "rank": 0, "options": {}} | wrong)))


def test_end_of_a_preflight_waits_for_those_alone_who_have_come(tmp_path: Path) -> None:
    """A rank that never came cannot be told the end; the main node used to wait 15 s for it."""

    async def test(client: httpx.AsyncClient) -> None:
        for number in (0, 1):
            body = {"node": f"rank-{number}", "rank": number, "options": {}, "wait_seconds": 0.0}
            assert (await client.post("/v1/preflight/ranks", json=body)).status_code == 200
        async with living(client, "rank-0", "rank-1"):
            question = {"job": "p", "nodes": ["rank-0", "rank-1", "rank-2"], "wait_seconds": 0}
            gate = (await client.post("/v1/gates?wait=5", json=question)).json()
            assert gate["decision"] == "reject"

            async def tell(node: str) -> bool:
                path = f"/v1/gates/{gate['id']}/handshake"
                answer = await client.post(path, json={"node": node, "event": "told"})
                return bool(answer.json()["all_told"])

            assert not await tell("rank-0")
            assert await tell("rank-1")
            assert await tell("rank-2"), "one that comes after all is no stranger"

    scenario(test, tmp_path, preflight=True)


def test_roll_call_needs_a_token_where_there_are_some(tmp_path: Path) -> None:
    (tmp_path / "tokens.toml").write_text(new_token("me", [Scope.GATE])[1])
    (tmp_path / "tokens.toml").chmod(0o600)

    async def test(client: httpx.AsyncClient) -> None:
        body = {"node": "rank-0", "rank": 0, "options": {}}
        assert (await client.post("/v1/preflight/ranks", json=body)).status_code == 401

    scenario(test, tmp_path, preflight=True, token_table=tmp_path / "tokens.toml")


def test_ranks_are_told_the_hosts_that_they_ask_for_as_far_as_they_are_known() -> None:
    call = RollCall()
    for number, host in enumerate(("gpu-17.local", "", "gpu-18")):
        call.answer(RollCallBody(node=f"rank-{number}", rank=number, options={}, host=host))
    call.answer(RollCallBody(node="rank-0", rank=0, local_rank=1, options={}, host="of-another-process"))
    body = RollCallBody(node="rank-2", rank=2, options={}, host="gpu-18", asked=(0, 1, 2, 3))
    answer = call.answer(body)
    assert answer.hosts == {"0": "gpu-17.local", "2": "gpu-18"}
    assert with_hosts("rank-0: x; rank-1, rank-22", answer.hosts) == "gpu-17.local (rank 0): x; rank-1, rank-22"
    for wrong in ({"host": "a b"}, {"host": "[red]"}, {"asked": tuple(range(MOST_ASKED + 1))}):
        with pytest.raises(BadInputError):
            call.answer(dataclasses.replace(body, **wrong))
