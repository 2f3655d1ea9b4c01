"""What `reward_funcs` of a trainer is given: functions, names of scorers, reward models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.data.tokenizer import load_tokenizer
from verl.errors import ConfigError
from verl.observe.run_folder import expanded

_MODEL = "reward.reward_model"


class RewardFuncs:
    """The functions that score responses, with their weights, and at most one reward model beside them."""

    def __init__(
        self, given: Any = None, weights: Sequence[float] | None = None, tokenizers: Any = None
    ) -> None:
        """`tokenizers`: that of a reward model that is an object, alone or in the list of all of `given`."""
        items = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
        if weights is not None and len(weights) != len(items):
            raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(items)} reward_funcs")
        pairs = zip(map(_resolved, items), weights or [1.0] * len(items), strict=True)
        models: list[tuple[Any, float]] = []
        scoring: list[tuple[Any, float]] = []
        for pair in pairs:
            (models if _is_model(pair[0]) else scoring).append(pair)
        self.functions: Any = scoring if weights else [function for function, _ in scoring]
        if len(scoring) < 2 and not weights:
            self.functions = scoring[0][0] if scoring else None
        if len(models) > 1:
            raise ConfigError(
                f"reward_funcs has {len(models)} reward models; one is possible, beside any number of functions"
            )
        self._model: Any = models[0][0] if models else None
        self._weight = models[0][1] if models else 1.0
        listed = tokenizers if isinstance(tokenizers, (list, tuple)) else [tokenizers]
        self._tokenizer = next((each for each in listed if each is not None), None)

    @property
    def has_model(self) -> bool:
        return self._model is not None

    def keys(self, folder: str | None) -> dict[str, Any]:
        """The keys of the reward model. One that is an object is written to `folder`, from where the run loads it;
        without a folder it has no keys yet."""
        path = self._model if isinstance(self._model, (str, Path)) else None
        if path is None and self.has_model and folder is not None:
            path = expanded(folder).absolute() / "reward_model"
            self._model.save_pretrained(path)
            self._own_tokenizer().save_pretrained(path)
        if path is None:
            return {}
        weight = {} if self._weight == 1.0 else {f"{_MODEL}.weight": self._weight}
        return {f"{_MODEL}.enable": True, f"{_MODEL}.model_path": str(path), **weight}

    def _own_tokenizer(self) -> Any:
        name = getattr(self._model, "name_or_path", "")
        if self._tokenizer is not None or name:
            return load_tokenizer(name, False) if self._tokenizer is None else self._tokenizer
        raise ConfigError(
            "the reward model does not say which folder it came from; give reward_processing_classes=its tokenizer"
        )


def _is_model(item: Any) -> bool:
    return isinstance(item, (str, Path)) or hasattr(item, "save_pretrained")


def _resolved(item: Any) -> Any:
    """The function that a name or a file stands for; a reward model, or the text that names it, as it is."""
    from verl.reward.functions import FunctionSpec, load_function, signature_of
    from verl.reward.scorers import find_scorer, get_scorer, known_scorers

    if isinstance(item, (str, Path)):
        text = str(item)
        if find_scorer(text) is not None:
            return get_scorer(text)
        if ".py" in text and Path(text.partition(":")[0]).expanduser().is_file():
            return load_function(FunctionSpec(text, key="reward_funcs"))
        if not text or ("/" not in text and not expanded(text).is_dir()):
            raise ConfigError(
                f"reward_funcs has {text!r}, which is no built-in scorer ({', '.join(known_scorers())}), no file of a "
                "function and no folder or hub id of a reward model"
            )
        return item
    if not hasattr(item, "save_pretrained"):
        if not callable(item):
            raise ConfigError(
                f"the reward function is {item!r} ({type(item).__name__}); give a function, e.g. def "
                "compute_reward(prompt, response), or its file, or the folder of a reward model"
            )
        signature_of(item)
    return item
