"""The gates of an aggregator, as the controller asks them: each call in a thread, with a bound of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import quote

from healthd.core import wire
from healthd.core.errors import BadInputError, UnreachableError
from healthd.core.http.client import Aggregator, Endpoint, RefusedError
from healthd.core.model import Claim, ClaimList, Decision, GateRequest
from healthd.core.threads import in_thread
from healthd.kueue.judge import Answer, Refusal

T = TypeVar("T")

NOT_FOUND, CONFLICT = 404, 409
OF_THE_QUESTION = (400, 413, 422)
"""What an aggregator answers to a question that cannot be meant."""
SLACK_SECONDS = 10.0


class AggregatorGates:
    """See the module. HealthdError wherever the aggregator gives no answer, or takes no word of this controller."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def claims(self, prefix: str) -> tuple[Claim, ...]:
        """The open gates and the leases of workloads whose names begin so."""
        found = await self._call("GET", "/v1/claims", query={"workload": prefix})
        return self._read(found, ClaimList).claims

    async def ask(self, request: GateRequest) -> Answer:
        """Open a gate, or find the same one again; the answer as it is now."""
        try:
            return self._read(await self._call("POST", "/v1/gates", body=request, query={"wait": "0"}), Decision)
        except RefusedError as error:
            if error.status == CONFLICT or error.status in OF_THE_QUESTION:
                return Refusal(message=str(error), again=error.status == CONFLICT)
            raise

    async def follow(self, gate: str) -> Answer:
        """The answer of a gate as it is now."""
        try:
            found = await self._call("GET", f"/v1/gates/{quote(gate, safe='')}", query={"wait": "0"})
        except RefusedError as error:
            if error.status == NOT_FOUND:
                return Refusal(message=str(error), again=True)
            raise
        return self._read(found, Decision)

    async def release(self, gate: str) -> None:
        """Withdraw a gate, or give its nodes back. Safe to repeat."""
        try:
            await self._call("DELETE", f"/v1/gates/{quote(gate, safe='')}/lease")
        except RefusedError as error:
            if error.status != NOT_FOUND:
                raise

    async def _call(
        self, method: str, path: str, *, body: object = None, query: Mapping[str, str] | None = None
    ) -> bytes:
        def call() -> bytes:
            with Aggregator(self._endpoint, slack_seconds=SLACK_SECONDS) as aggregator:
                return aggregator.call(method, path, body=body, query=query, hold_seconds=0.0)

        return await in_thread("ask the aggregator", call)

    def _read(self, body: bytes, schema: type[T]) -> T:
        try:
            return wire.decode(body, schema, what="its answer")
        except BadInputError as error:
            raise UnreachableError(f"aggregator {self._endpoint.names}: {error}") from None
