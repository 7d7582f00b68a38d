#!/bin/sh
# Slurm's PrologSlurmctld: asks the aggregator whether a job may start on the nodes that Slurm has chosen, while they show
# CONFIGURING. Exit 75: a batch job goes back into the queue; one of srun or salloc is cancelled.
# Settings: hooks.conf beside this file, and [gate] in /etc/healthd/healthd.toml. Runs as SlurmUser, without a PATH.
PATH=/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin:/opt/healthd/bin:/opt/slurm/bin
export PATH
gate_wait=10m mode=enforce healthd=healthd
here=${0%/*}
# shellcheck source=/dev/null
[ ! -r "$here/hooks.conf" ] || . "$here/hooks.conf"

say() { logger -t healthd-gate -- "job ${SLURM_JOB_ID:-?}: $*" 2>/dev/null || echo "healthd-gate: $*" >&2; }

[ "$mode" = observe ] && observe='--mode observe --no-drain' || observe=
# shellcheck disable=SC2086
said=$($healthd slurm gate --wait "$gate_wait" ${gate_options-} $observe 2>&1)
code=$?
say "$said"
[ "$mode" = observe ] || exit "$code"
# Observing sends no job back, whatever went wrong. What keeps this hook from running must not stay hidden until then.
if [ "$code" -ge 126 ]; then
    say "this hook cannot run '$healthd' as user $(id -un) (exit $code); with mode=enforce no job would start"
fi
if [ "$code" -lt 126 ] && ! found=$($healthd slurm doctor 2>&1); then
    say "with mode=enforce jobs would be sent back; healthd slurm doctor: $found"
fi
exit 0
