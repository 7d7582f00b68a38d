"""The page over HTTP: who may see and do what, what the browser is held to, the stream."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from checks.contract import Status, Tier
from healthd.aggregator.identity.tokens import Scope
from healthd.aggregator.settings import AggregatorSettings
from healthd.core.errors import ConfigError
from tests.aggregator.parts import result
from tests.aggregator.service import until
from tests.ui.stage import Stage, stage, tokens

PATHS = ("/", "/?part=top", "/nodes/n1", "/gates", "/reasons", "/reasons/WrongResult", "/repairs")


@pytest.fixture(scope="module")
def open_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("open")) as found:
        found.say("n1")
        found.say("n2", status=Status.FAIL)
        yield found


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("closed")
    file, made = tokens(folder, looker=Scope.READ, boss=Scope.ADMIN, daemon=Scope.SYNC)
    with stage(folder, token_table=file, sync_token=made["daemon"]) as found:
        found.say("n1")
        yield found, made


def log_in(client: httpx.Client, token: str, to: str = "/") -> httpx.Response:
    return client.post(
        "/log-in", data={"token": token, "next": to}, headers={"origin": str(client.base_url).rstrip("/")}
    )


def word_of(text: str) -> str:
    found = re.search(r'name="word" value="([0-9a-f]{64})"', text)
    assert found, "the page has no form"
    return found[1]


def test_form_takes_the_token_of_a_service_account(closed: tuple[Stage, dict[str, str]]) -> None:
    """Browsers cut off what is longer than the field says."""
    with closed[0].http() as client:
        longest = re.search(r'name="token" required maxlength="(\d+)"', client.get("/log-in").text)
    assert longest is not None
    assert int(longest[1]) >= 2048


@pytest.mark.parametrize("path", PATHS)
def test_every_page_is_whole_bounded_and_allows_nothing_from_elsewhere(open_stage: Stage, path: str) -> None:
    with open_stage.http() as client:
        answer = client.get(path)
    assert answer.status_code == 200, answer.text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r'(?:src|href|action)="(?:https?:)?//', answer.text), "something comes from elsewhere"
    assert " style=" not in answer.text
    assert not re.search(r"<script(?![^>]*src=)", answer.text)
    assert answer.text.count("<h1") == 1
    assert len(answer.content) < 250_000


def test_static_files_are_named_by_their_content_and_kept(open_stage: Stage) -> None:
    with open_stage.http() as client:
        text = client.get("/").text
        for path in re.findall(r'"(/static/[^"]+)"', text):
            answer = client.get(path)
            assert answer.status_code == 200
            assert "immutable" in answer.headers["cache-control"]
        assert client.get("/static/page.css").status_code == 404
        assert client.get("/static/..%2f..%2fapi.py").status_code == 404


def test_a_gate_that_ended_before_its_collectives_is_not_shown_as_validated(open_stage: Stage) -> None:
    with open_stage.http() as client:
        asked = {"job": "too-many", "pool": "train", "count": 60, "collective": True}
        decision = client.post("/v1/gates?wait=5", json=asked).json()
        assert decision["reasons"][0]["code"] == "TooFewNodes"
        for path in ("/gates?job=too-many", f"/gates/{decision['id']}"):
            text = client.get(path).text
            assert "TooFewNodes" in text
            assert "alidat" not in text


def text_of(markup: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", markup).split())


def test_a_drill_is_said_first_on_every_page_and_nobody_is_told_what_to_do(tmp_path: Path) -> None:
    """n2 gives wrong results by an injected fault, n3 by itself: the one is a drill, the other to be replaced."""
    wrong = (result("memory_free", tier=Tier.PASSIVE), result("matmul", status=Status.FAIL))
    drilled = (wrong[0], dataclasses.replace(wrong[1], injected=True))
    with stage(tmp_path) as found, found.http() as client:
        found.say("n1")
        found.say("n2", results=drilled, faults=("matmul=corrupt",))
        fleet = client.get("/").text
        assert "A drill is on; no node needs attention" in text_of(fleet)
        asked = {"job": "drilled", "nodes": ["n1", "n2"], "collective": False}
        gate = client.post("/v1/gates?wait=5", json={**asked, "lease": False}).json()
        assert gate["decision"] == "reject"
        texts = {path: text_of(client.get(path).text) for path in ("/", "/nodes/n2", "/gates", f"/gates/{gate['id']}")}
        for path, text in texts.items():
            assert "Replace the node" not in text, path
        assert "Drill ✕ unhealthy WrongResult" in texts["/"]
        assert "Nothing: a drill" in texts["/"]
        assert "n2 Drill ✕ unhealthy" in texts["/nodes/n2"]
        assert "Drill ✕ fail WrongResult" in texts["/nodes/n2"]
        assert "drilled Drill ✕ reject" in texts[f"/gates/{gate['id']}"]
        assert "drilled Drill ✕ reject" in texts["/gates"]

        found.say("n3", results=wrong)
        text = text_of(client.get("/").text)
        assert "1 of 3 nodes needs attention" in text
        assert text.index("✕ unhealthy WrongResult") < text.index("Drill ✕ unhealthy"), "what is real comes first"
        assert "→ Replace the node" in text
        both = client.post("/v1/gates?wait=5", json={**asked, "job": "both", "nodes": ["n2", "n3"]}).json()
        assert "both ✕ reject" in text_of(client.get(f"/gates/{both['id']}").text)


@pytest.mark.parametrize(
    "path",
    ["/nodes/nobody", "/gates/g-none", "/reasons/Nothing", "/?health=ill", "/?wat=1", "/gates?before=" + 99 * "x"],
)
def test_what_is_not_there_or_cannot_be_meant_is_said_to_a_person(open_stage: Stage, path: str) -> None:
    with open_stage.http() as client:
        answer = client.get(path)
    assert answer.status_code in (400, 404)
    assert answer.headers["content-type"].startswith("text/html")
    assert "<main" in answer.text


def test_without_tokens_the_page_and_its_forms_are_open_as_the_api_is(open_stage: Stage) -> None:
    with open_stage.http() as client:
        word = word_of(client.get("/nodes/n1").text)
        form = {"word": word, "reason": "fan is loud", "end": "1h"}
        answer = client.post("/nodes/n1/quarantine", data=form, headers={"sec-fetch-site": "same-origin"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/nodes/n1?done=quarantined")
        assert client.get("/v1/nodes/n1").json()["quarantine"]["reason"] == "fan is loud"
        text = client.get("/nodes/n1").text
        assert "fan is loud" in text
        released = client.post("/nodes/n1/release", data={"word": word, "reason": "fan replaced"})
        assert released.status_code == 303
        known = client.get("/v1/nodes/n1").json()
        assert known["quarantine"] is None
        assert any("fan replaced" in event["message"] for event in known["events"])
        # The list of events has a filter by kind; an unknown kind has none.
        kind = next(event["kind"] for event in known["events"] if "fan replaced" in event["message"])
        assert "fan replaced" in client.get(f"/history?kind={kind}").text
        assert "fan replaced" not in client.get("/history?kind=override").text


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://elsewhere.example"},
        {"origin": "null"},
        {"host": "elsewhere.example"},
    ],
)
@pytest.mark.parametrize("deed", ["quarantine", "release"])
def test_another_site_cannot_make_a_browser_send_our_forms(
    open_stage: Stage, deed: str, headers: dict[str, str]
) -> None:
    with open_stage.http() as client:
        form = {"word": word_of(client.get("/nodes/n1").text), "reason": "x"} | (
            {"end": "1h"} if deed == "quarantine" else {}
        )
        assert client.post(f"/nodes/n1/{deed}", data=form, headers=headers).status_code == 403
        assert client.get("/v1/nodes/n1").json()["quarantine"] is None


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"word": ""}, 403),
        ({"word": "0" * 64}, 403),
        ({"word": "é"}, 403),
        ({"reason": ""}, 400),
        ({"reason": "two\nlines"}, 400),
        ({"reason": "x" * 501}, 400),
        ({"end": "for ever"}, 400),
        ({"more": "x"}, 400),
        ({"reason": "x" * 20_000}, 413),
    ],
)
def test_a_form_that_is_not_ours_or_says_too_little_changes_nothing(
    open_stage: Stage, changes: dict[str, str], status: int
) -> None:
    with open_stage.http() as client:
        form = {"word": word_of(client.get("/nodes/n1").text), "reason": "x", "end": "1h"} | changes
        assert client.post("/nodes/n1/quarantine", data=form).status_code == status
        assert client.get("/v1/nodes/n1").json()["quarantine"] is None


def test_json_is_no_form(open_stage: Stage) -> None:
    with open_stage.http() as client:
        assert client.post("/nodes/n1/quarantine", json={"reason": "x"}).status_code == 415


def test_a_stranger_is_sent_to_the_log_in_and_comes_back(closed: tuple[Stage, dict[str, str]]) -> None:
    found, made = closed
    with found.http() as client:
        sent = client.get("/nodes/n1?before=9")
        assert sent.status_code == 303
        assert sent.headers["location"] == "/log-in?next=%2Fnodes%2Fn1%3Fbefore%3D9"
        assert "/nodes/n1?before=9" in client.get(sent.headers["location"]).text
        answer = log_in(client, made["looker"], "/nodes/n1?before=9")
        assert (answer.status_code, answer.headers["location"]) == (303, "/nodes/n1?before=9")
        cookie = answer.headers["set-cookie"].lower()
        for word in ("httponly", "samesite=strict", "path=/", "max-age="):
            assert word in cookie
        assert client.get("/").status_code == 200
        # The cookie is the page's alone.
        assert client.get("/v1/nodes").status_code == 401
        left = client.post("/log-out", headers={"sec-fetch-site": "same-origin"})
        assert left.status_code == 303
        assert client.get("/").status_code == 303


@pytest.mark.parametrize("path", ["/events", "/nodes/n1/quarantine"])
def test_what_no_person_navigates_to_is_401_without_a_token(closed: tuple[Stage, dict[str, str]], path: str) -> None:
    with closed[0].http() as client:
        answer = client.get(path) if path == "/events" else client.post(path, data={"reason": "x"})
    assert answer.status_code == 401


@pytest.mark.parametrize(
    "to", ["https://evil.example", "//evil.example", "/\\evil.example", "javascript:x", "", "/\n/x"]
)
def test_the_log_in_leads_to_no_other_site(closed: tuple[Stage, dict[str, str]], to: str) -> None:
    found, made = closed
    with found.http() as client:
        assert log_in(client, made["looker"], to).headers["location"] == "/"


@pytest.mark.parametrize("token", ["", "wrong-token-wrong-token", "x" * 600, "é" * 20, "a b", "daemon"])
def test_a_token_that_may_not_read_logs_nobody_in(closed: tuple[Stage, dict[str, str]], token: str) -> None:
    found, made = closed
    with found.http() as client:
        answer = log_in(client, made.get(token, token))
        assert answer.status_code in (400, 403)
        assert "set-cookie" not in answer.headers
        assert len(token) < 8 or made.get(token, token) not in answer.text


def test_a_reader_sees_no_forms_and_can_send_none(closed: tuple[Stage, dict[str, str]]) -> None:
    found, made = closed
    with found.http() as client:
        log_in(client, made["looker"])
        text = client.get("/nodes/n1").text
        assert 'name="word"' not in text
        assert "scope <code>admin</code>" in text
        form = {"word": "0" * 64, "reason": "x", "end": "1h"}
        assert client.post("/nodes/n1/quarantine", data=form).status_code == 403


def test_the_form_of_one_visitor_is_no_good_for_another(closed: tuple[Stage, dict[str, str]]) -> None:
    found, made = closed
    with found.http() as boss, found.http() as other:
        log_in(boss, made["boss"])
        word = word_of(boss.get("/nodes/n1").text)
        form = {"word": word, "reason": "x", "end": "open"}
        log_in(other, made["looker"])
        assert other.post("/nodes/n1/quarantine", data=form).status_code == 403
        assert boss.post("/nodes/n1/quarantine", data=form).status_code == 303
        kept = boss.get("/v1/nodes/n1", headers={"authorization": f"Bearer {made['boss']}"}).json()["quarantine"]
        assert (kept["owner"], kept["until"]) == ("boss", None)
        assert boss.post("/nodes/n1/release", data={"word": word, "reason": "done"}).status_code == 303


def test_repair_is_decided_on_the_page_by_who_may_release_and_shows_who_when_and_why(
    closed: tuple[Stage, dict[str, str]],
) -> None:
    found, made = closed
    found.say("n7", status=Status.FAIL)
    with found.http() as boss, found.http() as other:
        log_in(boss, made["boss"])
        log_in(other, made["looker"])
        until(lambda: "→ Replace the node" in text_of(boss.get("/repairs").text), 20)  # the rules look in a pass
        text = boss.get("/repairs").text
        assert "Repair advised" in text_of(boss.get("/nodes/n7").text)
        form = {"word": word_of(text), "device": "node", "reason": "part 4 is ordered", "decision": "accept"}
        assert 'name="word"' not in other.get("/repairs").text
        assert other.post("/nodes/n7/repairs", data=form).status_code == 403
        assert boss.post("/nodes/n7/repairs", data={**form, "decision": "later"}).status_code == 400
        assert boss.post("/nodes/n7/repairs", data={**form, "device": "gpu:9"}).status_code == 404
        answer = boss.post("/nodes/n7/repairs", data=form)
        assert (answer.status_code, answer.headers["location"]) == (303, "/repairs?done=accept")
        assert "accepted by boss" in text_of(other.get("/repairs").text)
        assert boss.post("/nodes/n7/repairs", data={**form, "decision": "done"}).status_code == 303
        assert boss.post("/nodes/n7/repairs", data={**form, "decision": "reject"}).status_code == 409
        text = text_of(other.get("/repairs?done=done").text)
        assert "stays quarantined until it passes the deep or soak tier" in text
        assert "part 4 is ordered" in text


def test_reasons_link_to_the_runbooks_where_a_team_publishes_them(tmp_path: Path, open_stage: Stage) -> None:
    with open_stage.http() as client:
        assert "runbook of" not in client.get("/reasons/SlowDevice").text
    with stage(tmp_path, runbooks_url="https://docs.example/runbooks/") as found, found.http() as client:
        text = client.get("/reasons/SlowDevice").text
        assert 'href="https://docs.example/runbooks/reasons.md#SlowDevice"' in text
        published = Path(__file__).parents[2] / "docs/runbooks/reasons.md"
        assert '<a id="SlowDevice"></a>' in published.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="runbooks_url must begin"):
        AggregatorSettings(runbooks_url="javascript:alert(1)")


def test_over_tls_the_cookie_is_bound_to_the_host_and_to_tls(tmp_path: Path) -> None:
    file, made = tokens(tmp_path, looker=Scope.READ, daemon=Scope.SYNC)
    pem = tmp_path / "pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", str(pem) + ".key", "-out", str(pem)], check=True, capture_output=True)
    key = Path(f"{pem}.key")
    with stage(tmp_path, token_table=file, sync_token=made["daemon"], tls_cert=pem, tls_key=key) as found:
        url = found.url.replace("http://", "https://")
        with httpx.Client(base_url=url, verify=False, trust_env=False, timeout=20) as client:
            answer = client.post("/log-in", data={"token": made["looker"]}, headers={"origin": url})
            cookie = answer.headers["set-cookie"]
            assert cookie.startswith("__Host-healthd-page=")
            assert "Secure" in cookie
            assert client.get("/").status_code == 200


# --- the stream -------------------------------------------------------------------------------------------------------


def read_until(response: httpx.Response, kind: str, most: int = 50) -> dict[str, str]:
    """The next event of a kind."""
    event: dict[str, str] = {}
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if line:
            event[name] = value
        elif event.get("event") == kind:
            return event
        else:
            event, most = {}, most - 1
            assert most, f"no {kind}"
    raise AssertionError(f"the stream ended without {kind}")


def cursor_of(text: str) -> str:
    found = re.search(r'data-after="([^"]+)"', text)
    assert found
    return found[1]


def test_the_stream_tells_what_changed_since_the_page_and_resumes_where_it_was_cut(open_stage: Stage) -> None:
    with open_stage.http() as client:
        after = cursor_of(client.get("/").text)
        open_stage.say("s1")
        with client.stream("GET", "/events", params={"topic": "fleet", "after": after}) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            event = read_until(stream, "cells")
        told = json.loads(event["data"])
        assert [cell["node"] for cell in told["cells"]] == ["s1"]
        assert told["regroup"] is True
        open_stage.say("s1", status=Status.FAIL)  # nobody watches
        with client.stream("GET", "/events", headers={"last-event-id": event["id"]}) as stream:
            event = read_until(stream, "cells")
        (cell,) = json.loads(event["data"])["cells"]
        assert cell["tone"].startswith("unhealthy")
        assert "WrongResult" in cell["label"]


@pytest.mark.parametrize("after", ["", "other-5", "x" * 40, "-", "1-99999999999999999999"])
def test_a_cursor_that_is_not_ours_is_told_to_load_anew(open_stage: Stage, after: str) -> None:
    with open_stage.http() as client, client.stream("GET", "/events", params={"after": after}) as stream:
        assert read_until(stream, "reset")


def test_a_node_page_hears_of_its_node_alone(open_stage: Stage) -> None:
    with open_stage.http() as client:
        after = cursor_of(client.get("/nodes/n1").text)
        open_stage.say("n2")
        open_stage.say("n1")
        with client.stream("GET", "/events", params={"topic": "node:n1", "after": after}) as stream:
            assert read_until(stream, "changed")["data"] == "null"


def test_streams_end_when_the_aggregator_stops(tmp_path: Path) -> None:
    with httpx.Client(trust_env=False, verify=False, timeout=20) as client:
        with stage(tmp_path) as found:
            answer = client.send(client.build_request("GET", f"{found.url}/events"), stream=True)
            lines = answer.iter_lines()
            assert next(lines) == "retry: 2000"
        assert list(lines), "the rest could be read to its end"
        answer.close()
