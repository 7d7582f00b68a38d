"""Slurm's programs, as both the services and the hooks use them."""
