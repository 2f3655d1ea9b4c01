"""Metrics of a script of your own. The home of the trackers is `verl.observe.trackers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.missing_names import explain
from verl.observe.run_folder import RunFolder, default_run_path
from verl.observe.trackers import build_trackers


class Tracking:
    """Writes to the run folder and to the loggers named: those of `trainer.logger`."""

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        config = config or {}
        folder = config.get("trainer", {}).get("default_local_dir") or default_run_path(
            project_name, experiment_name
        )
        self._folder = RunFolder(folder)
        self._trackers = build_trackers(default_backend, project_name, experiment_name, config, self._folder)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._trackers.log(step, data)

    def finish(self) -> None:
        """Send what waits, and leave the run folder to others."""
        self._trackers.close()
        self._folder.close()


__getattr__ = explain(__name__)
