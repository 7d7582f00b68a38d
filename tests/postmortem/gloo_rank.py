"""
A rank of a job on gloo that dies of a fault: `RANK=.. WORLD_SIZE=.. MASTER_ADDR=.. MASTER_PORT=.. gloo_rank.py FAULT`.

The last rank has the fault; the others call one more all-reduce, in which they wait for it. Where the variable of the
dumps is set, each rank writes its Flight Recorder while it waits, as torch does with NCCL. With `outside` no rank has
a fault: all go on until something happens to them.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
import time
import warnings

WAIT_SECONDS = 6.0
DUMP_SECONDS = 3.0


def main(fault: str) -> None:
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace

    def dump() -> None:
        prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
        if prefix:
            with open(f"{prefix}{os.environ['RANK']}.new", "wb") as file:
                file.write(_dump_fr_trace())
            os.replace(file.name, f"{prefix}{os.environ['RANK']}")

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=WAIT_SECONDS))
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} is here", flush=True)
    tensor = torch.ones(8)
    for _ in range(3):
        dist.all_reduce(tensor)
    threading.Timer(DUMP_SECONDS, dump).start()
    while fault == "outside":
        dist.all_reduce(tensor)
        time.sleep(0.05)
    if rank == size - 1:
        if fault == "exception":
            raise ValueError("label 17 is out of range")
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "early":
            os._exit(0)
        if fault == "hangs":
            while True:
                signal.pause()
    dist.all_reduce(tensor)


if __name__ == "__main__":
    main(sys.argv[1])
