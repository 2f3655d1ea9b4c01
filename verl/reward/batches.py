"""Scored responses as the batch that reward managers written for verl read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl.data.columns import as_mapping
from verl.data.proto import DataProto
from verl.reward.base import RewardSample


@dataclass
class DataProtoItem:
    """One row: its tensors without a dimension of rows, its columns, and the values about all rows."""

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


class RowBatch(DataProto):
    """A batch whose rows, `data[3]`, are `DataProtoItem`s. Other indices give such batches again."""

    def __getitem__(self, index: Any) -> Any:
        rows = super().__getitem__(index)
        if not isinstance(index, int):
            return RowBatch(rows.batch, rows.non_tensor_batch, rows.meta_info)
        tensors = {name: tensor[0] for name, tensor in rows.batch.items()}
        return DataProtoItem(
            tensors, {name: column[0] for name, column in rows.non_tensor_batch.items()}, rows.meta_info
        )


def batch_of(samples: Sequence[RewardSample], tokenizer: Any) -> RowBatch:
    """`prompts` padded on the left and `responses` on the right; `attention_mask` and `input_ids` of both. Texts are
    encoded where there are no tokens: of a trial before training, and of responses in a file."""
    prompts = [_ids(sample.prompt_ids, sample.prompt, tokenizer) for sample in samples]
    responses = [_ids(sample.response_ids, sample.response, tokenizer) for sample in samples]
    pad = tokenizer.pad_token_id or 0
    before, after = (max(map(len, rows), default=0) for rows in (prompts, responses))
    ids = torch.full((len(samples), before + after), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, before - len(prompt) : before + len(response)] = torch.tensor(prompt + response)
        mask[row, before - len(prompt) : before + len(response)] = 1
    tensors = {
        "prompts": ids[:, :before],
        "responses": ids[:, before:],
        "input_ids": ids,
        "attention_mask": mask,
    }
    rows = [_columns(sample) for sample in samples]
    names = dict.fromkeys(name for row in rows for name in row if name not in tensors)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return RowBatch(**vars(DataProto.from_dict(tensors, columns)))


def _ids(ids: list[int] | None, text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False) if ids is None else ids)


def _columns(sample: RewardSample) -> dict[str, Any]:
    about = as_mapping(sample.columns.get("reward_model")) or {}
    turns = {} if sample.turns is None else {"__num_turns__": len(sample.turns)}
    return {
        **sample.columns,
        "uid": sample.uid,
        "data_source": sample.data_source,
        "reward_model": {**about, "ground_truth": sample.ground_truth},
        "extra_info": sample.extra_info,
        "raw_prompt": sample.messages,
        **turns,
    }
