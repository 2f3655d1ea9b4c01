"""Recipes: pure functions from a source row to a training row (None: dropped and counted), in the forms that datasets
are shared in. `tool_use.py` has the one for conversations with tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.data.columns import likely_column
from verl.data.messages import Messages, after_prompt, named_roles, read_messages, stored_calls
from verl.data.tasks.base import rl_row
from verl.data.tasks.countdown import question_of
from verl.errors import DataError
from verl.json_input import parse_json

Row = dict[str, Any]
Source = Mapping[str, Any]
Convert = Callable[[Source, int, str], Row | None]
"""Source row, its number, the split's name -> training row, or None to leave it out."""


@dataclass(frozen=True)
class DatasetRecipe:
    """How one dataset becomes rows."""

    name: str
    about: str
    convert: Convert
    hub_id: str | None = None
    """Where the rows come from when no files are given."""


RECIPES: dict[str, DatasetRecipe] = {}


def recipe(about: str, hub_id: str | None = None) -> Callable[[Convert], Convert]:
    """Register a function under its name."""

    def register(convert: Convert) -> Convert:
        RECIPES[convert.__name__] = DatasetRecipe(convert.__name__, about, convert, hub_id)
        return convert

    return register


def first_of(row: Source, names: Sequence[str], what: str) -> Any:
    """The first of these columns that holds something; DataError with the columns there are."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    guess = likely_column(names[0], "prompt", list(row), row)
    hint = f" (is it '{guess}'?)" if guess else ""
    raise DataError(f"no {what}: looked for {', '.join(names)}; the columns are {', '.join(row)}{hint}")


def _texts(row: Source, *names: str) -> dict[str, str]:
    """Those of these columns that hold something."""
    return {name: str(row[name]) for name in names if row.get(name) is not None}


# -- problems with answers


@recipe("grade-school word problems, answer after ####", "openai/gsm8k:main")
def gsm8k(row: Source, index: int, split: str) -> Row:
    question = str(first_of(row, ("question", "problem"), "question")).strip()
    solution = str(first_of(row, ("answer", "solution"), "answer"))
    _, mark, rest = solution.rpartition("####")
    number = rest.strip().replace(",", "").lstrip("$")
    if not mark or not number:
        raise DataError(f"the answer has no '#### number' at its end: ...{solution[-60:]!r}")
    instruction = "Work it out step by step, then write the result alone on the last line, as: #### number"
    extra = {"split": split, "index": index, "question": question, "answer": solution}
    return rl_row("gsm8k", f"{question}\n\n{instruction}", number, "math", extra)


_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z]) *")


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` (or `\fbox`), braces inside it matched, or the token of a bare
    `\boxed 7`; None without one."""
    for box in reversed(list(_BOX.finditer(text))):
        if not text.startswith("{", box.end()):
            token = text[box.end() :].split("$")[0].split()
            if token:
                return token[0].rstrip(".,")
            continue
        depth = 0
        for brace in re.finditer(r"(?<!\\)[{}]", text[box.end() :]):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                return text[box.end() :][1 : brace.start()].strip()
    return None


@recipe(r"competition problems, answer in \boxed", "DigitalLearningGmbH/MATH-lighteval:default")
def math(row: Source, index: int, split: str) -> Row | None:
    problem = str(first_of(row, ("problem", "question", "prompt"), "problem")).strip()
    answer = row.get("answer")
    if answer is None or not str(answer).strip():
        answer = last_boxed(str(first_of(row, ("solution", "answer"), "answer or solution")))
    if not answer:
        return None  # a solution without a boxed answer cannot be checked
    instruction = r"Reason step by step and give the final answer as \boxed{answer}."
    extra = {"split": split, "index": index, "question": problem, **_texts(row, "level", "type", "subject")}
    return rl_row("math", f"{problem}\n\n{instruction}", str(answer).strip(), "math", extra)


@recipe("reach a target from given numbers; generated without --from")
def countdown(row: Source, index: int, split: str) -> Row:
    given, target = first_of(row, ("nums", "numbers"), "numbers"), first_of(row, ("target",), "target")
    try:
        numbers, goal = [int(number) for number in given], int(target)
    except (TypeError, ValueError) as error:
        raise DataError(f"numbers and target must be integers, got {given!r} and {target!r}") from error
    truth, extra = {"numbers": numbers, "target": goal}, {"split": split, "index": index}
    return rl_row("tasks/countdown", question_of(numbers, goal), truth, "math", extra)


# -- programming problems
# The truth is a JSON string in one of three forms: {"inputs": [stdin, ...], "outputs": [stdout, ...]};
# {"fn_name": f, "inputs": [[argument, ...], ...], "outputs": [result, ...]}; {"asserts": [statement, ...]}, with
# "entry_point" where the assertions call the function `candidate`.

_STDIN = (
    "Write a Python program that reads standard input and prints the result. Put it in one ```python block."
)


def _tests_of(row: Source) -> dict[str, Any] | None:
    """The row's tests in one of the three forms; None when it has none."""
    if row.get("test_list"):  # MBPP
        setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
        return {"asserts": [f"{setup}\n{test}".strip() for test in row["test_list"]]}
    if row.get("test") and row.get("entry_point"):  # HumanEval
        return {"asserts": [row["test"]], "entry_point": row["entry_point"]}
    for column in ("input_output", "tests", "test_cases", "public_tests", "private_tests"):
        tests = row.get(column)
        if isinstance(tests, str) and tests:
            try:
                tests = parse_json(tests)
            except ValueError as error:
                raise DataError(f"'{column}' is not valid JSON: {error}") from error
        if isinstance(tests, list) and tests:  # [{"input": ..., "output": ...}, ...]
            if not all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in tests):
                raise DataError(f"'{column}' must be a list of objects with 'input' and 'output'")
            tests = {name: [test[name] for test in tests] for name in ("input", "output")}
        if isinstance(tests, Mapping):
            inputs, outputs = (tests.get(name, tests.get(name + "s")) for name in ("input", "output"))
            if inputs and outputs and len(inputs) == len(outputs):
                named = {"fn_name": tests["fn_name"]} if tests.get("fn_name") else {}
                return {**named, "inputs": list(inputs), "outputs": list(outputs)}
            if inputs or outputs:
                raise DataError(f"'{column}' has {len(inputs or ())} inputs and {len(outputs or ())} outputs")
    return None


@recipe(
    "programming problems with tests (MBPP, HumanEval, APPS, TACO, CodeContests)",
    "google-research-datasets/mbpp:full",
)
def code(row: Source, index: int, split: str) -> Row | None:
    problem = str(first_of(row, ("question", "problem", "text", "prompt", "description"), "problem")).strip()
    tests = _tests_of(row)
    if tests is None:
        return None
    if "asserts" in tests and not row.get("entry_point"):
        problem += "\n\nIt must pass:\n" + "\n".join(row["test_list"][:3])
    if row.get("starter_code"):
        problem += f"\n\nStart from:\n{row['starter_code']}"
    instruction = _STDIN
    if "asserts" in tests or "fn_name" in tests:
        function = tests.get("fn_name") or row.get("entry_point")
        name = f" `{function}`" if function else ""
        instruction = f"Write the Python function{name}. Put the complete code in one ```python block."
    extra = {"split": split, "index": index, **_texts(row, "task_id", "difficulty", "source")}
    return rl_row("code", f"{problem}\n\n{instruction}", json.dumps(tests), "code", extra)


# -- conversations


def _turns_of(value: Any) -> Messages | None:
    """Messages with the usual roles; None for a value that is none."""
    messages = read_messages(value, "the row")
    return messages and named_roles(messages)


def _with_system(row: Source, messages: Messages) -> Messages:
    """With the column `system` in front, where the conversation has no such message."""
    if not row.get("system") or messages[0]["role"] == "system":
        return messages
    return [_message("system", row["system"]), *messages]


def _message(role: str, text: Any) -> dict[str, Any]:
    return {"role": role, "content": str(text)}


def _conversation(row: Source) -> Messages:
    """The conversation of a row, whichever form it has."""
    for column in ("messages", "conversations", "conversation"):
        turns = _turns_of(row.get(column))
        if turns:
            return turns
    if row.get("instruction") is not None and row.get("output") is not None:
        question = str(row["instruction"]) + (f"\n\n{row['input']}" if row.get("input") else "")
        return [_message("user", question), _message("assistant", row["output"])]
    pairs = (("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("input", "output"))
    for asked, answered in pairs:
        if row.get(asked) is not None and row.get(answered) is not None:
            before = _turns_of(row[asked]) or [_message("user", row[asked])]
            answer = _turns_of(row[answered]) or [_message("assistant", row[answered])]
            return [message for part in after_prompt(before, answer, "the row") for message in part]
    raise DataError(
        "no conversation: looked for messages, conversations, instruction/output, prompt/response and the like; "
        f"the columns are {', '.join(row)}"
    )


def until_answer(messages: Messages) -> Messages:
    """Without what no answer follows."""
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    return messages


@recipe(
    "conversations (ShareGPT, Alpaca, messages, question and answer) to a column `messages`, with their `tools`"
)
def sft_chat(row: Source, index: int, split: str) -> Row | None:
    messages = until_answer(_with_system(row, _conversation(row)))
    if len(messages) < 2 or messages[0]["role"] == "assistant":
        return None
    tools = row.get("tools")
    if not tools:
        return {"messages": stored_calls(messages)}
    # As text: a table would give every schema the fields of all others.
    shown = tools if isinstance(tools, str) else json.dumps(list(tools))
    return {"messages": stored_calls(messages), "tools": shown}


_SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")


def _dialogue(text: str) -> Messages | None:
    """Messages of a text with `Human:` and `Assistant:` paragraphs (HH-RLHF); None for any other text."""
    parts = _SPEAKER.split("\n\n" + text.lstrip())
    if len(parts) < 3 or parts[0].strip():
        return None
    roles = {"Human": "user", "Assistant": "assistant"}
    return [_message(roles[who], said.strip()) for who, said in zip(parts[1::2], parts[2::2], strict=True)]


def _side(value: Any, role: str, what: str) -> Messages:
    """Messages of any form; a text that is none is one message of `role`."""
    text = value if isinstance(value, str) else ""
    turns = _turns_of(value) or _dialogue(text) or ([_message(role, text)] if text else None)
    if turns is None:
        raise DataError(f"'{what}' is neither text nor messages: {str(value)[:100]!r}")
    return turns


@recipe("pairs of a better and a worse answer (HH-RLHF, UltraFeedback, prompt/chosen/rejected)")
def preference(row: Source, index: int, split: str) -> Row | None:
    given = row.get("prompt", row.get("question", row.get("instruction")))
    sides = [
        _side(first_of(row, (name, f"response_{name}"), name), "assistant", name)
        for name in ("chosen", "rejected")
    ]
    if given:
        prompt = _side(given, "user", "prompt")
        sides = [[m for part in after_prompt(prompt, side, "the row") for m in part] for side in sides]
    chosen, rejected = (_with_system(row, side) for side in sides)
    answered = chosen[-1]["role"] == rejected[-1]["role"] == "assistant"
    if not answered or chosen[:-1] != rejected[:-1] or chosen == rejected or len(chosen) < 2:
        return None  # the answers are equal, or do not follow the same conversation
    parts = {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}
    return {name: stored_calls(messages) for name, messages in parts.items()}
