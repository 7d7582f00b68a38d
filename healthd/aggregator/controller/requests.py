"""The requests that wait for a pass of the engine's loop, and those of the pass that runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from healthd.aggregator.controller.bulkheads import ContainedError, Where, contained
from healthd.aggregator.controller.state.batch import Batch
from healthd.core.errors import HealthdError

T = TypeVar("T")

Result = tuple[asyncio.Future[Any], Any]
"""What a request returned, told once it is on disk."""

_Request = tuple[Callable[[Batch], Any], asyncio.Future[Any]]


class Requests:
    """A queue; each request is answered exactly once, with its result or with the error that stopped it."""

    def __init__(self) -> None:
        self._waiting: deque[_Request] = deque()
        self._current: list[_Request] = []
        self._one_by_one = 0  # so many get a pass of their own each

    def __bool__(self) -> bool:
        """Whether requests wait for a pass."""
        return bool(self._waiting)

    def add(self, action: Callable[[Batch], T]) -> asyncio.Future[T]:
        """Queue a request; the future of its result."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((action, future))
        return future

    def begin(self) -> None:
        """Begin a pass, with no request yet."""
        self._current = []

    def take(self) -> None:
        """Make the requests that wait those of this pass."""
        most, self._one_by_one = (1 if self._one_by_one else len(self._waiting)), max(0, self._one_by_one - 1)
        self._current = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def apply(self, batch: Batch) -> list[Result]:
        """Run the requests of this pass. ContainedError names, by its place, one that fails in an unforeseen way."""
        results: list[Result] = []
        for index, (action, future) in enumerate(self._current):
            if future.done():
                continue  # it was answered already
            try:
                with contained(Where.REQUEST, str(index)):
                    results.append((future, action(batch)))
            except ContainedError as stopped:
                if not isinstance(stopped.error, HealthdError):
                    raise
                future.set_exception(stopped.error)
        return results

    def put_back(self) -> None:
        """Let the requests of this pass wait again, before all others."""
        self._waiting.extendleft(reversed(self._current))

    def fail(self, index: int, error: Exception) -> None:
        """Fail one request of this pass, by its place."""
        _, future = self._current.pop(index)
        _fail(future, error)

    def fail_pass(self, error: Exception) -> None:
        """Fail the requests of this pass that have no answer yet."""
        for _, future in self._current:
            _fail(future, error)

    def fail_waiting(self, error: Exception) -> None:
        """Fail the requests that wait for a pass."""
        while self._waiting:
            _, future = self._waiting.popleft()
            _fail(future, error)

    def separate(self, error: Exception) -> None:
        """
        Give each request of this pass that has no answer a pass of its own, because the database may refuse only one
        of them. Where there is only one, it fails.
        """
        unanswered = [request for request in self._current if not request[1].done()]
        if len(unanswered) < 2:
            self.fail_pass(error)
            return
        self._waiting.extendleft(reversed(unanswered))
        self._one_by_one = len(unanswered)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    """Fail the future, unless it has a result already."""
    if not future.done():
        future.set_exception(error)
