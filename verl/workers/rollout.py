"""The rollout role: prompts in a DataProto become requests, responses become rows of a DataProto."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.data.assemble import assemble_rollouts
from verl.data.proto import DataProto
from verl.errors import RolloutError
from verl.rollout.base import Request, Response, SamplingParams

if TYPE_CHECKING:
    from verl.config.schema import RolloutConfig
    from verl.rollout.base import RolloutEngine

OnFinish = Callable[[int, Response], None]
"""Called with the row in the batch and its response, as each response finishes."""


@dataclass(frozen=True)
class GenerationSettings:
    """One generation pass: how to sample, how often, and the seed of its draws."""

    sampling: SamplingParams
    n: int = 1
    seed: int = 0


def training_settings(cfg: RolloutConfig, max_tokens: int, step: int) -> GenerationSettings:
    """How the batch of training step `step` is drawn; the seed changes with the step, nothing else does."""
    return GenerationSettings(_sampling(cfg, max_tokens), cfg.n, cfg.seed + step)


def greedy_settings(cfg: RolloutConfig, max_tokens: int) -> GenerationSettings:
    return GenerationSettings(_sampling(cfg, max_tokens, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0))


def validation_settings(cfg: RolloutConfig, max_tokens: int) -> GenerationSettings:
    val = cfg.val_kwargs
    temperature = (val.temperature or 1.0) if val.do_sample else 0.0
    params = _sampling(cfg, max_tokens, temperature=temperature, top_p=val.top_p, top_k=val.top_k)
    return GenerationSettings(params, val.n, cfg.seed)


def _sampling(cfg: RolloutConfig, max_tokens: int, **changes: Any) -> SamplingParams:
    settings: dict[str, Any] = {
        "temperature": cfg.temperature,
        "top_p": cfg.top_p,
        "top_k": cfg.top_k,
        "min_p": cfg.min_p,
        "repetition_penalty": cfg.repetition_penalty,
        "ignore_eos": cfg.ignore_eos,
        "stop": tuple(cfg.stop),
        "stop_token_ids": tuple(cfg.stop_token_ids),
        "raw_log_probs": cfg.raw_log_probs,
    }
    return SamplingParams(max_tokens=max_tokens, **{**settings, **changes})


class RolloutRole:
    """Wraps a RolloutEngine; one per rank."""

    def __init__(self, engine: RolloutEngine, pad_token_id: int) -> None:
        self.engine = engine
        self._pad_token_id = pad_token_id

    def generate(
        self, prompts: DataProto, settings: GenerationSettings, on_finish: OnFinish | None = None
    ) -> DataProto:
        """`settings.n` rows for each prompt, in the order of the prompts whatever finished first."""
        n = settings.n
        uids = [str(uid) for uid in prompts.non_tensor_batch["uid"]]
        first_row = {uid: i * n for i, uid in enumerate(uids)}
        if len(first_row) != len(uids):
            raise RolloutError("two prompts of one batch share a uid; uids must differ")
        requests = [
            Request(uid, ids, settings.sampling, n=n, seed=settings.seed)
            for uid, ids in zip(uids, prompts.non_tensor_batch["prompt_ids"], strict=True)
        ]
        rows: list[Response | None] = [None] * (len(uids) * n)
        stream: Any = self.engine.generate(requests)
        with closing(stream) as responses:  # an exception of `on_finish` aborts the rest
            for response in responses:
                row = first_row[response.request_id] + response.sample
                rows[row] = response
                if on_finish is not None:
                    on_finish(row, response)
        missing = [i for i, response in enumerate(rows) if response is None]
        if missing:
            raise RolloutError(
                f"{type(self.engine).__name__} left {len(missing)} of {len(rows)} samples unanswered, a defect of the "
                "engine; use actor_rollout_ref.rollout.name=hf and report it"
            )
        return assemble_rollouts(prompts.repeat(n), [r for r in rows if r is not None], self._pad_token_id)
