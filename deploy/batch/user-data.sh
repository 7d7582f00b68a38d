#!/bin/bash
# User data of a container host of AWS Batch (Amazon Linux 2023, ECS-optimised, Neuron or GPU): installs the daemon and
# orders the boot check before the ECS agent. The agent waits for the end of user data, so nothing here may wait for it,
# and services are started with --no-block.
#
# Fill in the settings, or leave them as they are. Whatever fails here must not keep the machine from working, unless
# ENFORCE says so: then an agent without a verdict does not start.
set -u

# What pip installs: a version, a wheel (a path, https://... or s3://...), or a folder with all wheels that are needed.
HEALTHD_PACKAGE=${HEALTHD_PACKAGE:-s3://BUCKET/healthd-0.1.0-py3-none-any.whl}
# Where deploy/systemd is; beside the package by default.
UNITS=${UNITS:-s3://BUCKET/systemd}
# The interpreter on this machine that has the jobs' torch. Empty: the host has none, so the daemon reads only, and the
# probes run in the job's container alone.
PROBE_PYTHON=${PROBE_PYTHON:-}
# A standing aggregator (https://HOST:8090), or several with commas, to which the daemon reports.
# Empty: the daemon stands alone.
AGGREGATOR=${AGGREGATOR:-}
# Files (a path or s3://...) with the daemon's token (scope sync), the token of the jobs' gates (scope gate; none where jobs
# run `healthd preflight`), and the CA of the aggregator's certificate. Never the tokens themselves: user data can be read.
TOKEN=${TOKEN:-}
GATE_TOKEN=${GATE_TOKEN:-}
CA=${CA:-}
# yes: the agent starts on a fit node alone. Begin with no.
ENFORCE=${ENFORCE:-no}
# yes: a machine with broken devices switches itself off and is replaced. Needs ENFORCE.
REPLACE=${REPLACE:-no}

ROOT=${ROOT:-}
HOME_DIR=/opt/healthd
# What gates in containers need of the host: its name, their token, the CA.
SHARED_DIR=/var/lib/healthd/host
ACTIVE_CHECKS='"matmul", "memory", "transfer", "digest", "train_step", "data_parallel_step", "checkpoint_store", "checkpoint_load", "data_store", "all_reduce", "all_gather", "reduce_scatter",
  "nccom_all_reduce", "nccom_all_gather", "nccom_reduce_scatter"'
say() { echo "healthd user data: $*"; }

fetch() { # FROM TO [--recursive]: a file, or a folder, from S3 or of this machine
  case $1 in
    s3://*) aws s3 cp --only-show-errors "$@" ;;
    *) cp -r "$1" "$2" ;;
  esac
}

secret() { # FROM TO: a file that root alone may read, from its first byte on
  (umask 077 && rm -f "$2" && fetch "$1" "$2" && chmod 0600 "$2")
}

install_package() {
  command -v python3.11 >/dev/null || dnf install -y -q python3.11 || return 1
  python3.11 -m venv "$ROOT$HOME_DIR" || return 1
  local package=${HEALTHD_PACKAGE%/}
  if [[ $package == s3://* ]]; then
    local whole=(--recursive)
    [[ $package != *.whl ]] || whole=()
    fetch "$package" "/tmp/${package##*/}" "${whole[@]}" && package=/tmp/${package##*/} || return 1
  fi
  local what=("$package")
  [[ ! -d $package ]] || what=(--no-index --find-links "$package" healthd)
  "$ROOT$HOME_DIR/bin/pip" install --quiet --disable-pip-version-check "${what[@]}"
}

configure() {
  local file=$ROOT/etc/healthd/healthd.toml
  mkdir -p "$ROOT/etc/healthd" "$ROOT$SHARED_DIR" || return 1
  # Gates in containers have host names of their own, and say by this one which node they are on.
  uname -n >"$ROOT$SHARED_DIR/name" || return 1
  cat >"$file" <<EOF || return 1
[node]
name = "$(<"$ROOT$SHARED_DIR/name")"
listen = "0.0.0.0:8080"
labels = { pool = "batch" }
EOF
  if [[ -n $PROBE_PYTHON ]]; then
    # The first boot compiles the probes (compile_timeout: 20 min), and what is not known yet is not fit.
    printf 'BOOT_TIER=quick\nBOOT_WAIT=25m\n' >"$ROOT/etc/healthd/boot.env"
    printf '\n[probe]\npython = "%s"\non_cold_cache = "compile"\n' "$PROBE_PYTHON" >>"$file"
  else
    # Nothing here can run the probes, so the node is not known by them, and the boot check asks for what can be read.
    echo BOOT_TIER=passive >"$ROOT/etc/healthd/boot.env"
    printf 'disabled = [%s]\n\n[node.active]\nunprompted = "off"\n' "$ACTIVE_CHECKS" >>"$file"
  fi
  [[ -n $AGGREGATOR ]] || return 0
  printf '\n[node.sync]\naggregators = ["%s"]\n' "${AGGREGATOR//,/\", \"}" >>"$file"
  if [[ -n $TOKEN ]]; then
    secret "$TOKEN" "$ROOT/etc/healthd/token" || return 1
    echo 'token_file = "/etc/healthd/token"' >>"$file"
  fi
  if [[ -n $CA ]]; then
    fetch "$CA" "$ROOT$SHARED_DIR/ca.crt" || return 1
    echo "ca_file = \"$SHARED_DIR/ca.crt\"" >>"$file"
  fi
  [[ -z $GATE_TOKEN ]] || secret "$GATE_TOKEN" "$ROOT$SHARED_DIR/gate.token"
}

install_units() {
  local from=/tmp/healthd-systemd to=$ROOT/etc/systemd/system
  rm -rf "$from" && fetch "$UNITS" "$from" --recursive || return 1
  mkdir -p "$to" "$ROOT$HOME_DIR/libexec" || return 1
  cp "$from/healthd-node.service" "$from/healthd-boot.service" "$to/" || return 1
  install -m 0755 "$from/healthd-boot" "$ROOT$HOME_DIR/libexec/healthd-boot"
}

require_boot() { # written first of all: if the rest fails, the agent must not start
  mkdir -p "$ROOT/etc/systemd/system/ecs.service.d" || return 1
  cat >"$ROOT/etc/systemd/system/ecs.service.d/healthd.conf" <<EOF
[Unit]
Requires=healthd-boot.service
After=healthd-boot.service

[Service]
ExecCondition=/bin/systemctl is-active --quiet healthd-boot.service
EOF
}

replace_broken() {
  mkdir -p "$ROOT/etc/systemd/system/healthd-boot.service.d" &&
    cp /tmp/healthd-systemd/replace.conf "$ROOT/etc/systemd/system/healthd-boot.service.d/replace.conf"
}

main() {
  [[ $ENFORCE != yes ]] || require_boot || say "the agent could not be made to wait for a fit node"
  install_package || { say "the package could not be installed: $HEALTHD_PACKAGE"; return 1; }
  configure || { say "/etc/healthd could not be written"; return 1; }
  install_units || { say "the units could not be installed from $UNITS"; return 1; }
  [[ $ENFORCE != yes || $REPLACE != yes ]] || replace_broken || say "replace.conf could not be installed"
}

# Folders that jobs' containers mount.
mkdir -p "$ROOT/var/lib/healthd/compile-cache"
if main; then
  systemctl daemon-reload
  systemctl enable --now --no-block healthd-node.service healthd-boot.service
  say "installed; the ECS agent starts after the boot check"
else
  systemctl daemon-reload
  say "not installed; with ENFORCE=yes no job comes to this machine, else jobs come unchecked"
  exit 1
fi
