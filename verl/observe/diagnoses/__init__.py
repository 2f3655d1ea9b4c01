"""The table of diagnoses: symptoms with their meaning, what to try, and the rule that detects each."""

from __future__ import annotations

from types import ModuleType

from verl.observe.diagnoses import policy, responses, rewards
from verl.observe.diagnoses.answers import ANSWERS
from verl.observe.diagnoses.base import Diagnosis
from verl.observe.diagnoses.crashes import CRASHES


def _rules(module: ModuleType) -> tuple[Diagnosis, ...]:
    return tuple(each for each in vars(module).values() if isinstance(each, Diagnosis))


SECTIONS: dict[str, tuple[Diagnosis, ...]] = {
    "Rewards and validation": _rules(rewards),
    "Training": _rules(policy),
    "Responses, data and tools": _rules(responses),
    "Crashes": CRASHES,
    **ANSWERS,
}
DIAGNOSES = tuple(each for section in SECTIONS.values() for each in section)
START_RULES = tuple(each for each in DIAGNOSES if each.when == "start")
STEP_RULES = tuple(each for each in DIAGNOSES if each.when == "step")
