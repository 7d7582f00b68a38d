"""Calls of AWS, which block, in threads: bounded, and with one kind of error."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from healthd.aggregator.drain.model import ActuatorError

T = TypeVar("T")

METHOD_SECONDS = 20.0
"""Of all calls of one method together: a call with its repeats takes some 8 s at most."""
# Codes after which asking at once makes it worse.
THROTTLED = frozenset({"ThrottlingException", "Throttling", "RequestLimitExceeded", "TooManyRequestsException"})
THROTTLED_PAUSE_SECONDS = 30.0

_over: contextvars.ContextVar[threading.Event] = contextvars.ContextVar("over")


def while_awaited(clients: Callable[[str], Any], service: str) -> Any:
    """The client for one call; ActuatorError once nobody waits for the method that makes it: then all may be other."""
    if _over.get().is_set():
        raise ActuatorError("nobody waits for it any more")
    return clients(service)


async def in_thread(work: Callable[[], T]) -> T:
    """
    What `work` gives, within METHOD_SECONDS; ActuatorError for all that AWS, the network or boto3 can say. After that
    it makes no further call: nothing is drained or terminated by what was decided long ago.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    over = threading.Event()
    _over.set(over)
    try:
        async with asyncio.timeout(METHOD_SECONDS):
            return await asyncio.to_thread(work)
    except TimeoutError:
        raise ActuatorError(f"AWS did not answer within {METHOD_SECONDS:g} s") from None
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        pause = THROTTLED_PAUSE_SECONDS if code in THROTTLED else None
        raise ActuatorError(f"AWS refused: {error}", retry_after_seconds=pause) from None
    except BotoCoreError as error:
        raise ActuatorError(f"AWS could not be asked: {error}") from None
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise ActuatorError(f"what AWS answered is not understood: {error}") from None
    finally:
        over.set()
