"""Slurm: its jobs on a host."""
