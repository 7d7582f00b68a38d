"""
A file system in memory, by the kernel's FUSE protocol, that fails as it is told: quota, stale handles, hangs, slowness.

    python fuse_store.py MOUNT_POINT '{"WRITE": "EDQUOT"}'

It mounts itself (root alone may), writes one line when it is mounted, and serves until it is killed; then the kernel
says ENOTCONN to whoever uses it. Faults: operation -> the name of an errno, "hang" (takes the request and never
answers), or seconds to wait before each answer.
Source: include/uapi/linux/fuse.h.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import stat
import struct
import sys
import time
from dataclasses import dataclass, field

OPERATIONS = {
    1: "LOOKUP", 2: "FORGET", 3: "GETATTR", 4: "SETATTR", 9: "MKDIR", 10: "UNLINK", 11: "RMDIR", 12: "RENAME",
    14: "OPEN", 15: "READ", 16: "WRITE", 17: "STATFS", 18: "RELEASE", 20: "FSYNC", 25: "FLUSH", 26: "INIT",
    27: "OPENDIR", 28: "READDIR", 29: "RELEASEDIR", 30: "FSYNCDIR", 34: "ACCESS", 35: "CREATE", 36: "INTERRUPT",
    38: "DESTROY", 42: "BATCH_FORGET", 45: "RENAME2",
}  # fmt: skip
UNANSWERED = {"FORGET", "BATCH_FORGET", "INTERRUPT", "DESTROY"}
HEADER = struct.Struct("=IIQQIIIHH")
DIRECT_IO = 1


@dataclass
class Node:
    number: int
    mode: int
    data: bytearray = field(default_factory=bytearray)
    children: dict[bytes, int] = field(default_factory=dict)


class Store:
    def __init__(self, faults: dict[str, object]) -> None:
        self.faults = faults
        self.nodes = {1: Node(1, stat.S_IFDIR | 0o777)}

    def attributes(self, node: Node) -> bytes:
        size = len(node.data)
        times = [int(time.time())] * 3
        return struct.pack(
            "=6Q10I", node.number, size, -(-size // 512), *times, 0, 0, 0, node.mode, 1, 0, 0, 0, 4096, 0
        )

    def entry(self, node: Node) -> bytes:
        return struct.pack("=4Q2I", node.number, 0, 0, 0, 0, 0) + self.attributes(node)

    def make(self, parent: int, name: bytes, mode: int) -> Node:
        node = Node(max(self.nodes) + 1, mode)
        self.nodes[node.number] = node
        self.nodes[parent].children[name] = node.number
        return node

    def child(self, parent: int, name: bytes) -> Node:
        number = self.nodes[parent].children.get(name)
        if number is None:
            raise OSError(errno.ENOENT, "no such name")
        return self.nodes[number]

    def answer(self, operation: str, number: int, body: bytes) -> bytes:
        fault = self.faults.get(operation)
        if fault == "hang":
            while True:
                signal.pause()
        elif isinstance(fault, (int, float)):
            time.sleep(fault)
        elif isinstance(fault, str):
            raise OSError(getattr(errno, fault), fault)
        return getattr(self, f"do_{operation.lower()}", self.do_nothing)(number, body)

    def do_nothing(self, number: int, body: bytes) -> bytes:
        return b""

    def do_init(self, number: int, body: bytes) -> bytes:
        return struct.pack("=IIIIHHIIHHI", 7, 31, 1 << 17, 0, 16, 12, 1 << 17, 1, 32, 0, 0).ljust(64, b"\0")

    def do_lookup(self, number: int, body: bytes) -> bytes:
        return self.entry(self.child(number, body.rstrip(b"\0")))

    def do_getattr(self, number: int, body: bytes) -> bytes:
        return struct.pack("=QII", 0, 0, 0) + self.attributes(self.nodes[number])

    def do_setattr(self, number: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("=IIQQ", body)
        if valid & 8:
            node = self.nodes[number]
            node.data = node.data[:size].ljust(size, b"\0")
        return self.do_getattr(number, body)

    def do_mkdir(self, number: int, body: bytes) -> bytes:
        return self.entry(self.make(number, body[8:].rstrip(b"\0"), stat.S_IFDIR | 0o777))

    def do_create(self, number: int, body: bytes) -> bytes:
        node = self.make(number, body[16:].rstrip(b"\0"), stat.S_IFREG | 0o666)
        return self.entry(node) + self.do_open(node.number, body)

    def do_open(self, number: int, body: bytes) -> bytes:
        return struct.pack("=QII", 0, DIRECT_IO, 0)

    def do_opendir(self, number: int, body: bytes) -> bytes:
        return struct.pack("=QII", 0, 0, 0)

    def do_unlink(self, number: int, body: bytes) -> bytes:
        name = body.rstrip(b"\0")
        self.child(number, name)
        del self.nodes[number].children[name]
        return b""

    do_rmdir = do_unlink

    def do_rename(self, number: int, body: bytes, skip: int = 8) -> bytes:
        old, new = body[skip:].rstrip(b"\0").split(b"\0")
        target = struct.unpack_from("=Q", body)[0]
        self.nodes[target].children[new] = self.nodes[number].children.pop(old)
        return b""

    def do_rename2(self, number: int, body: bytes) -> bytes:
        return self.do_rename(number, body, 16)

    def do_write(self, number: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", body)
        data = self.nodes[number].data
        if len(data) < offset:
            data.extend(bytes(offset - len(data)))
        data[offset : offset + size] = body[40 : 40 + size]
        return struct.pack("=II", size, 0)

    def do_read(self, number: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", body)
        return bytes(self.nodes[number].data[offset : offset + size])

    def do_statfs(self, number: int, body: bytes) -> bytes:
        return struct.pack("=5Q4I", 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19, 4096, 255, 4096, 0).ljust(80, b"\0")

    def do_readdir(self, number: int, body: bytes) -> bytes:
        offset = struct.unpack_from("=QQ", body)[1]
        found = b""
        for place, (name, child) in enumerate(self.nodes[number].children.items()):
            if place >= offset:
                kind = self.nodes[child].mode >> 12
                head = struct.pack("=QQII", child, place + 1, len(name), kind)
                found += head + name.ljust(-(-len(name) // 8) * 8, b"\0")
        return found[:4096]


def main() -> None:
    point, faults = sys.argv[1], json.loads(sys.argv[2])
    device = os.open("/dev/fuse", os.O_RDWR)
    library = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if library.mount(b"healthd-fuse", point.encode(), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    store = Store(faults)
    told = False
    while True:
        if not told:
            print("mounted", flush=True)
            told = True
        try:
            request = os.read(device, (1 << 17) + 4096)
        except OSError as error:
            if error.errno == errno.ENODEV:  # unmounted
                return
            continue
        _, code, unique, number, *_ = HEADER.unpack_from(request)
        operation = OPERATIONS.get(code, "")
        if operation in UNANSWERED:
            continue
        number_of_error, body = 0, b""
        try:
            if not operation:
                raise OSError(errno.ENOSYS, "not here")
            body = store.answer(operation, number, request[HEADER.size :])
        except OSError as error:
            number_of_error = -(error.errno or errno.EIO)
        os.write(device, struct.pack("=IiQ", 16 + len(body), number_of_error, unique) + body)


if __name__ == "__main__":
    main()
