"""Real processes over a bad network and before bad clients: nothing admitted twice, no result lost, nobody held up."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from tests.aggregator.cluster import Cluster, ask
from tests.aggregator.proxy import Proxy, Rule
from tests.aggregator.service import Service, free_port, until


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as one:
        yield one


def runs_of(node: Service, check: str = "proof") -> int:
    return len(node.get(f"/v1/results/{check}").json()["results"])


def test_hook_whose_answers_are_lost_gets_the_one_decision_in_the_end(cluster: Cluster) -> None:
    aggregator = cluster.fleet("n1", "n2")
    with Proxy(aggregator.url) as proxy:
        for rule in (Rule.CUT, Rule.HALF):
            proxy.rule, proxy.lost = rule, 0
            job = f"job-{rule.value}"
            hook = cluster.start("gate", "--aggregator", proxy.url, "--job", job, "--node", "n1", "--wait", "30s")
            until(lambda: proxy.lost >= 2)
            # It was admitted long ago, and the hook does not know it yet: nobody else gets the node.
            until(lambda job=job: _decisions(aggregator, job) == ["admit"])  # type: ignore[misc]
            assert ask(aggregator.url, f"thief-{rule.value}", ["n1"])["decision"] == "hold"
            httpx.delete(f"{aggregator.url}/v1/gates/{_newest(aggregator)}/lease", trust_env=False, verify=False)
            assert hook.process.poll() is None
            proxy.rule = Rule.PASS
            assert hook.said().code == 0
            assert _decisions(aggregator, job) == ["admit"]
            httpx.delete(f"{aggregator.url}/v1/gates/{_id_of(aggregator, job)}/lease", trust_env=False, verify=False)


def _decisions(aggregator: Service, job: str) -> list[str]:
    return [gate["decision"] for gate in aggregator.get(f"/v1/gates?job={job}").json()["gates"]]


def _id_of(aggregator: Service, job: str) -> str:
    return str(aggregator.get(f"/v1/gates?job={job}").json()["gates"][0]["id"])


def _newest(aggregator: Service) -> str:
    return str(aggregator.get("/v1/gates?limit=1").json()["gates"][0]["id"])


@pytest.mark.parametrize("rule", [Rule.CUT, Rule.HALF])
def test_node_whose_answers_are_lost_runs_an_order_once_and_loses_no_result(cluster: Cluster, rule: Rule) -> None:
    """The node hears of the run by a redelivery, its result arrives once the network is whole, the gate admits."""
    aggregator = cluster.aggregator().start()
    with Proxy(aggregator.url) as proxy:
        node = cluster.node("n1", aggregator=proxy.url).start()
        cluster.healthy("n1")
        until(lambda: aggregator.get("/v1/nodes/n1").json().get("health") == "healthy")
        cluster.aged("n1")
        before = runs_of(node)
        proxy.rule = rule
        assert ask(aggregator.url, "train", ["n1"], max_age_seconds=20.0, wait=0)["decision"] in ("hold", "admit")
        fresh = ask(aggregator.url, "fresh", ["n1"], max_age_seconds=1.0, wait=0)
        assert fresh["decision"] == "hold"
        until(lambda: proxy.lost >= 3)
        proxy.rule = Rule.PASS
        decisions = [ask(aggregator.url, "train", ["n1"], max_age_seconds=20.0, wait=10)]
        assert decisions[0]["decision"] == "admit"
        assert len(node.get("/v1/node").json()["leases"]) == 1
        httpx.delete(f"{aggregator.url}/v1/gates/{decisions[0]['id']}/lease", trust_env=False, verify=False)
        last = ask(aggregator.url, "fresh", ["n1"], max_age_seconds=1.0, wait=15)
        assert last["decision"] == "admit", last
        # One run for the gate, and at most one that the release of the first job made due.
        assert 1 <= runs_of(node) - before <= 3


@pytest.mark.thorough
def test_late_answers_never_make_evidence_look_younger_than_it_is(cluster: Cluster) -> None:
    aggregator = cluster.aggregator().start()
    with Proxy(aggregator.url, late_seconds=1.0) as proxy:
        node = cluster.node("n1", aggregator=proxy.url).start()
        cluster.healthy("n1")
        until(lambda: aggregator.get("/v1/nodes/n1").json().get("health") == "healthy")
        proxy.rule = Rule.LATE
        until(lambda: proxy.late >= 2)
        decision = ask(aggregator.url, "train", ["n1"], wait=20)
        assert decision["decision"] == "admit"
        seen = decision["nodes"][0]["evidence_age_seconds"]
        true = [r["age_seconds"] for r in node.get("/v1/node").json()["results"]]
        now = time.time()
        # What the node says a moment later, less that moment.
        assert seen >= max(true) - (now - decision["decided_at"]) - 0.5


# --- bad clients ------------------------------------------------------------------------------------------------------


def _say(url: str, *parts: bytes, pause: float = 0.0, seconds: float = 15.0) -> bytes:
    """Send parts over a connection of one's own; what comes back until the other side ends it."""
    host, _, port = url.rpartition("/")[2].rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=seconds) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                sock.sendall(part)
                time.sleep(pause)
        with contextlib.suppress(ConnectionResetError):
            while data := sock.recv(1 << 16):
                answer += data
                if b"\r\n\r\n" in answer:
                    break
    return answer


def test_bad_clients_hold_nobody_up_and_get_a_clear_answer(cluster: Cluster) -> None:
    """Half a body, a byte now and then, headers without end, ten megabytes, nonsense: to both services."""
    aggregator = cluster.fleet("n1")
    node = cluster.services["n1"]
    half = b"POST /v1/gates HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    half += b'Content-Length: 400\r\n\r\n{"job":'
    host, port = aggregator.url.rpartition("/")[2].split(":")
    with contextlib.ExitStack() as stack:
        # Thirty that never finish, and stay for as long as the test: ten a kind.
        for start in (half, b"GET /livez HTTP/1.1\r\nX-Slow: ", b""):
            for _ in range(10):
                sock = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
                sock.sendall(start)
        slowest = 0.0
        for _ in range(20):
            began = time.monotonic()
            assert ask(aggregator.url, "train", ["n1"], wait=5)["decision"] == "admit"
            assert node.health() == 200
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 8  # what is not whole is borne for 10 s: nobody waited for that
    large = b'{"job": "' + b"x" * (10 << 20) + b'"}'
    for service, path in ((aggregator, "/v1/gates"), (aggregator, "/v1/nodes/n1/sync"), (node, "/health")):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Healthd-Node-Key: {'k' * 40}\r\n".encode()
        assert b" 413 " in _say(service.url, head + f"Content-Length: {len(large)}\r\n\r\n".encode(), large)[:20]
        long = b"X-Long: " + b"y" * 100_000 + b"\r\n\r\n"
        assert b" 431 " in _say(service.url, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n".encode(), long)[:20]
        assert b" 400 " in _say(service.url, b"\x16\x03\x01 nonsense\r\n\r\n")[:20]
        assert service.get("/livez").status_code == 200
    for body, word in (
        (b"", "eof while parsing"),
        (b"[]", "object"),
        (b'{"job": 1}', "job"),
        (b'{"job": "j", "nodes": 3}', "nodes"),
    ):
        answer = httpx.post(f"{aggregator.url}/v1/gates", content=body, trust_env=False, verify=False)
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/problem+json"
        assert word.lower() in answer.json()["detail"].lower(), answer.text
    assert "Traceback" not in aggregator.said() + node.said()


# --- TLS and tokens ---------------------------------------------------------------------------------------------------


def test_tls_and_tokens_between_node_hook_and_aggregator(cluster: Cluster) -> None:
    folder = cluster.folder
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    entries = ""
    for scope in ("sync", "gate", "read"):
        made = json.loads(cluster.healthd("token", scope, "--scope", scope, "--json").out)
        (folder / f"{scope}.token").write_text(made["token"] + "\n")
        entries += made["entry"] + "\n"
    (folder / "tokens.toml").write_text(entries)
    (folder / "wrong.token").write_text("a" * 40)
    tls = ("--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem"))
    # All addresses: without TLS and tokens this is refused, which is asked first.
    listen = f"0.0.0.0:{free_port()}"
    bare = cluster.healthd("aggregator", "--listen", listen, "--state-dir", str(folder / "bare"))
    assert bare.code == 2
    assert "--insecure" in bare.line
    aggregator = cluster.aggregator("--listen", listen, "--token-table", str(folder / "tokens.toml"), *tls).start()
    url = f"https://127.0.0.1:{listen.partition(':')[2]}"

    def node(name: str, token: str) -> Service:
        file, ca = str(folder / f"{token}.token"), str(folder / "ca.pem")
        return cluster.node(name, "--token-file", file, "--ca-file", ca, aggregator=url).start()

    def hook(token: str, job: str, *more: str, ca: str = "ca.pem") -> tuple[int, str]:
        said = cluster.healthd(
            *("gate", "--aggregator", url, "--job", job, "--node", "n1", "--wait", "10s", *more),
            *("--token-file", str(folder / f"{token}.token"), "--ca-file", str(folder / ca)),
        )
        return said.code, said.err + said.out

    good, wrong = node("n1", "sync"), node("n2", "wrong")
    cluster.healthy("n1", "n2")
    until(lambda: f"aggregator {url} answers" in good.said())
    assert hook("gate", "train")[0] == 0
    for token, words in (("wrong", "this token is unknown"), ("read", "lacks scope 'gate'")):
        code, text = hook(token, "other")
        assert code == 2, "no second try can help"
        assert words in text
        assert len(text.strip().splitlines()) == 1
    trustme.CA().cert_pem.write_to_path(str(folder / "other.pem"))
    code, text = hook("gate", "train", ca="other.pem")
    assert code == 2, "no second try can help"
    assert "certificate verify failed" in text.lower()
    assert "name its CA with --ca-file" in text
    assert "this token is unknown" in wrong.said()
    assert wrong.said().count("token is unknown") == 1, "one line, not one a second"
    trust = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    with httpx.Client(verify=trust, trust_env=False) as plain:
        assert plain.get(f"{url}/v1/nodes").status_code == 401
        token = (folder / "read.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        assert [n["node"] for n in plain.get(f"{url}/v1/nodes", headers=headers).json()["nodes"]] == ["n1"]
        assert plain.put(f"{url}/v1/nodes/n1/quarantine", json={"reason": "x"}, headers=headers).status_code == 403
    assert aggregator.process is not None
