#!/bin/sh
# Slurm's Prolog: is this node fit for a job now? It reads the verdict that the node's daemon has ready, in milliseconds,
# and runs nothing on the devices. A refusal (exit 1) makes Slurm drain this node and put the job back into the queue.
# Settings: hooks.conf beside this file. Slurm sets no PATH here.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
node_url=http://127.0.0.1:8080 mode=enforce on_unreachable=hold state_dir=/run/healthd/slurm
node=${SLURMD_NODENAME:-$(hostname -s)}
here=${0%/*}
# shellcheck source=/dev/null
[ ! -r "$here/hooks.conf" ] || . "$here/hooks.conf"

say() { logger -t healthd-prolog -- "$*" 2>/dev/null || echo "healthd-prolog: $*" >&2; }

if ! command -v curl >/dev/null; then
    say "this hook cannot run: curl is not installed on $node; with mode=enforce every job is refused here"
    [ "$mode" = observe ] && exit 0
fi

# Whether $1 is the line by which a daemon of ours ends its answer: the name of its node, and $2.
says() {
    name=${1%" is $2"}
    case $name in "$1" | '' | [!A-Za-z0-9]* | *[!A-Za-z0-9] | *[!A-Za-z0-9._-]*) return 1 ;; esac
    [ ${#name} -le 253 ]
}

# Who has the node is left out of the question: it is this very job. Slurm waits for MessageTimeout (10 s) at least.
tries=3
while :; do
    # No more than a daemon's answer can be, whatever sends it. The last line: HTTP status, curl's own exit code.
    answer=$({
        curl -q -s --noproxy '*' --connect-timeout 1 --max-time 2 -w '\n%{http_code}' \
            "$node_url/readyz?exclude=allocated" 2>/dev/null
        echo " $?"
    } | head -c 65536)
    code=${answer##*
}
    tries=$((tries - 1))
    # A daemon that is being restarted is back in a moment.
    case $code in '000 '* | ' '*) ;; *) break ;; esac
    [ "$tries" -gt 0 ] || break
    sleep 1
done
body=${answer%
*}
body=${body%
}
# Whatever else answers on that port is not our daemon: its words are no health, and no fault of the node either.
why="$node_url does not respond as healthd does" known=no
case $code in
    '200 0') says "$body" ready && exit 0 ;;
    '503 0')
        if says "${body##*
}" 'not ready'; then
            why=${body%%
*} known=yes
        fi
        ;;
    '000 '* | ' '*) why="the daemon at $node_url does not respond" ;;
    [1-5][0-9][0-9]' 0') why="$node_url answered HTTP ${code% 0}" ;;
esac
if [ "$known" = no ] && [ "$on_unreachable" = admit ]; then
    say "job ${SLURM_JOB_ID:-?} starts unchecked on $node: $why (on_unreachable=admit)"
    exit 0
fi
if [ "$mode" = observe ]; then
    say "job ${SLURM_JOB_ID:-?} would be refused on $node: $why (mode=observe)"
    exit 0
fi
# By this the health check knows that the drain which follows ("Prolog error") is ours, and undoes it after the repair.
mkdir -p "$state_dir"
rm -f "$state_dir/$node.clear"
printf '%s job %s: %s\n' "$(date +%s)" "${SLURM_JOB_ID:-?}" "$why" >"$state_dir/$node.refused"
say "job ${SLURM_JOB_ID:-?} is refused on $node: $why"
exit 1
