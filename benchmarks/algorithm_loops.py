"""What the vectorised maths is measured against: one sequence after the other, as one would first write it.

Each estimator takes the same batch and returns (advantages, returns); each loss returns the mini-batch's mean over
tokens (over sequences where that is the method). They are also compared with ours, so a timing is never one of
two different things.
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
    by_key: dict[str, Tensor]
    gamma: float = 0.99
    lam: float = 0.95


Pair = tuple[Tensor, Tensor]


def _scores(b: Batch) -> list[Tensor]:
    return [(b.rewards[i] * b.mask[i]).sum() for i in range(len(b.mask))]


def _groups(b: Batch, scores: list[Tensor]) -> dict[str, list[Tensor]]:
    groups: dict[str, list[Tensor]] = defaultdict(list)
    for uid, score in zip(b.index, scores, strict=True):
        groups[uid].append(score)
    return groups


def _spread(b: Batch, per_sequence: list[Tensor]) -> Pair:
    rows = torch.stack([value * b.mask[i] for i, value in enumerate(per_sequence)])
    return rows, rows


def _whiten(b: Batch, rows: Tensor) -> Tensor:
    kept = torch.cat([rows[i][b.mask[i].bool()] for i in range(len(rows))])
    mean, scale = kept.mean(), torch.rsqrt(kept.var() + 1e-8)
    return torch.stack([(rows[i] - mean) * scale * b.mask[i] for i in range(len(rows))])


def _normalised(b: Batch, scores: list[Tensor], by_std: bool) -> list[Tensor]:
    stats = {uid: torch.stack(values) for uid, values in _groups(b, scores).items()}
    means = {uid: values.mean() for uid, values in stats.items()}
    stds = {uid: values.std() if len(values) > 1 else values.new_zeros(()) for uid, values in stats.items()}
    out = []
    for uid, score in zip(b.index, scores, strict=True):
        centred = score - means[uid]
        out.append(centred / (stds[uid] + 1e-6) if by_std else centred)
    return out


def gae(b: Batch) -> Pair:
    advantages, returns = torch.zeros_like(b.rewards), torch.zeros_like(b.rewards)
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
        advantages[i] = torch.tensor(row)
        returns[i] = (advantages[i] + b.values[i]) * b.mask[i]
    return _whiten(b, advantages), returns


def grpo(b: Batch) -> Pair:
    return _spread(b, _normalised(b, _scores(b), by_std=True))


def grpo_passk(b: Batch) -> Pair:
    scores = _scores(b)
    groups = {uid: torch.stack(values) for uid, values in _groups(b, scores).items()}
    out = []
    for uid, score in zip(b.index, scores, strict=True):
        top = groups[uid].topk(2).values
        lead = (top[0] - top[1]) / (groups[uid].std() + 1e-6)
        out.append(lead if bool(score == top[0]) else torch.zeros_like(lead))
    return _spread(b, out)


def rloo(b: Batch) -> Pair:
    scores = _scores(b)
    groups = {uid: torch.stack(values) for uid, values in _groups(b, scores).items()}
    out = []
    for uid, score in zip(b.index, scores, strict=True):
        others = (groups[uid].sum() - score) / (len(groups[uid]) - 1)
        out.append(score - others)
    return _spread(b, out)


def opo(b: Batch) -> Pair:
    scores = _scores(b)
    lengths = [b.mask[i].sum() for i in range(len(b.mask))]
    above: dict[str, Any] = defaultdict(float)
    below: dict[str, Any] = defaultdict(float)
    for uid, score, length in zip(b.index, scores, lengths, strict=True):
        above[uid] = above[uid] + length * score
        below[uid] = below[uid] + length
    return _spread(b, [score - above[uid] / below[uid] for uid, score in zip(b.index, scores, strict=True)])


def gpg(b: Batch) -> Pair:
    scores = _scores(b)
    alpha = len(scores) / max(sum(bool(score != 0) for score in scores), 1)
    return _spread(b, [alpha * value for value in _normalised(b, scores, by_std=False)])


def reinforce_plus_plus(b: Batch) -> Pair:
    returns = torch.zeros_like(b.rewards)
    for i in range(len(b.mask)):
        mask, reward = b.mask[i].tolist(), b.rewards[i].tolist()
        row, running = [0.0] * len(mask), 0.0
        for t in reversed(range(len(mask))):
            if mask[t]:
                running = reward[t] + b.gamma * running
                row[t] = running
        returns[i] = torch.tensor(row)
    return _whiten(b, returns), returns


def reinforce_plus_plus_baseline(b: Batch) -> Pair:
    rows = _whiten(b, _spread(b, _normalised(b, _scores(b), by_std=False))[0])
    return rows, rows


def _to_go(b: Batch, i: int) -> Tensor:
    return (b.rewards[i] * b.mask[i]).flip(0).cumsum(0).flip(0) * b.mask[i]


def remax(b: Batch) -> Pair:
    returns = [_to_go(b, i) for i in range(len(b.mask))]
    advantages = [(row - b.baselines[i]) * b.mask[i] for i, row in enumerate(returns)]
    return torch.stack(advantages), torch.stack(returns)


def gdpo(b: Batch) -> Pair:
    parts = [_normalised(b, list(scores.unbind()), by_std=True) for scores in b.by_key.values()]
    total = [sum(values[1:], start=values[0]) for values in zip(*parts, strict=True)]
    rows = _whiten(b, _spread(b, total)[0])
    return rows, rows


def optimal_token_baseline(b: Batch) -> Pair:
    members: dict[str, list[int]] = defaultdict(list)
    for i, uid in enumerate(b.index):
        members[uid].append(i)
    returns = [_to_go(b, i) for i in range(len(b.mask))]
    advantages: list[Tensor] = [torch.empty(0)] * len(b.mask)
    for rows in members.values():
        above, below = torch.zeros_like(b.rewards[0]), torch.zeros_like(b.rewards[0])
        ends = []
        for i in rows:
            weight = ((1 - 2 * b.old[i].exp() + b.sum_pi_squared[i]) * b.mask[i]).cumsum(0) * b.mask[i]
            above, below = above + returns[i] * weight, below + weight
            ends.append(int(b.mask[i].nonzero().max()) + 1)
        baseline = above / (below + 1e-8)
        baseline[sorted(ends)[-2] if len(ends) > 1 else 0 :] = 0
        for i in rows:
            advantages[i] = (returns[i] - baseline) * b.mask[i]
    return torch.stack(advantages), torch.stack(returns)


ESTIMATORS: dict[str, Callable[[Batch], Pair]] = {
    "gae": gae,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "gdpo": gdpo,
    "optimal_token_baseline": optimal_token_baseline,
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
