"""
Who this machine is: boot, instance and versions. No judgement.

The instance type comes from configuration, else the instance metadata service (version 2), else the firmware's tables
(DMI), else what the accelerator's own tool said. The service is asked only on EC2, and only for what the firmware does
not tell: on Nitro, which all types with accelerators are, it tells both, and no request leaves the machine.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from checks.accelerators.neuron.versions import read_all
from checks.catalog import type_name
from checks.host.machine import Host, HostError

if TYPE_CHECKING:
    from http.client import HTTPConnection

# On EC2's Nitro machines the firmware tables carry both; elsewhere they say something else, or nothing.
_DMI = "/sys/devices/virtual/dmi/id"

IMDS_ENDPOINT = "http://169.254.169.254"
IMDS_CONNECT_SECONDS = 0.3  # a link-local neighbour answers within 1 ms or, behind a container's hop limit, never
IMDS_SECONDS = 1.0  # for the three requests together
_TOKEN_SECONDS = "60"
_MAX_ANSWER_BYTES = 256
_INSTANCE_ID = re.compile(r"i-[0-9a-f]{8,17}")
_TOKEN = re.compile(r"[\x21-\x7e]{1,256}")


class Metadata(NamedTuple):
    """What the instance metadata service says; None for what it does not, or says in a form that cannot be right."""

    instance_type: str | None
    instance_id: str | None


def read_identity(
    host: Host,
    *,
    configured: str | None = None,
    inventory: Mapping[str, Any] | None = None,
    imds: bool | None = None,
    endpoint: str | None = None,
) -> dict[str, Any]:
    """
    boot_id, instance_id, instance_type (None where unknown), its origin (config, imds, dmi, tool), on_ec2, versions.

    `configured` is the operator's word for the type and wins over all. `inventory` may hold the `instance_type` that
    the accelerator's tool said. `imds` False never asks the metadata service, True always does, None as `HEALTHD_IMDS`
    says (`off`, `on`: also where this does not look like EC2), else on EC2 alone. `endpoint` is for tests: without it
    nothing is ever asked about a machine that is data.
    """
    vendor = _line(host, f"{_DMI}/sys_vendor") or ""
    on_ec2 = "amazon" in vendor.lower()
    asset = (_line(host, f"{_DMI}/board_asset_tag") or "") if on_ec2 else ""
    instance_id = asset if _INSTANCE_ID.fullmatch(asset) else None
    said = type_name(_line(host, f"{_DMI}/product_name")) if on_ec2 else None
    metadata = Metadata(None, None)
    told = instance_id is not None and (configured or said) is not None
    if (imds or not told) and may_ask(imds, on_ec2=on_ec2) and (endpoint is not None or host.root is None):
        metadata = ask_metadata(endpoint or IMDS_ENDPOINT)
    instance_type, origin = _first(
        (type_name(configured), "config"),
        (metadata.instance_type, "imds"),
        (said, "dmi"),
        (type_name((inventory or {}).get("instance_type")), "tool"),
    )
    versions = {"python": sys.version.split()[0]}
    kernel = _line(host, "/proc/sys/kernel/osrelease")
    if kernel:
        versions["kernel"] = kernel
    versions.update(read_all(host))
    nvidia = _line(host, "/sys/module/nvidia/version")  # of the driver in the kernel; `gpu_driver` compares its library
    if nvidia:
        versions["nvidia_driver"] = nvidia
    return {
        "boot_id": _line(host, "/proc/sys/kernel/random/boot_id"),
        "instance_id": metadata.instance_id or instance_id,
        "instance_type": instance_type,
        "instance_type_origin": origin,
        "on_ec2": on_ec2 or metadata.instance_type is not None,
        "versions": versions,
    }


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


def ask_metadata(endpoint: str = IMDS_ENDPOINT) -> Metadata:
    """
    Type and id of the instance from the metadata service (IMDSv2: a token first), within IMDS_SECONDS.

    Never through a proxy, never raises, follows no redirect. In a thread, because a server that sends one byte now and
    then keeps a socket's own time limit from ever running out.
    """
    import threading
    from http.client import HTTPConnection

    place = endpoint.partition("://")[2].rstrip("/")
    deadline = time.monotonic() + IMDS_SECONDS
    answers: dict[str, str | None] = {}
    connections: list[HTTPConnection] = []

    def connect() -> HTTPConnection:
        connection = HTTPConnection(place, timeout=IMDS_CONNECT_SECONDS)
        connections.append(connection)
        connection.connect()
        connection.sock.settimeout(max(0.01, deadline - time.monotonic()))
        return connection

    def ask() -> None:
        seconds = {"X-aws-ec2-metadata-token-ttl-seconds": _TOKEN_SECONDS}
        token = _request(connect(), "PUT", "/latest/api/token", seconds)
        if token is None or not _TOKEN.fullmatch(token):
            return
        for name in ("instance-type", "instance-id"):
            answers[name] = _request(connect(), "GET", f"/latest/meta-data/{name}", {"X-aws-ec2-metadata-token": token})

    def quietly() -> None:
        from http.client import HTTPException

        try:
            ask()
        except (OSError, ValueError, HTTPException):
            return  # whoever answers there is not the service; what was learned before stands

    thread = threading.Thread(target=quietly, name="instance-metadata", daemon=True)
    thread.start()
    thread.join(IMDS_SECONDS)
    found = dict(answers)
    for connection in tuple(connections):  # the thread may still add one
        _hang_up(connection)
    name = found.get("instance-id") or ""
    return Metadata(type_name(found.get("instance-type")), name if _INSTANCE_ID.fullmatch(name) else None)


def _request(connection: HTTPConnection, method: str, path: str, headers: Mapping[str, str]) -> str | None:
    """The short text that is answered with 200; None for any other answer."""
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        if answer.status != 200:
            return None
        body = answer.read(_MAX_ANSWER_BYTES + 1)
        cut_off = bool(answer.length)  # what is still to come: too long, or the connection ended in the middle
    finally:
        connection.close()
    return None if cut_off or len(body) > _MAX_ANSWER_BYTES else body.decode("ascii").strip()


def _hang_up(connection: HTTPConnection) -> None:
    """Wake a thread that still waits on the connection, so that it ends."""
    import socket

    waiting = connection.sock
    if waiting is not None:
        try:
            waiting.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed meanwhile


def _first(*choices: tuple[str | None, str]) -> tuple[str | None, str | None]:
    return next(((value, origin) for value, origin in choices if value is not None), (None, None))


def _line(host: Host, path: str) -> str | None:
    """The one line of a small file; None where it cannot be read or is empty."""
    try:
        return host.read(path).strip() or None
    except HostError:
        return None
