"""The task of `verl demo` in every mode of asynchronous training: held-out accuracy by step (`--learn`)."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SEED = 0
EVERY = 5
"""Steps between validations."""
MODES = ("off", "carry_over", "one_step_off", "fully_async")
POOL = ("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1")
COLOURS = ("#4c566a", "#d08770", "#5e81ac", "#a3be8c")
WIDTH, HEIGHT, MARGIN = 640, 320, 48


def mode_arguments(mode: str) -> list[str]:
    """What is typed besides the demo's own arguments; `off` is the demo as it is."""
    if mode == "off":
        return []
    correction = "algorithm.rollout_correction.bypass_mode=True"
    return [f"trainer.async_training.mode={mode}", correction, *(POOL if mode != "carry_over" else ())]


def learn(out: Path | None, json_file: Path | None) -> int:
    """Fine-tune once, then train in each mode from there; a table, and curves as SVG with `--out`."""
    with tempfile.TemporaryDirectory() as folder:
        curves = train_all(Path(out or folder))
    lines = table(curves)
    sys.stdout.write("\n".join(lines) + "\n")
    if out is not None:
        (out / "async.md").write_text("\n".join(lines) + "\n")
        (out / "async.svg").write_text(drawing(curves))
    if json_file is not None:
        json_file.write_text(json.dumps(curves, indent=1))
    return 0


def train_all(folder: Path) -> dict[str, dict[str, Any]]:
    """By mode: accuracy by step, seconds, age of the tokens."""
    import torch

    from verl.config.load import load_ppo_config, load_sft_config
    from verl.demo.cli import rl_arguments, sft_arguments, trained_model
    from verl.demo.data import write_files
    from verl.demo.model import build_model_folder
    from verl.runtime import quiet_transformers
    from verl.trainer import main_ppo, sft_trainer

    os.environ.setdefault("RAY_ADDRESS", "local")
    quiet_transformers()
    torch.set_num_threads(1)
    build_model_folder(folder / "model", SEED)
    files = write_files(folder / "data", SEED)
    quiet = ["trainer.logger=[]"]
    sft = sft_trainer.run(
        load_sft_config([*sft_arguments(folder / "model", files, folder / "sft", SEED), *quiet])
    )
    curves = {}
    for mode in MODES:
        arguments = rl_arguments(trained_model(sft), files, folder / mode, SEED)
        arguments += [*quiet, f"trainer.test_freq={EVERY}", *mode_arguments(mode)]
        started = time.monotonic()
        result = main_ppo.run(load_ppo_config(arguments))
        seconds = time.monotonic() - started
        rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
        curves[mode] = {"seconds": seconds, **curve(rows)}
    return curves


def curve(rows: list[dict[str, Any]]) -> dict[str, Any]:
    accuracy = {}
    for row in rows:
        found = [
            value for name, value in row.items() if name.startswith("val-core/") and name.endswith("mean@1")
        ]
        if found:
            accuracy[int(row.get("training/global_step", 0))] = found[0]
    ages = [row["training/age/mean"] for row in rows if "training/age/mean" in row]
    oldest = [row["training/age/max"] for row in rows if "training/age/max" in row]
    return {"accuracy": accuracy, "age_mean": sum(ages) / len(ages), "age_max": max(oldest)}


def table(curves: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown: a column for each mode."""
    steps = list(next(iter(curves.values()))["accuracy"])
    lines = [
        "| step | " + " | ".join(f"`{mode}`" for mode in curves) + " |",
        "|---" * (len(curves) + 1) + "|",
    ]
    lines += [
        f"| {step} | " + " | ".join(f"{each['accuracy'][step]:.2f}" for each in curves.values()) + " |"
        for step in steps
    ]
    ages = [f"{each['age_mean']:.2f} ({each['age_max']:.0f})" for each in curves.values()]
    lines.append("| age of a token, mean (max) | " + " | ".join(ages) + " |")
    lines.append("| seconds | " + " | ".join(f"{each['seconds']:.0f}" for each in curves.values()) + " |")
    return lines


def drawing(curves: dict[str, dict[str, Any]]) -> str:
    """Accuracy over steps as SVG."""
    last = max(step for each in curves.values() for step in each["accuracy"])

    def at(step: float, value: float) -> tuple[float, float]:
        x = MARGIN + step / last * (WIDTH - 2 * MARGIN)
        return x, HEIGHT - MARGIN - value * (HEIGHT - 2 * MARGIN)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        (x, y), (end, _) = at(0, value), at(last, value)
        parts.append(f'<line x1="{x:.0f}" y1="{y:.0f}" x2="{end:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8:.0f}" y="{y + 4:.0f}" text-anchor="end">{value:g}</text>')
    for step in range(0, last + 1, 3 * EVERY):
        x, y = at(step, 0)
        parts.append(f'<text x="{x:.0f}" y="{y + 18:.0f}" text-anchor="middle">{step}</text>')
    parts.append(
        f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">step; held-out accuracy</text>'
    )
    for number, ((mode, each), colour) in enumerate(zip(curves.items(), COLOURS, strict=True)):
        points = " ".join("{:.1f},{:.1f}".format(*at(int(s), v)) for s, v in each["accuracy"].items())
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = WIDTH - MARGIN - 110, HEIGHT - MARGIN - 78 + 18 * number
        parts.append(
            f'<line x1="{x}" y1="{y}" x2="{x + 20}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{x + 26}" y="{y + 4}">{mode}</text>'
        )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
    return head + 'font-size="12">\n' + "\n".join(parts) + "\n</svg>\n"
