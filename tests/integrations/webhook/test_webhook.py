"""The webhook: another program hears of each job that died, and the aggregator waits for nobody."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from healthd.aggregator.jobs.postmortem_records import Postmortem, PostmortemPhase
from healthd.core.backoff import Backoff
from healthd.core.errors import ConfigError
from healthd.integrations.webhook.events import MOST_QUEUED, TRIES, Webhook
from healthd.integrations.webhook.settings import WebhookSettings
from tests.aggregator.api_kit import living, running
from tests.aggregator.postmortems_kit import ECC, body, notes_of
from tests.node.node_kit import eventually
from tests.patience import PATIENCE

NO_PAUSE = Backoff(0.001, 0.001)


class Receiver:
    """A program that hears events; `answers` are the statuses that it gives, the last one for ever."""

    def __init__(self, *answers: int) -> None:
        self.heard: queue.Queue[tuple[dict[str, str], Any]] = queue.Queue()
        self.answers = list(answers)
        self.url = ""


@contextlib.contextmanager
def receiving(*answers: int) -> Iterator[Receiver]:
    receiver = Receiver(*answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            receiver.heard.put(({k.lower(): v for k, v in self.headers.items()}, json.loads(content)))
            self.send_response(receiver.answers.pop(0) if len(receiver.answers) > 1 else receiver.answers[0])
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
        yield receiver
        server.shutdown()


def record(job: str = "train") -> Postmortem:
    return Postmortem(
        gate="g-1", job=job, attempt=0, phase=PostmortemPhase.FINAL, first_told_at=1.0, nodes=("n1",), told={}
    )


async def test_each_job_that_died_is_one_cloud_event_with_the_verdict_and_the_token(tmp_path: Path) -> None:
    token = tmp_path / "hook.token"
    token.write_text("not-a-secret-of-anybody\n")
    with receiving(204) as receiver:
        async with (
            running(tmp_path, integrations={"webhook": WebhookSettings(url=receiver.url, token_file=token)}) as client,
            living(client, "n1"),
        ):
            gate = (await client.post("/v1/gates?wait=5", json={"job": "train", "nodes": ["n1"]})).json()["id"]
            await client.post(f"/v1/gates/{gate}/notes?wait=5", json=body("n1", notes_of(ECC)))
            headers, event = await asyncio.to_thread(receiver.heard.get, timeout=10 * PATIENCE)
    assert headers["content-type"].startswith("application/cloudevents+json")
    assert headers["authorization"] == "Bearer not-a-secret-of-anybody"
    assert {name: event[name] for name in ("specversion", "type", "subject", "datacontenttype")} == {
        "specversion": "1.0",
        "type": "healthd.job.died",
        "subject": "train",
        "datacontenttype": "application/json",
    }
    assert event["id"].startswith(gate)
    assert event["source"].startswith("/healthd/store-")
    assert event["time"].endswith("Z")
    assert event["data"]["postmortem"]["verdict"]["node"] == "n1"


async def test_an_event_that_cannot_be_told_names_the_host_and_no_path(caplog: pytest.LogCaptureFixture) -> None:
    """Slack's, Discord's and PagerDuty's addresses have their secret in the path."""
    with receiving(404) as receiver:
        webhook = Webhook(f"{receiver.url}/T0/B0/hush?key=hush", None, source="s", pauses=NO_PAUSE)
        webhook.job_died(record(), 1.0)
        task = asyncio.create_task(webhook.run())
        await eventually(lambda: bool(caplog.text))
        task.cancel()
    assert "webhook http://127.0.0.1: " in caplog.text
    assert "hush" not in caplog.text
    with pytest.raises(ConfigError) as refused:
        WebhookSettings(url="hooks.example/services/hush")
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(("answers", "tries"), [((503, 500, 204), 3), ((500,), TRIES), ((404,), 1)])
async def test_an_event_is_tried_again_within_bounds(answers: tuple[int, ...], tries: int) -> None:
    with receiving(*answers) as receiver:
        webhook = Webhook(receiver.url, None, source="s", pauses=NO_PAUSE)
        webhook.job_died(record("first"), 1.0)
        webhook.job_died(record("last"), 1.0)
        task = asyncio.create_task(webhook.run())
        heard: list[str] = []
        while "last" not in heard:
            heard.append((await asyncio.to_thread(receiver.heard.get, timeout=10 * PATIENCE))[1]["subject"])
        task.cancel()
    assert heard.count("first") == tries, "and then the next one is sent"


async def test_who_does_not_answer_fills_no_memory_and_holds_nobody_up() -> None:
    webhook = Webhook("http://127.0.0.1:9/", None, source="s", pauses=NO_PAUSE)
    for number in range(MOST_QUEUED + 5):
        webhook.job_died(record(f"job-{number}"), 1.0)
    assert len(webhook._queue) == MOST_QUEUED
    assert webhook._queue[0][0] == "job-5"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "ftp://x/"}, "must be http:// or https://"),
        ({"token_file": Path("t")}, "goes with webhook_url"),
        ({"url": "http://hooks.example/", "token_file": Path("t")}, "must be https://"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WebhookSettings(**settings)
    assert httpx.URL(WebhookSettings(url="https://hooks.example/x").url or "").host
