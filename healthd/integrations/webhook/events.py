"""
Reports the ends of jobs to another program: one CloudEvent (1.0, structured JSON) per final verdict, by HTTP POST.

Nothing waits for it: events queue in memory, are sent one by one, are retried within bounds, and are dropped with a log
line if the receiver does not accept them. Events that are unsent when the aggregator ends are lost.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections import deque
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from healthd.aggregator.jobs.postmortem_records import Postmortem, state_of
from healthd.aggregator.settings import AggregatorSettings
from healthd.core.backoff import Backoff
from healthd.core.errors import ConfigError, connection_words
from healthd.core.http.client import read_token
from healthd.core.http.trust import verification
from healthd.core.tasks import LogOnce
from healthd.core.wire import encode, plain
from healthd.integrations.webhook.settings import WebhookSettings

log = logging.getLogger(__name__)

EVENT_TYPE = "healthd.job.died"
CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"
MOST_QUEUED = 1000
TRIES = 6
PAUSES = Backoff(1.0, 20.0)
"""With TRIES about 50 s: a receiver that restarts is back by then."""
TIMEOUT_SECONDS = 10.0
REFUSED_FOR_GOOD = (400, 401, 403, 404, 405, 413, 415, 422)


class Webhook:
    """Make it, give it events by `job_died`, and run `run()` as a task. ConfigError for a token that cannot be read."""

    def __init__(self, url: str, token_file: Path | None, *, source: str, pauses: Backoff = PAUSES) -> None:
        """`source` names the aggregator's database. The token is read again for each event."""
        self._url, self._token_file, self._source, self._pauses = url, token_file, source, pauses
        parts = urlsplit(url)
        self._shown = f"{parts.scheme}://{parts.hostname}"  # a path or a query may well be the secret
        self._verify = verification(url)
        self._queue: deque[tuple[str, bytes]] = deque(maxlen=MOST_QUEUED)
        self._filled = asyncio.Event()
        self._trouble = LogOnce(log)
        if token_file is not None:
            read_token(token_file)

    def job_died(self, record: Postmortem, at: float) -> None:
        """Queue an event of a record; `at` is now, in seconds since the epoch. The oldest goes where room is short."""
        if len(self._queue) == MOST_QUEUED:
            log.warning("webhook %s: more than %d events wait; the oldest is dropped", self._shown, MOST_QUEUED)
        self._queue.append((record.job, event_of(record, at=at, source=self._source)))
        self._filled.set()

    async def run(self) -> None:
        """Send for ever."""
        async with httpx.AsyncClient(verify=self._verify, trust_env=False, timeout=TIMEOUT_SECONDS) as client:
            while True:
                await self._filled.wait()
                self._filled.clear()
                while self._queue:
                    job, event = self._queue[0]
                    await self._deliver(client, job, event)
                    if self._queue and self._queue[0][1] is event:
                        self._queue.popleft()

    async def _deliver(self, client: httpx.AsyncClient, job: str, event: bytes) -> None:
        for failures in range(1, TRIES + 1):
            why, for_good = await self._send(client, event)
            if not why:
                self._trouble.clear()
                return
            if for_good or failures == TRIES:
                break
            await asyncio.sleep(self._pauses.after(failures))
        self._trouble.say(f"webhook {self._shown}: the end of job {job} could not be reported: {why}")

    async def _send(self, client: httpx.AsyncClient, event: bytes) -> tuple[str, bool]:
        """Why it was not taken, empty where it was; and whether another try is of no use."""
        headers = {"content-type": CONTENT_TYPE}
        try:
            if self._token_file is not None:
                headers["authorization"] = f"Bearer {read_token(self._token_file)}"
            async with (
                asyncio.timeout(TIMEOUT_SECONDS),
                client.stream("POST", self._url, content=event, headers=headers) as answer,
            ):
                status = answer.status_code  # its body is nobody's business
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return connection_words(error), False
        except TimeoutError:
            return f"no answer within {TIMEOUT_SECONDS:g} s", False
        except ConfigError as error:
            return str(error), False
        return ("", False) if 200 <= status < 300 else (f"HTTP {status}", status in REFUSED_FOR_GOOD)


def sink(settings: AggregatorSettings, source: str) -> Webhook | None:
    """The webhook of an aggregator; None where no URL is set. ConfigError."""
    wanted = settings.of("webhook", WebhookSettings)
    return None if wanted.url is None else Webhook(wanted.url, wanted.token_file, source=source)


def event_of(record: Postmortem, *, at: float, source: str) -> bytes:
    """The CloudEvent of a record. Its id is another one where the job was judged on more, else the same."""
    moment = datetime.datetime.fromtimestamp(at, tz=datetime.UTC)
    return encode(
        {
            "specversion": "1.0",
            "id": f"{record.gate}.{len(record.told)}.{len(record.by_order)}",
            "source": f"/healthd/{source}",
            "type": EVENT_TYPE,
            "subject": record.job,
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "datacontenttype": "application/json",
            "data": plain(state_of(record)),
        }
    )
