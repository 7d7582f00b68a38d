"""What is old is told by the engine's clock, which stamped it: the wall clock may have been set since the start."""

from __future__ import annotations

from pathlib import Path

import httpx

from healthd.aggregator.application import make_app
from healthd.core.model import Quarantine
from tests.aggregator.application import parts_of_test
from tests.aggregator.engine_kit import running
from tests.aggregator.parts import fleet
from tests.aggregator.world import World


async def test_history_and_report_of_an_aggregator_that_started_before_the_clock_was_set(tmp_path: Path) -> None:
    async with running(World("n1")) as run:  # in January 1970
        parts = parts_of_test(tmp_path, store=run.store, fleet=fleet(), engine=run.engine)
        await run.admit(nodes=("n1",))
        word = Quarantine(reason="fan", owner="ana", owner_kind="person", since=0.0, until=None)
        await run.engine.quarantine("n1", word)
        transport = httpx.ASGITransport(app=make_app(parts), client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            events = (await client.get("/v1/nodes/n1/history")).json()["events"]
            assert events[0]["kind"] == "quarantined"
            assert "quarantined" in (await client.get("/history")).text
            assert (await client.get("/v1/report")).json()["untold"] == 1
