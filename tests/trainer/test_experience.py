"""What becomes of scores, and of responses that got none."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch

from verl.agents.conversation import Conversation
from verl.data.assemble import response_lengths
from verl.data.proto import DataProto
from verl.errors import RewardError, TrainingHalted
from verl.observe.metrics import Timer
from verl.reward.base import RewardManager, RewardResult, RewardSample
from verl.rollout.base import GenerationSettings, Response, SamplingParams
from verl.trainer.experience import (
    SyncExperience,
    attach_baselines,
    attach_scores,
    reward_metrics,
    submit_rewards,
)


def rollouts() -> DataProto:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1]])
    return DataProto.from_dict(tensors={"response_mask": mask}, non_tensors={"uid": ["p", "p", "p"]})


def test_a_score_stands_on_the_last_policy_token():
    batch = attach_scores(rollouts(), [RewardResult(1.0), RewardResult(0.5), RewardResult(-2.0)])
    assert batch.batch["token_level_scores"].tolist() == [[0, 0, 1.0], [0, 0.5, 0], [0, 0, -2.0]]
    assert list(batch.non_tensor_batch["uid"]) == ["p", "p", "p"]


def test_a_response_without_a_score_is_masked_and_leaves_its_group():
    batch = attach_scores(
        rollouts(), [RewardResult(1.0), RewardResult(None, error="hung"), RewardResult(0.0)]
    )
    assert batch.batch["response_mask"].tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 1]]
    assert batch.batch["token_level_scores"][1].tolist() == [0, 0, 0]
    assert batch.non_tensor_batch["uid"][1] not in ("p",) and list(batch.non_tensor_batch["uid"][[0, 2]]) == [
        "p",
        "p",
    ]
    assert reward_metrics(batch)["reward/failed"] == 1


def test_responses_whose_greedy_baseline_has_no_score_leave_the_loss():
    def two(first: RewardResult, second: RewardResult) -> DataProto:
        mask = torch.tensor([[1, 1], [1, 0]])
        prompts = DataProto.from_dict(tensors={"response_mask": mask}, non_tensors={"uid": ["p", "q"]})
        return attach_scores(prompts, [first, second])

    batch = two(RewardResult(1.0), RewardResult(0.0)).repeat(2)
    attach_baselines(batch, two(RewardResult(0.5), RewardResult(None, error="hung")), 2)
    assert batch.batch["reward_baselines"].tolist()[:2] == [0.5, 0.5]
    assert batch.batch["response_mask"].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]


@pytest.mark.slow(seconds=2)
def test_each_step_draws_with_a_seed_of_its_own(watch):
    seen = watch("actor_rollout_ref.rollout.seed=7")
    assert [(g.settings.n, g.settings.seed) for g in seen.generated] == [(4, 8), (4, 9)]
    again = watch("actor_rollout_ref.rollout.seed=7", folder="again")
    assert torch.equal(seen.batches[1].batch["responses"], again.batches[1].batch["responses"])
    other = watch("actor_rollout_ref.rollout.seed=8", folder="other")
    assert not torch.equal(seen.batches[1].batch["responses"], other.batches[1].batch["responses"])


def test_a_response_keeps_its_own_score_whatever_finished_first(watch, reward_file):
    seen = watch(reward_file("return number + sum(word == truth for word in words) / 10 + len(words) / 100"))
    batch = seen.batches[1]
    reasons = set(batch.non_tensor_batch["finish_reason"])
    assert reasons == {"stop", "length"}, (
        "some responses end early, so that the order of finishing is another"
    )
    lines = (seen.folder / "rollouts" / "1.jsonl").read_text().splitlines()
    numbers = [extra["number"] for extra in batch.non_tensor_batch["extra_info"]]
    for row, number, length in zip(
        map(json.loads, lines), numbers, batch.batch["response_mask"].sum(-1).tolist(), strict=True
    ):
        words = row["response"].split()
        right = sum(word == row["ground_truth"] for word in words)
        assert row["score"] == pytest.approx(number + right / 10 + len(words) / 100, abs=1e-4)
        assert row["length"] == length and len(words) <= length


def test_rewards_are_told_the_truth_about_a_response(watch, tiny_tokenizer, monkeypatch):
    from verl.reward import build_reward_manager as build

    samples, made = [], []

    def watched(*arguments, **more):
        manager = build(*arguments, **more)
        submit = manager.submit
        manager.submit = lambda sample: (samples.append(sample), submit(sample))[1]
        made.append(manager)
        return manager

    monkeypatch.setattr("verl.trainer.assembly.build_reward_manager", watched)
    seen = watch("trainer.total_training_steps=1")
    batch = seen.batches[1]
    told = samples[-32:]  # before them the rewards were tried on a few rows
    assert len(made) == 1 and sorted(sample.index for sample in told) == list(range(32))
    for sample in told:
        row = sample.index
        length = int(batch.batch["response_mask"][row].sum())
        ids = batch.batch["responses"][row, :length].tolist()
        assert sample.response_length == length
        assert sample.truncated == (batch.non_tensor_batch["finish_reason"][row] == "length")
        assert sample.response == tiny_tokenizer.decode(ids, skip_special_tokens=True)
        assert "<eos>" not in sample.response
        assert sample.prompt == batch.non_tensor_batch["prompt_text"][row]
        assert sample.ground_truth == batch.non_tensor_batch["ground_truth"][row]
        assert sample.extra_info == batch.non_tensor_batch["extra_info"][row]
        assert sample.messages == list(batch.non_tensor_batch["raw_prompt"][row])
        assert sample.data_source == "digits"
    assert {sample.truncated for sample in told} == {True, False}


@pytest.mark.parametrize(("split", "length"), [(False, 9), (True, 4)])
def test_the_length_of_a_conversation_is_what_the_limit_bounds(split, length, tiny_tokenizer):
    talk = Conversation("p", 0, [1], [{"role": "user", "content": "?"}])
    for tokens in ([3, 4], [5, 6, 7, 8]):
        prompt = [1, *talk.token_ids] if split else None
        talk.add_model_turn(Response("p#0", 0, tokens, [-1.0] * len(tokens), "stop"), "!", prompt_ids=prompt)
        talk.add_messages([9] if tokens[0] == 5 else [9, 9], [{"role": "tool", "content": "."}])
    columns = {"raw_prompt": ["?"], "prompt_text": ["?"]}
    samples: list[RewardSample] = []
    manager = SimpleNamespace(submit=samples.append)
    prompts = DataProto.from_dict(non_tensors=columns)
    submit_rewards(manager, tiny_tokenizer, prompts, [(0, talk)], 7)  # type: ignore[arg-type]
    assert [(sample.index, sample.response_length) for sample in samples] == [(7, length)]


def test_calls_of_rewards_are_those_of_the_step(watch, digits_data):
    seen = watch(f"data.val_files={digits_data}/val.jsonl", "trainer.test_freq=1")
    assert [seen.row(step)["reward/calls"] for step in (1, 2)] == [32, 32]


def test_the_greedy_answer_to_the_same_prompt_is_the_baseline(watch, reward_file):
    seen = watch(
        reward_file("return number + sum(word == truth for word in words)"),
        "algorithm.adv_estimator=remax",
        "actor_rollout_ref.rollout.top_k=5",
        "trainer.total_training_steps=1",
    )
    sampled, greedy = seen.generated
    assert sampled.settings.n == 4 and sampled.settings.sampling.temperature == 1
    plain = greedy.settings.sampling
    assert (greedy.settings.n, plain.temperature, plain.top_k, plain.top_p) == (1, 0, -1, 1)
    t = seen.batches[1].batch
    scores = greedy.batch.batch["token_level_scores"].sum(-1)
    assert len(set(scores.tolist())) == 8, "each prompt has a score of its own"
    assert torch.equal(t["reward_baselines"].view(8, 4), scores.unsqueeze(-1).expand(8, 4))
    gained = t["token_level_scores"].sum(-1, keepdim=True) - t["reward_baselines"].unsqueeze(-1)
    torch.testing.assert_close(t["advantages"], gained * t["response_mask"])


def failing(on: str) -> str:
    return f"if {on}:\n    raise RuntimeError('cannot say')\n"


def test_without_a_baseline_the_responses_to_a_prompt_teach_nothing(watch, reward_file):
    """Each prompt is scored for its four samples, then for the greedy one, which gets no score where it is odd."""
    calls = reward_file(failing("fifth_call(number) and odd(number)") + "return 1.0")
    with open(calls.partition("=")[2], "a") as out:
        out.write(
            "\ncalls = {}\n\n"
            "def fifth_call(number):\n"
            "    calls[number] = calls.get(number, 0) + 1\n"
            "    return calls[number] == 5\n\n"
            "def odd(number):\n"
            "    return number % 2 == 1 and number > 3\n"  # the first rows are what a reward is tried on at start
        )
    seen = watch(
        calls,
        "algorithm.adv_estimator=remax",
        "reward.max_failure_ratio=1.0",
        "trainer.total_training_steps=1",
    )
    batch = seen.batches[1]
    numbers = [extra["number"] for extra in batch.non_tensor_batch["extra_info"]]
    odd = torch.tensor([number % 2 == 1 and number > 3 for number in numbers])
    assert odd.any() and not odd.all()
    assert torch.equal(batch.batch["response_mask"].sum(-1) == 0, odd)
    (update,) = seen.of("actor", 1)
    assert update.mini.meta_info["global_batch_size"] == int((~odd).sum())
    assert seen.row(1)["reward/mean"] == 1.0, "they were scored all the same"


def test_a_failed_response_is_out_of_loss_group_and_statistics(watch, reward_file):
    """The reward fails for one response of some prompts; the others are compared with each other alone."""
    calls = reward_file(failing("not words or words[0] == '7'") + "return 1.0 + (words[0] == truth)")
    seen = watch(calls, "reward.max_failure_ratio=1.0", "actor_rollout_ref.rollout.n=8")
    batch = seen.batches[1]
    failed = [error is not None for error in batch.non_tensor_batch["reward_error"]]
    assert 0 < sum(failed) < 64
    t = batch.batch
    assert torch.equal(t["response_mask"].sum(-1) == 0, torch.tensor(failed))
    scores = t["token_level_scores"].sum(-1)
    prompts = [uid.split("#")[0] for uid in batch.non_tensor_batch["uid"]]
    for row in range(64):
        if failed[row]:
            continue
        group = [scores[other] for other in range(64) if prompts[other] == prompts[row] and not failed[other]]
        values = torch.stack(group).double()
        expected = 0.0
        if len(group) > 1:
            expected = float((scores[row] - values.mean()) / (values.std() + 1e-6))
        assert float(t["advantages"][row, 0]) == pytest.approx(expected, abs=1e-4)
    row = seen.row(1)
    kept = scores[~torch.tensor(failed)]
    assert row["reward/failed"] == sum(failed)
    assert row["reward/min"] == 1.0, "no score is not a score of 0"
    assert row["reward/mean"] == pytest.approx(float(kept.double().mean()))
    assert row["critic/rewards/mean"] == pytest.approx(float(kept.double().mean()))


def test_what_is_ended_early_is_out_of_loss_group_and_statistics(watch, reward_file, digits_data):
    """Half of the responses need not end; the others are trained as if they were all."""
    calls = reward_file("return number + sum(word == truth for word in words)")
    seen = watch(
        calls,
        "actor_rollout_ref.rollout.over_sample_rate=0.5",
        "data.max_response_length=12",
        "actor_rollout_ref.rollout.max_num_seqs=12",
        "reward.max_failure_ratio=0",
        f"data.val_files={digits_data}/val.jsonl",
        "trainer.test_freq=1",
    )
    (batch,) = (each.batch for each in seen.generated if each.settings.over_sample_rate and each.step == 1)
    row, t, columns = seen.row(1), batch.batch, batch.non_tensor_batch
    aborted = torch.tensor([reason == "abort" for reason in columns["finish_reason"]])
    assert 0 < int(aborted.sum()) <= 16
    assert row["rollout/aborted"] == int(aborted.sum()) == row["training/masked_responses"]
    assert row["reward/failed"] == 0 and row["reward/calls"] == 32 - int(aborted.sum())
    assert torch.equal(t["response_mask"].sum(-1) == 0, aborted)
    assert bool((t["attention_mask"][aborted].sum(-1) > t["prompts"].shape[1] - 16).all())
    scores, uids = t["token_level_scores"].sum(-1).double(), columns["uid"]
    for each in (~aborted).nonzero().squeeze(-1).tolist():
        group = scores[torch.tensor([uid == uids[each] for uid in uids])]
        expected = 0.0 if len(group) == 1 else float((scores[each] - group.mean()) / (group.std() + 1e-6))
        assert float(t["advantages"][each, 0]) == pytest.approx(expected, abs=1e-4)
    assert row["reward/mean"] == pytest.approx(float(scores[~aborted].mean()))
    assert len(seen.batches[1]) == 32 - int(aborted.sum()), "of which the findings are"
    lengths = response_lengths(batch)[(~aborted).numpy()]
    assert row["response_length/mean"] == pytest.approx(lengths.mean())
    written = (seen.folder / "rollouts" / "1.jsonl").read_text().splitlines()
    reasons = [json.loads(line)["finish_reason"] for line in written]
    assert len(reasons) == 32 and reasons.count("abort") == int(aborted.sum())
    (update,) = seen.of("actor", 1)
    ended = t["response_mask"][~aborted]
    assert update.mini.meta_info["batch_num_tokens"] == int(ended.sum())
    assert update.mini.meta_info["global_batch_size"] == len(ended)
    for each in seen.generated:
        if each.settings.over_sample_rate == 0:  # of validation
            assert "abort" not in each.batch.non_tensor_batch["finish_reason"]


def test_too_many_failures_halt_the_run(watch, reward_file):
    calls = reward_file(failing("number % 2") + "return 1.0")
    with pytest.raises(TrainingHalted, match=r"reward\.max_failure_ratio"):
        watch(calls, "reward.max_failure_ratio=0.2")


def test_dynamic_sampling_keeps_the_first_prompts_that_differ(watch, reward_file):
    seen = watch(
        reward_file("return float(number % 3 > 0 and words[:1] > ['4'])"),
        "algorithm.filter_groups.enable=True",
        "trainer.total_training_steps=1",
    )
    drawn, constant = [], 0
    for generated in seen.generated:
        for scores, uids in zip(
            generated.batch.batch["token_level_scores"].sum(-1).view(-1, 4).tolist(),
            generated.batch.non_tensor_batch["uid"].reshape(-1, 4),
            strict=True,
        ):
            assert len(set(uids)) == 1
            if len(set(scores)) > 1:
                drawn.append(uids[0])
            else:
                constant += 1
    rounds = len(seen.generated)
    batch = seen.batches[1]
    assert len(drawn) > 8 and rounds > 1, "some prompts that differ are too many: the last drawn are given up"
    assert list(batch.non_tensor_batch["uid"]) == [uid for uid in drawn[:8] for _ in range(4)]
    row = seen.row(1)
    assert row["training/num_gen_batches"] == rounds
    assert row["training/constant_groups"] == pytest.approx(constant / (8 * rounds))


def test_dynamic_sampling_compares_what_it_is_told_to(watch, reward_file):
    """`score` differs within every group; `acc` only for some prompts."""
    calls = reward_file(
        "score = sum(ord(word[0]) * (at + 1) for at, word in enumerate(words))\n"
        "return {'score': score, 'acc': number % 2 and score % 2}"
    )
    seen = watch(
        calls,
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "trainer.total_training_steps=1",
    )
    batch = seen.batches[1]
    assert all(extra["number"] % 2 for extra in batch.non_tensor_batch["extra_info"])
    values = [extra["acc"] for extra in batch.non_tensor_batch["reward_extra"]]
    assert all(len(set(values[at : at + 4])) == 2 for at in range(0, 32, 4))


def test_dynamic_sampling_gives_up_after_the_rounds_it_is_allowed(watch, reward_file):
    rounds = []
    with pytest.raises(TrainingHalted, match="in 3 rounds"):
        watch(
            reward_file("return 1.0"),
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.max_num_gen_batches=3",
            change=lambda seen, batch: rounds.append(len(batch)),
        )
    assert rounds == [32, 32, 32]


def test_dynamic_sampling_keeps_groups_whole_where_a_response_has_no_score(watch, reward_file):
    calls = reward_file(failing("words[:1] == ['7']") + "return float(words[:1] > ['4'])")
    seen = watch(
        calls,
        "algorithm.filter_groups.enable=True",
        "reward.max_failure_ratio=1.0",
        "trainer.total_training_steps=2",
    )
    failed = 0
    for step, batch in seen.batches.items():
        prompts = [uid.split("#")[0] for uid in batch.non_tensor_batch["uid"]]
        assert prompts == [uid for uid in dict.fromkeys(prompts) for _ in range(4)] and len(prompts) == 32
        errors = [error is not None for error in batch.non_tensor_batch["reward_error"]]
        failed += sum(errors)
        scores = batch.batch["token_level_scores"].sum(-1).tolist()
        for at in range(0, 32, 4):
            values = {scores[row] for row in range(at, at + 4) if not errors[row]}
            assert values == {0.0, 1.0}
        everything = [e for g in seen.generated if g.step == step for e in errors_of(g.batch)]
        assert seen.row(step)["reward/failed"] == sum(everything)
    assert failed


def errors_of(batch) -> list[bool]:
    return [error is not None for error in batch.non_tensor_batch["reward_error"]]


def test_responses_without_a_score_are_not_drawn_again(watch, reward_file):
    """A lack of a score would be the best of all scores here."""
    seen = watch(
        reward_file(failing("words[:1] == ['7']") + "return -1.0 - (words[:1] > ['4'])"),
        "algorithm.use_pf_ppo=True",
        "algorithm.pf_ppo.reweight_method=max_min",
        "reward.max_failure_ratio=1.0",
        "actor_rollout_ref.rollout.n=16",
    )
    assert any(any(errors_of(generated.batch)) for generated in seen.generated)
    for batch in seen.batches.values():
        assert not any(errors_of(batch)) and len(batch) > 64
        assert set(batch.batch["token_level_scores"].sum(-1).tolist()) == {-1.0, -2.0}


class Silent(RewardManager):
    """Gives no score and no reason."""

    def __init__(self) -> None:
        self._rows: list[int] = []

    def submit(self, sample) -> None:
        self._rows.append(sample.index)

    def collect(self) -> dict[int, RewardResult]:
        rows, self._rows = self._rows, []
        return {row: RewardResult(None if row == 0 else 1.0) for row in rows}


def test_a_score_may_be_missing_without_a_reason(watch, monkeypatch):
    monkeypatch.setattr("verl.trainer.assembly.build_reward_manager", lambda *a, **k: Silent())
    seen = watch()
    assert seen.row(1)["reward/failed"] == 1 and seen.row(1)["reward/mean"] == 1.0
    first = json.loads((seen.folder / "rollouts" / "1.jsonl").read_text().splitlines()[0])
    assert first["score"] is None and first["error"]


def test_texts_are_decoded_once_and_are_those_of_the_responses(watch, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr("verl.trainer.validation.decode_all", None)
    seen = watch("trainer.total_training_steps=1")
    batch = seen.batches[1]
    rows = [json.loads(line) for line in (seen.folder / "rollouts/1.jsonl").read_text().splitlines()]
    lengths = response_lengths(batch)
    for text, row, ids, length in zip(
        batch.non_tensor_batch["response_text"], rows, batch.batch["responses"].tolist(), lengths, strict=True
    ):
        assert text == row["response"] == tiny_tokenizer.decode(ids[:length], skip_special_tokens=True)


def test_a_reward_that_cannot_be_submitted_ends_generation(tiny_tokenizer):
    """Responses are submitted in another thread: what it raises reaches the thread that generates."""

    def submit(sample: RewardSample) -> None:
        raise RewardError("the pool is gone")

    def generate(prompts, settings, on_finish):
        for row in range(10_000):
            on_finish(row % 4, Response("p", row, [3], [-1.0], "stop"))
            time.sleep(0.001)
        raise AssertionError("generation did not end")

    experience = SyncExperience.__new__(SyncExperience)
    experience.rewards, experience.tokenizer = SimpleNamespace(submit=submit), tiny_tokenizer  # type: ignore[assignment]
    experience.generate = generate
    columns = {"raw_prompt": ["?"], "prompt_text": ["?"]}
    with pytest.raises(RewardError, match="the pool is gone"):
        experience.score(
            DataProto.from_dict(non_tensors=columns), GenerationSettings(SamplingParams(), n=4), Timer()
        )
