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
from healthd.cli.hooks.slurm_doctor import doctor
from healthd.cli.hooks.slurm_rules import Step, culprits, next_step, refusal
from healthd.cli.settings.options import common_options, load_settings
from healthd.cli.settings.tree import Settings
from healthd.cli.terminal.output import told
from healthd.core.errors import ConfigError, HealthdError, NotFoundError, OutputError, UnreachableError
from healthd.core.model import Decision, Verdict
from healthd.core.platforms.slurm import MARK, Scontrol, SlurmError, gate_name, one_node, reason_text
from healthd.core.text import counted
from healthd.hooks.stopping import Stopped, stoppable

if TYPE_CHECKING:
    from healthd.cli.hooks.slurm_job import SlurmJob
    from healthd.core.http.gate_client import GateClient

DONE, NOT_ADMITTED = 0, 75

# A daemon that is restarted is back within seconds; slurmd kills the whole program after 60 s.
PATIENCE_SECONDS = 20.0
PAUSE_SECONDS = 1.0
MOST_DRAINED = 2
END_PAUSES_SECONDS = (1.0, 3.0)


@click.group(short_help="Hooks of Slurm: health, gate, end; doctor.")
def slurm() -> None:
    """
    Hooks of Slurm: `health` for HealthCheckProgram, `gate` and `end` for PrologSlurmctld and EpilogSlurmctld.

    `doctor` says what keeps them from running.

    Warning: AWS ParallelCluster terminates nodes that are drained. There, use `health --observe` and `gate --no-drain`
    until that is what you want.
    """


@slurm.command(short_help="Drain this node while its daemon finds it unfit.")
@common_options
@click.option("--node", metavar="N", help="This node's name in Slurm (default: SLURMD_NODENAME).")
@click.option("--local-url", metavar="URL", help="URL of this node's daemon.")
@click.option("--on-unreachable", help="hold (default): a silent daemon drains the node; admit: leave the node alone.")
@click.option(
    "--patience",
    default=PATIENCE_SECONDS,
    type=click.FloatRange(0, 50),
    metavar="SECONDS",
    help="Maximum time for a daemon to start before its silence counts.",
)
@click.option("--refused", type=click.Path(path_type=Path), metavar="F", help="Where the prolog says it refused a job.")
@click.option("--observe", is_flag=True, help="Say what would be done, and do nothing.")
def health(node: str | None, patience: float, refused: Path | None, observe: bool, **options: Any) -> int:
    """
    Drain this node in Slurm while its daemon finds it unfit, and resume it afterwards: only what this drained.

    Drains bear a reason that begins with 'healthd: '. A drain of anybody else survives, also on a node that this had
    drained before. Jobs that run go on. Warning: AWS ParallelCluster terminates drained nodes.

    Exit code 0: done, or nothing to do. 75: Slurm could not be asked. 2: usage.
    """
    name = node or os.environ.get("SLURMD_NODENAME", "")
    if not one_node(name):
        raise ConfigError(f"--node {name!r} does not name one node of Slurm; slurmd says it in SLURMD_NODENAME")
    settings = load_settings(options, section="gate")
    found = ask_daemon(settings.gate.local_url, patience_seconds=patience)
    scontrol = Scontrol()
    entry = scontrol.node(name)
    if entry is None:
        raise SlurmError(f"Slurm has no node {name!r}; say its NodeName with --node")
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


@slurm.command(short_help="PrologSlurmctld: may the job start on its nodes?")
@common_options
@click.option("--aggregator", metavar="URL", help="URL of the aggregator.")
@click.option("--tier", help="Evidence to require: passive, quick or deep.")
@click.option("--max-age", metavar="T", help="Maximum age of the evidence.")
@click.option("--collective/--no-collective", default=None, help="Run collectives over the nodes together first.")
@click.option("--wait", metavar="T", help="Maximum time to hold the job before it goes back into the queue.")
@click.option("--mode", help="enforce or observe (default: the aggregator's).")
@click.option("--on-unreachable", help="hold (default) or admit.")
@click.option("--drain/--no-drain", default=True, help="Drain the nodes at fault, so that the job lands elsewhere.")
def gate(drain: bool, **options: Any) -> int:
    """
    Ask the aggregator whether the job that slurmctld is about to start may start on its nodes: PrologSlurmctld.

    Exit code 0: it may. 75: not; slurmctld puts a batch job back into the queue and cancels one of srun or salloc.
    2: usage, or a token that may not ask; it comes to the same.
    """
    from healthd.cli.hooks.slurm_job import read_job
    from healthd.core.http.gate_client import NotAdmittedError

    settings = load_settings(options, section="gate")
    scontrol = Scontrol()
    job = read_job(os.environ, scontrol)
    if not job.nodes:
        click.echo(f"Slurm says that job {job.id} has 0 nodes: nothing to ask")
        return DONE
    with gate_client(settings) as aggregator:
        try:
            with stoppable():  # slurmctld itself uses SIGKILL, after which the gate ends by its own wait
                decision = _ask(aggregator, settings, job)
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
    why = decision.reasons[0].message if decision.reasons else "no reason was given"
    _say(f"job {job.id} is not admitted (gate {decision.id}): {why}")
    if drain:
        _drain(scontrol, decision, of=len(job.nodes))
    _explain(scontrol, job.id, f"{why} (healthd fleet explain {decision.id})")
    return NOT_ADMITTED


def _ask(aggregator: GateClient, settings: Settings, job: SlurmJob) -> Decision:
    def hold(decision: Decision) -> None:
        _say(f"job {job.id} waits: {decision.reasons[0].message if decision.reasons else 'no reason was given'}")

    def away(error: UnreachableError) -> None:
        _say(f"{error}; trying again until the wait is over")

    return aggregator.ask(job.request(settings.gate), on_hold=hold, on_away=away)


def _drain(scontrol: Scontrol, decision: Decision, *, of: int) -> None:
    """Drain the nodes that the gate found at fault, so that the job lands elsewhere: never many at once."""
    from healthd.cli.hooks.slurm_job import at_fault

    bad = at_fault(decision)
    if bad and not culprits(bad, of=of, most=MOST_DRAINED):
        _say(
            f"{len(bad)} of {of} nodes are at fault: too many at once to drain, so none is; see 'healthd fleet status'"
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


@slurm.command(short_help="EpilogSlurmctld: give a job's nodes back.")
@common_options
@click.option("--aggregator", metavar="URL", help="URL of the aggregator.")
def end(**options: Any) -> int:
    """
    Give the nodes of a job back and tell how it ended: EpilogSlurmctld.

    The nodes also see the end themselves; this makes it sooner.

    Exit code 0: done. 75: the aggregator is away. 2: usage, or a token that may not tell.
    """
    from healthd.cli.hooks.slurm_job import outcome_of, read_ids

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
