"""Reward managers written for verl, called as reward functions are: their failures, deadlines and messages are the
same."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from verl.errors import RewardError
from verl.reward.base import RewardResult, RewardSample
from verl.reward.functions import (
    ManagerArguments,
    RewardFunction,
    Signature,
    default_compute_score,
    load_function,
)
from verl.user_code import error_line


class ManagerFunction(RewardFunction):
    """A reward manager written for verl: called with the whole batch, or, where it has `run_single`, with one row."""

    def __init__(self, manager: Any, arguments: ManagerArguments, name: str) -> None:
        self.kwargs = {}
        self.tokenizer = arguments.tokenizer
        by_row = hasattr(manager, "run_single")
        asked: dict[str, Any] = {} if by_row else {"by_name": ("completions",)}
        self.signature = Signature(name=name, is_async=by_row, takes_any=True, **asked)
        try:
            self.manager = _built(manager, arguments, by_row)
        except Exception as error:
            what = f"{type(error).__name__}: {error}{error_line(error)}"
            raise RewardError(f"The reward manager {name} cannot be built: {what}") from error

    def call(self, samples: Sequence[RewardSample]) -> Any:
        from verl.reward.batches import batch_of

        data = batch_of(samples, self.tokenizer)
        if self.signature.is_async:
            return self._score_row(data)
        takes_dict = "return_dict" in inspect.signature(self.manager).parameters
        value = self.manager(data, return_dict=True) if takes_dict else self.manager(data)
        return self._results(value, data)

    async def _score_row(self, data: Any) -> Any:
        self.manager.loop = asyncio.get_running_loop()
        value = await self.manager.run_single(data)
        if not isinstance(value, Mapping) or "reward_score" not in value:
            raise self._unusable("run_single", value, "a dict with a number under 'reward_score'")
        return {**(value.get("reward_extra_info") or {}), "score": value["reward_score"]}

    def _results(self, value: Any, data: Any) -> list[RewardResult]:
        """From rewards of tokens [B, T], alone or under `reward_tensor`."""
        given: Any = value
        about: Mapping[str, Any] = {}
        if isinstance(value, Mapping):
            given, about = value.get("reward_tensor"), value.get("reward_extra_info") or {}
        shape = tuple(data.batch["responses"].shape)
        if getattr(given, "shape", None) != shape:
            wanted = f"a tensor {list(shape)} of token rewards, alone or under 'reward_tensor'"
            raise self._unusable("__call__", value, wanted)
        for key, column in about.items():
            if len(column) != len(data):
                raise self._unusable(
                    "__call__", value, f"{len(data)} values under reward_extra_info[{key!r}]"
                )
        lengths = (
            data.batch["attention_mask"][:, -shape[1] :].sum(-1).tolist() if shape[1] else [0] * shape[0]
        )
        results = []
        for row, (rewards, length) in enumerate(zip(given.tolist(), lengths, strict=True)):
            extra = {key: column[row] for key, column in about.items() if key != "score"}
            spread = any(rewards[: max(length - 1, 0)])
            results.append(
                RewardResult(sum(rewards[:length]), extra, token_scores=rewards[:length] if spread else None)
            )
        return results

    def _unusable(self, method: str, value: Any, wanted: str) -> RewardError:
        return RewardError(
            f"Reward manager {self.name} returned {str(value)[:80]!r} (a {type(value).__name__}) from {method}; it "
            f"must return {wanted}."
        )


def _built(manager: Any, given: ManagerArguments, by_row: bool) -> Any:
    """The manager, with the arguments that verl gives it; of others those its constructors name."""
    compute_score: Any = default_compute_score
    if given.function is not None:
        compute_score = load_function(given.function)
        if given.function.kwargs:
            call = partial(compute_score, **given.function.kwargs)
            compute_score = _awaited(call) if inspect.iscoroutinefunction(compute_score) else call
    arguments: dict[str, Any] = {"tokenizer": given.tokenizer, "compute_score": compute_score}
    if by_row:
        arguments["config"] = given.config
        offered: dict[str, Any] = {"reward_router_address": None, "reward_model_tokenizer": None}
        if hasattr(manager, "init_class"):
            manager.init_class(given.config, given.tokenizer)
    else:
        arguments |= {"num_examine": 0, "reward_fn_key": "data_source", **given.kwargs}
        offered = {
            "max_resp_len": given.max_response_length,
            "overlong_buffer_cfg": given.config.reward.overlong_buffer,
        }
    named = {
        name
        for each in inspect.getmro(manager)
        if each is not object and "__init__" in vars(each)
        for name in inspect.signature(vars(each)["__init__"]).parameters
    }
    arguments |= {name: value for name, value in offered.items() if name in named and name not in arguments}
    return manager(**arguments)


def _awaited(call: Any) -> Any:
    """A coroutine function, which `functools.partial` of one is not to all Pythons that ask."""

    async def compute_score(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    return compute_score
