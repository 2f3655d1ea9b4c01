"""Experiment trackers of other projects: wandb, tensorboard, mlflow, trackio, swanlab.

Each is called from one thread (`verl/observe/background.py`) with numbers only; a package is imported when
`trainer.logger` names it."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from verl.errors import ConfigError, VerlError, missing_package
from verl.observe.background import Service
from verl.observe.jsonl import jsonable
from verl.observe.run_facts import flat_config
from verl.observe.run_folder import RunFolder

SAMPLES = "validation/samples"


def open_service(
    name: str,
    project: str,
    experiment: str,
    config: Mapping[str, Any],
    run_folder: RunFolder,
    wandb_proxy: str | None = None,
) -> Service:
    """Start a service; what it raises becomes a ConfigError with what to check."""
    plain = jsonable(config)
    makers: dict[str, tuple[Callable[[], Service], str]] = {
        "wandb": (
            lambda: Wandb(project, experiment, plain, run_folder, wandb_proxy),
            "Log in (`wandb login`, WANDB_API_KEY), set WANDB_MODE=offline, check trainer.wandb_proxy "
            f"(now {wandb_proxy})",
        ),
        "tensorboard": (
            lambda: Tensorboard(run_folder),
            "Check that the run folder can be written (trainer.default_local_dir)",
        ),
        "mlflow": (
            lambda: Mlflow(project, experiment, plain),
            "Check MLFLOW_TRACKING_URI (now "
            f"{os.environ.get('MLFLOW_TRACKING_URI', 'not set')}) and trainer.project_name, its experiment "
            f"(now {project!r})",
        ),
        "trackio": (
            lambda: Trackio(project, experiment, plain),
            f"Check trainer.project_name (now {project!r}), TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL",
        ),
        "swanlab": (
            lambda: Swanlab(project, experiment, plain, run_folder),
            "Log in (`swanlab login`, SWANLAB_API_KEY), set SWANLAB_MODE=offline",
        ),
    }
    make, advice = makers[name]
    try:
        return make()
    except VerlError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ConfigError(
            f"trainer.logger names {name}, which failed to start: {reason}. {advice}, or remove it from trainer.logger"
        ) from error


class Wandb:
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

    def log_samples(self, step: int, rows: list[Any]) -> None:
        columns, data = _table(rows)
        # Not committed: the step's metrics follow and complete it.
        self._run.log({SAMPLES: self._wandb.Table(columns=columns, data=data)}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Tensorboard:
    """Event files in `{run folder}/tensorboard`."""

    def __init__(self, run_folder: RunFolder) -> None:
        try:
            with _quiet_tensorflow():
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


class Trackio:
    """trackio: in TRACKIO_DIR of this machine, or in the Space of TRACKIO_SPACE_ID."""

    def __init__(self, project: str, experiment: str, config: Mapping[str, Any]) -> None:
        trackio = _load("trackio")
        self._trackio = trackio
        self._run = trackio.init(project=project, name=experiment, config=dict(config), embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: list[Any]) -> None:
        import pandas  # a table is a data frame to trackio

        columns, data = _table(rows)
        table = self._trackio.Table(dataframe=pandas.DataFrame(data, columns=columns))
        self._run.log({SAMPLES: table}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()


class Swanlab:
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

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: list[Any]) -> None:
        columns, data = _table(rows)
        table = self._swanlab.echarts.Table()
        table.add(columns, data)
        self._run.log({SAMPLES: table}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(state="crashed" if failed else "success", error="the run failed" if failed else None)


def _load(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise missing_package(package, package, f"trainer.logger={package}") from None


def plain(value: Any) -> Any:
    """What a cell of a table can hold: a number or a text."""
    value = jsonable(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _table(rows: list[Any]) -> tuple[list[str], list[list[Any]]]:
    columns = list(rows[0])
    return columns, [[plain(row.get(column)) for column in columns] for row in rows]


def _mlflow_name(name: str) -> str:
    """mlflow accepts letters, digits and these signs; `acc/mean@1` becomes `acc/mean_1`."""
    return re.sub(r"[^\w\-./: ]", "_", name)


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
