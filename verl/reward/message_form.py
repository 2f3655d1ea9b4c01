"""Reward functions in TRL's form: whether one reads completions as text or as messages, and the messages.

TRL passes `prompts` and `completions` as texts where the data's prompts are texts, and as lists of messages where they
are messages. Here a function gets messages only when it asks for them, so that one written for texts works on both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from verl.reward.base import RewardSample

_PARAMETERS = ("completions", "prompts")
_FIELDS = {"content", "role"}


def reads_messages(function: Callable[..., Any]) -> bool:
    """By the annotation of `completions` or `prompts`: with a dict in it, messages. Without one: whether the function,
    or one of its module that it calls, uses a message's fields, as in `completion[0]["content"]`."""
    target = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(target, FunctionType):  # an object with __call__
        target = vars(type(target)).get("__call__")
    if not isinstance(target, FunctionType):
        return False
    parameters = inspect.signature(target).parameters
    named = [parameters[name] for name in _PARAMETERS if name in parameters]
    said = [str(each.annotation) for each in named if each.annotation is not inspect.Parameter.empty]
    if said:
        return any("dict" in text.lower() for text in said)
    return bool(named) and any(
        value in _FIELDS
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
