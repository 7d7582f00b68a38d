"""
Reads the pods that have devices of this host from the kubelet's pod resources (gRPC on a Unix socket).

A pod is listed from its admission, before its images are pulled. Devices of device plugins are always listed, those of
resource claims (DRA) from Kubernetes 1.34 on (before: with the feature gate KubeletPodResourcesDynamicResources).

Source: k8s.io/kubelet/pkg/apis/podresources/v1/api.proto. Verified with a real kubelet 1.37 (tests/kubernetes), claims
against a grpc server of these messages alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from checks.accelerators import descriptors
from healthd.integrations.kubernetes.settings import KubeletSettings
from healthd.node.occupancy.model import JobScheduler, Look, Reading, Workload
from healthd.node.protobuf import ProtobufError, messages, text

NAME, KIND = "Kubernetes", "pod"
SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"
PODS_LOG = "/var/log/pods"
METHOD = "/v1.PodResourcesLister/List"
# As the kubelet's own client has it.
MAX_ANSWER_BYTES = 16 << 20
NIC_RESOURCES = ("vpc.amazonaws.com/efa",)
MAX_USES = 4


def parse_pods(answer: bytes, uids: dict[str, str]) -> tuple[Workload, ...]:
    """
    The pods that have accelerators or their NICs, out of a ListPodResourcesResponse: pure.

    `uids` maps NAMESPACE/NAME to a pod's uid as far as it is known. Any resource claim counts: nothing tells what
    kind of device it is for. Raises ProtobufError.
    """
    found = []
    for pod in messages(answer, 1):
        full_name = f"{text(pod, 2)}/{text(pod, 1)}"
        uses = list(dict.fromkeys(_uses(pod)))
        if uses:
            more = [f"and {len(uses) - MAX_USES} more"] if len(uses) > MAX_USES else []
            uid = uids.get(full_name)
            aliases = (f"pod:{uid}",) if uid else ()
            found.append(Workload(name=f"pod:{full_name}", aliases=aliases, uses=", ".join([*uses[:MAX_USES], *more])))
    return tuple(found)


def parse_names(answer: bytes) -> frozenset[str]:
    """NAMESPACE/NAME of all pods in a ListPodResourcesResponse, with devices or without: pure. Raises ProtobufError."""
    return frozenset(f"{text(pod, 2)}/{text(pod, 1)}" for pod in messages(answer, 1))


def _uses(pod: bytes) -> Iterator[str]:
    """What the containers of a pod have of the resources that are ours to test."""
    ours = (*(name for one in descriptors() for name in one.kubernetes_resources), *NIC_RESOURCES)
    for container in messages(pod, 3):
        for devices in messages(container, 2):
            resource = text(devices, 1)
            count = sum(1 for _ in messages(devices, 2))
            if count and resource.startswith(ours):
                yield f"{count} {resource}"
        for claim in messages(container, 5):
            drivers = {text(one, 2) for one in messages(claim, 4)} - {""}
            of = f" of {', '.join(sorted(drivers))}" if drivers else ""
            yield f"claim {text(claim, 2) or 'without a name'}{of}"


def read(root: Path, socket: Path | None, timeout_seconds: float) -> Reading:
    """Ask the kubelet once, within `timeout_seconds`."""
    path = _socket(root, socket)
    try:
        answer = _list(path, timeout_seconds)
        return Reading(scheduler=NAME, kind=KIND, workloads=parse_pods(answer, read_uids(root)))
    except ProtobufError as error:
        why = f"the kubelet's answer at {path} is not understood ({error})"
    except OSError as error:
        why = str(error)
    return Reading(scheduler=NAME, kind=KIND, workloads=None, unseen=why)


def read_names(root: Path, socket: Path | None, timeout_seconds: float, *, namespace: str | None) -> frozenset[str]:
    """
    NAMESPACE/NAME of every pod that the kubelet runs here. OSError where it does not answer, or does not know its pods.

    A kubelet that was just restarted lists none until the API server has told it which there are. `namespace` is that
    of the pod that we run in, so that one of it must be listed; None outside of a pod, where one of any must be.
    """
    path = _socket(root, socket)
    try:
        names = parse_names(_list(path, timeout_seconds))
    except ProtobufError as error:
        raise OSError(f"the kubelet's answer at {path} is not understood ({error})") from None
    if not any(namespace is None or name.startswith(f"{namespace}/") for name in names):
        raise OSError(f"the kubelet at {path} does not know its pods yet")
    return names


def _socket(root: Path, socket: Path | None) -> Path:
    return socket or root / SOCKET.lstrip("/")


def read_uids(root: Path) -> dict[str, str]:
    """Uids of pods by NAMESPACE/NAME, from the folders of their logs; a name that stands for two is left out."""
    found: dict[str, str] = {}
    twice = set()
    try:
        names = os.listdir(root / PODS_LOG.lstrip("/"))
    except OSError:
        return {}
    for name in names:
        parts = name.split("_")  # neither namespaces nor pods have underscores
        if len(parts) == 3:
            full_name = f"{parts[0]}/{parts[1]}"
            if full_name in found:
                twice.add(full_name)
            found[full_name] = parts[2]
    return {name: uid for name, uid in found.items() if name not in twice}


def _list(path: Path, timeout_seconds: float) -> bytes:
    """The kubelet's answer as it came. OSError in one line with the remedy."""
    try:
        path.lstat()
    except PermissionError:
        raise OSError(f"{path} cannot be reached; run healthd as root") from None
    except OSError:
        raise OSError(
            f"the kubelet's pod resources are not at {path}; mount the host's /var/lib/kubelet/pod-resources there"
        ) from None
    if not os.access(path, os.R_OK | os.W_OK):
        raise OSError(f"no permission to use {path}; run healthd as root")
    try:
        import grpc
    except ImportError:
        raise OSError("pods cannot be seen without grpcio; run 'pip install grpcio' in healthd's environment") from None
    options = [("grpc.max_receive_message_length", MAX_ANSWER_BYTES), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(f"unix:{path.absolute()}", options=options) as channel:
        try:
            # Without serializers the messages are bytes.
            answer: bytes = channel.unary_unary(METHOD)(b"", timeout=timeout_seconds)
        except grpc.RpcError as error:
            code = error.code().name if isinstance(error, grpc.Call) else type(error).__name__
            raise OSError(f"the kubelet does not respond at {path} ({code}); is it running?") from None
    return answer


def own_pods(root: Path, environ: Mapping[str, str]) -> frozenset[str]:
    """The name of the pod that this process runs in; empty outside of one."""
    namespace, name = own_namespace(root, environ), environ.get("POD_NAME") or environ.get("HOSTNAME")
    return frozenset({f"pod:{namespace}/{name}"}) if namespace and name else frozenset()


def own_namespace(root: Path, environ: Mapping[str, str]) -> str | None:
    """The namespace of the pod that this process runs in; None outside of one."""
    if told := environ.get("POD_NAMESPACE"):
        return told
    try:
        path = root / "var/run/secrets/kubernetes.io/serviceaccount/namespace"
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None


def _read(look: Look) -> Reading:
    return read(look.root, look.settings.of("kubelet", KubeletSettings).socket, look.settings.timeout_seconds)


SCHEDULER = JobScheduler(
    name=NAME,
    kind=KIND,
    read=_read,
    own=own_pods,
    processes=("kubelet",),
    paths=("var/lib/kubelet/config.yaml", "var/lib/kubelet/pod-resources"),
    variables=("KUBERNETES_SERVICE_HOST",),
)
