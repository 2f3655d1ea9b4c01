"""A function with TRL's signature: prompts, completions and the columns of the data as lists, a list of scores.

A conversational completion is a list of messages; both forms work.
"""

import re


def right_number(prompts, completions, ground_truth, **columns) -> list[float]:
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    found = [(re.findall(r"#### (-?\d+)", text) or [""])[-1] for text in texts]
    return [float(number == truth) for number, truth in zip(found, ground_truth, strict=True)]
