"""Runs of `python -m verl.trainer.main_ppo` that start quickly: what all of them import is imported here, once.

Reads one run per line, a JSON object with `arguments`, `environment`, `search` (a folder to find modules in) and `log`
(a file for its output). Answers with the number of the run's process, and with its exit status when it has ended.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

import verl.observe.report
import verl.trainer.assembly
import verl.workers.ray_group  # noqa: F401
from verl.trainer.main_ppo import main


def run(job: dict[str, Any]) -> None:
    output = os.open(job["log"], os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(job["environment"])
    sys.path.insert(0, job["search"])
    os._exit(main(job["arguments"]))


def answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            run(job)
        answer(child)
        answer(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
