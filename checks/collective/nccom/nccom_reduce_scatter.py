"""The `nccom_reduce_scatter` check."""

from __future__ import annotations

from collections.abc import Iterator

from checks.collective.nccom.steps import Params, run_nccom
from checks.contract import Context, Finding, Progress, check


@check(tier="quick", interval_seconds=3600, timeout_seconds=600, accelerators=True, collective=True)
def nccom_reduce_scatter(ctx: Context[Params]) -> Iterator[Finding | Progress]:
    """
    Every NeuronCore gets its share of the sum over all, by AWS's own nccom-test, with right values.

    Reads:   nccom-test (PATH, /opt/aws/neuron/bin): quick: fp32 over all cores at 3 sizes up to 1 MiB; deep: 512 KiB, 8
             and 128 MiB (each goes by another algorithm) in fp32, bf16 and fp16 over all cores, and in fp32 over fewer.
    Judges:  fail CollectiveMismatch (wrong values), CollectiveFailed (bad exit, errors, a row missing or no number),
             Timeout (it hangs), MissingDevice (no driver), SlowLink (`nccom_reduce_scatter_busbw_bytes_per_second`,
             `..._algbw_...`, `nccom_reduce_scatter_duration_seconds`, each with `/SIZE_BYTES`: all cores, fp32;
             without: the largest size of deep) | unknown MissingTool, NoData, Garbage (output not understood),
             CheckError, Crashed | skip NotApplicable (not Neuron, one core), Busy.
    Cost:    quick: one start of nccom-test; deep: five or less. It takes all cores, so only while nobody has one.
    Source:  AWS Neuron documentation, nccom-test.rst. Bandwidths are bytes by seconds (1 GB/s = 1e9 bytes/s), not the
             columns that the tool prints; busbw = algbw * (n - 1) / n. Unverified on hardware: stand-in tools alone.
    """
    yield from run_nccom(ctx, "nccom_reduce_scatter")
