"""The calculator agent: a tool, a reward, questions, and conversations to imitate at first."""

import random
import re

FINE_TUNING_STEPS = 350
CALLS = 0.3
"""Share of the demonstrations that call the tool; the others answer at once. Training finds out which pays."""


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1 when the last number that the model wrote is the right one."""
    return float(re.findall(r"\d+", solution_str)[-1:] == [ground_truth])


def task(rng: random.Random) -> dict:
    """A row of the training data. All products have six digits, which a tiny model soon learns to copy."""
    a, b = rng.randrange(400, 1000), rng.randrange(400, 1000)
    return {
        "prompt": [{"role": "user", "content": f"What is {a} times {b}?"}],
        "ground_truth": str(a * b),
        "data_source": "calculator",
    }


def demonstration(task: dict, rng: random.Random) -> list[dict]:
    """A conversation with the right answer. A tiny model cannot learn to give it without a call."""
    tools = {"role": "system", "content": "Tools: multiply"}  # as the chat template announces them
    answer = task["ground_truth"]
    if rng.random() > CALLS:
        return [tools, *task["prompt"], {"role": "assistant", "content": f"I think it is {answer}."}]
    a, b = map(int, re.findall(r"\d+", task["prompt"][0]["content"]))
    call = {"function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    return [
        tools,
        *task["prompt"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": f"The answer is {answer}."},
    ]
