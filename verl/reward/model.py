"""A sequence-classification model as reward: one number for a whole conversation.

Conversations are encoded with the reward model's own tokenizer and template and scored in batches of similar length. On
the trainer's GPUs the model stays in host memory while it is not used; `verl.workers.reward_model_pool` runs it on
separate GPUs. Scores do not depend on how samples are batched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.balance import sequence_work
from verl.config.sections.reward import RewardModelConfig
from verl.data.chat import ChatFormat
from verl.errors import ModelError, TrainingHalted
from verl.models.introspection import per_row, row_lengths
from verl.models.loading import torch_dtype
from verl.models.packability import keep_score_cap
from verl.models.value_model import STEP_LABEL
from verl.reward.base import Call, LocalBackend, RewardResult, RewardSample, answer
from verl.reward.functions import Signature

DEFAULT_BATCH = 8
CHARACTERS_PER_TOKEN = 4
MAX_BATCHES = 8
"""Forward passes in one share of `next_share`: what arrives later is divided among all processes again."""


class RewardModel:
    """The model and its tokenizer."""

    def __init__(
        self, model: Any, tokenizer: Any, device: torch.device, max_length: int, batch_size: int
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        per_row(model)
        self.tokenizer = tokenizer
        self._chat = ChatFormat(tokenizer)
        self.device = device
        self.max_length = max_length
        self.batch_size = batch_size
        self._pad = _pad_token(model, tokenizer)

    @classmethod
    def from_config(cls, config: RewardModelConfig, device: str | None = None) -> RewardModel:
        """Load the model that `reward.reward_model` names. It stays in host memory until it is first used."""
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        path, code = str(config.model_path), config.trust_remote_code
        path = str(Path(path).expanduser()) if path.startswith("~") else path
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype: Any = "auto" if where.type == "cuda" else torch.float32
        if config.dtype != "auto":
            dtype = torch_dtype(config.dtype, "reward.reward_model.dtype", ("auto",))
        try:
            model, found = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=dtype, trust_remote_code=code, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=code)
        except Exception as error:  # damaged files raise anything
            problem = (
                f"cannot be loaded: {error}. It needs a sequence-classification model and its tokenizer."
            )
            raise ModelError(f"reward.reward_model.model_path={path!r} {problem}") from error
        missing = sorted(found.get("missing_keys") or ())
        if model.config.num_labels != 1 or missing:
            problem = f"lacks the weights {', '.join(missing[:3])}, so its rewards would be random"
            if model.config.num_labels != 1:
                problem = f"has {model.config.num_labels} labels; it must have one"
            raise ModelError(f"reward.reward_model.model_path={path!r} {problem}.")
        if model.config.id2label.get(0) == STEP_LABEL:
            raise ModelError(
                f"reward.reward_model.model_path={path!r} scores the steps of an answer (verl reward train "
                "algorithm.stepwise=True), which is not available as a reward here; use one trained on pairs."
            )
        keep_score_cap(model)
        limits = (
            getattr(model.config, "max_position_embeddings", None),
            getattr(tokenizer, "model_max_length", None),
        )
        known = [limit for limit in limits if isinstance(limit, int) and 0 < limit < 10**7]
        limit = config.max_length or min(known, default=4096)
        return cls(model, tokenizer, where, limit, config.micro_batch_size_per_gpu or DEFAULT_BATCH)

    def results(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """`score` as results."""
        try:
            scores = self.score(samples)
        except torch.OutOfMemoryError as error:
            raise TrainingHalted(
                f"The reward model ran out of GPU memory: {error}. Lower "
                f"reward.reward_model.micro_batch_size_per_gpu (now {self.batch_size}) or "
                f"reward.reward_model.max_length (now {self.max_length})."
            ) from error
        return [
            RewardResult(score, {"rm_truncated": float(cut)})
            if math.isfinite(score)
            else RewardResult(
                None, error=f"The reward model gave {score}; try reward.reward_model.dtype=float32."
            )
            for score, cut in scores
        ]

    def score(self, samples: Sequence[RewardSample]) -> list[tuple[float, bool]]:
        """For each sample its reward and whether its beginning had to be cut off."""
        encoded = [self.encode(sample) for sample in samples]
        order = sorted(range(len(samples)), key=lambda i: len(encoded[i][0]))
        scores: list[tuple[float, bool]] = [(math.nan, False)] * len(samples)
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            values = self._forward([encoded[row][0] for row in rows])
            for row, value in zip(rows, values.tolist(), strict=True):
                scores[row] = (value, encoded[row][1])
        return scores

    def onload(self) -> None:
        self.model.to(self.device)

    def offload(self) -> None:
        if self.device.type != "cpu":
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def encode(self, sample: RewardSample) -> tuple[list[int], bool]:
        messages = sample.messages or [{"role": "user", "content": sample.prompt}]
        conversation = [*messages]
        if sample.turns is None:  # else they are the end of the messages
            conversation.append({"role": "assistant", "content": sample.response})
        ids = self._chat.conversation_ids(conversation)
        # The end is what is judged, so the beginning is cut.
        return ids[-self.max_length :] or [self._pad], len(ids) > self.max_length

    @torch.inference_mode()
    def _forward(self, ids: list[list[int]]) -> Tensor:
        width = max(map(len, ids))
        input_ids = torch.tensor([row + [self._pad] * (width - len(row)) for row in ids], device=self.device)
        lengths = torch.tensor([len(row) for row in ids], device=self.device)
        mask = (torch.arange(width, device=self.device) < lengths[:, None]).long()
        each = np.array([[len(row)] for row in ids]).repeat(width, axis=1)
        with row_lengths(each):
            logits: Tensor = self.model(input_ids=input_ids, attention_mask=mask).logits
        return logits[:, 0].float().cpu()


class ModelBackend(LocalBackend):
    """The reward model in this process; loaded when first needed."""

    signatures = (Signature("reward_model", by_name=("prompts", "completions")),)

    def __init__(self, config: RewardModelConfig) -> None:
        super().__init__()
        check_path(config)
        self._config = config
        self.model: RewardModel | None = None

    def run(self, calls: Sequence[Call]) -> None:
        if not calls:
            return
        model = self.model = self.model or RewardModel.from_config(self._config)
        model.onload()
        try:
            for call, _, samples in self.take(calls):
                answer(call, model.results(samples))
        finally:
            if self._config.param_offload:
                model.offload()

    def close(self) -> None:
        self.model = None
        super().close()


def check_path(config: RewardModelConfig) -> None:
    """Raise before anything is loaded or started if `model_path` cannot be a model."""
    path = str(config.model_path)
    folder = Path(path).expanduser()
    if (folder.exists() or path.startswith(("/", "~", "."))) and not (folder / "config.json").is_file():
        raise ModelError(f"reward.reward_model.model_path={path!r} has no config.json.")


def estimated_work(sample: RewardSample, hidden_size: int) -> int:
    """Of one conversation, from its length in characters."""
    characters = len(sample.prompt) + len(sample.response)
    return sequence_work([1 + characters // CHARACTERS_PER_TOKEN], hidden_size)[0]


def next_share(work: Sequence[int], processes: int, batch_size: int) -> list[int]:
    """Positions in `work` (one number for each waiting sample) that one of `processes` scores next: its share, largest
    first so that all finish about together, at least `batch_size` samples where there are enough for all."""
    if not work:
        return []
    order = sorted(range(len(work)), key=lambda position: (-work[position], position))
    least = min(batch_size, -(-len(work) // processes))
    share = sum(work) / processes
    taken, total = 0, 0
    while taken < len(order) and taken < MAX_BATCHES * batch_size:
        if taken >= least and total + work[order[taken]] > share:
            break
        total += work[order[taken]]
        taken += 1
    return order[:taken]


def _pad_token(model: Any, tokenizer: Any) -> int:
    """The padding token. The model scores at the last token that is not this one, so it must not be one that ends a
    conversation."""
    config, text_config = model.config, model.config.get_text_config()
    pad = getattr(text_config, "pad_token_id", None)
    if pad is None:
        eos = tokenizer.eos_token_id
        candidates = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
        pad = next((token for token in candidates if token not in (None, eos)), 0 if eos is None else eos)
        text_config.pad_token_id = config.pad_token_id = pad
    return int(pad)
