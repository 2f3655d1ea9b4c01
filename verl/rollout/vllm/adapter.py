"""A LoRA adapter written as a PEFT folder, for vLLM to load beside its base weights."""

from __future__ import annotations

import shutil
from pathlib import Path

from verl.models.lora import ADAPTER
from verl.models.weight_source import Adapter
from verl.rollout.weight_sync.fingerprint import Manifest, compare, fingerprint
from verl.rollout.weight_sync.stale_files import new_path

_FILE = "adapter_model.safetensors"


class AdapterFolder:
    """Holds the newest adapter, each under a new number: vLLM does not reload a number it knows."""

    def __init__(self) -> None:
        self._folder = new_path("adapter")
        self._folder.mkdir(mode=0o700)
        self.number = 0

    def write(self, adapter: Adapter, version: int) -> Path:
        """The folder of this adapter; checked by fingerprint."""
        sent = Manifest()
        folder = self._folder / str(self.number + 1)
        write_adapter(Adapter(adapter.config, sent.watch(adapter.named_tensors)), folder)
        compare(sent, read_adapter(folder, sent), version, "vllm")
        self.number += 1
        return folder

    def remove_old(self) -> None:
        shutil.rmtree(self._folder / str(self.number - 1), ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """As `peft.PeftModel.from_pretrained` and vLLM open it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {_in_file(name): t.detach().cpu().contiguous().clone() for name, t in adapter.named_tensors}
    save_file(weights, folder / _FILE, metadata={"format": "pt"})
    adapter.config.save_pretrained(folder)


def read_adapter(folder: Path, sent: Manifest) -> Manifest:
    """Fingerprints of what a written adapter holds, under the names it was `sent` with."""
    from safetensors.torch import load_file

    names = {_in_file(name): name for name in sent}
    return Manifest(
        {names.get(key, key): fingerprint(tensor) for key, tensor in load_file(folder / _FILE).items()}
    )


def _in_file(name: str) -> str:
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"
