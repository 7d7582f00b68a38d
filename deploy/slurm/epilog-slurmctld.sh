#!/bin/sh
# Slurm's EpilogSlurmctld: releases the job's nodes and reports its end to the aggregator. The nodes see the end
# themselves too; this makes it sooner. Slurm does not look at the exit code.
PATH=/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin:/opt/healthd/bin:/opt/slurm/bin
export PATH
healthd=healthd
here=${0%/*}
# shellcheck source=/dev/null
[ ! -r "$here/hooks.conf" ] || . "$here/hooks.conf"

# shellcheck disable=SC2086
said=$($healthd slurm end 2>&1)
code=$?
[ -z "$said" ] || logger -t healthd-gate -- "job ${SLURM_JOB_ID:-?}: $said" 2>/dev/null || echo "healthd-gate: $said" >&2
exit "$code"
