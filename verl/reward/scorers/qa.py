"""Question answering: exact match and F1 of words, the best over all accepted answers.

Both sides are compared without case, punctuation, articles and accents. The answer is the text in the last
<answer>...</answer>, else behind the last "Answer:", else the whole response.
"""

from __future__ import annotations

import contextlib
import json
import re
import string
import unicodedata
from collections import Counter
from functools import lru_cache
from typing import Any

from verl.errors import RewardError
from verl.reward.scorers.text import blocks

METRICS = ("em", "f1", "contains")
_TAG, _END_TAG = re.compile("<answer>", re.IGNORECASE), re.compile("</answer>", re.IGNORECASE)
_STATED = re.compile(r"(?:final\s+)?answer\s*+(?:is)?+\s*+:\s*(.+)", re.IGNORECASE)
_PUNCTUATION = set(string.punctuation) | set("‘’“”–—…«»、。，！？；：（）")


def compute_em(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """1 where the answer is one of the accepted ones."""
    return compute_score(solution_str, ground_truth, metric="em")


def compute_f1(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Overlap of words with the nearest accepted answer."""
    return compute_score(solution_str, ground_truth, metric="f1")


def compute_score(solution_str: str, ground_truth: Any, metric: str = "em") -> dict[str, Any]:
    if metric not in METRICS:
        raise RewardError(f"qa metric is {metric!r}; known: {', '.join(METRICS)}. Set reward_kwargs.metric.")
    answer = extract_answer(solution_str)
    truths = accepted(ground_truth)
    em = max(float(normalise(answer) == normalise(truth)) for truth in truths)
    f1 = max(token_f1(answer, truth) for truth in truths)
    words = [normalise(truth) for truth in truths]
    contains = float(any(wanted and f" {wanted} " in f" {normalise(answer)} " for wanted in words))
    score = {"em": em, "f1": f1, "contains": contains}[metric]
    return {"score": score, "acc": em, "f1": f1, "pred": answer[:128]}


def extract_answer(text: str) -> str:
    tagged = [inside for _, inside in blocks(text, _TAG, _END_TAG)]
    if tagged:
        return tagged[-1].strip()
    stated = _STATED.findall(text)
    return stated[-1].strip() if stated else text.strip()


def accepted(ground_truth: Any) -> list[str]:
    """A text, a list of texts (or its JSON), or {"target": ...}."""
    if isinstance(ground_truth, dict):
        ground_truth = ground_truth.get("target", ground_truth.get("answers"))
    if isinstance(ground_truth, str) and ground_truth.startswith("["):
        with contextlib.suppress(ValueError):  # an answer may happen to begin with a bracket
            ground_truth = json.loads(ground_truth)
    listed = ground_truth.tolist() if hasattr(ground_truth, "tolist") else ground_truth
    truths = [str(item) for item in listed] if isinstance(listed, list | tuple) else [str(listed)]
    if listed is None or not truths:
        raise RewardError(f"The qa scorer got no accepted answer in the ground truth {ground_truth!r}.")
    return truths


@lru_cache(maxsize=4)  # an answer is compared with each of the accepted ones
def normalise(text: str) -> str:
    # Accents that stand alone go first: ordering a long run of them takes quadratic time.
    text = _without_accents(unicodedata.normalize("NFKD", _without_accents(text.lower())))
    text = "".join(" " if c in _PUNCTUATION else c for c in text)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _without_accents(text: str) -> str:
    return "".join(c for c in text if not unicodedata.combining(c))


@lru_cache(maxsize=4)
def tokens(text: str) -> tuple[str, ...]:
    """Words; in scripts written without spaces, characters."""
    return tuple(
        re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+", normalise(text))
    )


def token_f1(answer: str, truth: str) -> float:
    left, right = tokens(answer), tokens(truth)
    if not left or not right:
        return float(left == right)
    shared = sum((Counter(left) & Counter(right)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(left), shared / len(right)
    return 2 * precision * recall / (precision + recall)
