"""Estimators and losses one sequence after the other, as one would first write them.

The benchmark measures the vectorised code against these loops, and the tests of the estimators compare with them. An
estimator takes a batch and returns (advantages, returns); a loss returns the mini-batch's mean over tokens (over
sequences where that is the method). Values at masked positions may be anything, NaN included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Batch:
    rewards: Tensor
    mask: Tensor
    index: list[str]
    values: Tensor
    old: Tensor
    log_prob: Tensor
    advantages: Tensor
    sum_pi_squared: Tensor
    baselines: Tensor
    process_rewards: Tensor
    by_key: dict[str, Tensor]
    gamma: float = 0.99
    lam: float = 0.95


Pair = tuple[Tensor, Tensor]


def masked_rows(b: Any, values: Tensor) -> list[Tensor]:
    """The rows of a matrix with 0 behind the mask."""
    return [torch.where(b.mask[i].bool(), values[i], 0.0) for i in range(len(b.mask))]


def scores(b: Any) -> list[Tensor]:
    return [row.sum() for row in masked_rows(b, b.rewards)]


def members(b: Any) -> dict[str, list[int]]:
    """The rows of each group."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, uid in enumerate(b.index):
        groups[uid].append(i)
    return groups


def spread(b: Any, per_sequence: list[Tensor]) -> Tensor:
    return torch.stack([value * b.mask[i] for i, value in enumerate(per_sequence)])


def whiten(b: Any, rows: Tensor) -> Tensor:
    kept = torch.cat([rows[i][b.mask[i].bool()] for i in range(len(rows))])
    mean, scale = kept.mean(), torch.rsqrt(kept.var() + 1e-8)
    return torch.stack([(rows[i] - mean) * scale * b.mask[i] for i in range(len(rows))])


def normalised(b: Any, values: list[Tensor], by_std: bool = True) -> list[Tensor]:
    out = list(values)
    for rows in members(b).values():
        group = torch.stack([values[i] for i in rows])
        scale = group.std() + 1e-6 if len(rows) > 1 else 1e-6
        for i in rows:
            out[i] = (values[i] - group.mean()) / scale if by_std else values[i] - group.mean()
    return out


def rewards_to_go(b: Any, gamma: float = 1.0) -> Tensor:
    out = torch.zeros_like(b.rewards)
    for i in range(len(b.mask)):
        mask, reward = b.mask[i].tolist(), b.rewards[i].tolist()
        row, running = [0.0] * len(mask), 0.0
        for t in reversed(range(len(mask))):
            if mask[t]:
                running = reward[t] + gamma * running
                row[t] = running
        out[i] = torch.tensor(row, dtype=out.dtype)
    return out


def gae(b: Any) -> Pair:
    advantages = torch.zeros_like(b.rewards)
    for i in range(len(b.mask)):
        mask, reward, value = b.mask[i].tolist(), b.rewards[i].tolist(), b.values[i].tolist()
        row = [0.0] * len(mask)
        next_value = next_advantage = 0.0
        for t in reversed(range(len(mask))):
            if mask[t]:
                delta = reward[t] + b.gamma * next_value - value[t]
                next_advantage = delta + b.gamma * b.lam * next_advantage
                next_value = value[t]
                row[t] = next_advantage
        advantages[i] = torch.tensor(row, dtype=advantages.dtype)
    return whiten(b, advantages), advantages + torch.stack(masked_rows(b, b.values))


def grpo(b: Any) -> Pair:
    rows = spread(b, normalised(b, scores(b)))
    return rows, rows


def grpo_passk(b: Any) -> Pair:
    values = scores(b)
    out = [torch.zeros_like(value) for value in values]
    for group in members(b).values():
        found = torch.stack([values[i] for i in group])
        if len(group) > 1:
            top = found.topk(2).values
            for i in group:
                if bool(values[i] == top[0]):
                    out[i] = (top[0] - top[1]) / (found.std() + 1e-6)
    return spread(b, out), spread(b, out)


def rloo(b: Any) -> Pair:
    values = scores(b)
    out = [torch.zeros_like(value) for value in values]
    for group in members(b).values():
        total = torch.stack([values[i] for i in group]).sum()
        for i in group if len(group) > 1 else ():
            out[i] = values[i] - (total - values[i]) / (len(group) - 1)
    return spread(b, out), spread(b, out)


def turns(b: Any, i: int) -> list[list[int]]:
    """The positions of each turn of a row: runs of policy tokens without a gap."""
    found: list[list[int]] = []
    for t, kept in enumerate(b.mask[i].tolist()):
        if kept and (t == 0 or not b.mask[i, t - 1]):
            found.append([])
        if kept:
            found[-1].append(t)
    return found


def turn_rloo(b: Any) -> Pair:
    advantages, returns = torch.zeros_like(b.rewards), torch.zeros_like(b.rewards)
    spans = [turns(b, i) for i in range(len(b.mask))]
    to_go = [
        [sum(float(b.rewards[i, t]) for turn in spans[i][k:] for t in turn) for k in range(len(spans[i]))]
        for i in range(len(b.mask))
    ]
    for group in members(b).values():
        for i in group:
            for k, turn in enumerate(spans[i]):
                others = [to_go[j][k] if k < len(to_go[j]) else 0.0 for j in group if j != i]
                baseline = sum(others) / len(others) if others else to_go[i][k]
                returns[i, turn] = to_go[i][k]
                advantages[i, turn] = to_go[i][k] - baseline
    return advantages, returns


def opo(b: Any) -> Pair:
    values = scores(b)
    out = list(values)
    for group in members(b).values():
        lengths = torch.stack([b.mask[i].sum() for i in group])
        baseline = (lengths * torch.stack([values[i] for i in group])).sum() / lengths.sum().clamp(min=1)
        for i in group:
            out[i] = values[i] - baseline
    return spread(b, out), spread(b, out)


def gpg(b: Any) -> Pair:
    values = scores(b)
    alpha = len(values) / max(sum(bool(value != 0) for value in values), 1)
    rows = spread(b, [alpha * value for value in normalised(b, values, by_std=False)])
    return rows, rows


def reinforce_plus_plus(b: Any) -> Pair:
    returns = rewards_to_go(b, b.gamma)
    return whiten(b, returns), returns


def reinforce_plus_plus_baseline(b: Any) -> Pair:
    rows = whiten(b, spread(b, normalised(b, scores(b), by_std=False)))
    return rows, rows


def remax(b: Any) -> Pair:
    returns = rewards_to_go(b)
    return returns - spread(b, list(b.baselines.unbind())), returns


def gdpo(b: Any) -> Pair:
    parts = [normalised(b, list(values.unbind())) for values in b.by_key.values()]
    rows = whiten(b, spread(b, [sum(found[1:], start=found[0]) for found in zip(*parts, strict=True)]))
    return rows, rows


def optimal_token_baseline(b: Any) -> Pair:
    returns = rewards_to_go(b)
    gains = masked_rows(b, 1 - 2 * b.old.exp() + b.sum_pi_squared)
    advantages = returns.clone()
    for rows in members(b).values():
        above, below = torch.zeros_like(returns[0]), torch.zeros_like(returns[0])
        places = {i: b.mask[i].bool() for i in rows}
        for i, at in places.items():
            weight, count = gains[i].cumsum(0)[at], int(at.sum())
            above[:count] += returns[i][at] * weight
            below[:count] += weight
        baseline = above / (below + 1e-8)
        lengths = sorted(int(at.sum()) for at in places.values())
        baseline[lengths[-2] if len(lengths) > 1 else 0 :] = 0
        for i, at in places.items():
            advantages[i][at] = returns[i][at] - baseline[: int(at.sum())]
    return advantages, returns


def prime(b: Any) -> Pair:
    """With both weights at their default of 5."""
    process = masked_rows(b, b.process_rewards)
    means = [row.sum() / max(int(b.mask[i].sum()), 1) for i, row in enumerate(process)]
    returns = 5 * rloo(b)[0]
    for group in members(b).values():
        for i in group if len(group) > 1 else ():
            baseline = sum(means[j] for j in group if j != i) / (len(group) - 1)
            running = 0.0
            for t in reversed(range(len(b.mask[i]))):
                if b.mask[i, t]:
                    running = running + process[i][t] - baseline
                    returns[i, t] += 5 * running
    return whiten(b, returns), returns


ESTIMATORS: dict[str, Callable[[Any], Pair]] = {
    "gae": gae,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "turn_rloo": turn_rloo,
    "opo": opo,
    "gpg": gpg,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "gdpo": gdpo,
    "optimal_token_baseline": optimal_token_baseline,
    "prime": prime,
}

LOW = HIGH = 0.2
BOUND = 3.0
SEQUENCE_LOSSES = ("gspo", "sapo")


def token_losses(name: str, old: Tensor, logp: Tensor, a: Tensor, chosen: Tensor | None) -> Tensor:
    """Of the policy tokens of one sequence, [n]."""
    delta = logp - old
    ratio = delta.clamp(-20, 20).exp()
    clipped = torch.maximum(-a * ratio, -a * ratio.clamp(1 - LOW, 1 + HIGH))
    if name == "vanilla":
        return torch.where(a < 0, torch.minimum(clipped, -a * BOUND), clipped)
    if name == "gspo":
        s = (logp - logp.detach() + delta.mean().detach()).clamp(max=10).exp()
        return torch.maximum(-a * s, -a * s.clamp(1 - LOW, 1 + HIGH))
    if name == "sapo":
        tau = torch.where(a > 0, 1.0, 1.05)
        return -a * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    if name == "cispo":
        return -ratio.clamp(1 - LOW, 1 + HIGH).detach() * a * logp
    if name == "gpg":
        return -logp * a
    if name == "clip_cov" and chosen is not None:
        return torch.where(chosen, torch.zeros_like(clipped), clipped)
    if name == "kl_cov" and chosen is not None:
        return -a * ratio + delta.abs() * chosen
    if name == "geo_mean":
        bounded = torch.where(a >= 0, delta.clamp(max=HIGH), delta.clamp(min=-LOW))
        return (-a.mean() * bounded.mean().exp()).expand_as(a)
    if name in ("dppo_tv", "dppo_kl"):
        p, q = logp.detach().exp(), old.exp()
        divergence = (p - q).abs()
        if name == "dppo_kl":
            rest = (1 - q).clamp(min=1e-8).log() - (1 - p).clamp(min=1e-8).log()
            divergence = q * (old - logp.detach()) + (1 - q) * rest
        far = torch.where(a > 0, (p > q) & (divergence > HIGH), (p < q) & (divergence > LOW))
        return torch.where(far, torch.zeros_like(a), -a * ratio.detach().clamp(max=BOUND) * logp)
    if name == "dro":
        return -(logp * a - 0.1 / 2 * delta.square())
    if name == "distillation":
        return logp  # in the place of the KL, which the engine computes
    raise ValueError(f"no loop for the loss {name!r}")


def loss(name: str, b: Batch, log_prob: Tensor, chosen: Tensor | None) -> Tensor:
    total = log_prob.new_zeros(())
    tokens = sequences = 0
    rows = log_prob.unbind(0)  # indexing row by row would cost a whole matrix of zeros per row going backward
    for i in range(len(rows)):
        at = b.mask[i].bool()
        count = int(at.sum())
        if not count:
            continue
        picked = None if chosen is None else chosen[i][at]
        row = token_losses(name, b.old[i][at], rows[i][at], b.advantages[i][at], picked).sum()
        total = total + (row / count if name in SEQUENCE_LOSSES else row)
        tokens, sequences = tokens + count, sequences + 1
    return total / (sequences if name in SEQUENCE_LOSSES else tokens)
