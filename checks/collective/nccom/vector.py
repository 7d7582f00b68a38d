"""
The words with which mpirun has its daemon started on a node, and which of them we accept. Pure.

Whoever starts that daemon gives the node to mpirun: it runs what it is told. So it is started only with the very words
of the planned round: the daemon of Open MPI by its own name, parameters from a list, mpirun's one job, a host of the
round, and a call back to the main node alone. What is not understood is refused, with a reason.

    HOST  [PATH=...; export PATH; ...]  orted [--daemonize] -mca NAME "VALUE" ...

Source: Open MPI 4.1, orte/mca/plm/rsh/plm_rsh_module.c, and what its mpirun 4.1.4 was seen to hand to its agent, by
name and by absolute path. Unverified: Open MPI 5, whose daemon is prted: its words are from PRRTE's source
(src/mca/plm/ssh) and have not been seen.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checks.collective.nccom.launch import Plan

MAX_WORDS = 512
MAX_CHARACTERS = 128 * 1024  # the list of nodes grows with the round
DAEMONS = ("orted", "prted")
_PARAMETER = ("-mca", "--mca", "-prtemca", "--prtemca", "-pmixmca", "--pmixmca")
_JOB = ("ess_base_jobid", "ess_base_nspace")
_ALONE = ("plm_rsh_no_tree_spawn", "plm_ssh_no_tree_spawn")
_CALLBACK = ("orte_hnp_uri", "prte_hnp_uri")
_NUMBER = re.compile(r"\d{1,10}")
_WORDS = re.compile(r"\^?[A-Za-z0-9_]+(,\^?[A-Za-z0-9_]+)*")
_POLICY = re.compile(r"[A-Za-z0-9_:,=-]{1,128}")
_NETWORKS = re.compile(r"[A-Za-z0-9_.:/,-]{1,512}")
_NODES = re.compile(r"[A-Za-z0-9_.:,@()\[\]*-]{1,100000}")
_JOB_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,256}")
_URI = re.compile(r"(?P<head>[A-Za-z0-9_.@-]{1,256})(?P<places>(?:;tcp[46]?://[0-9A-Za-z.:,\[\]-]+:\d{1,5}){1,4})")

# What mpirun may tell its daemon. No name of a file, a folder or a program is among them.
_ALLOWED: dict[str, re.Pattern[str]] = {
    "ess": re.compile("env"),
    "ess_base_jobid": _NUMBER,
    "ess_base_nspace": _JOB_NAME,
    "ess_base_vpid": _NUMBER,
    "ess_base_num_procs": _NUMBER,
    "orte_node_regex": _NODES,
    "orte_hnp_uri": _URI,
    "prte_hnp_uri": _URI,
    "plm": re.compile("rsh|ssh"),
    "plm_rsh_no_tree_spawn": re.compile("1"),
    "plm_ssh_no_tree_spawn": re.compile("1"),
    "routed": re.compile("direct|radix|binomial"),
    "pmix": _WORDS,
    "btl": _WORDS,
    "mtl": _WORDS,
    "pml": _WORDS,
    "oob_tcp_if_include": _NETWORKS,
    "oob_tcp_if_exclude": _NETWORKS,
    "btl_tcp_if_include": _NETWORKS,
    "btl_tcp_if_exclude": _NETWORKS,
    "rmaps_ppr_n_pernode": _NUMBER,
    "rmaps_base_mapping_policy": _POLICY,
    "rmaps_base_ranking_policy": _POLICY,
    "rmaps_base_oversubscribe": re.compile("[01]"),
    "rmaps_base_no_oversubscribe": re.compile("[01]"),
    "hwloc_base_binding_policy": _POLICY,
    "orte_leave_session_attached": re.compile("[01]"),
}
# The daemon has no use for it: it starts no others.
_DROPPED = ("plm_rsh_agent", "plm_ssh_agent")
# mpirun that was called by its path writes this before the daemon, for a shell that is not there.
_EXPORT = re.compile(r"DYLD_LIBRARY_PATH|LD_LIBRARY_PATH|PATH|PRTE_PREFIX|PMIX_PREFIX")
_SETTING = re.compile(rf"(?:{_EXPORT.pattern})=[A-Za-z0-9_./:${{}}-]*")


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """
    What to start on `host`: `argv`, in the foreground, its program to be found by name in our own PATH.

    `job_id` is mpirun's; the plan takes it over from the first one. `daemon` is the number of the daemon, 1 and up.
    """

    host: str
    argv: tuple[str, ...]
    job_id: str
    daemon: int


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Why not: one line."""

    reason: str


class _RefusedError(Exception):
    """Carries the reason out of the parts."""


def accepts(plan: Plan, argv: Sequence[str], *, me: str | None = None) -> Accepted | Refused:
    """
    Judge what mpirun handed its agent: the host, then the words. `me`: the host must be this one (None: any).

    The vector that comes back is not mpirun's but written anew from what was understood.
    """
    try:
        return _accepted(plan, argv, me)
    except _RefusedError as error:
        return Refused(reason=str(error))


def _accepted(plan: Plan, argv: Sequence[str], me: str | None) -> Accepted:
    _require(plan.mode == "carried", f"round {plan.round} starts nothing by an agent")
    _require(len(argv) > 1, "no host and no program")
    _require(len(argv) <= MAX_WORDS and sum(map(len, argv)) <= MAX_CHARACTERS, "too many words")
    host = argv[0]
    _require(host in plan.hosts, f"{host[:64]!r} is no host of round {plan.round}")
    _require(me is None or host == me, f"meant for {host}, and this is {me}")
    words = _without_settings(_split(" ".join(argv[1:])))
    program = words[0].rpartition("/")[2] if words else ""
    _require(program in DAEMONS, f"{program[:64]!r} is no daemon of Open MPI; accepted are {', '.join(DAEMONS)}")
    told = _parameters(words[1:])
    job = _job(plan, told)
    daemon = int(told.get("ess_base_vpid", ("", "0"))[1])
    count = int(told.get("ess_base_num_procs", ("", "0"))[1])
    _require(count in (len(plan.hosts), len(plan.hosts) + 1), f"{count} daemons for {len(plan.hosts)} hosts")
    _require(0 < daemon < count, f"daemon {daemon} of {count}")
    _require(any(name in told for name in _ALONE), "the daemon may start others; plm_rsh_no_tree_spawn must be 1")
    _require(any(name in told for name in _CALLBACK), "it would call nobody back")
    vector = [program]
    for name, (flag, value) in told.items():
        if name not in _DROPPED:
            vector += [flag, name, _callback(plan, job, value) if name in _CALLBACK else value]
    return Accepted(host=host, argv=tuple(vector), job_id=job, daemon=daemon)


def _split(text: str) -> list[str]:
    """As a shell would, were it to be trusted: what a shell would expand, redirect or run besides is refused later."""
    _require(text.isprintable(), "control characters")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>()")
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError as error:
        raise _RefusedError(f"quotes do not fit: {error}") from None


def _without_settings(words: list[str]) -> list[str]:
    """Without what sets and exports search paths: we have our own."""
    while ";" in words:
        cut = words.index(";")
        part = words[:cut]
        setting = len(part) == 1 and _SETTING.fullmatch(part[0])
        export = len(part) == 2 and part[0] == "export" and _EXPORT.fullmatch(part[1])
        _require(bool(setting or export), f"a command of the shell: {' '.join(part)[:64]!r}")
        words = words[cut + 1 :]
    return words


def _parameters(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Parameter -> the flag it came with and its value."""
    told: dict[str, tuple[str, str]] = {}
    rest: Iterator[str] = iter(words)
    for word in rest:
        if word == "--daemonize":
            continue  # we keep it in the foreground, in a group that ends with the round
        _require(word in _PARAMETER, f"{word[:64]!r} is not expected")
        name, value = next(rest, ""), next(rest, "")
        known = _ALLOWED.get(name)
        _require(known is not None or name in _DROPPED, f"parameter {name[:64]!r} is not accepted")
        _require(known is None or bool(known.fullmatch(value)), f"parameter {name} is {value[:64]!r}")
        _require(name not in told, f"parameter {name} comes twice")
        told[name] = (word, value)
    return told


def _job(plan: Plan, told: dict[str, tuple[str, str]]) -> str:
    """The job of mpirun: one, and the round's own."""
    found = [told[name][1] for name in _JOB if name in told]
    _require(len(found) == 1, "the job of mpirun is not named, or twice")
    _require(plan.job_id in (None, found[0]), f"job {found[0]} is not job {plan.job_id} of round {plan.round}")
    return found[0]


def _callback(plan: Plan, job: str, value: str) -> str:
    """Where the daemon calls back: of the addresses that mpirun has those that are the main node's."""
    match = _URI.fullmatch(value)
    _require(match is not None and match["head"] == f"{job}.0", "it would call back to another job")
    kept = []
    for place in match["places"].split(";")[1:] if match else ():
        scheme, _, rest = place.partition("://")
        addresses, _, port = rest.rpartition(":")
        ours = [one for one in addresses.split(",") if one.strip("[]") in plan.main_addresses]
        if ours:
            kept.append(f"{scheme}://{','.join(ours)}:{port}")
    _require(bool(kept), "it would call back to a host that is not the main node")
    return f"{job}.0;{';'.join(kept)}"


def _require(held: bool, text: str) -> None:
    if not held:
        raise _RefusedError(text)
