"""
What AWS Batch jobs run on: instance types, a launch template with the daemon's user data, compute environment, queue.

Sources: the service models of botocore; AWS Batch user guide, "Use launch templates" (user data must be MIME multi-part
there). Unverified on AWS.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from checks import catalog

# Placeholders of the committed files; `deploy.batch.definitions` fills them in.
SUBNET = "subnet-0123456789abcdef0"
SECURITY_GROUP = "sg-0123456789abcdef0"
INSTANCE_ROLE = "ecsInstanceRole"

Json: TypeAlias = Mapping[str, "Json"] | Sequence["Json"] | str | int | bool


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a container requests to use the whole machine. `memory_mib` leaves room for the host and its agents."""

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


def multipart(script: str) -> str:
    """User data in the form that Batch requires: MIME multi-part, to which Batch adds its own part."""
    boundary = "==healthd=="
    return (
        f'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="{boundary}"\n\n'
        f'--{boundary}\nContent-Type: text/x-shellscript; charset="us-ascii"\n\n{script}\n--{boundary}--\n'
    )


def launch_template(machine: Machine, script: str) -> dict[str, Json]:
    """
    One EFA interface for each network card, and the user data that installs the daemon.

    Only the first has DeviceIndex 0. An instance that shuts itself down is terminated.
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
                    "Groups": [SECURITY_GROUP],
                    "SubnetId": SUBNET,
                }
                for card in range(cards)
            ],
            "UserData": base64.b64encode(multipart(script).encode("ascii")).decode("ascii"),
        },
    }


def compute_environment(machine: Machine, *, nodes: int) -> dict[str, Json]:
    """Managed, one instance type, one placement group, as EFA needs for full speed."""
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
            "subnets": [SUBNET],
            "instanceRole": INSTANCE_ROLE,
            "placementGroup": "healthd",
            "launchTemplate": {
                "launchTemplateName": f"healthd-{machine.instance_type.replace('.', '-')}",
                "version": "$Latest",
            },
        },
    }


def job_queue(machine: Machine) -> dict[str, Json]:
    """A job that finds no instance within an hour is cancelled with a reason instead of waiting silently."""
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
