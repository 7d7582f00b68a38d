"""`healthd slurm doctor`: whether Slurm's hooks can run here, as the user that runs it. Changes nothing."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from healthd.cli.hooks.readiness import ask_readiness
from healthd.cli.settings.options import aggregator_option, common_options, load_settings
from healthd.cli.settings.tree import Settings
from healthd.cli.support.doctor import Item
from healthd.core.errors import ConfigError, HealthdError
from healthd.core.file_trust import check_file
from healthd.integrations.slurm.scontrol import Scontrol, SlurmError

FINE, MISSING = 0, 1
PROBED_GATE = "healthd-slurm-doctor"
"""A gate that nobody has: giving it back needs the scope that asking for one needs, and changes nothing."""
NOT_FOUND = 404
ASK_SECONDS = 5.0

# Key of slurm.conf -> the words that must be among its own, and what happens without them.
WORDS = {
    "PrologFlags": (
        ("Alloc", "Contain", "DeferBatch"),
        "hooks run too late, and nodes do not see which job they belong to",
    ),
    "SchedulerParameters": (
        ("nohold_on_prolog_fail",),
        "a job whose prolog fails is held until it is released by hand",
    ),
    "HealthCheckNodeState": (("ANY",), "drained nodes are never resumed"),
}
TIMEOUT = "PrologEpilogTimeout"
"""How long Slurm waits for any of its hooks; 65534 is for ever."""
LEAST_SECONDS = 600
"""The default of `gate_wait` in the hooks."""
CONTROLLER_HOOKS = ("PrologSlurmctld", "EpilogSlurmctld")
NODE_HOOKS = ("Prolog", "HealthCheckProgram")
NODE_TOOLS = ("curl", "logger")


@click.command(short_help="Check whether the hooks can run here.")
@common_options
@aggregator_option
@click.option("--local-url", metavar="URL", help="URL of this node's daemon.")
@click.option(
    "--node", metavar="N", help=("Check a node's hooks (default: SLURMD_NODENAME; if unset, the controller's).")
)
@click.option("--json", "as_json", is_flag=True, help="Print only JSON.")
def doctor(node: str | None, as_json: bool, **options: Any) -> int:
    """
    Report what keeps Slurm's hooks from running here, and how to fix it. Check the controller as SlurmUser, as Slurm
    does.

    In observe mode the hooks run this check themselves, because their exit code has no effect there. The result is in
    the system log; in enforce mode, each problem it reports would send every job back to the queue.

    Exit code 0: nothing is missing. 1: something is missing.
    """
    settings = load_settings(options, section="gate")
    name = node or os.environ.get("SLURMD_NODENAME")
    items = list(examine(settings, Scontrol(), name))
    if as_json:
        sys.stdout.write(json.dumps([asdict(item) for item in items]) + "\n")
    else:
        from healthd.cli.terminal import render

        render.print_items([(item.name, item.state, item.text, item.remedy) for item in items])
    return MISSING if any(item.state == "missing" for item in items) else FINE


def examine(settings: Settings, scontrol: Scontrol, node: str | None) -> Iterator[Item]:
    """Everything that the hooks of a node need, or (None) those of the controller."""
    try:
        slurm = scontrol.settings()
    except SlurmError as error:
        yield Item("scontrol", "missing", str(error), "the hooks set PATH themselves: see the first lines of each")
        slurm = {}
    else:
        yield Item("scontrol", "ok", f"the controller of cluster {slurm.get('ClusterName', '?')} responds")
        yield _user(slurm, node)
        yield from judge(slurm, NODE_HOOKS if node else CONTROLLER_HOOKS)
    if node is None:
        yield _aggregator(settings)
        return
    yield from _known(scontrol, node)
    yield _daemon(settings)
    yield from (_tool(tool) for tool in NODE_TOOLS)


def judge(slurm: Mapping[str, str], hooks: tuple[str, ...]) -> Iterator[Item]:
    """What slurm.conf says of the hooks, and whether this user can run them."""
    for key, (wanted, without) in WORDS.items():
        there = {word.strip().lower() for word in slurm.get(key, "").replace("+", ",").split(",")}
        lacking = [word for word in wanted if word.lower() not in there]
        if lacking:
            text = f"lacks {', '.join(lacking)}: {without}"
            yield Item(key, "missing", text, f"slurm.conf: {key}={slurm.get(key, '')}; add it and restart slurmctld")
        else:
            yield Item(key, "ok", slurm[key])
    seconds = slurm.get(TIMEOUT, "").partition(" ")[0]
    if "PrologSlurmctld" in hooks and seconds.isdecimal() and 0 < int(seconds) <= LEAST_SECONDS:
        text = f"{seconds} s: Slurm kills the hook of a gate that holds longer and requeues the job"
        yield Item(TIMEOUT, "note", text, "set it to more than gate_wait in hooks.conf, which is 10m by default")
    for key in hooks:
        yield _hook(key, slurm.get(key, ""))


def _hook(key: str, path: str) -> Item:
    """A script of slurm.conf: it must be there, this user must be able to run it, and nobody else to change it."""
    if not path:
        return Item(key, "note", "is not set, so it runs nothing of healthd", "docs/slurm.md, step 2")
    script = Path(path.split(",")[0].split("[")[0])
    if not script.is_file() or not os.access(script, os.R_OK | os.X_OK):
        return Item(key, "missing", f"{script} does not exist, or {_me()} cannot run it", f"chmod 755 {script}")
    try:
        for file in (script, script.with_name("hooks.conf")):
            check_file(file, "hook")
    except ConfigError as error:
        return Item(key, "missing", str(error), "the program it names runs as root")
    return Item(key, "ok", str(script))


def _user(slurm: Mapping[str, str], node: str | None) -> Item:
    wanted = "root" if node else slurm.get("SlurmUser", "root").partition("(")[0]
    if wanted == _me():
        return Item("user", "ok", wanted)
    text = f"this is {_me()}, but the hooks run as {wanted}: their permissions may differ"
    return Item("user", "note", text, f"sudo -u {wanted} healthd slurm doctor")


def _aggregator(settings: Settings) -> Item:
    """Whether it answers, and whether the token may ask for gates."""
    from healthd.core.http.client import Aggregator, RefusedError

    name = "aggregator"
    try:
        with Aggregator(settings.endpoint(), slack_seconds=ASK_SECONDS) as aggregator:
            aggregator.call("DELETE", f"/v1/gates/{PROBED_GATE}/lease", hold_seconds=0.0)
    except RefusedError as error:
        if error.status != NOT_FOUND:
            return Item(name, "missing", str(error), "a token with the scope gate: 'healthd token NAME --scope gate'")
    except HealthdError as error:
        return Item(name, "missing", str(error), "[gate] aggregator, token_file, ca_file in /etc/healthd/healthd.toml")
    return Item(name, "ok", "responds and accepts gates from this hook")


def _known(scontrol: Scontrol, node: str) -> Iterator[Item]:
    try:
        if scontrol.node(node) is None:
            yield Item("node", "missing", f"Slurm has no node {node!r}", "give its NodeName with --node")
    except SlurmError as error:
        yield Item("node", "missing", str(error))


def _daemon(settings: Settings) -> Item:
    found = ask_readiness(settings.gate.local_url, {"exclude": "allocated"})
    if found.fit is None:
        return Item("daemon", "missing", found.why, "start 'healthd node', or set node_url in hooks.conf")
    return Item("daemon", "ok", "answers: ready" if found.fit else f"responds: not ready: {found.why}")


def _tool(name: str) -> Item:
    path = shutil.which(name)
    if path is None:
        return Item(name, "missing", "is not in PATH", f"install it; the hooks need {name}")
    return Item(name, "ok", path)


def _me() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
