"""Slurm: its hooks, its jobs on a host, and draining of its nodes."""
