#!/bin/bash
# Entry point of a job's container on hosts whose daemons speak to a standing aggregator: the gate, then the job.
#
#   /opt/healthd/gated.sh /opt/train/train.sh
#
# Every node of the job runs this, and all go or none does. HEALTHD_GATE_AGGREGATOR says where the aggregator is. What
# is retried when this ends with 75 comes to other hosts where the aggregator's actuator has taken the bad ones out.
set -u
HOST_DIR=${HOST_DIR:-/var/lib/healthd/host}  # of the host, by its user data
PYTHON=${PYTHON:-python3}
NOT_ADMITTED=75

say() { echo "gated.sh: $*" >&2; }

# A container has a host name of its own; the daemon is known by the host's.
node=$(<"$HOST_DIR/name") || { say "$HOST_DIR/name cannot be read: mount it, see multi-node-standing.json"; exit $NOT_ADMITTED; }
# A stop ends what runs, which takes back what it has asked for, and no job starts. Without a trap the first process of a
# container receives none.
stopped='' passed='' child=''
stop() {
  stopped=yes
  [[ -z $child || -n $passed ]] || { passed=yes; kill -TERM "$child" 2>/dev/null; }
}
trap stop TERM INT

# The exit code of the child, once it has ended; NOT_ADMITTED after a stop.
ended() {
  local code=0
  [[ -z $stopped ]] || stop # it came before the child was known
  while :; do
    wait "$child"; code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  child=''
  [[ -z $stopped ]] || { say "stopped; the job does not start"; exit $NOT_ADMITTED; }
  return "$code"
}

# Else the host's daemon would call the node taken, by this very task.
answer=$(mktemp) || exit $NOT_ADMITTED
"$PYTHON" -c '
import json, signal, sys, urllib.request
signal.alarm(20)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
with opener.open(sys.argv[1] + "/task", timeout=10) as answer:
    print(json.loads(answer.read(1 << 20))["TaskARN"])
' "${ECS_CONTAINER_METADATA_URI_V4:-}" >"$answer" &
child=$!
ended || { say "ECS does not say which task this is"; exit $NOT_ADMITTED; }
task=$(<"$answer")
rm -f "$answer"

healthd gate --join "${AWS_BATCH_JOB_ID%%#*}" --node "$node" --workload "ecs:$task" --execute &
child=$!
ended || exit $?
trap - TERM INT
[[ -z $stopped ]] || exit $NOT_ADMITTED
exec "$@"
