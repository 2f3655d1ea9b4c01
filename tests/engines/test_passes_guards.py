"""A micro-batch that had to be tried again counts once; heads that scale their logits are asked as their models are."""

from __future__ import annotations

import copy

import pytest
import torch

from verl.observe.metrics import Metric


def test_metrics_after_a_second_attempt_are_those_of_one(tools):
    def counted(output, micro):
        loss, _ = tools.policy_loss(output, micro)
        tokens = micro.batch["response_mask"].sum()
        return loss, {
            "loss": Metric(loss.detach(), "sum"),
            "tokens": Metric(tokens, "sum"),
            "mean": Metric((output.log_probs.detach()).sum() / tokens.clamp(min=1), "mean", tokens),
        }

    model, batch = tools.model(), tools.batch()
    plain = tools.engine(model=copy.deepcopy(model)).forward_backward(batch, counted)
    engine = tools.engine(model=model, role={"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 18})
    run, attempts = engine.passes.run, []

    def small(described, options):
        attempts.append(described.rows)
        if (
            described.rows > 1 and len(attempts) > 1
        ):  # the first micro-batch of the first attempt gets through
            raise torch.OutOfMemoryError("injected: out of memory")
        return run(described, options)

    engine.passes.run = small
    found = engine.forward_backward(batch, counted)
    assert max(attempts[1:]) > 1 and attempts[-6:] == [1] * 6, (
        "something did not fit behind something that did"
    )
    for name, metric in plain.items():
        assert float(found[name].value) == pytest.approx(float(metric.value), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("granite", {"logits_scaling": 4.0}), ("cohere", {"logit_scale": 0.25})],
)
def test_logits_that_a_model_scales_are_scaled(tools, name, changes):
    model = tools.model(name, **changes)
    batch = tools.batch(holes=True)
    t = batch.batch
    attended, ids = t["attention_mask"], t["input_ids"]
    with torch.no_grad():
        logits = model(
            input_ids=ids, attention_mask=attended, position_ids=(attended.cumsum(-1) - 1).clamp(min=0)
        ).logits
    width = t["response_mask"].shape[1]
    each = (logits[:, :-1] / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)[:, -width:]
    answers = tools.engine(model=model).log_probs(batch, temperature=0.7)
    torch.testing.assert_close(answers["log_probs"], each * t["response_mask"], atol=1e-4, rtol=1e-4)
    assert each.std() > 0.1, "the scale matters"
