"""Resolve `model.path` of generation: a Hugging Face folder or id, a run folder, a checkpoint, or a LoRA adapter."""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl.checkpoint.megatron.reader import holds_megatron
from verl.checkpoint.steps import list_steps, problems, step_of
from verl.checkpoint.weights import ADAPTER_FOLDER, HF_FOLDER
from verl.errors import ModelError
from verl.json_input import read_json

if TYPE_CHECKING:
    from verl.config.schema import GenerationModelConfig

logger = logging.getLogger(__name__)

ACTOR = "actor"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.index.json")
_SMALL = ("config.json", "generation_config.json", "tokenizer*", "*.jinja", "adapter_config.json")
_VALUE_MODEL = re.compile("TokenClassification|SequenceClassification|RewardModel")


@dataclass(frozen=True)
class ModelChoice:
    """What to load."""

    path: str
    """Hugging Face folder or id."""
    tokenizer: str
    adapter: Path | None = None

    def fingerprint(self) -> str:
        """Changes when the files do; for a model of the hub only its name is known here."""
        folders = [Path(self.path), Path(self.tokenizer), *([self.adapter] if self.adapter else [])]
        files = {
            file
            for folder in folders
            if folder.is_dir()
            for pattern in (*_WEIGHTS, *_SMALL)
            for file in folder.glob(pattern)
        }
        stats = [(file, file.stat()) for file in sorted(files)]
        seen = " ".join(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}" for file, stat in stats)
        return hashlib.sha256(seen.encode()).hexdigest()


def choose_model(config: GenerationModelConfig) -> ModelChoice:
    """The weights, tokenizer and adapter the section asks for."""
    path, adapter = _find(config.path)
    if config.lora_path:
        if adapter is not None:
            raise ModelError(
                f"model.path={config.path} is an adapter ({adapter}); remove model.lora_path, or set "
                "model.path to the model below it"
            )
        adapter = _adapter_folder(Path(config.lora_path), "model.lora_path")
    _refuse_value_model(path)
    return ModelChoice(path, config.tokenizer_path or _tokenizer(path, adapter), adapter)


def _find(given: str) -> tuple[str, Path | None]:
    folder = Path(given).expanduser()
    if not folder.is_dir():
        return given, None  # a hub id
    for found in (_inside(folder), folder):
        if (found / "adapter_config.json").is_file() and not _has_weights(found):
            base = _base_of(found)
            logger.info("model.path=%s: generating with the adapter %s on %s", folder, found, base)
            return base, found
        if (found / "config.json").is_file() and _has_weights(found):
            if found != folder:
                logger.info("model.path=%s: generating with %s", folder, found)
            return str(found), None
    raise ModelError(_no_weights(folder))


def _inside(folder: Path) -> Path:
    """Of a run folder its newest complete step, of a step its actor, of that its weights or else its adapter."""
    if not (folder / ACTOR).is_dir() and step_of(folder) is None:
        complete = [
            entry.path for entry in list_steps(folder) if not problems(entry, (ACTOR,), checksums=False)
        ]
        folder = complete[0] if complete else folder
    if (folder / ACTOR).is_dir():
        folder = folder / ACTOR
    hf, adapter = folder / HF_FOLDER, folder / ADAPTER_FOLDER
    if hf.is_dir() and (_has_weights(hf) or not adapter.is_dir()):
        return hf
    return adapter if adapter.is_dir() else folder


def _has_weights(folder: Path) -> bool:
    return any(not file.name.startswith("adapter_") for pattern in _WEIGHTS for file in folder.glob(pattern))


def _base_of(adapter: Path) -> str:
    """The base model named in adapter_config.json."""
    try:
        base = str(read_json(adapter / "adapter_config.json").get("base_model_name_or_path") or "")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{adapter / 'adapter_config.json'} cannot be understood: {error}") from error
    if not base or (base.startswith(("/", ".", "~")) and not Path(base).expanduser().is_dir()):
        raise ModelError(
            f"{adapter} is an adapter, and the model below it ({base or 'not named in adapter_config.json'}) is not "
            f"there; set model.path to that model and model.lora_path={adapter}"
        )
    return base


def _adapter_folder(folder: Path, key: str) -> Path:
    for found in (folder, folder / ADAPTER_FOLDER, folder / ACTOR / ADAPTER_FOLDER):
        if (found / "adapter_config.json").is_file():
            return found
    raise ModelError(f"{key}={folder} holds no adapter_config.json; give the folder of a LoRA adapter")


def _tokenizer(path: str, adapter: Path | None) -> str:
    """The model's own; a folder saved next to an adapter may have a newer one."""
    if adapter is not None and any(adapter.parent.glob(f"{HF_FOLDER}/tokenizer*")):
        return str(adapter.parent / HF_FOLDER)
    return path


def _refuse_value_model(path: str) -> None:
    config = Path(path) / "config.json"
    if not config.is_file():
        return
    try:
        named = [str(each) for each in read_json(config).get("architectures") or []]
    except (OSError, ValueError, TypeError, AttributeError):
        return  # reported when it is loaded
    if any(_VALUE_MODEL.search(name) for name in named):
        raise ModelError(
            f"{path} holds a {', '.join(named)}, which gives numbers and no text; set model.path to the policy "
            f"(global_step_N/{ACTOR})"
        )


def _no_weights(folder: Path) -> str:
    inner = _inside(folder)
    part = inner.parent if inner.name == HF_FOLDER else inner
    backend = "megatron" if holds_megatron(part) else "fsdp" if (part / "model").is_dir() else None
    if backend is not None:
        return (
            f"{folder} is a sharded checkpoint. Merge it with\n"
            f"  python -m verl.model_merger merge --backend {backend} --local_dir {part} --target_dir OUT\n"
            "and set model.path=OUT"
        )
    steps = list_steps(folder)
    if steps:
        return f"no checkpoint of {folder} is complete: {problems(steps[0], (ACTOR,), checksums=False)[0]}"
    found = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
    return f"model.path={folder} is neither a Hugging Face folder with weights nor a run folder (it holds: {found})"
