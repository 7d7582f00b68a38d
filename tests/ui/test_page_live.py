"""The page before a real fleet: an aggregator and node daemons as processes, real checks, a real browser."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.aggregator.cluster import Cluster, ask, release
from tests.aggregator.service import until
from tests.ui.stage import Watch

pytestmark = [pytest.mark.system("chromium")]

NODES = ("n1", "n2", "n3")
# From a node's sync until it is seen in the browser: a second on a quiet machine. Without a live stream it is never.
SEEN_SECONDS = 9.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("live")) as one:
        one.fleet(*NODES)
        yield one


@pytest.fixture
def page(browser: Any, cluster: Cluster) -> Iterator[Any]:
    """A page that must have had nothing to complain about in the end."""
    found = browser.new_page()
    watch = Watch(found)
    yield found
    watch.clean()
    found.close()


def url_of(cluster: Cluster) -> str:
    return cluster.services["aggregator"].url


def health_of(cluster: Cluster, node: str) -> str:
    return str(cluster.services["aggregator"].get(f"/v1/nodes/{node}").json()["health"])


def live(page: Any, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("#live.live:not(.off)")


def test_a_fault_is_in_the_grid_soon_after_its_sync_and_its_page_tells_why_and_what_to_do(
    cluster: Cluster, page: Any
) -> None:
    live(page, url_of(cluster))
    page.wait_for_selector("#c-n2.healthy", timeout=15_000)
    assert "All 3 nodes are healthy" in page.inner_text("h1")
    run_dir = ("--run-dir", str(cluster.run_dir("n2")))
    assert cluster.healthd("fault", "set", "proof@node=fail", *run_dir).code == 0
    until(lambda: health_of(cluster, "n2") == "unhealthy")
    began = time.monotonic()
    page.wait_for_selector("#c-n2.unhealthy", timeout=1000 * SEEN_SECONDS)
    page.wait_for_selector("h1:has-text('A drill is on; no node needs attention')", timeout=1000 * SEEN_SECONDS)
    assert time.monotonic() - began < SEEN_SECONDS
    assert "n2: unhealthy" in page.get_attribute("#c-n2", "aria-label")
    assert page.locator("#c-n1.healthy, #c-n3.healthy").count() == 2
    page.click("#c-n2")
    page.wait_for_selector("h1:has-text('n2')")
    why = page.inner_text(".why >> nth=0")
    assert "proof" in why
    assert why.startswith("DRILL")
    assert "Nothing to repair: the fault was injected" in why
    assert page.locator("h1 .tag.drill").count() == 1
    assert page.locator(".why a.code").count() >= 1
    assert "A drill is on" in page.inner_text("#head")
    assert page.locator(".device").count() == 1
    assert page.locator("table.checks tbody tr >> nth=0").inner_text().startswith("proof")
    # It is well again, and the page says so by itself.
    page.wait_for_selector("#live.live:not(.off)")
    assert cluster.healthd("fault", "clear", *run_dir).code == 0
    page.wait_for_selector("h1 .badge.healthy", timeout=20_000)
    assert "Every applicable check has passed" in page.inner_text("#head")


def test_a_person_quarantines_by_form_gates_keep_off_and_the_release_is_remembered(cluster: Cluster, page: Any) -> None:
    url = url_of(cluster)
    page.goto(f"{url}/nodes/n3")
    page.fill("form[action$=quarantine] input[name=reason]", "the fan is loud")
    page.select_option("select[name=end]", "1h")
    page.click("text=Quarantine n3")
    page.wait_for_url("**/nodes/n3?done=quarantined")
    assert "the fan is loud" in page.inner_text("#head")
    refused = ask(url, "on-n3", ["n3"], wait=5.0)
    assert (refused["decision"], refused["reasons"][0]["code"]) == ("reject", "Quarantined")
    page.goto(f"{url}/gates/{refused['id']}")
    assert "reject" in page.inner_text("h1")
    assert "the fan is loud" in page.inner_text("main")
    page.goto(url)
    page.wait_for_selector("#c-n3.quarantined")
    page.goto(f"{url}/nodes/n3")
    page.fill("form[action$=release] input[name=reason]", "new fan")
    page.click("text=Release n3")
    page.wait_for_url("**/nodes/n3?done=released")
    assert page.locator("#head strong:has-text('Quarantined')").count() == 0
    assert "new fan" in page.inner_text("#history")
    admitted = ask(url, "on-n3-again", ["n3"], wait=10.0)
    assert admitted["decision"] == "admit", admitted
    release(url, admitted["id"])


def test_a_gate_is_followed_from_what_it_waits_for_to_its_decision(cluster: Cluster, browser: Any, page: Any) -> None:
    url = url_of(cluster)
    first = ask(url, "first", ["n1"], wait=10.0)
    assert first["decision"] == "admit", first
    second = ask(url, "second", ["n1"], wait=0.0)
    assert second["decision"] == "hold"
    page.goto(f"{url}/gates")
    assert "first" in page.inner_text("#decided")
    page.wait_for_selector("#open >> text=second")
    live(page, f"{url}/gates/{second['id']}")
    assert "hold" in page.inner_text("h1")
    assert "waiting for nodes" in page.inner_text(".steps [aria-current=step]")
    assert "first" in page.inner_text("#head"), "it says which job it waits for"
    other = browser.new_page()
    live(other, url)
    other.wait_for_selector("#c-n1.taken", timeout=10_000)
    release(url, first["id"])
    page.wait_for_selector("h1 .badge:has-text('admit')", timeout=15_000)
    assert page.locator(".steps").count() == 0
    assert "n1" in page.inner_text("#nodes")
    other.close()
    release(url, second["id"])


def test_observe_mode_decisions_say_what_enforce_would_have_said(cluster: Cluster, page: Any) -> None:
    url = url_of(cluster)
    cluster.services["aggregator"].get("/livez")
    page.goto(f"{url}/nodes/n2")
    page.fill("form[action$=quarantine] input[name=reason]", "looked at")
    page.click("text=Quarantine n2")
    page.wait_for_url("**done=quarantined")
    watched = ask(url, "watched", ["n2"], wait=5.0, mode="observe")
    assert (watched["decision"], watched["would"]) == ("admit", "reject")
    page.goto(f"{url}/gates")
    assert "enforce: reject" in page.inner_text("tr:has-text('watched')")
    page.goto(f"{url}/gates/{watched['id']}")
    assert "Enforce would have said reject" in page.inner_text("#head")
    release(url, watched["id"])
    page.goto(f"{url}/nodes/n2")
    page.fill("form[action$=release] input[name=reason]", "fine")
    page.click("text=Release n2")
    page.wait_for_url("**done=released")
