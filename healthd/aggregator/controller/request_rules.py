"""Which requests for a gate are valid, and which ask for less than the policy does: pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from healthd.aggregator.controller.admission import terms_of
from healthd.aggregator.model.policy import MOST_RUNTIME_SECONDS, Policy
from healthd.core.errors import BadInputError
from healthd.core.model import LARGEST_ATTEMPT, GateRequest, GateTerm, Join, Mode, ValidationKind
from healthd.core.node_name import check_name

LONGEST_NAME = 253
"""Of a node (DNS allows as many) or a pool."""
LONGEST_JOB = 256
LONGEST_MEMBER = 128


def check_request(request: GateRequest, policy: Policy) -> None:
    """BadInputError, with one sentence, for a request that is not valid."""
    if not request.job or len(request.job) > LONGEST_JOB or not request.job.isprintable():
        raise BadInputError(f"job must be 1 to {LONGEST_JOB} printable characters, not {request.job[:40]!r}")
    if not 0 <= request.attempt <= LARGEST_ATTEMPT:
        raise BadInputError(f"attempt must be from 0 to {LARGEST_ATTEMPT}, not {request.attempt}")
    if request.join is not None:
        _check_join(request, request.join, policy)
    elif bool(request.nodes) == (request.pool is not None):
        raise BadInputError("name either nodes or a pool with a count, or join a group")
    else:
        _check_size(request, policy)
    several = len(request.nodes) > 1 or (request.count or 0) > 1
    if several and (request.workload or "").startswith("pid:"):
        text = f"workload {request.workload} is a process of one host, and several nodes are asked for"
        raise BadInputError(f"{text}; leave it out, or ask node by node")
    for name in (*request.nodes, *((request.pool,) if request.pool is not None else ())):
        if not name or len(name) > LONGEST_NAME or not name.isprintable():
            raise BadInputError(f"a name must be 1 to {LONGEST_NAME} printable characters, not {name[:40]!r}")
    if request.max_age_seconds is not None and not (
        request.max_age_seconds > 0 and math.isfinite(request.max_age_seconds)
    ):
        raise BadInputError(f"max_age_seconds must be greater than 0, not {request.max_age_seconds}")
    if request.wait_seconds is not None and not 0 <= request.wait_seconds <= policy.max_wait_seconds:
        raise BadInputError(f"wait_seconds must be 0 to {policy.max_wait_seconds:.0f}, not {request.wait_seconds}")
    if request.runtime_seconds is not None and not 0 <= request.runtime_seconds <= MOST_RUNTIME_SECONDS:
        raise BadInputError(f"runtime_seconds must be 0 to {MOST_RUNTIME_SECONDS:.0f}, not {request.runtime_seconds}")


def less_than_policy(request: GateRequest, policy: Policy) -> Mapping[GateTerm, str]:
    """
    The terms in which a request asks for less than the policy: what it asks for, and which setting asks for more.

    Empty for a request that leaves everything to the policy, or asks for more.
    """
    terms, found = terms_of(request, policy), dict[GateTerm, str]()
    if terms.mode is Mode.OBSERVE and policy.mode is not Mode.OBSERVE:
        found["mode"] = f"mode {terms.mode.value} (policy.mode is {policy.mode.value})"
    if terms.tier.rank < policy.tier.rank:
        found["tier"] = f"tier {terms.tier.value} (policy.tier is {policy.tier.value})"
    if terms.max_age_seconds > policy.max_age_seconds:
        found["max_age"] = (
            f"evidence of up to {terms.max_age_seconds:g} s (policy.max_age is {policy.max_age_seconds:g} s)"
        )
    if terms.wanted > 1 and policy.collective:
        # Another kind of validation runs other checks: it must not leave out those that every gate runs.
        always = policy.checks_over_nodes(ValidationKind.COLLECTIVES, terms.tier)
        if not terms.collective:
            found["collective"] = "no collectives over the nodes (policy.collective is true)"
        elif lacking := [name for name in always if name not in terms.checks]:
            found["collective"] = f"collectives without {', '.join(lacking)} (policy.collective_checks has them)"
    if not request.lease:
        found["lease"] = "an answer without leases (every gate leases its nodes to the job)"
    return found


def _check_join(request: GateRequest, join: Join, policy: Policy) -> None:
    if request.nodes or request.pool is not None or request.count is not None:
        raise BadInputError("who joins a group names its own node alone; leave out nodes, pool and count")
    for what, text, longest in (("group", join.group, LONGEST_NAME), ("member", join.member, LONGEST_MEMBER)):
        if not text or len(text) > longest or not text.isprintable():
            raise BadInputError(f"{what} must be 1 to {longest} printable characters, not {text[:40]!r}")
    check_name(join.node)
    if not 1 <= join.size <= policy.max_nodes_per_gate:
        raise BadInputError(f"a group can have 1 to {policy.max_nodes_per_gate} members, not {join.size}")
    if not 0 <= join.rank < join.size:
        raise BadInputError(f"rank {join.rank} is not one of 0 to {join.size - 1}")
    if request.min_nodes is not None and not 1 <= request.min_nodes <= join.size:
        raise BadInputError(f"min_nodes must be 1 to {join.size}, not {request.min_nodes}")


def _check_size(request: GateRequest, policy: Policy) -> None:
    if request.nodes and request.count is not None:
        raise BadInputError("count goes with a pool; of named nodes all are meant, or min_nodes of them")
    if request.pool is not None and request.count is None:
        raise BadInputError(f"how many nodes of pool {request.pool}? give a count")
    wanted = len(request.nodes) or request.count or 0
    if not 1 <= wanted <= policy.max_nodes_per_gate:
        raise BadInputError(f"1 to {policy.max_nodes_per_gate} nodes can be asked for, not {wanted}")
    if len(set(request.nodes)) != len(request.nodes):
        twice = sorted({name for name in request.nodes if request.nodes.count(name) > 1})
        raise BadInputError(f"node named twice: {', '.join(twice[:5])}")
    if request.min_nodes is not None and not 1 <= request.min_nodes <= wanted:
        raise BadInputError(f"min_nodes must be 1 to {wanted}, not {request.min_nodes}")
