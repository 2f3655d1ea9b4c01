"""Several parts in one score. The dict's other numbers become metrics; validation uses `acc` and `pred`."""

import re


def compute_score(solution_str: str, ground_truth: str, form_weight: float = 0.1) -> dict:
    numbers = re.findall(r"#### (-?\d+)", solution_str)
    right, form = float(numbers[-1:] == [ground_truth]), float(len(numbers) == 1)
    return {
        "score": (1 - form_weight) * right + form_weight * form,
        "acc": right,
        "form": form,
        "pred": numbers[-1] if numbers else "",
    }
