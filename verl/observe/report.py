"""`report.html`: a run at a glance in one file that needs no network and no script.

What always holds: the page is self-contained; every text that came from data or a model is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.observe.jsonl import read_jsonl, read_metrics
from verl.observe.run_folder import write_atomically

# Curves worth a place, in this order; whatever validation measured comes after them.
_CURVES = (
    "reward/mean",
    "train/loss",
    "val/loss",
    "response_length/mean",
    "response_length/clip_ratio",
    "actor/entropy",
    "actor/kl_loss",
    "actor/kl",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "actor/grad_norm",
    "critic/vf_loss",
    "critic/vf_explained_var",
    "training/rollout_probs_diff_mean",
    "perf/throughput",
    "timing_s/step",
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1c2430 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); gap: 1rem }
figure { margin: 0; border: 1px solid #d8dee6; border-radius: 6px; padding: .6rem }
figcaption { font-weight: 600; display: flex; justify-content: space-between }
figcaption span { font-weight: 400; color: #57606a }
svg { width: 100%; height: auto } polyline { fill: none; stroke: #2563eb; stroke-width: 1.5 }
circle { fill: #2563eb } text { font-size: 9px; fill: #57606a }
.sample { border-left: 3px solid #d8dee6; padding: .2rem 0 .2rem .8rem; margin: 1rem 0 }
.sample dt { color: #57606a; font-size: .85rem }
.sample dd { margin: 0 0 .4rem; white-space: pre-wrap; overflow-wrap: anywhere }
pre { background: #f5f7f9; padding: .8rem; overflow-x: auto; font-size: .85rem }
"""


def write_report(folder: Path | str, title: str | None = None, samples: int = 6) -> Path:
    """Write `report.html` from what the run folder holds so far."""
    folder = Path(folder)
    rows = read_metrics(folder / "metrics.jsonl")
    parts = [f"<h1>{html.escape(title or f'{folder.parent.name} / {folder.name}')}</h1>", _summary(rows)]
    crash = folder / "crash.txt"
    if crash.is_file():
        text = crash.read_text(encoding="utf-8", errors="replace")
        parts.append(f"<h2>Crash</h2><pre>{html.escape(text)}</pre>")
    figures = "".join(curve_svg(name, points) for name, points in _curves(rows))
    parts.append(f"<h2>Curves</h2><div class='curves'>{figures or 'No step has finished yet.'}</div>")
    for heading, name in (("Validation samples", "validation"), ("Training samples", "rollouts")):
        parts.append(_samples(heading, folder / name, samples))
    config = folder / "config.yaml"
    if config.is_file():
        text = html.escape(config.read_text(encoding="utf-8", errors="replace"))
        parts.append(
            f"<h2>Configuration</h2><details><summary>config.yaml</summary><pre>{text}</pre></details>"
        )
    page = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{html.escape(title or folder.name)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )
    target = folder / "report.html"
    write_atomically(target, page)
    return target


def curve_svg(name: str, points: Sequence[tuple[float, float]]) -> str:
    """One figure: the curve as a polyline with its range, its last value in the caption."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    width, height, left, bottom = 320.0, 120.0, 6.0, 14.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        up = (y - y0) / (y1 - y0) if y1 > y0 else 0.5
        return left + across * (width - 2 * left), height - bottom - up * (height - bottom - 12)

    placed = [place(x, y) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    drawn = f"<polyline points='{line}'/>" if len(placed) > 1 else ""
    last = placed[-1]
    return (
        f"<figure><figcaption>{html.escape(name)}<span>{ys[-1]:.4g}</span></figcaption>"
        f"<svg viewBox='0 0 {width:g} {height:g}' role='img' aria-label='{html.escape(name, quote=True)}'>{drawn}"
        f"<circle cx='{last[0]:.1f}' cy='{last[1]:.1f}' r='2.5'/>"
        f"<text x='{left:g}' y='9'>{y1:.4g}</text><text x='{left:g}' y='{height - 3:g}'>{y0:.4g}</text>"
        f"<text x='{width - left:g}' y='{height - 3:g}' text-anchor='end'>step {x1:g}</text></svg></figure>"
    )


def _curves(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[tuple[float, float]]]]:
    measured = {name for row in rows for name in row}
    validation = sorted(name for name in measured if name.startswith("val-core/"))
    found = []
    for name in [*validation, *(name for name in _CURVES if name in measured)]:
        points = [
            (float(row["step"]), float(row[name]))
            for row in rows
            if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])
        ]
        if points:
            found.append((name, points))
    return found


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "<p>No step has finished yet.</p>"
    seconds = sum(float(row.get("timing_s/step") or 0.0) for row in rows)
    text = f"{rows[-1]['step']} steps, {seconds / 60:.1f} minutes of training"
    rewards = [row["reward/mean"] for row in rows if isinstance(row.get("reward/mean"), (int, float))]
    if rewards:
        text += f"; reward {rewards[0]:.3f} &rarr; {rewards[-1]:.3f}"
    return f"<p>{text}.</p>"


def _samples(heading: str, folder: Path, count: int) -> str:
    files = sorted(
        (f for f in folder.glob("*.jsonl") if f.stem.isdecimal() and f.is_file()), key=lambda f: int(f.stem)
    )
    if not files:
        return ""
    chosen = [files[0], files[-1]] if len(files) > 1 else files
    blocks = []
    for file in chosen:
        for _, row in zip(range(count), read_jsonl(file), strict=False):
            fields = "".join(
                f"<dt>{html.escape(str(key))}</dt><dd>{html.escape(str(value))}</dd>"
                for key, value in row.items()
            )
            blocks.append(
                f"<div class='sample'><strong>step {int(file.stem)}</strong><dl>{fields}</dl></div>"
            )
    return f"<h2>{heading}</h2>{''.join(blocks)}"
