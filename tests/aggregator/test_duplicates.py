"""That two daemons claim one name outlives a restart of the aggregator, until an admin has decided."""

from __future__ import annotations

from pathlib import Path

import httpx

from healthd.core.model import SyncRequest
from healthd.core.wire import encode
from tests.aggregator.api_kit import Daemon, running
from tests.aggregator.parts import KEY, state

OTHER = "another-key-another-key"


async def sync(client: httpx.AsyncClient, key: str, incarnation: str, seq: int = 1, answer: str | None = None) -> int:
    return (await answered(client, key, incarnation, seq, answer)).status_code


async def answered(
    client: httpx.AsyncClient, key: str, incarnation: str, seq: int, answer: str | None
) -> httpx.Response:
    request = SyncRequest(
        protocol=1, incarnation=incarnation, seq=seq, last_answer=answer, since_answer_seconds=None if answer is None
        else 0.0, state=state("n1"), digest="d", ages={}, orders={}, issuer=None,
    )  # fmt: skip
    url, headers = "/v1/nodes/n1/sync", {"x-healthd-node-key": key}
    return await client.post(url, content=encode(request), headers=headers)


async def first_reason(client: httpx.AsyncClient) -> str:
    """The first reason of the node, and of a gate that asks for it."""
    shown = (await client.get("/v1/nodes/n1")).json()
    asked = {"job": "train", "nodes": ["n1"], "wait_seconds": 0}
    decision = (await client.post("/v1/gates?wait=5", json=asked)).json()
    assert decision["decision"] == "reject"
    assert decision["reasons"][0]["code"] == shown["reasons"][0]["code"]
    return str(shown["reasons"][0]["code"])


async def test_name_that_two_keys_claimed_is_still_a_duplicate_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        await Daemon(client, "n1").sync()
        assert await sync(client, OTHER, "i9") == 409
    async with running(tmp_path) as client:
        own = Daemon(client, "n1")
        own.seq = 10
        await own.sync()
        await own.sync()
        assert await first_reason(client) == "DuplicateNode"
        rekeyed = await client.post("/v1/nodes/n1/rekey")
        assert rekeyed.status_code == 200, "which key came is known, too"
    async with running(tmp_path) as client:
        assert await sync(client, KEY, "i1", 20) == 409
        assert await sync(client, OTHER, "i9", 2) == 200


async def test_duplicate_that_an_admin_settled_is_none_after_a_restart(tmp_path: Path) -> None:
    for settle in ("rekey", "forget"):
        async with running(tmp_path) as client:
            await sync(client, KEY, "i1")
            assert await sync(client, OTHER, "i9") == 409
            if settle == "rekey":
                assert (await client.post("/v1/nodes/n1/rekey")).status_code == 200
            else:
                assert (await client.delete("/v1/nodes/n1")).status_code == 200
        async with running(tmp_path) as client:
            assert await sync(client, OTHER, "i9", 2) == 200
            assert not (await client.get("/v1/nodes/n1")).json()["duplicate"]
            assert (await client.delete("/v1/nodes/n1")).status_code == 200


async def test_two_daemons_that_hold_one_key_are_still_duplicates_after_a_restart(tmp_path: Path) -> None:
    """As of a machine image with a key in it."""
    async with running(tmp_path) as client:
        first = Daemon(client, "n1")
        await first.sync()
        second = (await answered(client, KEY, "i2", 1, None)).json()
        assert await sync(client, KEY, "i2", 2, second["answer"]) == 200
        await first.sync()  # it is answered as one that was there before
        assert first.answer is not None
        assert await sync(client, KEY, "i1", 9, first.answer.answer) == 409
    async with running(tmp_path) as client:
        assert await sync(client, KEY, "i2", 3) == 200
        assert (await client.get("/v1/nodes/n1")).json()["duplicate"]


async def test_late_request_of_a_former_daemon_to_an_aggregator_that_has_just_started_makes_no_duplicate(
    tmp_path: Path,
) -> None:
    """Daemon and aggregator started again at the same time: the last request of the former daemon comes second."""
    async with running(tmp_path) as client:
        assert await sync(client, KEY, "i2") == 200
        assert await sync(client, KEY, "i1", 9, "an-answer-of-the-former-aggregator") == 200
        taken = (await answered(client, KEY, "i2", 2, None)).json()
        assert await sync(client, KEY, "i2", 3, taken["answer"]) == 200
        assert await sync(client, KEY, "i1", 10) == 200, "it may come once more"
        assert not (await client.get("/v1/nodes/n1")).json()["duplicate"]
