"""
`healthd` where `Tuning` can be set: `python -P tuned.py ARGUMENT ...`.

Its fields are keys below `policy.tuning`, in files (`tuning.settle = "1s"` under `[policy]`) and as variables
(`HEALTHD_POLICY_TUNING_SETTLE`). Tests of whole processes need it to trip in seconds what takes a minute else.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from types import MappingProxyType

from healthd.__main__ import main

if __name__ == "__main__":
    # The former version, which runs in the tests of rolling upgrades, has it elsewhere.
    here = importlib.util.find_spec("healthd.aggregator.policy") is not None
    Policy = importlib.import_module(f"healthd.aggregator.{'' if here else 'model.'}policy").Policy
    tuning = next(field for field in dataclasses.fields(Policy) if field.name == "tuning")
    tuning.metadata = MappingProxyType({})  # no longer internal
    main()
