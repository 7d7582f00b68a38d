#!/bin/bash
# Entry point of a SageMaker training container: the gate, then the training.
#
#   ENTRYPOINT ["/opt/healthd/entrypoint.sh", "python", "/opt/ml/code/train.py"]
#
# SageMaker shows the first 1024 bytes of /opt/ml/output/failure as the job's FailureReason: there a rejected job says why,
# and with HEALTHD_PREFLIGHT_RUN=true and HEALTHD_PREFLIGHT_EXIT_STYLE=verdict a job that died says what a retry can do.
# SageMaker does not retry a job that ended by a code of its own; who submits goes by the beginning of the reason.
set -u
FAILURE=${FAILURE_FILE:-/opt/ml/output/failure}
said=$(mktemp)

# Every host of the job runs this. The beginning and the end of what is said are kept, for the reason; what the training
# says for days only passes through. dd writes what it reads at once.
exec {words}> >(exec tee >(dd bs=1024 count=32 of="$said" 2>/dev/null; tail -c 32768 >"$said.end"; : >"$said.whole") >&2)
reader=$!
healthd preflight -- "$@" 2>&"$words" {words}>&- &
job=$!
exec {words}>&-
# SageMaker's stop reaches the job (SIGTERM, two minutes before SIGKILL).
stopped=
trap 'stopped=yes; kill -TERM "$job" 2>/dev/null' TERM INT
wait "$job"; code=$?
while kill -0 "$job" 2>/dev/null; do wait "$job"; code=$?; done

wait_for_words() { for _ in {1..20}; do [[ ! -e $said.whole ]] || return 0; sleep 0.1; done; return 1; }

# Who stopped the job needs no reason.
case $code in 70|75|76|79) ;; *) exit "$code" ;; esac
[[ -z $stopped ]] || exit "$code"

# What was said is on its way; whoever else holds the pipe is not waited for.
wait_for_words || { kill "$reader"; wait_for_words; }
# The verdict of a job that ran is the last that is said, and a gate that says no gives none.
verdict=$(cat "$said" "$said.end" | grep -a -A 40 '^healthd: why it died: ' | head -c 1024)
reason=
if [[ -n $verdict && ${HEALTHD_PREFLIGHT_EXIT_STYLE:-command} == verdict ]]; then
  case $code in
    75) reason="retry elsewhere: submit again" ;;
    76) reason="retry here: submit again once its cause is gone" ;;
    70) reason="do not retry" ;;
    79) reason="stopped" ;;
  esac
elif [[ -z $verdict && $code -eq 75 ]]; then
  reason="not admitted: the gate found these nodes not fit; submit again"
  verdict=$(head -c 1024 "$said")
fi
if [[ -n $reason ]]; then
  mkdir -p "$(dirname "$FAILURE")"
  printf '%s\n%s\n' "$reason" "$verdict" | head -c 1024 >"$FAILURE"
fi
exit "$code"
