"""`report.html`: a run at a glance in one file that needs no network and no script.

Values become HTML only through `Markup.format` and `Markup.join`, which escape everything that is not `Markup` itself;
the page's content security policy forbids scripts, forms and every request besides.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from verl.observe.jsonl import read_jsonl, read_metrics
from verl.observe.run_folder import write_atomically
from verl.observe.run_reader import with_turns

# Curves that are shown, in this order; whatever validation measured comes after them.
_CURVES = (
    "reward/mean", "train/loss", "val/loss", "response_length/mean", "response_length/clip_ratio", "actor/entropy",
    "actor/kl_loss", "actor/kl", "actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm", "critic/vf_loss",
    "critic/vf_explained_var", "training/rollout_probs_diff_mean", "perf/throughput", "timing_s/step",
)  # fmt: skip
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1c2430 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); gap: 1rem }
figure { min-width: 0; margin: 0; border: 1px solid #d8dee6; border-radius: 6px; padding: .6rem }
figcaption { font-weight: 600; display: flex; justify-content: space-between; gap: .6rem; overflow-wrap: anywhere }
figcaption span { font-weight: 400; color: #57606a; white-space: nowrap }
svg { width: 100%; height: auto } polyline { fill: none; stroke: #2563eb; stroke-width: 1.5 }
circle { fill: #2563eb } text { font-size: 9px; fill: #57606a }
.sample { border-left: 3px solid #d8dee6; padding: .2rem 0 .2rem .8rem; margin: 1rem 0 }
.sample dt { color: #57606a; font-size: .85rem }
.sample dd { margin: 0 0 .4rem; white-space: pre-wrap; overflow-wrap: anywhere }
li { overflow-wrap: anywhere }
pre { background: #f5f7f9; padding: .8rem; overflow-x: auto; font-size: .85rem }
"""


# Styles are ours alone: the browser compares the hash. Nothing else is loaded or run, whatever a value contains.
_POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; "
    f"style-src 'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"
)
_PAGE = Markup(
    "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
    '<meta http-equiv="Content-Security-Policy" content="{policy}">'
    "<title>{title}</title><style>{style}</style></head><body>{body}</body></html>\n"
)
_FIGURE = Markup(
    "<figure><figcaption>{name}<span>{last:.4g}</span></figcaption>"
    "<svg viewBox='0 0 {width:g} {height:g}' role='img' aria-label='{name}'>{line}"
    "<circle cx='{x:.1f}' cy='{y:.1f}' r='2.5'/>"
    "<text x='{left:g}' y='9'>{high:.4g}</text><text x='{left:g}' y='{bottom:g}'>{low:.4g}</text>"
    "<text x='{right:g}' y='{bottom:g}' text-anchor='end'>step {steps:g}</text></svg></figure>"
)


def write_report(folder: Path | str, title: str | None = None, samples: int = 6) -> Path:
    """Write `report.html` from what the run folder holds so far."""
    folder = Path(folder)
    rows = read_metrics(folder / "metrics.jsonl")
    parts = [Markup("<h1>{}</h1>").format(title or f"{folder.parent.name} / {folder.name}"), _summary(rows)]
    crash = folder / "crash.txt"
    if crash.is_file():
        parts.append(Markup("<h2>Crash</h2><pre>{}</pre>").format(_text(crash)))
    parts.append(_health(folder))
    figures = _joined(curve_svg(name, points) for name, points in _curves(rows))
    parts.append(
        Markup("<h2>Curves</h2><div class='curves'>{}</div>").format(figures or "No step has finished yet.")
    )
    for heading, name in (("Validation samples", "validation"), ("Training samples", "rollouts")):
        parts.append(_samples(heading, folder / name, samples))
    config = folder / "config.yaml"
    if config.is_file():
        parts.append(
            Markup(
                "<h2>Configuration</h2><details><summary>config.yaml</summary><pre>{}</pre></details>"
            ).format(_text(config))
        )
    page = _PAGE.format(policy=_POLICY, title=title or folder.name, style=Markup(_STYLE), body=_joined(parts))
    target = folder / "report.html"
    write_atomically(target, page)
    return target


def curve_svg(name: str, points: Sequence[tuple[float, float]]) -> Markup:
    """One figure: the curve as a polyline with its range, its last value in the caption."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    width, height, left, bottom = 320.0, 120.0, 6.0, 14.0

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        up = (y - y0) / (y1 - y0) if y1 > y0 else 0.5
        return left + across * (width - 2 * left), height - bottom - up * (height - bottom - 12)

    scaled = [to_pixels(x, y) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in scaled)
    return _FIGURE.format(
        name=name,
        last=ys[-1],
        line=Markup("<polyline points='{}'/>").format(line) if len(scaled) > 1 else "",
        width=width,
        height=height,
        left=left,
        right=width - left,
        bottom=height - 3,
        x=scaled[-1][0],
        y=scaled[-1][1],
        high=y1,
        low=y0,
        steps=x1,
    )


def _curves(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[tuple[float, float]]]]:
    measured = {name for row in rows for name in row}
    validation = sorted(name for name in measured if name.startswith("val-core/"))
    found: dict[str, list[tuple[float, float]]] = {}
    for name in [*validation, *(name for name in _CURVES if name in measured)]:
        pairs = [(_number(row.get("step")), _number(row.get(name))) for row in rows]
        points = [(step, value) for step, value in pairs if step is not None and value is not None]
        # With one response per prompt the mean, the best and the majority are one curve.
        if points and points not in [known for other, known in found.items() if _same_data(other, name)]:
            found[name] = points
    return list(found.items())


def _same_data(name: str, other: str) -> bool:
    """Whether two metrics of validation are statistics of the same scores."""
    return name.startswith("val-core/") and name.rpartition("/")[0] == other.rpartition("/")[0]


def _number(value: Any) -> float | None:
    """A finite number as a float; None for anything else a line of metrics may hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer above what a float can hold
        return None


def _summary(rows: Sequence[Mapping[str, Any]]) -> Markup:
    if not rows:
        return Markup("<p>No step has finished yet.</p>")
    seconds = sum(_number(row.get("timing_s/step")) or 0.0 for row in rows)
    text = Markup("{} steps, {:.1f} minutes of training").format(rows[-1].get("step"), seconds / 60)
    rewards = [reward for row in rows if (reward := _number(row.get("reward/mean"))) is not None]
    if rewards:
        text += Markup("; reward {:.3f} &rarr; {:.3f}").format(rewards[0], rewards[-1])
    return Markup("<p>{}.</p>").format(text)


def _health(folder: Path) -> Markup:
    """What the health rules found while the run ran, newest first."""
    from verl.observe.run_reader import is_run, notices, open_run

    found = notices(open_run(folder)) if is_run(folder) else []
    items = _joined(
        Markup("<li><strong>{}</strong> {}</li>").format(notice.when, notice.line) for notice in found
    )
    return Markup("<h2>Health</h2><ul>{}</ul>").format(items) if items else Markup("")


def _samples(heading: str, folder: Path, count: int) -> Markup:
    files = sorted(
        (f for f in folder.glob("*.jsonl") if f.stem.isdecimal() and f.is_file()), key=lambda f: int(f.stem)
    )
    if not files:
        return Markup("")
    chosen = [files[0], files[-1]] if len(files) > 1 else files
    blocks = []
    for file in chosen:
        for _, row in zip(range(count), read_jsonl(file), strict=False):
            fields = _joined(
                Markup("<dt>{}</dt><dd>{}</dd>").format(str(key), str(value))
                for key, value in with_turns(row).items()
            )
            blocks.append(
                Markup("<div class='sample'><strong>step {}</strong><dl>{}</dl></div>").format(
                    int(file.stem), fields
                )
            )
    return Markup("<h2>{}</h2>{}").format(heading, _joined(blocks))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _joined(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)
