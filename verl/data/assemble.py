"""From prompts and responses to the padded tensors that training reads.

Prompts are padded on the left and responses on the right, so `input_ids` is contiguous per row; widths are those of the
longest row, not of the configured limits. B rows, P prompt columns, T response columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from verl.data.proto import DataProto, object_column
from verl.errors import DataError


class FinishedSample(Protocol):
    """What is read of a response. There may also be `versions`, where weights changed on the way, and `response_mask`
    (1 = the policy's own token), for several turns."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def log_probs(self) -> Sequence[float]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def policy_version(self) -> int: ...


def pad_rows(
    rows: Sequence[Sequence[Any] | np.ndarray],
    fill: float,
    dtype: torch.dtype,
    width: int = 0,
    *,
    left: bool = False,
) -> torch.Tensor:
    """Rows as one tensor of at least `width` columns, shorter ones filled up behind, or in front."""
    width = max([width, *(len(row) for row in rows)])
    out = np.full((len(rows), width), fill, dtype=torch.empty(0, dtype=dtype).numpy().dtype)
    for number, row in enumerate(rows):
        if len(row):
            columns = slice(width - len(row), width) if left else slice(0, len(row))
            out[number, columns] = row
    return torch.from_numpy(out)


def _log_probs(responses: Sequence[FinishedSample]) -> list[Sequence[float]] | None:
    """One per token, for all responses or for none."""
    values_per_row = [response.log_probs if response.log_probs is not None else [] for response in responses]
    if not any(len(values) for values in values_per_row):
        return None if any(len(response.token_ids) for response in responses) else values_per_row
    for number, (values, response) in enumerate(zip(values_per_row, responses, strict=True)):
        if len(values) != len(response.token_ids):
            raise DataError(
                f"Response {number} has {len(response.token_ids)} tokens but {len(values)} log-probabilities."
            )
    return values_per_row


def _seen(lengths: Sequence[int], width: int) -> torch.Tensor:
    """[B, width]: 1 on the first tokens of each row."""
    return (torch.arange(width) < torch.tensor(lengths, dtype=torch.long).unsqueeze(-1)).long()


def _own_tokens(responses: Sequence[FinishedSample], seen_BT: torch.Tensor) -> torch.Tensor:
    """[B, T]: 1 on tokens of the policy, by default on all."""
    own_BT = seen_BT.clone()
    for number, response in enumerate(responses):
        own, length = getattr(response, "response_mask", None), len(response.token_ids)
        if own is None:
            continue
        if len(own) != length:
            raise DataError(f"Response {number} has {length} tokens but a response_mask of {len(own)}.")
        own_BT[number, :length] = torch.as_tensor(own)
    return own_BT


def _versions(responses: Sequence[FinishedSample], seen_BT: torch.Tensor) -> torch.Tensor:
    """[B, T]: of the weights that drew each token; 0 behind the last one."""
    first_B = torch.tensor([response.policy_version for response in responses], dtype=torch.long)
    versions_BT = seen_BT * first_B.unsqueeze(-1)
    for number, response in enumerate(responses):
        if getattr(response, "version_changes", None) != []:  # else no need to list them
            drawn = getattr(response, "versions", None)
            if drawn:
                versions_BT[number, : len(drawn)] = torch.as_tensor(drawn)
    return versions_BT


def assemble_rollouts(
    prompts: DataProto, responses: Sequence[FinishedSample], pad_token_id: int
) -> DataProto:
    """`prompts` (already repeated, one row per response) with the tensors of their responses.

    Adds `prompts` [B,P], `responses` [B,T], `input_ids` and `attention_mask` [B,P+T], `response_mask` [B,T],
    `token_versions` [B,T] (of the weights that drew each token), `rollout_log_probs` [B,T] (left out when the engine
    gave none), and the columns `finish_reason` and `policy_version`. An empty response is a row of padding with an
    empty mask; T is at least 1."""
    if len(prompts) != len(responses):
        raise DataError(
            f"There are {len(responses)} responses for {len(prompts)} prompts; they must match row by row."
        )
    # Responses to one prompt share its list.
    prompt_rows = {id(ids): ids for ids in prompts.non_tensor_batch["prompt_ids"]}
    place = {key: number for number, key in enumerate(prompt_rows)}
    prompt_B = torch.tensor(
        [place[id(ids)] for ids in prompts.non_tensor_batch["prompt_ids"]], dtype=torch.long
    )
    prompts_BP = pad_rows(list(prompt_rows.values()), pad_token_id, torch.long, left=True)[prompt_B]
    prompt_mask_BP = _seen([*map(len, prompt_rows.values())], prompts_BP.shape[1]).flip(-1)[prompt_B]

    responses_BT = pad_rows([response.token_ids for response in responses], pad_token_id, torch.long, width=1)
    T = responses_BT.shape[1]
    seen_BT = _seen([len(response.token_ids) for response in responses], T)
    log_probs = _log_probs(responses)
    tensors = {
        "prompts": prompts_BP,
        "responses": responses_BT,
        "input_ids": torch.cat([prompts_BP, responses_BT], dim=1),
        "attention_mask": torch.cat([prompt_mask_BP, seen_BT], dim=1),
        "response_mask": _own_tokens(responses, seen_BT),
        "token_versions": _versions(responses, seen_BT),
    }
    if log_probs is not None:
        tensors["rollout_log_probs"] = pad_rows(log_probs, 0.0, torch.float32, width=T)
    columns = {
        "finish_reason": object_column(response.finish_reason for response in responses),
        "policy_version": object_column(response.policy_version for response in responses),
    }
    kept = {name: column for name, column in prompts.non_tensor_batch.items() if name not in columns}
    return DataProto({**prompts.batch, **tensors}, {**kept, **columns}, dict(prompts.meta_info))


def widen(batch: DataProto, prompt_width: int, response_width: int, pad_token_id: int) -> DataProto:
    """The same rollouts with at least these widths, so that batches of different steps can be joined."""
    P, T = batch.batch["prompts"].shape[1], batch.batch["responses"].shape[1]
    front, back = max(0, prompt_width - P), max(0, response_width - T)
    fills = {"prompts": pad_token_id, "responses": pad_token_id, "input_ids": pad_token_id}
    tensors = {}
    for name, tensor in batch.batch.items():
        if tensor.dim() < 2:
            tensors[name] = tensor
            continue
        widths = {"prompts": (front, 0), "input_ids": (front, back), "attention_mask": (front, back)}
        if name not in widths and tensor.shape[1] != T:
            raise DataError(
                f"Cannot widen tensor '{name}' {list(tensor.shape)}: neither a known name nor as wide as the "
                f"responses ({T})."
            )
        before, after = widths.get(name, (0, back))
        trailing = (0, 0) * (tensor.dim() - 2)
        tensors[name] = torch.nn.functional.pad(tensor, (*trailing, before, after), value=fills.get(name, 0))
    return DataProto(tensors, dict(batch.non_tensor_batch), dict(batch.meta_info))


def concat_rollouts(parts: Sequence[DataProto], pad_token_id: int) -> DataProto:
    """`DataProto.concat` for rollouts whose widths differ."""
    if not parts:
        raise DataError("concat_rollouts needs at least one batch, got none.")
    P = max(part.batch["prompts"].shape[1] for part in parts)
    T = max(part.batch["responses"].shape[1] for part in parts)
    return DataProto.concat([widen(part, P, T, pad_token_id) for part in parts])


@dataclass(frozen=True)
class _TurnSample:
    """One model turn of a conversation, as a response."""

    token_ids: Sequence[int]
    finish_reason: str
    policy_version: int
    log_probs: Sequence[float] = ()


def split_turns(batch: DataProto, pad_token_id: int) -> DataProto:
    """One row for each part of a conversation that has a prompt of its own (every model turn with history=split, every
    history of an agent) from rollouts of one row per conversation (column `conversation`).

    A row has the prompt its part was drawn from and the part of every [B,T] tensor; [B] tensors and columns are
    repeated. New column: `session`, equal for the rows of a conversation, which stay together and in order. A
    conversation without a model turn keeps one row, with an empty response."""
    T = batch.batch["responses"].shape[1]
    rebuilt = ("prompts", "responses", "input_ids", "attention_mask")
    rows: list[int] = []
    spans: list[tuple[int, int]] = []
    prompts: list[Sequence[int]] = []
    samples: list[_TurnSample] = []
    names: list[str] = []
    for row, conversation in enumerate(batch.non_tensor_batch["conversation"]):
        name = f"{conversation.uid}#{conversation.sample}"
        drawn = [turn for turn in conversation.turns if turn.role == "assistant"]
        if drawn and drawn[0].prompt_ids is None:
            raise DataError(
                f"A turn of conversation {name} has no prompt of its own: only rollouts of history=split, and of an "
                "agent with several histories, can be split."
            )
        pieces = conversation.rows or [(0, 0, conversation.prompt_ids)]
        for number, (start, end, prompt_ids) in enumerate(pieces, start=1):
            rows.append(row)
            names.append(name)
            spans.append((start, end))
            prompts.append(prompt_ids)
            samples.append(
                _TurnSample(
                    conversation.token_ids[start:end],
                    conversation.finish_reason if number == len(pieces) else "stop",
                    min(conversation.versions[start:end], default=conversation.policy_version),
                )
            )

    repeated = batch[rows]
    width = max([1, *(end - start for start, end in spans)])
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in repeated.batch.items():
        if key not in rebuilt and tensor.dim() > 1 and tensor.shape[1] != T:
            raise DataError(
                f"Cannot split tensor '{key}' {list(tensor.shape)}: it is not as wide as the responses ({T})."
            )
        if key in rebuilt:
            continue
        tensors[key] = tensor
        if tensor.dim() > 1:  # each row's span, at the front of a tensor as wide as the longest span
            tensors[key] = tensor.new_zeros((len(spans), width, *tensor.shape[2:]))
            for row, (start, end) in enumerate(spans):
                tensors[key][row, : end - start] = tensor[row, start:end]
    columns = {
        **repeated.non_tensor_batch,
        "prompt_ids": object_column(prompts),
        "session": object_column(names),
    }
    assembled = assemble_rollouts(DataProto({}, columns, dict(batch.meta_info)), samples, pad_token_id)
    return DataProto({**assembled.batch, **tensors}, assembled.non_tensor_batch, assembled.meta_info)


def add_answers(batch: DataProto, n: int, pad_token_id: int) -> DataProto:
    """Rollouts of `n` rows per prompt with one more row behind them: the data's answer (column `answer_ids`), with no
    reward. New tensor: `from_data` [B], its flag. Columns, and the age of the weights, are those of the prompt's first
    response with a score: one without has a group of its own."""
    if "answer_ids" not in batch.non_tensor_batch:
        raise DataError("The prompts carry no 'answer_ids' column: their data was read without answers.")
    rows = np.arange(len(batch)).reshape(-1, n)
    failed = np.array([error is not None for error in batch.non_tensor_batch["reward_error"]]).reshape(-1, n)
    first = batch[rows[np.arange(len(rows)), failed.argmin(1)]]
    columns = first.non_tensor_batch
    samples = [
        _TurnSample(ids, "stop", version)
        for ids, version in zip(columns["answer_ids"], columns["policy_version"], strict=True)
    ]
    answers = assemble_rollouts(DataProto({}, columns), samples, pad_token_id)
    T = answers.batch["responses"].shape[1]
    for name, tensor in first.batch.items():
        if name not in answers.batch:
            wide = tensor.dim() > 1
            answers.batch[name] = tensor.new_zeros(len(tensor), T, *tensor.shape[2:]) if wide else tensor
    parts = [DataProto(dict(part.batch), part.non_tensor_batch) for part in (batch, answers)]
    for part in parts:
        part.batch["from_data"] = torch.full((len(part),), part is parts[1])
    order = np.concatenate([rows, len(batch) + np.arange(len(rows))[:, None]], axis=1).flatten()
    joined = concat_rollouts(parts, pad_token_id)[order]
    joined.meta_info = dict(batch.meta_info)
    return joined


def sampled_rows(batch: DataProto) -> DataProto:
    """The batch without the rows of `add_answers`."""
    return batch[~batch.batch["from_data"]] if "from_data" in batch.batch else batch


def response_lengths(batch: DataProto) -> np.ndarray:
    """Tokens of each response, tool output included."""
    T = batch.batch["responses"].shape[1]
    return batch.batch["attention_mask"][:, -T:].sum(dim=1).numpy()
