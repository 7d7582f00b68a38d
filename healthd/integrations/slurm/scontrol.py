"""
Slurm nodes as `scontrol` shows them, and who drained them: for the hooks and for the actuator.

A Slurm node has one reason, so each drain is signed in it: `healthd: ...` by the node's own hooks (HealthCheckProgram,
gate), `OWNER-fleet: ...` by the aggregator. A drain is only undone by its owner, and with UNDRAIN: RESUME would also
return a node to service that someone else set down or failed.

Verified against Slurm 22.05.8 (Debian 12).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from checks.printable import printable
from healthd.core.errors import BadInputError, HealthdError
from healthd.core.threads import CalledOffError, Programs

MARK = "healthd: "
"""How the reason of a drain begins that is the node's own word."""

# The controller answers in milliseconds; its own time-out (MessageTimeout) is 10 s.
SCONTROL_SECONDS = 15.0
MAX_OUTPUT_BYTES = 64 << 20
MAX_REASON_LENGTH = 240

# A name for exactly one node: brackets and commas are lists, and NodeName=ALL is every node of the cluster.
_ONE_NODE = re.compile(r"(?!(?i:all)$)[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_BY = re.compile(r"^(.*?) ?\[([^\[\]@]*)@([^\[\]@]*)\]$")
_FIRST = re.compile(r"^NodeName=(\S+)")
_STATE = re.compile(r"^\s+State=(\S+)")
_REASON = re.compile(r"^\s+Reason=(.*)$")

OUT_OF_SERVICE = frozenset({"DRAIN", "DOWN", "FAIL", "FUTURE"})
POWERED_OFF = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN"})


class SlurmError(HealthdError):
    """Slurm's controller could not be asked, or it refused."""


@dataclass(frozen=True, kw_only=True)
class SlurmNode:
    """
    A node as Slurm has it. `states` is its state and flags (IDLE, DRAIN, ...).

    `reason` is why it is out, empty when it has none; `reason_at` when that was said, in seconds since the epoch, None
    where unknown.
    """

    name: str
    states: frozenset[str]
    reason: str
    reason_at: float | None

    @property
    def drained(self) -> bool:
        """Whether nothing new is placed on it because somebody said so."""
        return "DRAIN" in self.states

    @property
    def out(self) -> bool:
        """Whether it is out of service for whatever cause."""
        return bool(self.states & OUT_OF_SERVICE)

    @property
    def off(self) -> bool:
        """Whether power saving has stopped it: what comes back under its name is another start, or another machine."""
        return bool(self.states & POWERED_OFF)

    def bears(self, mark: str) -> bool:
        """Whether it is drained with a reason that begins so."""
        return self.drained and self.reason.startswith(mark)


def parse_nodes(text: str) -> tuple[SlurmNode, ...]:
    """
    The nodes in the output of `scontrol show node`.

    BadInputError for what is none: a node without a state is not known. Comments, which anybody may write, have lines
    of their own and say nothing here.
    """
    nodes: list[SlurmNode] = []
    name, states, reason = "", frozenset[str](), ""
    for line in [*text.split("\n"), "NodeName=end"]:
        if first := _FIRST.match(line):
            if name:
                if not states:
                    raise BadInputError(f"scontrol show node: {name[:80]!r} has no State")
                nodes.append(_node(name, states, reason))
            name, states, reason = first[1], frozenset(), ""
        elif name and not states and (state := _STATE.match(line)):
            states = frozenset(part for part in re.split(r"[+*~#!%$@^-]", state[1].upper()) if part)
        elif name and not reason and (said := _REASON.match(line)):
            reason = said[1].strip()
    return tuple(nodes)


def _node(name: str, states: frozenset[str], said: str) -> SlurmNode:
    match = _BY.match(said)
    reason, when = (match[1], _seconds(match[3])) if match else (said, None)
    if reason in ("(null)", "none"):
        reason = ""
    # Older releases write DRAINED and DRAINING where newer ones have the flag beside the state.
    whole = states | {"DRAIN"} if states & {"DRAINED", "DRAINING"} else states
    return SlurmNode(name=name, states=frozenset(whole), reason=reason, reason_at=when)


def _seconds(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def one_node(name: str) -> bool:
    """Whether a name can only mean one node to scontrol: never a list, and never ALL."""
    return _ONE_NODE.fullmatch(name) is not None


def reason_text(mark: str, why: str) -> str:
    """A reason that begins with the mark: one printable line that Slurm shows whole."""
    # Slurm's own tools want less than a terminal bears.
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in printable(" ".join(why.split()))).split())
    line = line.replace('"', "'").replace("|", "/")
    return (mark + (line or "no reason given"))[:MAX_REASON_LENGTH].rstrip()


class Scontrol:
    """`scontrol`, with what it says as data and its errors as SlurmError. `environ` None is this process's own."""

    def __init__(
        self,
        program: str = "scontrol",
        *,
        environ: Mapping[str, str] | None = None,
        timeout_seconds: float = SCONTROL_SECONDS,
    ) -> None:
        self._program = program
        self._environ = environ
        self._timeout_seconds = timeout_seconds
        self._programs = Programs()

    def afresh(self) -> Scontrol:
        """Another one like this that has not been called off: for the calls that are called off together."""
        return Scontrol(self._program, environ=self._environ, timeout_seconds=self._timeout_seconds)

    def cancel(self) -> None:
        """End a call that another thread is in, with the program and what it has started; no other is begun."""
        self._programs.cancel()

    def nodes(self) -> tuple[SlurmNode, ...]:
        """All nodes of the cluster, those of hidden partitions too."""
        return self._parsed(self._run("--all", "show", "node"))

    def node(self, name: str) -> SlurmNode | None:
        """One node; None when Slurm has none of that name."""
        if not one_node(name):
            return None
        try:
            text = self._run("--all", "show", "node", name)
        except SlurmError as error:
            if "not found" in str(error):
                return None
            raise
        return next((node for node in self._parsed(text) if node.name == name), None)

    def drain(self, name: str, reason: str) -> None:
        """Place nothing new on a node; jobs that run there go on."""
        self._update(name, "State=DRAIN", f"Reason={reason}")

    def undrain(self, name: str) -> None:
        """Take a drain away and leave the node as it otherwise is. Look at whose it is first."""
        self._update(name, "State=UNDRAIN")

    def explain(self, job: str, why: str) -> None:
        """
        Write why a job waits where its owner can read it, unless an administrator's own comment is there.

        Empty takes our own comment back.
        """
        shown = self._run("show", "job", job)
        comment = re.search(r"^\s*AdminComment=(.*)$", shown, re.MULTILINE)
        said = "" if comment is None else comment[1].strip().removeprefix("(null)")
        if said.startswith(MARK) or (why and not said):
            self._run("update", f"JobId={job}", f"AdminComment={why}")

    def settings(self) -> Mapping[str, str]:
        """slurm.conf as the controller has it, by key; empty where a key has no value."""
        lines = (line.partition("=") for line in self._run("show", "config").splitlines())
        pairs = ((key.strip(), value.strip()) for key, separator, value in lines if separator)
        return {key: "" if value in ("(null)", "(none)") else value for key, value in pairs}

    def hostnames(self, text: str) -> tuple[str, ...]:
        """
        The nodes of a hostlist expression.

        scontrol answers a list that is cut short with exit code 0 and pieces of names: count what comes back.
        """
        return tuple(self._run("show", "hostnames", text).split())

    def _update(self, name: str, *words: str) -> None:
        if not one_node(name):
            raise SlurmError(f"Slurm: {name[:80]!r} is not a single node; nothing was changed")
        self._run("update", f"NodeName={name}", *words)

    def _parsed(self, text: str) -> tuple[SlurmNode, ...]:
        try:
            return parse_nodes(text)
        except BadInputError as error:
            raise SlurmError(f"Slurm: {error}; does healthd support this release? (scontrol -V)") from None

    def _run(self, *words: str) -> str:
        """Standard output; SlurmError says what scontrol said."""
        try:
            done = self._programs.run(
                [self._program, *words], timeout_seconds=self._timeout_seconds, environ=self._environ
            )
        except CalledOffError:
            raise SlurmError(f"Slurm: scontrol {words[0]} was cancelled before it began") from None
        except FileNotFoundError:
            raise SlurmError(f"Slurm: no program {self._program!r}; put Slurm's bin directory into PATH") from None
        except subprocess.TimeoutExpired:
            raise SlurmError(
                f"Slurm: scontrol {words[0]} did not respond in {self._timeout_seconds:.0f} s; is slurmctld running?"
            ) from None
        except OSError as error:
            raise SlurmError(f"Slurm: {self._program} cannot be run: {error.strerror}") from None
        out = done.stdout[:MAX_OUTPUT_BYTES].decode("utf-8", "replace")
        if done.returncode != 0:
            said = " ".join((done.stderr.decode("utf-8", "replace") + " " + out[:400]).split())[:300]
            raise SlurmError(f"Slurm: scontrol {words[0]} failed ({done.returncode}): {said or 'no output'}")
        return out
