"""
The instance metadata service of EC2: the one place of a check that asks over the network. No judgement.

Version 2 alone (a token first). Never through a proxy, no redirect is followed, and all requests together have
SECONDS, because whoever asks may run beside a job.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from http.client import HTTPConnection

ENDPOINT = "http://169.254.169.254"
CONNECT_SECONDS = 0.3  # a link-local neighbour answers within 1 ms or, behind a container's hop limit, never
SECONDS = 1.0  # for the token and all values together
MAX_ANSWER_BYTES = 16 << 10  # of one value; an instance has a handful of events of some 250 bytes
_TOKEN_SECONDS = "60"
_MAX_TOKEN_BYTES = 256
_TOKEN = re.compile(r"[\x21-\x7e]{1,256}")


def may_ask(imds: bool | None, *, on_ec2: bool, environment: Mapping[str, str] | None = None) -> bool:
    """
    Whether the metadata service may be asked: as told, else as the variables say, else on EC2 alone.

    `AWS_EC2_METADATA_DISABLED=true` is what AWS' own tools obey; so do we.
    """
    if imds is not None:
        return imds
    variables = os.environ if environment is None else environment
    word = variables.get("HEALTHD_IMDS", "").strip().lower()
    if word in ("off", "false", "no", "0") or variables.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    return on_ec2 or word in ("on", "true", "yes", "1")


def endpoint_of(environment: Mapping[str, str] | None = None) -> str:
    """Where the service is: `AWS_EC2_METADATA_SERVICE_ENDPOINT`, as AWS' own tools have it, else its fixed address."""
    variables = os.environ if environment is None else environment
    return variables.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").strip() or ENDPOINT


def fetch(endpoint: str, names: Iterable[str], *, root: str = "meta-data") -> dict[str, str | None]:
    """
    The values of these names below `/latest/ROOT`, as text; None for a name that the service does not have (404).

    A name that is not in the answer got no usable answer in time; without a token the answer is empty. Never raises.
    In a thread, because a server that sends one byte now and then keeps a socket's own time limit from ever running
    out.
    """
    import threading
    from http.client import HTTPConnection

    place = endpoint.partition("://")[2].rstrip("/")
    deadline = time.monotonic() + SECONDS
    answers: dict[str, str | None] = {}
    connections: list[HTTPConnection] = []

    def connect() -> HTTPConnection:
        connection = HTTPConnection(place, timeout=CONNECT_SECONDS)
        connections.append(connection)
        connection.connect()
        connection.sock.settimeout(max(0.01, deadline - time.monotonic()))
        return connection

    def ask() -> None:
        seconds = {"X-aws-ec2-metadata-token-ttl-seconds": _TOKEN_SECONDS}
        status, token = _request(connect(), "PUT", "/latest/api/token", seconds, _MAX_TOKEN_BYTES)
        if status != 200 or token is None or not _TOKEN.fullmatch(token):
            return
        header = {"X-aws-ec2-metadata-token": token}
        for name in names:
            status, text = _request(connect(), "GET", f"/latest/{root}/{name}", header, MAX_ANSWER_BYTES)
            if status == 404:
                answers[name] = None
            elif status == 200 and text is not None:
                answers[name] = text

    def quietly() -> None:
        from http.client import HTTPException

        try:
            ask()
        except (OSError, ValueError, HTTPException):
            return  # whoever answers there is not the service; what was learned before stands

    thread = threading.Thread(target=quietly, name="instance-metadata", daemon=True)
    thread.start()
    thread.join(SECONDS)
    found = dict(answers)
    for connection in tuple(connections):  # the thread may still add one
        _hang_up(connection)
    return found


def _request(
    connection: HTTPConnection, method: str, path: str, headers: Mapping[str, str], max_bytes: int
) -> tuple[int, str | None]:
    """The status, and the text where it is 200 and the body is whole and not too long."""
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        if answer.status != 200:
            return answer.status, None
        body = answer.read(max_bytes + 1)
        cut_off = bool(answer.length)  # what is still to come: too long, or the connection ended in the middle
    finally:
        connection.close()
    return 200, None if cut_off or len(body) > max_bytes else body.decode("ascii").strip()


def _hang_up(connection: HTTPConnection) -> None:
    """Wake a thread that still waits on the connection, so that it ends."""
    import socket

    waiting = connection.sock
    if waiting is not None:
        try:
            waiting.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed meanwhile
