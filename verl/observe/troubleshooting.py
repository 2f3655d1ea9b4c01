"""`docs/troubleshooting.md`, from the table of diagnoses: `python -m verl.observe.troubleshooting FILE` writes it."""

from __future__ import annotations

import sys
from pathlib import Path

from verl.observe.diagnoses import SECTIONS, Diagnosis

_HEAD = """# Troubleshooting

By symptom. While a run runs it is judged after every step, and what is found is shown with the values to set: on the
console, by `verl view`, in the report, and in `metrics.jsonl` (`"findings"`). A run that crashes says what to do in
`crash.txt`. `verl doctor` checks a machine and a config before a run.

This page is made from the table in `verl/observe/diagnoses/` by `python -m verl.observe.troubleshooting FILE`.
"""
_DETECTED = {
    "start": "Reported at the start as `{}`.",
    "step": "Reported after a step as `{}`.",
    "crash": "In `crash.txt`, as `{}`.",
    "asked": "",
}


def page() -> str:
    parts = [_HEAD]
    for heading, entries in SECTIONS.items():
        parts.append(f"## {heading}\n")
        parts += map(_entry, entries)
    return "\n".join(parts)


def _entry(each: Diagnosis) -> str:
    meaning = each.meaning[0].upper() + each.meaning[1:]
    detected = _DETECTED[each.when].format(each.name)
    return f"### {each.symptom}\n\n{meaning}. {detected}".rstrip() + f"\n\n{each.advice}\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
