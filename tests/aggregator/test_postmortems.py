"""Why jobs died, at the aggregator: notes of all nodes come together, are judged, measured, and told to the gate."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from checks.contract import Status
from healthd.aggregator.identity.tokens import Scope
from healthd.aggregator.jobs.postmortem_records import Postmortem, PostmortemPhase, Told
from healthd.aggregator.jobs.postmortems import COLLECT_SECONDS, MEASURE_SECONDS, advanced, due_at, order_of, with_told
from healthd.core.errors import BadInputError
from healthd.postmortem.catalogue import Kind
from healthd.postmortem.judge import Case, FailedCheck, Measured, judge
from healthd.postmortem.notes import MAX_PACKED_BYTES, Words, pack, unpack
from tests.aggregator.api_kit import living, running
from tests.aggregator.postmortems_kit import ECC, LOST, body, notes_of
from tests.cli.cli_kit import environment
from tests.patience import PATIENCE
from tests.ui.stage import tokens


@contextlib.asynccontextmanager
async def job(client: httpx.AsyncClient, *nodes: str) -> AsyncIterator[str]:
    """The gate of a job that runs on these nodes."""
    async with living(client, *nodes):
        decision = (await client.post("/v1/gates?wait=5", json={"job": "train", "nodes": list(nodes)})).json()
        assert decision["decision"] == "admit", decision
        yield decision["id"]


async def told(client: httpx.AsyncClient, gate: str, said: dict[str, Any], *, wait: float = 20) -> Any:
    answer = await client.post(f"/v1/gates/{gate}/notes?wait={wait:g}", json=said)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def until(client: httpx.AsyncClient, path: str, wanted: Callable[[httpx.Response], bool]) -> None:
    async with asyncio.timeout(10 * PATIENCE):
        while not wanted(await client.get(path)):  # noqa: ASYNC110  it is another process's to say
            await asyncio.sleep(0.01)


async def test_notes_of_all_nodes_are_judged_together_and_every_node_gets_the_one_verdict(tmp_path: Path) -> None:
    async with running(tmp_path) as client, job(client, "n1", "n2") as gate:
        first = asyncio.create_task(told(client, gate, body("n1", notes_of(LOST, at=1e9 + 2))))
        await until(client, f"/v1/gates/{gate}/postmortem", lambda answer: answer.status_code == 200)
        collecting = (await client.get("/v1/gates/train/postmortem")).json()
        assert (collecting["postmortem"]["phase"], collecting["missing"]) == ("collecting", ["n2"])
        assert collecting["postmortem"]["verdict"] is None
        second = await told(client, gate, body("n2", notes_of("OSError: [Errno 28] No space left on device\n")))
        assert (await first)["postmortem"] == second["postmortem"]
        verdict = second["postmortem"]["verdict"]
        assert (verdict["kind"], verdict["node"], second["postmortem"]["phase"]) == ("storage", "n2", "final")
        evidence = (await client.get(f"/v1/gates/{gate}/evidence")).json()
        assert evidence["outcome"] is None, "what is only suspected is no outcome"
        assert [one["member"] for one in (second, await first)] == ["n2", "n1"]
        listed = (await client.get("/v1/postmortems")).json()["postmortems"]
        assert [one["postmortem"]["job"] for one in listed] == ["train"]
        events = (await client.get("/v1/nodes/n2")).json()["events"]
        assert any(event["kind"] == "postmortem" and "job train" in event["message"] for event in events)


async def test_devices_are_checked_where_they_may_be_the_cause_and_the_leases_stay(tmp_path: Path) -> None:
    async with running(tmp_path) as client, job(client, "n1", "n2") as gate:
        both = {"n1": notes_of(LOST, at=1e9 + 2), "n2": notes_of(ECC)}
        asked = await asyncio.gather(*(told(client, gate, body(n, one, measures=True)) for n, one in both.items()))
        assert all(one["postmortem"]["phase"] == "measuring" for one in asked)
        assert set(asked[0]["to_measure"]) == {"n1", "n2"}
        bad = FailedCheck(reason="WrongResult", target="cpu:1", message="product is wrong")
        measured = {
            "n1": Measured(node="x", tier="quick", status="pass"),
            "n2": Measured(node="x", tier="quick", status="fail", problems=(bad,)),
        }
        again = {n: dataclasses.replace(one, measured=(measured[n],)) for n, one in both.items()}
        final = await asyncio.gather(*(told(client, gate, body(n, one, measures=True)) for n, one in again.items()))
        verdict = final[0]["postmortem"]["verdict"]
        assert (verdict["kind"], verdict["suspected"], verdict["node"]) == ("hardware", False, "n2")
        evidence = (await client.get(f"/v1/gates/{gate}/evidence")).json()
        assert evidence["outcome"]["status"] == "infra"
        assert [lease["state"] for lease in evidence["leases"]] == ["acknowledged", "acknowledged"]


async def test_a_node_that_measurement_found_bad_is_checked_by_its_daemon_so_that_the_next_gate_leaves_it_out(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as client, living(client, "n1"), living(client, "n2") as (bad,):
        gate = (await client.post("/v1/gates?wait=5", json={"job": "train", "nodes": ["n1", "n2"]})).json()["id"]
        bad.on_run = lambda: bad.changes.update(status=Status.FAIL)  # what its daemon finds from now on
        orders = bad.orders
        problem = FailedCheck(reason="WrongResult", target="cpu:1", message="product is wrong")
        failed = Measured(node="x", tier="quick", status="fail", problems=(problem,))
        passed = Measured(node="x", tier="quick", status="pass")
        notes = {"n1": (LOST, passed, 2.0), "n2": (ECC, failed, 0.0)}
        answers = await asyncio.gather(
            *(
                told(client, gate, body(n, dataclasses.replace(notes_of(text, at=1e9 + at), measured=(found,))))
                for n, (text, found, at) in notes.items()
            )
        )
        final = answers[0]["postmortem"]
        assert (final["phase"], final["verdict"]["node"]) == ("final", "n2")
        assert [(each["node"], each["status"]) for each in final["by_order"]] == [("n2", "fail")]
        order = (await client.get(f"/v1/gates/{final['ordered']}")).json()
        assert order["request"]["job"] == f"postmortem:{gate}"
        assert {order.run.past for order in orders if order.run is not None} == {gate}
        node = (await client.get("/v1/nodes/n2")).json()
        assert [(row["lease"]["gate"], row["state"]) for row in node["grants"]] == [(gate, "acknowledged")]
        assert node["quarantine"]["owner"] == "rule:hard"
        retry = {"job": "train", "attempt": 1, "nodes": ["n1", "n2"], "min_nodes": 1}
        admitted = (await client.post("/v1/gates?wait=5", json=retry)).json()
        assert [node["node"] for node in admitted["nodes"]] == ["n1"]


async def test_an_aggregator_that_restarts_goes_on_with_what_it_was_told(tmp_path: Path) -> None:
    async with running(tmp_path) as client, job(client, "n1", "n2") as gate:
        assert (await told(client, gate, body("n1", notes_of(LOST, at=1e9 + 2)), wait=0))["missing"] == ["n2"]
    async with running(tmp_path) as client:
        kept = (await client.get("/v1/gates/train/postmortem")).json()
        assert list(kept["postmortem"]["told"]) == ["n1"]
        second = await told(client, gate, body("n2", notes_of("OSError: [Errno 28] No space left on device\n")))
        assert second["postmortem"]["verdict"]["waited"] == []
        assert "n1" in {line["node"] for line in second["postmortem"]["verdict"]["evidence"]}
        # Who tells late is heard, and the verdict is a new one.
        late = await told(client, gate, body("n1", notes_of("OSError: [Errno 28] No space left on device\n", at=9e8)))
        assert late["postmortem"]["verdict"]["node"] == "n1"


@pytest.mark.parametrize(
    ("node", "change", "words"),
    [
        ("n3", {}, "was not admitted by gate"),
        ("n1", {"notes": "$"}, "no base64"),
        ("n1", {"notes": base64.b64encode(b"no zlib at all").decode()}, "not compressed by zlib"),
        ("n1", {"notes": base64.b64encode(pack(notes_of("", code=0))).decode()}, "a successful end"),
    ],
)
async def test_what_is_no_notes_is_refused_in_one_line(
    node: str, change: dict[str, str], words: str, tmp_path: Path
) -> None:
    async with running(tmp_path) as client, job(client, "n1") as gate:
        answer = await client.post(f"/v1/gates/{gate}/notes", json=body(node, notes_of(ECC)) | change)
        assert (answer.status_code, words in answer.json()["detail"]) == (400, True), answer.text
        assert (await client.get(f"/v1/gates/{gate}/postmortem")).status_code == 404
        assert (await client.post("/v1/gates/none/notes", json=body("n1", notes_of(ECC)))).status_code == 404


async def test_a_token_of_some_nodes_tells_of_these_alone(tmp_path: Path) -> None:
    file, made = tokens(tmp_path, admin=Scope.ADMIN, hook=Scope.GATE)
    file.write_text(file.read_text().replace('name = "hook"', 'name = "hook"\nnodes = ["n1"]'))
    async with running(tmp_path, token_table=file) as client:
        client.headers["authorization"] = f"Bearer {made['admin']}"
        async with job(client, "n1", "n2") as gate:
            hook = {"authorization": f"Bearer {made['hook']}"}
            codes = {
                node: (
                    await client.post(f"/v1/gates/{gate}/notes", json=body(node, notes_of(ECC)), headers=hook)
                ).status_code
                for node in ("n1", "n2")
            }
            assert codes == {"n1": 200, "n2": 403}


async def test_healthd_run_of_each_node_prints_the_verdict_of_all_and_exits_by_it(tmp_path: Path) -> None:
    """Real jobs below real parents: n2 dies of a full disk, n1 of the peer that it lost."""
    words = {"n1": LOST.strip(), "n2": "OSError: [Errno 28] No space left on device"}
    async with running(tmp_path) as client, job(client, "n1", "n2"):

        async def run(node: str) -> tuple[int, str, Any]:
            said = tmp_path / f"{node}.json"
            script = f"import sys, time; time.sleep({0.5 if node == 'n1' else 0.0}); sys.exit({words[node]!r})"
            options = ["--job", "train", "--node", node, "--aggregator", str(client.base_url), "--no-measure"]
            options += ["--exit-style", "verdict", "--json-out", str(said)]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "healthd", "run", *options, "--", sys.executable, "-c", script),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment(tmp_path),
            )
            _, err = await asyncio.wait_for(process.communicate(), 20 * PATIENCE)
            return process.returncode or 0, err.decode(), json.loads(said.read_text())

        one, two = await asyncio.gather(run("n1"), run("n2"))
        assert (one[0], two[0]) == (1, 1), one[1] + two[1]
        assert one[2] == two[2]
        assert "healthd: why it died: SUSPECTED STORAGE" in one[1]
        assert "on n2: A file system is full" in one[1]
        assert "judged alone" not in one[1] + two[1]


async def test_a_command_that_fails_releases_nothing_while_its_job_goes_on(tmp_path: Path) -> None:
    """A retry loop, and beside it another `healthd run` of the job on the same node, which fails too."""
    async with running(tmp_path) as client, job(client, "n1") as gate:
        own = [sys.executable, "-m", "healthd", "run", "--job", "train", "--node", "n1", "--no-measure"]
        own += ["--aggregator", str(client.base_url), "--"]
        failed, second = tmp_path / "failed", tmp_path / "second"
        train = f"[ -e {failed} ] || {{ touch {failed}; echo CUDA error: unknown error; exit 1; }}; touch {second}; cat"
        loop = await asyncio.create_subprocess_exec(
            *("sh", "-c", 'for i in 1 2; do "$@" && break; done', "sh", *own, "sh", "-c", train),
            stdin=asyncio.subprocess.PIPE,
            env=environment(tmp_path),
        )
        async with asyncio.timeout(30 * PATIENCE):
            while not second.exists():  # noqa: ASYNC110  it is another process's to say
                await asyncio.sleep(0.01)
            beside = await asyncio.create_subprocess_exec(
                *(*own, "sh", "-c", "exit 3"),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment(tmp_path),
            )
            assert await beside.wait() == 3
            assert loop.returncode is None
            at_once = {"job": "other", "nodes": ["n1"], "wait_seconds": 0}
            other = (await client.post("/v1/gates?wait=5", json=at_once)).json()
            assert (other["decision"], "Allocated" in [why["code"] for why in other["reasons"]]) == ("reject", True)
            evidence = (await client.get(f"/v1/gates/{gate}/evidence")).json()
            assert [lease["state"] for lease in evidence["leases"]] == ["acknowledged"]
            assert loop.stdin is not None
            loop.stdin.close()
            assert await loop.wait() == 0


@pytest.mark.thorough
async def test_healthd_run_without_a_gate_or_an_aggregator_judges_its_node_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        for url, why in ((str(client.base_url), "has no gate"), ("http://127.0.0.1:9", "cannot be reached")):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "healthd", "run", "--job", "train", "--aggregator", url),
                *("--no-measure", "--", sys.executable, "-c", "raise ValueError('x')"),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=environment(tmp_path),
            )
            _, err = await asyncio.wait_for(process.communicate(), 20 * PATIENCE)
            assert process.returncode == 1
            assert "healthd: this node is judged alone: " in err.decode()
            assert why in err.decode()
            assert "why it died: SUSPECTED SOFTWARE" in err.decode()


def test_links_under_suspicion_are_tried_with_good_nodes_and_where_nobody_knows_all_are() -> None:
    heard = {node: one(node) for node in "abcd"}
    whole = record(nodes=tuple("abcde"), told=heard)
    unknown = judge(Case())

    def asked(**changes: Any) -> tuple[tuple[str, ...], bool | None] | None:
        order = order_of(whole, dataclasses.replace(unknown, **changes))
        return None if order is None else (order.nodes, order.collective)

    assert asked(kind=Kind.NETWORK, node="c") == (("c", "a", "b"), True)
    assert asked(kind=Kind.UNKNOWN, waited=(0, 1)) == (("a", "b", "c", "d"), True)
    assert asked(kind=Kind.HARDWARE, node="b") == (("b",), False)
    assert asked(kind=Kind.SOFTWARE, node="b", bad=("d",)) == (("b", "d"), False)
    assert asked(kind=Kind.SOFTWARE, node="b") is None
    assert asked(kind=Kind.UNKNOWN) is None


# --- the record: pure -------------------------------------------------------------------------------------------------


def record(**changes: Any) -> Postmortem:
    base = Postmortem(
        gate="g", job="j", attempt=0, phase=PostmortemPhase.COLLECTING, first_told_at=100.0, nodes=("a", "b"), told={}
    )
    return dataclasses.replace(base, **changes)


def one(node: str, **changes: Any) -> Told:
    return Told(**({"node": node, "rank": None, "code": 1, "signal": None, "ended_at": 1.0} | changes))


def test_who_is_missing_is_waited_for_and_only_so_long() -> None:
    half = with_told(record(), "a", one("a"))
    assert (half.complete, half.missing, due_at(half)) == (False, ("b",), 100.0 + COLLECT_SECONDS)
    whole = with_told(half, "b", one("b"))
    assert (whole.complete, due_at(whole)) == (True, float("-inf"))


def test_of_ranks_that_tell_by_themselves_every_one_is_waited_for() -> None:
    ranks = {f"{node}/{rank}": one(node, rank=rank, world_size=4) for rank, node in enumerate("aab")}
    assert not record(told=ranks).complete
    assert record(told={**ranks, "b/3": one("b", rank=3, world_size=4)}).complete


def test_measurement_ends_with_the_last_that_measures_or_in_time() -> None:
    unknown = judge(Case())
    asked = record(told={"a": one("a", measures=True), "b": one("b")})
    measuring = advanced(asked, unknown, 105.0)
    assert (measuring.phase, measuring.to_measure) == (PostmortemPhase.MEASURING, ("a",))
    assert due_at(measuring) == 105.0 + MEASURE_SECONDS
    done = with_told(measuring, "a", one("a", measures=True, measured=True))
    assert due_at(done) == float("-inf")
    assert advanced(done, unknown, 120.0).phase is PostmortemPhase.FINAL
    assert advanced(record(told={"a": one("a")}), unknown, 105.0).phase is PostmortemPhase.FINAL


def test_packed_notes_are_bounded_and_keep_the_end_of_each_stream() -> None:
    streams = tuple(
        Words(name=name, bytes=2**20, chunks=tuple((float(i), f"{i:06d} {char * 56}\n") for i in range(16384)))
        for name, char in (("stdout", "\x01"), ("stderr", "x"))
    )
    packed = pack(dataclasses.replace(notes_of(""), streams=streams, command=("a" * 10_000,) * 10_000))
    assert len(packed) <= MAX_PACKED_BYTES
    back = unpack(packed, "notes")
    assert all("016383" in words.chunks[-1][1] for words in back.streams)
    with pytest.raises(BadInputError, match="more than"):
        unpack(zlib.compress(b" " * 2**21), "notes")
    with pytest.raises(BadInputError, match="cut off"):
        unpack(packed[:-4], "notes")


def test_secrets_do_not_leave_the_node() -> None:
    text = "export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz\n"
    assert "hf_abc" not in unpack(pack(notes_of(text)), "notes").streams[0].chunks[0][1]


def test_of_a_line_that_is_cut_the_secret_goes_too() -> None:
    line = "export HF_TOKEN=" + "0123456789" * 100_000
    words = Words(name="stderr", bytes=0, chunks=((1.0, f"first\n{line}"), (2.0, f"{line}\nlast\n")))
    (kept,) = unpack(pack(dataclasses.replace(notes_of(""), streams=(words,))), "notes").streams
    text = "".join(text for _, text in kept.chunks)
    assert text.endswith("last\n")
    assert "0123456789" not in text
