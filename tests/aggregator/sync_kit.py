"""What the tests of sync, and those beside them, are made with."""

from __future__ import annotations

from typing import Any


async def nothing_behind(scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})
