"""Call anybody's reward function by the names of its parameters.

`Signature` is what is known of a function without running it: it decides whether the function scores one
sample or a whole batch, and whether everything it asks for will be there. It is plain data, because the
function itself may live in another process. `RewardFunction` binds and calls.

A parameter gets, in this order: the value of `reward_kwargs`, the sample's own field, the dataset's column of
that name, its default. A function with `**kwargs` gets everything. A parameter that would stay empty is an
error at start.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from verl.errors import RewardError
from verl.reward.base import RewardSample

# Parameter name -> attribute of RewardSample. The first name of each attribute is the one given to **kwargs.
SAMPLE_NAMES: dict[str, str] = {
    "data_source": "data_source",
    "solution_str": "response",
    "response": "response",
    "completion": "response",
    "response_str": "response",
    "ground_truth": "ground_truth",
    "extra_info": "extra_info",
    "prompt": "prompt",
    "prompt_str": "prompt",
    "messages": "messages",
    "raw_prompt": "messages",
    "response_length": "response_length",
    "truncated": "truncated",
}
# Names that only a function of a whole batch has.
BATCH_NAMES: dict[str, str] = {
    "completions": "response",
    "responses": "response",
    "solution_strs": "response",
    "prompts": "prompt",
    "ground_truths": "ground_truth",
    "data_sources": "data_source",
    "extra_infos": "extra_info",
}
# Where a row's truth can stand (`verl.data.rl_dataset.truth_of`), and the parameters that want it.
TRUTH_COLUMNS = ("reward_model", "ground_truth", "answer")
_TRUTHS = ("ground_truth", "ground_truths")
_KEYWORD_SAMPLE = ("data_source", "solution_str", "ground_truth", "extra_info", "prompt", "response")
_KEYWORD_BATCH = ("prompts", "ground_truth", "data_source", "extra_info")


@dataclass(frozen=True)
class Signature:
    """A function's parameters, as plain data."""

    name: str
    positional_only: tuple[str, ...] = ()
    by_name: tuple[str, ...] = ()
    optional: frozenset[str] = field(default_factory=frozenset)
    takes_any: bool = False
    is_async: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return self.positional_only + self.by_name

    @property
    def is_batch(self) -> bool:
        return any(name in BATCH_NAMES for name in self.names)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "optional": sorted(self.optional)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Signature:
        return cls(
            name=str(data["name"]),
            positional_only=tuple(map(str, data["positional_only"])),
            by_name=tuple(map(str, data["by_name"])),
            optional=frozenset(map(str, data["optional"])),
            takes_any=bool(data["takes_any"]),
            is_async=bool(data["is_async"]),
        )

    def check(
        self, kwargs: Mapping[str, Any], columns: Iterable[str] | None = (), key: str = "reward"
    ) -> None:
        """Refuse what could only fail at the first sample. `columns=None` means they are not known yet."""
        surplus = [] if self.takes_any else [name for name in kwargs if name not in self.names]
        if surplus:
            raise RewardError(
                f"Reward function {self.name} has no parameter {_quoted(surplus)} given in "
                f"{key}.reward_kwargs; "
                f"its parameters are {_quoted(self.names)}."
            )
        if columns is None:
            return
        known = (
            set(SAMPLE_NAMES) | set(columns) | set(kwargs) | (set(BATCH_NAMES) if self.is_batch else set())
        )
        unknown = [name for name in self.names if name not in known and name not in self.optional]
        if unknown:
            raise RewardError(
                f"Reward function {self.name} asks for {_quoted(unknown)}, which nothing provides. Known "
                f"parameters: "
                f"{', '.join(SAMPLE_NAMES)}; for a whole batch {', '.join(BATCH_NAMES)}; columns of the "
                f"data: "
                f"{', '.join(sorted(columns)) or 'none besides these'}. Rename the parameter, give it a "
                f"default, "
                f"or set {key}.reward_kwargs.{unknown[0]}."
            )
        self._require_truth(kwargs, set(columns), key)

    def _require_truth(self, kwargs: Mapping[str, Any], columns: set[str], key: str) -> None:
        """A function that must have the truth, and rows that cannot have one: every score would be wrong."""
        wanted = [name for name in _TRUTHS if name in self.names and name not in self.optional]
        if not wanted or not columns or wanted[0] in kwargs or columns & set(TRUTH_COLUMNS):
            return
        raise RewardError(
            f"Reward function {self.name} asks for {wanted[0]!r}, but no row has a truth: it is looked for in the "
            f"columns reward_model.ground_truth, ground_truth and answer, and the data has: "
            f"{', '.join(sorted(columns))}. Name the column so, ask for it by its own name (a parameter "
            f"of that name gets it), or give the parameter a default if the function needs no truth."
        )


def signature_of(function: Callable[..., Any], name: str = "") -> Signature:
    """What `function` takes."""
    label = name or getattr(function, "__qualname__", None) or type(function).__name__
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"The parameters of the reward function {label} cannot be read ({error}); wrap it in a plain "
            f"Python function."
        ) from error
    kind = inspect.Parameter
    call = type(function).__call__ if callable(function) else None  # a class with `async def __call__`
    return Signature(
        name=label,
        positional_only=tuple(p.name for p in parameters if p.kind is kind.POSITIONAL_ONLY),
        by_name=tuple(
            p.name for p in parameters if p.kind in (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY)
        ),
        optional=frozenset(p.name for p in parameters if p.default is not kind.empty),
        takes_any=any(p.kind is kind.VAR_KEYWORD for p in parameters),
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call),
    )


class RewardFunction:
    """A function with its signature and fixed arguments."""

    def __init__(
        self, function: Callable[..., Any], kwargs: Mapping[str, Any] | None = None, name: str = ""
    ) -> None:
        self.function = function
        self.signature = signature_of(function, name)
        self.kwargs = dict(kwargs or {})

    @property
    def name(self) -> str:
        return self.signature.name

    def call(self, sample: RewardSample) -> Any:
        """One sample. For an async function, a coroutine."""
        return self._invoke(lambda parameter: _of_sample(sample, parameter), _rest_of_sample, sample)

    def call_batch(self, samples: Sequence[RewardSample]) -> Any:
        """A whole batch: every argument is a list. For an async function, a coroutine."""
        return self._invoke(lambda parameter: _of_batch(samples, parameter), _rest_of_batch, samples)

    def _invoke(self, find: Callable[[str], Any], rest: Callable[[Any], dict[str, Any]], given: Any) -> Any:
        values: dict[str, Any] = {}
        for parameter in self.signature.names:
            value = self.kwargs[parameter] if parameter in self.kwargs else find(parameter)
            if value is not _ABSENT:
                values[parameter] = value
            elif parameter not in self.signature.optional:
                raise RewardError(
                    f"Reward function {self.name} asks for {parameter!r}, which this row does not have; "
                    f"give the parameter a default or the data that column."
                )
        if self.signature.takes_any:
            values = {**rest(given), **self.kwargs, **values}
        arguments: list[Any] = []
        for parameter in self.signature.positional_only:
            if parameter not in values:
                break  # its default holds, and so do those of all behind it
            arguments.append(values.pop(parameter))
        return self.function(*arguments, **values)


class _Absent:
    pass


_ABSENT = _Absent()


def _of_sample(sample: RewardSample, parameter: str) -> Any:
    if parameter in SAMPLE_NAMES:
        return getattr(sample, SAMPLE_NAMES[parameter])
    return sample.columns.get(parameter, _ABSENT)


def _of_batch(samples: Sequence[RewardSample], parameter: str) -> Any:
    attribute = BATCH_NAMES.get(parameter) or SAMPLE_NAMES.get(parameter)
    if attribute is not None:
        return [getattr(sample, attribute) for sample in samples]
    if not any(parameter in sample.columns for sample in samples):
        return _ABSENT
    return [sample.columns.get(parameter) for sample in samples]


def _rest_of_sample(sample: RewardSample) -> dict[str, Any]:
    return {**sample.columns, **{name: getattr(sample, SAMPLE_NAMES[name]) for name in _KEYWORD_SAMPLE}}


def _rest_of_batch(samples: Sequence[RewardSample]) -> dict[str, Any]:
    names = dict.fromkeys(name for sample in samples for name in sample.columns)
    values = {name: [sample.columns.get(name) for sample in samples] for name in names}
    for name in _KEYWORD_BATCH:
        attribute = BATCH_NAMES.get(name) or SAMPLE_NAMES[name]
        values[name] = [getattr(sample, attribute) for sample in samples]
    return values


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
