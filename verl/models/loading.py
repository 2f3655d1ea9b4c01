"""Load a Hugging Face folder as a policy (causal language model) or as a critic (same backbone, scalar head); read
single rows of its safetensors files.

Parameter names are Hugging Face's. Dropout is off.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.config.model_path import SAFETENSORS, config_problem, weight_map
from verl.errors import ConfigError, ModelError
from verl.json_input import mode_of_new_files
from verl.models.introspection import kept_in_float32
from verl.models.value_model import HEADS, ValueModel, disable_dropout
from verl.runtime import quiet_transformers


class CannotStream(Exception):
    """Why the weights cannot be read parameter by parameter."""


def let_others_read(folder: Path) -> None:
    """safetensors creates files that only their owner may read, unlike the files beside them."""
    mode = mode_of_new_files(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def model_file(path: str, name: str) -> Path | None:
    """A file of a model folder, or of a model of the hub (fetched if need be); None where it has none."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        return Path(hf_hub_download(path, name))
    except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError):  # also: offline and not in the cache
        return None


def checked_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor; ModelError where the index cannot be used."""
    try:
        return weight_map(index)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read weights by {str(index)!r}: {error} (model.path)") from error


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read weights from {str(file)!r}: {error} (model.path)") from error


class SafetensorsFiles:
    """Which file has which tensor."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files

    @classmethod
    def of(cls, path: str) -> SafetensorsFiles:
        """The files transformers would read; other files are ignored."""
        single = model_file(path, SAFETENSORS[0])
        if single is not None:
            with _opened(single) as handle:
                return cls(dict.fromkeys(handle.keys(), single))
        index = model_file(path, SAFETENSORS[1])
        if index is None:
            raise CannotStream("it has no safetensors files")
        names = checked_weight_map(index)
        shards = {name: model_file(path, name) for name in set(names.values())}
        return cls({key: shard for key, name in names.items() if (shard := shards[name]) is not None})

    def __contains__(self, name: object) -> bool:
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, from the files' headers."""
        found = {}
        for file in set(self.files.values()):
            with _opened(file) as handle:
                for name in handle.keys():  # noqa: SIM118  the handle is no mapping
                    found[name] = tuple(handle.get_slice(name).get_shape())
        return found

    def read_rows(
        self,
        name: str,
        start: int,
        stop: int,
        into: torch.Tensor,
        through: torch.dtype,
        columns: slice | None = None,
    ) -> None:
        """Rows `start` to `stop` of a tensor (of a matrix, these `columns` only) into `into`, rounded to `through`
        first, as transformers loads them."""
        with _opened(self.files[name]) as handle:
            stored = handle.get_slice(name)
            part = stored[start:stop] if columns is None else stored[start:stop, columns]
            into.copy_(part.to(through))


log = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def torch_dtype(name: str, key: str = "dtype", also: tuple[str, ...] = ()) -> torch.dtype:
    """`name` as a torch dtype. `key` and `also` (further values the key takes) are for the error message."""
    if name not in DTYPES:
        raise ConfigError(f"{key}={name!r} is unknown; allowed: {', '.join([*also, *DTYPES])}")
    return DTYPES[name]


def parameter_dtype(name: str, device: torch.device) -> torch.dtype:
    """model.dtype: `auto` is bfloat16 on a GPU and float32 on a CPU, whose half-precision arithmetic is slower."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch_dtype(name, "model.dtype", ("auto",))


def load_config(
    path: str, *, trust_remote_code: bool = False, override_config: Mapping[str, Any] | None = None
) -> Any:
    """The model's configuration with the user's overrides; unknown override keys are an error."""
    from transformers import AutoConfig

    folder = Path(path).expanduser()
    if folder.exists() or path.startswith(("/", "./", "../", "~")) or path.count("/") != 1:
        if not folder.is_dir():
            raise ModelError(f"model.path={path!r} does not exist; set it to a Hugging Face folder or name")
        if not (folder / "config.json").is_file():
            found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
            raise ModelError(f"model.path={path!r} has no config.json, only: {found}")
        path = str(folder)
    try:
        file = model_file(path, "config.json")
        if file is not None and (problem := config_problem(file.parent)):
            raise ValueError(problem)
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # damaged files raise anything
        raise ModelError(
            f"cannot read the model configuration of {path!r}: {_first_line(error)} (model.path)"
        ) from error
    for key, value in (override_config or {}).items():
        if not hasattr(config, key):
            raise ModelError(
                f"model.override_config has {key!r}, which {type(config).__name__} lacks; allowed: "
                f"{', '.join(sorted(config.to_dict()))}"
            )
        setattr(config, key, value)
    return config


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def _load(
    auto_class: Any, path: str, dtype: torch.dtype, *, trust_remote_code: bool = False, **options: Any
) -> nn.Module:
    config = load_config(path, trust_remote_code=trust_remote_code, **options)
    source = str(Path(path).expanduser()) if Path(path).expanduser().exists() else path
    for index in Path(source).glob("*.index.json"):
        checked_weight_map(index)
    try:
        with quiet_transformers():
            model, found = auto_class.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except Exception as error:  # damaged files raise anything, a pickle that is not weights UnpicklingError
        problem = _first_line(error) or type(error).__name__
        raise ModelError(f"cannot load weights from {path!r}: {problem} (model.path)") from error
    missing = sorted(found.get("missing_keys") or ())
    if missing:
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(
            f"the weights in {path!r} lack {some} of {type(model).__name__}; set model.path to a folder with all of "
            "them"
        )
    return model


def load_causal_lm(path: str, *, dtype: torch.dtype, device: torch.device | str, **options: Any) -> nn.Module:
    """A causal language model, weights in `dtype` on `device`; `options` are those of `load_config`."""
    from transformers import AutoModelForCausalLM

    model = _load(AutoModelForCausalLM, path, dtype, **options)
    disable_dropout(model)
    return model.to(device)


def load_value_model(
    path: str, *, dtype: torch.dtype, device: torch.device | str, reward: bool = False, **options: Any
) -> ValueModel:
    """The backbone of `path` with the scalar head of a critic, or of a `reward` model: the one saved in the folder
    (as transformers stores one with one label), else zeros, so that an untrained critic predicts 0 everywhere."""
    from transformers import AutoModel

    backbone = _load(AutoModel, path, dtype, **options)
    model = with_saved_head(ValueModel(backbone, reward=reward), path, dtype)
    disable_dropout(model)
    return model.to(device)


def with_saved_head(model: ValueModel, path: str, dtype: torch.dtype) -> ValueModel:
    """The head of the folder, where it holds one, in `dtype`. A reward model has no bias: it changes no order."""
    try:
        files = SafetensorsFiles.of(path).files
    except CannotStream:
        files = {}
    saved = {}
    for name in [f"{head}.{part}" for head in HEADS for part in ("weight", "bias")]:
        if name in files:
            with _opened(files[name]) as handle:
                saved[name.rpartition(".")[2]] = handle.get_tensor(name)
    if model.reward:
        from transformers import AutoModelForSequenceClassification

        config, kind = model.saved_config(), type(model.backbone).__name__
        try:  # refuse an architecture whose reward model transformers could not open
            with quiet_transformers(), torch.device("meta"):
                names = set(AutoModelForSequenceClassification.from_config(config).state_dict())
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(
                f"model.path: transformers has no {config.architectures[0]}, so {kind} cannot be a reward model: "
                f"{_first_line(error)}"
            ) from error
        other = sorted(names ^ set(model.state_dict()))
        if other:
            raise ModelError(
                f"model.path: {kind} with one number as output is not transformers' {config.architectures[0]}; they "
                f"differ in {', '.join(other[:3])}"
            )
        named = ", ".join(model.config.architectures or ())
        if "ForSequenceClassification" in named and not saved:
            raise ModelError(
                f"model.path={path!r} is a {named}, but its head ('score.weight') is in no safetensors file; save it "
                "with save_pretrained of transformers, or start from a language model"
            )
    if saved:
        try:
            wanted = {"bias": torch.zeros(1), **saved}
            model.head.load_state_dict({name: wanted[name] for name in model.head.state_dict()})
        except RuntimeError as error:
            raise ModelError(
                f"the value head saved in {path!r} does not fit one scalar per token: {_first_line(error)}"
            ) from error
    model.head.to(dtype)
    return model


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only, in place: buffers such as rotary frequencies lose positions when they are rounded. What
    transformers keeps in float32 on loading is float32."""
    kept = kept_in_float32(model, dtype)
    for name, param in model.named_parameters():
        if param.is_floating_point():
            param.data = param.data.to(torch.float32 if kept and kept.search(name) else dtype)
