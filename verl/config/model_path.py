"""Where a model comes from: problems of a local folder, the cache of the Hugging Face hub, and whether the hub can be
reached. Reads names, config.json and headers of weight files; imports no torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.json_input import read_json

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
"""The file with all weights of a model, and the index of several."""
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_OTHER_HEADS = {
    "ForSequenceClassification": "a classifier (a reward model is set by reward.reward_model.model_path)",
    "ForTokenClassification": "a token classifier",
    "ForQuestionAnswering": "a span classifier",
    "ForMaskedLM": "an encoder",
    "ForPreTraining": "an encoder",
}
_ENCODERS = (
    "bert", "roberta", "xlm-roberta", "deberta", "deberta-v2", "distilbert", "electra", "albert", "modernbert",
)  # fmt: skip
_ON = ("1", "true", "yes", "on")
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"), 4096),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4096),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "ffn_dim", "d_ff"), 1 << 20),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "head_dim"), 1 << 16),
    "vocab_size": 1 << 26,
    "n_positions": 1 << 30,
}  # fmt: skip
"""Counts beyond those of any model: building one would take hours, or all memory, before it fails."""


def folder_problem(path: str, key: str, *, language_model: bool = True) -> str | None:
    """Why no model can be loaded from a local path, with what to do; None where no problem is seen, or for a hub id.

    `language_model=False`: any head will do (a critic or a reward model)."""
    folder = Path(path).expanduser()
    if folder.is_file():
        return f"{key}: '{path}' is a file; give the folder it is in, '{folder.parent}'"
    if not folder.is_dir():
        local = path.startswith(("/", ".", "~")) or path.count("/") > 1 or not path.strip()
        return f"{key}: there is no model folder '{path}'{_siblings(folder)}" if local else None
    if not (folder / "config.json").is_file():
        return f"{key}: the model folder '{path}' has no config.json{_what_it_is(folder)}"
    problem = config_problem(folder)
    if problem:
        return f"{key}: {problem}"
    odd = sorted(
        each.name for each in folder.iterdir() if each.exists() and not (each.is_file() or each.is_dir())
    )
    if odd:
        return f"{key}: '{folder / odd[0]}' is neither a file nor a folder"
    if language_model:
        other = _other_kind(read_json(folder / "config.json"))
        if other:
            return f"{key}: '{path}' is {other}, not a causal language model"
    return _weights_problem(folder, key)


def config_problem(folder: Path) -> str | None:
    """Why no model can be built by the config.json of a folder, and the generation_config.json where it has one; what
    can be told before building it."""
    for file in (folder / "config.json", folder / "generation_config.json"):
        if not file.is_file():
            continue
        try:
            config = read_json(file)
        except (OSError, ValueError) as error:
            return f"'{file}' cannot be read as JSON: {error}"
        if not isinstance(config, dict):
            return f"'{file}' describes no model"
        excess = _excess(config)
        if excess:
            return f"'{file}' has {excess}"
    return None


def _excess(config: Mapping[str, Any]) -> str:
    """The first count, also of a part (`text_config`), that is beyond those of any model."""
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config") and (excess := _excess(value)):
            return excess
        if isinstance(value, int) and value > _MOST.get(name, value):
            return f"{name}={str(value)[:24]}; at most {_MOST[name]} is possible"
    return ""


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index of weight files. ValueError where it is damaged, or names a file that is
    not beside it."""
    content = read_json(index)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise ValueError("it has no weight_map")
    for name in found.values():
        if not isinstance(name, str) or name in ("", "..") or name != Path(name).name or "\0" in name:
            raise ValueError(f"it names {name!r:.100}, which is not a file beside it")
    return found


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads the weights of a folder from; others beside them are ignored, such as the same
    weights in another format (consolidated.safetensors). Those an index names need not be there; ValueError where it
    is damaged."""
    for single, index in (SAFETENSORS, _PICKLES):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            try:
                return [folder / name for name in sorted(set(weight_map(folder / index).values()))]
            except (OSError, ValueError) as error:
                raise ValueError(f"'{folder / index}' is damaged: {error}") from error
    return []


def context_length(path: str, override: Mapping[str, Any] | None = None) -> int | None:
    """The longest sequence a local model was built for, by its config.json."""
    config = _config_of(path, override)
    return _positive(config.get("max_position_embeddings", config.get("n_positions")))


def vocabulary_size(path: str, override: Mapping[str, Any] | None = None) -> int | None:
    """How many tokens a local model has rows for, by its config.json."""
    return _positive(_config_of(path, override).get("vocab_size"))


def text_config(path: str, override: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json of a local model, or of a hub model in the cache; {} where neither can be read."""
    found = None if Path(path).expanduser().is_dir() else cached_config(path)
    return _config_of(path if found is None else str(found.parent), override)


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _config_of(path: str, override: Mapping[str, Any] | None) -> dict[str, Any]:
    """What config.json says of the language model; {} where there is none to read."""
    try:
        config = read_json(Path(path).expanduser() / "config.json")
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    config = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    return {**config, **(override or {})}


def _siblings(folder: Path) -> str:
    """What the parent folder holds, where only the last name of the path is wrong."""
    if not folder.parent.is_dir():
        return ""
    there = sorted(p.name for p in folder.parent.iterdir() if p.is_dir() and not p.name.startswith("."))[:8]
    return f". '{folder.parent}' holds: {', '.join(there)}" if there else ""


def _what_it_is(folder: Path) -> str:
    """What a folder without config.json is, if that can be seen."""
    if (folder / "adapter_config.json").is_file():
        try:
            base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        except (OSError, ValueError, AttributeError):
            base = None
        of = f" of '{base}'" if base else ""
        return f". It holds a LoRA adapter{of}: merge it into its base model and give the merged folder"
    inner = [*folder.glob("actor/huggingface/config.json"), *folder.glob("huggingface/config.json")]
    steps = sorted(
        (each for each in folder.glob("global_step_*") if each.name.rpartition("_")[2].isdecimal()),
        key=lambda each: int(each.name.rpartition("_")[2]),
    )
    inner += [file for step in steps[-1:] for file in step.glob("actor/huggingface/config.json")]
    if inner:
        return f". It is a checkpoint of a run: give '{inner[0].parent}'"
    if any(folder.glob("*.gguf")):
        return ". It holds a GGUF file, which cannot be trained: give the original Hugging Face folder"
    names = sorted(each.name for each in folder.iterdir())[:8]
    return f". It holds: {', '.join(names) or 'nothing'}"


def _other_kind(config: Mapping[str, Any]) -> str:
    """What kind of model this is, where it is no causal language model."""
    architectures = config.get("architectures")
    named = next(iter(architectures if isinstance(architectures, list) else []), "")
    if config.get("model_type") in _ENCODERS and not config.get("is_decoder"):
        return f"an encoder ({named or config.get('model_type')})"
    for ending, what in _OTHER_HEADS.items():
        if str(named).endswith(ending):
            return f"{what} ({named})"
    tied = config.get("tie_word_embeddings", str(config.get("model_type")).startswith(("gemma", "gpt2")))
    if str(named).endswith("Model") and not str(named).endswith("LMHeadModel") and not tied:
        return f"a model without its output matrix, which would be random ({named})"
    if config.get("is_encoder_decoder"):
        return f"an encoder-decoder model ({named or config.get('model_type')})"
    return ""


def _weights_problem(folder: Path, key: str) -> str | None:
    try:
        files = weight_files(folder)
    except ValueError as error:
        return f"{key}: {error}"
    gone = [file.name for file in files if not file.is_file()]
    if gone:
        return (
            f"{key}: the model folder '{folder}' lacks {len(gone)} of {len(files)} weight files: "
            f"{', '.join(gone[:3])}{', ...' if len(gone) > 3 else ''}. Download it again"
        )
    if not files and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        return f"{key}: '{folder}' holds no weights ({SAFETENSORS[0]}, {_PICKLES[0]} or shards)"
    for file in files:
        damage = _damage(file)
        if damage:
            return f"{key}: '{file}' {damage}"
    return None


def _damage(file: Path) -> str:
    """What is wrong with a weight file by its first bytes and its size."""
    with file.open("rb") as opened:
        if opened.read(100).startswith(b"version https://git-lfs"):
            return "is a Git LFS pointer, not the weights: fetch them with `git lfs pull`"
    if file.suffix != ".safetensors":
        return "" if file.stat().st_size else "is empty"
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):  # reads the header and compares it with the size of the file
            return ""
    except (SafetensorError, OSError, ValueError) as error:
        return f"is cut off or no safetensors file ({error}). Download it again"


def cached_config(model_id: str) -> Path | None:
    """config.json of a hub model in the local cache."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = sorted((hub / f"models--{model_id.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    return found[-1] if found else None


def endpoint(variables: Mapping[str, str]) -> str:
    """The address of the hub."""
    return (variables.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def offline(variables: Mapping[str, str]) -> str:
    """The variable that forbids requests to the hub; empty where none does."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return next((name for name in names if variables.get(name, "").lower() in _ON), "")


def hub_error(address: str, request_s: float = 5.0, all_s: float = 8.0) -> str | None:
    """Why a hub does not answer; None where it does, empty where that cannot be told (a SOCKS proxy). Any answer but
    a server's error counts: whether a token is right is for the download to say."""
    import httpx

    found: list[str | None] = []

    def ask() -> None:
        try:
            code = httpx.head(f"{address}/api/models?limit=1", timeout=request_s).status_code
            found.append(f"it answers {code}" if code >= 500 else None)
        except ImportError:  # httpx supports SOCKS proxies only with a further package
            found.append("")
        except Exception as error:  # names, sockets, certificates and proxies fail in many ways
            found.append(" ".join(str(error).split()) or type(error).__name__)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(all_s)  # the timeout of the request does not cover name lookup
    return found[0] if found else f"no answer within {all_s:.0f} s"


def hub_silence() -> str:
    """Why the hub cannot be asked: the variable that forbids it, or its failure; empty where it can."""
    variable = offline(os.environ)
    return f"{variable}=1" if variable else hub_error(endpoint(os.environ)) or ""
