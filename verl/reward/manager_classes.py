"""Base classes and registry of reward managers written for verl.

An `AbstractRewardManager` is called with the whole batch and returns rewards of tokens; a `RewardManagerBase` scores
one row at a time. Such a class runs where reward functions do (`verl.reward.manager_function`).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from verl.algorithms.groups import overlong_penalty
from verl.reward.functions import default_compute_score
from verl.reward.managers import CLASSES, FACTORIES

Manager = TypeVar("Manager", bound=type)


def register(name: str) -> Callable[[Manager], Manager]:
    """Decorator: `reward.reward_manager.name=NAME` then scores with this class."""

    def add(manager: Manager) -> Manager:
        known = CLASSES.get(name) or OWN.get(name)
        if (known is not None or name in FACTORIES) and repr(known) != repr(manager):
            raise ValueError(f"reward manager {name!r} is registered already, by {known}; rename {manager}")
        CLASSES[name] = manager
        return manager

    return add


def get_reward_manager_cls(name: str) -> type:
    """The class of that name."""
    known = OWN | CLASSES
    if name not in known:
        raise ValueError(f"reward manager {name!r} is unknown; known: {', '.join(sorted(known))}")
    return known[name]


class AbstractRewardManager(ABC):
    """Scores a batch. Its rows have `prompts`, `responses` and `attention_mask` in `batch`, and `reward_model`,
    `data_source`, `extra_info` and the data's other columns in `non_tensor_batch`."""

    @abstractmethod
    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        """`num_examine`: responses of a data source to print."""

    @abstractmethod
    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        """Rewards of tokens [B, T], or with `return_dict` these under `reward_tensor` and lists of further values under
        `reward_extra_info`."""

    def _extract_reward_from_rm_scores(self, data: Any, return_dict: bool = False) -> Any:
        """None: a reward model's scores are added to those of the manager, which does not see them."""
        return None


class NaiveRewardManager(AbstractRewardManager):
    """Calls the reward function for one row after the other; its score goes to the response's last token."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score: Any = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key

    def verify(self, data: Any) -> list[Any]:
        """What the reward function returns for each row."""
        rows = [data[row] for row in range(len(data))]
        return [
            self.compute_score(**function_arguments(row, self.tokenizer, self.reward_fn_key)) for row in rows
        ]

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        rewards = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
        about: dict[str, list[Any]] = defaultdict(list)
        for row, score in enumerate(self.verify(data)):
            if isinstance(score, dict):
                for key, value in score.items():
                    about[key].append(value)
            length = response_length(data[row])
            rewards[row, max(length - 1, 0)] = self._final(
                score["score"] if isinstance(score, dict) else score, length
            )
        return {"reward_tensor": rewards, "reward_extra_info": about} if return_dict else rewards

    def _final(self, score: float, length: int) -> float:
        return score


class PrimeRewardManager(NaiveRewardManager):
    """As naive: how many processes score is a matter of `reward.num_workers`."""


class BatchRewardManager(NaiveRewardManager):
    """Calls the reward function once, with lists."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any],
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.reward_kwargs = reward_kwargs

    def verify(self, data: Any) -> list[Any]:
        rows = [function_arguments(data[row], self.tokenizer, self.reward_fn_key) for row in range(len(data))]
        lists = {f"{name}s": [row[name] for row in rows] for name in rows[0]}
        return list(self.compute_score(**lists, **self.reward_kwargs))


class DAPORewardManager(NaiveRewardManager):
    """As naive, less a penalty for responses that are nearly too long."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.max_resp_len, self.overlong_buffer_cfg = max_resp_len, overlong_buffer_cfg

    def _final(self, score: float, length: int) -> float:
        buffer = self.overlong_buffer_cfg
        if buffer is None or not buffer.enable or self.max_resp_len is None:
            return score
        lengths = torch.tensor([length])
        return score + float(overlong_penalty(lengths, self.max_resp_len, buffer.len, buffer.penalty_factor))


class RewardManagerBase(ABC):
    """Scores one row at a time, many of them at once. `loop` is the event loop that runs it."""

    loop: Any = None

    def __init__(self, config: Any, tokenizer: Any, compute_score: Callable[..., Any]) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score

    @classmethod  # noqa: B027 - most have nothing to do
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Called once in each process, before the first one is built."""

    @abstractmethod
    async def run_single(self, data: Any) -> dict[str, Any]:
        """`reward_score`, a number, and `reward_extra_info`, a dict, for a batch of one row."""


class RowRewardManager(RewardManagerBase):
    """Calls the reward function with the row's text; a function that is not async runs in a thread."""

    async def run_single(self, data: Any) -> dict[str, Any]:
        arguments = function_arguments(data[0], self.tokenizer)
        if inspect.iscoroutinefunction(self.compute_score):
            score = await self.compute_score(**arguments)
        else:
            score = await self.loop.run_in_executor(None, lambda: self.compute_score(**arguments))
        about = dict(score) if isinstance(score, dict) else {"acc": score}
        return {"reward_score": about.pop("score", score), "reward_extra_info": about}


def response_length(row: Any) -> int:
    """Tokens of one row's response."""
    width = row.batch["responses"].shape[-1]
    return int(row.batch["attention_mask"][-width:].sum()) if width else 0


def function_arguments(row: Any, tokenizer: Any, source: str = "data_source") -> dict[str, Any]:
    """What a reward function is called with for one row."""
    columns = row.non_tensor_batch
    ids = row.batch["responses"][: response_length(row)]
    return {
        "data_source": columns[source],
        "solution_str": tokenizer.decode(ids, skip_special_tokens=True),
        "ground_truth": columns["reward_model"]["ground_truth"],
        "extra_info": columns.get("extra_info") or {},
    }


OWN: dict[str, type] = {
    "naive": NaiveRewardManager,
    "prime": PrimeRewardManager,
    "dapo": DAPORewardManager,
    "batch": BatchRewardManager,
}
