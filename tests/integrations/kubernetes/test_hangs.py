"""SIGTERM while the API server does not answer: either daemon ends within its promised seconds, and leaves nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aggregator.cluster import AGGREGATOR, Cluster
from tests.aggregator.ends_kit import ends_in_time


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
