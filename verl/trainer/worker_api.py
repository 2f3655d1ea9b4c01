"""Workers for people who write their own loop: one generates, one learns. Each has one half of a `Session`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from verl.config.checks import unavailable
from verl.config.load import from_dict
from verl.config.schema import SessionConfig
from verl.config.unused_keys import unused_keys
from verl.data.proto import DataProto
from verl.errors import ConfigError, RewardError
from verl.models.attention import ATTENTION_NAME
from verl.models.external_model import avoid_slow_bf16, is_sharded
from verl.observe.batch_metrics import batch_metrics
from verl.reward import build_reward_manager
from verl.rollout.source import as_source
from verl.trainer import advantage
from verl.trainer.experience import attach_scores, reward_sample
from verl.trainer.external_batches import ExternalLoader
from verl.trainer.given_model import model_keys, own_tokenizer
from verl.trainer.session import Session
from verl.workers.local import LocalGroup
from verl.workers.placement import build_reward_model

if TYPE_CHECKING:
    from torch import nn

    from verl.config.roles import Role
    from verl.models.weight_source import WeightSource


logger = logging.getLogger(__name__)


def _prepared(model: nn.Module, device: str, *sources: dict[str, Any]) -> SessionConfig:
    """The config of a worker, with the model in a form it can use."""
    where = torch.device(device)
    cfg = from_dict(SessionConfig, {"trainer.device": where.type}, *sources, checked=False)
    problems = unavailable(cfg)
    if problems:
        raise ConfigError("\n".join(problems))
    for warning in unused_keys(cfg):
        logger.warning("%s", warning)
    if is_sharded(model):
        raise ConfigError(
            "the model is wrapped in FSDP; a worker needs the model without it (PPOTrainer and GRPOTrainer take both)"
        )
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}, but torch sees no GPU; give device='cpu'")
    if cfg.actor_rollout_ref.model.dtype == "auto":
        avoid_slow_bf16(model, where)
    cfg.trainer.device = device  # which GPU
    return cfg


class _Generating(LocalGroup):
    """A model that only generates: no engine trains it here."""

    def __init__(self, cfg: SessionConfig, tokenizer: Any, model: nn.Module) -> None:
        self._source = as_source(model)
        super().__init__(cfg, tokenizer, training_steps=None)

    def _build(self, role: Role, model: nn.Module | None) -> None:
        pass

    def weight_source(self) -> WeightSource:
        return self._source

    @contextmanager
    def resident(self, role: str, optimizer: bool) -> Iterator[None]:
        yield


class RolloutWorker:
    """Generates from a model's current weights.

    Args:
        model: A loaded causal language model; it is moved to `device`. Its weights are used, not copied: after an
            optimiser step on the same model the next `generate` has the new ones.
        inference_engine: `native` or `hf`.
        device: `cpu`, `cuda` or `cuda:N`.
        tokenizer: Default: that of the folder the model came from.
        n: Responses per prompt.
        max_response_length: In tokens.
        temperature: Of sampling; 0 is greedy.
        overrides: Any key of the configuration reference, by its full name.
    """

    def __init__(
        self,
        model: nn.Module,
        inference_engine: str = "native",
        device: str = "cpu",
        tokenizer: Any = None,
        n: int = 1,
        max_response_length: int = 512,
        temperature: float = 1.0,
        overrides: dict[str, Any] | None = None,
    ) -> None:
        keys = {
            "actor_rollout_ref.rollout.name": inference_engine,
            "actor_rollout_ref.rollout.n": n,
            "actor_rollout_ref.rollout.temperature": temperature,
            "data.max_response_length": max_response_length,
            "data.truncation": "left",
        }
        self.cfg = _prepared(model, device, keys, overrides or {})
        self.cfg.actor_rollout_ref.rollout.free_cache_engine = False  # who trains the model is not known here
        self.tokenizer = own_tokenizer(model, self.cfg, "RolloutWorker") if tokenizer is None else tokenizer
        group = _Generating(self.cfg, self.tokenizer, model.to(device))
        self._session = Session.over(group, self.tokenizer)

    def generate(self, prompts: Sequence[Any] | DataProto) -> DataProto:
        """Generate `n` responses for each prompt.

        Args:
            prompts: Strings (used as they are, without the chat template), lists of messages, or rows of a data file
                (dicts whose further columns are kept); or a `DataProto` with the column `prompt_ids`.

        Returns:
            One row per response; the `n` responses of a prompt follow each other. B rows, P tokens of the longest
            prompt, T tokens of the longest response.

            Tensors (`out.batch`):

            - `responses` [B, T]: token ids, padded on the right; `prompts` [B, P]: padded on the left
            - `input_ids` [B, P+T]: both; `attention_mask` [B, P+T]: 0 on padding
            - `response_mask` [B, T]: 1 on tokens that the model generated
            - `rollout_log_probs` [B, T]: log-probability of each token when it was drawn
            - `token_versions` [B, T]: version of the weights that drew each token

            Columns (`out.non_tensor_batch`), one object per row:

            - `response_text`: the response as text, without special tokens
            - `finish_reason`: `stop`, `length` or `abort`
            - `uid`: the same for all responses of a prompt
            - `prompt_text`, `prompt_ids`, `raw_prompt`: the prompt after the chat template, its tokens, and as given
            - `ground_truth`, `data_source`, `extra_info`, `columns`: from the row of data
            - `index`, `policy_version`

            `out.meta_info["temperature"]` is the temperature that the log-probabilities belong to.

        Examples:
            >>> out = worker.generate(["1+1="])  # doctest: +SKIP
            >>> out.non_tensor_batch["response_text"][0]  # doctest: +SKIP
            '2'
        """
        if not isinstance(prompts, DataProto):
            prompts = next(iter(ExternalLoader([prompts], self.cfg.data, self.tokenizer)))
        return self._session.sample(prompts)

    def close(self) -> None:
        """Free the engine's memory; the model stays."""
        self._session.close()


class TrainerWorker:
    """Learns from what a `RolloutWorker` generated: one optimiser step per `train_step`.

    Args:
        model: The model to train, usually that of the `RolloutWorker`.
        optimizer: A torch optimiser over its parameters; default: AdamW as the config says.
        device: `cpu`, `cuda` or `cuda:N`.
        reward_function: Scores the responses; any signature of a reward function. Not needed where the data has
            `token_level_scores` [B, T].
        adv_estimator: Default: `grpo` where prompts have several responses, `reinforce_plus_plus` otherwise.
        overrides: Any key of the configuration reference, by its full name.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        device: str = "cpu",
        reward_function: Callable[..., Any] | None = None,
        adv_estimator: str | None = None,
        overrides: dict[str, Any] | None = None,
    ) -> None:
        overrides = overrides or {}
        self.cfg = _prepared(model, device, {"trainer.seed": 0, **model_keys(model, overrides)}, overrides)
        if getattr(getattr(model, "config", None), "_attn_implementation", None) == ATTENTION_NAME:
            model.set_attn_implementation("sdpa")  # type: ignore[operator]  # left by an earlier worker
        group = LocalGroup(self.cfg, None, training_steps=None, model=model, optimizer=optimizer)
        self._session = Session.over(group)
        self._adv_estimator = adv_estimator
        self._rewards = None
        if reward_function is not None:
            self._rewards = build_reward_manager(
                self.cfg.reward,
                function=reward_function,
                max_response_length=self.cfg.data.max_response_length,
                reward_model_factory=lambda: build_reward_model(self.cfg),
            )

    def train_step(self, data: DataProto) -> dict[str, float]:
        """Score the responses, estimate advantages, and take one optimiser step.

        Args:
            data: What `RolloutWorker.generate` returned. Scores, advantages and returns are added to it.

        Returns:
            The metrics of the step: `reward/mean`, `actor/pg_loss`, `actor/grad_norm`, `response_length/mean` and
            others.
        """
        if "token_level_scores" not in data.batch:
            data = self._score(data)
        algorithm = self.cfg.algorithm
        several = len(set(data.non_tensor_batch["uid"])) < len(data)
        algorithm.adv_estimator = self._adv_estimator or ("grpo" if several else "reinforce_plus_plus")
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
        data.meta_info.setdefault("temperature", self.cfg.actor_rollout_ref.rollout.temperature)
        advantage.estimate(data, algorithm)
        # The worker that generates does not count this one's steps.
        columns = {name: column for name, column in data.non_tensor_batch.items() if name != "policy_version"}
        metrics = self._session.forward_backward(DataProto(data.batch, columns, data.meta_info))
        return metrics | self._session.optim_step() | batch_metrics(data)

    def _score(self, data: DataProto) -> DataProto:
        if self._rewards is None:
            raise RewardError(
                "the data has no token_level_scores; give TrainerWorker(..., reward_function=...) "
                "or put the scores there"
            )
        for row in range(len(data)):
            self._rewards.submit(
                reward_sample(
                    data,
                    row,
                    text=data.non_tensor_batch["response_text"][row],
                    length=int(data.batch["response_mask"][row].sum()),
                    truncated=data.non_tensor_batch["finish_reason"][row] == "length",
                )
            )
        results = self._rewards.collect()
        return attach_scores(data, [results[row] for row in range(len(data))])
