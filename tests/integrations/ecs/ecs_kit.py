"""What the tests of allocations ecs, and those beside them, are made with."""

from __future__ import annotations

import json
from typing import Any

ARN = "arn:aws:ecs:us-west-2:012345678910:task/default/1f2a4f5c54ae4b2c9c35aa35fd1a3ec6"


def task(status: str = "RUNNING", *, arn: str = ARN, container: str = "cd" * 32, **more: Any) -> dict[str, Any]:
    one = {"DockerId": container, "DockerName": "ecs-train-6-main-86caf9", "Name": "main"}
    return {
        "Arn": arn,
        "DesiredStatus": "RUNNING",
        "KnownStatus": status,
        "Family": "train",
        "Version": "6",
        "Containers": [one],
        **more,
    }


def body(*tasks: dict[str, Any]) -> bytes:
    return json.dumps({"Tasks": list(tasks)}).encode()
