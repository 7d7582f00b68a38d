"""What the tests of checkpoints, and those beside them, are made with."""

from __future__ import annotations

SAVE = """
import sys
import warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed.checkpoint as dcp
torch.manual_seed(0)
state = {f"layers.{n}.weight": torch.randn(64, 64) for n in range(8)}
state |= {"bias": torch.randn(5).bfloat16(), "step": 100, "sampler": {"seed": 3}}
writer = dcp.FileSystemWriter(sys.argv[1], single_file_per_rank=False, thread_count=1)
dcp.save(state, storage_writer=writer, no_dist=True)
"""
