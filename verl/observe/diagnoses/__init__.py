"""The table of diagnoses: rules that detect what is wrong with a run, each with its meaning and what to try."""

from __future__ import annotations

from verl.observe.diagnoses import crashes, policy, responses, rewards
from verl.observe.diagnoses.base import Diagnosis

DIAGNOSES = tuple(
    entry
    for module in (rewards, policy, responses, crashes)
    for entry in vars(module).values()
    if isinstance(entry, Diagnosis)
)
START_RULES = tuple(entry for entry in DIAGNOSES if entry.when == "start")
STEP_RULES = tuple(entry for entry in DIAGNOSES if entry.when == "step")
