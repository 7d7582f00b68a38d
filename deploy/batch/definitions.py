"""
The shapes of AWS Batch: job definitions whose first word is the gate, and what they run on.

`python -m deploy.batch.definitions` writes the JSON files beside this one with placeholders in capitals; with `--image`
and the rest it writes yours. Each file is what `aws batch register-job-definition --cli-input-json file://...` (or
`create-...`) takes. Numbers of devices are the catalogue's, so that a gate's container is given all of them: a device
that the container has not is one that the gate cannot answer for.

Sources: the service models of botocore; AWS Batch user guide, "Multi-node parallel jobs", "Job definition parameters",
"Use launch templates" (user data must be MIME multi-part there). Unverified on AWS: no job of Batch was run.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from checks import catalog

Json: TypeAlias = Mapping[str, "Json"] | Sequence["Json"] | str | int | bool

FOLDER = Path(__file__).parent
NOT_ADMITTED = "75"
GATE = ("healthd", "preflight", "--")

# How often Batch starts a job anew: on each turn bad nodes have had time to leave. Ten is the most that Batch takes.
ATTEMPTS = 5
# Longer than the gate's own wait: the job is started by then, or has ended with 75.
GATE_WAIT = "30m"
# ECS counts it from the container's start to the end of what it depends on.
START_TIMEOUT_SECONDS = 2100
# Two GiB for each of 32 cores, for the ranks of collectives; Docker's 64 MiB are too little for any of them.
SHARED_MEMORY_MIB = 65_536

IMAGE = "ACCOUNT.dkr.ecr.REGION.amazonaws.com/train:latest"
# What all nodes of a job share of the host: the lock that keeps two healthd apart, and the compiled probes.
SHARED_FOLDERS = {"healthd-run": "/run/healthd", "healthd-compile-cache": "/var/lib/healthd/compile-cache"}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a container of the whole machine asks for. `memory_mib` leaves room for the host and its agents."""

    instance_type: str
    vcpus: int
    memory_mib: int

    @property
    def devices(self) -> list[Json]:
        """All Neuron devices and all EFA devices, as files of the host."""
        known = catalog.TYPES[self.instance_type]
        if known.devices is None or known.efa_interfaces is None:
            raise ValueError(f"{self.instance_type}: the catalogue does not say how many devices it has")
        neuron = [f"/dev/neuron{number}" for number in range(known.devices)]
        efa = [f"/dev/infiniband/uverbs{number}" for number in range(known.efa_interfaces)]
        return [{"hostPath": path} for path in (*neuron, *efa)]


# vCPUs and memory: Amazon EC2 user guide, accelerated computing instances (128 and 192 vCPUs, 512 and 2048 GiB).
MACHINES = {
    machine.instance_type: machine
    for machine in (
        Machine(instance_type="trn1.32xlarge", vcpus=128, memory_mib=480_000),
        Machine(instance_type="trn1n.32xlarge", vcpus=128, memory_mib=480_000),
        Machine(instance_type="trn2.48xlarge", vcpus=192, memory_mib=1_960_000),
    )
}


def retry_strategy() -> dict[str, Json]:
    """
    What is worth another attempt: a host that went away, an image that could not be pulled, a gate that said no.

    The last rule is needed: what no rule matches is retried, and a training script with a fault would run five times.
    """
    return {
        "attempts": ATTEMPTS,
        "evaluateOnExit": [
            {"onStatusReason": "Host EC2*", "action": "RETRY"},
            {"onReason": "CannotPullContainer*", "action": "RETRY"},
            {"onExitCode": NOT_ADMITTED, "action": "RETRY"},
            {"onReason": "*", "action": "EXIT"},
        ],
    }


def environment() -> list[Json]:
    """Settings of the gate. The first job on a host compiles the probes there, the others find them compiled."""
    values = {
        "HEALTHD_PREFLIGHT_WAIT": GATE_WAIT,
        "HEALTHD_PROBE_ON_COLD_CACHE": "compile",
        "HEALTHD_PROBE_COMPILE_CACHE": SHARED_FOLDERS["healthd-compile-cache"],
        "CHECKPOINT_PATH": "s3://BUCKET/checkpoints",
    }
    return [{"name": name, "value": value} for name, value in values.items()]


def resources(machine: Machine, *, share: float = 1.0) -> list[Json]:
    """Processors and memory, all of the machine's or a share of them."""
    return [
        {"type": "VCPU", "value": str(max(1, int(machine.vcpus * share)))},
        {"type": "MEMORY", "value": str(int(machine.memory_mib * share))},
    ]


def container(machine: Machine, image: str, command: Sequence[str], *, share: float = 1.0) -> dict[str, Json]:
    """What gate and job have in common: all devices, locked memory without bound, room in /dev/shm."""
    return {
        "image": image,
        "command": list(command),
        "environment": environment(),
        "resourceRequirements": resources(machine, share=share),
        "linuxParameters": {
            "devices": machine.devices,
            "sharedMemorySize": int(SHARED_MEMORY_MIB * share),
            "initProcessEnabled": True,
        },
        "ulimits": [{"name": "memlock", "softLimit": -1, "hardLimit": -1}],
        "user": "root",
        "mountPoints": [
            {"sourceVolume": name, "containerPath": path, "readOnly": False} for name, path in SHARED_FOLDERS.items()
        ],
    }


def volumes() -> list[Json]:
    """The host's folders of `SHARED_FOLDERS`; Docker makes what is not there."""
    return [{"name": name, "host": {"sourcePath": path}} for name, path in SHARED_FOLDERS.items()]


def entry_point(machine: Machine, image: str, command: Sequence[str]) -> dict[str, Json]:
    """The gate becomes the job: same container, same limits, libraries, network. What to take unless it cannot be."""
    return {**container(machine, image, (*GATE, *command)), "volumes": volumes()}


def gate_container(machine: Machine, image: str, command: Sequence[str]) -> dict[str, Json]:
    """
    The gate in a container of its own, which the job's waits for: for images that cannot have healthd in them.

    `gate` may not be essential, or Batch refuses a dependency on its success. The two divide vCPUs and memory, which
    ECS counts for both at once; the devices are in both, since the gate is gone before the job starts.
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


def single_node(name: str, machine: Machine, image: str, command: Sequence[str], *, apart: bool) -> dict[str, Json]:
    """One node. `apart`: the gate in a container of its own."""
    body: dict[str, Json] = {
        "jobDefinitionName": name,
        "type": "container",
        "platformCapabilities": ["EC2"],
        "retryStrategy": retry_strategy(),
        "propagateTags": True,
    }
    if apart:
        return {**body, "ecsProperties": gate_container(machine, image, command)}
    return {**body, "containerProperties": entry_point(machine, image, command)}


def multi_node(
    name: str, machine: Machine, image: str, command: Sequence[str], *, nodes: int, apart: bool
) -> dict[str, Json]:
    """
    Several nodes, all alike. Only the main node's failure makes Batch try again: so every child's verdict is told to
    the main node's gate, which ends with 75 for all.
    """
    body: dict[str, Json] = {"targetNodes": "0:", "instanceTypes": [machine.instance_type]}
    if apart:
        body["ecsProperties"] = gate_container(machine, image, command)
    else:
        body["container"] = entry_point(machine, image, command)
    return {
        "jobDefinitionName": name,
        "type": "multinode",
        "nodeProperties": {"numNodes": nodes, "mainNode": 0, "nodeRangeProperties": [body]},
        "retryStrategy": retry_strategy(),
        "propagateTags": True,
    }


def multipart(script: str) -> str:
    """User data as Batch wants it: MIME multi-part with the script as its one part, which Batch adds its own to."""
    boundary = "==healthd=="
    return (
        f'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="{boundary}"\n\n'
        f'--{boundary}\nContent-Type: text/x-shellscript; charset="us-ascii"\n\n{script}\n--{boundary}--\n'
    )


def launch_template(machine: Machine, script: str) -> dict[str, Json]:
    """
    All EFA interfaces, one a network card, and the user data that installs the daemon.

    Only the first has DeviceIndex 0. An instance that shuts itself down is to be terminated, not kept.
    """
    cards = catalog.TYPES[machine.instance_type].efa_interfaces
    if cards is None:
        raise ValueError(f"{machine.instance_type}: the catalogue does not say how many EFA interfaces it takes")
    return {
        "LaunchTemplateName": f"healthd-{machine.instance_type.replace('.', '-')}",
        "LaunchTemplateData": {
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2, "HttpEndpoint": "enabled"},
            "NetworkInterfaces": [
                {
                    "DeviceIndex": min(card, 1),
                    "NetworkCardIndex": card,
                    "InterfaceType": "efa",
                    "Groups": ["sg-0123456789abcdef0"],
                    "SubnetId": "subnet-0123456789abcdef0",
                }
                for card in range(cards)
            ],
            "UserData": base64.b64encode(multipart(script).encode("ascii")).decode("ascii"),
        },
    }


def compute_environment(machine: Machine, *, nodes: int) -> dict[str, Json]:
    """Managed, one instance type, all in one placement group: what EFA is fast in."""
    return {
        "computeEnvironmentName": f"healthd-{machine.instance_type.replace('.', '-')}",
        "type": "MANAGED",
        "state": "ENABLED",
        "computeResources": {
            "type": "EC2",
            "allocationStrategy": "BEST_FIT_PROGRESSIVE",
            "minvCpus": 0,
            "maxvCpus": machine.vcpus * nodes,
            "instanceTypes": [machine.instance_type],
            "subnets": ["subnet-0123456789abcdef0"],
            "instanceRole": "arn:aws:iam::ACCOUNT:instance-profile/ecsInstanceRole",
            "placementGroup": "healthd",
            "launchTemplate": {
                "launchTemplateName": f"healthd-{machine.instance_type.replace('.', '-')}",
                "version": "$Latest",
            },
        },
    }


def job_queue(machine: Machine) -> dict[str, Json]:
    """A job that finds no instance for hours is cancelled with a reason, instead of waiting for ever in silence."""
    return {
        "jobQueueName": "healthd",
        "state": "ENABLED",
        "priority": 1,
        "computeEnvironmentOrder": [
            {"order": 1, "computeEnvironment": f"healthd-{machine.instance_type.replace('.', '-')}"}
        ],
        "jobStateTimeLimitActions": [
            {
                "state": "RUNNABLE",
                "reason": "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
                "maxTimeSeconds": 3600,
                "action": "CANCEL",
            }
        ],
    }


def all_files(
    machine: Machine, image: str, command: Sequence[str], *, nodes: int, name: str = "train"
) -> dict[str, dict[str, Json]]:
    """What is written, by file name."""
    script = (FOLDER / "user-data.sh").read_text(encoding="ascii")
    return {
        "single-node.json": single_node(f"{name}-one", machine, image, command, apart=False),
        "single-node-container.json": single_node(f"{name}-one-apart", machine, image, command, apart=True),
        "multi-node.json": multi_node(name, machine, image, command, nodes=nodes, apart=False),
        "multi-node-container.json": multi_node(f"{name}-apart", machine, image, command, nodes=nodes, apart=True),
        "launch-template.json": launch_template(machine, script),
        "compute-environment.json": compute_environment(machine, nodes=nodes),
        "job-queue.json": job_queue(machine),
    }


def write(folder: Path, files: Mapping[str, Mapping[str, Json]]) -> None:
    """As JSON that a person can read and a version control can compare."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in files.items():
        (folder / name).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Write the files; exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m deploy.batch.definitions", description="Shapes of AWS Batch.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to (default: this one)")
    parser.add_argument("--image", default=IMAGE, help="image of the job, with healthd in it")
    parser.add_argument("--name", default="train", help="name of the job definitions (default train)")
    parser.add_argument("--type", choices=sorted(MACHINES), default="trn1.32xlarge", help="instance type")
    parser.add_argument("--nodes", type=int, default=4, help="nodes of a multi-node job (default 4)")
    parser.add_argument("command", nargs="*", default=["/opt/train/train.sh"], help="what starts once admitted")
    asked = parser.parse_args(arguments)
    write(asked.out, all_files(MACHINES[asked.type], asked.image, asked.command, nodes=asked.nodes, name=asked.name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
