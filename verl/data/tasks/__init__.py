"""Procedural tasks, seeded and with a difficulty: each has a generator of problems and a verifier of answers.

`get_task("countdown").rows(1000, seed=0, difficulty=2)` gives rows in the ordinary format; their `data_source` is
`tasks/<name>`, which `compute_score` scores. `register_task` adds a task; `gym/<dataset>` are
those of reasoning-gym.
"""

from __future__ import annotations

from typing import Any

from verl.data.tasks.base import Problem, Task
from verl.data.tasks.countdown import Countdown
from verl.data.tasks.gym import GymTask
from verl.data.tasks.word_problems import WordProblems
from verl.errors import DataError

_tasks: dict[str, Task] = {task.name: task for task in (Countdown(), WordProblems())}


def register_task(task: Task) -> Task:
    """Add a task under its name, replacing what was there."""
    _tasks[task.name] = task
    return task


def known_tasks() -> list[str]:
    return sorted(name for name in _tasks if not name.startswith("gym/"))


def get_task(name: str) -> Task:
    """A task by name or data source: `countdown`, `tasks/countdown`, `gym/<dataset of reasoning-gym>`."""
    short = name.removeprefix("tasks/")
    if short not in _tasks and short.startswith("gym/"):
        _tasks[short] = GymTask(short.removeprefix("gym/"))
    if short not in _tasks:
        raise DataError(
            f"unknown task {short!r}; known: {', '.join(known_tasks())}, gym/<dataset of reasoning-gym>"
        )
    return _tasks[short]


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """The reward function of all procedural tasks: 1.0 when the final answer of the response is right, else 0.0."""
    return get_task(data_source).score(solution_str, ground_truth)


__all__ = ["Problem", "Task", "compute_score", "get_task", "known_tasks", "register_task"]
