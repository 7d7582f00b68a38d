"""The page in a real browser: hostile words, phones, keyboards, colours, no script."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from checks.contract import Status
from healthd.aggregator.page import events
from healthd.core.model import DeviceRecord, Inventory
from tests.aggregator.parts import result
from tests.ui.stage import Stage, Watch, stage

pytestmark = [pytest.mark.system("chromium")]

EVIL = '"\'><img src=x onerror="window.evil=1"><script>window.evil=1</script>{{7*7}}</textarea>\u202e'
PHONE = {"width": 390, "height": 844}

# Who makes a page wide.
WIDE = """() => [...document.querySelectorAll("body *:not(.skip)")]
  .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
  .slice(0, 5).map((e) => e.outerHTML.slice(0, 120))"""

# What no page may miss, by hand: names of controls, headings in order, landmarks, one id once.
BASICS = """() => {
  const said = [];
  const all = (what) => [...document.querySelectorAll(what)];
  const short = (e) => e.outerHTML.slice(0, 90);
  const name = (e) => (e.getAttribute("aria-label") || e.innerText || e.textContent || "").trim();
  for (const e of all("a[href], button")) if (!name(e)) said.push("no name: " + short(e));
  for (const e of all("input:not([type=hidden]), select")) if (!e.labels?.length) said.push("no label: " + short(e));
  for (const e of all("table")) if (!e.querySelector("thead th[scope=col]")) said.push("no column headers");
  for (const e of all("tbody tr")) if (!e.querySelector("th[scope=row]")) said.push("no row header: " + short(e));
  for (const e of all("svg"))
    if (!e.getAttribute("aria-label") && e.getAttribute("aria-hidden") !== "true") said.push("no words: " + short(e));
  const ids = all("[id]").map((e) => e.id);
  const twice = ids.filter((id, i) => ids.indexOf(id) !== i);
  if (twice.length) said.push("ids twice: " + twice.slice(0, 5));
  for (const e of all("[aria-labelledby]"))
    if (!document.getElementById(e.getAttribute("aria-labelledby"))) said.push("labelled by nothing: " + short(e));
  let level = 0;
  for (const e of all("h1, h2, h3")) {
    if (+e.tagName[1] > level + 1) said.push("a heading is skipped at " + e.innerText);
    level = +e.tagName[1];
  }
  for (const tag of ["main", "header", "nav", "footer", "h1"]) if (!all(tag).length) said.push("no " + tag);
  if (!document.documentElement.lang || !document.title) said.push("no language or title");
  return said;
}"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("browser")) as made:
        devices = tuple(
            DeviceRecord(target=f"cpu:{i}", kind="cpu", serial=f"S{i}", cores=1, memory_bytes=10**9) for i in range(4)
        )
        inventory = Inventory(
            accelerator="cpu", device_count=4, core_count=4, memory_bytes=4 * 10**9, efa_count=None, devices=devices
        )
        for i in range(90):
            status = Status.FAIL if i % 30 == 3 else Status.WARN if i % 40 == 5 else Status.PASS
            made.say(
                f"node-{i:03d}", status=status, inventory=inventory, labels={"pool": "train", "rack": f"r{i // 30}"}
            )
        failed = result("matmul", status=Status.FAIL)
        evil = tuple(dataclasses.replace(f, message=EVIL, target=EVIL, reason=EVIL) for f in 2 * failed.findings)
        evil_device = dataclasses.replace(devices[0], target=EVIL)
        made.say(
            "evil-node",
            pool=EVIL,
            labels={"pool": EVIL, "rack": EVIL, EVIL: EVIL},
            instance_type=EVIL,
            boot_id=EVIL,
            faults=(EVIL,),
            versions={EVIL: EVIL},
            inventory=dataclasses.replace(inventory, accelerator=EVIL, devices=(evil_device,)),
            results=(dataclasses.replace(failed, error=EVIL, executor=EVIL, findings=evil),),
        )
        with made.http() as client:
            question = {"job": EVIL.replace("\u202e", ""), "nodes": ["evil-node", "node-001"]}
            made.job = client.post("/v1/gates", json=question).json()["id"]  # type: ignore[attr-defined]
            client.post(f"/v1/gates/{made.job}/outcome", json={"status": "failed", "message": EVIL})  # type: ignore[attr-defined]
        yield made


def paths(found: Stage) -> list[str]:
    return [
        "/",
        "/nodes/node-003",
        "/nodes/evil-node",
        "/gates",
        f"/gates/{found.job}",
        "/reasons",
        "/log-in",
        "/nodes/nobody",
    ]  # type: ignore[attr-defined]


def test_hostile_words_of_nodes_and_jobs_stay_words(browser: Any, found: Stage) -> None:
    page = browser.new_page()
    watch = Watch(page, ignore=("404",))
    for path in paths(found):
        page.goto(found.url + path)
        assert page.evaluate("window.evil") is None, path
        assert page.locator("img, script:not([src]), iframe").count() == 0, path
        assert "49" not in page.evaluate(
            "document.querySelector('main').innerText.match(/\\{\\{.*?\\}\\}|49<\\//)?.[0] ?? ''"
        )
    page.goto(f"{found.url}/nodes/evil-node")
    assert "<script>window.evil=1</script>" in page.inner_text("main")
    # The same words by the stream.
    page.goto(f"{found.url}/?q=evil")
    page.wait_for_selector("#live.live:not(.off)")
    found.say("evil-node", faults=(EVIL, "more"))
    page.wait_for_timeout(800)
    assert page.evaluate("window.evil") is None
    watch.clean()
    page.close()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_nothing_scrolls_sideways_on_a_phone(browser: Any, found: Stage, scheme: str) -> None:
    page = browser.new_page(viewport=PHONE, color_scheme=scheme)
    for path in paths(found):
        page.goto(found.url + path)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], (f"{path} is {width} px wide", page.evaluate(WIDE))
        inner = page.evaluate(
            "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        )
        assert inner == 0, f"a table of {path} scrolls sideways"
    page.close()


def test_every_page_has_names_labels_headings_and_landmarks(browser: Any, found: Stage) -> None:
    page = browser.new_page()
    for path in paths(found):
        page.goto(found.url + path)
        assert page.evaluate(BASICS) == [], path
    page.close()


def test_the_keyboard_gets_everywhere_and_is_seen_to(browser: Any, found: Stage) -> None:
    page = browser.new_page()
    page.goto(f"{found.url}/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.focus("#c-node-003")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "c-node-003"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert float(outline.removesuffix("px")) >= 2
    # What a mouse sees by hovering.
    assert "node-003: unhealthy, WrongResult" in page.evaluate(
        "getComputedStyle(document.activeElement, '::after').content"
    )
    page.keyboard.press("Enter")
    page.wait_for_url("**/nodes/node-003")
    page.close()


def test_everything_but_live_updates_works_without_script(browser: Any, found: Stage) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{found.url}/")
    page.select_option("select[name=group]", "health")
    page.click("button:has-text('Show')")
    assert page.locator(".group h3").first.inner_text().startswith("unhealthy")
    page.click("#c-node-003")
    page.fill("form[action$=quarantine] input[name=reason]", "smells of smoke")
    page.click("button:has-text('Quarantine node-003')")
    assert "No gate admits a job here" in page.inner_text("main")
    assert "smells of smoke" in page.inner_text("#head")
    page.fill("form[action$=release] input[name=reason]", "it was the neighbour")
    page.click("button:has-text('Release node-003')")
    assert "it was the neighbour" in page.inner_text("#history")
    assert page.locator("#live").is_hidden()
    context.close()


def test_health_is_told_by_signs_and_words_as_well_as_colours(browser: Any, found: Stage) -> None:
    page = browser.new_page()
    page.goto(f"{found.url}/?q=node-0")
    signs = {
        tone: page.locator(f".cells a.{tone} i").first.inner_text() for tone in ("healthy", "degraded", "unhealthy")
    }
    assert len(set(signs.values())) == len(signs)
    assert page.get_by_role("link", name="node-003: unhealthy, WrongResult").count() == 1
    page.close()


def test_nothing_moves_for_those_who_asked_for_that(browser: Any, found: Stage) -> None:
    context = browser.new_context(reduced_motion="reduce")
    page = context.new_page()
    page.goto(f"{found.url}/")
    page.evaluate("document.getElementById('c-node-000').classList.add('fresh')")
    assert page.evaluate("getComputedStyle(document.getElementById('c-node-000')).animationName") == "none"
    context.close()


def test_a_change_reaches_a_page_that_was_away_while_it_happened(browser: Any, found: Stage) -> None:
    """A laptop that was shut: the stream goes on from its cursor."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{found.url}/")
    page.wait_for_selector("#live.live:not(.off)")
    context.set_offline(True)
    found.say("node-010", status=Status.FAIL)
    page.wait_for_selector("#live.off", timeout=45_000)
    context.set_offline(False)
    page.wait_for_selector("#c-node-010.unhealthy", timeout=10_000)
    page.wait_for_selector("#live.live:not(.off)")
    context.close()


def test_a_page_that_could_not_be_read_anew_says_so_and_is_read_soon(
    browser: Any, found: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing else happens: its light must not say that it is live while it shows what was."""
    monkeypatch.setattr(events, "BEAT_SECONDS", 1.0)
    page = browser.new_page()
    page.goto(f"{found.url}/")
    page.wait_for_selector("#live.live:not(.off)")
    refused = []

    def refuse(route: Any) -> None:
        if refused:
            route.continue_()
        else:
            refused.append(route.request.url)
            route.fulfill(status=503)

    before = page.inner_text("h1")
    page.route("**/?part=top", refuse)
    with page.expect_response("**/?part=top"):
        found.say("node-011", status=Status.FAIL)
    page.wait_for_function("before => document.querySelector('h1').innerText !== before", arg=before, timeout=10_000)
    assert refused
    page.wait_for_selector("#live.live:not(.off)")
    page.close()


def test_ages_on_an_open_page_go_on(browser: Any, found: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a node that says nothing more they would stay as they were when the page was loaded."""
    monkeypatch.setattr(events, "BEAT_SECONDS", 0.5)
    page = browser.new_page()
    found.say("node-012")
    page.goto(f"{found.url}/nodes/node-012")
    assert "last report now" in page.inner_text("#head")
    page.wait_for_selector("#head .facts-line:not(:has-text('last report now'))", timeout=10_000)
    for _ in range(3):
        said = page.inner_text("#head .facts-line")
        page.wait_for_function(
            "said => document.querySelector('#head .facts-line').innerText !== said", arg=said, timeout=10_000
        )
    page.close()


def test_regrouped_and_new_nodes_come_into_the_grid(browser: Any, found: Stage) -> None:
    page = browser.new_page()
    watch = Watch(page)
    page.goto(f"{found.url}/?group=label%3Arack")
    page.wait_for_selector("#live.live:not(.off)")
    found.say("late-comer", labels={"pool": "train", "rack": "r77"})
    page.wait_for_selector("section[aria-label=r77] #c-late-comer", timeout=10_000)
    watch.clean()
    page.close()
