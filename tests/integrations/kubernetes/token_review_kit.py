"""The API server of the tests as one that reviews tokens: who has which, what it waits for, and what it was asked."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from healthd.integrations.kubernetes.service_accounts import PATH
from healthd.integrations.kubernetes.settings import KubernetesCallers
from tests.clients.api_server_kit import Call, Cluster, cluster, failure
from tests.patience import PATIENCE

AUDIENCE = "healthd"
NODES, HOOKS = "healthd-system/healthd-node", "train/default"
OF_POD = "authentication.kubernetes.io/"


def encoded(value: Mapping[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@dataclass
class Reviews:
    """
    The tokens that are good, by their text, and the reviews that were asked. `held` is cleared: answers wait for it.
    """

    cluster: Cluster
    status: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    under_way: Counter[str] = field(default_factory=Counter)
    most_at_once: int = 0
    most_of_one: int = 0
    away: tuple[int, str] | None = None
    news: threading.Condition = field(default_factory=threading.Condition)
    _serial: Iterator[int] = field(default_factory=itertools.count)

    def token(
        self,
        account: str = NODES,
        *,
        node: str | None = "n1",
        pod: str | None = "healthd-node-x1",
        uid: str = "0a1b2c3d-0000-4000-8000-000000000001",
        audience: str = AUDIENCE,
        lasts: float = 3600.0,
        good: bool = True,
    ) -> str:
        """A token as the kubelet projects one, and what the server says of it. `pod` None: it is bound to none."""
        namespace, _, name = account.partition("/")
        claims = {
            "aud": [audience],
            "exp": int(time.time() + lasts),
            "sub": f"system:serviceaccount:{namespace}:{name}",
            "jti": str(next(self._serial)),
        }
        token = f"{encoded({'alg': 'RS256'})}.{encoded(claims)}.c2lnbmF0dXJl"
        extra: dict[str, list[str]] = {f"{OF_POD}credential-id": [f"JTI={claims['jti']}"]}
        if pod is not None:
            extra |= {f"{OF_POD}pod-name": [pod], f"{OF_POD}pod-uid": [uid]}
            extra |= {f"{OF_POD}node-name": [node]} if node is not None else {}
        if good:
            user = {"username": claims["sub"], "groups": ["system:serviceaccounts"], "extra": extra}
            self.status[token] = {"authenticated": True, "user": user, "audiences": [audience]}
        return token

    def settings(self, **changes: Any) -> KubernetesCallers:
        words: dict[str, Any] = {"audience": AUDIENCE, "nodes": (NODES,), "hooks": ("train/*", "eval/*")}
        words["readers"] = ("monitoring/prometheus",)
        place = {"service_account": self.cluster.folder, "api_server": self.cluster.url}
        return KubernetesCallers(**{**words, **place, **changes})

    async def was_asked(self, times: int) -> None:
        """Once it was asked so often."""

        def wait() -> bool:
            with self.news:
                return self.news.wait_for(lambda: len(self.asked) >= times, 20 * PATIENCE)

        assert await asyncio.to_thread(wait)

    def answer(self, call: Call) -> tuple[int, dict[str, str], Any]:
        if (call.method, call.path) != ("POST", PATH):
            return 404, {}, failure(404, "the server could not find the requested resource")
        assert call.body["kind"] == "TokenReview"
        assert call.body["spec"]["audiences"] == [AUDIENCE]
        token = call.body["spec"]["token"]
        with self.news:
            self.asked.append(token)
            self.under_way[token] += 1
            self.most_at_once = max(self.most_at_once, self.under_way.total())
            self.most_of_one = max(self.most_of_one, self.under_way[token])
            self.news.notify_all()
        self.held.wait(20 * PATIENCE)
        with self.news:
            self.under_way[token] -= 1
        if self.away is not None:
            return self.away[0], {}, failure(*self.away)
        refused = {
            "authenticated": False,
            "error": "[invalid bearer token, service account token has been invalidated]",
        }
        return 201, {}, {**call.body, "status": self.status.get(token, refused)}


@contextlib.contextmanager
def reviews(folder: Path) -> Iterator[Reviews]:
    with cluster(folder) as made:
        found = Reviews(made)
        found.held.set()
        made.answer = found.answer  # type: ignore[method-assign]
        try:
            yield found
        finally:
            found.held.set()
