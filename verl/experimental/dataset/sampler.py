"""Samplers under verl's import path. Their home is `verl.data.samplers`."""

from __future__ import annotations

from verl.data.samplers import AbstractCurriculumSampler, AbstractSampler

__all__ = ["AbstractCurriculumSampler", "AbstractSampler"]
