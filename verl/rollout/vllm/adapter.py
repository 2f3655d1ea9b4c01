"""LoRA adapters as adapters: written as a PEFT folder, loaded by vLLM beside the base weights it keeps.

What always holds: one adapter is loaded at a time; the one in use is the newest taken; what stands in the folder that
vLLM reads is what was taken, by fingerprint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from verl.models.weight_source import WeightSource
from verl.rollout.weight_sync.adapters import read_adapter, write_adapter
from verl.rollout.weight_sync.fingerprint import Manifest, compare
from verl.rollout.weight_sync.stale_files import new_path


class Adapters:
    """The trainer's adapter in an engine. `load` gets name, number and folder and returns what requests carry."""

    def __init__(self, load: Callable[[str, int, str], Any], unload: Callable[[Any], None]) -> None:
        self._load, self._unload = load, unload
        self._folder = new_path("adapter")
        self._folder.mkdir(mode=0o700)
        self._count = 0
        self.current: Any = None

    def take(self, source: WeightSource, version: int) -> None:
        """Load the source's adapter (that of policy `version`) under a new number in place of the old one."""
        old_folder = self._folder / str(self._count)
        self._count += 1
        folder = self._folder / str(self._count)
        sent = Manifest()
        adapter = source.adapter()
        assert adapter is not None
        write_adapter(sent.watch(adapter.named_tensors), adapter.config, folder)
        compare(sent, read_adapter(folder, sent), version, "vllm")
        if self.current is not None:
            self._unload(self.current)
        self.current = self._load(f"policy-{self._count}", self._count, str(folder))
        shutil.rmtree(old_folder, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
