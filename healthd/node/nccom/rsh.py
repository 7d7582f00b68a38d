"""
`healthd-rsh`: what Open MPI's mpirun calls in place of ssh, when nodes take part in a round without ssh.

mpirun calls it with a host and the command that starts its daemon there. It passes them to the executor of this node
over the Unix socket HEALTHD_RSH_SOCKET, and exits as that answers; it starts nothing and decides nothing itself.

One line of JSON each way: `{"round": ..., "argv": [host, word, ...]}`, then `{"exit": 0..255, "error": text or null}`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checks.collective.nccom.launch import ROUND_VARIABLE, SOCKET_VARIABLE
from checks.json_text import parse_json
from checks.printable import printable
from healthd.core.errors import HealthdError

TIMEOUT_SECONDS = 60.0
MAX_LINE_BYTES = 256 * 1024
UNREACHABLE = 255  # as ssh says it


class RshError(HealthdError):
    """A line that is no request or no answer, or an executor that does not answer."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What mpirun wants: `argv` is the host and then the command, not judged yet (`checks.collective.nccom.vector`)."""

    round: str
    argv: tuple[str, ...]


def write_request(request: Request) -> bytes:
    """As one line."""
    return json.dumps({"round": request.round, "argv": list(request.argv)}).encode() + b"\n"


def read_request(line: bytes) -> Request:
    """From one line. Raises RshError."""
    message = _object(line)
    round_name, argv = message.get("round"), message.get("argv")
    if not isinstance(round_name, str) or not isinstance(argv, list) or not all(isinstance(one, str) for one in argv):
        raise RshError("a request has the members round (text) and argv (a list of texts)")
    return Request(round=round_name, argv=tuple(argv))


def write_answer(exit_code: int, error: str | None) -> bytes:
    """As one line."""
    return json.dumps({"exit": exit_code, "error": error}).encode() + b"\n"


def ask(path: Path, request: Request, *, timeout_seconds: float = TIMEOUT_SECONDS) -> tuple[int, str | None]:
    """Exit code and error that the executor answers. Raises RshError where it cannot be asked."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(timeout_seconds)
        try:
            line.connect(str(path))
            line.sendall(write_request(request))
            with line.makefile("rb") as answers:
                answer = answers.readline(MAX_LINE_BYTES)
        except TimeoutError:
            raise RshError(f"{path}: no answer within {timeout_seconds:g} s") from None
        except OSError as error:
            raise RshError(f"{path}: {error.strerror or error}; is the round still under way?") from None
    message = _object(answer)
    code, text = message.get("exit"), message.get("error")
    if not isinstance(code, int) or isinstance(code, bool) or not 0 <= code <= UNREACHABLE:
        raise RshError(f"{path}: the answer has no exit code")
    return code, text if isinstance(text, str) else None


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> int:
    """The program. 0 when the daemon was started there, 255 when the executor could not be asked."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    variables = os.environ if environment is None else environment
    path, round_name = variables.get(SOCKET_VARIABLE), variables.get(ROUND_VARIABLE)
    if not path or not round_name:
        sys.stderr.write(
            f"healthd-rsh: {SOCKET_VARIABLE} and {ROUND_VARIABLE} are not set: only mpirun of a round calls this\n"
        )
        return UNREACHABLE
    try:
        code, error = ask(Path(path), Request(round=round_name, argv=tuple(argv)))
    except RshError as failure:
        code, error = UNREACHABLE, str(failure)
    if error:
        sys.stderr.write(f"healthd-rsh: {printable(' '.join(error.split()))}\n")
    return code


def _object(line: bytes) -> dict[str, object]:
    """A JSON object out of a whole line."""
    if not line.endswith(b"\n"):
        raise RshError("a line that was cut, or none")
    try:
        message = parse_json(line)
    except ValueError:
        raise RshError("a line that is no JSON") from None
    if not isinstance(message, dict):
        raise RshError("a line that is no JSON object")
    return message


if __name__ == "__main__":
    sys.exit(main())
