"""The daemon of one node: runs its checks, serves its state, and synchronizes it with the aggregator."""
