"""
SageMaker training jobs: the hosts by the SM_* variables, or by the file that every container gets.

SM_* is set by the training toolkit alone; a container of one's own has only `resourceconfig.json`. Rank 0 is the first
host in the order of their numbers (algo-1, algo-2, ... algo-10), which is SageMaker's own master.

Source: sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md; SageMaker developer guide, "How Amazon SageMaker provides
training information". Unverified on AWS: no training job was run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from checks.json_text import parse_json
from healthd.core.bounded import read_file
from healthd.core.errors import BadInputError, ConfigError
from healthd.hooks.launchers import Launcher, Place, whole

RESOURCE_CONFIG = Path("/opt/ml/input/config/resourceconfig.json")
MOST_BYTES = 1 << 20


def find(environ: Mapping[str, str], *, file: Path | None = None) -> Place | None:
    """The place of this host, or None where this is no training job. `file` None: RESOURCE_CONFIG."""
    file = RESOURCE_CONFIG if file is None else file
    names = ("SM_HOSTS", "SM_CURRENT_HOST")
    if any(name in environ for name in names):
        whole(environ, names, "SageMaker")
        return _place(environ, environ["SM_CURRENT_HOST"], environ["SM_HOSTS"], "SM_HOSTS")
    try:
        text = read_file(file, MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, BadInputError) as error:
        raise ConfigError(f"SageMaker: {file} cannot be read: {error}") from None
    try:
        found = parse_json(text)
        current, hosts = found["current_host"], json.dumps(found["hosts"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"SageMaker: {file} has no current_host and hosts; is it complete?") from None
    return _place(environ, current, hosts, str(file))


def _place(environ: Mapping[str, str], current: object, hosts_text: str, where: str) -> Place:
    try:
        hosts = parse_json(hosts_text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) and host for host in hosts):
        raise ConfigError(f"SageMaker: {where} is not a list of host names: {hosts_text[:80]!r}")
    ordered = sorted(set(hosts), key=_natural)
    if not isinstance(current, str) or current not in ordered or len(ordered) != len(hosts):
        raise ConfigError(f"SageMaker: {current!r} is not among the hosts {', '.join(ordered[:8])} in {where}")
    return Place(
        job=environ.get("TRAINING_JOB_NAME") or environ.get("SM_JOB_NAME"),
        attempt=0,
        rank=ordered.index(current),
        size=len(ordered),
        main=ordered[0] if len(ordered) > 1 else "127.0.0.1",
        local_rank=0,
        local_size=1,
        source="SageMaker",
        evidence=f"{current} of {len(ordered)} hosts in {where}",
        attempt_told=False,
    )


def _natural(host: str) -> tuple[str, int, str]:
    """algo-2 before algo-10."""
    match = re.fullmatch(r"(.*?)(\d{1,9})", host)
    return (match[1], int(match[2]), host) if match else (host, -1, host)


LAUNCHER = Launcher(order=40, variables=("SM_HOSTS",), find=find)
