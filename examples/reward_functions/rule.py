"""A rule: 1 for the right number after ####, else 0."""

import re


def compute_score(solution_str: str, ground_truth: str) -> float:
    numbers = re.findall(r"#### (-?\d+)", solution_str)
    return float(numbers[-1:] == [ground_truth])
