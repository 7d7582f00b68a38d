"""The commands that run beside a job: `gate`, `preflight`, `slurm`."""
