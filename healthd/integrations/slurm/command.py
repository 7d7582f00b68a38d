"""`healthd slurm`: what Slurm's hooks run; the scripts that call it are in deploy/slurm."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from healthd.cli.fleet.line import gate_client
from healthd.cli.hooks.readiness import Fitness, ask_readiness
from healthd.cli.settings.options import aggregator_option, common_options, load_settings
from healthd.cli.settings.tree import Settings
from healthd.cli.terminal.output import told
from healthd.core.errors import ConfigError, HealthdError, NotFoundError, OutputError, UnreachableError
from healthd.core.model import Decision, Verdict
from healthd.core.text import counted
from healthd.hooks.stopping import Stopped, stoppable
from healthd.integrations.slurm.doctor import doctor
from healthd.integrations.slurm.health import Step, culprits, next_step, refusal
from healthd.integrations.slurm.jobs import SlurmJob, at_fault, gate_name, outcome_of, read_ids, read_job
from healthd.integrations.slurm.scontrol import MARK, Scontrol, SlurmError, one_node, reason_text

if TYPE_CHECKING:
    from healthd.core.http.gates import GateClient

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
