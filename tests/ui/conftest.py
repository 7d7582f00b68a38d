"""One browser for the tests of a file: it takes a second to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ui.stage import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found
