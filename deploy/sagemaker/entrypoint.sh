#!/bin/bash
# Entry point of a SageMaker training container: the gate, then the training.
#
#   ENTRYPOINT ["/opt/healthd/entrypoint.sh", "python", "/opt/ml/code/train.py"]
#
# SageMaker shows the first 1024 bytes of /opt/ml/output/failure as the job's FailureReason: there a rejected job says why.
# It does not retry a job that ended by a code of its own; who submits looks for "not admitted" and submits again.
set -u
FAILURE=${FAILURE_FILE:-/opt/ml/output/failure}
said=$(mktemp)

# Every host of the job runs this. The beginning of what is said is kept, for the reason; what the training says for days
# only passes through. dd writes what it reads at once.
exec {words}> >(exec tee >(dd bs=1024 count=64 of="$said" 2>/dev/null; : >"$said.whole"; exec cat >/dev/null) >&2)
healthd preflight -- "$@" 2>&"$words" {words}>&- &
job=$!
exec {words}>&-
# The job is told when SageMaker stops it (SIGTERM, two minutes before SIGKILL).
stopped=
trap 'stopped=yes; kill -TERM "$job" 2>/dev/null' TERM INT
wait "$job"; code=$?
while kill -0 "$job" 2>/dev/null; do wait "$job"; code=$?; done

# Who stopped the job before its training began needs no reason.
if [[ $code -eq 75 && -z $stopped ]]; then
  # What was said is on its way; whoever else holds the pipe is not waited for.
  for _ in {1..20}; do [[ ! -e $said.whole ]] || break; sleep 0.1; done
  mkdir -p "$(dirname "$FAILURE")"
  { echo "not admitted: the gate found these nodes not fit; submit again"; cat "$said"; } | head -c 1024 >"$FAILURE"
fi
exit "$code"
