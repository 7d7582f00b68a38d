"""`healthd tls init`: what it makes lets an aggregator be asked by its names, and nobody else's."""

from __future__ import annotations

import shutil
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.aggregator.cluster import Cluster
from tests.aggregator.service import free_port
from tests.cli.cli_kit import healthd

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as one:
        yield one


def test_an_aggregator_with_what_was_made_is_reached_by_name_and_by_nobody_without_the_ca(cluster: Cluster) -> None:
    folder = cluster.folder / "tls"
    made = healthd(cluster.folder, "tls", "init", "head.example", "10.1.2.3", "--dir", str(folder))
    assert made.code == 0, made.err
    assert "as head.example, 10.1.2.3," in made.out
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"ca.pem": 0o644, "cert.pem": 0o644, "ca-key.pem": 0o600, "key.pem": 0o600}
    tls = ("--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem"))
    port = free_port()
    cluster.aggregator("--listen", f"127.0.0.1:{port}", *tls).start()
    ask = ("fleet", "status", "--aggregator", f"https://localhost:{port}")
    said = cluster.healthd(*ask, "--ca-file", str(folder / "ca.pem"))
    assert said.code == 0, said.err
    assert cluster.healthd(*ask).code != 0
    # As strict as the newest Python is by default.
    trust = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    trust.verify_flags |= ssl.VERIFY_X509_STRICT
    for name in ("localhost", "127.0.0.1"):
        with httpx.Client(verify=trust, trust_env=False) as http:
            assert http.get(f"https://{name}:{port}/livez").status_code == 200


def test_the_next_one_is_by_the_same_ca_so_that_no_client_needs_another(tmp_path: Path) -> None:
    assert healthd(tmp_path, "tls", "init", "--dir", str(tmp_path / "tls")).code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "tls").iterdir()}
    again = healthd(tmp_path, "tls", "init", "head2", "--dir", str(tmp_path / "tls"), "--days", "30")
    assert again.code == 0
    assert "kept as it was" in again.out
    after = {path.name: path.read_bytes() for path in (tmp_path / "tls").iterdir()}
    assert {name for name in after if after[name] == before[name]} == {"ca.pem", "ca-key.pem"}


@pytest.mark.parametrize(
    "name", ["two words", "a,DNS:b", "-x.example", "https://head", "", "head\nCN=x", "fe80::1%eth0", "::1%a,DNS:b"]
)
def test_what_is_no_name_is_said_and_nothing_is_made(tmp_path: Path, name: str) -> None:
    said = healthd(tmp_path, "tls", "init", "--dir", str(tmp_path / "tls"), "--", name)
    assert said.code == 2
    assert "neither a host name nor an IP address" in said.err
    assert not (tmp_path / "tls").exists()


def test_half_a_ca_and_a_missing_program_are_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("x")
    said = healthd(tmp_path, "tls", "init", "--dir", str(tmp_path))
    assert (said.code, "but not ca-key.pem; name another folder with --dir" in said.err) == (2, True)
    said = healthd(tmp_path, "tls", "init", "--dir", str(tmp_path / "x"), env={"PATH": "/nowhere"})
    assert (said.code, "install your distribution's package openssl" in said.err) == (2, True)
