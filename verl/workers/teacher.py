"""The teacher that the policy is distilled from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.config.roles import ACTOR, Role
from verl.config.schema import PPOConfig
from verl.data.assemble import pad_rows
from verl.data.proto import DataProto
from verl.errors import DataError, ModelError
from verl.models.distillation import Teacher
from verl.workers.roles import ActorRole, RoleWorker


class TeacherRole(RoleWorker):
    """The model that the policy is distilled from; it may be the policy itself, with another prompt."""

    def connect(self, role: Role, config: PPOConfig, workers: Mapping[str, RoleWorker], tokens: int) -> None:
        actor, own_section = workers[ACTOR], config.actor_rollout_ref.teacher
        assert isinstance(actor, ActorRole)
        self._top_k, self._own_prompts = own_section.top_k, own_section.prompt_template is not None
        self._below_adapters = actor.engine is self.engine and own_section.source == "start"
        theirs, own = self.engine.info.vocab_size, actor.engine.info.vocab_size
        self._vocabulary = min(theirs, own)
        if theirs != own and self._vocabulary < tokens:
            # Else only the padding of their output matrices differs.
            raise ModelError(
                f"actor_rollout_ref.teacher.path: the teacher has {theirs} tokens, the student {own}, and the "
                f"tokenizer {tokens}; give a teacher with the student's tokenizer"
            )
        head = self.engine.output_head() if self._top_k is None else None
        actor.teacher = Teacher(
            own_section.kl, self._vocabulary, head, clip=own_section.clip, coef=own_section.coef
        )

    @staticmethod
    def prepare(batch: DataProto, cfg: Any) -> None:
        """Where the teacher has prompts of its own: these, followed by the responses."""
        prompts = batch.non_tensor_batch.get("teacher_prompt_ids")
        if prompts is None:
            return
        tensors = batch.batch
        width = tensors["response_mask"].shape[1]
        ids = pad_rows(list(prompts), 0, torch.long, left=True)
        seen = pad_rows([np.ones(len(prompt), np.int64) for prompt in prompts], 0, torch.long, left=True)
        for name, before in (("input_ids", ids), ("attention_mask", seen)):
            tensors[f"teacher_{name}"] = torch.cat([before, tensors[name][:, -width:]], dim=1)

    def forward(self, batch: DataProto, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        tensors = batch.batch
        if "teacher_input_ids" in tensors:
            own = {name: tensors[f"teacher_{name}"] for name in ("input_ids", "attention_mask")}
            batch = DataProto({**own, "response_mask": tensors["response_mask"]}, {}, batch.meta_info)
        elif self._own_prompts:
            raise DataError(
                "the prompts have no column teacher_prompt_ids, which actor_rollout_ref.teacher.prompt_template adds "
                "to rows; give rows instead of finished batches, or the column"
            )
        return self.engine.teacher_outputs(
            batch,
            vocabulary=self._vocabulary,
            top_k=self._top_k,
            temperature=batch.meta_info["temperature"],
            below_adapters=self._below_adapters,
        )
