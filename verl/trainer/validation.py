"""Validation: responses to the validation data, their metrics, and readable rows for the run folder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.proto import DataProto
from verl.data.tokenizer import decode_all
from verl.observe.metrics import Timer
from verl.trainer.experience import Experience
from verl.workers.group import sessions_of
from verl.workers.roles import validation_settings

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig

VALIDATION_CHUNK = 8192
"""Responses generated at a time: enough to keep engines busy, bounded for large validation sets."""


def validate(
    cfg: PPOConfig, experience: Experience, batches: Iterable[DataProto], tokenizer: Any
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics (`val-core/...`, `val-aux/...`) over all of `batches`, and one row per response for people."""
    settings = validation_settings(cfg.actor_rollout_ref.rollout, cfg.data.max_response_length)
    timer, size = Timer(), max(1, VALIDATION_CHUNK // settings.n)
    uids: list[str] = []
    rows: list[dict[str, Any]] = []
    extras: list[dict[str, Any]] = []
    for prompts in (part for batch in batches for part in batch.split(size)):
        # Training gives a response without a score its own uid; here it still belongs to its prompt.
        uids += [str(uid) for uid in prompts.non_tensor_batch["uid"] for _ in range(settings.n)]
        batch = experience.score(prompts, settings, timer)
        rows += sample_rows(batch, tokenizer)
        talks = batch.non_tensor_batch.get("conversation")
        for row, extra in enumerate(batch.non_tensor_batch["reward_extra"]):
            extras.append({**extra, **({} if talks is None else {"num_turns": len(talks[row].model_turns)})})
    names = dict.fromkeys(name for extra in extras for name in extra if name != "reward")
    columns: dict[str, list[Any]] = {"reward": [row["score"] for row in rows]}
    columns |= {name: [extra.get(name) for extra in extras] for name in names}
    sources = [row["data_source"] or "unknown" for row in rows]
    from verl.algorithms.validation import validation_metrics

    return validation_metrics(sources, uids, columns), rows


def sample_rows(batch: DataProto, tokenizer: Any) -> list[dict[str, Any]]:
    """One readable row per response: texts, ground truth, score, and `advantage` where the batch has advantages."""
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    lengths = batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :].sum(-1).tolist()
    extras = batch.non_tensor_batch
    advantages = _advantages(batch)
    texts: Iterable[str] | None = extras.get("response_text")
    talks = extras.get("conversation")
    if talks is not None and "session" not in extras:
        texts = ["\n".join(decode_all(tokenizer, talk.drawn_ids)) for talk in talks]
    if texts is None:
        written = zip(batch.batch["responses"].tolist(), lengths, strict=True)
        texts = decode_all(tokenizer, [ids[: int(end)] for ids, end in written])
    rows = []
    for row, response in enumerate(texts):
        rows.append(
            {
                "uid": extras["uid"][row],
                "data_source": extras["data_source"][row],
                "prompt": extras["prompt_text"][row],
                "response": response,
                "ground_truth": extras["ground_truth"][row],
                "score": scores[row] if extras["reward_error"][row] is None else None,
                **({} if advantages is None else {"advantage": advantages[row]}),
                "length": int(lengths[row]),
                "finish_reason": extras["finish_reason"][row],
                "error": extras["reward_error"][row],
                **{f"reward_{k}": _plain(v) for k, v in extras["reward_extra"][row].items()},
                **({} if talks is None else {"turns": talks[row].transcript()}),
                **({"requests": talks[row].requests} if talks is not None and talks[row].requests else {}),
            }
        )
    return rows if "session" not in extras else _joined(rows, extras["session"])


def _advantages(batch: DataProto) -> list[float | None] | None:
    """Of each row, or of the conversation it is a turn of: the mean over trained tokens, None where there are none."""
    if "advantages" not in batch.batch:
        return None
    sessions, mask = sessions_of(batch), batch.batch["response_mask"]
    tokens = sessions.sum(mask.sum(-1))
    means = sessions.sum((batch.batch["advantages"] * mask).sum(-1)) / tokens
    found = [mean if count else None for mean, count in zip(means.tolist(), tokens.tolist(), strict=True)]
    return [found[session] for session in sessions.ids.tolist()]


def _joined(rows: list[dict[str, Any]], sessions: Iterable[str]) -> list[dict[str, Any]]:
    """Rows of single turns (`multi_turn.history=split`) as one for each conversation."""
    joined: dict[str, dict[str, Any]] = {}
    for row, session in zip(rows, sessions, strict=True):
        whole = joined.setdefault(session, row)
        if whole is not row:
            whole["response"] += "\n" + row["response"]
            whole["length"] += row["length"]
            whole["finish_reason"] = row["finish_reason"]
            whole["score"] = None if whole["score"] is None else whole["score"] + row["score"]
    return list(joined.values())


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
