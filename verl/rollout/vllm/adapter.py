"""LoRA adapters as adapters: written as a PEFT folder, loaded by vLLM beside the base weights it keeps.

What always holds: one adapter is loaded at a time; the one in use is the newest taken.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from verl.errors import RolloutError
from verl.models.lora import save_adapter
from verl.rollout.source import causal_lm, whole_module


class Adapters:
    """The trainer's adapter in vLLM's engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._folder = Path(tempfile.mkdtemp(prefix="verl-adapter-"))
        self._count = 0
        self.current: Any = None

    def take(self, source: Any, version: int) -> None:
        """Load the source's adapter under a new id and drop the old one."""
        from vllm.lora.request import LoRARequest

        self._count += 1
        folder = self._folder / str(self._count)
        with whole_module(source) as module:
            save_adapter(causal_lm(module), folder)
        old, new = self.current, LoRARequest(f"policy-{self._count}", self._count, str(folder))
        if old is not None:
            self._engine.remove_lora(old.lora_int_id)
        if not self._engine.add_lora(new):
            raise RolloutError(f"vLLM did not take the adapter of policy version {version} from {folder}")
        self.current = new
        if old is not None:
            shutil.rmtree(old.lora_path, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
