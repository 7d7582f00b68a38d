"""The training of the demonstration: a small model by DistributedDataParallel over gloo."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 20


def main() -> None:
    """Train, and end with an error unless all ranks hold the same model and it has learned something."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    began = time.monotonic()
    for _ in range(STEPS):
        x = torch.randn(64, 32, generator=generator)
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True) / 8)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
    took = time.monotonic() - began
    parameters = torch.cat([one.detach().flatten() for one in model.parameters()])
    everywhere = [torch.empty_like(parameters) for _ in range(size)]
    dist.all_gather(everywhere, parameters)
    assert all(torch.equal(parameters, other) for other in everywhere), "the ranks hold different models"
    assert losses[-1] < losses[0] / 2, f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f}"
    words = f"{STEPS} steps of {size} ranks in {took:.1f} s, loss {losses[0]:.4f} to {losses[-1]:.4f}"
    print(f"rank {rank} on {os.environ['NODE_NAME']}: {words}, parameters equal on all ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
