"""Validation: how it samples, whom it counts, and what it writes for people."""

from __future__ import annotations

import copy
import json

import pytest

from verl.data.tokenizer import decode_all


def validation_rows(seen, step: int) -> list[dict]:
    return [
        json.loads(line) for line in (seen.folder / "validation" / f"{step}.jsonl").read_text().splitlines()
    ]


def test_validation_is_greedy_unless_told_to_sample(watch, digits_data):
    val = f"data.val_files={digits_data}/val.jsonl"
    greedy = watch(val, "trainer.val_only=True", "actor_rollout_ref.rollout.top_k=3").generated[0]
    assert (greedy.settings.n, greedy.settings.sampling.temperature) == (1, 0)
    sampled = watch(
        val,
        "trainer.val_only=True",
        "actor_rollout_ref.rollout.seed=11",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.6",
        "actor_rollout_ref.rollout.val_kwargs.top_p=0.9",
        "actor_rollout_ref.rollout.val_kwargs.top_k=7",
        "actor_rollout_ref.rollout.val_kwargs.min_p=0.05",
        "actor_rollout_ref.rollout.val_kwargs.n=3",
        folder="sampled",
    ).generated[0]
    drawn = sampled.settings.sampling
    assert (sampled.settings.n, drawn.temperature, drawn.top_p, drawn.top_k) == (3, 0.6, 0.9, 7)
    assert drawn.min_p == 0.05
    assert sampled.settings.seed == 11 and len(sampled.batch) == 32 * 3
    again = watch(val, "trainer.test_freq=1", "trainer.total_training_steps=1", folder="again")
    before, after = (g for g in again.generated if len(g.batch) == 32 and g.settings.n == 1)
    assert before.settings == after.settings, "validations of one run are comparable"


def test_statistics_are_over_the_samples_of_a_prompt_and_failures_are_left_out(
    watch, digits_data, reward_file
):
    calls = reward_file(
        "if number % 4 == 3 and words[:1] > ['4']:\n"
        "    raise RuntimeError('cannot say')\n"
        "right = float(words[:1] == ['7'])\n"
        "return {'score': right, 'acc': right, 'second': 1.0} if number % 2 else {'score': right, 'acc': right}"
    )
    seen = watch(
        calls,
        f"data.val_files={digits_data}/val.jsonl",
        "trainer.val_only=True",
        "reward.max_failure_ratio=1.0",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
    )
    rows = validation_rows(seen, 0)
    assert len(rows) == 128
    failed = [row["error"] is not None for row in rows]
    assert 0 < sum(failed) < 64
    assert all((row["score"] is None) == bad for row, bad in zip(rows, failed, strict=True))
    assert all("reward_second" in row for at, row in enumerate(rows) if at // 4 % 2 and not failed[at])
    # What a prompt has, averaged over prompts: a failed sample is no sample.
    means = []
    for at in range(0, 128, 4):
        known = [row["score"] for row in rows[at : at + 4] if row["score"] is not None]
        means += [sum(known) / len(known)] if known else []
    metrics = {name: value for name, value in seen.rows[0].items() if name.startswith("val-")}
    (mean,) = [value for name, value in metrics.items() if name.startswith("val-core/digits/acc/mean@")]
    assert 0 < mean < 1 and mean == pytest.approx(sum(means) / len(means)), metrics


def test_texts_end_where_the_response_ends(watch, digits_data, tiny_tokenizer):
    seen = watch(f"data.val_files={digits_data}/val.jsonl", "trainer.total_training_steps=1")
    batch = seen.batches[1]
    rows = [json.loads(line) for line in (seen.folder / "rollouts" / "1.jsonl").read_text().splitlines()]
    lengths = batch.batch["response_mask"].sum(-1).tolist()
    assert min(lengths) < max(lengths) and [row["length"] for row in rows] == lengths
    for row, ids, length in zip(rows, batch.batch["responses"].tolist(), lengths, strict=True):
        assert row["response"] == tiny_tokenizer.decode(ids[:length], skip_special_tokens=True)
    assert [row["prompt"] for row in rows] == list(batch.non_tensor_batch["prompt_text"])
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}


def test_a_large_validation_is_generated_in_parts_and_says_the_same(watch, digits_data, monkeypatch):
    from verl.trainer import validation

    options = (
        f"data.val_files={digits_data}/val.jsonl",
        "trainer.val_only=True",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "actor_rollout_ref.rollout.val_kwargs.n=3",
    )
    whole = watch(*options, folder="whole")
    monkeypatch.setattr(validation, "VALIDATION_CHUNK", 32)
    parts = watch(*options, folder="parts")
    assert [len(g.batch) for g in whole.generated] == [96]
    assert [len(g.batch) for g in parts.generated] == [30, 30, 30, 6], "prompts stay whole"
    assert validation_rows(whole, 0) == validation_rows(parts, 0)
    for name, value in whole.rows[0].items():
        if name.startswith("val-"):
            assert parts.rows[0][name] == pytest.approx(value)


def test_texts_decoded_at_once_are_those_of_the_tokenizer(tiny_tokenizer):
    """Special tokens, unknown ids and empty rows included; a tokenizer that changes spaces is asked row by row."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    rows = [[], *([i, j] for i in range(len(tokenizer)) for j in (0, 1, len(tokenizer) - 1))]
    for clean in (False, True):
        tokenizer.clean_up_tokenization_spaces = clean
        expected = [tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]
        assert decode_all(tokenizer, rows) == expected
