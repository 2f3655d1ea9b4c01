"""`verl why RUN --step N`: repeat a step of a run and rank its groups by what the update did to their responses.

An update should make a response more likely where its advantage is positive and less likely where it is negative. The
groups it moved the other way contradict the rest of the step: they come first, and their rewards are worth a look.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.config.parallelism import counted
from verl.config.schema import PPOConfig
from verl.errors import ConfigError, DataError
from verl.trainer.fork import open_recorded
from verl.trainer.replay import Repetition, add_step_arguments, repetition, report

if TYPE_CHECKING:
    import torch

    from verl.data.proto import DataProto
    from verl.trainer.loop import RLLoop

GROUPS = 5
"""Groups shown."""
_SHOWN = 60
"""Characters of a text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_step_arguments(parser, "the step to look at")
    parser.add_argument(
        "--groups", type=int, default=GROUPS, help=f"groups to show, 0: all (default: {GROUPS})"
    )


def run(args: argparse.Namespace) -> int:
    recorded = open_recorded(args.run)
    if recorded.kind is not PPOConfig:
        raise ConfigError(f"{recorded.path} is of {recorded.command}, which has no groups of responses")
    if args.groups < 0:
        raise ConfigError(f"--groups is {args.groups}; it must be at least 0")
    seen = Seen(args.step)
    repeated = repetition(recorded, args.step, args.start, watch=seen)
    if len(seen.log_probs) < 2:
        said = report(repeated.found, repeated.first, args.step, repeated.start)
        raise DataError(f"step {args.step} was not reached, as the repetition is not the run:\n{said}")
    groups = ranked(seen.rows())
    lines = [*_header(args.step, repeated, groups), *_shown(groups[: args.groups or len(groups)])]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


class Seen:
    """The batch of a step, and the log-probs [B, T] of its tokens before and after the update."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, loop: RLLoop, batch: DataProto) -> None:
        from verl.config.roles import ACTOR

        if loop.step_number != self.step:
            return
        if not loop.trains_actor:
            raise ConfigError(
                f"step {self.step} trains the critic alone (trainer.critic_warmup); choose a later one"
            )
        self.batch, self.tokenizer = batch, loop.tokenizer
        found = loop.workers.forward(ACTOR, batch, ["old_log_probs"])
        self.log_probs.append(found.batch["old_log_probs"].clone())

    def rows(self) -> list[dict[str, Any]]:
        """Of each response: `sample_rows`, its trained tokens, and the sums over these of the log-probs before and
        after, and of the change times the advantage."""
        from verl.data.assemble import sampled_rows
        from verl.trainer.validation import sample_rows
        from verl.workers.group import sessions_of

        batch = self.batch
        mask = batch.batch["response_mask"].bool()
        before, after = (values.where(mask, values.new_zeros(())) for values in self.log_probs)
        gain = (after - before) * batch.batch["advantages"].where(mask, before.new_zeros(()))
        sums = {"tokens": mask.float(), "before": before, "after": after, "gain": gain}
        batch.batch |= {f"why_{name}": values.sum(-1) for name, values in sums.items()}
        batch = sampled_rows(batch)
        sessions = sessions_of(batch)
        numbers = {name: sessions.sum(batch.batch[f"why_{name}"]).tolist() for name in sums}
        rows = sample_rows(batch, self.tokenizer)
        return [{**row, **{name: numbers[name][at] for name in sums}} for at, row in enumerate(rows)]


@dataclass(frozen=True)
class MovedGroup:
    """A prompt and what an update did to the trained responses to it."""

    prompt: str
    rows: Sequence[dict[str, Any]]

    @property
    def gain(self) -> float:
        """Mean change of a trained token's log-prob times its advantage: negative where the update moved against it."""
        return sum(row["gain"] for row in self.rows) / sum(row["tokens"] for row in self.rows)

    @property
    def moved(self) -> float:
        """Mean size of the change of a response's log-prob."""
        return sum(abs(row["after"] - row["before"]) for row in self.rows) / len(self.rows)


def ranked(rows: Sequence[dict[str, Any]]) -> list[MovedGroup]:
    """Groups with advantages, those first that the update moved most against them."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["tokens"]:
            groups.setdefault(row["uid"], []).append(row)
    trained = [members for members in groups.values() if any(row["advantage"] for row in members)]
    found = [MovedGroup(members[0]["prompt"], members) for members in trained]
    return sorted(found, key=lambda group: group.gain)


def _header(step: int, repeated: Repetition, groups: Sequence[MovedGroup]) -> list[str]:
    against = sum(group.gain < 0 for group in groups)
    lines = [
        f"step {step}: {counted(len(groups), 'group')} with advantages; the update moved {against} against them, which "
        "come first"
    ]
    if repeated.found.difference is not None:
        what = f"{repeated.found.difference.name} of step {repeated.found.difference.step}"
        lines.append(
            f"note: the repetition is not the run, it differs first in {what} (verl replay says why)"
        )
    return lines


def _shown(groups: Sequence[MovedGroup]) -> list[str]:
    lines = []
    for number, group in enumerate(groups, 1):
        lines.append(
            f"{number}. {_short(group.prompt)}   change x advantage {group.gain:+.4f}, moved {group.moved:.3f}"
        )
        for row in sorted(group.rows, key=lambda row: row["gain"] / row["tokens"]):
            lines.append(
                f"     score {row['score']:g}  advantage {row['advantage']:+.3f}  log-prob {row['before']:.3f} -> "
                f"{row['after']:.3f} ({row['after'] - row['before']:+.3f})  {_short(row['response'])}"
            )
    return lines


def _short(text: str) -> str:
    shown = " ".join(text.split())
    return repr(shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}...")
