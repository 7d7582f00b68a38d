"""Time in the verdict over HTTP: history page by page, the breaker, release, what readiness and metrics say."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from checks.contract import Status
from healthd.aggregator.screening.settings import ScreeningSettings
from healthd.cli.fleet.screening import screening_lines
from tests.aggregator.api_kit import Daemon, living, scenario


async def lame(client: httpx.AsyncClient, *names: str) -> None:
    for name in names:
        daemon = Daemon(client, name, status=Status.FAIL)
        for _ in range(3):
            await daemon.sync()
        # What asks for a turn of the engine is answered when all that was heard before is on disk.
        await client.post("/v1/fleet/breaker/reset?pool=nowhere")


def test_history_is_paged_newest_first_and_the_node_shows_what_is_remembered(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n2", "n3"):
            await lame(client, "n1")
            shown = (await client.get("/v1/nodes/n1")).json()
            assert shown["quarantine"]["owner"] == "rule:hard"
            assert shown["rules"]["latches"][0]["identity"] == "node:n1"
            for number in range(3):
                await client.put("/v1/nodes/n1/quarantine", json={"reason": f"word {number}"})
            whole = (await client.get("/v1/nodes/n1/history")).json()
            assert whole["next"] is None
            assert [event["kind"] for event in whole["events"]] == ["quarantined"] * 4 + ["failed"]
            pages, before = [], ""
            while before is not None:
                page = (await client.get(f"/v1/nodes/n1/history?limit=2{before}")).json()
                pages += page["events"]
                before = None if page["next"] is None else f"&before={page['next']}"
            assert pages == whole["events"]
            assert (await client.get("/v1/nodes/n1/history?limit=0")).status_code == 400
            assert (await client.get(f"/v1/nodes/n1/history?before={10**20}")).status_code == 400
            assert (await client.get("/v1/nodes/nobody/history")).status_code == 404
            assert (await client.get("/v1/nodes/a..%20b/history")).status_code == 400

    scenario(test, tmp_path)


def test_an_open_breaker_is_loud_everywhere_until_it_is_reset(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n5", "n6"):
            assert (await client.get("/v1/fleet/breaker")).json() == {"open": {}}
            await lame(client, "n1", "n2", "n3")
            assert (
                "rules quarantine 2 of 5 nodes" in (await client.get("/v1/fleet")).json()["breakers"]["train"]["reason"]
            )
            ready = await client.get("/readyz")
            assert (ready.status_code, "breaker of the rules is open" in ready.text) == (200, True)
            metrics = (await client.get("/metrics")).text
            assert "healthd_quarantine_breaker_open 1.0" in metrics
            assert 'healthd_quarantined_nodes{owner_kind="rule"} 2.0' in metrics
            assert 'healthd_rule_verdicts_total{mode="held",rule="hard"} 1.0' in metrics
            for name in ("n1", "n2", "n3"):
                assert (await client.delete(f"/v1/nodes/{name}/quarantine")).status_code == 200
            assert (await client.post("/v1/fleet/breaker/reset?pool=other")).json() == {"reset": []}
            assert (await client.post("/v1/fleet/breaker/reset")).json() == {"reset": ["train"]}
            assert (await client.get("/v1/fleet/breaker")).json() == {"open": {}}
            events = (await client.get("/v1/nodes/fleet/history")).json()["events"]
            assert [event["kind"] for event in events] == ["breaker reset", "breaker tripped"]

    scenario(test, tmp_path)


def test_repairs_are_listed_and_decided_under_any_name_and_closed_by_a_release(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n2", "n3"):
            await lame(client, "n1")
            (one,) = (await client.get("/v1/fleet/repairs")).json()["repairs"]
            assert (one["node"], one["device"], one["advice"], one["state"]) == ("n1", "node", "replace", "advised")
            said = {"decision": "accept", "reason": "part ordered", "owner": "ana"}
            for _ in range(2):
                answer = await client.put("/v1/nodes/n1/repairs", json=said)
            assert [step["by"] for step in answer.json()["repairs"][0]["steps"]] == ["healthd", "ana"]
            for bad in ({}, {"decision": "later"}, {"reason": "two\nlines"}, {"device": ""}):
                assert (
                    await client.put("/v1/nodes/n1/repairs", json={**said, **bad} if bad else {})
                ).status_code == 400
            assert (await client.put("/v1/nodes/n2/repairs", json=said)).status_code == 404
            assert (await client.put("/v1/nodes/nobody/repairs", json=said)).status_code == 404
            metrics = (await client.get("/metrics")).text
            assert "healthd_repairs_open 1.0" in metrics
            await client.delete("/v1/nodes/n1/quarantine?reason=false+alarm")
            assert (await client.get("/v1/fleet/repairs")).json() == {"repairs": []}
            (ended,) = (await client.get("/v1/fleet/repairs?closed=5")).json()["repairs"]
            assert (ended["end"], "false alarm" in ended["steps"][-1]["why"]) == ("released", True)
            assert 'healthd_repair_seconds_count{advice="replace"} 0.0' in (await client.get("/metrics")).text

    scenario(test, tmp_path)


@pytest.mark.parametrize("on", [True, False])
def test_screening_lists_nodes_by_risk_with_terms_and_nothing_where_it_is_off(tmp_path: Path, on: bool) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n2", "n3"):
            found = (await client.get("/v1/fleet/screening")).json()
            while on and len(found["nodes"]) < 2:
                await asyncio.sleep(0.02)
                found = (await client.get("/v1/fleet/screening")).json()
            assert (await client.get("/v1/fleet/screening?limit=0")).status_code == 400
            lines = "\n".join(str(one) for one in screening_lines(found))
            if not on:
                assert found == {"tier": None, "nodes": [], "more": 0}
                assert "screening is off" in lines
                return
            first = found["nodes"][0]
            assert found["tier"] == "soak"
            assert first["risk"]["terms"][0] == {"name": "days_since_pass", "value": 365.0, "points": 365.0}
            assert "neighbour_failed" in first["risk"]["unknown"]
            risks = [one["risk"]["total"] for one in found["nodes"]]
            assert risks == sorted(risks, reverse=True)
            one = (await client.get("/v1/fleet/screening?limit=1")).json()
            assert (len(one["nodes"]), one["more"]) == (1, 1)
            assert (await client.get("/v1/fleet/screening?pool=other")).json()["nodes"] == []

    scenario(test, tmp_path, screening=ScreeningSettings(tier="soak") if on else None)
