"""Checkpoints and data sets in an object store: s3fs over HTTP to moto's server, as it would speak to S3."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from checks.contract import Finding, Status
from checks.storage.checkpoint_load import checkpoint_load
from checks.storage.checkpoint_store import checkpoint_store
from checks.storage.data_store import data_store

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("s3fs") is None, reason="s3fs is not installed: make install again (requirements.txt)"
)

SERVER = """
from moto.server import ThreadedMotoServer
import signal
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
signal.pause()
"""
Context = Callable[..., Any]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """An S3 server as a process of its own, with the bucket `jobs`; the environment leads to it."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            for name, value in {
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
            }.items():
                monkeypatch.setenv(name, value)
            client().create_bucket(Bucket="jobs")
            yield process
        finally:
            process.kill()


def client() -> Any:
    import boto3

    return boto3.client("s3")


def names() -> list[str]:
    return [one["Key"] for one in client().list_objects_v2(Bucket="jobs").get("Contents", ())]


def findings(found: Any) -> list[Finding]:
    return [one for one in found if isinstance(one, Finding)]


def bad(found: list[Finding]) -> list[str | None]:
    return [one.reason for one in found if one.status is not Status.PASS]


@pytest.mark.thorough
def test_bucket_is_written_read_back_and_left_as_it_was(server: object, context: Context) -> None:
    client().put_object(Bucket="jobs", Key="runs/of-a-job", Body=b"weights")
    begun = time.monotonic()
    found = findings(checkpoint_store(context(checkpoint_store, paths=["s3://jobs/runs"], size_bytes=8 << 20)))
    assert time.monotonic() - begun < 10
    assert bad(found) == []
    assert len(found) == 3
    assert names() == ["runs/of-a-job"]


def test_markers_of_nodes_are_seen_in_a_bucket(server: object, context: Context) -> None:
    given = {"paths": ["s3://jobs/runs"], "size_bytes": 1 << 20, "marker_seconds": 60.0}
    assert bad(findings(checkpoint_store(context(checkpoint_store, **given)))) == []
    (marker,) = names()
    assert marker.startswith("runs/.healthd-markers/")
    missed = findings(checkpoint_store(context(checkpoint_store, **given, peers=["n2"], peers_wait_seconds=0.2)))
    assert bad(missed) == ["StoreNotShared"]


@pytest.mark.thorough
def test_bucket_that_is_not_there_is_missing(server: object, context: Context) -> None:
    found = findings(checkpoint_store(context(checkpoint_store, paths=["s3://nobody/runs"])))
    assert bad(found) == ["StoreMissing"]


@pytest.mark.thorough
def test_checkpoint_in_a_bucket_is_loaded_and_an_empty_shard_is_named(
    server: object,
    context: Context,
    tmp_path: Any,
    run_with_torch: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    from tests.checks.checkpoints_kit import SAVE

    done = run_with_torch(SAVE, str(tmp_path / "step"))
    assert done.returncode == 0, done.stderr
    for path in (tmp_path / "step").iterdir():
        client().upload_file(str(path), "jobs", f"runs/step/{path.name}")
    assert bad(findings(checkpoint_load(context(checkpoint_load, checkpoint="s3://jobs/runs/step")))) == []
    last = next(name for name in names() if name.endswith(".distcp"))
    client().put_object(Bucket="jobs", Key=last, Body=b"")
    found = findings(checkpoint_load(context(checkpoint_load, checkpoint="s3://jobs/runs/step")))
    assert bad(found) == ["ShardEmpty"]


@pytest.mark.thorough
def test_data_set_in_a_bucket_is_read(server: object, context: Context) -> None:
    for number in range(3):
        client().put_object(Bucket="jobs", Key=f"data/{number}.bin", Body=bytes(200_000))
    found = findings(data_store(context(data_store, paths=["s3://jobs/data"], random_reads=4)))
    assert bad(found) == []


def test_server_that_does_not_answer_is_a_hang_within_the_time(server: subprocess.Popen[str], context: Context) -> None:
    server.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    (finding,) = findings(checkpoint_store(context(checkpoint_store, paths=["s3://jobs/runs"], seconds=6.0)))
    assert time.monotonic() - begun < 9
    assert finding.reason == "StoreHangs"
