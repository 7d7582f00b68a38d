"""
The reporter for frameworks: plain torch (DistributedDataParallel), Lightning, Hugging Face's Trainer.

None of them is imported here but torch, inside a hook that torch itself calls.

A framework's hooks see a whole step, not what of it was waiting: in data-parallel training ranks wait inside of the
backward pass. So register `gradient_hook` on the DistributedDataParallel model as well; without it whole steps are
reported as own time, which are alike on all ranks: no rank is named then, and the time of steps is still shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from healthd_steps.reporter import StepReporter


def gradient_hook(reporter: StepReporter) -> Callable[[Any, Any], Any]:
    """
    A communication hook for DistributedDataParallel, which tells apart a rank's own work and its waiting.

        model.register_comm_hook(model.process_group, gradient_hook(reporter))

    It averages gradients over that group as the default does, and tells the reporter when this rank's gradients were
    ready.
    """

    def hook(group: Any, bucket: Any) -> Any:
        from torch import distributed

        reporter.ready()
        buffer = bucket.buffer()
        buffer.div_(distributed.get_world_size(group))
        future = distributed.all_reduce(buffer, group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    # torch compares annotations with its own class, which must not be imported here.
    hook.__annotations__ = {}
    return hook


class _Silent:
    """Answers every hook that a framework may call with nothing, without being a class of the framework."""

    def __init__(self, reporter: StepReporter | None = None) -> None:
        self.reporter = reporter or StepReporter()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_") or name in ("setup", "teardown"):
            return _nothing
        raise AttributeError(name)


def _nothing(*_: object, **__: object) -> None:
    return None


class LightningCallback(_Silent):
    """`Trainer(callbacks=[LightningCallback()])`, of Lightning 2."""

    state_key = "healthd.StepReporter"

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: object) -> None:
        """A step begins."""
        self.reporter.begin()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, *_: object
    ) -> None:
        """The step is over."""
        self.reporter.end(int(trainer.global_step))

    def on_train_end(self, *_: object) -> None:
        """The job's training is over, though its process may go on."""
        self.reporter.close()

    def state_dict(self) -> dict[str, Any]:
        """Nothing of it belongs into a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing of it is in a checkpoint."""


class TrainerCallback(_Silent):
    """`Trainer(callbacks=[TrainerCallback()])`, of Hugging Face's transformers."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
        """A step begins."""
        self.reporter.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        """The step is over."""
        self.reporter.end(int(state.global_step))

    def on_train_end(self, *_: object, **__: object) -> None:
        """The job's training is over, though its process may go on."""
        self.reporter.close()
