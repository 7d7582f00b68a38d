#!/usr/bin/env bash
# Everything that is worth knowing of healthd on a real accelerator, in eight minutes, on a machine without a network.
#
#   make offline-bundle FOR_PYTHON=3.12           # where there is a network; carry build/offline along
#   tests/gpu/first_run.sh OUT [BUNDLE] [PYTHON]  # OUT/first_run.tar.gz is written again after each part
#
# PYTHON (default: python3) has torch. HEALTHD_ACCELERATOR=cpu takes CPUs in place of a GPU, to try this script; the results
# say so. A part that fails or runs late does not stop the next.
set -u
cd "$(dirname "$0")/../.."
out=$(mkdir -p "${1:?"first_run.sh: name the folder for the results"}" && cd "$1" && pwd)
bundle=${2:-build/offline}
python=$(command -v "${3:-python3}")
device=cuda
[ "${HEALTHD_ACCELERATOR:-cuda}" != cpu ] || device=cpu
unset HEALTHD_ACCELERATOR # not a setting of healthd, which refuses variables that it does not know

work=$(mktemp -d)
results=$work/first_run
mkdir "$results"
END=$((SECONDS + ${FIRST_RUN_SECONDS:-470}))
summary=$results/summary.txt
echo "accelerator: $device; $(date -u +%FT%TZ); commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)" >"$summary"
export HEALTHD_PROBE_ACCELERATOR=$device HEALTHD_PROBE_PYTHON=$python
export HEALTHD_NODE_STATE_DIR=$work/state HEALTHD_NODE_RUN_DIR=$work/run PYTHONUNBUFFERED=1

# part NAME LIMIT COMMAND...: at most LIMIT seconds, and no longer than the time that is left for all.
part() {
    local name=$1 limit=$2 left=$((END - SECONDS)) began=$SECONDS code
    shift 2
    [ "$left" -lt "$limit" ] && limit=$left
    if [ "$limit" -le 1 ]; then
        code="no time left"
    else
        export -f shown every_fault every_dtype gates deaths device_figures memory_left quick_seconds
        timeout --kill-after=5 "$limit" bash -c '"$@"' part "$@" >"$results/$name.txt" 2>&1 </dev/null
        code=$?
        [ "$code" -ne 124 ] || code="stopped after $limit s"
    fi
    printf '%-16s %4s s  %s\n' "$name" $((SECONDS - began)) "$code" | tee -a "$summary"
    # Results of more than 16 MiB cannot be carried away from everywhere: the largest files are cut at their ends.
    find "$results" -type f -size +4M -exec truncate -s 4M {} +
    tar -C "$work" -czf "$out/.first_run.tar.gz" first_run && mv "$out/.first_run.tar.gz" "$out/first_run.tar.gz"
}

shown() {
    echo "\$ $*"
    "$@"
    echo "exit code $?"
}

every_dtype() {
    local dtype
    for dtype in fp32 bf16 fp16 fp8; do
        printf '[checks.matmul]\ndtypes = ["%s"]\n[checks.train_step]\ndtypes = ["%s"]\n' $dtype $dtype >"$work/$dtype.toml"
        shown healthd check matmul train_step --config "$work/$dtype.toml" --json
    done
    shown healthd check memory digest transfer --json
}

every_fault() {
    local kind
    printf '[checks.matmul]\ntimeout = 10\n' >"$work/short.toml" # a hang takes the whole limit
    for kind in fail crash slow:3 corrupt missing garbage hang; do
        shown timeout 40 healthd check matmul --config "$work/short.toml" --fault "matmul@$device:0=$kind"
    done
    shown timeout 60 healthd check all_reduce --fault all_reduce@rank:0=absent # of groups alone
}

# A gate on this node with its device free, then with a process that holds it.
gates() {
    local held
    export HEALTHD_NODE_STATE_DIR=$work/n1 HEALTHD_NODE_RUN_DIR=$work/n1 # leases there do not concern the other parts
    healthd aggregator --listen 127.0.0.1:8190 --state-dir "$work/aggregator" >"$results/aggregator.log" 2>&1 &
    healthd node --name n1 --listen 127.0.0.1:8180 --aggregator http://127.0.0.1:8190 >"$results/node.log" 2>&1 &
    trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
    curl -s --retry 40 --retry-delay 1 --retry-all-errors --max-time 3 127.0.0.1:8180/livez
    shown healthd gate --aggregator http://127.0.0.1:8190 --job free --node n1 --wait 60s --json
    shown healthd gate release --aggregator http://127.0.0.1:8190 --job free
    mkfifo "$work/hold"
    "$HEALTHD_PROBE_PYTHON" tests/gpu/measure.py hold "$device" "$work/n1/devices/cpu0" <"$work/hold" >"$work/held" &
    held=$!
    exec 9>"$work/hold"
    timeout 40 bash -c "until grep -q holding '$work/held'; do sleep 0.1; done"
    shown healthd check --tier passive --json
    shown healthd gate --aggregator http://127.0.0.1:8190 --job busy --node n1 --wait 15s --json
    curl -s "127.0.0.1:8180/readyz?verbose"
    kill $held
}

deaths() {
    local name
    for name in device_assert illegal_address out_of_memory killed launch_failure wrong_interface; do
        case $device/$name in cpu/illegal_address | cpu/launch_failure)
            echo "$name: not tried: it needs a GPU"
            continue
            ;;
        esac
        shown timeout 60 healthd run --seconds 40 --exit-style verdict --json-out "$results/death_$name.json" -- \
            "$HEALTHD_PROBE_PYTHON" tests/gpu/measure.py death $name "$device"
    done
}

quick_seconds() {
    local began
    began=$(date +%s.%N)
    healthd check --tier quick --json >"$results/quick.json"
    echo "exit code $?"
    echo "quick tier: $(date +%s.%N) - $began" | awk '{ printf "quick tier, whole process: %.2f s\n", $3 - $5 }'
    shown "$HEALTHD_PROBE_PYTHON" tests/gpu/measure.py start "$device"
}

# Products and copies of the probes beside plain loops in the same process.
device_figures() { shown "$HEALTHD_PROBE_PYTHON" tests/checks/on_gpu.py figures "$device:0"; }

# What a run leaves on the device: 0 MiB more than before.
memory_left() {
    local before after
    before=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits --id=0)
    healthd check matmul digest --json >/dev/null
    after=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits --id=0)
    echo "memory used before $before MiB, after $after MiB: left $((after - before)) MiB"
    [ "$after" -eq "$before" ]
}

export work results device
part install 90 env TESTS=1 sh "$bundle/install.sh" "$work/healthd" "$python"
export PATH=$work/healthd/bin:$PATH
part versions 30 "$python" -c 'import sys, torch; print(sys.version, torch.__version__, torch.version.cuda)'
[ $device = cpu ] || part nvidia_smi 20 nvidia-smi -q
part doctor 40 healthd doctor
part passive 30 healthd check --tier passive --json
part quick 90 quick_seconds
part deaths 100 deaths
part gates 100 gates
[ $device = cpu ] || part pytest 90 env PYTHONPATH="$(echo "$work"/healthd/lib/python*/site-packages)" \
    "$python" -m pytest -m gpu -q -p no:cacheprovider tests/checks
[ $device = cpu ] || part readings 20 "$python" tests/gpu/measure.py readings
[ $device = cpu ] || part figures 40 device_figures
[ $device = cpu ] || part memory_left 40 memory_left
part dtypes 90 every_dtype
part profile 60 healthd check train_step --profile --profile-dir "$results/profile"
part faults 120 every_fault
part record 30 healthd record "$results/machine"
part deep 120 healthd check --tier deep --json
cat "$summary"
rm -rf "$work"
echo "results: $out/first_run.tar.gz, $(stat -c %s "$out/first_run.tar.gz") bytes"
