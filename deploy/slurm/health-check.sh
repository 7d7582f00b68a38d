#!/bin/sh
# Slurm's HealthCheckProgram: drains this node while healthd finds it unfit ("healthd: ..."), and resumes only what it
# drained itself. Warning: AWS ParallelCluster terminates nodes that are drained; there, keep mode=observe.
# Settings: hooks.conf beside this file. Slurm sets no PATH here and ignores the exit code.
PATH=/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin:/opt/healthd/bin:/opt/slurm/bin
export PATH
node_url=http://127.0.0.1:8080 mode=enforce on_unreachable=hold state_dir=/run/healthd/slurm healthd=healthd
node=${SLURMD_NODENAME:?is set by slurmd}
here=${0%/*}
# shellcheck source=/dev/null
[ ! -r "$here/hooks.conf" ] || . "$here/hooks.conf"

clear=$state_dir/$node.clear
# The usual case costs one request: fit, and within the last five minutes no drain of ours was seen.
if [ -n "$(find "$clear" -mmin -5 2>/dev/null)" ]; then
    answer=$(curl -q -s -f --noproxy '*' --max-time 2 "$node_url/readyz?exclude=allocated" 2>/dev/null | head -c 400)
    # The name of a node and nothing else before it: whatever else answers on that port is not our daemon.
    name=${answer%" is ready"}
    case $name in
        "$answer" | '' | [!A-Za-z0-9]* | *[!A-Za-z0-9] | *[!A-Za-z0-9._-]*) ;;
        *) [ ${#name} -gt 253 ] || exit 0 ;;
    esac
fi
rm -f "$clear"
[ "$mode" = observe ] && observe=--observe || observe=
# shellcheck disable=SC2086
said=$($healthd slurm health --node "$node" --local-url "$node_url" --on-unreachable "$on_unreachable" \
    --refused "$state_dir/$node.refused" $observe 2>&1)
code=$?
if [ "$mode" = observe ]; then
    # Slurm ignores the exit code, and observing changes nothing: failures must be logged.
    if [ "$code" -ge 126 ]; then
        said="this hook cannot run '$healthd' (exit $code); with mode=enforce no node would be drained or resumed: $said"
    elif [ -z "$(find "$state_dir/$node.doctor" -mmin -60 2>/dev/null)" ]; then # once an hour, also where it fails
        mkdir -p "$state_dir" && : >"$state_dir/$node.doctor"
        found=$($healthd slurm doctor --node "$node" --local-url "$node_url" 2>&1) ||
            said="$said; healthd slurm doctor: $found"
    fi
fi
case $said in
    "$node is fit") mkdir -p "$state_dir" && : >"$clear" ;;
    *) logger -t healthd-health-check -- "$said" 2>/dev/null || echo "healthd-health-check: $said" >&2 ;;
esac
exit "$code"
