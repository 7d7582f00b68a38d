"""What the tests of identity, and those beside them, are made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from healthd.core.model import SyncRequest
from healthd.core.wire import encode
from tests.aggregator.parts import KEY, state


async def sync(
    client: httpx.AsyncClient,
    node: str,
    key: str = KEY,
    incarnation: str = "i1",
    query: str = "",
    *,
    seq: int = 1,
    headers: Mapping[str, str] | None = None,
    **changes: Any,
) -> httpx.Response:
    request = SyncRequest(
        protocol=1, incarnation=incarnation, seq=seq, last_answer=None, since_answer_seconds=None,
        state=state(node, **changes), digest="d", ages={}, orders={}, issuer=None,
    )  # fmt: skip
    sent = {"x-healthd-node-key": key, **(headers or {})}
    return await client.post(f"/v1/nodes/{node}/sync{query}", content=encode(request), headers=sent)
