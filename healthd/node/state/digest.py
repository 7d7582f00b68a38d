"""Computes the digest of a state, over everything that decisions depend on: not ages, times or measured values."""

from __future__ import annotations

import hashlib
from typing import Any

from healthd.core import wire
from healthd.core.evidence import untested_devices
from healthd.core.model import CheckResult, NodeState, Reason


def digest_of(state: NodeState) -> str:
    """SHA-256 in hexadecimal digits."""
    decisive = {
        "node": state.node,
        "aliases": state.aliases,
        "instance_id": state.instance_id,
        "boot_id": state.boot_id,
        "labels": sorted(state.labels.items()),
        "instance_type": state.instance_type,
        "inventory": state.inventory,
        "versions": sorted(state.versions.items()),
        "health": state.health,
        "reasons": [_reason(reason) for reason in state.reasons],
        "checks": state.checks,
        "results": [_result(result) for result in state.results],
        "untested": _untested(state),
        "allocated": state.allocated,
        "leases": [(lease.id, lease.gate, lease.job, lease.attempt, lease.issuer) for lease in state.leases],
        "quarantine": state.quarantine,
        "faults": state.faults,
        "running": state.running,
        "address": state.address,
        "peer_address": state.peer_address,
        "hostname": state.hostname,
    }
    return hashlib.sha256(wire.encode(decisive)).hexdigest()


def _untested(state: NodeState) -> list[tuple[str, tuple[str, ...]]]:
    """The devices that each result does not stand for."""
    specs = {spec.name: spec for spec in state.checks}
    found = [
        (result.check, untested_devices(specs[result.check], result, state.inventory))
        for result in state.results
        if result.check in specs
    ]
    return [(check, targets) for check, targets in found if targets]


def _reason(reason: Reason) -> tuple[Any, ...]:
    """Without the message, which contains ages and measured values."""
    return (reason.code, reason.status, reason.blame, reason.action, reason.target, reason.check, reason.injected)


def _result(result: CheckResult) -> tuple[Any, ...]:
    findings = [(f.status, f.reason, f.target, f.blame, f.action) for f in result.findings]
    digests = [(one.key, one.root, one.targets) for one in result.digests]
    return (result.check, result.tier, result.status, result.injected, result.executor, findings, digests)
