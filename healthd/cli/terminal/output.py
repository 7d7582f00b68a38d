"""
Standard output and standard error of a command.

What cannot be written is never taken for told, and control characters in what others said are escaped, whoever writes
it. Colours and cursor movements of our own go past the escaping, to the stream below: see `console`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from checks.printable import printable
from healthd.core.errors import OutputError, words_of


class CarefulOutput:
    """
    A text stream whose reader may go away (`| head`): what is said then is dropped, and the exit code stays.

    Any other failure (a full disk) is an OutputError; with `forgiving` (standard error, which nobody computes with) it
    is dropped as well. After a failure the stream leads nowhere, so that nothing fails again when the process ends.
    """

    def __init__(self, stream: TextIO, *, forgiving: bool = False) -> None:
        self._stream = stream
        self._forgiving = forgiving
        self.dropped = False

    def write(self, text: str) -> int:
        """As a text stream; what its encoding does not have is escaped as JSON does."""
        if not text:  # click's trial whether this takes text, of which it hears no error
            return 0
        try:
            try:
                return self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write("".join(_escaped(sign, error.encoding) for sign in text))
                return len(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        """As a text stream."""
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        self._drop()
        if not (self._forgiving or isinstance(error, BrokenPipeError)):
            raise OutputError(f"standard output cannot be written: {words_of(error)}") from None

    def _drop(self) -> None:
        self.dropped = True
        with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor has nothing to lead elsewhere
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _escaped(sign: str, encoding: str) -> str:
    """A character as it is, or as JSON escapes it where the encoding does not have it."""
    try:
        sign.encode(encoding)
    except UnicodeEncodeError:
        import json

        return json.dumps(sign)[1:-1]
    return sign


class PrintableOutput:
    """A careful stream on which no control character comes out but tabs and newlines; `styled` is the one below it."""

    encoding = "utf-8"
    """It takes any text, whatever the one below has; to an ASCII one click would write itself, past the escaping."""

    def __init__(self, stream: TextIO, *, forgiving: bool = False) -> None:
        self.styled = CarefulOutput(stream, forgiving=forgiving)

    def write(self, text: str) -> int:
        """As a text stream."""
        self.styled.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.styled, name)


def guard_streams() -> None:
    """Make the standard streams careful and printable ones; one that the caller has closed leads nowhere."""
    sys.stdout = cast("TextIO", PrintableOutput(sys.stdout or _nowhere()))
    sys.stderr = cast("TextIO", PrintableOutput(sys.stderr or _nowhere(), forgiving=True))


def _nowhere() -> TextIO:
    """For a stream that is closed: the lowest number is that stream's, and what is started here must find it open."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(descriptor, True)
    return open(descriptor, "w", encoding="utf-8", closefd=False)


def styled(stream: TextIO) -> TextIO:
    """The stream below a guarded one, for what is printable already; the stream itself where it is not guarded."""
    return cast("TextIO", getattr(stream, "styled", stream))


@contextlib.contextmanager
def told(*, needed: bool) -> Iterator[None]:
    """
    What is printed within has reached standard output when this ends; else OutputError.

    A reader that has gone away is an error only where the text is `needed`: it is the answer, and not the exit code.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {words_of(error)}") from None
    if needed and getattr(sys.stdout, "dropped", False):
        raise OutputError("standard output cannot be written: its reader has closed")
