"""The lane of the node: its child looks at the machine, runs the node's checks, and judges what devices measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from checks.learned import hardware_in
from checks.worker.protocol import from_evidence, from_missing
from healthd.runner.run_record import Account
from healthd.runner.settings import CheckInfo
from healthd.runner.workers.outcome import Outcome, in_order_of_end
from healthd.runner.workers.worker_lane import Job, Lane
from healthd.runner.workers.workers import Workers


class NodeLane:
    """Of one run. `boot_id` is known once the first survey has its answer."""

    def __init__(self, workers: Workers, account: Account) -> None:
        self.boot_id: str | None = None
        self._workers = workers
        self._account = account
        self._request = account.request
        self._lane = Lane(workers, None)

    async def serve(self) -> None:
        """Until it is closed and nothing waits."""
        await self._lane.serve()

    async def idle(self) -> None:
        """Returns when nothing waits or runs."""
        await self._lane.idle()

    def close(self) -> None:
        """No more will be asked."""
        self._lane.close()

    def survey(self) -> asyncio.Future[Outcome]:
        """Ask for inventory and holders; the child's later commands see what it found."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def finish(outcome: Outcome) -> None:
            if outcome.answers:
                found = outcome.answers[0]
                self._workers.inventory = {**found["inventory"], "holders": found["holders"]}
                self._workers.identity = {
                    "hardware": hardware_in(found["instance_type"], found["inventory"]),
                    "accelerator": found["inventory"]["accelerator"],
                    "versions": found["versions"],
                }
                self.boot_id = self._workers.boot_id = found["boot_id"]
            self._request.on_survey(outcome)
            if not answer.done():
                answer.set_result(outcome)

        self._lane.submit(
            Job(
                check="survey",
                command={"kind": "survey"},
                timeout_seconds=self._workers.settings.survey_timeout_seconds,
                finish=finish,
            )
        )
        return answer

    def submit_check(self, info: CheckInfo) -> None:
        """Run a check of the node."""
        corpse = self._workers.stuck(f"node/{info.name}")
        if corpse is not None:
            lost = Outcome(target="node").lost("Stuck", corpse.message)
            self._account.tell(self._account.result_of(info, [lost], judgement=None))
            return

        def finish(outcome: Outcome) -> None:
            if outcome.missing is None and outcome.evidence:
                self._request.on_evidence(info.name, tuple(outcome.evidence), self.boot_id)
            if info.judged and outcome.missing is None and outcome.evidence:
                self.submit_judge(info, [outcome])
            else:
                self._account.tell(self._account.result_of(info, [outcome], judgement=None))

        self._lane.submit(self._account.job(info, self._account.command(info, ("node",), None), finish))

    def submit_judge(self, info: CheckInfo, outcomes: Sequence[Outcome]) -> None:
        """Let the node's child compare what was measured, and make the result of it."""

        def finish(judgement: Outcome) -> None:
            self._account.tell(self._account.result_of(info, outcomes, judgement=judgement))

        self._ask_judge(info, outcomes, finish)

    async def judged(self, info: CheckInfo, outcomes: Sequence[Outcome]) -> Outcome:
        """What the node's child says of the ranks' outcomes."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def finish(judgement: Outcome) -> None:
            if not answer.done():
                answer.set_result(judgement)

        self._ask_judge(info, outcomes, finish)
        return await answer

    def _ask_judge(self, info: CheckInfo, outcomes: Sequence[Outcome], finish: Callable[[Outcome], None]) -> None:
        command = {
            "kind": "judge",
            "evidence": [from_evidence(item) for outcome in outcomes for item in outcome.evidence],
            "missing": [from_missing(item) for item in in_order_of_end(outcomes)],
        }
        self._lane.submit(
            Job(
                check=info.name,
                command=command,
                timeout_seconds=self._workers.settings.judge_timeout_seconds,
                finish=finish,
                retry=False,  # pure arithmetic that dies once dies again
            )
        )
