"""Starting and stopping the aggregator: TLS, tokens, one clear line for what cannot work, SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import trustme

from healthd.aggregator.identity.tokens import Scope, new_token
from healthd.aggregator.policy import Policy
from healthd.aggregator.process import aggregator
from healthd.aggregator.settings import AggregatorSettings
from healthd.core.errors import ConfigError, HealthdError
from tests.cli.cli_kit import healthd
from tests.patience import PATIENCE

SCRIPT = """
import asyncio, sys
from pathlib import Path
from healthd.core.errors import HealthdError
from healthd.aggregator.process import run_aggregator
from healthd.aggregator.policy import Policy
from healthd.aggregator.settings import AggregatorSettings

settings = AggregatorSettings(listen=sys.argv[1], state_dir=Path(sys.argv[2]))
try:
    asyncio.run(run_aggregator(settings, Policy(), on_ready=lambda address: print(address, flush=True)))
except HealthdError as error:
    sys.exit(f"healthd: {error}")
"""


def start(state_dir: Path, listen: str = "127.0.0.1:0") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, listen, str(state_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_sigterm_answers_held_requests_and_ends_in_time(tmp_path: Path) -> None:
    process = start(tmp_path)
    try:
        assert process.stdout is not None
        url = f"http://{process.stdout.readline().strip()}"
        question = {"job": "j", "nodes": ["nobody"], "wait_seconds": 100}

        async def run() -> None:
            async with httpx.AsyncClient(base_url=url, timeout=60.0, verify=False) as client:
                waiting = asyncio.create_task(client.post("/v1/gates?wait=25", json=question))
                while not (await client.get("/v1/gates")).json()["gates"]:  # noqa: ASYNC110 - the state of a server
                    await asyncio.sleep(0.01)
                process.send_signal(signal.SIGTERM)
                assert (await waiting).json()["decision"] == "hold"

        asyncio.run(asyncio.wait_for(run(), 20 * PATIENCE))
        began = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, time.monotonic() - began < 4 * PATIENCE) == (0, True), errors
    finally:
        process.kill()
        process.wait()


@pytest.mark.thorough
def test_a_killed_aggregator_answers_its_open_gate_after_the_restart(tmp_path: Path) -> None:
    question = {"job": "j", "nodes": ["nobody"], "wait_seconds": 100}
    ids = []
    for _ in range(2):
        process = start(tmp_path)
        try:
            assert process.stdout is not None
            url = f"http://{process.stdout.readline().strip()}"
            ids.append(httpx.post(f"{url}/v1/gates", json=question, trust_env=False, verify=False).json()["id"])
        finally:
            process.kill()
            process.communicate()
    assert ids[0] == ids[1]


def fails(settings: AggregatorSettings) -> str:
    async def run() -> None:
        async with aggregator(settings, Policy()):
            pytest.fail("started")

    with pytest.raises(HealthdError) as error:
        asyncio.run(run())
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("url", "code"),
    [("nonsense", 2), ("mysql://u:hunter2@db/x", 2), ("postgresql+psycopg://u:hunter2@127.0.0.1:1/x", 1)],
)
def test_a_wrong_database_is_bad_input_and_one_that_is_away_is_not(tmp_path: Path, url: str, code: int) -> None:
    said = healthd(tmp_path, "aggregator", "--listen", "127.0.0.1:0", "--database", url)
    assert said.code == code, said.err
    assert "database" in said.err.splitlines()[-1]
    assert "hunter2" not in said.err


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        assert "another program has the port" in fails(AggregatorSettings(listen=listen, state_dir=tmp_path))


def test_a_damaged_database_and_a_place_that_is_no_directory_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "aggregator.db").write_bytes(b"this is no database " * 500)
    text = fails(AggregatorSettings(listen="127.0.0.1:0", state_dir=tmp_path))
    assert "aggregator.db" in text
    assert "restore a backup" in text
    text = fails(AggregatorSettings(listen="127.0.0.1:0", state_dir=tmp_path / "aggregator.db"))
    assert "--state-dir" in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_state_directory_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert str(tmp_path) in fails(AggregatorSettings(listen="127.0.0.1:0", state_dir=tmp_path / "new"))


def test_a_database_in_memory_needs_no_directory(tmp_path: Path) -> None:
    async def run() -> None:
        settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=tmp_path / "none", database="sqlite://")
        async with aggregator(settings, Policy()) as (address, _), httpx.AsyncClient(verify=False) as client:
            assert (await client.get(f"http://{address}/readyz")).status_code == 200

    asyncio.run(run())
    assert not (tmp_path / "none").exists()


def test_settings_that_cannot_work_are_refused() -> None:
    for wrong, text in (
        ({"listen": "0.0.0.0:8090"}, "without tls_cert and tls_key and token_table"),
        ({"listen": ":8090"}, "--insecure"),
        ({"listen": "x"}, "not HOST:PORT"),
        ({"tls_cert": Path("c")}, "go together"),
        ({"max_nodes": 0}, "max_nodes"),
        ({"hold_max_seconds": 90.0}, "hold_max"),
    ):
        with pytest.raises(HealthdError, match=text):
            AggregatorSettings(**wrong)  # type: ignore[arg-type]
    assert AggregatorSettings(listen="[::]:80", insecure=True).address == ("::", 80)


def test_over_tls_each_token_opens_its_own_paths(tmp_path: Path) -> None:
    ca = trustme.CA()
    certificate = ca.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    tokens, text = {}, ""
    for scope in Scope:
        tokens[scope], lines = new_token(scope.value, [scope])
        text += lines
    (tmp_path / "tokens").write_text(text)
    (tmp_path / "tokens").chmod(0o600)
    settings = AggregatorSettings(
        listen="127.0.0.1:0",
        state_dir=tmp_path,
        tls_cert=tmp_path / "cert.pem",
        tls_key=tmp_path / "key.pem",
        token_table=tmp_path / "tokens",
    )
    trust = ssl.create_default_context()
    ca.configure_trust(trust)

    async def run() -> None:
        async with (
            aggregator(settings, Policy()) as (address, _),
            httpx.AsyncClient(base_url=f"https://{address}", verify=trust) as client,
        ):
            paths = {
                ("GET", "/v1/nodes"): {Scope.READ, Scope.GATE, Scope.ADMIN},
                ("GET", "/metrics"): {Scope.READ, Scope.GATE, Scope.ADMIN},
                ("GET", "/v1/sd/prometheus"): {Scope.READ, Scope.GATE, Scope.ADMIN},
                ("POST", "/v1/gates"): {Scope.GATE, Scope.ADMIN},
                ("DELETE", "/v1/gates/x/lease"): {Scope.GATE, Scope.ADMIN},
                ("PUT", "/v1/overrides/x"): {Scope.ADMIN},
                ("PUT", "/v1/nodes/x/quarantine"): {Scope.ADMIN},
                ("DELETE", "/v1/nodes/x"): {Scope.ADMIN},
                ("POST", "/v1/fleet/recover"): {Scope.ADMIN},
                ("POST", "/v1/nodes/x/sync"): {Scope.SYNC, Scope.ADMIN},
            }
            for (method, path), allowed in paths.items():
                unknown = await client.request(method, path)
                assert (unknown.status_code, unknown.headers["www-authenticate"][:6]) == (401, "Bearer"), path
                for scope, token in tokens.items():
                    headers = {"authorization": f"Bearer {token}", "x-healthd-node-key": "0123456789abcdef"}
                    response = await client.request(method, path, headers=headers)
                    assert (response.status_code != 403) == (scope in allowed), (path, scope, response.text)
            assert (await client.get("/livez")).status_code == 200
            with pytest.raises(httpx.TransportError):
                await client.get(f"http://{address}/livez")

    asyncio.run(asyncio.wait_for(run(), 20 * PATIENCE))


def test_a_token_table_or_certificate_that_cannot_be_used_is_one_clear_line(tmp_path: Path) -> None:
    settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=tmp_path, token_table=tmp_path / "none")
    assert "no such token table" in fails(settings)
    (tmp_path / "pem").write_text("no certificate")
    settings = AggregatorSettings(
        listen="127.0.0.1:0", state_dir=tmp_path, tls_cert=tmp_path / "pem", tls_key=tmp_path / "pem"
    )
    assert "PEM" in fails(settings)
    with pytest.raises(ConfigError):
        AggregatorSettings(listen="0.0.0.0:0", tls_cert=tmp_path / "pem", tls_key=tmp_path / "pem")
