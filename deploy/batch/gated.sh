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
# Else the host's daemon would call the node taken, by this very task.
task=$("$PYTHON" -c '
import json, sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
with opener.open(sys.argv[1] + "/task", timeout=10) as answer:
    print(json.load(answer)["TaskARN"])
' "${ECS_CONTAINER_METADATA_URI_V4:-}") || { say "ECS does not say which task this is"; exit $NOT_ADMITTED; }

healthd gate --join "${AWS_BATCH_JOB_ID%%#*}" --node "$node" --workload "ecs:$task" --execute || exit $?
exec "$@"
