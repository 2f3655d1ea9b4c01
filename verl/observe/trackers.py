"""Where metrics go: the run folder always, the console and other services by name (`trainer.logger`).

A tracker that cannot start stops the run before it begins; one that fails later is switched off with a warning. The
run folder is never switched off: each failure to write to it is reported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from verl.config.known import LOGGERS
from verl.errors import ConfigError, missing_package
from verl.observe.console import StepConsole
from verl.observe.jsonl import jsonable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verl.observe.run_folder import RunFolder

logger = logging.getLogger(__name__)

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


class Tracker(Protocol):
    """Takes the metrics of a step and, where it can show them, samples of validation."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def log_samples(self, step: int, rows: list[Any]) -> None: ...

    def close(self) -> None: ...


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
    makers: dict[str, Callable[[], Tracker]] = {
        "console": lambda: ConsoleTracker(
            StepConsole(total_steps, live=live, title=f"{project}/{experiment}")
        ),
        "wandb": lambda: WandbTracker(project, experiment, config, run_folder, wandb_proxy),
        "tensorboard": lambda: TensorboardTracker(run_folder),
    }
    built: dict[str, Tracker] = {"file": FileTracker(run_folder)}
    for name in dict.fromkeys(wanted):
        if name in _registered:
            built[name] = _registered[name](project, experiment, config, run_folder)
        elif name != "file":
            built[name] = makers[name]()
    if prometheus is not None:
        from verl.observe.prometheus import PrometheusTracker

        built["prometheus"] = PrometheusTracker(*prometheus, run=f"{project}/{experiment}")
    return FanOut(built)


class FanOut:
    """Feeds several trackers; switches off those that fail."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self.trackers = dict(trackers)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._each("log", step, metrics)

    def log_samples(self, step: int, rows: list[Any]) -> None:
        self._each("log_samples", step, rows)

    def note(self, text: str) -> None:
        """A message: on the console where it is a logger, else in the log."""
        console = self.trackers.get("console")
        if isinstance(console, ConsoleTracker):
            console.console.note(text)
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


class FileTracker:
    """`metrics.jsonl` of the run folder. Samples are written by the loop, which has all of them."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._run_folder = run_folder

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run_folder.append_metrics(step, metrics)

    def log_samples(self, step: int, rows: list[Any]) -> None:
        return None

    def close(self) -> None:
        return None


class ConsoleTracker:
    """Lines or the live display; of samples, the first few as text."""

    def __init__(self, console: StepConsole) -> None:
        self.console = console

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.console.log(step, metrics)

    def log_samples(self, step: int, rows: list[Any]) -> None:
        for row in rows:
            fields = "  ".join(f"{name}={_shorten(value)}" for name, value in row.items())
            self.console.note(f"step {step} sample  {fields}")

    def close(self) -> None:
        self.console.close()


class WandbTracker:
    """Weights & Biases. `proxy` applies to its traffic alone, not to the rest of the program."""

    def __init__(
        self,
        project: str,
        experiment: str,
        config: Mapping[str, Any],
        run_folder: RunFolder,
        proxy: str | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise missing_package("wandb", "wandb", "trainer.logger=wandb") from None
        self._wandb = wandb
        settings = wandb.Settings(http_proxy=proxy, https_proxy=proxy) if proxy else None
        try:
            self._run = wandb.init(
                project=project,
                name=experiment,
                config=jsonable(config),
                dir=str(run_folder.path),
                settings=settings,
            )
        except wandb.errors.Error as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise ConfigError(
                f"trainer.logger names wandb, which failed to start: {reason}. Log in (`wandb login`, WANDB_API_KEY), "
                f"set WANDB_MODE=offline, check trainer.wandb_proxy (now {proxy}), or remove it from trainer.logger"
            ) from error

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        # Without `commit` it keeps a step back until the next one begins: seen late, and lost with a killed process.
        self._run.log(dict(metrics), step=step, commit=True)

    def log_samples(self, step: int, rows: list[Any]) -> None:
        if rows:
            columns = list(rows[0])
            data = [[_plain(row.get(column)) for column in columns] for row in rows]
            table = self._wandb.Table(columns=columns, data=data)
            self._run.log(
                {"validation/samples": table}, step=step
            )  # the step's metrics follow and complete it

    def close(self) -> None:
        self._run.finish()


class TensorboardTracker:
    """Event files in `{run folder}/tensorboard`."""

    def __init__(self, run_folder: RunFolder) -> None:
        try:
            with _quiet_tensorflow():
                from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing_package("tensorboard", "tensorboard", "trainer.logger=tensorboard") from None
        self._writer = SummaryWriter(log_dir=str(run_folder.path / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, step: int, rows: list[Any]) -> None:
        for index, row in enumerate(rows):
            text = "\n\n".join(f"**{name}**: {_plain(value)}" for name, value in row.items())
            self._writer.add_text(f"validation/sample_{index}", text, step)

    def close(self) -> None:
        self._writer.close()


@contextmanager
def _quiet_tensorflow() -> Iterator[None]:
    # An installed tensorflow is imported by the event writer and greets the terminal unless told not to.
    before = os.environ.get("TF_CPP_MIN_LOG_LEVEL")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TF_CPP_MIN_LOG_LEVEL"]
        else:
            os.environ["TF_CPP_MIN_LOG_LEVEL"] = before


def _plain(value: Any) -> Any:
    value = jsonable(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _shorten(value: Any, limit: int = 160) -> str:
    text = repr(_plain(value))
    return text if len(text) <= limit else text[: limit - 3] + "..."
