"""What tests of rules and dashboards share: the files as data, and a real Prometheus while a test lasts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import yaml

from healthd.aggregator.identity.tokens import Scope
from tests.aggregator.cluster import Cluster
from tests.aggregator.secured import Secured
from tests.aggregator.service import free_port

ROOT = Path(__file__).parent.parent.parent
PROMETHEUS = ROOT / "deploy/prometheus"
GRAFANA = ROOT / "deploy/grafana"
RUNBOOKS = ROOT / "docs/runbooks"
RECORDING, ALERTS = PROMETHEUS / "healthd-recording.yml", PROMETHEUS / "healthd-alerts.yml"
CASES = PROMETHEUS / "healthd-alerts.test.yml"
ROUTES = PROMETHEUS / "alertmanager.yml"
_SUFFIX = re.compile(r"_(bucket|count|sum|total)$")
_RAW = re.compile(r"\bhealthd_[a-z_]+")
_RECORDED = re.compile(r"\bhealthd:[a-z_:]+")


def rules(path: Path) -> list[dict[str, Any]]:
    """All rules of a file, in order."""
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules(ALERTS)}


def dashboards() -> dict[str, dict[str, Any]]:
    """Name of the file -> dashboard."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(GRAFANA.glob("*.json"))}


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Panels, without the headings of rows."""
    yield from (panel for panel in dashboard["panels"] if panel["type"] != "row")


def queries() -> Iterator[tuple[str, str, str]]:
    """(dashboard, panel, expression) of all targets."""
    for name, dashboard in dashboards().items():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                yield name, panel["title"], target["expr"]


def marks() -> Iterator[str]:
    """The expressions of what is marked on all panels of a dashboard."""
    for dashboard in dashboards().values():
        yield from (one["expr"] for one in dashboard["annotations"].get("list", ()))


def raw_metrics(expression: str) -> set[str]:
    """The families that an expression asks for, without label names and values, nor the suffixes of samples."""
    bare = re.sub(r"\{[^}]*\}|\"[^\"]*\"|(by|on|ignoring) *\([^)]*\)", "", expression)
    return {_SUFFIX.sub("", name) for name in _RAW.findall(bare)}


def recorded_metrics(expression: str) -> set[str]:
    return set(_RECORDED.findall(expression))


@dataclass(frozen=True)
class Prometheus:
    """A real one, with our rules made fast; `folder` holds all that it writes."""

    url: str
    folder: Path

    def log(self) -> str:
        """What it said up to now."""
        return (self.folder / "log").read_text(errors="replace")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The rows of an instant query; none while it does not answer yet."""
        try:
            answer = self._get("query", query=expression)
        except httpx.TransportError:
            return []
        if answer.status_code == 503:
            return []
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        rows: list[dict[str, Any]] = answer.json()["data"]["result"]
        return rows

    def alerts(self, name: str) -> list[dict[str, Any]]:
        """Pending and firing ones of this name."""
        found = self._get("alerts").json()["data"]["alerts"]
        return [alert for alert in found if alert["labels"]["alertname"] == name]

    def ailing_rules(self) -> list[str]:
        """Rules that could not be evaluated."""
        groups = self._get("rules").json()["data"]["groups"]
        return [f"{rule['name']}: {rule['lastError']}" for g in groups for rule in g["rules"] if rule.get("lastError")]

    def _get(self, what: str, **params: str) -> httpx.Response:
        return httpx.get(f"{self.url}/api/v1/{what}", params=params, trust_env=False, verify=False, timeout=30)


# What a site fills in, and what a test cannot wait for. All else of the file is used as it is shipped.
FILLED_IN = ("aggregator.example.com:8090", "/etc/prometheus/")
FASTER = {
    "scrape_interval: 30s": "scrape_interval: 2s\n  scrape_timeout: 2s",
    "evaluation_interval: 30s": "evaluation_interval: 1s",
    "refresh_interval: 1m": "refresh_interval: 1s",
}


def shipped_configuration(folder: Path, address: str, changes: Mapping[str, str] = MappingProxyType({})) -> str:
    """`prometheus.yml` with the address of an aggregator and the folder of its files, as a site fills them in."""
    text = (PROMETHEUS / "prometheus.yml").read_text()
    for old, new in {**dict(zip(FILLED_IN, (address, f"{folder}/"), strict=True)), **changes}.items():
        assert old in text, f"{old} is not in the shipped file"
        text = text.replace(old, new)
    return text


class Receivers:
    """Where Alertmanager sends what the routes choose: a real HTTP server, which remembers it by receiver."""

    def __init__(self) -> None:
        self.received: list[tuple[str, str, str, str]] = []
        """Receiver, name of the alert, node, firing or resolved."""
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for alert in told["alerts"]:
                    labels = alert["labels"]
                    received.append((self.path[1:], labels["alertname"], labels.get("node", ""), alert["status"]))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing is to be read of it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def start_alertmanager(cluster: Cluster, receivers: Receivers) -> str:
    """The sample configuration as it is shipped, sent to these receivers at once. Its URL; it ends with the cluster."""
    folder = cluster.folder / "alertmanager"
    folder.mkdir()
    text = ROUTES.read_text().replace("http://alerts.example.com", receivers.url)
    assert text.count(receivers.url) == 3
    (folder / "alertmanager.yml").write_text(re.sub(r"(?m)^( +group_(?:wait|interval):) .*$", r"\1 1s", text))
    url = f"http://127.0.0.1:{free_port()}"
    command = ["prometheus-alertmanager", f"--config.file={folder / 'alertmanager.yml'}", "--cluster.listen-address="]
    command += [f"--storage.path={folder / 'data'}", f"--web.listen-address={url.removeprefix('http://')}"]
    with (folder / "log").open("wb") as log:
        cluster.others.append(subprocess.Popen(command, stdout=log, stderr=log, env=cluster.env))
    return url


def start_prometheus(cluster: Cluster, aggregator: str, secured: Secured, alertmanager: str) -> Prometheus:
    """
    The configuration as it is shipped, with addresses, intervals of one or two seconds, and no alert waiting
    longer than three.

    It ends with the cluster.
    """
    folder = cluster.folder / "prometheus"
    folder.mkdir()
    for source, name in (
        (secured.token_file(Scope.READ), "healthd.token"),
        (secured.folder / "ca.pem", "healthd-ca.pem"),
    ):
        shutil.copy(source, folder / name)
    changes = {**FASTER, "targets: []": f"targets: [{alertmanager.removeprefix('http://')!r}]"}
    (folder / "prometheus.yml").write_text(shipped_configuration(folder, aggregator.removeprefix("https://"), changes))
    (folder / RECORDING.name).write_text(RECORDING.read_text())
    (folder / ALERTS.name).write_text(re.sub(r"(?m)^( +for:) .*$", r"\1 3s", ALERTS.read_text()))
    url = f"http://127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={url.removeprefix('http://')}"], stdout=log, stderr=log, env=cluster.env
        )
    cluster.others.append(process)
    return Prometheus(url, folder)
