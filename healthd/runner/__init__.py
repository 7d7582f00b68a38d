"""
Runs a plan of checks in worker processes under deadlines, and turns whatever happens into a CheckResult.

    runner = Runner(RunnerSettings(...))
    catalogue = await runner.catalogue()          # name -> CheckInfo; ConfigError for what cannot be loaded
    survey = await runner.survey()                # never raises
    results = await runner.run(plan, faults=(), on_result=None, on_progress=None, previous=None)
    session = runner.session(faults=())            # ranks of collectives over several nodes; see Session

`run` raises nothing but CancelledError. Two runs at a time are fine; active ones exclude each other by the lock file.
"""

__all__ = ["collective.ranks", "device_claim", "run_record", "runner", "settings", "workers.launch"]
