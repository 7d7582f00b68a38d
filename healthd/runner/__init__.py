"""
Runs a plan of checks in worker processes under deadlines, and turns whatever happens into a CheckResult.

    runner = Runner(RunnerSettings(...))
    catalogue = await runner.catalogue()          # name -> CheckInfo; ConfigError for what cannot be loaded
    survey = await runner.survey()                # never raises
    results = await runner.run(plan, faults=(), on_result=None, on_progress=None, previous=None)
    session = runner.session(faults=())            # ranks of collectives over several nodes; see Session

`run` raises nothing but CancelledError. Two runs at a time are fine; active ones exclude each other by the lock file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from healthd.runner.collective.order_ranks import OnReport
    from healthd.runner.collective.session import RefusedError, Session
    from healthd.runner.runner import LastEvidence, Runner
    from healthd.runner.settings import (
        Limits,
        OnProgress,
        OnResult,
        Plan,
        RunnerSettings,
        RunProgress,
        Survey,
    )

__all__ = [
    "LastEvidence",
    "Limits",
    "OnProgress",
    "OnReport",
    "OnResult",
    "Plan",
    "RefusedError",
    "RunProgress",
    "Runner",
    "RunnerSettings",
    "Session",
    "Survey",
]

if not TYPE_CHECKING:
    from healthd.core.lazy import names_of

    __getattr__ = names_of(__name__, __all__, ("settings", "runner", "collective.order_ranks", "collective.session"))
