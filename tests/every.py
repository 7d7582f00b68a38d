"""One test over all rows of a table: a row costs no test of its own, and a failure shows every row that is wrong."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

PARAM = type(pytest.param())


def _values(row: Any) -> tuple[Any, ...]:
    return tuple(row.values if isinstance(row, PARAM) else row)


def every(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """
    As `pytest.mark.parametrize`, but one test: `@every(("name", "path"), ROWS)`.

    Fixtures are made once for all rows, so a test that changes one is parametrised instead.
    """
    words = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    cases = [_values(row) if len(words) > 1 or isinstance(row, PARAM) else (row,) for row in rows]
    assert cases, f"no rows of {', '.join(words)}"

    def over(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            wrong = []
            for case in cases:
                try:
                    test(**dict(zip(words, case, strict=True)), **fixtures)
                except Exception as error:  # noqa: BLE001 - each row has its say
                    error.add_note(f"row: {', '.join(f'{one!r:.200}' for one in case)}")
                    wrong.append(error)
            if wrong:
                raise ExceptionGroup(f"{len(wrong)} of {len(cases)} rows", wrong)

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in words]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return over
