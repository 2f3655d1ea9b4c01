"""Draws demo-curve.svg from the metrics of a demo run:

python docs/images/demo_curve.py checkpoints/demo/run-1/grpo/metrics.jsonl docs/images/demo-curve.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LEFT, TOP, WIDTH, HEIGHT = 52, 40, 640, 240
# Colours with enough contrast on a light and on a dark page; the background stays that of the page.
LINE, MARK, TEXT, GRID = "#2f81c7", "#d9822b", "#7d8590", "#7d859055"
FONT = "font-family='system-ui, sans-serif' font-size='13'"


def draw(rows: list[dict[str, float]]) -> str:
    last = max(int(row["step"]) for row in rows)
    reward = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    held_out = [(row["step"], row[name]) for row in rows for name in row if name.endswith("/mean@1")]

    def place(step: float, value: float) -> tuple[float, float]:
        return round(LEFT + step / last * WIDTH, 1), round(TOP + (1 - value) * HEIGHT, 1)

    parts = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        _, y = place(0, tick)
        parts.append(f"<path d='M{LEFT} {y}h{WIDTH}' stroke='{GRID}'/>")
        parts.append(f"<text x='{LEFT - 8}' y='{y + 4}' text-anchor='end'>{tick:.2f}</text>")
    for step in range(0, last + 1, 5):
        x, y = place(step, 0)
        parts.append(f"<text x='{x}' y='{y + 20}' text-anchor='middle'>{step}</text>")
    parts.append(f"<text x='{LEFT + WIDTH / 2}' y='{TOP + HEIGHT + 40}' text-anchor='middle'>step</text>")
    path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in reward))
    parts.append(f"<polyline points='{path}' fill='none' stroke='{LINE}' stroke-width='2'/>")
    for point in held_out:
        x, y = place(*point)
        parts.append(f"<circle cx='{x}' cy='{y}' r='5' fill='{MARK}'/>")
        parts.append(f"<text x='{x}' y='{y + 36}' text-anchor='middle' fill='{MARK}'>{point[1]:.2f}</text>")
    parts.append(f"<path d='M{LEFT} 18h24' stroke='{LINE}' stroke-width='2'/>")
    parts.append(f"<text x='{LEFT + 32}' y='22'>mean reward of the training batch</text>")
    parts.append(f"<circle cx='{LEFT + 280}' cy='18' r='5' fill='{MARK}'/>")
    parts.append(f"<text x='{LEFT + 292}' y='22'>accuracy on 300 held-out problems</text>")
    box = f"0 0 {LEFT + WIDTH + 24} {TOP + HEIGHT + 52}"
    body = "\n".join(parts)
    return f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='{box}' {FONT} fill='{TEXT}'>\n{body}\n</svg>\n"


if __name__ == "__main__":
    metrics = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    Path(sys.argv[2]).write_text(draw([row for row in metrics if "step" in row]))
