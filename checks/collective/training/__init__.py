"""
Data-parallel training over a group of ranks: each computes the gradients of its own batch, all reduce them, each steps.

`data_parallel_step` is the check, `shard` what one rank computes, `judge` what the digests of all ranks say; pure. No
torch at import.
"""
