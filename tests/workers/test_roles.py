"""The roles' own arithmetic, against closed forms: losses, their parts and denominators, and what a config needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from verl.algorithms import corrects_rollout
from verl.config.load import from_dict
from verl.config.methods import POLICY_LOSS, Method
from verl.config.roles import (
    checkpoint_sections,
    engine_role,
    find_role,
    model_roles,
    roles_of,
    saved_roles,
    section_of,
)
from verl.config.schema import PPOConfig
from verl.config.sections.actor import ActorConfig, CriticConfig
from verl.data.proto import DataProto, object_column
from verl.engines.base import ModelOutput
from verl.errors import RolloutError
from verl.observe.metrics import Metric
from verl.rollout.base import BatchEngine, Response
from verl.rollout.sampler import Sampler
from verl.workers.group import (
    WorkerGroup,
    mini_batches,
    old_log_probs_pass,
)
from verl.workers.roles import (
    ActorRole,
    CriticRole,
    RolloutGap,
    greedy_settings,
    rollouts_of,
    training_settings,
    validation_settings,
)

B, T = 3, 4
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
# Of a mini-batch that has more rows than this micro-batch, over two ranks.
COUNTS = {"dp_size": 2, "batch_num_tokens": 20, "global_batch_size": 7}


def numbers(seed: int, low: float = -2.0, high: float = -0.1) -> torch.Tensor:
    return torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) * (high - low) + low


def micro(**tensors: torch.Tensor) -> DataProto:
    return DataProto.from_dict(tensors={"response_mask": MASK, **tensors}, meta_info=dict(COUNTS))


def actor(**settings: Any) -> ActorRole:
    engine: Any = None  # the loss needs none
    return ActorRole(engine, ActorConfig(**settings), loss_scale_factor=9)


def test_the_actors_loss_is_policy_loss_less_entropy_plus_kl():
    log_prob, entropy = numbers(0).requires_grad_(), numbers(1, 0.5, 2.0).requires_grad_()
    advantages, ref = numbers(2, -1, 1), numbers(3)
    role = actor(entropy_coeff=0.3, use_kl_loss=True, kl_loss_coef=0.7, kl_loss_type="k3")
    out = ModelOutput(log_probs=log_prob, entropy=entropy)
    loss, metrics = role.loss(out, micro(advantages=advantages, ref_log_prob=ref))
    d = ref - log_prob
    kl = d.exp() - d - 1

    def share(x: torch.Tensor) -> torch.Tensor:
        return (x * MASK).sum() / 20

    expected = 2 * (share(-advantages) - 0.3 * share(entropy) + 0.7 * share(kl))
    torch.testing.assert_close(loss, expected)
    assert float(metrics["actor/pg_loss"].value) == pytest.approx(float(share(-advantages)), abs=1e-6)
    assert float(metrics["actor/kl_loss"].value) == pytest.approx(share(kl).item(), abs=1e-6)
    assert metrics["actor/pg_loss"].reduce == metrics["actor/kl_loss"].reduce == "sum"
    for name, values in (("actor/entropy", entropy), ("actor/kl", kl)):
        assert float(metrics[name].value) == pytest.approx(((values * MASK).sum() / 5).item(), abs=1e-6)
        assert (metrics[name].reduce, int(metrics[name].weight)) == ("mean", 5)
    loss.backward()
    # On fresh samples the ratio is 1 and its gradient is the policy gradient; the KL pulls towards the reference.
    pulled = 0.7 * (1 - d.detach().exp())
    torch.testing.assert_close(log_prob.grad, 2 * MASK * (-advantages + pulled) / 20)
    torch.testing.assert_close(entropy.grad, -2 * 0.3 * MASK / 20)


def test_the_ratio_is_to_the_policy_that_sampled():
    log_prob, old, advantages = numbers(0).requires_grad_(), numbers(4), numbers(2, -1, 1)
    weights = numbers(5, 0.1, 2.0)
    role = actor(clip_ratio=100.0, clip_ratio_low=0.9, clip_ratio_c=1e6, entropy_coeff=0.0)
    batch = micro(advantages=advantages, old_log_probs=old, rollout_is_weights=weights)
    loss, metrics = role.loss(ModelOutput(log_probs=log_prob), batch)
    ratio = (log_prob - old).exp()
    worst = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.1, 101.0))
    torch.testing.assert_close(loss, 2 * (worst * weights * MASK).sum() / 20)
    assert float(metrics["actor/ppo_kl"].value) == pytest.approx(
        ((old - log_prob) * MASK).sum().item() / 5, abs=1e-6
    )


@pytest.mark.parametrize(("given", "factor"), [(None, 9), (5, 5)])
def test_the_divisor_of_summed_tokens_is_the_longest_response_unless_given(given, factor):
    advantages = numbers(2, -1, 1)
    role = actor(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=given)
    loss, _ = role.loss(ModelOutput(log_probs=numbers(0)), micro(advantages=advantages))
    torch.testing.assert_close(loss, 2 * (-advantages * MASK).sum() / factor / 7)


def test_the_critics_loss_is_the_clipped_squared_error():
    predicted, values, returns = numbers(0, -1, 1), numbers(1, -1, 1), numbers(2, -1, 1)
    engine: Any = None
    role = CriticRole(engine, CriticConfig(cliprange_value=0.2), loss_scale_factor=9)
    loss, metrics = role.loss(ModelOutput(values=predicted), micro(values=values, returns=returns))
    near = torch.minimum(torch.maximum(predicted, values - 0.2), values + 0.2)
    worst = 0.5 * torch.maximum((predicted - returns) ** 2, (near - returns) ** 2)
    torch.testing.assert_close(loss, 2 * (worst * MASK).sum() / 20)
    assert float(metrics["critic/vf_loss"].value) == pytest.approx(float(loss) / 2)
    assert float(metrics["critic/vpred_mean"].value) == pytest.approx(
        float((predicted * MASK).sum() / 5), abs=1e-6
    )


def test_the_gap_between_trainer_and_rollout_is_that_of_all_micro_batches():
    gap = RolloutGap()
    assert gap.metrics() == {}
    parts = [(numbers(seed), numbers(seed + 10)) for seed in (0, 1)]
    for ours, theirs in parts:
        gap.add(ours, theirs, MASK)
    kept = torch.cat([(a.exp() - b.exp()).abs()[MASK.bool()] for a, b in parts]).double()
    found = {name.rpartition("_")[2]: float(metric.value) for name, metric in gap.metrics().items()}
    assert found["mean"] == pytest.approx(float(kept.mean()), abs=1e-6)
    assert found["std"] == pytest.approx(float(kept.std()), abs=1e-6)
    assert found["max"] == pytest.approx(float(kept.max()), abs=1e-6)


def config(**values: Any) -> PPOConfig:
    plain = {
        "data.train_files": ["x"],
        "data.train_batch_size": 8,
        "actor_rollout_ref.model.path": "x",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.rollout.n": 2,
        "algorithm.adv_estimator": "grpo",
    }
    return from_dict(PPOConfig, {**plain, **values}, checked=False)


def test_old_log_probs_are_left_out_only_where_the_update_gives_them():
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    assert old_log_probs_pass(config(), 16) == "none"
    assert old_log_probs_pass(config(), 17) == "later", "a second update would find another policy"
    assert old_log_probs_pass(config(**{loss: "clip_cov"}), 16) == "none"
    assert old_log_probs_pass(config(**{loss: "clip_cov"}), 17) == "all", "its prepare sees them"
    for key, value, rows in (
        ("actor_rollout_ref.actor.ppo_epochs", 2, "later"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 4, "later"),
        ("algorithm.adv_estimator", "optimal_token_baseline", "all"),
        ("algorithm.use_kl_in_reward", True, "all"),
        ("algorithm.rollout_correction.rollout_is", "token", "all"),
        ("algorithm.rollout_correction.rollout_rs", "token_k1", "all"),
    ):
        assert old_log_probs_pass(config(**{key: value}), 16) == rows, key


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({}, ["actor"]),
        ({"algorithm.use_kl_in_reward": True}, ["actor", "ref"]),
        ({"actor_rollout_ref.actor.use_kl_loss": True}, ["actor", "ref"]),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "distillation"}, ["actor", "teacher"]),
        ({"algorithm.adv_estimator": "gae"}, ["actor", "critic"]),
        ({"algorithm.adv_estimator": "gae", "critic.enable": False}, ["actor"]),
        ({"critic.enable": True}, ["actor", "critic"]),
        ({"algorithm.adv_estimator": "prime"}, ["actor", "implicit_reward", "implicit_reward_start"]),
    ],
)
def test_which_roles_a_config_asks_for(keys, names):
    assert [role.name for role in roles_of(config(**keys))] == names


def test_what_checkpoints_hold_and_which_engine_works_as_a_start():
    keys = {"actor_rollout_ref.actor.use_kl_loss": True, "algorithm.adv_estimator": "prime"}
    assert saved_roles(config(**keys)) == ["actor", "implicit_reward"]
    refreshed = config(**keys, **{"trainer.ref_update_freq": 2})
    assert saved_roles(refreshed) == ["actor", "ref", "implicit_reward"]
    assert checkpoint_sections(refreshed)["ref"].save_contents == ["model"]
    below = config(**keys, **{"trainer.ref_update_freq": 2, "actor_rollout_ref.model.lora_rank": 4})
    assert saved_roles(below) == ["actor", "implicit_reward"]
    assert engine_role(below, find_role("ref")).name == "actor"
    assert section_of(below, find_role("ref")) is below.actor_rollout_ref.actor
    assert [role.name for role in model_roles(below)] == ["actor", "implicit_reward"]


def test_corrections_of_the_rollout():
    weighted = {"algorithm.rollout_correction.rollout_is": "token"}
    assert corrects_rollout(config(**weighted)) and not corrects_rollout(config())
    assert not corrects_rollout(config(**weighted, **{"algorithm.rollout_correction.bypass_mode": True}))


def test_settings_of_the_three_kinds_of_generation():
    rollout = config(
        **{
            "actor_rollout_ref.rollout.temperature": 0.8,
            "actor_rollout_ref.rollout.top_p": 0.7,
            "actor_rollout_ref.rollout.top_k": 6,
            "actor_rollout_ref.rollout.min_p": 0.05,
            "actor_rollout_ref.rollout.seed": 5,
            "actor_rollout_ref.rollout.stop": ["end"],
            "actor_rollout_ref.rollout.stop_token_ids": [4],
            "actor_rollout_ref.rollout.repetition_penalty": 1.1,
        }
    ).actor_rollout_ref.rollout
    train = training_settings(rollout, 33, step=7)
    assert (train.n, train.seed, train.sampling.max_tokens) == (2, 12, 33)
    s = train.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty) == (0.8, 0.7, 6, 0.05, 1.1)
    assert (s.stop, s.stop_token_ids) == (("end",), (4,))
    greedy = greedy_settings(rollout, 33)
    s = greedy.sampling
    assert (greedy.n, s.temperature, s.top_p, s.top_k, s.min_p, s.max_tokens) == (1, 0, 1, -1, 0, 33)
    assert s.stop == ("end",)
    val = validation_settings(rollout, 33)
    assert (val.n, val.seed, val.sampling.temperature, val.sampling.top_k) == (1, 5, 0, -1)


class Backwards(BatchEngine):
    """An engine that answers last samples first."""

    def __init__(self, leave_out: int = 0) -> None:
        self.requests: list[Any] = []
        self.leave_out = leave_out

    def update_weights(self, source: Any, version: int) -> None:
        raise NotImplementedError

    def run_batch(self, requests: list[Any]) -> Any:
        self.requests = requests
        samples = [(r, s) for r in self.requests for s in range(r.n)]
        for request, sample in reversed(samples[self.leave_out :]):
            token = 10 * int(request.request_id) + sample
            yield Response(request.request_id, sample, [token], [-1.0], "stop", policy_version=3)


def prompts(*uids: str) -> DataProto:
    return DataProto(
        {},
        {"uid": object_column(uids), "prompt_ids": object_column([[7] * (1 + int(u)) for u in uids])},
        {},
    )


def settings(n: int) -> Any:
    rollout = config(**{"actor_rollout_ref.rollout.n": n, "actor_rollout_ref.rollout.seed": 1})
    return training_settings(rollout.actor_rollout_ref.rollout, 4, 1)


def test_rows_stand_prompt_by_prompt_whatever_finished_first():
    engine = Backwards()
    heard: list[tuple[int, int]] = []
    samples = Sampler(engine).collect(
        prompts("2", "1"), settings(3), lambda row, response: heard.append((row, response.token_ids[0]))
    )
    batch = rollouts_of(prompts("2", "1"), samples, 3, 0)
    assert batch.batch["responses"].flatten().tolist() == [20, 21, 22, 10, 11, 12]
    assert list(batch.non_tensor_batch["uid"]) == ["2"] * 3 + ["1"] * 3
    assert heard == [(5, 12), (4, 11), (3, 10), (2, 22), (1, 21), (0, 20)]
    assert [(r.request_id, r.n, len(r.prompt_ids)) for r in engine.requests] == [("2", 3, 3), ("1", 3, 2)]
    assert [r.seed for r in engine.requests] == [2, 2], "that of the step, not the default"
    assert set(batch.non_tensor_batch["policy_version"]) == {3}


def test_unanswered_and_doubled_prompts_are_refused():
    engine = Backwards(leave_out=1)
    with pytest.raises(RolloutError, match="1 of 4 samples unanswered"):
        Sampler(engine).collect(prompts("1", "2"), settings(2))
    with pytest.raises(RolloutError, match="share a uid"):
        Sampler(engine).collect(prompts("1", "1"), settings(2))


class Counting(WorkerGroup):
    """Roles that only remember what they were asked to train on."""

    def __init__(self, cfg: PPOConfig) -> None:
        super().__init__(cfg)
        self.done: list[tuple[str, list[int], int]] = []
        self.published: list[int] = []

    def train(self, role: str, mini: DataProto, **options: Any) -> dict[str, Metric]:
        rows = mini.batch["row"].tolist()
        self.done.append((role, rows, self.policy_version))
        tokens = mini.meta_info["batch_num_tokens"]
        return {"mean": Metric(float(len(self.done)), "mean", tokens), "sum": Metric(float(tokens), "sum")}

    def sync_weights(self) -> dict[str, float]:
        self.published.append(self.policy_version)
        return {}

    def samples(self) -> Any: ...
    def generating(self) -> Any: ...

    def forward(self, *arguments: Any) -> Any: ...
    def optim_step(self, *arguments: Any) -> Any: ...
    def zero_grad(self, role: str) -> None: ...
    def add(self, *arguments: Any) -> None: ...
    def kept_tokens(self) -> Any: ...
    def refresh(self, role: str) -> None: ...
    def profile(self, *arguments: Any) -> Any: ...
    def close(self) -> None: ...


def rows_of(count: int, masked: tuple[int, ...] = ()) -> DataProto:
    mask = torch.ones(count, 3, dtype=torch.long)
    mask[list(masked)] = 0
    return DataProto.from_dict(tensors={"response_mask": mask, "row": torch.arange(count)})


def test_an_update_leaves_out_what_has_no_tokens_and_weighs_the_rest_by_them():
    group = Counting(config(**{"actor_rollout_ref.actor.ppo_mini_batch_size": 1}))
    metrics = group.update("actor", rows_of(6, masked=(1, 2, 3)))
    assert [rows for _, rows, _ in group.done] == [[0, 1], [4, 5]], "rows 2 and 3 are a mini-batch of nothing"
    assert metrics == {"mean": pytest.approx((1 * 3 + 2 * 6) / 9), "sum": pytest.approx(4.5)}
    assert (group.policy_version, group.published) == (1, [1])


def test_the_version_counts_updates_of_the_actor_and_the_rollout_hears_of_each():
    group = Counting(
        config(
            **{
                "actor_rollout_ref.actor.ppo_epochs": 2,
                "critic.ppo_mini_batch_size": 4,
                "critic.ppo_epochs": 3,
            }
        )
    )
    batch = rows_of(16)
    group.update("critic", batch)
    assert [len(rows) for _, rows, _ in group.done] == [8] * 6 and group.published == []
    group.done.clear()
    for version in (1, 2):
        group.update("actor", batch)
        assert (group.policy_version, group.published[-1]) == (version, version)
    orders = [rows for _, rows, _ in group.done]
    assert [len(rows) for rows in orders] == [16] * 4
    assert orders[0] == orders[2] == list(range(16)) and orders[1] != orders[3]
    again = Counting(group.cfg)
    again.policy_version = 1
    again.update("actor", batch)
    assert again.done[1][1] == orders[3], "a resumed run shuffles as the first one did"


def test_a_loss_of_ones_own_sees_a_behaviour_policy_without_gradient():
    def plain(old_log_prob, log_prob, advantages, response_mask, **_):
        return -(advantages * (log_prob - old_log_prob).exp() * response_mask).sum(), {}

    role = actor()
    role.policy_loss = replace(role.policy_loss, function=plain)
    log_prob, advantages = numbers(0).requires_grad_(), numbers(2, -1, 1)
    loss, _ = role.loss(ModelOutput(log_probs=log_prob), micro(advantages=advantages))
    loss.backward()
    torch.testing.assert_close(log_prob.grad, -advantages * MASK)


def test_no_two_passes_have_the_same_order():
    orders: list[list[int]] = [[]]
    for mini in mini_batches(rows_of(12), 4, 4, seed=3):
        if len(orders[-1]) == 12:
            orders.append([])
        orders[-1] += mini.batch["row"].tolist()
    assert len(orders) == len({tuple(order) for order in orders}) == 4


def test_draws_of_a_loss_are_keyed_by_update_and_mini_batch(monkeypatch):
    drawn: list[float] = []

    def prepare(
        *,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        generator: torch.Generator,
        batch: DataProto,
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        assert (old_log_prob == -1).all() and (log_prob == 0).all(), "before the step, and now"
        assert len(batch) == 4 and "row" in batch.batch, "the whole mini-batch"
        drawn.append(float(torch.rand((), generator=generator)))
        return {}

    def old_log_probs(self: Any, role: str, mini: DataProto, columns: Any) -> DataProto:
        return DataProto.from_dict(tensors={"old_log_probs": torch.zeros(len(mini), 3)})

    loss = Method("mine", POLICY_LOSS, prepare, prepare=prepare)
    monkeypatch.setattr("verl.workers.group.policy_loss", lambda name: loss)
    monkeypatch.setattr(Counting, "forward", old_log_probs)
    batch = rows_of(8)
    batch.batch |= {"advantages": torch.zeros(8, 3), "old_log_probs": torch.full((8, 3), -1.0)}
    for first in (0, 1):
        group = Counting(config(**{"actor_rollout_ref.actor.ppo_mini_batch_size": 2}))
        group.policy_version = first
        group.update("actor", batch)
        group.update("actor", batch)
    assert len(set(drawn[:4])) == 4
    assert drawn[4:6] == drawn[2:4], "a resumed run draws as the first one did"


@pytest.mark.parametrize(("version", "computed"), [(3, 1), (2, 2), (None, 2)])
def test_log_probs_of_the_current_weights_are_not_computed_again(monkeypatch, version, computed):
    """Those of the first mini-batch, where the trainer computed them and no step was taken since."""
    used: list[float] = []

    def prepare(*, log_prob: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        used.append(float(log_prob[0, 0]))
        return {}

    def current(self: Any, role: str, mini: DataProto, columns: Any) -> DataProto:
        return DataProto.from_dict(tensors={"old_log_probs": torch.zeros(len(mini), 3)})

    loss = Method("mine", POLICY_LOSS, prepare, prepare=prepare)
    monkeypatch.setattr("verl.workers.group.policy_loss", lambda name: loss)
    monkeypatch.setattr(Counting, "forward", current)
    batch = rows_of(8)
    batch.batch |= {"advantages": torch.zeros(8, 3), "old_log_probs": torch.full((8, 3), -1.0)}
    batch.meta_info = {} if version is None else {"old_log_probs_version": version}
    group = Counting(config(**{"actor_rollout_ref.actor.ppo_mini_batch_size": 2}))
    group.policy_version = 3
    group.update("actor", batch)
    assert used == ([-1.0, 0.0] if computed == 1 else [0.0, 0.0])


def test_the_responses_to_a_prompt_stay_together_in_every_pass():
    for mini in mini_batches(rows_of(24), 6, 3, seed=1, together=3):
        prompts = (mini.batch["row"] // 3).view(-1, 3)
        assert bool((prompts == prompts[:, :1]).all())
    passes = list(mini_batches(rows_of(24), 24, 2, seed=1, together=3))
    assert passes[1].batch["row"].tolist() != passes[0].batch["row"].tolist() == list(range(24))


def five_rows() -> DataProto:
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1], [1, 1]])
    return DataProto.from_dict(
        tensors={"response_mask": mask, "row": torch.arange(5)}, meta_info={"temperature": 0.7}
    )


def test_denominators_are_those_of_the_rows_at_hand():
    minis = list(mini_batches(five_rows(), 3, 1, seed=0))
    counts = [(m.meta_info["batch_num_tokens"], m.meta_info["global_batch_size"]) for m in minis]
    assert counts == [(3, 2), (4, 2)], "a row without policy tokens counts in neither"
    assert all(m.meta_info["temperature"] == 0.7 for m in minis)


def test_the_first_pass_keeps_the_order_and_later_ones_are_shuffled_by_the_seed():
    def passes(seed: int) -> list[list[int]]:
        rows = [
            row for mini in mini_batches(five_rows(), 2, 3, seed=seed) for row in mini.batch["row"].tolist()
        ]
        return [rows[start : start + 5] for start in (0, 5, 10)]

    first, *later = passes(1)
    assert first == [0, 1, 2, 3, 4] and all(sorted(rows) == first for rows in later)
    assert passes(1) == passes(1) and any(passes(seed)[1] != first for seed in range(4))
