"""What is said when nobody moves any more: who stands still where, and who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl.errors import RESUME
from verl.workers.watchdog import Sign


def label(name: str) -> str:
    """The role and the number of a process, out of its whole name."""
    return name.split(" on ")[0]


def who_waits_for_whom(
    call: str,
    watchdog_s: float,
    names: Sequence[str],
    awaited: Sequence[int],
    signs: Mapping[int, Sign],
) -> str:
    """`names` are those of all ranks, `awaited` the ranks that have not answered `call`, `signs` the latest ones."""
    short = [label(name) for name in names]
    silent = [rank for rank in range(len(names)) if rank not in signs]
    stuck = [rank for rank in awaited if rank in signs and not signs[rank].waits_for_others]
    waiting = [rank for rank in awaited if rank in signs and signs[rank].waits_for_others]
    finished = [rank for rank in range(len(names)) if rank not in awaited and rank not in silent]
    lines = [f"no sign of life for {watchdog_s:g} s (trainer.watchdog_s) in {call}."]
    lines += [f"{names[rank]} does not answer at all." for rank in silent]
    lines += [f"{signs[rank].name} stands still at {signs[rank].where}." for rank in stuck]
    culprits = ", ".join(short[rank] for rank in sorted(silent + stuck)) or "one another"
    lines += [f"{signs[rank].name} waits for {culprits} at {signs[rank].where}." for rank in waiting]
    if finished and not (silent or stuck):
        lines.append(f"Already done with it: {', '.join(short[rank] for rank in finished)}.")
    lines.append(f"The run ends here; {RESUME}. If the work really takes longer, raise trainer.watchdog_s.")
    stacks = [f"\nStack of {short[rank]}:\n{signs[rank].stack}" for rank in stuck or waiting[:1]]
    return "\n".join(lines + stacks)
