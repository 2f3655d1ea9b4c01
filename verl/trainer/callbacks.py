"""Callbacks of transformers' Trainer: the events of a run, `TrainerState` with its `log_history`, and `TrainerControl`.

Events come in the order of transformers: on_step_begin, on_step_end, on_log, on_evaluate, on_save. What a callback asks
for in `control` holds for the step it is called in: a validation until on_step_end, a checkpoint and the end of the run
until on_evaluate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.config.keys import trl_names
from verl.errors import ConfigError
from verl.trainer.setup import Asked, Events


def trl_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers under the names that TRL logs them by."""
    named = trl_names()["metrics"].items()
    found = {name: next((key for key in ours if key in metrics), None) for name, ours in named}
    return {name: metrics[key] for name, key in found.items() if key is not None}


class CallbackEvents(Events):
    """Keeps the state of a run and calls its callbacks."""

    def __init__(self, callbacks: Sequence[Any], args: Any, objects: Mapping[str, Any]) -> None:
        """`objects` are passed to every call: model, processing_class."""
        from transformers.trainer_callback import TrainerControl, TrainerState

        self.callbacks = [each() if isinstance(each, type) else each for each in callbacks]
        for callback in self.callbacks:
            if not any(name.startswith("on_") for name in dir(callback)):
                raise ConfigError(
                    f"callbacks has {callback!r}, which has no method on_...; give objects of "
                    "transformers.TrainerCallback"
                )
        self.args, self.objects = args, dict(objects)
        self.state, self.control = TrainerState(), TrainerControl()
        self._begun = False
        self._epochs = 0

    def call(self, event: str, **more: Any) -> None:
        for callback in self.callbacks:
            method: Callable[..., Any] | None = getattr(callback, event, None)
            if method is not None:
                self.control = (
                    method(self.args, self.state, self.control, **self.objects, **more) or self.control
                )

    def start(self, total_steps: int) -> None:
        if not self._begun:
            self.state.max_steps = total_steps
            self._begun = True
            self.call("on_train_begin")
            self.call("on_epoch_begin")

    def begin_step(self, step: int) -> None:
        control = self.control
        control.should_save = control.should_evaluate = control.should_log = control.should_epoch_stop = False
        self.call("on_step_begin")

    def end_step(self, step: int) -> Asked:
        self.state.global_step = step
        self.call("on_step_end")
        return self._asked()

    def log(self, step: int, metrics: Mapping[str, Any]) -> Asked:
        state, named = self.state, trl_metrics(metrics)
        state.global_step = step
        state.epoch = float(metrics.get("training/epochs_done", state.epoch or 0.0))
        evaluated = "timing_s/testing" in metrics
        validation = {name: value for name, value in metrics.items() if name.startswith("val")}
        validation |= {name: value for name, value in named.items() if name.startswith("eval_")}
        logs = {name: value for name, value in {**metrics, **named}.items() if name not in validation}
        if step > 0:
            self._append(logs)
        if evaluated:
            self._append(validation)
            self.call("on_evaluate", metrics=validation)
            self._keep_best(step, validation)
        if state.epoch > self._epochs:
            self._epochs = int(state.epoch)
            self.call("on_epoch_end")
            if step < state.max_steps and not self.control.should_training_stop:
                self.call("on_epoch_begin")
        return self._asked()

    def save(self, step: int) -> None:
        self.call("on_save")

    def end(self) -> None:
        """The run is over."""
        self.call("on_train_end")

    def _keep_best(self, step: int, validation: Mapping[str, Any]) -> None:
        """The best value of `metric_for_best_model`, which EarlyStoppingCallback compares the next one with."""
        name = self.args.metric_for_best_model or "loss"
        value = validation.get(name, validation.get(f"eval_{name}"))
        best, greater = self.state.best_metric, self.args.greater_is_better
        if value is not None and (best is None or (value > best if greater else value < best)):
            self.state.best_metric, self.state.best_global_step = value, step

    def _append(self, numbers: Mapping[str, Any]) -> None:
        row = {**numbers, "epoch": self.state.epoch}
        self.state.log_history.append({**row, "step": self.state.global_step})
        self.call("on_log", logs=row)

    def _asked(self) -> Asked:
        control = self.control
        if control.should_epoch_stop:
            raise ConfigError(
                "a callback set control.should_epoch_stop: an epoch cannot be left; set control.should_training_stop"
            )
        return Asked(control.should_training_stop, control.should_save, control.should_evaluate)
