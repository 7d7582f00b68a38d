"""
A service account says for which nodes it may speak: another's claim to a name is refused and changes nothing. In
Kubernetes, which says of each pod on which node it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from healthd.aggregator.identity.tokens import Scope, new_token
from tests.aggregator.api_kit import POLICY, living
from tests.aggregator.api_kit import running as aggregator
from tests.aggregator.identity_kit import sync
from tests.aggregator.parts import KEY
from tests.integrations.kubernetes.token_review_kit import HOOKS, Reviews, reviews
from tests.patience import PATIENCE

OTHER_KEY = "another-key-another-key"


class Pods:
    """An aggregator that takes service accounts, and pods that speak to it. `shared` is a token of its file."""

    def __init__(self, server: Reviews, client: httpx.AsyncClient, shared: str, admin: str) -> None:
        self.server, self.client, self.shared, self.admin = server, client, shared, admin

    async def sync(self, token: str, node: str, key: str = KEY, incarnation: str = "i1", **more: Any) -> httpx.Response:
        return await sync(self.client, node, key, incarnation, headers=self.bearer(token), **more)

    def bearer(self, token: str) -> dict[str, str]:
        return {"authorization": f"Bearer {token}"}

    async def ask(self, token: str, job: str = "train", **asked: Any) -> httpx.Response:
        return await self.client.post("/v1/gates", json={"job": job, **asked}, headers=self.bearer(token))

    async def get(self, path: str, token: str | None = None) -> Any:
        answer = await self.client.get(path, headers=self.bearer(token or self.admin))
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def events(self, node: str) -> list[tuple[str, str]]:
        found = (await self.get(f"/v1/nodes/{node}/history"))["events"]
        return [(one["kind"], one["message"]) for one in found]


@contextlib.asynccontextmanager
async def in_kubernetes(folder: Path, server: Reviews) -> AsyncIterator[Pods]:
    made = [new_token(scope.value, [scope]) for scope in (Scope.SYNC, Scope.ADMIN)]
    file = folder / "tokens.toml"
    file.write_text("".join(entry for _, entry in made))
    file.chmod(0o600)
    async with aggregator(folder, POLICY, token_table=file, integrations={"kubernetes": server.settings()}) as client:
        yield Pods(server, client, *(token for token, _ in made))


def with_pods(test: Callable[[Pods], Awaitable[None]], folder: Path) -> None:
    async def run() -> None:
        with reviews(folder / "cluster") as server:
            async with in_kubernetes(folder, server) as pods:
                await test(pods)

    asyncio.run(asyncio.wait_for(run(), 30 * PATIENCE))


def test_daemon_in_a_pod_speaks_for_its_own_node_alone(tmp_path: Path) -> None:
    async def test(pods: Pods) -> None:
        one, other = (pods.server.token(node=f"n{number}", uid=f"{number}" * 32) for number in (1, 2))
        assert (await pods.sync(one, "n1")).status_code == 200
        for node in ("n1", "n3"):
            refused = await pods.sync(other, node, OTHER_KEY, "i9")
            assert refused.status_code == 403
            assert refused.json()["detail"] == (
                "service account healthd-system/healthd-node (pod healthd-system/healthd-node-x1) may not act for "
                f"node '{node}', only for n2; use a token of that node"
            )
        assert not (await pods.get("/v1/nodes/n1"))["duplicate"]
        assert [one["node"] for one in (await pods.get("/v1/nodes"))["nodes"]] == ["n1"]

    with_pods(test, tmp_path)


def test_daemon_without_a_token_or_with_a_bad_one_is_nobody(tmp_path: Path) -> None:
    async def test(pods: Pods) -> None:
        assert (await sync(pods.client, "n1")).status_code == 401
        assert (await pods.sync(pods.server.token(good=False), "n1")).status_code == 401
        pods.server.away = (500, "etcd is away")
        away = await pods.sync(pods.server.token(), "n1")
        assert (away.status_code, away.headers["retry-after"]) == (503, "5")
        assert "etcd is away; the token cannot be verified until the API server responds" in away.json()["detail"]
        ready = await pods.client.get("/readyz")
        assert ready.status_code == 200
        assert "tokens of service accounts cannot be reviewed: API server" in ready.text
        assert (await pods.get("/v1/nodes"))["nodes"] == []

    with_pods(test, tmp_path)


def test_machine_that_was_replaced_under_its_name_is_let_in_by_its_platforms_word(tmp_path: Path) -> None:
    async def test(pods: Pods) -> None:
        old, new = pods.server.token(pod="d-1", uid="1" * 32), pods.server.token(pod="d-2", uid="2" * 32)
        assert (await pods.sync(old, "n1")).status_code == 200
        assert (await pods.sync(new, "n1", OTHER_KEY, "i9")).status_code == 200
        assert not (await pods.get("/v1/nodes/n1"))["duplicate"]
        assert ("rekeyed", "by pod healthd-system/d-2") in await pods.events("n1")
        still = await pods.sync(old, "n1")
        assert still.status_code == 409
        assert "pod healthd-system/d-1 was replaced by pod healthd-system/d-2, which reports" in still.json()["detail"]
        assert not (await pods.get("/v1/nodes/n1"))["duplicate"]
        assert (await pods.sync(new, "n1", OTHER_KEY, "i9", seq=2)).status_code == 200

    async def after_a_restart(pods: Pods) -> None:
        """The key of the new machine is on disk."""
        assert (await pods.sync(pods.shared, "n1", OTHER_KEY, "i9", seq=3)).status_code == 200

    with_pods(test, tmp_path)
    with_pods(after_a_restart, tmp_path)


def test_daemons_that_take_turns_are_slowed_down(tmp_path: Path) -> None:
    """Two containers in one pod, each with a key of its own: not a write to the database with every sync."""

    async def test(pods: Pods) -> None:
        token = pods.server.token()
        answers = [(await pods.sync(token, "n1", f"key-of-daemon-number-{n}", f"i{n}")).status_code for n in range(4)]
        assert answers == [200, 200, 409, 409]
        assert len([kind for kind, _ in await pods.events("n1") if kind == "rekeyed"]) == 1
        assert not (await pods.get("/v1/nodes/n1"))["duplicate"]

    with_pods(test, tmp_path)


def test_shared_token_is_no_match_for_the_platforms_word(tmp_path: Path) -> None:
    async def test(pods: Pods) -> None:
        daemon = pods.server.token()
        assert (await pods.sync(pods.shared, "n1", OTHER_KEY, "i9")).status_code == 200, "the first one has the name"
        assert (await pods.sync(daemon, "n1")).status_code == 200, "the platform says whose it is"
        stranger = await pods.sync(pods.shared, "n1", OTHER_KEY, "i9", seq=2)
        assert stranger.status_code == 403
        assert "belongs to pod healthd-system/healthd-node-x1 according to its platform" in stranger.json()["detail"]
        assert not (await pods.get("/v1/nodes/n1"))["duplicate"]

    with_pods(test, tmp_path)


def test_doubt_that_a_shared_token_has_raised_ends_with_the_platforms_word(tmp_path: Path) -> None:
    async def test(pods: Pods) -> None:
        assert (await pods.sync(pods.shared, "n1")).status_code == 200
        assert (await pods.sync(pods.shared, "n1", OTHER_KEY, "i9")).status_code == 409
        assert (await pods.get("/v1/nodes/n1"))["duplicate"]
        assert (await pods.sync(pods.server.token(), "n1", seq=2)).status_code == 200
        assert not (await pods.get("/v1/nodes/n1"))["duplicate"]

    with_pods(test, tmp_path)


def test_hook_in_a_pod_joins_for_the_node_of_its_pod_and_no_other(tmp_path: Path) -> None:
    async def test(pods: Pods) -> None:
        hook = pods.server.token(HOOKS, node="n2", pod="train-0-a")
        for node, status in (("n2", 200), ("n1", 403)):
            join = {"group": "g", "size": 2, "rank": 0, "member": "m", "node": node}
            assert (await pods.ask(hook, join=join)).status_code == status
        for asked in ({"nodes": ["n1", "n2"]}, {"pool": "train", "count": 1}):
            assert (await pods.ask(hook, "other", **asked)).status_code == 403
        assert (await pods.ask(hook, "own", nodes=["n2"])).status_code == 200
        for workload, status in (
            ("pod:train/train-0-a", 200),
            (f"pod:train/train-0-a/{'0a1b2c3d-0000-4000-8000-000000000001'}", 200),
            ("pod:train/train-1-b", 403),
            ("slurm:12", 403),
        ):
            asked = {"nodes": ["n2"], "workload": workload}
            assert (await pods.ask(hook, workload, **asked)).status_code == status, workload

    with_pods(test, tmp_path)


def test_restart_of_a_job_of_pods_goes_on_when_its_earlier_pods_have_ended(tmp_path: Path) -> None:
    """A pod ends no lease of another pod, of its namespace or on its own node: that pod may still run."""

    async def test(pods: Pods) -> None:
        def hook(attempt: int, rank: int) -> tuple[str, dict[str, Any]]:
            node, uid = f"n{rank + 1}", f"{attempt}{rank}" * 16
            token = pods.server.token(HOOKS, node=node, pod=f"train-{rank}-{attempt}", uid=uid)
            join = {"group": "g", "size": 2, "rank": rank, "member": uid, "node": node}
            return token, {"attempt": attempt, "join": join}

        async def ask(attempt: int, rank: int, wait: float = 5) -> Any:
            token, asked = hook(attempt, rank)
            answer = await pods.client.post(
                f"/v1/gates?wait={wait:g}", json={"job": "train", **asked}, headers=pods.bearer(token)
            )
            assert answer.status_code == 200, answer.text
            return answer.json()

        pods.client.headers.update(pods.bearer(pods.shared))
        async with living(pods.client, "n1", "n2") as daemons:
            first = await asyncio.gather(ask(0, 0), ask(0, 1))
            assert [one["decision"] for one in first] == ["admit", "admit"]
            await asyncio.gather(ask(1, 0, 0), ask(1, 1, 0))
            held = await ask(1, 0, 0.2)
            assert (held["decision"], {why["node"] for why in held["reasons"]}) == ("hold", {"n1", "n2"})
            for daemon in daemons:  # the pods of attempt 0 are gone
                daemon.end_leases()
            again = await asyncio.gather(ask(1, 0), ask(1, 1))
            assert [one["decision"] for one in again] == ["admit", "admit"]

    with_pods(test, tmp_path)


def test_hook_speaks_as_executor_and_never_as_the_daemon(tmp_path: Path) -> None:
    async def test(pods: Pods) -> None:
        hook = pods.server.token(HOOKS, node="n2", pod="train-0-a")
        refused = await pods.sync(hook, "n2")
        assert (refused.status_code, "lacks scope 'sync'" in refused.json()["detail"]) == (
            403,
            True,
        )
        own = await pods.sync(hook, "n2", query="?wait=0&executor=m")
        assert own.json()["title"] == "NotExecutor", "no gate has it as executor yet"
        assert (await pods.sync(hook, "n1", query="?wait=0&executor=m")).status_code == 403

    with_pods(test, tmp_path)


def test_jobs_of_two_namespaces_are_two_whatever_they_are_called(tmp_path: Path) -> None:
    async def test(pods: Pods) -> None:
        train = pods.server.token("train/default", node="n1", pod="a")
        evaluation = pods.server.token("eval/default", node="n2", pod="b")
        for node in ("n1", "n2"):  # heard once: not confirmed, so that their gates stay open
            assert (await pods.sync(pods.shared, node)).status_code == 200
        gates = {}
        for token, name, node in (
            (train, "nightly", "n1"),
            (evaluation, "nightly", "n2"),
            (evaluation, "train/x", "n2"),
        ):
            answer = (await pods.ask(token, name, nodes=[node])).json()
            gates[answer["request"]["job"]] = answer["id"]
        assert sorted(gates) == ["eval/nightly", "eval/train/x", "train/nightly"]
        # Each finds its own by the name that it knows, or by the whole one; everybody may read.
        for name in ("nightly", "train/nightly"):
            assert (await pods.get(f"/v1/gates/{name}", train))["id"] == gates["train/nightly"]
            assert [one["id"] for one in (await pods.get(f"/v1/gates?job={name}", train))["gates"]] == [
                gates["train/nightly"]
            ]
        assert (await pods.get(f"/v1/gates/{gates['train/nightly']}", evaluation))["id"] == gates["train/nightly"]
        # Nobody ends what is another namespace's.
        path, headers = f"/v1/gates/{gates['train/nightly']}", pods.bearer(evaluation)
        for refused in (
            await pods.client.delete(f"{path}/lease", headers=headers),
            await pods.client.post(f"{path}/outcome", json={"status": "ok"}, headers=headers),
            await pods.client.delete(f"{path}/members/m", headers=headers),
            await pods.client.post(f"{path}/handshake", json={"node": "n2", "event": "wait"}, headers=headers),
        ):
            assert refused.status_code == 403
            assert "may only end and follow jobs of namespace eval" in refused.json()["detail"]
        ended = await pods.client.delete("/v1/gates/lease", params={"job": "nightly"}, headers=headers)
        assert ended.json()["decision"]["request"]["job"] == "eval/nightly"
        assert (await pods.client.delete(f"{path}/lease", headers=pods.bearer(train))).status_code == 200

    with_pods(test, tmp_path)


def test_person_with_an_accounts_token_sees_the_page(tmp_path: Path) -> None:
    async def test(pods: Pods) -> None:
        reader = pods.server.token("monitoring/prometheus", pod=None)
        assert (await pods.client.get("/metrics", headers=pods.bearer(reader))).status_code == 200
        address = str(pods.client.base_url)
        async with httpx.AsyncClient(base_url=address, headers={"origin": address.rstrip("/")}) as browser:
            for token, status in ((pods.server.token(good=False), 403), (reader, 303)):
                assert (await browser.post("/log-in", data={"token": token})).status_code == status
            asked = len(pods.server.asked)
            assert (await browser.get("/")).status_code == 200
            assert (await browser.get("/openapi.json")).status_code == 200
            assert len(pods.server.asked) == asked
            pods.server.away = (500, "etcd is away")
            assert (await browser.get("/")).status_code == 200, "it was reviewed lately"

    with_pods(test, tmp_path)
