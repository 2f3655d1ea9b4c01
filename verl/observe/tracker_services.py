"""Experiment trackers of other projects: wandb, tensorboard, mlflow, trackio, swanlab.

Each is called from a thread of its own with numbers only: one that is slow, raises or never returns does not hold up
the run, nor the end of the process. Every call that was accepted reaches the tracker in order, unless it fails or does
not finish within `CLOSE_S`. A package is imported when `trainer.logger` names it."""

from __future__ import annotations

import importlib
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from verl.errors import ConfigError, VerlError, missing_package
from verl.observe.jsonl import jsonable, numbers, plain
from verl.observe.run_facts import flat_config
from verl.observe.run_folder import RunFolder

logger = logging.getLogger(__name__)

SAMPLES = "validation/samples"
MAX_WAITING = 1000
"""Calls that wait for a tracker; one that is so far behind is given up."""
CLOSE_S = 120.0
"""How long the end of a run waits for a tracker to send the rest."""
_ADVICE = {
    "wandb": "Log in (`wandb login`, WANDB_API_KEY), set WANDB_MODE=offline, check trainer.wandb_proxy (now {proxy})",
    "tensorboard": "Check that the run folder can be written (trainer.default_local_dir)",
    "mlflow": "Check MLFLOW_TRACKING_URI (now {address}) and trainer.project_name, its experiment (now {project!r})",
    "trackio": "Check trainer.project_name (now {project!r}), TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL",
    "swanlab": "Log in (`swanlab login`, SWANLAB_API_KEY), set SWANLAB_MODE=offline",
}
_given_up: set[str] = set()


class TrackerService(Protocol):
    """Takes the numbers of a step and samples of validation (one row at least)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, rows: list[Any]) -> None: ...

    def close(self, failed: bool) -> None:
        """`failed`: the run ended with an error."""


class Background:
    """A tracker that feeds a service. What the service raised is raised by the next call."""

    def __init__(self, name: str, service: TrackerService) -> None:
        self._name = name
        self._service = service
        self._error: BaseException | None = None
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = numbers(metrics)
        self._put(lambda: self._service.log(step, values))

    def log_samples(self, step: int, rows: list[Any]) -> None:
        if rows:
            kept = list(rows)
            self._put(lambda: self._service.log_samples(step, kept))

    def close(self) -> None:
        failed = sys.exc_info()[0] is not None  # called while an error ends the run
        self._put(lambda: self._service.close(failed))
        self._put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _given_up.add(self._name)
            raise TimeoutError(f"it did not end within {CLOSE_S:.0f} s")
        self._raise_error()

    def _put(self, call: Callable[[], None] | None) -> None:
        self._raise_error()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            _given_up.add(self._name)
            raise TimeoutError(f"it is {MAX_WAITING} calls behind") from None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"{type(self._error).__name__}: {self._error}") from self._error

    def _work(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                call()
        except BaseException as error:  # SystemExit too: no exception of another project may end the run
            _given_up.add(self._name)
            self._error = error
            with suppress(BaseException):
                self._service.close(failed=False)


def leave_given_up(code: int) -> None:
    """End the process if a tracker was given up: its threads and exit handlers could wait for ever.

    Called when everything else is closed."""
    if _given_up:
        logger.info("not waiting for %s", ", ".join(sorted(_given_up)))
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def open_service(
    name: str,
    project: str,
    experiment: str,
    config: Mapping[str, Any],
    run_folder: RunFolder,
    wandb_proxy: str | None = None,
) -> TrackerService:
    """Start a service; what it raises becomes a ConfigError with what to check."""
    plain_config = jsonable(config)
    try:
        match name:
            case "wandb":
                return Wandb(project, experiment, plain_config, run_folder, wandb_proxy)
            case "tensorboard":
                return Tensorboard(run_folder)
            case "mlflow":
                return Mlflow(project, experiment, plain_config)
            case "trackio":
                return Trackio(project, experiment, plain_config)
            case _:
                return Swanlab(project, experiment, plain_config, run_folder)
    except VerlError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        address = os.environ.get("MLFLOW_TRACKING_URI", "not set")
        advice = _ADVICE[name].format(project=project, proxy=wandb_proxy, address=address)
        raise ConfigError(
            f"trainer.logger names {name}, which failed to start: {reason}. {advice}, or remove it from trainer.logger"
        ) from error


class _RunService:
    """A service with an object for the run that takes numbers and tables by name."""

    _run: Any

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: list[Any]) -> None:
        self._run.log({SAMPLES: self._table(*_table(rows))}, step=step)

    def _table(self, columns: list[str], data: list[list[Any]]) -> Any:
        raise NotImplementedError


class Wandb(_RunService):
    """Weights & Biases. `proxy` applies to its traffic alone, not to the rest of the program."""

    def __init__(
        self,
        project: str,
        experiment: str,
        config: Mapping[str, Any],
        run_folder: RunFolder,
        proxy: str | None,
    ) -> None:
        wandb = _load("wandb")
        self._wandb = wandb
        settings = wandb.Settings(http_proxy=proxy, https_proxy=proxy) if proxy else None
        self._run = wandb.init(
            project=project, name=experiment, config=config, dir=str(run_folder.path), settings=settings
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Without `commit` it keeps a step back until the next one begins: seen late, and lost with a killed process.
        self._run.log(dict(metrics), step=step, commit=True)

    # Samples are not committed: the step's metrics follow and complete it.
    def _table(self, columns: list[str], data: list[list[Any]]) -> Any:
        return self._wandb.Table(columns=columns, data=data)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Tensorboard:
    """Event files in `{run folder}/tensorboard`."""

    def __init__(self, run_folder: RunFolder) -> None:
        try:
            # An installed tensorflow is imported by the event writer and greets the terminal unless told not to.
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import FileWriter
            from torch.utils.tensorboard.summary import text
        except ImportError:
            raise missing_package("tensorboard", "tensorboard", "trainer.logger=tensorboard") from None
        self._summary, self._text = Summary, text
        self._writer = FileWriter(str(run_folder.path / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # One event for all of them: each event wakes the thread that writes the file.
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_summary(self._summary(value=values), step)
        self._writer.flush()

    def log_samples(self, step: int, rows: list[Any]) -> None:
        for index, row in enumerate(rows):
            text = "\n\n".join(f"**{name}**: {plain(value)}" for name, value in row.items())
            self._writer.add_summary(self._text(f"validation/sample_{index}", text), step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class Mlflow:
    """MLflow, at MLFLOW_TRACKING_URI or where mlflow keeps runs by default.

    The client is used rather than `mlflow.log_metrics`, whose active run belongs to a thread."""

    PARAMS_PER_CALL = 100
    METRICS_PER_CALL = 1000

    def __init__(self, project: str, experiment: str, config: Mapping[str, Any]) -> None:
        mlflow = _load("mlflow")
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(project)
        number = self._client.create_experiment(project) if found is None else found.experiment_id
        self._run = self._client.create_run(number, run_name=experiment).info.run_id
        flat = flat_config(config)
        params = [mlflow.entities.Param(_mlflow_name(key), str(value)[:500]) for key, value in flat.items()]
        for start in range(0, len(params), self.PARAMS_PER_CALL):
            self._client.log_batch(self._run, params=params[start : start + self.PARAMS_PER_CALL])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = {_mlflow_name(name): value for name, value in metrics.items()}
        points = [self._entities.Metric(name, value, now, step) for name, value in named.items()]
        for start in range(0, len(points), self.METRICS_PER_CALL):
            self._client.log_batch(self._run, metrics=points[start : start + self.METRICS_PER_CALL])

    def log_samples(self, step: int, rows: list[Any]) -> None:
        columns, data = _table(rows)
        table = {
            column: list(values) for column, values in zip(columns, zip(*data, strict=True), strict=True)
        }
        self._client.log_table(self._run, table, f"{SAMPLES}_{step}.json")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


class Trackio(_RunService):
    """trackio: in TRACKIO_DIR of this machine, or in the Space of TRACKIO_SPACE_ID."""

    def __init__(self, project: str, experiment: str, config: Mapping[str, Any]) -> None:
        trackio = _load("trackio")
        self._trackio = trackio
        self._run = trackio.init(project=project, name=experiment, config=dict(config), embed=False)

    def _table(self, columns: list[str], data: list[list[Any]]) -> Any:
        import pandas  # a table is a data frame to trackio

        return self._trackio.Table(dataframe=pandas.DataFrame(data, columns=columns))

    def close(self, failed: bool) -> None:
        self._run.finish()


class Swanlab(_RunService):
    """SwanLab; what it keeps on disk is in `{run folder}/swanlog`."""

    def __init__(
        self, project: str, experiment: str, config: Mapping[str, Any], run_folder: RunFolder
    ) -> None:
        swanlab = _load("swanlab")
        self._swanlab = swanlab
        folder = run_folder.path / "swanlog"
        folder.mkdir(exist_ok=True)
        # In the main thread it would replace the handler of Ctrl-C, and could be closed by that thread only.
        with ThreadPoolExecutor(1) as thread:
            self._run = thread.submit(
                swanlab.init,
                project=project,
                name=experiment,
                config=dict(config),
                log_dir=str(folder),
                reinit=True,
            ).result()

    def _table(self, columns: list[str], data: list[list[Any]]) -> Any:
        table = self._swanlab.echarts.Table()
        table.add(columns, data)
        return table

    def close(self, failed: bool) -> None:
        self._run.finish(state="crashed" if failed else "success", error="the run failed" if failed else None)


def _load(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise missing_package(package, package, f"trainer.logger={package}") from None


def _table(rows: list[Any]) -> tuple[list[str], list[list[Any]]]:
    columns = list(rows[0])
    return columns, [[plain(row.get(column)) for column in columns] for row in rows]


def _mlflow_name(name: str) -> str:
    """mlflow accepts letters, digits and these signs; `acc/mean@1` becomes `acc/mean_1`."""
    return re.sub(r"[^\w\-./: ]", "_", name)
