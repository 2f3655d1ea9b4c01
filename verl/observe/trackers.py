"""Where metrics go: the run folder always, the console and other services by name (`trainer.logger`).

A tracker that cannot start stops the run before it begins; one that fails later is switched off with a warning. The
run folder is never switched off: each failure to write to it is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from verl.config.sections.trainer import LOGGERS
from verl.errors import ConfigError
from verl.observe.console import StepConsole

if TYPE_CHECKING:
    from verl.observe.diagnoses import Finding
    from verl.observe.run_folder import RunFolder

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Takes the metrics of a step and, where it can show them, samples of validation. A subclass inherits that nothing
    is done with samples and at the end."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def log_samples(self, step: int, rows: list[Any]) -> None:
        return None

    def close(self) -> None:
        return None


TrackerFactory = Callable[[str, str, Mapping[str, Any], "RunFolder"], "Tracker"]
_registered: dict[str, TrackerFactory] = {}


def register_tracker(name: str) -> Callable[[TrackerFactory], TrackerFactory]:
    """Register a custom tracker under a name for `trainer.logger`.

    The factory is called with project, experiment, the resolved configuration and the run folder."""

    if name in LOGGERS:
        raise ConfigError(f"the tracker name {name!r} is taken; taken names: {', '.join(LOGGERS)}")

    def register(factory: TrackerFactory) -> TrackerFactory:
        _registered[name] = factory
        return factory

    return register


def registered_trackers() -> tuple[str, ...]:
    return tuple(_registered)


def build_trackers(
    names: str | Iterable[str],
    project: str,
    experiment: str,
    config: Mapping[str, Any],
    run_folder: RunFolder,
    wandb_proxy: str | None = None,
    *,
    total_steps: int | None = None,
    live: bool = False,
    prometheus: tuple[str, int] | None = None,
) -> FanOut:
    """One tracker that feeds all of `names`; the run folder's file is always among them.

    `prometheus` is (host, port) of a metrics endpoint to serve as well."""
    wanted = [names] if isinstance(names, str) else list(names)
    known = (*LOGGERS, *_registered)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ConfigError(
            f"unknown logger {unknown[0]!r} in trainer.logger={wanted}; known: {', '.join(known)}"
        )
    built: dict[str, Tracker] = {"file": FileTracker(run_folder)}
    for name in dict.fromkeys(wanted):
        if name in _registered:
            built[name] = _registered[name](project, experiment, config, run_folder)
        elif name == "console":
            built[name] = StepConsole(total_steps, live=live, title=f"{project}/{experiment}")
        elif name != "file":
            from verl.observe.tracker_services import Background, open_service

            service = open_service(name, project, experiment, config, run_folder, wandb_proxy)
            built[name] = Background(name, service)
    if prometheus is not None:
        from verl.observe.prometheus import PrometheusTracker

        device = str(config.get("trainer", {}).get("device", "auto"))
        built["prometheus"] = PrometheusTracker(*prometheus, project, experiment, run_folder.path, device)
    return FanOut(built)


class FanOut:
    """Feeds several trackers; switches off those that fail."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self.trackers = dict(trackers)

    def log(self, step: int, metrics: Mapping[str, Any], findings: Sequence[Finding] = ()) -> None:
        """The findings of a step are in its row of `metrics.jsonl`, and lines below it on the console."""
        file = self.trackers.get("file")
        if isinstance(file, FileTracker):
            file.findings = findings
        self._each("log", step, metrics)
        for finding in findings:
            self.note(finding.line)

    def log_samples(self, step: int, rows: list[Any]) -> None:
        self._each("log_samples", step, rows)

    def note(self, text: str) -> None:
        """A message: on the console where it is a logger, else in the log."""
        console = self.trackers.get("console")
        if isinstance(console, StepConsole):
            console.note(text)
        else:
            logger.info("%s", text)

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *arguments: Any) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # whatever a third party raises must not stop the run
                if name == "file":
                    logger.warning("metrics could not be written to the run folder: %s", error)
                    continue
                del self.trackers[name]
                logger.warning(
                    "the tracker '%s' failed (%s: %s) and is off for the rest of this run; metrics still go to %s",
                    name,
                    type(error).__name__,
                    error,
                    ", ".join(self.trackers),
                )


class FileTracker(Tracker):
    """`metrics.jsonl` of the run folder. Samples are written by the loop, which has all of them."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._run_folder = run_folder
        self.findings: Sequence[Finding] = ()
        """Of the step that is logged next."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run_folder.append_metrics(step, metrics, self.findings)
