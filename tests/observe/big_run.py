"""Run folders of any size with known numbers: `sample(step, line)` is what line `line` of a step's file holds."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np

from verl.observe.token_table import TokenTable

N = 8
"""Responses to a prompt."""
WORDS = [start + end for start in "bcdfghklmnprst" for end in ("a", "e", "i", "o", "u", "an", "en")]


def sample(step: int, line: int, text: str = "", words: int = 0) -> dict[str, Any]:
    """One response; `text` is in every text of it, `words` make it longer."""
    prompt, k = divmod(line, N)
    more = " ".join(["", *drawn(step, line, words)]) if words else ""
    return {
        "uid": f"{step}-{prompt}{text}",
        "data_source": ("gsm8k", "math")[prompt % 2],
        "prompt": f"question {prompt} of step {step}{text}",
        "response": f"answer {k} to {prompt}{text}{more}",
        "ground_truth": f"{prompt}{text}",
        "score": round(math.sin(step * 1000 + line), 3),
        "advantage": round(math.cos(step * 1000 + line), 3),
        "length": 1 + (step * 7919 + line * 104729) % 997,
        "finish_reason": "length" if line % 10 == 9 else "stop",
        "error": f"TimeoutError{text}" if text and k == 1 else None,
    }


def drawn(step: int, line: int, words: int) -> list[str]:
    return random.Random(step * 1_000_000 + line).choices(WORDS, k=words)


def write_run(folder: Path, samples: dict[int, list[dict[str, Any]]], text: str = "") -> Path:
    """A run folder with these samples; `text` is in every other text of it."""
    (folder / "rollouts").mkdir(parents=True)
    for step, rows in samples.items():
        write_samples(folder, step, rows)
    write_rest(folder, list(samples), text)
    return folder


def write_samples(folder: Path, step: int, rows: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rollouts" / f"{step}.jsonl").write_text(lines, encoding="utf-8")


def write_rest(folder: Path, steps: list[int], text: str = "") -> None:
    """Metrics, a finding in the last step, and the configuration."""
    finding = {
        "rule": f"rule{text}",
        "seen": f"seen{text}",
        "meaning": f"meaning{text}",
        "try": f"key=1{text}",
    }
    rows: list[dict[str, Any]] = [
        {"step": step, "reward/mean": step / 8, f"actor/x{text}": 1.5, "timing_s/step": 2.0} for step in steps
    ]
    rows[-1]["findings"] = [finding]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        "trainer": {"project_name": f"p{text}", "total_training_steps": 10},
        "actor_rollout_ref": {"a": text},
    }
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")


def write_big_run(folder: Path, responses: int, steps: int, words: int, tokens_every: int) -> Path:
    """`responses` of `words` words each, in `steps` steps; every `tokens_every`-th step has its tokens."""
    (folder / "rollouts").mkdir(parents=True)
    each = responses // steps
    for step in range(1, steps + 1):
        write_samples(folder, step, [sample(step, line, words=words) for line in range(each)])
        if step % tokens_every == 0:
            table = TokenTable(
                [f" {word}".encode() for word in WORDS], [words] * each, token_columns(step, each, words)
            )
            table.write(folder / "rollouts" / f"{step}.parquet")
    write_rest(folder, list(range(1, steps + 1)))
    return folder


def token_columns(step: int, lines: int, words: int) -> dict[str, np.ndarray]:
    codes = {word: code for code, word in enumerate(WORDS)}
    rng, tokens = np.random.default_rng(step), lines * words
    return {
        "code": np.array([codes[word] for line in range(lines) for word in drawn(step, line, words)]),
        "log_prob": -rng.exponential(0.5, tokens),
        "entropy": rng.exponential(0.5, tokens),
        "ratio": np.exp(rng.normal(0.0, 0.05, tokens)),
        "mask": np.ones(tokens, np.uint8),
        "age": np.zeros(tokens, np.uint8),
        "advantage": np.repeat(rng.normal(size=lines), words).astype("<f4"),
    }
