"""The page of a fleet of several shards, in a real browser and without one, at an aggregator that leads one of two."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.aggregator.cluster import Cluster
from tests.aggregator.service import Service, until
from tests.aggregator.sharded import Fleet
from tests.ui.stage import chromium

pytestmark = [pytest.mark.system, pytest.mark.parametrize("url", ["postgresql"], indirect=True)]


class Two:
    """Two aggregators that lead a shard each, with a node in it: `asked` leads `default`, `other` leads `b`."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        first, second = fleet.begin()
        self.asked: Service = first if fleet.led(first)["default"] == first.url else second
        self.other: Service = second if self.asked is first else first

    def page(self, path: str) -> str:
        answer = self.asked.get(path)
        assert answer.status_code == 200, answer.text
        return answer.text


@pytest.fixture
def two(tmp_path: Path, url: str) -> Iterator[Two]:
    with Cluster(tmp_path) as cluster:
        yield Two(Fleet(cluster, url))


def test_pages_show_all_shards_and_a_filter_shows_one(two: Two) -> None:
    for node in ("n1", "n2"):
        admitted = two.fleet.cluster.gate(two.asked.url, f"job-{node}", "--node", node, "--wait", "60s")
        assert admitted.code == 0, admitted.err
    until(lambda: "All 2 nodes are healthy" in two.page("/"), 20, lambda: two.page("/"))
    whole = two.page("/")
    assert all(f'href="/nodes/{node}"' in whole for node in ("n1", "n2"))
    assert two.asked.url in whole
    assert two.other.url in whole
    of_b = two.page("/?shard=b")
    assert ('id="c-n2"' in of_b, 'id="c-n1"' in of_b) == (True, False)
    assert 'id="c-n2"' in two.page("/?q=part%3Db")
    assert 'id="c-n1"' not in two.page("/?q=part%3Db")
    for path in ("/gates", "/history"):
        assert all(f"job-{node}" in two.page(path) for node in ("n1", "n2"))
        of_b = two.page(f"{path}?shard=b")
        assert ("job-n2" in of_b, "job-n1" in of_b) == (True, False)
    assert all(node in two.page("/several") for node in ("n1", "n2"))
    assert "2 nodes measured" in two.page("/heat")
    assert "Jobs that died" in two.page("/jobs")
    assert "No node has it first now" in two.page("/reasons/NotYetRun")
    unknown = two.asked.get("/?shard=x")
    assert (unknown.status_code, "there are: b, default" in unknown.text) == (400, True)


def test_page_follows_all_shards_and_says_in_red_which_does_not_answer(two: Two) -> None:
    with chromium() as browser:
        page = browser.new_page()
        page.goto(two.asked.url)
        page.wait_for_selector("#live.live:not(.off)")
        page.wait_for_selector("#c-n2.healthy")
        said = two.fleet.cluster.healthd("fleet", "quarantine", "n2", "--reason", "look", "--aggregator", two.other.url)
        assert said.code == 0, said.err
        page.wait_for_selector("#c-n2.quarantined")
        assert page.locator("#top tbody tr").count() >= 2
        two.other.signal(signal.SIGSTOP)
        page.reload()
        page.wait_for_selector("p.notice.unhealthy:has-text('Shard b does not answer')")
        assert "1 of 2 shards does not answer" in page.text_content("h1")
        page.wait_for_selector("#top:not(:has(p.notice.unhealthy))", timeout=60_000)
        page.wait_for_selector("#c-n2.quarantined")
        two.other.signal(signal.SIGCONT)


def test_nodes_of_two_shards_are_quarantined_and_released_by_one_form(two: Two) -> None:
    with chromium() as browser:
        page = browser.new_page()
        for doing in ("quarantine", "release"):
            page.goto(f"{two.asked.url}/several")
            for node in ("n1", "n2"):
                page.check(f"input[value={node}]", force=True)
            page.fill("input[name=reason]", "a look at both")
            page.click(f"button[value={doing}]")
            page.wait_for_selector(f"p.notice.healthy:has-text('2 nodes {doing.removesuffix('e')}')")
            kept: list[Any] = [two.asked.get(f"/v1/nodes/{node}").json()["quarantine"] for node in ("n1", "n2")]
            assert [one and one["reason"] for one in kept] == ["a look at both" if doing == "quarantine" else None] * 2
