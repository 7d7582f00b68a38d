"""
Files for AWS Batch: job definitions that start with the gate, and the queue and hosts that they run on.

`python -m deploy.batch.definitions` writes the JSON files beside this module with placeholders; its options replace
them. `aws batch register-job-definition --cli-input-json file://...` (or `create-...`) accepts each file. Device counts
come from the catalogue, so a container gets all devices of its machine: the gate cannot vouch for a device that its
container does not have.

Sources: the service models of botocore; AWS Batch user guide, "Multi-node parallel jobs", "Job definition parameters".
Unverified on AWS: no job of Batch was run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.batch.hosts import (
    INSTANCE_ROLE,
    MACHINES,
    SECURITY_GROUP,
    SUBNET,
    Json,
    Machine,
    compute_environment,
    job_queue,
    launch_template,
)

FOLDER = Path(__file__).parent
NOT_ADMITTED = "75"
GATE = ("healthd", "preflight", "--")
# A gate that stays as the job's parent. Its exit code is a retry code: NOT_ADMITTED to retry elsewhere, or RETRY_HERE.
PARENT = ("healthd", "preflight", "--run", "--exit-style", "verdict", "--")
RETRY_HERE = "76"
# A script of the image that asks a standing aggregator and joins the job's gate.
STANDING_GATE = ("/opt/healthd/gated.sh",)

# Attempts of one job; bad nodes have time to leave between them. Batch allows ten.
ATTEMPTS = 5
# Longer than the gate's own wait: the job is started by then, or has ended with 75.
GATE_WAIT = "30m"
# ECS counts from the start of the container to the end of its dependencies.
START_TIMEOUT_SECONDS = 2100
# Two GiB for each of 32 cores, for the ranks of collectives; Docker's 64 MiB are too little for any of them.
SHARED_MEMORY_MIB = 65_536

IMAGE = "ACCOUNT.dkr.ecr.REGION.amazonaws.com/train:latest"
CHECKPOINT = "s3://BUCKET/checkpoints"
# Folders of the host: locks that keep two healthd processes apart, and compiled probes.
SHARED_FOLDERS = {"healthd-run": "/run/healthd", "healthd-compile-cache": "/var/lib/healthd/compile-cache"}
# Written by user-data.sh for `gated.sh`: the host's name, the gate token, the aggregator's CA.
HOST_FOLDER = {"healthd-host": "/var/lib/healthd/host"}
AGGREGATOR = "https://AGGREGATOR:8090"


def retry_strategy(*, parent: bool = False) -> dict[str, Json]:
    """
    Retry after a lost host, an image that could not be pulled, or a gate that did not admit; with a `parent` also if it
    advises a retry.

    The last rule is needed: Batch retries what no rule matches, so a broken training script would run five times.
    """
    return {
        "attempts": ATTEMPTS,
        "evaluateOnExit": [
            {"onStatusReason": "Host EC2*", "action": "RETRY"},
            {"onReason": "CannotPullContainer*", "action": "RETRY"},
            {"onExitCode": NOT_ADMITTED, "action": "RETRY"},
            *([{"onExitCode": RETRY_HERE, "action": "RETRY"}] if parent else []),
            {"onReason": "*", "action": "EXIT"},
        ],
    }


def environment(warmed: str | None, *, standing: bool) -> list[Json]:
    """
    Settings of the gate. The first job on a host compiles the probes, later jobs reuse them; `warmed` is a folder of
    the image that already contains them.
    """
    folder = HOST_FOLDER["healthd-host"]
    asking = {
        "HEALTHD_GATE_AGGREGATOR": AGGREGATOR,
        "HEALTHD_GATE_TOKEN_FILE": f"{folder}/gate.token",
        "HEALTHD_GATE_CA_FILE": f"{folder}/ca.crt",
        "HEALTHD_GATE_WAIT": GATE_WAIT,
    }
    values = {
        **(asking if standing else {"HEALTHD_PREFLIGHT_WAIT": GATE_WAIT}),
        "HEALTHD_PROBE_ON_COLD_CACHE": "compile",
        "HEALTHD_PROBE_COMPILE_CACHE": warmed or SHARED_FOLDERS["healthd-compile-cache"],
        "CHECKPOINT_PATH": CHECKPOINT,
    }
    return [{"name": name, "value": value} for name, value in values.items()]


def folders(warmed: str | None, *, standing: bool) -> dict[str, str]:
    """Folders of the host in the container. `warmed`: nothing is mounted over the image's compile cache."""
    shared = {**SHARED_FOLDERS, **(HOST_FOLDER if standing else {})}
    if warmed is not None:
        del shared["healthd-compile-cache"]
    return shared


def resources(machine: Machine, *, share: float = 1.0) -> list[Json]:
    """Processors and memory, all of the machine's or a share of them."""
    return [
        {"type": "VCPU", "value": str(max(1, int(machine.vcpus * share)))},
        {"type": "MEMORY", "value": str(int(machine.memory_mib * share))},
    ]


def container(
    machine: Machine,
    image: str,
    command: Sequence[str],
    *,
    share: float = 1.0,
    warmed: str | None = None,
    standing: bool = False,
) -> dict[str, Json]:
    """Common to gate and job: all devices, unlimited locked memory, room in /dev/shm."""
    return {
        "image": image,
        "command": list(command),
        "environment": environment(warmed, standing=standing),
        "resourceRequirements": resources(machine, share=share),
        "linuxParameters": {
            "devices": machine.devices,
            "sharedMemorySize": int(SHARED_MEMORY_MIB * share),
            "initProcessEnabled": True,
        },
        "ulimits": [{"name": "memlock", "softLimit": -1, "hardLimit": -1}],
        "user": "root",
        "mountPoints": [
            {"sourceVolume": name, "containerPath": path, "readOnly": name in HOST_FOLDER}
            for name, path in folders(warmed, standing=standing).items()
        ],
    }


def volumes(warmed: str | None = None, *, standing: bool = False) -> list[Json]:
    """The host's folders; Docker creates missing ones."""
    shared = folders(warmed, standing=standing)
    return [{"name": name, "host": {"sourcePath": path}} for name, path in shared.items()]


def entry_point(
    machine: Machine,
    image: str,
    command: Sequence[str],
    *,
    warmed: str | None = None,
    standing: bool = False,
    parent: bool = False,
) -> dict[str, Json]:
    """
    The gate becomes the job: same container, limits, libraries and network. The default.

    `standing`: the gate asks a standing aggregator. `parent`: the gate stays as the job's parent.
    """
    whole = (*(STANDING_GATE if standing else PARENT if parent else GATE), *command)
    made = container(machine, image, whole, warmed=warmed, standing=standing)
    return {**made, "volumes": volumes(warmed, standing=standing)}


def gate_container(machine: Machine, image: str, command: Sequence[str]) -> dict[str, Json]:
    """
    The gate in its own container, on which the job's container depends: for images that cannot contain healthd.

    `gate` must not be essential, or Batch refuses a dependency on its success. Both share vCPUs and memory, which ECS
    counts for both at once. Both have all devices, since the gate ends before the job starts.
    """
    gate = container(machine, "ACCOUNT.dkr.ecr.REGION.amazonaws.com/healthd:latest", (*GATE, "true"), share=1 / 8)
    job = container(machine, image, command, share=7 / 8)
    task: dict[str, Json] = {
        "containers": [
            {"name": "gate", "essential": False, **gate},
            {
                "name": "train",
                "essential": True,
                "dependsOn": [{"containerName": "gate", "condition": "SUCCESS"}],
                "startTimeout": START_TIMEOUT_SECONDS,
                **job,
            },
        ],
        "volumes": volumes(),
    }
    return {"taskProperties": [task]}


def single_node(
    name: str, machine: Machine, image: str, command: Sequence[str], *, apart: bool, warmed: str | None = None
) -> dict[str, Json]:
    """One node. `apart`: the gate in its own container."""
    body: dict[str, Json] = {
        "jobDefinitionName": name,
        "type": "container",
        "platformCapabilities": ["EC2"],
        "retryStrategy": retry_strategy(),
        "propagateTags": True,
    }
    if apart:
        return {**body, "ecsProperties": gate_container(machine, image, command)}
    return {**body, "containerProperties": entry_point(machine, image, command, warmed=warmed)}


def multi_node(
    name: str,
    machine: Machine,
    image: str,
    command: Sequence[str],
    *,
    nodes: int,
    apart: bool,
    warmed: str | None = None,
    standing: bool = False,
    parent: bool = False,
) -> dict[str, Json]:
    """
    Several equal nodes. Batch retries only if the main node fails, so every node reports to the main node's gate, which
    exits with 75 for all. A `standing` aggregator gives all nodes the same answer.
    """
    body: dict[str, Json] = {"targetNodes": "0:", "instanceTypes": [machine.instance_type]}
    if apart:
        body["ecsProperties"] = gate_container(machine, image, command)
    else:
        body["container"] = entry_point(machine, image, command, warmed=warmed, standing=standing, parent=parent)
    return {
        "jobDefinitionName": name,
        "type": "multinode",
        "nodeProperties": {"numNodes": nodes, "mainNode": 0, "nodeRangeProperties": [body]},
        "retryStrategy": retry_strategy(parent=parent),
        "propagateTags": True,
    }


def all_files(
    machine: Machine, image: str, command: Sequence[str], *, nodes: int, name: str = "train", warmed: str | None = None
) -> dict[str, dict[str, Json]]:
    """File name -> content. `warmed`: a folder of the image, for gates that are the job's entry point."""
    script = (FOLDER / "user-data.sh").read_text(encoding="ascii")
    return {
        "single-node.json": single_node(f"{name}-one", machine, image, command, apart=False, warmed=warmed),
        "single-node-container.json": single_node(f"{name}-one-apart", machine, image, command, apart=True),
        "multi-node.json": multi_node(name, machine, image, command, nodes=nodes, apart=False, warmed=warmed),
        "multi-node-standing.json": multi_node(
            f"{name}-standing", machine, image, command, nodes=nodes, apart=False, warmed=warmed, standing=True
        ),
        "multi-node-run.json": multi_node(
            f"{name}-run", machine, image, command, nodes=nodes, apart=False, warmed=warmed, parent=True
        ),
        "multi-node-container.json": multi_node(f"{name}-apart", machine, image, command, nodes=nodes, apart=True),
        "launch-template.json": launch_template(machine, script),
        "compute-environment.json": compute_environment(machine, nodes=nodes),
        "job-queue.json": job_queue(machine),
    }


def write(folder: Path, files: Mapping[str, Mapping[str, Json]], values: Mapping[str, str]) -> None:
    """Write indented JSON. `values`: placeholder -> value; a placeholder is a whole string of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in files.items():
        text = json.dumps(body, indent=2)
        for placeholder, value in values.items():
            text = text.replace(json.dumps(placeholder), json.dumps(value))
        (folder / name).write_text(text + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Write the files; exit code 0."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.batch.definitions", description="Write files for AWS Batch."
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to (default: this one)")
    parser.add_argument("--image", default=IMAGE, help="image of the job, with healthd in it")
    parser.add_argument("--name", default="train", help="name of the job definitions (default train)")
    parser.add_argument("--type", choices=sorted(MACHINES), default="trn1.32xlarge", help="instance type")
    parser.add_argument("--nodes", type=int, default=4, help="nodes of a multi-node job (default 4)")
    parser.add_argument("--warmed", metavar="FOLDER", help="compile cache in the image (default: the host's)")
    parser.add_argument("--subnet", default=SUBNET, help="subnet of the hosts, in one availability zone")
    parser.add_argument(
        "--security-group", default=SECURITY_GROUP, help="its members must reach each other on all ports"
    )
    parser.add_argument("--instance-role", default=INSTANCE_ROLE, help="instance profile, by name or ARN")
    parser.add_argument("--checkpoint", default=CHECKPOINT, metavar="URL", help="CHECKPOINT_PATH of the job")
    parser.add_argument("command", nargs="*", default=["/opt/train/train.sh"], help="command of the job")
    asked = parser.parse_args(arguments)
    machine = MACHINES[asked.type]
    made = all_files(machine, asked.image, asked.command, nodes=asked.nodes, name=asked.name, warmed=asked.warmed)
    values = {
        SUBNET: asked.subnet,
        SECURITY_GROUP: asked.security_group,
        INSTANCE_ROLE: asked.instance_role,
        CHECKPOINT: asked.checkpoint,
    }
    write(asked.out, made, values)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
