"""Notes of jobs that died, for the tests of what the aggregator makes of them."""

from __future__ import annotations

import base64
from typing import Any

from healthd.postmortem.notes import Notes, Words, pack

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
LOST = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:46264\n"


def notes_of(text: str, *, rank: int | None = None, size: int | None = None, code: int = 1, at: float = 1e9) -> Notes:
    own = {"RANK": str(rank), "WORLD_SIZE": str(size)} if rank is not None else {}
    return Notes(
        version=1,
        host="a-host",
        command=("python", "train.py"),
        directory="/",
        started=at - 60,
        ended=at,
        code=code,
        signal=None,
        signals=(),
        environment=own,
        streams=(Words(name="stderr", bytes=len(text), chunks=((at, text),)),),
        memory_events={},
    )


def body(node: str, notes: Notes, *, measures: bool = False) -> dict[str, Any]:
    return {"node": node, "notes": base64.b64encode(pack(notes)).decode(), "measures": measures}
