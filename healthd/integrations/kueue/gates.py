"""The gates of an aggregator, as the controller asks them: each call in a thread, with a bound of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

from healthd.core import wire
from healthd.core.errors import BadInputError, UnreachableError
from healthd.core.http.client import Aggregator, Endpoint, RefusedError
from healthd.core.model import Claim, ClaimList, Decision, GateRequest, Health
from healthd.core.threads import in_thread
from healthd.integrations.kueue.judge import Answer, Refusal

T = TypeVar("T")

NOT_FOUND, CONFLICT = 404, 409
OF_THE_QUESTION = (400, 413, 422)
"""What an aggregator answers to a question that cannot be meant."""
SLACK_SECONDS = 10.0
NODES_AT_ONCE = 100
"""Nodes that are given back by one call: its URL has at most 26 KB."""


@dataclass(frozen=True, kw_only=True)
class _Fitness:
    """Of what the aggregator says of a node: its health, and what keeps it out all the same."""

    health: Health
    quarantine: object
    accused: object
    removed: str | None
    maintenance: str | None


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

    async def is_fit(self, node: str) -> bool:
        """Whether a node is known to be healthy now, and nothing keeps it out."""
        try:
            found = self._read(await self._call("GET", f"/v1/nodes/{quote(node, safe='')}"), _Fitness)
        except RefusedError as error:
            if error.status == NOT_FOUND:
                return False
            raise
        kept_out = (found.quarantine, found.accused, found.removed, found.maintenance)
        return found.health in (Health.HEALTHY, Health.DEGRADED) and all(one is None for one in kept_out)

    async def release(self, gate: str, nodes: Collection[str] = ()) -> None:
        """Withdraw a gate, or give its nodes back; with `nodes` these alone. Safe to repeat."""
        names = sorted(nodes)
        for first in range(0, len(names) or 1, NODES_AT_ONCE):
            query = {"node": names[first : first + NODES_AT_ONCE]}
            try:
                await self._call("DELETE", f"/v1/gates/{quote(gate, safe='')}/lease", query=query)
            except RefusedError as error:
                if error.status != NOT_FOUND:
                    raise

    async def _call(
        self, method: str, path: str, *, body: object = None, query: Mapping[str, str | list[str]] | None = None
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
