"""What the config tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """Make a folder with nothing but a config.json, of a tiny Llama unless told otherwise."""

    def make(**changes: Any) -> Path:
        values = {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 320,
            **changes,
        }
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values))
        return folder

    return make
