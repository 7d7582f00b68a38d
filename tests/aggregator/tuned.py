"""
`healthd` where `Tuning` can be set: `python -P tuned.py ARGUMENT ...`.

Its fields are keys below `policy.tuning`, in files (`tuning.settle = "1s"` under `[policy]`) and as variables
(`HEALTHD_POLICY_TUNING_SETTLE`). Tests of whole processes need it to trip in seconds what takes a minute else.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from healthd.__main__ import main
from healthd.aggregator.policy import Policy

if __name__ == "__main__":
    tuning = next(field for field in dataclasses.fields(Policy) if field.name == "tuning")
    tuning.metadata = MappingProxyType({})  # no longer internal
    main()
