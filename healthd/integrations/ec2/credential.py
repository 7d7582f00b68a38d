"""
The credential of a node on EC2: the identity document that AWS has signed for the instance, in a file as a token is.

It changes when the instance is stopped and started, and never while the daemon runs. Whoever may ask the metadata
service of this instance can have it, too: the node's own key is what makes it worth something.

Source: AWS, "Verify the instance identity document": `/latest/dynamic/instance-identity/rsa2048`, base64 in lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from checks.atomic_file import write_atomically
from checks.host.metadata import endpoint_of, fetch
from healthd.core.errors import ConfigError

FILE = "instance-identity"
_NAME = "instance-identity/rsa2048"
_BASE64 = re.compile(r"[A-Za-z0-9+/]{100,8000}={0,2}")


def write_credential(run_dir: Path, environ: Mapping[str, str]) -> Path:
    """
    Ask the metadata service for the document and write it; the file, which its owner alone may read.

    ConfigError in one line where there is none.
    """
    endpoint = endpoint_of(environ)
    found = "".join((fetch(endpoint, [_NAME], root="dynamic").get(_NAME) or "").split())
    if not _BASE64.fullmatch(found):
        raise ConfigError(
            f"node.sync.instance_identity: the metadata service at {endpoint[:80]} returns no identity document; is "
            "this an EC2 instance, and is its HttpPutResponseHopLimit high enough for a container?"
        )
    path = run_dir / FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{found}\n".encode(), mode=0o600)
    except OSError as error:
        raise ConfigError(f"{path}: the identity document cannot be written: {error.strerror or error}") from None
    return path
