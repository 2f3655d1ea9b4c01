"""Worlds without any download: procedural tasks, seeded, with difficulty, each with a generator and a verifier.

`get_task("countdown").rows(1000, seed=0, difficulty=2)` gives rows in the ordinary format; their `data_source`
is `tasks/<name>`, which `verl.data.tasks.scoring.compute_score` scores. Add a world with `register_task`.
"""

from __future__ import annotations

from importlib import import_module

from verl.data.tasks.base import Problem, Task
from verl.errors import DataError

_HOMES: dict[str, str] = {
    "arithmetic": "arithmetic:Arithmetic",
    "countdown": "countdown:Countdown",
    "logic": "logic:Logic",
    "sorting": "sorting:Sorting",
    "strings": "strings:Strings",
    "word_problems": "word_problems:WordProblems",
}
_tasks: dict[str, Task] = {}


def register_task(task: Task) -> Task:
    """Add a task under its name, replacing what was there."""
    _tasks[task.name] = task
    return task


def known_tasks() -> list[str]:
    return sorted({*_HOMES, *_tasks})


def get_task(name: str) -> Task:
    """A task by name or data source: `countdown`, `tasks/countdown`, `gym/<dataset of reasoning-gym>`."""
    short = name.removeprefix("tasks/")
    if short in _tasks:
        return _tasks[short]
    if short.startswith("gym/"):
        from verl.data.tasks.gym import GymTask

        _tasks[short] = GymTask(short.removeprefix("gym/"))
    elif short in _HOMES:
        module, _, class_name = _HOMES[short].partition(":")
        _tasks[short] = getattr(import_module(f"{__name__}.{module}"), class_name)()
    else:
        raise DataError(
            f"there is no task {name!r}; known: {', '.join(known_tasks())}, gym/<dataset of reasoning-gym>."
        )
    return _tasks[short]


__all__ = ["Problem", "Task", "get_task", "known_tasks", "register_task"]
