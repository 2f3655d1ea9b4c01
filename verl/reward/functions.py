"""Imports a reward function and calls it with its parameters bound by name.

A parameter gets, in this order: the value in `reward_kwargs`, the sample's field, the dataset's column of that name,
its default. A function with `**kwargs` gets everything. A parameter that would stay unset is an error at start.

TRL passes `prompts` and `completions` as texts where the data's prompts are texts, and as lists of messages where they
are messages. Here a function gets messages only when it asks for them, so that one written for texts works on both.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

from verl.config.keys import ConfigDict
from verl.errors import RewardError
from verl.reward.base import RewardSample
from verl.reward.scorers import get_scorer, returns_details
from verl.user_code import attribute, check_path, import_path, without_scheme

DEFAULT_NAMES = ("compute_score", "compute_reward")
SCORERS = "<scorers>"
"""As the path of a FunctionSpec: the scorer registered for each row's data_source."""

# Parameter name -> attribute of RewardSample.
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
    "turns": "turns",
    "tool_calls": "tool_calls",
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
# Columns in which `verl.data.columns.truth_of` finds a row's truth, and the parameters that need it.
TRUTH_COLUMNS = ("reward_model", "ground_truth", "answer")
_TRUTH_PARAMETERS = ("ground_truth", "ground_truths")
# What **kwargs gets besides the columns.
_KEYWORD_SAMPLE = ("data_source", "solution_str", "ground_truth", "extra_info", "prompt", "response")
_KEYWORD_BATCH = ("prompts", "ground_truth", "data_source", "extra_info")


@dataclass(frozen=True)
class ManagerArguments:
    """What a reward manager written for verl is built with."""

    tokenizer: Any
    config: ConfigDict
    function: FunctionSpec | None
    """The reward function; None: the scorers of the data sources."""
    max_response_length: int

    @property
    def kwargs(self) -> Mapping[str, Any]:
        kwargs: Mapping[str, Any] = self.config.reward.reward_manager.reward_kwargs
        return kwargs


@dataclass(frozen=True)
class FunctionSpec:
    """Where a function is, its `reward_kwargs` and its weight: plain data, from which a worker process imports it."""

    path: str
    name: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    label: str = ""
    key: str = "reward.custom_reward_function"
    """The config key to name in errors."""
    manager: ManagerArguments | None = None
    """Where it is the class of a reward manager."""

    @property
    def is_scorers(self) -> bool:
        return self.path == SCORERS

    def describe(self) -> str:
        return self.label or (f"{self.name} ({self.path})" if self.name else self.path)


# ---- importing


def load_function(spec: FunctionSpec) -> Callable[..., Any]:
    """Import the function `spec` points at; RewardError says what was looked for and what is there instead."""
    path, name = _split_path(spec)
    module, name = import_path(path, name, f"{spec.key}.path", RewardError)
    return _find_function(module, name, spec)


def check_file(spec: FunctionSpec) -> None:
    """Raise RewardError for a missing file, without importing anything."""
    check_path(_split_path(spec)[0], f"{spec.key}.path", RewardError)


def spec_of(function: Callable[..., Any], **fields: Any) -> FunctionSpec | None:
    """The spec by which another process can import `function`; None for closures, lambdas, methods and what is defined
    in the script itself."""
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not qualname or "<" in qualname:
        return None
    if attribute(sys.modules.get(module), qualname) is not function:
        return None
    return FunctionSpec(path=f"{module}:{qualname}", label=qualname, **fields)


def _split_path(spec: FunctionSpec) -> tuple[str, str | None]:
    """The file or module, and the function's name where one is given."""
    given = without_scheme(spec.path.strip())
    path, colon, inline = given.rpartition(":")
    if not given:
        raise RewardError(
            f"{spec.key}.path is empty; it takes a file, 'pkg.module' or 'pkg.module:function'."
        )
    if not colon:
        return given, spec.name
    if spec.name not in (None, DEFAULT_NAMES[0], inline):  # the schema's default name was not asked for
        raise RewardError(
            f"{spec.key}.path={spec.path!r} and {spec.key}.name={spec.name!r} name two functions; keep one."
        )
    return path, inline


def _find_function(module: ModuleType, name: str | None, spec: FunctionSpec) -> Callable[..., Any]:
    defined = [
        key
        for key, value in vars(module).items()
        if inspect.isroutine(value)
        and not key.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    ]
    if name is None or (name == DEFAULT_NAMES[0] and not hasattr(module, name)):  # the schema's default name
        names = [key for key in DEFAULT_NAMES if callable(getattr(module, key, None))]
        names = names or (defined if len(defined) == 1 else [])
        wanted = " or ".join(DEFAULT_NAMES)
    else:
        names, wanted = [name], repr(name)
    target = attribute(module, names[0]) if names else None
    if not callable(target):
        seen = "" if target is None else f" ({wanted} is a {type(target).__name__}, not a function)"
        raise RewardError(
            f"{spec.path} has no function {wanted}{seen}; functions there: {', '.join(defined) or 'none'}. "
            f"Set {spec.key}.name."
        )
    return target


# ---- binding parameters


@dataclass(frozen=True)
class Signature:
    """A function's parameters as plain data, because the function itself may be in another process."""

    name: str
    positional_only: Sequence[str] = ()
    by_name: Sequence[str] = ()
    optional: Sequence[str] = ()
    takes_any: bool = False
    is_async: bool = False
    reads_messages: bool = False
    """Whether `prompts` and `completions` are lists of messages where the data has messages, as in TRL."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.positional_only, *self.by_name)

    @property
    def is_batch(self) -> bool:
        """Whether it scores all responses in one call."""
        return any(name in BATCH_NAMES for name in self.names)

    def check(
        self, kwargs: Mapping[str, Any], columns: Collection[str] | None = (), key: str = "reward"
    ) -> None:
        """Raise RewardError for what could only fail at the first sample. `columns=None`: not known yet."""
        surplus = [] if self.takes_any else [name for name in kwargs if name not in self.names]
        if surplus:
            raise RewardError(
                f"Reward function {self.name} has no parameter {_quoted(surplus)} given in {key}.reward_kwargs; "
                f"its parameters are {_quoted(self.names)}."
            )
        if columns is None:
            return
        known = {*SAMPLE_NAMES, *columns, *kwargs, *(BATCH_NAMES if self.is_batch else ())}
        required = [name for name in self.names if name not in self.optional]
        there = ", ".join(sorted(columns)) or "none"
        unknown = [name for name in required if name not in known]
        if unknown:
            raise RewardError(
                f"Reward function {self.name} asks for {_quoted(unknown)}, which nothing provides. Known parameters: "
                f"{', '.join(SAMPLE_NAMES)}; for a whole batch {', '.join(BATCH_NAMES)}; columns of the data: {there}. "
                f"Rename the parameter, give it a default, or set {key}.reward_kwargs.{unknown[0]}."
            )
        truth = [name for name in _TRUTH_PARAMETERS if name in required and name not in kwargs]
        if truth and columns and not set(columns) & set(TRUTH_COLUMNS):
            raise RewardError(
                f"Reward function {self.name} asks for {truth[0]!r}, but the data has no column "
                f"reward_model.ground_truth, ground_truth or answer (columns: {there}). Rename the column, ask for it "
                f"by its own name, or give the parameter a default."
            )


def signature_of(function: Callable[..., Any], name: str = "") -> Signature:
    """What `function` takes."""
    label = name or getattr(function, "__qualname__", None) or type(function).__name__
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"The parameters of the reward function {label} cannot be read ({error}); wrap it in a Python function."
        ) from error
    kind = inspect.Parameter
    named = (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY)
    call = type(function).__call__ if callable(function) else None  # a class with `async def __call__`
    return Signature(
        name=label,
        positional_only=tuple(p.name for p in parameters if p.kind is kind.POSITIONAL_ONLY),
        by_name=tuple(p.name for p in parameters if p.kind in named),
        optional=tuple(p.name for p in parameters if p.default is not kind.empty),
        takes_any=any(p.kind is kind.VAR_KEYWORD for p in parameters),
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call),
        reads_messages=reads_messages(function),
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

    def call(self, samples: Sequence[RewardSample]) -> Any:
        """Call it for one sample, or for a whole batch with every argument a list. An async function returns a
        coroutine."""
        signature = self.signature
        columns: Mapping[str, Any]
        if signature.is_batch:
            names = SAMPLE_NAMES | BATCH_NAMES
            fields = {name: [getattr(sample, of) for sample in samples] for name, of in names.items()}
            if signature.reads_messages:
                fields |= conversational(samples)
            every = dict.fromkeys(name for sample in samples for name in sample.columns)
            columns = {name: [sample.columns.get(name) for sample in samples] for name in every}
        else:
            columns = samples[0].columns
            fields = {name: getattr(samples[0], attribute) for name, attribute in SAMPLE_NAMES.items()}
        available = {**columns, **fields, **self.kwargs}
        values = {name: available[name] for name in signature.names if name in available}
        missing = [name for name in signature.names if name not in (*values, *signature.optional)]
        if missing:
            raise RewardError(
                f"Reward function {self.name} asks for {missing[0]!r}, which this row does not have; "
                f"give the parameter a default or the data that column."
            )
        if signature.takes_any:
            keywords = _KEYWORD_BATCH if signature.is_batch else _KEYWORD_SAMPLE
            values = {**columns, **{name: fields[name] for name in keywords}, **self.kwargs, **values}
        arguments: list[Any] = []
        for parameter in signature.positional_only:
            if parameter not in values:
                break  # from here on the defaults apply
            arguments.append(values.pop(parameter))
        return self.function(*arguments, **values)


class ScorerFunction(RewardFunction):
    """Calls the scorer that is registered for each sample's data source."""

    def __init__(self, kwargs: Mapping[str, Any] | None = None) -> None:
        self.kwargs = dict(kwargs or {})
        self.signature = Signature(name="scorer", takes_any=True)
        self._scorers: dict[str, RewardFunction] = {}

    def scorer(self, data_source: str) -> RewardFunction:
        if data_source not in self._scorers:
            function = RewardFunction(get_scorer(data_source), name=f"scorer of {data_source!r}")
            accepts = function.signature
            if accepts.is_batch:
                raise RewardError(
                    f"The scorer of {data_source!r} takes a whole batch ({', '.join(accepts.names)}); a scorer gets "
                    f"one sample. Set reward.custom_reward_function.path to it instead."
                )
            # One set of reward_kwargs serves several scorers: each gets those it has a parameter for.
            function.kwargs = {
                key: value for key, value in self.kwargs.items() if accepts.takes_any or key in accepts.names
            }
            self._scorers[data_source] = function
        return self._scorers[data_source]

    def call(self, samples: Sequence[RewardSample]) -> Any:
        return self.scorer(samples[0].data_source).call(samples)

    def check(self, data_sources: Sequence[str], columns: Collection[str] | None, key: str) -> None:
        used: set[str] = set()
        for data_source in data_sources:
            function = self.scorer(data_source)
            function.signature.check(function.kwargs, columns, key)
            used |= set(function.kwargs)
        surplus = [name for name in self.kwargs if name not in used]
        if surplus and data_sources:
            raise RewardError(
                f"{key}.reward_kwargs has {_quoted(surplus)}, which none of the scorers of "
                f"{_quoted(sorted(set(data_sources)))} takes."
            )


def _quoted(names: Collection[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


# ---- functions in TRL's form: `prompts` and `completions` as texts or as messages

_TEXT_PARAMETERS = ("completions", "prompts")
_MESSAGE_FIELDS = {"content", "role"}


def reads_messages(function: Callable[..., Any]) -> bool:
    """By the annotation of `completions` or `prompts`: with a dict in it, messages. Without one: whether the function,
    or one of its module that it calls, uses a message's fields, as in `completion[0]["content"]`."""
    target = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(target, FunctionType):  # an object with __call__
        target = vars(type(target)).get("__call__")
    if not isinstance(target, FunctionType):
        return False
    parameters = inspect.signature(target).parameters
    named = [parameters[name] for name in _TEXT_PARAMETERS if name in parameters]
    said = [str(each.annotation) for each in named if each.annotation is not inspect.Parameter.empty]
    if said:
        return any("dict" in text.lower() for text in said)
    return bool(named) and any(
        value in _MESSAGE_FIELDS
        for code in _codes(target, set())
        for value in code.co_consts
        if isinstance(value, str)
    )


def _codes(function: FunctionType, seen: set[FunctionType]) -> Iterator[CodeType]:
    """The code of a function, of those inside it, and of those of its module whose names it uses."""
    if function in seen:
        return
    seen.add(function)
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [value for value in code.co_consts if isinstance(value, CodeType)]
        for name in code.co_names:
            other = function.__globals__.get(name)
            if isinstance(other, FunctionType) and other.__module__ == function.__module__:
                yield from _codes(other, seen)


def conversational(samples: Sequence[RewardSample]) -> dict[str, list[Any]]:
    """`prompts` and `completions` as messages, in rows that have them; as text in others."""
    pairs = [_messages(sample) for sample in samples]
    return {"prompts": [prompt for prompt, _ in pairs], "completions": [answer for _, answer in pairs]}


def _messages(sample: RewardSample) -> tuple[Any, Any]:
    if sample.messages is None:
        return sample.prompt, sample.response
    if sample.turns is None:
        return sample.messages, [{"role": "assistant", "content": sample.response}]
    # With several turns `messages` is the whole conversation, the turns at its end.
    start = len(sample.messages) - len(sample.turns)
    return sample.messages[:start], sample.messages[start:]


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float | dict[str, Any]:
    """The score of one response by the scorer of `data_source`, as verl's function of this name returns it: a number,
    and what the scorer returned for DAPO's data (a dict with score, acc and pred) and for registered scorers."""
    sample = RewardSample(0, "", solution_str, ground_truth, data_source, extra_info or {})
    value = ScorerFunction().call([sample])
    return value if returns_details(data_source) else float(value["score"])
