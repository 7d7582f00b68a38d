"""`healthd slurm`: what Slurm's hooks run; the scripts that call it are in deploy/slurm."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checks.contract import Blame, Status
from healthd.cli.fleet.line import gate_client
from healthd.cli.settings.gate import GateSettings
from healthd.cli.settings.options import aggregator_option, common_options, load_settings
from healthd.cli.settings.tree import Settings
from healthd.cli.support.doctor import Item
from healthd.cli.terminal.output import told
from healthd.core.bounded import read_file, read_parts
from healthd.core.errors import (
    BadInputError,
    ConfigError,
    HealthdError,
    NotFoundError,
    OutputError,
    UnreachableError,
    connection_words,
)
from healthd.core.file_trust import check_file
from healthd.core.model import Decision, GateRequest, Reason, Verdict
from healthd.core.node_name import can_name
from healthd.core.platforms.slurm import (
    MARK,
    WORKLOAD,
    Scontrol,
    SlurmError,
    SlurmNode,
    gate_name,
    one_node,
    reason_text,
)
from healthd.core.redaction import redact
from healthd.core.text import counted
from healthd.hooks.launchers.slurm import expand
from healthd.hooks.stopping import Stopped, stoppable

if TYPE_CHECKING:
    from healthd.core.http.gates import GateClient


# What slurmctld tells its prolog and epilog of a job, as a request to the aggregator. Pure but for the host names.


MAX_JOB = 2**32


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """
    A job that slurmctld is about to start on `nodes` (empty: Slurm says that it has 0).

    `attempt` is how often it was put back into the queue. `workload` is what its nodes will show it as.
    """

    id: str
    attempt: int
    nodes: tuple[str, ...]
    workload: str

    @property
    def name(self) -> str:
        """What its gate is called."""
        return gate_name(self.id)

    def request(self, asked: GateSettings) -> GateRequest:
        """The question to the aggregator. Slurm has chosen the nodes, so all of them must be good."""
        request = asked.request(self.name)
        return replace(request, attempt=self.attempt, nodes=self.nodes, workload=self.workload)


def read_ids(environ: Mapping[str, str]) -> tuple[str, int]:
    """The job's id and how often it was put back into the queue. ConfigError outside of slurmctld's hooks."""
    job = environ.get("SLURM_JOB_ID", "")
    if not (job.isascii() and job.isdecimal() and 0 < int(job) < MAX_JOB):
        raise ConfigError(
            f"SLURM_JOB_ID={job[:40]!r} is not a job id; slurmctld sets it for PrologSlurmctld and EpilogSlurmctld"
        )
    count = environ.get("SLURM_JOB_RESTART_COUNT") or environ.get("SLURM_RESTART_COUNT") or "0"
    if not (count.isascii() and count.isdecimal() and int(count) < MAX_JOB):
        raise ConfigError(f"SLURM_JOB_RESTART_COUNT={count[:40]!r} is not a number")
    return job, int(count)


def read_job(environ: Mapping[str, str], scontrol: Scontrol) -> SlurmJob:
    """The job of slurmctld's variables. ConfigError for what cannot be read: a part of its nodes is never asked for."""
    job, attempt = read_ids(environ)
    text = environ.get("SLURM_JOB_NODELIST", "")
    text = "" if text == "(null)" else text
    nodes = _hosts(text, scontrol) if text else ()
    said = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_JOB_NNODES")
    if said is not None and said != str(len(nodes)):
        raise ConfigError(f"Slurm: job {job} has {said[:20]} nodes, but {text[:80]!r} lists {len(nodes)}")
    if not nodes and (text or said is None):
        raise ConfigError(f"Slurm: job {job} has no list of nodes: SLURM_JOB_NODELIST={text[:80]!r}; not admitted")
    if len(set(nodes)) != len(nodes):
        raise ConfigError(f"Slurm: {text[:80]!r} lists a node twice")
    shown = environ.get("SLURM_HET_JOB_ID", "")
    leader = shown if shown.isascii() and shown.isdecimal() and int(shown) > 0 else job
    return SlurmJob(id=job, attempt=attempt, nodes=nodes, workload=f"{WORKLOAD}{leader}")


def _hosts(text: str, scontrol: Scontrol) -> tuple[str, ...]:
    """
    The nodes of a hostlist expression, by Slurm itself, else as it is documented.

    scontrol answers what it cannot read with exit code 0, so the two must agree wherever both have an answer.
    """
    try:
        by_slurm = scontrol.hostnames(text)
    except SlurmError:
        return expand(text)
    try:
        by_us = expand(text)
    except ConfigError:
        by_us = by_slurm
    if set(by_us) != set(by_slurm):
        raise ConfigError(f"Slurm: {text[:80]!r} is ambiguous: scontrol reads it as {','.join(by_slurm)[:80]!r}")
    return by_slurm


def outcome_of(environ: Mapping[str, str]) -> tuple[str, str]:
    """How the job ended as `healthd gate outcome` says it, and a line for people. Slurm does not say whose fault."""
    code, _, number = environ.get("SLURM_JOB_EXIT_CODE2", "").partition(":")
    if (code, number) == ("0", "0"):
        return "ok", "exit code 0"
    return "failed", f"exit code {code or 'unknown'}" + (f", signal {number}" if number not in ("", "0") else "")


def _coded(reason: Reason) -> str:
    """The code first: `sinfo -R` shows twenty columns, of which our mark takes nine."""
    return reason.message if reason.message.startswith(reason.code) else f"{reason.code}: {reason.message}"


def at_fault(decision: Decision) -> tuple[tuple[str, str], ...]:
    """
    The nodes that a decision leaves out for their own fault, with the reason: what failed by positive evidence.

    A node that is silent, busy or unknown is no evidence against it.
    """
    found: list[tuple[str, str]] = []
    for node in decision.excluded:
        for reason in node.reasons:
            if reason.code == "Quarantined" or (reason.status is Status.FAIL and reason.blame is Blame.NODE):
                found.append((node.asked or node.node, _coded(reason)))
                break
    return tuple(found)


# What the daemon of a node says of itself at `/readyz`: for hooks that go by the node's own verdict.


TIMEOUT_SECONDS = 5.0
"""For the whole answer: the daemon has its verdict ready."""

MAX_BYTES = 64 << 10
"""A line for each check is some kilobytes; more is not a daemon of ours."""


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """What a node's daemon says of itself. `fit` None: nobody knows. `why` is one line, empty when it is fit."""

    fit: bool | None
    why: str


def ask_readiness(url: str, query: Mapping[str, str]) -> Fitness:
    """
    Whether the daemon at `url` calls its node ready. Never raises: what cannot be understood is `fit=None`.

    Another program on that port may well answer 200, so only the daemon's own words count.
    """
    found = _ask_daemon(url, query)
    return Fitness(fit=found.fit, why=redact(found.why))  # the URL may hold a password


def _ask_daemon(url: str, query: Mapping[str, str]) -> Fitness:
    import httpx

    from healthd.core.http.trust import verification

    path = f"{url.rstrip('/')}/readyz"
    end = time.monotonic() + TIMEOUT_SECONDS
    try:
        verify = verification(path)
        with httpx.stream(
            "GET", path, params=dict(query), timeout=TIMEOUT_SECONDS, trust_env=False, verify=verify
        ) as answer:
            body = read_parts(answer.iter_bytes(), MAX_BYTES, until=end)
    except BadInputError:
        return Fitness(fit=None, why=f"{path} returned an endless answer, so it is not healthd")
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return Fitness(fit=None, why=f"the node's daemon at {url} cannot be reached: {connection_words(error)}")
    lines = [line.strip() for line in body.decode("utf-8", "replace").splitlines() if line.strip()]
    first, last = (lines[0], lines[-1]) if lines else ("", "")
    if answer.status_code == httpx.codes.OK and len(lines) == 1 and _speaks(last, "ready"):
        return Fitness(fit=True, why="")
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and _speaks(last, "not ready"):
        return Fitness(fit=False, why=first)
    return Fitness(fit=None, why=f"{path} returned HTTP {answer.status_code}, so it is not healthd: {first[:200]}")


def _speaks(line: str, word: str) -> bool:
    """Whether a daemon ends its answer by this line: the name of its node, and the word."""
    name = line.removesuffix(f" is {word}")
    return name != line and can_name(name)


# `healthd slurm doctor`: whether Slurm's hooks can run here, as the user that runs it. Changes nothing.


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


# What the word of a node's own daemon means for the node in Slurm: pure, but for the file that the prolog writes.


PROLOG_ERROR = "Prolog error"
"""The reason that slurmctld itself gives when a node's prolog failed."""

# Between the prolog's word and slurmctld's drain lies a message; a minute also covers clocks that are not quite equal.
ADOPT_SECONDS = 60.0
MAX_REFUSAL_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Step:
    """What to do with a node in Slurm: drain (with `reason`), undrain or nothing; `note` says why, for the log."""

    action: str
    reason: str
    note: str


def next_step(
    node: SlurmNode, found: Fitness, *, refused_at: float | None = None, mark: str = MARK, drain_unknown: bool = True
) -> Step:
    """
    What the node's own word comes to: pure.

    `refused_at` is when our prolog refused a job here (seconds since the epoch, None never): a drain for "Prolog error"
    of that moment is ours, though slurmctld signed it. `drain_unknown`: a daemon that does not answer is no health.
    """
    adopted = (
        node.drained
        and node.reason == PROLOG_ERROR
        and refused_at is not None
        and node.reason_at is not None
        and abs(node.reason_at - refused_at) <= ADOPT_SECONDS
    )
    ours = node.bears(mark) or adopted
    if found.fit:
        if ours:
            return Step(action="undrain", reason="", note=f"is fit again; healthd had drained it ({node.reason})")
        if node.drained:
            return Step(
                action="nothing", reason="", note=f"is fit; healthd did not drain it ({node.reason or 'no reason'})"
            )
        return Step(action="nothing", reason="", note="is fit")
    if found.fit is None and not drain_unknown:
        return Step(action="nothing", reason="", note=f"is left as it is: {found.why}")
    reason = reason_text(mark, found.why)
    if ours and not adopted:
        return Step(action="nothing", reason="", note=f"is drained already ({node.reason})")
    if node.off:
        return Step(action="nothing", reason="", note="is powered off; no drain is needed")
    if node.out and not adopted:
        return Step(action="nothing", reason="", note=f"is out of service by others ({node.reason or 'no reason'})")
    return Step(action="drain", reason=reason, note=found.why)


def culprits(nodes: Sequence[tuple[str, str]], *, of: int, most: int) -> tuple[tuple[str, str], ...]:
    """
    Which of the nodes (name and reason) that a gate found at fault may be drained: all, or none at all.

    What is wrong with more than `most` of a job's nodes and more than a tenth of them is hardly the nodes.
    """
    return tuple(nodes) if len(nodes) <= max(most, of // 10) else ()


def refusal(file: Path) -> float | None:
    """When the prolog last refused a job, as it wrote it (seconds since the epoch); None when it never did."""
    try:
        first = read_file(file, MAX_REFUSAL_BYTES).split(maxsplit=1)[:1]
        return float(first[0]) if first else None
    except (OSError, ValueError, BadInputError):
        return None


DONE, NOT_ADMITTED = 0, 75

# A daemon that is restarted is back within seconds; slurmd kills the whole program after 60 s.
PATIENCE_SECONDS = 20.0
PAUSE_SECONDS = 1.0
MOST_DRAINED = 2
END_PAUSES_SECONDS = (1.0, 3.0)


@click.group(short_help="Hooks for Slurm: health, gate, end; doctor.")
def slurm() -> None:
    """
    Hooks for Slurm: `health` for HealthCheckProgram, `gate` and `end` for PrologSlurmctld and EpilogSlurmctld.

    `doctor` reports what keeps them from running.

    Warning: AWS ParallelCluster terminates drained nodes. There, use `health --observe` and `gate --no-drain` until
    you want that.
    """


@slurm.command(short_help="Drain this node while its daemon reports it unfit.")
@common_options
@click.option("--node", metavar="N", help="This node's name in Slurm (default: SLURMD_NODENAME).")
@click.option("--local-url", metavar="URL", help="URL of this node's daemon.")
@click.option(
    "--on-unreachable",
    help=("hold (default): drain the node if its daemon does not respond; admit: leave the node alone."),
)
@click.option(
    "--patience",
    default=PATIENCE_SECONDS,
    type=click.FloatRange(0, 50),
    metavar="SECONDS",
    help="Maximum time to wait for a daemon that is starting.",
)
@click.option(
    "--refused",
    type=click.Path(path_type=Path),
    metavar="F",
    help="File in which the prolog notes that it refused a job.",
)
@click.option("--observe", is_flag=True, help="Print what would be done, and change nothing.")
def health(node: str | None, patience: float, refused: Path | None, observe: bool, **options: Any) -> int:
    """
    Drain this node in Slurm while its daemon reports it unfit, and resume it afterwards.

    Only drains by healthd are undone; their reason begins with 'healthd: '. A drain by anyone else stays, even on a
    node that healthd had drained before. Running jobs continue. Warning: AWS ParallelCluster terminates drained
    nodes.

    Exit code 0: done, or nothing to do. 75: Slurm could not be reached. 2: usage.
    """
    name = node or os.environ.get("SLURMD_NODENAME", "")
    if not one_node(name):
        raise ConfigError(f"--node {name!r} is not one Slurm node; slurmd sets SLURMD_NODENAME")
    settings = load_settings(options, section="gate")
    found = ask_daemon(settings.gate.local_url, patience_seconds=patience)
    scontrol = Scontrol()
    entry = scontrol.node(name)
    if entry is None:
        raise SlurmError(f"Slurm has no node {name!r}; give its NodeName with --node")
    at = None if refused is None else refusal(refused)
    step = next_step(entry, found, refused_at=at, drain_unknown=settings.gate.on_unreachable == "hold")
    return _carry_out(scontrol, name, step, observe=observe)


def _carry_out(scontrol: Scontrol, name: str, step: Step, *, observe: bool) -> int:
    if observe and step.action != "nothing":
        click.echo(f"{name} {step.note}; observe: would {step.action} it")
        return DONE
    if step.action == "drain":
        scontrol.drain(name, step.reason)
    elif step.action == "undrain":
        scontrol.undrain(name)
    click.echo(f"{name} {step.note}" + ("" if step.action == "nothing" else f": {step.action}"))
    return DONE


def ask_daemon(url: str, *, patience_seconds: float) -> Fitness:
    """What /readyz of a node's daemon says, apart from who has the node: Slurm knows that best."""
    end = time.monotonic() + patience_seconds
    while True:
        found = ask_readiness(url, {"exclude": "allocated"})
        if found.fit is not None or time.monotonic() + PAUSE_SECONDS > end:
            return found
        time.sleep(PAUSE_SECONDS)


@slurm.command(short_help="PrologSlurmctld: ask whether the job may start on its nodes.")
@common_options
@aggregator_option
@click.option("--tier", help="Evidence to require: passive, quick or deep.")
@click.option("--max-age", metavar="T", help="Maximum age of the evidence.")
@click.option("--collective/--no-collective", default=None, help="Run collectives over the nodes together first.")
@click.option("--wait", metavar="T", help="Maximum time to hold the job before it is requeued.")
@click.option("--mode", help="enforce or observe (default: the aggregator's).")
@click.option("--on-unreachable", help="hold (default) or admit.")
@click.option("--drain/--no-drain", default=True, help="Drain the nodes at fault, so that the job runs elsewhere.")
def gate(drain: bool, **options: Any) -> int:
    """
    PrologSlurmctld: ask the aggregator whether the job that slurmctld is about to start may start on its nodes.

    Exit code 0: it may. 75: it may not; slurmctld requeues a batch job and cancels a job of srun or salloc. 2: usage,
    or the token lacks permission, with the same effect.
    """
    from healthd.core.http.gates import NotAdmittedError

    settings = load_settings(options, section="gate")
    scontrol = Scontrol()
    job = read_job(os.environ, scontrol)
    if not job.nodes:
        click.echo(f"Slurm reports 0 nodes for job {job.id}: there is nothing to gate")
        return DONE
    with gate_client(settings) as aggregator:
        try:
            with stoppable() as signals:  # slurmctld itself uses SIGKILL, after which the gate ends by its own wait
                decision = signals.wait_for(lambda: _ask(aggregator, settings, job))
        except UnreachableError as error:
            admit = settings.gate.on_unreachable == "admit"
            end = "on_unreachable=admit: it starts without a gate" if admit else "not admitted (on_unreachable=hold)"
            _say(f"{error}; {end}")
            if not admit:
                _explain(scontrol, job.id, str(error))
            return DONE if admit else NOT_ADMITTED
        except NotAdmittedError as error:
            with contextlib.suppress(HealthdError):
                aggregator.withdraw(job.name, job.attempt)
            _say(f"{error}; not admitted")
            _explain(scontrol, job.id, str(error))
            return NOT_ADMITTED
        except Stopped:
            with contextlib.suppress(HealthdError):
                aggregator.withdraw(job.name, job.attempt)
            _say("stopped; the gate is withdrawn")
            return NOT_ADMITTED
    if decision.decision is Verdict.ADMIT:
        if job.attempt > 0:
            _explain(scontrol, job.id, "")
        with contextlib.suppress(OutputError), told(needed=False):  # the exit code is the answer
            on = counted(len(decision.nodes), "node")
            click.echo(f"job {job.id} is admitted on {on} (gate {decision.id})")
        if decision.would not in (None, Verdict.ADMIT):
            _say(f"without observe mode or override it would be: {decision.would.value}; see 'healthd fleet explain'")
        return DONE
    why = decision.reasons[0].message if decision.reasons else "no reason given"
    _say(f"job {job.id} is not admitted (gate {decision.id}): {why}")
    if drain:
        _drain(scontrol, decision, of=len(job.nodes))
    _explain(scontrol, job.id, f"{why} (healthd fleet explain {decision.id})")
    return NOT_ADMITTED


def _ask(aggregator: GateClient, settings: Settings, job: SlurmJob) -> Decision:
    def hold(decision: Decision) -> None:
        _say(f"job {job.id} waits: {decision.reasons[0].message if decision.reasons else 'no reason given'}")

    def away(error: UnreachableError) -> None:
        _say(f"{error}; trying again until the wait is over")

    return aggregator.ask(job.request(settings.gate), on_hold=hold, on_away=away)


def _drain(scontrol: Scontrol, decision: Decision, *, of: int) -> None:
    """Drain the nodes that the gate found at fault, so that the job lands elsewhere: never many at once."""
    bad = at_fault(decision)
    if bad and not culprits(bad, of=of, most=MOST_DRAINED):
        _say(
            f"{len(bad)} of {of} nodes are at fault: too many to drain at once, so none is drained; see 'healthd "
            "fleet status'"
        )
        return
    for name, why in bad:
        try:
            node = scontrol.node(name)
            if node is None or node.out or node.off:
                continue
            scontrol.drain(name, reason_text(MARK, why))
            _say(f"{name} is drained: {why}")
        except SlurmError as error:
            _say(f"{name} is not drained: {error}")


def _explain(scontrol: Scontrol, job: str, why: str) -> None:
    with contextlib.suppress(SlurmError):  # the log has it
        scontrol.explain(job, reason_text(MARK, why) if why else "")


@slurm.command(short_help="EpilogSlurmctld: return a job's nodes.")
@common_options
@aggregator_option
def end(**options: Any) -> int:
    """
    EpilogSlurmctld: return the nodes of a job and report how it ended.

    The nodes also see the end themselves; this is faster.

    Exit code 0: done. 75: the aggregator cannot be reached. 2: usage, or the token lacks permission.
    """
    settings = load_settings(options, section="gate")
    job, attempt = read_ids(os.environ)
    status, message = outcome_of(os.environ)
    with gate_client(settings) as aggregator:
        for pause in (*END_PAUSES_SECONDS, 0.0):
            try:
                told = aggregator.outcome(gate_name(job), attempt, status, message) is not None
                # A job that goes back into the queue has been counted up before its epilog runs.
                if told or attempt > 0:
                    with contextlib.suppress(NotFoundError):  # its nodes have seen its end already
                        aggregator.withdraw(gate_name(job), attempt if told else attempt - 1)
                return DONE
            except UnreachableError as error:
                _say(f"{error}; the nodes will see the end of job {job} themselves")
                time.sleep(pause)
    return NOT_ADMITTED


def _say(message: str) -> None:
    sys.stderr.write(f"healthd: {' '.join(message.split())}\n")


slurm.add_command(doctor)
