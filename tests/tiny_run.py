"""The command line of a small GRPO run on the tiny model and the digits task, to which tests add their own keys."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def tiny_run(model: Path, data: Path, *extra: str, folder: Path | None = None) -> list[str]:
    """Overrides of `verl train`; later ones win, so `extra` may replace any of them."""
    return [
        f"data.train_files={data}/train.jsonl",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={data}/digits_reward.py",
        "reward.in_process=True",
        "trainer.device=cpu",
        "trainer.logger=[]",
        *([] if folder is None else [f"trainer.default_local_dir={folder}"]),
        *extra,
    ]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics that two runs of one config share: all but times and throughput, and findings, as some are about
    these."""
    others = ("timing", "perf/", "findings")
    return [{name: value for name, value in row.items() if not name.startswith(others)} for row in rows]


def own_methods(data: Path, folder: Path) -> list[str]:
    """Keys that train with the plug-in tests/own_methods.py, a file, on rows that have the column it needs."""
    plugin = shutil.copy(Path(__file__).with_name("own_methods.py"), folder / "mine.py")
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    weighted = [json.dumps({**row, "weight": 1 + number % 7}) + "\n" for number, row in enumerate(rows)]
    (folder / "weighted.jsonl").write_text("".join(weighted))
    return [
        f"trainer.plugins=[{plugin}]",
        f"data.train_files={folder}/weighted.jsonl",
        "algorithm.adv_estimator=own_estimator",
        "actor_rollout_ref.actor.policy_loss.loss_mode=own_loss",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.use_dynamic_bsz=False",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",  # less than the responses to a prompt
    ]
