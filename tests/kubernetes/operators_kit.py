"""
Definitions of other operators' jobs, as far as our examples meet them: every member but those inside of pod templates.

Written from the Go types of the projects (Apache-2.0), which their own definitions are generated from. Those have half
a megabyte each, nearly all of it the schema of a pod, which the examples' pods are held against elsewhere:

    PyTorchJob  kubeflow/training-operator 2f18ab7, 186ac6c: pkg/apis/kubeflow.org/v1/{pytorch,common}_types.go
    MPIJob      kubeflow/mpi-operator 013fa15: pkg/apis/kubeflow/v2beta1/types.go
    RayCluster  ray-project/kuberay 026f143: ray-operator/apis/ray/v1/raycluster_types.go
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer", "format": "int32"}
LONG: Schema = {"type": "integer", "format": "int64"}
TRUTH: Schema = {"type": "boolean"}
ANY: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
QUANTITY: Schema = {"x-kubernetes-int-or-string": True}


def record(*required: str, **members: Schema) -> Schema:
    made: Schema = {"type": "object", "properties": members}
    return {**made, "required": list(required)} if required else made


def mapping(of: Schema) -> Schema:
    return {"type": "object", "additionalProperties": of}


def listing(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def word(*allowed: str) -> Schema:
    return {"type": "string", "enum": list(allowed)}


SCHEDULING = record(
    minAvailable=NUMBER,
    queue=TEXT,
    minResources=mapping(QUANTITY),
    priorityClass=TEXT,
    scheduleTimeoutSeconds=NUMBER,
)
RUN_POLICY: dict[str, Schema] = {
    "cleanPodPolicy": TEXT,
    "ttlSecondsAfterFinished": NUMBER,
    "activeDeadlineSeconds": LONG,
    "backoffLimit": NUMBER,
    "schedulingPolicy": SCHEDULING,
}
REPLICAS = mapping(record(replicas=NUMBER, restartPolicy=TEXT, template=ANY))
ELASTIC = record(
    minReplicas=NUMBER,
    maxReplicas=NUMBER,
    rdzvBackend=TEXT,
    rdzvPort=NUMBER,
    rdzvHost=TEXT,
    rdzvId=TEXT,
    rdzvConf=listing(record(key=TEXT, value=TEXT)),
    standalone=TRUTH,
    nProcPerNode=NUMBER,
    maxRestarts=NUMBER,
    metrics=listing(ANY),
)
PYTORCH_JOB = record(
    "pytorchReplicaSpecs",
    runPolicy=record(**RUN_POLICY),
    elasticPolicy=ELASTIC,
    pytorchReplicaSpecs=REPLICAS,
    nprocPerNode=TEXT,
)
MPI_JOB = record(
    "mpiReplicaSpecs",
    slotsPerWorker=NUMBER,
    runPolicy=record(**RUN_POLICY, suspend=TRUTH),
    mpiReplicaSpecs=REPLICAS,
    sshAuthMountPath=TEXT,
    waitForWorkers=TRUTH,
    mpiImplementation=word("OpenMPI", "Intel"),
)
HEAD = record(
    *("rayStartParams", "template"),
    serviceType=TEXT,
    headService=ANY,
    enableIngress=TRUTH,
    rayStartParams=mapping(TEXT),
    template=ANY,
)
WORKERS = record(
    *("groupName", "maxReplicas", "minReplicas", "rayStartParams", "template"),
    groupName=TEXT,
    replicas=NUMBER,
    minReplicas=NUMBER,
    maxReplicas=NUMBER,
    numOfHosts=NUMBER,
    rayStartParams=mapping(TEXT),
    template=ANY,
    scaleStrategy=record(workersToDelete=listing(TEXT), multihostReplicasToDelete=listing(TEXT)),
)
RAY_CLUSTER = record(
    "headGroupSpec",
    headGroupSpec=HEAD,
    workerGroupSpecs=listing(WORKERS),
    rayVersion=TEXT,
    enableInTreeAutoscaling=TRUTH,
    autoscalerOptions=ANY,
    headServiceAnnotations=mapping(TEXT),
    suspend=TRUTH,
)


def definition(group: str, version: str, kind: str, spec: Schema) -> dict[str, Any]:
    """The CustomResourceDefinition of a kind whose plural is its name with an s."""
    plural = f"{kind.lower()}s"
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec, "status": ANY}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }


DEFINITIONS = {
    "pytorchjob": definition("kubeflow.org", "v1", "PyTorchJob", PYTORCH_JOB),
    "mpijob": definition("kubeflow.org", "v2beta1", "MPIJob", MPI_JOB),
    "raycluster": definition("ray.io", "v1", "RayCluster", RAY_CLUSTER),
}
