"""What one step hands on: the right policy's log-probs, the right rewards, the right masks and denominators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl.data.proto import DataProto


def log_probs_of(model: torch.nn.Module, batch: DataProto, temperature: float = 1.0) -> torch.Tensor:
    """By the definition, from whole logits; [B, T], zero where the mask is 0."""
    tensors = batch.batch
    ids, attended, width = tensors["input_ids"], tensors["attention_mask"], tensors["responses"].shape[1]
    positions = (attended.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attended, position_ids=positions).logits
    # The token at place t is predicted by the one at place t - 1.
    each = (logits[:, :-1] / temperature).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return each[:, -width:] * tensors["response_mask"]


@pytest.mark.parametrize("raw", [False, True])
def test_the_trainer_sees_the_distribution_that_was_sampled_from(watch, tiny_model_dir, raw):
    seen = watch(
        "actor_rollout_ref.rollout.temperature=0.5",
        f"actor_rollout_ref.rollout.raw_log_probs={raw}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "trainer.total_training_steps=1",
    )
    batch = seen.batches[1]
    expected = log_probs_of(AutoModelForCausalLM.from_pretrained(tiny_model_dir), batch, 1.0 if raw else 0.5)
    for name in ("rollout_log_probs", "ref_log_prob"):
        torch.testing.assert_close(
            batch.batch[name] * batch.batch["response_mask"], expected, atol=1e-5, rtol=0
        )
    assert seen.row(1)["training/rollout_probs_diff_max"] < 1e-5
    first, second = seen.of("actor", 1)
    torch.testing.assert_close(second.mini.batch["old_log_probs"], expected[16:], atol=1e-5, rtol=0)
    assert "old_log_probs" not in first.mini.batch and first.metrics["actor/ppo_kl"] == 0, "its own pass"
    assert abs(second.metrics["actor/ppo_kl"]) > 1e-5, "and after it the policy has moved"


def test_the_reference_stays_the_model_that_was_loaded(watch, tiny_model_dir):
    seen = watch("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    batch = seen.batches[2]
    expected = log_probs_of(AutoModelForCausalLM.from_pretrained(tiny_model_dir), batch)
    torch.testing.assert_close(batch.batch["ref_log_prob"], expected, atol=1e-5, rtol=0)
    old = seen.of("actor", 2)[1].mini.batch["old_log_probs"]
    assert (old - expected[16:]).abs().max() > 1e-3, "the policy is another one by now"


def test_rewards_lose_the_kl_at_the_coefficient_in_force(watch):
    seen = watch(
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.3",
        "algorithm.kl_ctrl.horizon=100",
        "algorithm.kl_ctrl.target_kl=0.1",
        "trainer.total_training_steps=3",
    )
    coefficient = 0.3
    for step, batch in seen.batches.items():
        t = batch.batch
        assert seen.row(step)["actor/kl_coef"] == pytest.approx(coefficient)
        kl = (t["old_log_probs"] - t["ref_log_prob"]) * t["response_mask"]
        torch.testing.assert_close(t["token_level_rewards"], t["token_level_scores"] - coefficient * kl)
        mean = float((kl.sum(-1) / t["response_mask"].sum(-1)).mean())
        assert seen.row(step)["actor/kl"] == pytest.approx(mean, abs=1e-6)
        coefficient *= 1 + min(max(mean / 0.1 - 1, -0.2), 0.2) * len(batch) / 100
    assert seen.row(3)["actor/kl"] != 0


def test_advantages_compare_the_responses_of_one_prompt(watch):
    for norm in (True, False):
        seen = watch(
            f"algorithm.norm_adv_by_std_in_grpo={norm}",
            "algorithm.use_kl_in_reward=True",
            "algorithm.kl_ctrl.kl_coef=0.5",
            folder=f"norm-{norm}",
        )
        t = seen.batches[2].batch
        rewards = t["token_level_rewards"].sum(-1).double().view(8, 4)
        expected = rewards - rewards.mean(-1, keepdim=True)
        if norm:
            expected = expected / (rewards.std(-1, keepdim=True) + 1e-6)
        wanted = expected.view(-1, 1).float() * t["response_mask"]
        torch.testing.assert_close(t["advantages"], wanted, atol=1e-4, rtol=1e-4)


def test_generalised_advantages_discount_by_gamma_and_smooth_by_lambda(watch):
    seen = watch(
        "algorithm.adv_estimator=gae",
        "algorithm.gamma=0.9",
        "algorithm.lam=0.4",
        "critic.optim.lr=1e-2",
    )
    t = seen.batches[2].batch
    mask, values, rewards = (
        t["response_mask"].double(),
        t["values"].double(),
        t["token_level_rewards"].double(),
    )
    assert values.abs().max() > 1e-3
    advantages = torch.zeros_like(values)
    for row in range(len(values)):
        ahead = following = 0.0
        for at in reversed(range(int(mask[row].sum()))):
            delta = rewards[row, at] + 0.9 * following - values[row, at]
            ahead = delta + 0.9 * 0.4 * ahead
            following = values[row, at]
            advantages[row, at] = ahead
    torch.testing.assert_close(t["returns"], ((advantages + values) * mask).float(), atol=1e-5, rtol=1e-4)
    kept = advantages[mask.bool()]
    whitened = torch.zeros_like(advantages)
    whitened[mask.bool()] = (kept - kept.mean()) / kept.std()
    torch.testing.assert_close(t["advantages"], whitened.float(), atol=1e-4, rtol=1e-3)


def disagreeing() -> tuple[list[int], Callable[[object, DataProto], None]]:
    """As if the rollout engine had thought one response less likely than the trainer does: the first that was not cut
    off. Its row, once there is one, and what to do with a batch."""
    rows: list[int] = []

    def change(_: object, batch: DataProto) -> None:
        row = list(batch.non_tensor_batch["finish_reason"]).index("stop")
        batch.batch["rollout_log_probs"][row] -= 1.0
        rows.append(row)

    return rows, change


def test_rejected_responses_leave_the_loss_and_its_denominators(watch):
    rows, change = disagreeing()
    seen = watch(
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=5.0",
        "algorithm.filter_overlong_responses=True",
        "actor_rollout_ref.actor.skip_zero_advantage=False",
        "trainer.total_training_steps=1",
        change=change,
    )
    batch, (update,) = seen.batches[1], seen.of("actor", 1)
    cut = [reason == "length" for reason in batch.non_tensor_batch["finish_reason"]]
    written = batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :]
    assert any(cut) and not all(cut)
    left = [not cut[row] and row not in rows for row in range(32)]
    expected = written * torch.tensor(left).unsqueeze(-1)
    assert torch.equal(update.mini.batch["response_mask"], expected)
    assert update.mini.meta_info["batch_num_tokens"] == int(expected.sum())
    assert update.mini.meta_info["global_batch_size"] == sum(left)
    assert seen.row(1)["training/masked_responses"] == 32 - sum(left)
    # What left the loss was scored all the same: it is part of what its group is compared with.
    scores = batch.batch["token_level_scores"].sum(-1).view(8, 4).double()
    advantages = (scores - scores.mean(-1, keepdim=True)) / (scores.std(-1, keepdim=True) + 1e-6)
    got = batch.batch["advantages"].gather(1, (written.sum(-1, keepdim=True) - 1))
    torch.testing.assert_close(got.squeeze(-1), advantages.flatten().float(), atol=1e-4, rtol=1e-4)


def test_importance_weights_are_the_trainers_over_the_rollouts_probability(watch):
    rows, change = disagreeing()
    seen = watch(
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=5.0",
        "actor_rollout_ref.actor.skip_zero_advantage=False",
        "trainer.total_training_steps=1",
        change=change,
    )
    (update,) = seen.of("actor", 1)
    t = update.mini.batch
    expected = torch.ones_like(t["rollout_is_weights"])
    expected[rows] = torch.e
    mask = t["response_mask"]
    torch.testing.assert_close(t["rollout_is_weights"] * mask, expected * mask, atol=1e-4, rtol=1e-4)
    # One update on fresh samples: the ratio is 1, and the loss the weighted mean of the negative advantages.
    loss = -(t["advantages"] * expected * mask).sum() / mask.sum()
    assert update.metrics["actor/pg_loss"] == pytest.approx(float(loss), abs=1e-5)


def test_bypassing_takes_the_rollouts_log_probs_for_the_old_ones(watch):
    rows, change = disagreeing()
    seen = watch(
        "algorithm.rollout_correction.bypass_mode=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.skip_zero_advantage=False",
        "trainer.total_training_steps=1",
        change=change,
    )
    t = seen.batches[1].batch
    assert torch.equal(t["old_log_probs"], t["rollout_log_probs"])
    first = seen.of("actor", 1)[0]
    mask = first.mini.batch["response_mask"]
    share = mask[[row for row in rows if row < 16]].sum() / mask.sum()
    assert first.metrics["actor/ppo_kl"] == pytest.approx(-float(share), abs=1e-5)


def test_mini_batches_and_epochs_of_each_role(watch):
    seen = watch(
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "critic.ppo_mini_batch_size=2",
        "critic.ppo_epochs=3",
    )
    for step in (1, 2):
        sizes = {role: [len(u.mini) for u in seen.of(role, step)] for role in ("actor", "critic")}
        assert sizes == {"actor": [16] * 4, "critic": [8] * 12}
    uids = [list(u.mini.non_tensor_batch["uid"]) for u in seen.of("actor", 1)]
    assert uids[0] + uids[1] == list(seen.batches[1].non_tensor_batch["uid"]), (
        "the first pass keeps the order"
    )
    assert uids[2] + uids[3] != uids[0] + uids[1], "later passes are shuffled"
    orders = [[u.mini.batch["input_ids"].tolist() for u in seen.of("actor", step)[2:]] for step in (1, 2)]
    places = []
    for step, order in zip((1, 2), orders, strict=True):
        whole = seen.batches[step].batch["input_ids"].tolist()
        places.append([whole.index(row) for part in order for row in part])
    assert places[0] != places[1], "each step has an order of its own"


def test_the_learning_rate_ends_with_the_last_update(watch):
    seen = watch(
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
        "critic.ppo_mini_batch_size=8",
        "critic.ppo_epochs=3",
        "critic.optim.lr=1e-3",
        "critic.optim.lr_scheduler_type=linear",
        "trainer.critic_warmup=1",
        "trainer.total_training_steps=3",
    )
    # 8 prompts in mini-batches of 4 are two updates; two epochs; two of three steps train the actor.
    actor = [u.metrics["actor/lr"] for u in seen.of("actor")]
    assert actor == pytest.approx([3e-3 * (1 - done / 8) for done in range(8)])
    critic = [u.metrics["critic/lr"] for u in seen.of("critic")]
    assert critic == pytest.approx([1e-3 * (1 - done / 9) for done in range(9)])


def test_warm_up_trains_the_critic_alone_for_as_many_steps(watch):
    seen = watch("algorithm.adv_estimator=gae", "trainer.critic_warmup=2", "trainer.total_training_steps=4")
    assert [u.step for u in seen.of("critic")] == [1, 2, 3, 4]
    assert [u.step for u in seen.of("actor")] == [3, 4]
    versions = {step: set(b.non_tensor_batch["policy_version"]) for step, b in seen.batches.items()}
    assert versions == {1: {0}, 2: {0}, 3: {0}, 4: {1}}
    assert seen.loop.workers.policy_version == 2


def test_an_update_has_nothing_to_do_where_everything_is_masked(watch):
    seen = watch("algorithm.filter_overlong_responses=True", "actor_rollout_ref.rollout.ignore_eos=True")
    assert seen.updates == [] and len(seen.rows) == 2
    assert seen.row(2)["training/masked_responses"] == 32


def test_losses_that_choose_tokens_choose_anew_in_each_update(watch):
    """The draw is keyed by update and place: the same numbers would choose the same places again and again."""
    seen = watch(
        "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.2",
        "actor_rollout_ref.actor.policy_loss.clip_cov_lb=-100",
        "actor_rollout_ref.actor.policy_loss.clip_cov_ub=100",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    )
    chosen = []
    for update in seen.updates:
        (values,) = [v for name, v in update.mini.batch.items() if name.startswith("prepared.")]
        chosen.append(values.bool().nonzero().tolist())
    assert len(chosen) == 4 and all(chosen)
    assert len({str(places) for places in chosen}) == 4


def test_several_rewards_are_normalised_each_on_its_own(watch, reward_file):
    seen = watch(
        reward_file(
            "first, second = float(words[:1] > ['4']), 10.0 * len(set(words))\n"
            "return {'score': first, 'first': first, 'second': second}"
        ),
        "algorithm.adv_estimator=gdpo",
        "algorithm.gdpo_reward_keys=[first,second]",
        "algorithm.gdpo_reward_weights=[1.0,0.25]",
        "trainer.total_training_steps=1",
    )
    batch = seen.batches[1]
    total = torch.zeros(8, 4, dtype=torch.float64)
    for key, weight in (("first", 1.0), ("second", 0.25)):
        rewards = torch.tensor([extra[key] for extra in batch.non_tensor_batch["reward_extra"]]).double()
        rewards = rewards.view(8, 4)
        spread = rewards.std(-1, keepdim=True) + 1e-6
        total += weight * (rewards - rewards.mean(-1, keepdim=True)) / spread
    mask = batch.batch["response_mask"].bool()
    each = total.view(32, 1).expand(mask.shape)[mask]
    expected = (each - each.mean()) / each.std()
    torch.testing.assert_close(batch.batch["advantages"][mask].double(), expected, atol=1e-4, rtol=1e-3)
