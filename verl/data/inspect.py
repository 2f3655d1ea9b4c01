"""`verl data inspect FILE`: rows, columns, lengths, and what the trainer would make of them, by the trainer's own code.

A row it would refuse is reported with the reason. Without a tokenizer lengths are in characters.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.data.chat import ChatFormat, as_messages, load_tokenizer, plain_text
from verl.data.columns import likely_column
from verl.data.files import Rows, read_rows
from verl.data.segments import Segment, conversation_segments, encode_segments, pair_segments, single_answer
from verl.errors import DataError, VerlError

_SHOWN_ERRORS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", help="files, folders or a dataset id")
    parser.add_argument("--model", help="model folder or id whose tokenizer and chat template to use")
    parser.add_argument("--prompt_key", default="prompt", help="data.prompt_key (default: prompt)")
    parser.add_argument("--response_key", default="response", help="data.response_key (default: response)")
    parser.add_argument("--messages_key", default="messages", help="data.messages_key (default: messages)")
    parser.add_argument("--system_prompt", help="data.system_prompt")
    parser.add_argument("--chat_template", help="data.chat_template: a template file")
    parser.add_argument(
        "--max_length", type=int, help="data.max_prompt_length (or max_length): what is longer is counted"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="allow the tokenizer's own code")


def run(args: argparse.Namespace) -> int:
    """0 when the trainer would take every row, 1 when it would refuse some."""
    rows = read_rows(args.files, key="FILE")
    chat = None
    if args.model:
        tokenizer = load_tokenizer(args.model, args.trust_remote_code, args.chat_template, key="--model")
        chat = ChatFormat(tokenizer, system_prompt=args.system_prompt)
    keys = {"prompt": args.prompt_key, "response": args.response_key, "messages": args.messages_key}
    report, usable = inspect_rows(rows, chat, keys, args.max_length)
    sys.stdout.write(report)
    return 0 if usable else 1


def inspect_rows(
    rows: Rows, chat: ChatFormat | None, keys: Mapping[str, str], limit: int | None = None
) -> tuple[str, bool]:
    """The report, and whether every row can be used."""
    lines = [f"{name}: {count} rows" for name, _, count in rows.files()]
    lines += ["", f"{len(rows)} rows, columns:", *_column_lines(rows), ""]
    kind = kind_of(rows.column_names, keys)
    if kind is None:
        guess = likely_column(keys["prompt"], "prompt", rows.column_names, rows[0])
        lines.append(
            f"not usable as it is: there is no column '{keys['prompt']}' and no '{keys['messages']}'."
        )
        if guess:
            lines.append(f"set data.prompt_key={guess} (try: --prompt_key {guess})")
        return "\n".join(lines) + "\n", False
    lines.append(f"the trainer would read it as: {_KINDS[kind]}")
    measured = _measure(rows, chat, kind, keys)
    lines += measured.lines(chat is not None, limit, len(rows))
    if kind == "rl":
        lines += _reward_lines(rows)
    lines += ["", "first row, as the policy sees it:", _indent(measured.first)]
    return "\n".join(lines) + "\n", not measured.errors


_KINDS = {
    "rl": "prompts for reinforcement learning (main_ppo)",
    "pair": "prompts with responses for fine-tuning (sft_trainer); as prompts alone, for reinforcement learning",
    "chat": "conversations for fine-tuning (sft_trainer), learned from at every answer",
    "preference": "preference pairs (prompt, chosen, rejected)",
}


def kind_of(columns: Sequence[str], keys: Mapping[str, str]) -> str | None:
    """What rows with these columns are; None when no trainer takes them."""
    if "chosen" in columns and "rejected" in columns:
        return "preference"
    if keys["messages"] in columns and (keys["response"] in columns or keys["prompt"] not in columns):
        return "chat"
    if keys["prompt"] in columns:
        return "pair" if keys["response"] in columns else "rl"
    return None


def _type_name(value: Any) -> str:
    if as_messages(value):
        return "messages"
    if isinstance(value, Mapping):
        return "{" + ", ".join(map(str, value)) + "}"
    if isinstance(value, list):
        return f"list of {_type_name(value[0])}" if value else "list"
    return type(value).__name__


def _short(value: Any, width: int = 60) -> str:
    text = " ".join((plain_text(as_messages(value) or []) or str(value)).split())
    return text if len(text) <= width else text[: width - 1] + "…"


def _column_lines(rows: Rows) -> list[str]:
    names = rows.column_names
    width = max(map(len, names), default=0)
    lines = []
    for name in names:
        types: Counter[str] = Counter()
        missing, example = 0, None
        for value in rows.column(name):
            if value is None:
                missing += 1
                continue
            types[_type_name(value)] += 1
            if example is None:
                example = value
        seen = " | ".join(kind for kind, _ in types.most_common(3)) or "empty"
        note = f", {missing} missing" if missing else ""
        lines.append(f"  {name:<{width}}  {seen}{note}   e.g. {_short(example)}")
    return lines


@dataclass
class _Measured:
    """Lengths of the rows that can be used, reasons for the others, and the first row's text."""

    lengths: list[int] = field(default_factory=list)
    learned: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    first: str = "(none)"

    def lines(self, in_tokens: bool, limit: int | None, total: int) -> list[str]:
        out = []
        if self.errors:
            out += [f"refused: {len(self.errors)} of {total} rows, for example:"]
            out += [f"  {reason}" for reason in self.errors[:_SHOWN_ERRORS]]
        unit = "tokens" if in_tokens else "characters (give --model for tokens)"
        full = "whole" if self.learned else "prompt"
        for name, values in ((full, self.lengths), ("learned from", self.learned)):
            if values:
                median, p95, p99 = np.percentile(values, [50, 95, 99]).astype(int).tolist()
                out.append(
                    f"{name} length in {unit}: mean {np.mean(values):.0f}, median {median}, 95% {p95}, 99% {p99}, "
                    f"longest {max(values)}"
                )
        if limit is not None and self.lengths:
            over = sum(length > limit for length in self.lengths)
            share = over / len(self.lengths)
            out.append(f"longer than {limit}: {over} of {len(self.lengths)} rows ({share:.1%})")
        return out


def _measure(rows: Rows, chat: ChatFormat | None, kind: str, keys: Mapping[str, str]) -> _Measured:
    out = _Measured()
    for number, row in enumerate(rows):
        where = rows.origin(number)
        try:
            segments = _segments(row, chat, kind, keys, where)
            if chat is None:
                out.lengths.append(sum(len(segment.text) for segment in segments))
            elif kind == "rl":
                (prompt,) = segments
                (ids,) = chat.encode([prompt.text])
                out.lengths.append(len(chat.with_bos(ids) if prompt.takes_bos else ids))
            else:
                ((ids, mask),) = encode_segments(chat, [segments], [where])
                out.lengths.append(len(ids))
                out.learned.append(sum(mask))
        except VerlError as error:
            out.errors.append(str(error))
            continue
        if out.first == "(none)":
            out.first = "".join(segment.text for segment in segments)
    return out


def _segments(
    row: Mapping[str, Any], chat: ChatFormat | None, kind: str, keys: Mapping[str, str], where: str
) -> list[Segment]:
    """The row's text; without a tokenizer the messages' contents stand for it."""
    prompt = row.get(keys["prompt"])
    if kind == "chat" or (kind == "preference" and prompt is None):
        column = keys["messages"] if kind == "chat" else "chosen"
        messages = as_messages(row.get(column))
        if messages is None:
            raise DataError(f"'{column}' of {where} is not a list of messages.")
        if chat is None:
            return [Segment(plain_text(messages), False)]
        return conversation_segments(messages, chat, where)
    if chat is None:
        messages = as_messages(prompt)
        if messages is None and not isinstance(prompt, str):
            raise DataError(f"The prompt of {where} is neither a string nor messages: {str(prompt)[:100]!r}.")
        text = plain_text(messages) if messages else str(prompt)
        raw: Any = text
    else:
        raw, text = chat.prompt_text(prompt, where)
    if not text:
        raise DataError(f"The prompt of {where} is empty.")
    if kind == "rl":
        return [Segment(text, False, takes_bos=isinstance(raw, str))]
    answer_key = keys["response"] if kind == "pair" else "chosen"
    answer = single_answer(row.get(answer_key))
    if not isinstance(answer, str):
        raise DataError(f"'{answer_key}' of {where} must be text, got {type(answer).__name__}.")
    if chat is None:
        return [Segment(text, False), Segment(answer, False)]
    return pair_segments(chat, prompt, answer, where)


def _reward_lines(rows: Rows) -> list[str]:
    """Where the truth is found, and the data sources that choose the scorer."""
    from verl.data.rl_dataset import as_mapping, truth_of

    found: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    for row in rows:
        sources[str(row.get("data_source") or "(none)")] += 1
        nested = as_mapping(row.get("reward_model"))
        if nested is not None and nested.get("ground_truth") is not None:
            found["reward_model.ground_truth"] += 1
        elif truth_of(row) is not None:
            found["ground_truth" if row.get("ground_truth") is not None else "answer"] += 1
        else:
            found["nowhere"] += 1
    return [
        "",
        "truth: " + ", ".join(f"{place} ({count})" for place, count in found.most_common()),
        "data_source: " + ", ".join(f"{name} ({count})" for name, count in sources.most_common(8)),
    ]


def _indent(text: str, longest: int = 1500) -> str:
    cut = text if len(text) <= longest else text[:longest] + "…"
    return "\n".join("  | " + line for line in cut.splitlines())
