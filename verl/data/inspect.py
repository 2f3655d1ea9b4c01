"""`verl data inspect FILE`: rows, columns, and with `--model` the lengths and the rows the trainer would refuse."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from verl.config.sections.data import CHAT_TEMPLATE_USES
from verl.data.chat import ChatFormat
from verl.data.columns import STRINGS, is_text, likely_column, truth_of
from verl.data.conversations import Row, encode_answers, labelled_row, pair_rows, sft_answers
from verl.data.files import Rows, read_rows
from verl.data.messages import is_conversation, plain_text, read_messages
from verl.data.tokenizer import load_tokenizer
from verl.errors import DataError, VerlError

_COLUMNS = ("prompt", "response", "messages", "tools", "chosen", "rejected", "completion", "label")
_KINDS = {
    "rl": "prompts for reinforcement learning (main_ppo)",
    "pair": "prompts with responses for fine-tuning (sft_trainer); as prompts alone, for reinforcement learning",
    "chat": "conversations for fine-tuning (sft_trainer), learned from at every answer",
    "preference": "preference pairs (prompt, chosen, rejected)",
    "labelled": "answers with a label (prompt, completion, label) for preference training with kto",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", help="files, folders or a dataset id")
    parser.add_argument("--model", help="model folder or id whose tokenizer and chat template to use")
    for name in _COLUMNS:
        parser.add_argument(f"--{name}_key", default=name, help=f"data.{name}_key (default: {name})")
    parser.add_argument(
        "--apply_chat_template",
        choices=CHAT_TEMPLATE_USES,
        default="auto",
        help="data.apply_chat_template (default: auto)",
    )
    parser.add_argument("--system_prompt", help="data.system_prompt")
    parser.add_argument("--chat_template", help="data.chat_template: a template file")
    parser.add_argument("--max_length", type=int, help="count what is longer, in tokens")
    parser.add_argument("--trust_remote_code", action="store_true", help="allow the tokenizer's own code")


def run(args: argparse.Namespace) -> int:
    """0 when the trainer would take every row, 1 when it would refuse some."""
    rows = read_rows(args.files, key="FILE")
    keys = {name: getattr(args, f"{name}_key") for name in _COLUMNS}
    kind = kind_of(rows.column_names, keys)
    lines = [f"{name}: {count} rows" for name, _, count in rows.files()]
    lines += ["", f"{len(rows)} rows, columns:", *_column_lines(rows), ""]
    usable = kind is not None
    if kind is None:
        guess = likely_column(keys["prompt"], "prompt", rows.column_names, rows[0])
        advice = f"; set data.prompt_key={guess} (try: --prompt_key {guess})" if guess else ""
        if guess and is_text(rows[0].get(guess)):
            advice += f". {STRINGS}"
        lines.append(f"not usable: there is no column '{keys['prompt']}' and no '{keys['messages']}'{advice}")
    else:
        lines.append(f"the trainer would read it as: {_KINDS[kind]}")
        if kind == "rl":
            sources = Counter(str(row.get("data_source") or "(none)") for row in rows)
            lines.append("data_source: " + ", ".join(f"{name} ({n})" for name, n in sources.most_common(8)))
            lines.append(f"rows without a truth: {sum(truth_of(row) is None for row in rows)}")
        if args.model:
            tokenizer = load_tokenizer(args.model, args.trust_remote_code, args.chat_template, key="--model")
            chat = ChatFormat(
                tokenizer, system_prompt=args.system_prompt, apply_chat_template=args.apply_chat_template
            )
            measured, usable = _measure(rows, chat, kind, keys, args.max_length)
            lines += measured
        else:
            lines.append("give --model for lengths in tokens and a check of every row")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if usable else 1


def kind_of(columns: Sequence[str], keys: Mapping[str, str]) -> str | None:
    """What rows with these columns are; None when no trainer takes them."""
    if keys["chosen"] in columns and keys["rejected"] in columns:
        return "preference"
    if {keys[name] for name in ("prompt", "completion", "label")} <= set(columns):
        return "labelled"
    if keys["messages"] in columns and (keys["response"] in columns or keys["prompt"] not in columns):
        return "chat"
    if keys["prompt"] in columns:
        return "pair" if keys["response"] in columns else "rl"
    return None


def _column_lines(rows: Rows) -> Iterator[str]:
    width = max(map(len, rows.column_names), default=0)
    for name in rows.column_names:
        values = list(rows.column(name))
        present = [value for value in values if value is not None]
        types = Counter("messages" if is_conversation(value) else type(value).__name__ for value in present)
        seen = " | ".join(kind for kind, _ in types.most_common(3)) or "empty"
        missing = f", {len(values) - len(present)} missing" if len(present) < len(values) else ""
        example = present[0] if present else ""
        text = " ".join(_shown(example).split())
        yield f"  {name:<{width}}  {seen}{missing}   e.g. {text[:60]}"


def _shown(example: Any) -> str:
    try:
        messages = read_messages(example, "it")
    except DataError:  # refused where rows are measured
        messages = None
    return plain_text(messages) if messages else str(example)


def _measure(
    rows: Rows, chat: ChatFormat, kind: str, keys: Mapping[str, str], limit: int | None
) -> tuple[list[str], bool]:
    """Lengths, refused rows and the first text; and whether every row can be used."""
    lengths: dict[str, list[int]] = {"prompt" if kind == "rl" else "full": [], "learned from": []}
    total, learned = lengths.values()
    errors: list[str] = []
    first = ""
    answers: list[str] = []
    split: list[int] = []
    for number, row in enumerate(rows):
        try:
            made = _encoded(row, chat, kind, keys, rows.origin(number))
        except VerlError as error:
            errors.append(str(error))
            continue
        if kind == "preference":
            total.append(max(len(ids) for ids, _ in made))
        else:
            total += [len(ids) for ids, _ in made]
        if kind != "rl":
            learned += [sum(mask) for _, mask in made]
            answers = answers or _learned_texts(chat, *made[0])
        if kind == "chat" and len(made) > 1:
            split.append(len(made))
        first = first or str(chat.tokenizer.decode(made[0][0]))
    lines = [f"refused: {len(errors)} of {len(rows)} rows, for example:"] if errors else []
    lines += [f"  {reason}" for reason in errors[:3]]
    if split:
        lines.append(
            f"{len(split)} conversations become {sum(split)} rows: the chat template writes earlier messages "
            "differently once later ones follow"
        )
    for name, values in lengths.items():
        if values:
            median, p95 = np.percentile(values, [50, 95]).astype(int).tolist()
            mean = f"mean {np.mean(values):.0f}, median {median}, 95% {p95}, longest {max(values)}"
            lines.append(f"{name} length in tokens: {mean}")
    if limit is not None and total:
        over = sum(length > limit for length in total)
        lines.append(f"longer than {limit}: {over} of {len(total)} rows ({over / len(total):.1%})")
    lines += ["", "first row, as the policy sees it:", *(f"  | {line}" for line in first[:1500].splitlines())]
    if answers:
        lines += ["", "of it, learned from:"]
        cut = [text[:1500].splitlines() for text in answers]
        lines += [f"  {'|' if at else '>'} {line}" for text in cut for at, line in enumerate(text)]
    return lines, not errors


def _learned_texts(chat: ChatFormat, ids: Sequence[int], mask: Sequence[int]) -> list[str]:
    """The text of each run of ids that is learned from."""
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [str(chat.tokenizer.decode([token for token, _ in run])) for marked, run in runs if marked]


def _encoded(
    row: Mapping[str, Any], chat: ChatFormat, kind: str, keys: Mapping[str, str], where: str
) -> list[Row]:
    """The rows that the trainer makes of a row; both of a pair."""
    if kind == "preference":
        pair = {keys[name]: row.get(keys[name]) for name in ("chosen", "rejected")}
        return pair_rows(chat, row.get(keys["prompt"]), pair, where, reward=False)
    if kind == "labelled":
        prompt, answer = row.get(keys["prompt"]), row.get(keys["completion"])
        return [labelled_row(chat, prompt, answer, where, keys["completion"])]
    if kind == "rl":
        _, _, ids = chat.encode_prompts([row.get(keys["prompt"])], [where])[0]
        if not ids:
            raise DataError(f"The prompt of {where} is empty.")
        return [(ids, [0] * len(ids))]
    answers = sft_answers(chat, row, where, keys, conversation=kind == "chat")
    return encode_answers(chat, [answers], [where])[0]
