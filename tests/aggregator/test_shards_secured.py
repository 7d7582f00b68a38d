"""Two aggregators with a shard each, as they run beyond one machine: with tokens, and TLS by a CA of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from healthd.aggregator.auth import Scope, new_token
from tests.aggregator.cluster import Cluster
from tests.aggregator.postgres import connected
from tests.aggregator.secured import Secured, secure
from tests.aggregator.service import Service, until
from tests.aggregator.sharded import SHARDED

pytestmark = [pytest.mark.system, pytest.mark.parametrize("url", ["postgresql"], indirect=True)]


@dataclasses.dataclass
class Two:
    """`asked` leads `default`, `other` leads `b` with the node n2. Each has the tokens of its own files."""

    cluster: Cluster
    files: dict[str, Secured]
    asked: Service
    other: Service

    def ask(self, method: str, path: str, token: str, body: object = None) -> httpx.Response:
        """What `asked` answers to who has this token."""
        trust = ssl.create_default_context(cafile=str(self.files[self.asked.name].folder / "ca.pem"))
        headers = {"authorization": f"Bearer {token}"}
        with httpx.Client(verify=trust, trust_env=False, headers=headers, timeout=30) as client:
            return client.request(method, f"{self.asked.url}{path}", json=body)

    def token(self, scope: Scope) -> str:
        return self.files["agg1"].token_file(scope).read_text().strip()


@pytest.fixture
def two(tmp_path: Path, url: str) -> Iterator[Two]:
    (tmp_path / "agg1").mkdir()
    files = {"agg1": secure(tmp_path / "agg1")}
    (tmp_path / "agg2").mkdir()
    for file in files["agg1"].folder.iterdir():
        copy = tmp_path / "agg2" / file.name
        copy.write_bytes(file.read_bytes())
        copy.chmod(0o600)
    files["agg2"] = Secured(tmp_path / "agg2")
    with Cluster(tmp_path) as cluster:
        started = []
        for name, one in files.items():
            trust = ("--ca-file", str(one.folder / "ca.pem"))
            state = tmp_path / f"{name}-state"
            asked = ("--database", url, *one.aggregator, *trust)
            started.append(cluster.aggregator(*asked, config=SHARDED, name=name, state=state).start())
        first, second = started
        for name, label in (("n1", ()), ("n2", ("--label", "part=b"))):
            cluster.node(name, *files["agg1"].client(Scope.SYNC), *label, aggregator=first.url).start()
            cluster.healthy(name)
        led: dict[str, str | None] = {}

        def shared() -> bool:
            with files["agg1"].http(Scope.READ) as reader:
                rows = reader.get(f"{first.url}/v1/shards").json()["shards"]
            led.update({row["shard"]: row["leader"] for row in rows})
            return led.keys() == {"default", "b"} and {*led.values()} == {first.url, second.url}

        until(shared, 40, first.said)
        by_url = {first.url: first, second.url: second}
        yield Two(cluster, files, by_url[str(led["default"])], by_url[str(led["b"])])


def test_token_of_a_forwarded_request_is_checked_at_both_and_one_without_the_right_goes_nowhere(two: Two) -> None:
    def known(service: Service, scope: Scope) -> str:
        """A token that this aggregator alone knows."""
        token, entry = new_token(f"only-{service.name}", [scope])
        file = two.files[service.name].folder / "tokens.toml"
        file.write_text(file.read_text() + entry + "\n")
        return token

    until(lambda: two.ask("GET", "/v1/nodes/n2", two.token(Scope.READ)).status_code == 200, 20, two.other.said)
    here, there = known(two.asked, Scope.READ), known(two.other, Scope.READ)
    until(lambda: two.ask("GET", "/v1/nodes/n1", here).status_code == 200, 20, two.asked.said)
    refused_there = two.ask("GET", "/v1/nodes/n2", here)
    assert (refused_there.status_code, "not known here" in refused_there.text) == (401, True)
    assert two.ask("GET", "/v1/nodes/n2", there).status_code == 401
    done = two.ask("PUT", "/v1/nodes/n2/quarantine", two.token(Scope.ADMIN), {"reason": "look"})
    assert done.status_code == 200, done.text

    two.other.signal(signal.SIGSTOP)  # whoever answers now is the first one
    for scope, status in ((Scope.READ, 403), (Scope.GATE, 403), (Scope.SYNC, 403)):
        refused = two.ask("PUT", "/v1/nodes/n2/quarantine", two.token(scope), {"reason": "look"})
        assert (refused.status_code, "admin" in refused.text) == (status, True), refused.text
    asked = {"job": "j", "nodes": ["n2"]}
    assert two.ask("POST", "/v1/gates", two.token(Scope.READ), asked).status_code == 403
    assert two.ask("GET", "/v1/nodes/n2", there).status_code == 401
    two.other.signal(signal.SIGCONT)


class Thief:
    """A TLS server whose certificate another CA has signed; `got` is what it was told after a handshake."""

    def __init__(self, folder: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
        self._context, self._folder = context, folder
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._door.getsockname()[1]}"
        self.got, self.calls = b"", 0
        threading.Thread(target=self._serve, name="thief", daemon=True).start()

    def close(self) -> None:
        self._door.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._door.accept()
                self.calls += 1
                connection.settimeout(10)
                with contextlib.suppress(OSError), self._context.wrap_socket(connection, server_side=True) as line:
                    self.got += line.recv(65536)


def test_no_token_goes_to_an_address_in_the_database_that_the_ca_does_not_vouch_for(two: Two, url: str) -> None:
    with contextlib.closing(Thief(two.cluster.folder)) as thief:
        with connected(url) as connection:
            connection.exec_driver_sql(f"UPDATE leadership SET url = '{thief.url}' WHERE shard = 'b'")
        until(lambda: thief.url in two.ask("GET", "/v1/shards", two.token(Scope.READ)).text, 10, two.asked.said)
        answers = [two.ask("GET", path, two.token(Scope.ADMIN)) for path in ("/v1/nodes/n2", "/v1/fleet")]
        assert answers[0].status_code == 503, answers[0].text
        assert answers[1].json()["unanswered"].keys() == {"b"}
        node = two.cluster.services["n2"]
        node.kill()
        two.cluster.node(
            "n2", *two.files["agg1"].client(Scope.SYNC), "--label", "part=b", aggregator=two.asked.url
        ).start()
        until(lambda: f"aggregator {thief.url} cannot be reached" in two.cluster.services["n2"].said(), 30, node.said)
        assert thief.calls >= 2
        assert thief.got == b""
