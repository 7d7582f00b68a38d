"""
The contract between a check and whoever runs it: words, records and the `@check` decorator.

A check is a pure generator of what it can see: it does not sleep, retry, log or catch broadly, and
knows nothing of HTTP, of processes or of the service. Standard library alone, Python 3.10.

`words` are statuses, tiers, blames; `records` what a check yields and what it is judged by; `context` what it may see;
`specs` the check itself and its parameters. Import from here.
"""

from __future__ import annotations

from checks.contract.context import Context, Device, Group, Mesh, MeshOperation, P, Previous, Profiling
from checks.contract.records import (
    DEVICE_RESETS,
    NO_LIMIT,
    Evidence,
    Finding,
    Limit,
    Measurement,
    Missing,
    Profile,
    Progress,
    make_finding,
)
from checks.contract.specs import BUILT_IN, Check, CheckInfo, Judge, NoParams, Program, Run, Series, check, load_params
from checks.contract.words import SEVERITY, Action, Blame, Scope, Status, Tier, worst

__all__ = [
    "BUILT_IN",
    "DEVICE_RESETS",
    "NO_LIMIT",
    "SEVERITY",
    "Action",
    "Blame",
    "Check",
    "CheckInfo",
    "Context",
    "Device",
    "Evidence",
    "Finding",
    "Group",
    "Judge",
    "Limit",
    "Measurement",
    "Mesh",
    "MeshOperation",
    "Missing",
    "NoParams",
    "P",
    "Previous",
    "Profile",
    "Profiling",
    "Program",
    "Progress",
    "Run",
    "Scope",
    "Series",
    "Status",
    "Tier",
    "check",
    "load_params",
    "make_finding",
    "worst",
]
