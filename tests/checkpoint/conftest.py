"""The small training job as a fixture (tests are not a package, so it is loaded by path)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def job() -> ModuleType:
    path = Path(__file__).with_name("training.py")
    spec = importlib.util.spec_from_file_location("checkpoint_training_job", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
