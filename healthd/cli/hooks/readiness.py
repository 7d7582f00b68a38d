"""What the daemon of a node says of itself at `/readyz`: for hooks that go by the node's own verdict."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from healthd.core.bounded import read_parts
from healthd.core.errors import BadInputError, connection_words
from healthd.core.node_name import can_name
from healthd.core.redaction import redact

TIMEOUT_SECONDS = 5.0
"""For the whole answer: the daemon has its verdict ready."""

MAX_BYTES = 64 << 10
"""A line for each check is some kilobytes; more is not a daemon of ours."""


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """What a node's daemon says of itself. `fit` None: nobody knows. `why` is one line, empty when it is fit."""

    fit: bool | None
    why: str


def ask_readiness(url: str, query: Mapping[str, str]) -> Fitness:
    """
    Whether the daemon at `url` calls its node ready. Never raises: what cannot be understood is `fit=None`.

    Another program on that port may well answer 200, so only the daemon's own words count.
    """
    found = _ask_daemon(url, query)
    return Fitness(fit=found.fit, why=redact(found.why))  # the URL may hold a password


def _ask_daemon(url: str, query: Mapping[str, str]) -> Fitness:
    import httpx

    from healthd.core.http.trust import verification

    path = f"{url.rstrip('/')}/readyz"
    end = time.monotonic() + TIMEOUT_SECONDS
    try:
        verify = verification(path)
        with httpx.stream(
            "GET", path, params=dict(query), timeout=TIMEOUT_SECONDS, trust_env=False, verify=verify
        ) as answer:
            body = read_parts(answer.iter_bytes(), MAX_BYTES, until=end)
    except BadInputError:
        return Fitness(fit=None, why=f"{path} returned an endless answer, so it is not healthd")
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return Fitness(fit=None, why=f"the node's daemon at {url} cannot be reached: {connection_words(error)}")
    lines = [line.strip() for line in body.decode("utf-8", "replace").splitlines() if line.strip()]
    first, last = (lines[0], lines[-1]) if lines else ("", "")
    if answer.status_code == httpx.codes.OK and len(lines) == 1 and _speaks(last, "ready"):
        return Fitness(fit=True, why="")
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and _speaks(last, "not ready"):
        return Fitness(fit=False, why=first)
    return Fitness(fit=None, why=f"{path} returned HTTP {answer.status_code}, so it is not healthd: {first[:200]}")


def _speaks(line: str, word: str) -> bool:
    """Whether a daemon ends its answer by this line: the name of its node, and the word."""
    name = line.removesuffix(f" is {word}")
    return name != line and can_name(name)
