"""
A device plug-in for a node of the tests' cluster: devices that a real kubelet advertises, allocates and lists.

It speaks the kubelet's device plug-in API v1beta1 over gRPC on a socket in the node's /var/lib/kubelet/device-plugins,
as those of AWS and NVIDIA do. A container that is given devices has their ids in a variable, `aws.amazon.com/neuron`
in AWS_AMAZON_COM_NEURON. Source: k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/api.proto.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc

from healthd.node.protobuf import field, messages

VERSION = b"v1beta1"
REGISTER = "/v1beta1.Registration/Register"
SERVICE = "v1beta1.DevicePlugin"


class DevicePlugin:
    """`count` devices of a resource on a node, until it is left; `healthy` changes what the kubelet is told."""

    def __init__(self, kubelet: Path, resource: str, count: int) -> None:
        """`kubelet` is the node's /var/lib/kubelet as this machine sees it."""
        self.resource = resource
        self.ids = [f"{resource.rpartition('/')[2]}-{number}" for number in range(count)]
        self._folder = kubelet / "device-plugins"
        self._name = re.sub(r"\W", "-", resource) + ".sock"
        self._sick: set[str] = set()
        self._changed = threading.Condition()
        self._ended = False
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        calls = {
            "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(lambda _request, _context: b""),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._list),
            "Allocate": grpc.unary_unary_rpc_method_handler(self._allocate),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, calls),))

    def __enter__(self) -> DevicePlugin:
        (self._folder / self._name).unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix:{self._folder / self._name}")
        self._server.start()
        request = field(1, VERSION) + field(2, self._name.encode()) + field(3, self.resource.encode())
        with grpc.insecure_channel(f"unix:{self._folder / 'kubelet.sock'}") as channel:
            channel.unary_unary(REGISTER)(request, timeout=30)
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._server.stop(grace=2).wait()
        (self._folder / self._name).unlink(missing_ok=True)

    def set_healthy(self, device: str, healthy: bool) -> None:
        """Tell the kubelet what the device is now."""
        with self._changed:
            (self._sick.discard if healthy else self._sick.add)(device)
            self._changed.notify_all()

    def _list(self, _request: bytes, _context: grpc.ServicerContext) -> Iterator[bytes]:
        while True:
            with self._changed:
                if self._ended:
                    return
                told = b"".join(field(1, field(1, one.encode()) + field(2, self._health(one))) for one in self.ids)
            yield told
            with self._changed:
                if not self._ended:
                    self._changed.wait()

    def _health(self, device: str) -> bytes:
        return b"Unhealthy" if device in self._sick else b"Healthy"

    def _allocate(self, request: bytes, _context: grpc.ServicerContext) -> bytes:
        variable = re.sub(r"\W", "_", self.resource).upper().encode()
        answers = b""
        for container in messages(request, 1):
            ids = b",".join(messages(container, 1))
            answers += field(1, field(1, field(1, variable) + field(2, ids)))
        return answers
