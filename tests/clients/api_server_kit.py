"""
A server that behaves like Kubernetes' API server for the calls that healthd makes on nodes and pods: TLS, tokens that
expire, rights, versions that conflict, the two kinds of patch, pages of a list, watches, and answers put in its mouth.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import ssl
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import trustme

from healthd.clients.kubernetes import MERGE, STRATEGIC, ApiServer


@dataclass
class Call:
    method: str
    path: str
    query: dict[str, str]
    kind: str
    token: str
    body: Any


@dataclass
class Cluster:
    """The cluster behind the server. `said` is answered before anything is done; `rights` as `verb on resource`."""

    folder: Path
    url: str = ""
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=lambda: {"first"})
    rights: set[str] = field(
        default_factory=lambda: {
            *("get on nodes", "list on nodes", "patch on nodes", "patch on nodes/status"),
            *("create on events", "list on pods", "watch on pods"),
        }
    )
    changes: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    watches: int = 0  # that are open
    deaf: bool = False  # watches tell nothing, as over a connection that broke without a word
    short: bool = False  # watches end at once
    down: bool = False  # every call is answered with 503, every watch ends
    oldest: int = 0  # versions before it are compacted
    said: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    pods: list[dict[str, Any]] = field(default_factory=list)
    races: int = 0  # so many times somebody else changes a node between reading and writing it
    version: int = 100

    @property
    def server(self) -> ApiServer:
        return ApiServer(url=self.url, service_account=self.folder)

    def token(self, text: str) -> None:
        (self.folder / "token").write_text(text + "\n")

    def add(self, name: str, *, taints: list[dict[str, str]] | None = None, **labels: str) -> None:
        kubelet = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "kubelet is posting ready status",
            "lastHeartbeatTime": "2026-01-01T00:00:00Z",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        self.nodes[name] = {
            "kind": "Node",
            "apiVersion": "v1",
            "metadata": {"name": name, "resourceVersion": self._next(), "labels": dict(labels), "annotations": {}},
            "spec": {**({"taints": taints} if taints else {})},
            "status": {"conditions": [kubelet]},
        }

    def taints(self, name: str) -> list[dict[str, str]]:
        return list(self.nodes[name]["spec"].get("taints") or [])

    def condition(self, name: str, kind: str) -> dict[str, str] | None:
        found = [one for one in self.nodes[name]["status"]["conditions"] if one["type"] == kind]
        return found[0] if found else None

    def writes(self) -> list[Call]:
        return [call for call in self.calls if call.method == "PATCH"]

    def job_pod(self, name: str, *, namespace: str = "ml", uid: str, phase: str = "Running") -> None:
        """A pod of a job as it is now; another uid is another pod of that name."""
        before = [one for one in self.pods if _named(one, namespace, name)]
        if before and before[0]["metadata"]["uid"] != uid:
            self.delete_pod(name, namespace=namespace)
            before = []
        metadata = {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": self._next(), "labels": {}}
        made = {"kind": "Pod", "metadata": metadata, "status": {"phase": phase}}
        self.pods = [*(one for one in self.pods if one not in before), made]
        self._tell("MODIFIED" if before else "ADDED", made)

    def delete_pod(self, name: str, *, namespace: str = "ml") -> None:
        gone = next(one for one in self.pods if _named(one, namespace, name))
        self.pods.remove(gone)
        gone["metadata"] = {**gone["metadata"], "resourceVersion": self._next()}
        self._tell("DELETED", gone)

    def compact(self) -> None:
        """Watches from before end, and cannot go on."""
        with self.changed:
            self.oldest = int(self._next())
            self.changed.notify_all()

    def stop(self, *, down: bool) -> None:
        with self.changed:
            self.down = down
            self.changed.notify_all()

    def _tell(self, kind: str, pod: dict[str, Any]) -> None:
        with self.changed:
            self.changes.append((int(pod["metadata"]["resourceVersion"]), kind, copy.deepcopy(pod)))
            self.changed.notify_all()

    # --- what the server does -----------------------------------------------------------------------------------------

    def answer(self, call: Call) -> tuple[int, dict[str, str], Any]:
        self.calls.append(call)
        if self.said:
            status, headers, body = self.said.pop(0)
            return status, headers, body
        if call.token not in self.tokens:
            return 401, {}, failure(401, "Unauthorized")
        if self.down:
            return 503, {}, failure(503, "apiserver is shutting down")
        if not call.path.startswith("/api/v1/nodes"):
            return self._of_others(call)
        match = re.fullmatch(r"/api/v1/nodes(?:/([^/]+))?(/status)?", call.path)
        if match is None:
            return 404, {}, failure(404, "the server could not find the requested resource")
        name, status = match[1], bool(match[2])
        verb = {"GET": "get" if name else "list", "PATCH": "patch"}[call.method]
        right = f"{verb} on nodes{'/status' if status else ''}"
        if right not in self.rights:
            user = 'nodes is forbidden: User "system:serviceaccount:healthd-system:healthd" cannot'
            return 403, {}, failure(403, f"{user} {verb} resource at the cluster scope")
        if name is None:
            return self._page(call, list(self.nodes.values()))
        if name not in self.nodes:
            return 404, {}, failure(404, f'nodes "{name}" not found')
        if call.method == "GET":
            found = copy.deepcopy(self.nodes[name])
            if self.races > 0:
                self.races -= 1
                self.nodes[name]["metadata"]["resourceVersion"] = self._next()
            return 200, {}, found
        return self._patch(self.nodes[name], call, status)

    def _of_others(self, call: Call) -> tuple[int, dict[str, str], Any]:
        """Events and pods."""
        if (call.method, call.path) == ("POST", "/api/v1/namespaces/default/events"):
            if "create on events" not in self.rights:
                return 403, {}, failure(403, "events is forbidden: cannot create resource")
            self.events.append(call.body)
            return 201, {}, call.body
        if pods := re.fullmatch(r"/api/v1(?:/namespaces/([^/]+))?/pods", call.path):
            verb = "watch" if "watch" in call.query else "list"
            if f"{verb} on pods" not in self.rights:
                return 403, {}, failure(403, f"pods is forbidden: cannot {verb} resource")
            if "fieldSelector" in call.query:
                return self._one_pod(call, pods[1], call.query["fieldSelector"].removeprefix("metadata.name="))
            there = [pod for pod in self.pods if pods[1] in (None, pod["metadata"]["namespace"])]
            return self._page(call, there)
        return 404, {}, failure(404, "the server could not find the requested resource")

    def pod(self, name: str, node: str, namespace: str = "healthd-system", **labels: str) -> None:
        made = {"app.kubernetes.io/name": "healthd-node", **labels}
        metadata = {"name": name, "namespace": namespace, "labels": made}
        self.pods.append({"metadata": metadata, "spec": {"nodeName": node}})

    def _one_pod(self, call: Call, namespace: str, name: str) -> tuple[int, dict[str, str], Any]:
        if "watch" in call.query:
            return 200, {}, self._watch(call, namespace, name)
        found = [one for one in self.pods if _named(one, namespace, name)]
        return 200, {}, {"kind": "PodList", "metadata": {"resourceVersion": str(self.version)}, "items": found}

    def _watch(self, call: Call, namespace: str, name: str) -> Generator[bytes, None, None]:
        """Lines of changes as they happen, until the time that was asked for is over."""
        since, end = int(call.query["resourceVersion"]), time.monotonic() + float(call.query["timeoutSeconds"])
        with self.changed:
            self.watches += 1
        try:
            while (left := end - time.monotonic()) > 0 and not self.down and not self.short:
                with self.changed:
                    new = [] if self.deaf else [one for one in self.changes if one[0] > since]
                    if not new and since >= self.oldest:
                        self.changed.wait(min(left, 0.05))
                        continue
                if since < self.oldest:
                    told = {**failure(410, f"too old resource version: {since}"), "reason": "Expired"}
                    yield json.dumps({"type": "ERROR", "object": told}).encode() + b"\n"
                    return
                for version, kind, pod in new:
                    since = version
                    if _named(pod, namespace, name):
                        yield json.dumps({"type": kind, "object": pod}).encode() + b"\n"
        finally:
            with self.changed:
                self.watches -= 1

    def _page(self, call: Call, items: list[dict[str, Any]]) -> tuple[int, dict[str, str], Any]:
        selector = [one.partition("=") for one in call.query.get("labelSelector", "").split(",") if one]
        wanted = {key: value for key, equals, value in selector if equals}
        there = {key for key, _, _ in selector}
        found = [one for one in items if wanted.items() <= one["metadata"]["labels"].items()]
        found = [one for one in found if there <= one["metadata"]["labels"].keys()]
        start, limit = int(call.query.get("continue", "0")), int(call.query.get("limit", "500"))
        more = str(start + limit) if start + limit < len(found) else ""
        return 200, {}, {"kind": "List", "metadata": {"continue": more}, "items": found[start : start + limit]}

    def _patch(self, node: dict[str, Any], call: Call, status: bool) -> tuple[int, dict[str, str], Any]:
        wanted = call.body.get("metadata", {}).get("resourceVersion")
        if wanted is not None and wanted != node["metadata"]["resourceVersion"]:
            told = f'Operation cannot be fulfilled on nodes "{node["metadata"]["name"]}": the object has been modified'
            return 409, {}, failure(409, told)
        after = copy.deepcopy(node)
        body = copy.deepcopy(call.body)
        if call.kind == STRATEGIC:
            conditions = {one["type"]: one for one in after["status"]["conditions"]}
            for one in body.get("status", {}).pop("conditions", []):
                if one.pop("$patch", "") == "delete":
                    conditions.pop(one["type"], None)
                else:
                    conditions.setdefault(one["type"], {}).update(one)
            after["status"]["conditions"] = list(conditions.values())
        elif call.kind != MERGE:
            return 415, {}, failure(415, f"the body of the request was in an unknown format: {call.kind}")
        # The sub-resource takes nothing but status, the resource nothing of it.
        merge(after, {key: value for key, value in body.items() if (key == "status") == status})
        places = [(taint["key"], taint["effect"]) for taint in after["spec"].get("taints") or []]
        if len(places) != len(set(places)):
            return 422, {}, failure(422, "spec.taints: Duplicate value")
        after["metadata"]["resourceVersion"] = self._next()
        self.nodes[node["metadata"]["name"]] = after
        return 200, {}, after

    def _next(self) -> str:
        self.version += 1
        return str(self.version)


def _named(pod: dict[str, Any], namespace: str, name: str) -> bool:
    return (pod["metadata"]["namespace"], pod["metadata"]["name"]) == (namespace, name)


def failure(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


def merge(into: dict[str, Any], patch: dict[str, Any]) -> None:
    """RFC 7386: null deletes, lists are replaced."""
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            merge(into[key], value)
        else:
            into[key] = value


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster with no nodes, its server on a free port of loopback, a service account mounted in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Cluster(folder)
    made.token("first")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            text = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            call = Call(
                method=self.command,
                path=parts.path,
                query={key: values[0] for key, values in parse_qs(parts.query).items()},
                kind=self.headers.get("Content-Type", ""),
                token=self.headers.get("Authorization", "").removeprefix("Bearer "),
                body=json.loads(text) if text else None,
            )
            status, headers, body = made.answer(call)
            if isinstance(body, Generator):
                self._stream(body)
                return
            answer = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for key, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def _stream(self, lines: Generator[bytes, None, None]) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.flush()
            with contextlib.closing(lines), contextlib.suppress(OSError):
                for line in lines:
                    self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                self.wfile.write(b"0\r\n\r\n")

        do_GET = do_PATCH = do_POST = _serve  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Nothing on the terminal."""

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def get_request(self) -> tuple[Any, Any]:
            sock, address = super().get_request()
            return tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False), address

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that does not trust us, or went away, is what some tests are about."""

    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    made.url = f"https://127.0.0.1:{server.server_address[1]}"
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
