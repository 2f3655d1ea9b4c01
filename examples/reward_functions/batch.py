"""One call for a whole batch, every argument a list: here a right answer counts less when many others have it."""

import re
from collections import Counter


def compute_score(solution_strs: list[str], ground_truths: list[str], prompts: list[str]) -> list[float]:
    found = [(re.findall(r"#### (-?\d+)", text) or [""])[-1] for text in solution_strs]
    right = [number == truth for number, truth in zip(found, ground_truths, strict=True)]
    solved = Counter(prompt for prompt, ok in zip(prompts, right, strict=True) if ok)
    asked = Counter(prompts)
    return [
        float(ok) * (1 - 0.5 * solved[prompt] / asked[prompt])
        for ok, prompt in zip(right, prompts, strict=True)
    ]
