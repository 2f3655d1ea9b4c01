"""Bypass mode: each update weighs its tokens by the policy it begins with, against straight loops in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_run import read_metrics, tiny_run
from verl.algorithms import batch_counts
from verl.algorithms.rollout_correction import mean_bypass_weight
from verl.config.load import from_dict, load_ppo_config
from verl.config.schema import PPOConfig
from verl.data.proto import DataProto
from verl.engines.base import ModelOutput
from verl.errors import ConfigError
from verl.workers.roles import WEIGHT_MEAN, ActorRole

B, T = 7, 6
CORRECTION = "algorithm.rollout_correction"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
BASE = {"actor_rollout_ref.model.path": "o/m", "data.train_files": "o/d"}


def config_of(**correction: Any) -> PPOConfig:
    given = {"bypass_mode": True, "loss_type": "reinforce", **correction}
    return from_dict(
        PPOConfig, {**BASE, **{f"{CORRECTION}.{name}": value for name, value in given.items()}}, checked=False
    )


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(B, T, generator=generator, dtype=torch.float64)

    mask = torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=generator)
    mask[0] = False
    old = -normal().abs() - 0.1
    tensors = {"rollout_log_probs": old, "log_probs": old + 0.4 * normal(), "advantages": normal()}
    return {
        **{name: values.masked_fill(~mask, torch.nan) for name, values in tensors.items()},
        "response_mask": mask.long(),
    }


def kept_by(rule: str, low: float, high: float, ratios: list[float]) -> list[bool]:
    if rule == "token_k1":
        return [low <= math.exp(l) <= high for l in ratios]
    if rule == "seq_max_k2":
        return [all(l * l / 2 <= high for l in ratios)] * len(ratios)
    assert rule == "seq_mean_k1"
    return [low <= math.exp(sum(ratios) / len(ratios)) <= high] * len(ratios)


def reference(
    t: dict[str, torch.Tensor],
    level: str | None,
    bound: float,
    rules: dict[str, tuple[float, float]],
    mean: bool,
) -> tuple[float, torch.Tensor]:
    """-sum(w A log pi) / tokens and its gradient, w without gradient."""
    weights: dict[tuple[int, int], float] = {}
    counted: list[float] = []
    for i in range(B):
        at = [j for j in range(T) if t["response_mask"][i, j]]
        if not at:
            continue
        ratios = [float(t["log_probs"][i, j] - t["rollout_log_probs"][i, j]) for j in at]
        kept = [True] * len(at)
        for rule, (low, high) in rules.items():
            kept = [a and b for a, b in zip(kept, kept_by(rule, low, high, ratios), strict=True)]
        of_sequence = min(math.exp(sum(ratios)), bound)
        for number, j in enumerate(at):
            w = {None: 1.0, "token": min(math.exp(ratios[number]), bound), "sequence": of_sequence}[level]
            weights[i, j] = w if kept[number] else 0.0
        if level == "sequence" and any(kept):
            counted.append(of_sequence)
        elif level != "sequence":
            counted += [weights[i, j] for number, j in enumerate(at) if kept[number]]
    scale = sum(counted) / len(counted) if mean else 1.0
    tokens = int(t["response_mask"].sum())
    loss, gradient = 0.0, torch.zeros(B, T, dtype=torch.float64)
    for (i, j), w in weights.items():
        gradient[i, j] = -w / scale * float(t["advantages"][i, j]) / tokens
        loss += float(gradient[i, j]) * float(t["log_probs"][i, j])
    return loss, gradient


RULES = {"token_k1": (0.7, 1.4), "seq_max_k2": (0.0, 0.3)}
CASES: list[tuple[str | None, dict[str, tuple[float, float]], bool]] = [
    (None, {}, False),
    ("token", {}, False),
    ("sequence", {}, False),
    ("token", RULES, False),
    ("sequence", RULES, True),
    ("token", {"seq_mean_k1": (0.8, 1.2)}, True),
    (None, RULES, False),
]


@pytest.mark.parametrize(("level", "rules", "mean"), CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reinforce_in_bypass_mode_is_minus_w_a_log_pi(
    level: str | None, rules: dict[str, tuple[float, float]], mean: bool, seed: int
) -> None:
    """In two micro-batches, whose shares add up to the mini-batch."""
    given: dict[str, Any] = {
        "rollout_is": level,
        "rollout_is_threshold": 1.3,
        "rollout_is_batch_normalize": mean,
    }
    if rules:
        given["rollout_rs"] = ",".join(rules)
        given["rollout_rs_threshold"] = ",".join(
            f"{low}_{high}" if low else f"{high}" for low, high in rules.values()
        )
    cfg, t = config_of(**given), drawn(seed)
    role = ActorRole(None, cfg.actor_rollout_ref.actor, loss_scale_factor=T)  # type: ignore[arg-type]
    role.connect(None, cfg, {}, 0)  # type: ignore[arg-type]
    meta: dict[str, Any] = {"dp_size": 1, **batch_counts(t["response_mask"])}
    if mean:
        correction = cfg.algorithm.rollout_correction
        arguments = (t["log_probs"], t["rollout_log_probs"], t["response_mask"], correction)
        meta[WEIGHT_MEAN] = mean_bypass_weight(*arguments)
    log_probs = t["log_probs"].clone().requires_grad_()
    batch = {name: t[name] for name in ("rollout_log_probs", "advantages", "response_mask")}
    batch["old_log_probs"] = t["rollout_log_probs"]
    total = torch.zeros((), dtype=torch.float64)
    for rows in (slice(0, 4), slice(4, B)):
        micro = DataProto.from_dict(
            tensors={name: each[rows] for name, each in batch.items()}, meta_info=dict(meta)
        )
        loss, _ = role.loss(ModelOutput(log_probs=log_probs[rows]), micro)
        total = total + loss
    total.backward()
    expected, gradient = reference(t, level, 1.3, rules, mean)
    assert float(total.detach()) == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(log_probs.grad, gradient, rtol=1e-12, atol=1e-15)


def test_ppo_in_bypass_mode_rejects_and_does_not_weigh() -> None:
    """Its own ratio is the weight already."""
    t = drawn(0)
    cfg = config_of(
        loss_type="ppo_clip", rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.7_1.4"
    )
    plain = config_of(loss_type="ppo_clip")
    batch = {name: t[name] for name in ("rollout_log_probs", "advantages")}
    batch["old_log_probs"] = t["rollout_log_probs"]
    ratio = (t["log_probs"] - t["rollout_log_probs"]).exp()
    kept = (ratio >= 0.7) & (ratio <= 1.4) & t["response_mask"].bool()
    assert 0 < int(kept.sum()) < int(t["response_mask"].sum())
    losses = []
    for config, mask in ((cfg, t["response_mask"]), (plain, kept.long())):
        role = ActorRole(None, config.actor_rollout_ref.actor, loss_scale_factor=T)  # type: ignore[arg-type]
        role.connect(None, config, {}, 0)  # type: ignore[arg-type]
        micro = DataProto.from_dict(
            tensors={**batch, "response_mask": mask},
            meta_info={"dp_size": 1, **batch_counts(t["response_mask"])},
        )
        losses.append(role.loss(ModelOutput(log_probs=t["log_probs"]), micro)[0])
    torch.testing.assert_close(losses[0], losses[1])


RUN = [f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_batch_normalize=True",
       f"{CORRECTION}.rollout_is_threshold=1.0002", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
       "actor_rollout_ref.actor.use_dynamic_bsz=False", "trainer.total_training_steps=2",
       "actor_rollout_ref.actor.grad_clip=0.01"]  # fmt: skip


def test_with_one_update_a_batch_both_modes_are_the_same(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path
) -> None:
    """The policy of the update is then the one before it, which the other mode weighs by. In micro-batches."""
    from verl.trainer.main_ppo import run

    bypass = [f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.loss_type=reinforce"]
    found = {}
    for name, more in (("bypass", bypass), ("decoupled", [f"{LOSS}=gpg"])):
        folder = tmp_path / name
        run(load_ppo_config(tiny_run(tiny_model_dir, digits_data, *RUN, *more, folder=folder)))
        found[name] = read_metrics(folder)
    names = ("actor/pg_loss", "actor/grad_norm", "reward/mean")
    for one, other in zip(found["bypass"], found["decoupled"], strict=True):
        assert [one[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-4)
        assert one["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=0.02)


def test_loss_types_that_contradict_are_refused() -> None:
    typed = [f"{name}={value}" for name, value in BASE.items()] + [f"{CORRECTION}.bypass_mode=True"]
    reinforce = f"{CORRECTION}.loss_type=reinforce"
    for more in ([], [f"{LOSS}=vanilla"]):
        config = load_ppo_config([*typed, reinforce, *more])
        assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "gpg"
    with pytest.raises(ConfigError, match=rf"loss_type' is reinforce.*{LOSS} is gspo"):
        load_ppo_config([*typed, reinforce, f"{LOSS}=gspo"])
    turns = [
        "rollout.multi_turn.enable=True",
        "rollout.multi_turn.tool_server=http://x",
        "rollout.multi_turn.history=split",
    ]
    with pytest.raises(ConfigError, match=r"rollout_is=token and rules of tokens"):
        load_ppo_config([*typed, reinforce, *turns, f"{CORRECTION}.rollout_is=sequence"])
    load_ppo_config([*typed, reinforce, *turns, f"{CORRECTION}.rollout_is=token"])
