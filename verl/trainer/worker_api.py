"""Workers for people who write their own loop: one generates, one learns. Built from the same roles as the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from verl.config.checks import unavailable
from verl.config.load import from_dict
from verl.config.schema import PPOConfig
from verl.config.unused_keys import unused_keys
from verl.data.proto import DataProto, object_column
from verl.data.tokenizer import load_tokenizer
from verl.errors import ConfigError, RewardError
from verl.rollout import build_rollout
from verl.rollout.sampler import Sampler
from verl.workers.group import mini_batches
from verl.workers.local import pad_id
from verl.workers.placement import build_reward_model
from verl.workers.roles import ActorRole, rollouts_of, training_settings

if TYPE_CHECKING:
    from torch import nn

    from verl.rollout.base import SamplingParams


logger = logging.getLogger(__name__)


def _config(overrides: dict[str, Any] | None, device: str, **values: Any) -> PPOConfig:
    defaults = {"trainer.device": torch.device(device).type}
    cfg = from_dict(PPOConfig, {**defaults, **values, **(overrides or {})}, checked=False)
    problems = unavailable(cfg)
    if problems:
        raise ConfigError("\n".join(problems))
    for warning in unused_keys(cfg):
        logger.warning("%s", warning)
    return cfg


def _tokenizer_of(model: Any) -> Any:
    name = getattr(model, "name_or_path", "")
    if not name:
        raise ConfigError(
            "the model does not say which folder it came from; give RolloutWorker(..., tokenizer=...)"
        )
    return load_tokenizer(name)


def _present(device: str) -> torch.device:
    wanted = torch.device(device)
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}, but torch sees no GPU; give device='cpu'")
    return wanted


def _prepared(model: Any, device: str, dtype: str) -> torch.device:
    """The device, with the model in a form a worker can use."""
    from verl.models.external_model import avoid_slow_bf16, is_sharded

    if is_sharded(model):
        raise ConfigError(
            "the model is wrapped in FSDP; a worker needs the model without it (PPOTrainer and GRPOTrainer take both)"
        )
    where = _present(device)
    if dtype == "auto":
        avoid_slow_bf16(model, where)
    return where


def with_texts(out: DataProto, tokenizer: Any, sampling: SamplingParams) -> DataProto:
    """Generated rows with the column `response_text`, and the temperature of their log-probs in `meta_info`."""
    responses = out.batch["responses"]
    lengths = out.batch["attention_mask"][:, -responses.shape[1] :].sum(-1).tolist()
    texts = [
        tokenizer.decode(row[: int(length)], skip_special_tokens=True)
        for row, length in zip(responses.tolist(), lengths, strict=True)
    ]
    out.non_tensor_batch["response_text"] = object_column(texts)
    # The distribution its log-probs belong to, so that a trainer recomputes the same one.
    plain = sampling.raw_log_probs or sampling.temperature == 0
    out.meta_info["temperature"] = 1.0 if plain else sampling.temperature
    return out


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
        self.cfg = _config(
            overrides,
            device,
            **{
                "actor_rollout_ref.rollout.name": inference_engine,
                "actor_rollout_ref.rollout.n": n,
                "actor_rollout_ref.rollout.temperature": temperature,
                "data.max_response_length": max_response_length,
                "data.truncation": "left",
            },
        )
        self.tokenizer = tokenizer if tokenizer is not None else _tokenizer_of(model)
        model.to(_prepared(model, device, self.cfg.actor_rollout_ref.model.dtype))
        rollout = self.cfg.actor_rollout_ref.rollout
        self._engine = build_rollout(inference_engine, model, self.tokenizer, rollout)
        self._calls = 0

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
        from verl.trainer.external_batches import ExternalLoader

        self._calls += 1
        batch = prompts if isinstance(prompts, DataProto) else None
        if batch is None:
            batch = next(iter(ExternalLoader([prompts], self.cfg.data, self.tokenizer)))
        settings = training_settings(
            self.cfg.actor_rollout_ref.rollout, self.cfg.data.max_response_length, self._calls
        )
        samples = Sampler(self._engine).collect(batch, settings)
        out = rollouts_of(batch, samples, settings.n, pad_id(self.tokenizer))
        return with_texts(out, self.tokenizer, settings.sampling)

    def close(self) -> None:
        """Free the engine's memory; the model stays."""
        self._engine.close()


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
        from verl.engines import build_engine
        from verl.models.attention import ATTENTION_NAME
        from verl.models.external_model import given_keys

        self.cfg = _config(overrides, device, **given_keys(model, overrides or {}))
        arr = self.cfg.actor_rollout_ref
        where = _prepared(model, device, arr.model.dtype)
        if getattr(getattr(model, "config", None), "_attn_implementation", None) == ATTENTION_NAME:
            model.set_attn_implementation("sdpa")  # type: ignore[operator]  # left by an earlier worker
        self._engine = build_engine(
            "actor", arr.model, arr.actor, model=model, optimizer=optimizer, device=where, seed=0
        )
        self._role = ActorRole(self._engine, arr.actor, loss_scale_factor=self.cfg.data.max_response_length)
        self._adv_estimator = adv_estimator
        self._rewards = None
        if reward_function is not None:
            from verl.reward import build_reward_manager

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
        from verl.observe.batch_metrics import batch_metrics
        from verl.observe.metrics import average_metrics
        from verl.trainer import advantage

        if "token_level_scores" not in data.batch:
            data = self._score(data)
        algorithm = self.cfg.algorithm
        several = len(set(data.non_tensor_batch["uid"])) < len(data)
        algorithm.adv_estimator = self._adv_estimator or ("grpo" if several else "reinforce_plus_plus")
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
        data.meta_info.setdefault("temperature", self.cfg.actor_rollout_ref.rollout.temperature)
        advantage.estimate(data, algorithm)
        (mini,) = mini_batches(data, len(data), 1, seed=0)
        metrics = average_metrics([self._role.train(mini)])
        return metrics | batch_metrics(data)

    def _score(self, data: DataProto) -> DataProto:
        from verl.trainer.experience import attach_scores, reward_sample

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
