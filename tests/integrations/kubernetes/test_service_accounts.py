"""Service accounts of Kubernetes: whom the API server vouches for, for how long, and what happens while it is away."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from healthd.aggregator.identity.tokens import PEER, AuthError, Caller, Guard, Scope, new_token
from healthd.aggregator.settings import AggregatorSettings
from healthd.core.errors import ConfigError
from healthd.core.workload import Pod
from healthd.integrations.kubernetes import service_accounts
from healthd.integrations.kubernetes.service_accounts import TokenReviews, claims_of
from healthd.integrations.kubernetes.settings import KubernetesCallers
from tests.aggregator.parts import Clock
from tests.every import every
from tests.integrations.kubernetes.token_review_kit import HOOKS, NODES, Reviews, reviews
from tests.patience import PATIENCE

UID = "0a1b2c3d-0000-4000-8000-000000000001"


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class Bench:
    """Reviews with a clock of the test; `who` asks as a request does."""

    def __init__(self, server: Reviews, **changes: object) -> None:
        self.server, self.clock = server, Clock()
        self.settings = server.settings(**changes)
        self.reviews = TokenReviews(self.settings, server.cluster.server, clock=self.clock)

    async def who(self, token: str) -> Caller | None:
        return await self.reviews.identify(token, digest(token))

    async def refused(self, token: str) -> AuthError:
        with pytest.raises(AuthError) as error:
            await self.who(token)
        assert "\n" not in str(error.value)
        return error.value


def scenario(test: Callable[[Bench], Awaitable[None]], folder: Path, **changes: object) -> None:
    with reviews(folder) as server:
        asyncio.run(asyncio.wait_for(test(Bench(server, **changes)), 30 * PATIENCE))


def test_daemon_speaks_for_the_node_of_its_pod_and_a_hook_for_its_pod_there(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        daemon = await bench.who(bench.server.token(NODES, node="ip-10-0-0-7.ec2.internal"))
        assert daemon == Caller(
            name=NODES,
            scopes=frozenset({Scope.SYNC}),
            nodes=("ip-10-0-0-7.ec2.internal",),
            pod=Pod(namespace="healthd-system", name="healthd-node-x1", uid=UID),
        )
        assert daemon.hook is None
        hook = await bench.who(bench.server.token(HOOKS, node="n2", pod="train-0-abc"))
        assert hook is not None
        assert (hook.nodes, hook.hook) == (("n2",), Pod(namespace="train", name="train-0-abc", uid=UID))
        assert hook.scopes == {Scope.GATE, Scope.READ}

    scenario(test, tmp_path)


def test_accounts_without_a_node_are_readers_and_admins_as_the_settings_say(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        reader = await bench.who(bench.server.token("monitoring/prometheus", pod=None))
        admin = await bench.who(bench.server.token("healthd-system/admin", pod=None))
        controller = await bench.who(bench.server.token("healthd-system/healthd-kueue", node="n1"))
        assert controller is not None
        assert (controller.scopes, controller.nodes, controller.hook) == ({Scope.GATE, Scope.READ}, None, None)
        assert (reader and reader.scopes, admin and admin.scopes) == ({Scope.READ}, frozenset(Scope))
        assert reader is not None
        assert reader.nodes is None

    accounts = {
        "readers": ("monitoring/prometheus",),
        "admins": ("healthd-system/admin",),
        "controllers": ("healthd-system/healthd-kueue",),
    }
    scenario(test, tmp_path, **accounts)


@pytest.mark.parametrize(
    ("made", "status", "message"),
    [
        ({"good": False}, 401, "Kubernetes does not accept this token (invalid bearer token"),
        ({"audience": "vault"}, 401, "is for vault, not for audience 'healthd'"),
        ({"account": "other/job"}, 403, "service account other/job is not authorized"),
        ({"pod": None}, 403, "is not bound to a pod"),
        ({"node": None}, 403, "does not report on which node pod healthd-system/healthd-node-x1 runs (Kubernetes 1.32"),
        ({"node": "a node"}, 403, "does not report on which node"),
        ({"account": HOOKS, "node": None}, 403, "does not report on which node"),
    ],
)
def test_who_is_not_vouched_for_is_refused_in_one_line(
    tmp_path: Path, made: dict[str, object], status: int, message: str
) -> None:
    async def test(bench: Bench) -> None:
        error = await bench.refused(bench.server.token(**made))  # type: ignore[arg-type]
        assert error.status == status
        assert message in str(error)

    scenario(test, tmp_path)


def test_server_that_names_no_audience_or_no_service_account_lets_nobody_in(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        for change, status in (({"audiences": []}, 401), ({"user": {"username": "ana@example.com"}}, 403)):
            token = bench.server.token()
            bench.server.status[token] |= change
            assert (await bench.refused(token)).status == status
        token = bench.server.token()
        bench.server.status[token]["authenticated"] = "yes"
        assert (await bench.refused(token)).status == 401

    scenario(test, tmp_path)


@pytest.mark.parametrize(
    "token", ["", "abc", "a.b", "a.b.c", "a.!.c", "a.e30.c.d", "a." + "e30" * 4000 + ".c", "ä.e30.c"]
)
def test_what_is_no_token_of_a_service_account_never_reaches_the_api_server(tmp_path: Path, token: str) -> None:
    async def test(bench: Bench) -> None:
        assert claims_of(token) is None
        assert await bench.who(token) is None
        assert bench.server.asked == []

    scenario(test, tmp_path)


def test_token_for_another_audience_never_reaches_the_api_server(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.refused(bench.server.token(audience="vault"))
        assert bench.server.asked == []

    scenario(test, tmp_path)


def test_answer_counts_for_five_minutes_and_no_longer_than_the_token(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        long, short = bench.server.token(), bench.server.token(lasts=60.0)
        for token in (long, short):
            await bench.who(token)
            await bench.who(token)
        assert len(bench.server.asked) == 2
        bench.clock.now += 61
        assert bench.reviews.known(digest(short)) is None
        await bench.who(long)
        assert len(bench.server.asked) == 2
        del bench.server.status[short]
        assert (await bench.refused(short)).status == 401
        bench.clock.now += 240
        await bench.who(long)
        assert len(bench.server.asked) == 4

    scenario(test, tmp_path)


def test_pod_that_is_gone_is_refused_once_its_answer_is_old(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        token = bench.server.token()
        await bench.who(token)
        del bench.server.status[token]
        bench.clock.now += 301
        assert (await bench.refused(token)).status == 401
        assert bench.reviews.known(digest(token)) is None, "nor is it by what was said before"

    scenario(test, tmp_path)


def test_refusal_is_kept_for_a_moment_and_then_asked_anew(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        token = bench.server.token()
        status = bench.server.status.pop(token)
        for _ in range(5):
            await bench.refused(token)
        assert len(bench.server.asked) == 1
        bench.server.status[token] = status
        bench.clock.now += service_accounts.REFUSED_SECONDS
        assert await bench.who(token) is not None

    scenario(test, tmp_path)


def test_one_token_is_asked_once_by_all_who_send_it_at_a_time(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        token = bench.server.token()
        bench.server.held.clear()
        asking = [asyncio.create_task(bench.who(token)) for _ in range(50)]
        await bench.server.was_asked(1)
        asking[0].cancel()  # the request that asks is given up: another one asks
        bench.server.held.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert [one for one in found[1:] if not isinstance(one, Caller)] == []
        assert len(bench.server.asked) <= 2

    scenario(test, tmp_path)


def test_no_more_reviews_are_under_way_than_are_allowed(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        tokens = [bench.server.token(node=f"n{number}") for number in range(60)]
        found = await asyncio.gather(*map(bench.who, tokens))
        assert [one.nodes for one in found if one] == [(f"n{number}",) for number in range(60)]
        assert bench.server.most_at_once <= service_accounts.MOST_AT_ONCE
        assert bench.server.most_of_one == 1

    scenario(test, tmp_path)


def test_no_more_requests_wait_than_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_accounts, "MOST_WAITING", 3)

    async def test(bench: Bench) -> None:
        bench.server.held.clear()
        asking = [
            asyncio.create_task(bench.who(bench.server.token())) for _ in range(service_accounts.MOST_OF_ADDRESS + 3)
        ]
        await bench.server.was_asked(service_accounts.MOST_OF_ADDRESS)
        error = await bench.refused(bench.server.token())
        assert (error.status, "wait for reviews" in str(error)) == (503, True)
        bench.server.held.set()
        await asyncio.gather(*asking)

    scenario(test, tmp_path)


def test_flood_of_forged_tokens_takes_no_turn_of_another_address(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        async def from_address(address: str, token: str) -> Caller | None:
            PEER.set(address)
            return await bench.who(token)

        bench.server.held.clear()
        forged = [bench.server.token(good=False) for _ in range(1500)]
        flood = [asyncio.create_task(from_address("10.0.0.1", token)) for token in forged]
        await bench.server.was_asked(service_accounts.MOST_OF_ADDRESS)
        hook = bench.server.token()
        asked = asyncio.create_task(from_address("10.0.0.2", hook))
        await bench.server.was_asked(service_accounts.MOST_OF_ADDRESS + 1)
        assert bench.server.asked[-1] == hook, "it is asked while the whole flood waits"
        bench.server.held.set()
        assert (await asked) is not None
        ends = await asyncio.gather(*flood[:100], *flood[-100:], return_exceptions=True)
        assert {end.status for end in ends if isinstance(end, AuthError)} == {401, 503}
        later = await from_address("10.0.0.2", bench.server.token())
        assert later is not None
        assert len(bench.server.asked) < 200, "the flood comes last, and slowly"
        for one in flood:
            one.cancel()
        await asyncio.gather(*flood, return_exceptions=True)

    scenario(test, tmp_path)


def test_what_is_kept_is_bounded_and_refusals_take_no_place_of_the_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_accounts, "MOST_KEPT", 2)
    monkeypatch.setattr(service_accounts, "MOST_REFUSED", 2)

    async def test(bench: Bench) -> None:
        good = [bench.server.token() for _ in range(3)]
        for token in good:
            await bench.who(token)
        for _ in range(5):
            await bench.refused(bench.server.token(good=False))
        assert [bench.reviews.known(digest(token)) is not None for token in good] == [False, True, True]
        assert len(bench.reviews._refused) == 2

    scenario(test, tmp_path)


def test_while_the_api_server_is_away_what_it_said_lately_goes_on_and_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bench: Bench) -> None:
        known, new = bench.server.token(), bench.server.token()
        await bench.who(known)
        bench.server.away = (500, "etcdserver: leader changed")
        bench.clock.now += 301
        with caplog.at_level(logging.INFO):
            assert await bench.who(known) is not None
            error = await bench.refused(new)
        assert (error.status, "etcdserver: leader changed" in str(error)) == (503, True)
        bench.clock.now += 1800 - 302
        assert await bench.who(known) is not None
        bench.clock.now += 2
        assert (await bench.refused(known)).status == 503, "half an hour is over"
        bench.server.away = None
        bench.clock.now += service_accounts.AWAY_SECONDS
        with caplog.at_level(logging.INFO):
            assert await bench.who(new) is not None
        said = [record.message for record in caplog.records if record.name.endswith("service_accounts")]
        assert [("stay valid" in line, "reviews work again" in line) for line in said] == [(True, False), (False, True)]

    scenario(test, tmp_path)


@pytest.mark.parametrize(
    ("away", "told"),
    [
        ((403, "tokenreviews is forbidden"), "give the service account the right to create on tokenreviews"),
        ((401, "Unauthorized"), "does the account still exist?"),
        ((429, "too many requests"), "HTTP 429"),
        ((422, "spec.token: Invalid value"), "HTTP 422"),
    ],
)
def test_why_it_cannot_be_told_is_said(tmp_path: Path, away: tuple[int, str], told: str) -> None:
    async def test(bench: Bench) -> None:
        bench.server.away = away
        error = await bench.refused(bench.server.token())
        assert (error.status, told in str(error)) == (503, True), str(error)

    scenario(test, tmp_path)


def test_api_server_that_is_away_is_asked_now_and_then_by_one_request(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        tokens = [bench.server.token() for _ in range(20)]
        bench.server.away = (503, "shutting down")
        for token in tokens:
            await bench.refused(token)
        assert len(bench.server.asked) == 1
        bench.clock.now += service_accounts.AWAY_SECONDS
        bench.server.held.clear()
        probe = asyncio.create_task(bench.refused(tokens[0]))
        await bench.server.was_asked(2)
        for token in tokens[1:]:
            assert (await bench.refused(token)).status == 503, "at once, while one tries"
        bench.server.held.set()
        await probe
        assert len(bench.server.asked) == 2

    scenario(test, tmp_path)


def test_odd_token_does_not_stop_the_reviews_of_others(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.server.away = (422, "spec.token: Invalid value")
        await bench.refused(bench.server.token())
        bench.server.away = None
        assert await bench.who(bench.server.token()) is not None

    scenario(test, tmp_path)


def test_api_server_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_accounts, "REVIEW_SECONDS", 0.2)

    async def test(bench: Bench) -> None:
        bench.server.held.clear()
        error = await bench.refused(bench.server.token())
        assert (error.status, "no TokenReview within 0.2 s" in str(error)) == (503, True)

    scenario(test, tmp_path)


def test_guard_asks_for_what_no_file_has_and_knows_it_without_asking_then(tmp_path: Path) -> None:
    secret, lines = new_token("ops", [Scope.ADMIN])
    file = tmp_path / "tokens.toml"
    file.write_text(lines)
    file.chmod(0o600)

    async def test(bench: Bench) -> None:
        guard = Guard(file, platform=bench.reviews)
        assert (await guard.admit(f"Bearer {secret}", Scope.ADMIN)).name == "ops"
        assert bench.server.asked == []
        token = bench.server.token(HOOKS)
        with pytest.raises(AuthError, match="token is unknown"):
            guard.require(f"Bearer {token}", Scope.READ)
        assert (await guard.admit(f"Bearer {token}", Scope.GATE)).name == HOOKS
        assert guard.require(f"Bearer {token}", Scope.READ).name == HOOKS
        with pytest.raises(AuthError, match=r"service account train/default \(pod train/.*\) lacks scope 'admin'"):
            await guard.admit(f"Bearer {token}", Scope.ADMIN)
        for header, status in ((None, 401), ("Basic x", 401), ("Bearer nonsense", 401)):
            with pytest.raises(AuthError) as error:
                await guard.admit(header, Scope.READ)
            assert error.value.status == status
        assert not Guard(None, platform=bench.reviews).open

    scenario(test, tmp_path / "cluster")


def test_aggregator_may_listen_beyond_loopback_with_service_accounts_instead_of_a_token_table(tmp_path: Path) -> None:
    accounts = KubernetesCallers(audience="healthd", nodes=(NODES,))
    tls = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    AggregatorSettings(listen="0.0.0.0:0", state_dir=tmp_path, integrations={"kubernetes": accounts}, **tls)
    with pytest.raises(ConfigError, match="token_table"):
        AggregatorSettings(listen="0.0.0.0:0", state_dir=tmp_path, **tls)


@every(
    ("words", "message"),
    [
        ({"nodes": (NODES,)}, "set 'audience' too"),
        ({"audience": "healthd"}, "is set but no accounts are listed"),
        ({"audience": "", "nodes": (NODES,)}, "audience: must be"),
        ({"audience": "a", "nodes": ("healthd-node",)}, "nodes: 'healthd-node' must be NAMESPACE/NAME"),
        ({"audience": "a", "nodes": ("*/healthd-node",)}, "nodes: "),
        ({"audience": "a", "admins": ("*/*",)}, "admins: "),
        ({"audience": "a", "hooks": ("*",)}, "hooks: "),
        ({"audience": "a", "hooks": ("a/b",) * 101}, "101 accounts"),
        ({"audience": "a", "nodes": (NODES,), "review_seconds": 5.0}, "review: must be"),
        ({"audience": "a", "nodes": (NODES,), "outage_seconds": 60.0}, "review: must be"),
    ],
)
def test_settings_that_cannot_be_meant_are_one_clear_line(words: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("*", r"\*")) as error:
        KubernetesCallers(**words)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
