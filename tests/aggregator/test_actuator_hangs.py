"""SIGTERM while a scheduler does not answer: either daemon ends within its promised seconds, and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aggregator.cluster import AGGREGATOR, Cluster
from tests.aggregator.service import Service, until

PROMISED_SECONDS = 5.0
SCONTROL = "#!/bin/sh\ntouch {file}\nsleep 600\n"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as one:
        yield one


@contextlib.contextmanager
def mute_server() -> Iterator[socket.socket]:
    """Takes connections and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(30)
        yield server


def account(folder: Path) -> Path:
    """A service account of Kubernetes with a token."""
    (folder / "account").mkdir()
    (folder / "account/token").write_text("secret")
    return folder / "account"


def ends_in_time(service: Service, cluster: Cluster) -> None:
    began = time.monotonic()
    service.signal(signal.SIGTERM)
    assert service.ended(10) == 0, service.said()
    assert time.monotonic() - began < PROMISED_SECONDS
    assert "Traceback" not in service.said()
    until(lambda: not cluster.alive(), 1.0, lambda: str(cluster.alive()))


def test_aggregator_ends_in_time_with_the_scontrol_that_hangs(cluster: Cluster, tmp_path: Path) -> None:
    called = tmp_path / "called"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text(SCONTROL.format(file=called))
    (tmp_path / "bin/scontrol").chmod(0o755)
    service = cluster.aggregator(config=AGGREGATOR + '[actuator]\nkind = "slurm"\nmode = "act"\n')
    service.env["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    service.start()
    until(called.exists)
    ends_in_time(service, cluster)


def test_aggregator_ends_in_time_while_the_api_server_never_answers(cluster: Cluster, tmp_path: Path) -> None:
    with mute_server() as server:
        config = (
            f'[actuator]\nkind = "kubernetes"\nmode = "act"\n[actuator.kubernetes]\n'
            f'api_server = "http://127.0.0.1:{server.getsockname()[1]}"\nservice_account = "{account(tmp_path)}"\n'
        )
        service = cluster.aggregator(config=AGGREGATOR + config).start()
        with server.accept()[0]:
            ends_in_time(service, cluster)


def test_node_ends_in_time_while_the_api_server_never_answers(cluster: Cluster, tmp_path: Path) -> None:
    with mute_server() as server:
        config = (
            f'[node.kubernetes]\ncondition = "healthd.internal/Fit"\nnode = "n1"\n'
            f'api_server = "http://127.0.0.1:{server.getsockname()[1]}"\nservice_account = "{account(tmp_path)}"\n'
        )
        service = cluster.node("n1", extra=config).start()
        with server.accept()[0]:
            ends_in_time(service, cluster)
