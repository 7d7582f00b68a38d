"""Which jobs the hook of slurmctld asks a gate for."""

from __future__ import annotations

from healthd.aggregator.jobs.ungated import HookedJob, hooked_job


def test_a_job_of_slurm_has_a_gate_by_its_id() -> None:
    assert hooked_job("slurm:8") == HookedJob(id="8", gate="slurm-8")
    assert [hooked_job(one) for one in ("slurm:x", "slurm:", "slurm:unknown", "pod:default/x", "and 3 more")] == [
        None
    ] * 5
