"""`verl data inspect FILE`: rows, columns, and with `--model` the lengths and the rows the trainer would refuse."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from verl.config.known import CHAT_TEMPLATE_USES
from verl.data.chat import ChatFormat, as_messages, load_tokenizer, plain_text
from verl.data.columns import STRINGS, is_text, likely_column
from verl.data.files import Rows, read_rows
from verl.data.segments import (
    Segment,
    conversation_rows,
    conversation_segments,
    encode_segments,
    pair_segments,
    single_answer,
)
from verl.data.special_tokens import unmarked
from verl.data.tool_messages import as_tools
from verl.errors import DataError, VerlError

_KINDS = {
    "rl": "prompts for reinforcement learning (main_ppo)",
    "pair": "prompts with responses for fine-tuning (sft_trainer); as prompts alone, for reinforcement learning",
    "chat": "conversations for fine-tuning (sft_trainer), learned from at every answer",
    "preference": "preference pairs (prompt, chosen, rejected)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", help="files, folders or a dataset id")
    parser.add_argument("--model", help="model folder or id whose tokenizer and chat template to use")
    for name in ("prompt", "response", "messages", "tools"):
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
    keys = {name: getattr(args, f"{name}_key") for name in ("prompt", "response", "messages", "tools")}
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
            # Here, because it imports torch, which --help and completion do not need.
            from verl.data.rl_dataset import truth_of

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
    if "chosen" in columns and "rejected" in columns:
        return "preference"
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
        types = Counter("messages" if as_messages(value) else type(value).__name__ for value in present)
        seen = " | ".join(kind for kind, _ in types.most_common(3)) or "empty"
        missing = f", {len(values) - len(present)} missing" if len(present) < len(values) else ""
        example = present[0] if present else ""
        text = " ".join((plain_text(as_messages(example) or []) or str(example)).split())
        yield f"  {name:<{width}}  {seen}{missing}   e.g. {text[:60]}"


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
        where = rows.origin(number)
        try:
            cut = _rows_of(row, chat, kind, keys, where)
            if kind == "rl":
                prompt = cut[0][0]
                ids = chat.encode([prompt.text])[0]
                total.append(len(chat.with_bos(ids) if prompt.takes_bos else ids))
            else:
                encoded = encode_segments(chat, cut, [where] * len(cut))
                total += [len(ids) for ids, _ in encoded]
                learned += [sum(mask) for _, mask in encoded]
                answers = answers or _learned_texts(chat, *encoded[0])
        except VerlError as error:
            errors.append(str(error))
            continue
        split += [len(cut)] if len(cut) > 1 else []
        first = first or _as_seen(chat, cut[0])
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
        lines += [f"  {'>' if not at else '|'} {line}" for text in answers for at, line in _numbered(text)]
    return lines, not errors


def _as_seen(chat: ChatFormat, segments: Sequence[Segment]) -> str:
    """The text of a row, with the beginning token that is put in front of it."""
    ids = chat.encode([segments[0].text])[0]
    added = segments[0].takes_bos and chat.with_bos(ids) != ids
    return (str(chat.tokenizer.bos_token) if added else "") + unmarked(
        "".join(each.text for each in segments)
    )


def _numbered(text: str) -> Iterator[tuple[int, str]]:
    return enumerate(text[:1500].splitlines())


def _learned_texts(chat: ChatFormat, ids: Sequence[int], mask: Sequence[int]) -> list[str]:
    """The text of each run of ids that is learned from."""
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [str(chat.tokenizer.decode([token for token, _ in run])) for marked, run in runs if marked]


def _rows_of(
    row: Mapping[str, Any], chat: ChatFormat, kind: str, keys: Mapping[str, str], where: str
) -> list[list[Segment]]:
    tools = as_tools(row.get(keys["tools"]), where) if kind in ("chat", "pair") else []
    prompt = row.get(keys["prompt"])
    if kind == "chat" or (kind == "preference" and prompt is None):
        column = keys["messages"] if kind == "chat" else "chosen"
        messages = as_messages(row.get(column))
        if messages is None:
            raise DataError(f"'{column}' of {where} is not a list of messages.")
        if kind == "chat":
            return conversation_rows(messages, chat, where, tools=tools)
        return [conversation_segments(messages, chat, where)]
    if kind == "rl":
        raw, text = chat.prompt_text(prompt, where)
        if not text:
            raise DataError(f"The prompt of {where} is empty.")
        return [[Segment(text, learned=False, takes_bos=chat.takes_bos(raw))]]
    answer_key = keys["response"] if kind == "pair" else "chosen"
    answer = single_answer(row.get(answer_key))
    if not isinstance(answer, str):
        raise DataError(f"'{answer_key}' of {where} must be text, got {type(answer).__name__}.")
    return [pair_segments(chat, prompt, answer, where, tools)]
