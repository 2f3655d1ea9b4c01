"""Rows with advantage zero leave the update where nothing else of them reaches the loss; the weights stay the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.constant_groups import PROMPTS, N, scored, trained, weights_of
from verl.algorithms import rollout_probs_diff_metrics
from verl.config.load import load_ppo_config
from verl.config.methods import (
    ADV_ESTIMATOR,
    POLICY_LOSS,
    methods,
    policy_loss,
    register_policy_loss,
    skips_zero_advantage,
)
from verl.data.proto import DataProto, object_column
from verl.errors import ConfigError
from verl.observe.metrics import Timer
from verl.trainer import advantage
from verl.workers.group import computed_rows, mini_batches, row_weights
from verl.workers.roles import ROW_WEIGHT

LOSSES = [method.name for method in methods(POLICY_LOSS) if method.builtin]
SKIPPING = {"vanilla", "gspo", "sapo", "cispo", "gpg", "clip_cov", "geo_mean", "dppo_tv", "dppo_kl"}


@pytest.mark.parametrize("name", [name for name in LOSSES if policy_loss(name).reads_advantages])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_that_skips_rows_has_no_gradient_there(name, weighted):
    """And one that does not declare it has: its rows must be computed."""
    generator = torch.Generator().manual_seed(3)
    shape = (4, 6)
    old = -torch.rand(shape, generator=generator, dtype=torch.float64) - 0.1
    # Ratios of 0.5, 2 and around 1, inside and outside of every clip range.
    moved = torch.tensor([0.5, 2.0, 1.0, 0.9, 1.1, 30.0], dtype=torch.float64).log().expand(shape)
    log_prob = (old + moved).requires_grad_()
    advantages = torch.zeros(shape, dtype=torch.float64)
    advantages[1], advantages[3, 2] = -1.5, 0.7
    mask = torch.ones(shape, dtype=torch.long)
    mask[2, 4:] = 0
    weights = torch.rand(shape, generator=generator, dtype=torch.float64) * 3 if weighted else None
    method = policy_loss(name)
    prepared = None
    if method.prepare is not None:
        prepared = method.prepare(old, log_prob.detach(), advantages, mask, None)
        if name == "kl_cov":  # its term is on whichever tokens vary together
            prepared["kl_cov_chosen"][0, 0] = True
    loss, _ = method(
        old_log_prob=old,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode="token-mean",
        config=None,
        rollout_is_weights=weights,
        prepared=prepared,
    )
    loss.backward()
    assert log_prob.grad is not None
    zero = bool((log_prob.grad[[0, 2]] == 0).all())
    assert log_prob.grad[1].any() and zero == method.skips_zero_advantage == (name in SKIPPING)


def test_losses_that_read_no_advantages_compute_every_row():
    others = [policy_loss(name) for name in LOSSES if not policy_loss(name).reads_advantages]
    assert others and not any(method.skips_zero_advantage for method in others)


def test_a_sample_stands_for_the_rows_that_are_left_out():
    advantages, mask = torch.zeros(400, 5), torch.ones(400, 5, dtype=torch.long)
    advantages[::4] = 0.5
    advantages[1, 3], advantages[2, 4] = -1.0, 1.0
    mask[2, 4] = 0  # its advantage is on no policy token
    mask[3] = 0
    lengths = torch.randint(1, 6, (400,), generator=torch.Generator().manual_seed(0))
    mask *= torch.arange(5) < lengths.unsqueeze(-1)
    mask[1] = 1
    weights = row_weights(advantages, mask, seed=7)
    assert torch.equal(weights, row_weights(advantages, mask, seed=7))
    assert not torch.equal(weights, row_weights(advantages, mask, seed=8))
    trained = ((advantages != 0) & mask.bool()).any(-1)
    assert (weights[trained] == 1).all() and trained[1] and not trained[2] and weights[3] == 0
    sampled = (weights > 0) & ~trained
    assert int(sampled.sum()) == (int((~trained & mask.any(-1)).sum())) // 32
    assert float((weights * mask.sum(-1)).sum()) == pytest.approx(float(mask.sum()), rel=1e-5)


def test_few_rows_without_advantage_are_all_computed_with_weight_one():
    mask = torch.ones(20, 3, dtype=torch.long)
    advantages = torch.ones(20, 3)
    advantages[:8] = 0
    assert torch.equal(row_weights(advantages, mask, seed=0), torch.ones(20))
    advantages[:9] = 0
    assert int((row_weights(advantages, mask, seed=0) > 0).sum()) == 19


def test_a_mini_batch_without_influence_keeps_a_row_for_its_step():
    mask = torch.ones(4, 2, dtype=torch.long)
    mask[0] = 0
    mini = DataProto.from_dict(
        {"response_mask": mask, ROW_WEIGHT: torch.zeros(4), "row": torch.arange(4)}, meta_info={"count": 4}
    )
    left = computed_rows(mini)
    assert left.batch["row"].tolist() == [1] and left.meta_info == {"count": 4}
    mini.batch[ROW_WEIGHT][2:] = torch.tensor([1.0, 9.0])
    assert computed_rows(mini).batch["row"].tolist() == [2, 3]


# -- the config -------------------------------------------------------------------------------------------------------

KEY = "actor_rollout_ref.actor.skip_zero_advantage"
BASE = [
    "data.train_files=x.jsonl",
    "actor_rollout_ref.model.path=x",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
]


@pytest.mark.parametrize(
    ("term", "why"),
    [
        ("actor_rollout_ref.actor.use_kl_loss=True", "use_kl_loss adds the KL of every row"),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", "entropy_coeff adds the entropy of every row"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=dro", "loss_mode=dro learns from rows with"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=rowwise", "rowwise is not registered with"),
    ],
)
def test_it_is_refused_where_another_term_reaches_the_loss(term, why, monkeypatch):
    monkeypatch.setattr(
        "verl.config.methods._tables", {**_tables(), POLICY_LOSS: dict(_tables()[POLICY_LOSS])}
    )
    register_policy_loss("rowwise")(lambda log_prob, **_: (log_prob.sum(), {}))
    with pytest.raises(ConfigError, match=f"skip_zero_advantage' is True, but .*{why}.*; leave it out"):
        load_ppo_config([*BASE, term, f"{KEY}=True"])
    assert not skips_zero_advantage(load_ppo_config([*BASE, term]))
    assert not skips_zero_advantage(load_ppo_config([*BASE, f"{KEY}=False"]))
    assert skips_zero_advantage(load_ppo_config([*BASE, f"{KEY}=True"]))


def _tables() -> dict[str, Any]:
    from verl.config import methods

    return methods._tables


def test_check_says_whether_rows_are_computed_and_why(capsys):
    from verl.config.plan import RunPlan
    from verl.config.plan_report import render

    def line(*keys: str) -> str:
        text = render(RunPlan(load_ppo_config([*BASE, *keys])), [])
        return next(line for line in text.splitlines() if "advantage zero" in line)

    assert "left out" in line()
    assert "computed" in line(f"{KEY}=False") and f"{KEY} is False" in line(f"{KEY}=False")
    assert "use_kl_loss" in line("actor_rollout_ref.actor.use_kl_loss=True")


# -- three steps with and without -------------------------------------------------------------------------------------

ESTIMATORS = [method.name for method in methods(ADV_ESTIMATOR) if method.builtin]


def built(tiny_model_dir: Path, tiny_tokenizer: Any, *keys: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    from verl.workers.local import LocalGroup

    cfg = load_ppo_config(
        [
            "data.train_files=x.jsonl",
            f"data.train_batch_size={PROMPTS}",
            f"actor_rollout_ref.model.path={tiny_model_dir}",
            f"actor_rollout_ref.rollout.n={N}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=5",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.optim.weight_decay=0.1",
            "algorithm.gdpo_reward_keys=[a,b]",
            "trainer.device=cpu",
            *keys,
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=dtype)
    return LocalGroup(cfg, None, training_steps=3, model=model)


def same_training(
    make: Any, *keys: str, tolerance: float, batch_of: Callable[[int], DataProto] = scored
) -> list[dict[str, float]]:
    """Train with the key off and on; the metrics with it on."""
    off, on = (make(*keys, f"{KEY}={value}") for value in (False, True))
    rows = trained(off, batch_of), trained(on, batch_of)
    torch.testing.assert_close(weights_of(on), weights_of(off), rtol=tolerance, atol=tolerance)
    for plain, skipped in zip(*rows, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/lr"):
            assert skipped[name] == pytest.approx(plain[name], rel=10 * tolerance, abs=10 * tolerance), name
    return rows[1]


@pytest.fixture
def make(tiny_model_dir, tiny_tokenizer):
    return partial(built, tiny_model_dir, tiny_tokenizer)


def rarely(values: list[str], often: set[str]) -> list[Any]:
    """Parameters of which those not in `often` are run before a release only."""
    return [pytest.param(name, marks=() if name in often else pytest.mark.extended) for name in values]


@pytest.mark.parametrize("estimator", rarely(ESTIMATORS, {"grpo", "remax"}))
def test_weights_after_three_steps_are_equal(make, estimator):
    found = same_training(make, f"algorithm.adv_estimator={estimator}", tolerance=1e-6)
    compares = estimator in ("grpo", "rloo", "opo", "grpo_passk", "remax")
    assert all(row["training/rows_skipped"] > 0 for row in found) or not compares


@pytest.mark.parametrize("loss", rarely(sorted(SKIPPING - {"vanilla"}), {"gspo", "clip_cov"}))
def test_weights_are_equal_with_every_loss_that_skips(make, loss):
    """Also in later epochs, whose ratios are to the first mini-batch's own forward pass."""
    keys = [f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}", "actor_rollout_ref.actor.ppo_epochs=2"]
    same_training(make, "algorithm.adv_estimator=grpo", *keys, tolerance=1e-6)


def test_gradients_and_weights_are_equal_in_float64(make):
    """The optimiser is torch's: ours has float32 norms."""
    weights, losses = [], []
    for skips in (False, True):
        whole = "actor_rollout_ref.actor.ppo_mini_batch_size=10"
        group = make("algorithm.adv_estimator=grpo", whole, dtype=torch.float64)
        parameters = list(group.actor_engine.hf.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
        for step in range(3):
            batch = scored(step)
            advantage.estimate(batch, group.cfg.algorithm)
            group.prepare_update(batch, Timer())
            (mini,) = mini_batches(batch, len(batch), 1, seed=0)
            chosen = computed_rows(mini) if skips else mini
            assert len(chosen) < len(batch) - 10 if skips else len(chosen) == len(batch)
            losses.append(float(group.train("actor", chosen, step=False)["actor/pg_loss"].value))
            optimizer.step()
            group.zero_grad("actor")
        weights.append(torch.cat([value.detach().flatten() for value in parameters]))
    assert weights[0].dtype == torch.float64
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-12, abs=1e-12)
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-12, atol=1e-12)


def test_a_step_without_any_influence_is_taken_all_the_same(make):
    """Weights decay and moments fade, as with a gradient of zero."""
    keys = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_epochs=2"]
    rows = same_training(make, *keys, tolerance=1e-6, batch_of=without_influence)
    assert [row["actor/grad_norm"] > 0 for row in rows] == [True, False, True]
    assert rows[1]["training/rows_skipped"] == PROMPTS * N - 8


def without_influence(step: int) -> DataProto:
    """The second batch."""
    batch = scored(step)
    if step == 1:
        batch.batch["token_level_rewards"].zero_()
    return batch


@pytest.mark.parametrize("mode", rarely(["seq-mean-token-mean", "token-mean"], {"seq-mean-token-mean"}))
def test_turns_of_a_conversation_leave_one_by_one(make, mode):
    """The tokens of the whole conversation stay the divisor of those of its turns that are left."""
    keys = [f"actor_rollout_ref.actor.loss_agg_mode={mode}", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    keys += ["algorithm.adv_estimator=turn_rloo"]
    found = same_training(make, *keys, tolerance=1e-6, batch_of=of_two_turns)
    assert all(row["training/rows_skipped"] > 0 for row in found)


def of_two_turns(step: int) -> DataProto:
    """Rows 2k and 2k + 1 are turns of one conversation."""
    batch = scored(step)
    batch.non_tensor_batch["session"] = object_column(f"s{row // 2}" for row in range(PROMPTS * N))
    return batch


def test_means_over_tokens_are_those_of_all_rows(make):
    """As far as a sample tells: here the rows that are left out are copies of one, so it tells exactly."""
    groups = [make("algorithm.adv_estimator=grpo", f"{KEY}={value}") for value in (False, True)]
    found = []
    for group in groups:
        batch = scored(0)
        batch.batch |= {name: values.clone() for name, values in batch.batch.items()}
        for values in batch.batch.values():
            values[: 7 * N] = values[0]
        batch.batch["advantages"] = torch.where(torch.arange(PROMPTS * N)[:, None] < 7 * N, 0.0, 0.5)
        group.prepare_update(batch, Timer())
        found.append(group.update("actor", batch))
    plain, skipped = found
    assert skipped["training/rows_skipped"] == 7 * N - 8 and "training/rows_skipped" not in plain
    for name in ("actor/entropy", "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"):
        assert skipped[name] == pytest.approx(plain[name], rel=1e-4), name


def test_only_rows_of_later_mini_batches_get_a_pass_for_old_log_probs(make, monkeypatch):
    group = make("algorithm.adv_estimator=grpo")
    passed, plain = [], group.forward
    monkeypatch.setattr(
        group, "forward", lambda role, rows, columns: passed.append(rows) or plain(role, rows, columns)
    )
    batch = scored(0)
    advantage.estimate(batch, group.cfg.algorithm)
    group.prepare_update(batch, Timer())
    computed = (batch.batch[ROW_WEIGHT] > 0).nonzero().squeeze(-1)
    (rows,) = passed
    assert torch.equal(rows.batch["input_ids"], batch.batch["input_ids"][computed[computed >= 20]])
    assert group.update("actor", batch)["actor/ppo_kl"] != 0
    assert "old_log_probs" not in batch.batch, "it would not be that of every row"


@pytest.mark.parametrize("skips", [False, True])
def test_ratios_and_gap_are_those_of_a_pass_over_all_rows(make, skips):
    """In both epochs, though the first mini-batch had no pass of its own."""
    keys = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_epochs=2", f"{KEY}={skips}"]
    weights = []
    for whole in (True, False):
        group, batch = make(*keys), scored(0)
        advantage.estimate(batch, group.cfg.algorithm)
        old = group.forward("actor", batch, ("old_log_probs",)).batch["old_log_probs"]
        if whole:
            batch.batch["old_log_probs"] = old
        group.prepare_update(batch, Timer())
        found = group.update("actor", batch, keep_tokens=True)
        outputs = group.token_outputs(batch)()
        weights.append(weights_of(group))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-6, atol=1e-6)
    assert not torch.equal(weights_of(make(*keys)), weights[0])
    computed = torch.ones(len(batch), dtype=torch.bool) if not skips else batch.batch[ROW_WEIGHT] > 0
    first = torch.arange(len(batch)) < 20
    torch.testing.assert_close(outputs["log_probs"][computed & first], old[computed & first])
    assert bool((outputs["log_probs"][computed & ~first] - old[computed & ~first]).any()), "after a step"
    if not skips:
        expected = rollout_probs_diff_metrics(
            old, batch.batch["rollout_log_probs"], batch.batch["response_mask"]
        )
        for name in ("mean", "max"):
            name = f"training/rollout_probs_diff_{name}"
            assert found[name] == pytest.approx(expected[name], rel=1e-5)
