"""
AWS on this machine: moto's server in a thread, spoken to by boto3 over HTTP as AWS is.

moto runs no containers here, so how a job ended is set by the test, in moto's own record of the job.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

REGION = "us-east-1"
ACCOUNT = "123456789012"


class Aws:
    """One server; `client(service)` speaks to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._clients: dict[str, Any] = {}

    def client(self, service: str) -> Any:
        """One a service: making them is what takes long."""
        import boto3
        from botocore.config import Config

        if service in self._clients:
            return self._clients[service]
        self._clients[service] = boto3.client(
            service,
            region_name=REGION,
            endpoint_url=self.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=Config(connect_timeout=3, read_timeout=60, retries={"total_max_attempts": 1}),
        )
        return self._clients[service]

    def end_job(self, job_id: str, code: int | None, *, reason: str | None = None) -> None:
        """Let a job that failed have failed by this code, None for none; `reason` is Batch's own."""
        from moto.batch.models import batch_backends

        job = batch_backends[ACCOUNT][REGION]._jobs[job_id]
        job.job_stopped_reason = reason
        if code is not None:
            job.attempts[-1]["container"]["exitCode"] = code

    def reopen(self, job_id: str) -> None:
        """Let a job still be running."""
        from moto.batch.models import batch_backends

        batch_backends[ACCOUNT][REGION]._jobs[job_id].status = "RUNNING"

    def close(self, job_id: str) -> None:
        """Let it have succeeded."""
        from moto.batch.models import batch_backends

        batch_backends[ACCOUNT][REGION]._jobs[job_id].status = "SUCCEEDED"

    def container_instance(self, cluster: str) -> tuple[str, str]:
        """A machine with an ECS agent: the container instance and the EC2 instance."""
        ec2 = self.client("ec2")
        made = ec2.run_instances(ImageId="ami-12c6146b", MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"]
        document = {"instanceId": made, "accountId": ACCOUNT, "region": REGION}
        registered = self.client("ecs").register_container_instance(
            cluster=cluster, instanceIdentityDocument=json.dumps(document)
        )
        return registered["containerInstance"]["containerInstanceArn"], made


@contextlib.contextmanager
def running() -> Iterator[Aws]:
    """The server for as long as the block lasts; a skip with its reason where moto is not installed."""
    pytest.importorskip("flask_cors", reason="moto's server is not installed: pip install moto flask flask-cors")
    pytest.importorskip("moto.server", reason="moto is not installed: pip install moto flask flask-cors")
    from moto.core.config import default_user_config
    from moto.moto_api._internal import moto_api_backend
    from moto.server import ThreadedMotoServer

    moto_api_backend.reset()  # what earlier servers of this process were told is kept outside of them
    before = dict(default_user_config["batch"])
    default_user_config["batch"]["use_docker"] = False
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield Aws(f"http://{host}:{port}")
    finally:
        server.stop()
        default_user_config["batch"].update(before)
