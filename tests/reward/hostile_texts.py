"""Scores texts that a degenerate or hostile policy may write with every built-in scorer, as a program without torch.

Prints a line for each scorer: its name, and `ok` or what ended it. A scorer has `CPU_S` seconds of CPU time for all its
texts: many times what time linear in their length takes, and far less than quadratic time takes for the `LONG` ones.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

from verl.config.sections.reward import JudgeConfig
from verl.reward.judge import JudgeBackend
from verl.reward.scorers import get_scorer
from verl.reward.scorers.code import extract_code
from verl.reward.scorers.shaping import length_between, tagged

CPU_S = 60
LENGTH, LONG_LENGTH = 20_000, 400_000
JUDGE = JudgeBackend(JudgeConfig(base_url="http://localhost/v1", model="none", max_concurrency=1))
SCORERS: dict[str, Callable[[str], Any]] = {
    "gsm8k": lambda text: get_scorer("gsm8k")(text, "5", method="flexible"),
    "math": lambda text: get_scorer("math")(text, "\\frac{1}{2}", symbolic=False),
    "math, boxed": lambda text: get_scorer("math")(f"\\boxed{{{text}}}", "5 m^2", symbolic=False),
    "math_dapo": lambda text: get_scorer("math_dapo")(text, "5", symbolic=False),
    "multiple_choice": lambda text: get_scorer("multiple_choice")(text, "A", choices=["x", "y"]),
    "qa_em": lambda text: get_scorer("qa_em")(text, ["x", "y"]),
    "qa_f1": lambda text: get_scorer("qa_f1")(text, "x y z"),
    "json_schema": lambda text: get_scorer("json_schema")(text, {"type": "array", "uniqueItems": True}),
    "tool_use": lambda text: get_scorer("tool_use")(text, '[{"name": "f", "arguments": {}}]'),
    "code": extract_code,  # what runs in the sandbox has limits of its own
    "countdown": lambda text: get_scorer("tasks/countdown")("tasks/countdown", text, {"numbers": [1], "target": 1}),
    "word_problems": lambda text: get_scorer("tasks/word_problems")("tasks/word_problems", text, 1),
    "tagged": tagged("think", "answer"),
    "length": length_between(1, 2, unit="words"),
    "judge": lambda text: JUDGE._score(text + " 1"),
}  # fmt: skip
REPEATED = [
    " ", "\n", "\t \n", "`", "```\n", "``` ", "{", "}", "{}", "[", "[]", "(", ")", "\\", "\\\\", "$", "-", ".", ",",
    "!", "*", "#", "#### ", "=", "/", "^", "1", "1,", "1,111", "1 ", "1.", "1e9", "-1", "１", "\u0301\u0316", "ﷺ", "İ",
    "a ", "A ", "(A)", "the ", "answer ", "answer: ", "answer: x\n", "answer is ", "final ", "the answer is a!",
    "<answer>", "</answer>", "<answer></answer>", "<think>", "</think>", "<tool_call>", "<tool_call>{", "</tool_call>",
    "\\boxed",
    "\\boxed{", "\\boxed {", "\\boxed{}", "\\frac", "\\frac{", "\\frac{1}", "\\frac 1 ", "\\sqrt ", "\\text", "\\text ",
    "\\text{", "\\text{a}", "\\left", "5 m ", "5 m^ ", "^ {", "^{\\circ", '"', '["', '{"a":', "[1,", '"a",', "NaN,",
    "\x00",
]  # fmt: skip
BEGUN = [
    ("The answer", "\n", "?"), ("answer", " ", "?"), ("answer is", " ", ""), ("answer:", "\n", ""),
    ("answer:", " ", ""), ("answer (", " ", ""), ("answer is ", "*", "?"), ("answer a", "!", "b"), ("final", " ", ""),
    ("```", "\n", ""),
    ("```", " ", ""), ("```", "\t", "x"), ("```json", "\n", ""), ("```python", " ", ""), ("```", "a", ""),
    ("\\boxed{1", " ", "x}"), ("\\boxed{5", " m", "}"), ("\\boxed{", "\\frac{", "}"), ("\\boxed{5 ^", " ", "x}"),
    ("\\boxed{", "{", "}" * 1000 + "}"), ("5 m", " ", "x"), ("5", " ", "x"), ("^", " ", "x"), ("^{", " ", "x"),
    ("\\frac", " ", "x"), ("\\frac{", "1", ""), ("\\frac{1}", " ", ""), ("x", " ", "="), ("#### ", "1", ""),
    ("#### ", "1+", "1"), ("#### ", "(", ""), ("#### $", " ", ""), ("<answer>", " ", ""), ("<think>", "a", ""),
    ("<tool_call>", " ", ""), ("<tool_call>", "[", ""), ("[", "1,", "1]"), ("[", "[],", "1]"), ("!", "A", "!"),
]  # fmt: skip


LONG = {
    "multiple_choice": [("The answer", "\n", "?"), ("answer:", " ", "")],
    "qa_em": [("answer", " ", "?"), ("", "<answer>", ""), ("", "\u0301\u0316", "")],
    "math": [("\\boxed{5 ^", " ", "x}")],
    "json_schema": [("```", "\n", "")],
    "code": [("```", " ", ""), ("", "```\n", "")],
    "judge": [("", "<think>", "")],
}  # fmt: skip


def texts(name: str) -> Iterator[str]:
    for start, part, end in [*(("", part, "") for part in REPEATED), *BEGUN]:
        yield start + part * (LENGTH // len(part)) + end
    for start, part, end in LONG.get(name, []):
        yield start + part * (LONG_LENGTH // len(part)) + end
    if name == "json_schema":
        items = [value for number in range(LONG_LENGTH // 16) for value in (number, str(number))]
        yield json.dumps(items)


def main() -> None:
    for name, score in SCORERS.items():
        score("")  # imports are not counted
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
            status = 1
            try:
                for text in texts(name):
                    score(text)
                status = 0
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(name, "ok" if status == 0 else f"ended with {status}", sep=": ", flush=True)


if __name__ == "__main__":
    main()
