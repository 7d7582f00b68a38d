"""Finding, comparing and acting over the whole fleet, in a real browser: search, keys, heat map, events, actions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.sync_api import expect

from checks.contract import Status
from healthd.aggregator.identity.tokens import Scope
from healthd.aggregator.page import overview as fleet_page
from tests.ui.fleet import report
from tests.ui.stage import Stage, Watch, stage, tokens

pytestmark = [pytest.mark.system("chromium")]

AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"
SLOW, TAKEN = "trn-07", "trn-20"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("overview")) as made:
        report(made)
        with made.http() as client:
            asked = client.post("/v1/gates", json={"job": "llama-70b", "nodes": [TAKEN], "collective": False}).json()
            for _ in range(3):
                made.say(TAKEN)
            client.put("/v1/overrides/demo", json={"reason": "demo at ten", "for_seconds": 3600})
            waits = client.post("/v1/gates", json={"job": "waits", "nodes": [SLOW], "collective": False}).json()
            made.gates = [asked["id"], waits["id"]]  # type: ignore[attr-defined]
        yield made


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, timezone_id="Europe/Berlin", locale="en-GB")
    page = context.new_page()
    watch = Watch(page)
    yield page
    watch.clean()
    context.close()


def shown(page: Any) -> list[str]:
    return [one.removeprefix("c-") for one in page.eval_on_selector_all(".cells a", "all => all.map(a => a.id)")]


# --- search ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "nodes"),
    [
        ("TRN-1", [f"trn-{i}" for i in range(10, 20)]),  # names
        ("team=vision r1", [f"trn-{i:02d}" for i in range(8)]),  # labels, every word
        ("llama", [TAKEN]),  # jobs
        ("slowdev", [SLOW]),  # reasons
        ("sn-trn-31-07", ["trn-31"]),  # serial numbers
        ("nothing-has-this", []),
    ],
)
def test_the_grid_follows_what_is_typed(page: Any, found: Stage, typed: str, nodes: list[str]) -> None:
    page.goto(found.url)
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "q"
    page.keyboard.type(typed)
    expect(page.locator(".cells a")).to_have_count(len(nodes))
    assert sorted(shown(page)) == nodes
    assert page.evaluate("document.activeElement.name") == "q", "what is typed is not interrupted"
    page.reload()
    assert sorted(shown(page)) == nodes, "the address says what is shown"
    if not nodes:
        assert "Show all" in page.inner_text("#groups")


def test_a_search_that_finds_many_shows_a_page_of_them(
    page: Any, found: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what a first letter finds in a large fleet is not rendered whole."""
    monkeypatch.setattr(fleet_page, "MOST_FOUND", 10)
    page.goto(found.url)
    everything = page.locator(".cells a").count()
    page.keyboard.press("/")
    page.keyboard.type("trn")
    expect(page.locator(".cells a")).to_have_count(10)
    expect(page.locator("#found")).to_contain_text(", page 1 of ")
    page.locator("#pages a").first.click()
    expect(page.locator("#pages [aria-current=page]")).to_have_text("2")
    page.fill("input[name=q]", "")
    expect(page.locator(".cells a")).to_have_count(everything)
    expect(page.locator("#pages")).to_be_hidden()


def test_what_was_asked_for_is_given_up_when_more_is_typed(page: Any, found: Stage) -> None:
    page.goto(found.url)
    held: list[Any] = []
    page.route("**/?*part=grid*", lambda route: route.continue_() if held else held.append(route))
    page.keyboard.press("/")
    with page.expect_request("**/?*part=grid*"):
        page.keyboard.type("trn")
    with page.expect_event("requestfailed") as failed:
        page.keyboard.type("-07")
    assert failed.value.url.endswith("q=trn&part=grid")
    expect(page.locator(".cells a")).to_have_count(1)


def test_a_choice_acts_without_a_button_and_stays_through_a_refresh(page: Any, found: Stage) -> None:
    page.goto(found.url)
    page.wait_for_selector("#live.live:not(.off)")
    assert page.locator("#grid button:visible").count() == 0
    page.select_option("select[name=health]", "unhealthy")
    expect(page.locator(".cells a")).to_have_count(1)
    page.fill("input[name=q]", "trn-07")
    found.say("trn-47", labels={"pool": "train", "rack": "r9", "team": "speech"})
    page.wait_for_timeout(1500)  # a refresh of the page's parts takes at most a second
    assert shown(page) == [SLOW]
    found.say("trn-47", labels={"pool": "train", "rack": "r3", "team": "speech"})


def test_the_slash_key_is_a_letter_where_somebody_types(page: Any, found: Stage) -> None:
    page.goto(f"{found.url}/nodes/{SLOW}")
    page.fill("form[action$=quarantine] input[name=reason]", "either")
    page.focus("form[action$=quarantine] input[name=reason]")
    page.keyboard.press("End")
    page.keyboard.type("/or")
    assert page.input_value("form[action$=quarantine] input[name=reason]") == "either/or"


# --- keys -----------------------------------------------------------------------------------------------------------


def test_the_grid_is_one_stop_of_tab_and_arrows_go_through_it(page: Any, found: Stage) -> None:
    def here() -> str:
        return str(page.evaluate("document.activeElement.id")).removeprefix("c-")

    page.goto(found.url)
    page.focus("#several")
    page.keyboard.press("Tab")
    assert here() == "trn-00"
    page.keyboard.press("ArrowRight")
    assert here() == "trn-01"
    page.keyboard.press("ArrowDown")
    below = here()
    top = "n => document.getElementById('c-' + n).getBoundingClientRect()"
    assert page.evaluate(f"({top})('{below}').top > ({top})('trn-01').top")
    assert page.evaluate(f"({top})('{below}').left === ({top})('trn-01').left")
    page.keyboard.press("ArrowUp")
    assert here() == "trn-01"
    page.keyboard.press("End")
    assert here() == "trn-47"
    page.keyboard.press("Tab")
    assert not here().startswith("trn"), "one stop"
    page.keyboard.press("Shift+Tab")
    assert here() == "trn-47", "where it was left"
    page.keyboard.press("Home")
    assert here() == "trn-00"


# --- a node ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [SLOW, "trn-01", TAKEN])
def test_the_page_of_a_node_is_short_and_begins_with_what_is_wrong(page: Any, found: Stage, node: str) -> None:
    page.goto(f"{found.url}/nodes/{node}")
    assert page.evaluate("document.documentElement.scrollHeight") < 2500
    places = {
        part: page.evaluate("id => document.getElementById(id).getBoundingClientRect().top", part)
        for part in ("head", "measured", "checks", "devices", "history")
    }
    assert sorted(places, key=places.__getitem__) == list(places)
    assert page.locator("#skipped").get_attribute("open") is None
    assert not page.get_by_text("no GPU on this node").first.is_visible()
    page.click("#skipped summary")
    assert page.get_by_text("no GPU on this node").first.is_visible()


def test_what_was_measured_is_drawn_over_time_with_its_limit_and_units(page: Any, found: Stage) -> None:
    page.goto(f"{found.url}/nodes/{SLOW}")
    card = page.locator(".measured .card", has_text="matmul flops per second")
    assert "TFLOP/s" in card.locator(".value").inner_text()
    assert "at least 80 TFLOP/s (learned)" in card.inner_text()
    assert "over 3.7 h" in card.inner_text()
    drawn = card.locator("svg")
    assert drawn.locator("circle").count() == 12
    limit = float(drawn.locator("line.limit").get_attribute("y1"))
    bad = [float(dot.get_attribute("cy")) for dot in drawn.locator("circle.unhealthy").all()]
    good = [float(dot.get_attribute("cy")) for dot in drawn.locator("circle.healthy").all()]
    assert max(good) < limit < min(bad), "what is too slow lies below the line"
    for value in page.locator(".value").all():
        assert value.inner_text().split(" ")[1] in ("TFLOP/s", "GB/s"), "a number without its unit"


# --- heat map -------------------------------------------------------------------------------------------------------


def test_the_heat_map_shows_any_measurement_in_the_order_of_a_label(page: Any, found: Stage) -> None:
    page.goto(f"{found.url}/heat")
    assert [one.split("\n")[0].split(" ")[0] for one in page.locator(".group h2").all_inner_texts()] == [
        "r1",
        "r2",
        "r3",
    ]
    slow = page.locator(f"#c-{SLOW}")
    assert slow.get_attribute("class") == "heat-0 bad"
    assert "below the median, beyond its limit" in slow.get_attribute("aria-label")
    assert slow.locator("i").inner_text() == "✕", "not by its colour alone"
    assert page.locator("#c-trn-01").get_attribute("class") == "heat-3", "noise is not stretched over all colours"
    assert "48 nodes measured" in page.inner_text("#found")
    page.select_option("select[name=of]", "disk_free_ratio")
    expect(page.locator("#found")).to_contain_text("%")
    page.fill("input[name=q]", "r2")
    expect(page.locator(".cells a")).to_have_count(16)


# --- events ---------------------------------------------------------------------------------------------------------


def test_events_say_what_happened_where_when_and_who_did_it(page: Any, found: Stage) -> None:
    with found.http() as client:
        client.put("/v1/nodes/trn-33/quarantine", json={"reason": "loud fans", "owner": "ops", "for_seconds": 600})
    page.goto(f"{found.url}/history")
    row = page.locator("tr", has_text="loud fans")
    text = row.inner_text()
    assert "quarantined" in text
    assert "trn-33" in text
    assert "by ops" in text
    link = page.locator("td.on a", has_text="job llama-70b").first.bounding_box()
    assert link["height"] < 24, "the name of a job is in one line"
    when, local = row.locator("time").inner_text(), row.locator(".local").inner_text()
    assert when.endswith(" UTC")
    hours = [int(words.split(":")[0][-2:]) for words in (when, local)]
    assert (hours[1] - hours[0]) % 24 in (1, 2), "Berlin is an hour or two ahead"
    page.keyboard.press("/")
    page.keyboard.type("override demo")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(1)
    assert "demo at ten" in page.inner_text("tbody")
    page.fill("input[name=q]", "100%_sure")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(0)
    assert "Show all" in page.inner_text("#groups")


# --- several nodes --------------------------------------------------------------------------------------------------


def test_several_nodes_are_kept_out_and_let_in_at_once(page: Any, found: Stage) -> None:
    page.goto(found.url)
    page.fill("input[name=q]", "rack=r3 speech")
    expect(page.locator(".cells a")).to_have_count(16)
    page.click("#several")
    page.wait_for_url("**/several?*")
    assert page.locator("input[name=node]").count() == 16
    chosen = ["trn-40", "trn-41", "trn-42"]
    for node in chosen:
        page.check(f"input[value={node}]")
    assert page.inner_text("#chosen") == "3"
    page.fill("input[name=reason]", "new switch")
    page.click("button[value=quarantine]")
    assert "3 nodes quarantined" in page.inner_text("main")
    with found.http() as client:
        said = {node: client.get(f"/v1/nodes/{node}").json()["quarantine"] for node in chosen}
        assert {one["reason"] for one in said.values()} == {"new switch"}
        assert client.get("/v1/nodes/trn-43").json()["quarantine"] is None
    for node in chosen:
        page.check(f"input[value={node}]")
    page.fill("input[name=reason]", "switch is in")
    page.click("button[value=release]")
    assert "3 nodes released" in page.inner_text("main")
    with found.http() as client:
        assert {client.get(f"/v1/nodes/{node}").json()["quarantine"] for node in chosen} == {None}


def test_several_nodes_are_validated_together(page: Any, found: Stage) -> None:
    page.goto(f"{found.url}/several?q=rack%3Dr2")
    for node in ("trn-24", "trn-25"):
        page.check(f"input[value={node}]")
    page.click("button[value=validate]")
    page.wait_for_url("**/gates/*")
    assert page.inner_text("h1").startswith("validation-")


def test_a_form_without_nodes_or_reason_changes_nothing_and_says_why(found: Stage) -> None:
    with found.http() as client:
        word = client.get("/several").text.split('name="word" value="')[1].split('"')[0]

        def send(**fields: object) -> tuple[int, str]:
            answer = client.post("/several", data={"word": word, **fields})  # type: ignore[arg-type]
            return answer.status_code, answer.text

        assert send(do="release", reason="x") == (400, send(do="release", reason="x")[1])
        assert "no node is chosen" in send(do="release", reason="x")[1]
        assert "give a reason" in send(do="quarantine", node=["trn-44"], end="1h")[1]
        assert "nobody-there" in send(do="quarantine", node=["trn-44", "nobody-there"], end="1h", reason="x")[1]
        assert send(do="quarantine", node=["trn-44"], end="1h", reason="x", word2="y")[0] == 400
        assert client.get("/v1/nodes/trn-44").json()["quarantine"] is None
        assert client.post("/several", data={"word": "other", "do": "release", "node": "trn-44"}).status_code == 403


def test_who_may_only_read_sees_no_buttons_and_may_send_no_form(tmp_path: Path) -> None:
    file, made = tokens(tmp_path, nodes=Scope.SYNC, eyes=Scope.READ)
    with stage(tmp_path, token_table=file, sync_token=made["nodes"]) as guarded:
        guarded.say("n1", status=Status.PASS)
        with guarded.http(headers={"authorization": f"Bearer {made['eyes']}"}) as client:
            text = client.get("/several").text
            assert 'value="quarantine"' not in text
            assert "scope <code>admin</code>" in text
            assert client.post("/several", data={"do": "release", "node": "n1"}).status_code == 403
            assert client.post("/gates/g-1/override", data={"reason": "x"}).status_code == 403


def test_a_job_is_admitted_by_hand_from_the_page_of_its_gate(page: Any, found: Stage) -> None:
    waits = found.gates[1]  # type: ignore[attr-defined]
    page.goto(f"{found.url}/gates/{waits}")
    page.fill("#override input[name=reason]", "it is a drill")
    page.click("#override button")
    page.wait_for_url(f"**/gates/{waits}")
    with found.http() as client:
        assert client.get("/v1/overrides/waits").json()["reason"] == "it is a drill"


# --- everybody ------------------------------------------------------------------------------------------------------

EMPTY = {
    "/": "healthd node --aggregator",
    "/heat": "healthd node --aggregator",
    "/history": "are listed here",
    "/gates": "healthd gate",
    "/several": "Show all",
}


def test_pages_of_an_empty_fleet_say_what_to_do_next(tmp_path: Path) -> None:
    with stage(tmp_path) as empty, empty.http() as client:
        for path, words in EMPTY.items():
            answer = client.get(path)
            assert answer.status_code == 200, path
            assert words in answer.text, path


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_axe_finds_nothing(browser: Any, found: Stage, scheme: str) -> None:
    """axe-core, all of its rules that are standards (WCAG 2.2 A and AA) or good practice."""
    gate = found.gates[0]  # type: ignore[attr-defined]
    paths = (
        *("/", "/?health=healthy", f"/nodes/{SLOW}", "/nodes/trn-01", "/heat", "/history", "/several", "/gates"),
        *(f"/gates/{gate}", "/reasons", "/reasons/SlowDevice", "/log-in", "/nodes/nobody"),
    )
    for width in (1280, 390):
        # The page's own rules forbid foreign scripts; this one is ours to run.
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
        page = context.new_page()
        for path in paths:
            page.goto(found.url + path)
            page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
            page.add_script_tag(path=str(AXE))
            said = page.evaluate(
                "axe.run().then(r => ({good: r.passes.length,"
                " bad: r.violations.map(v => [v.id, v.help, v.nodes[0].html])}))"
            )
            assert said["bad"] == [], f"{path} at {width} px"
            assert said["good"] > 10, "axe did not look"
        context.close()
