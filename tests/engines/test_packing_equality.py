"""Packed equals padded equals one by one, for every architecture."""

from __future__ import annotations

import copy

import pytest
import torch

TOLERANCE = 1e-5


def one_by_one(model, batch, temperature):
    """Plain Hugging Face, one unpadded sequence at a time, logits and all: the reference for everything else."""
    width = batch.batch["response_mask"].shape[1]
    found = {name: torch.zeros(len(batch), width) for name in ("log_probs", "entropy", "sum_pi_squared")}
    model.set_attn_implementation("eager")
    for row in range(len(batch)):
        attended = batch.batch["attention_mask"][row].bool()
        ids = batch.batch["input_ids"][row][attended].unsqueeze(0)
        logs = torch.log_softmax(model(ids).logits[0, :-1].float() / temperature, -1)
        count = int(attended[-width:].sum())
        tail = logs[-count:]
        mask = batch.batch["response_mask"][row, :count]
        found["log_probs"][row, :count] = tail.gather(1, ids[0, -count:, None]).squeeze(1) * mask
        found["entropy"][row, :count] = -(tail.exp() * tail).sum(-1) * mask
        found["sum_pi_squared"][row, :count] = tail.exp().square().sum(-1) * mask
    return found


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_outputs_equal_one_by_one(tools, architecture, packed):
    model = tools.model(architecture)
    reference = copy.deepcopy(model).eval()
    batch = tools.batch(holes=True)
    engine = tools.engine(model=model, use_remove_padding=packed, role={"ppo_micro_batch_size_per_gpu": 4})
    assert engine.info.packed == packed
    out = engine.log_probs(batch, temperature=0.7, with_entropy=True, with_sum_pi_squared=True)
    expected = one_by_one(reference, batch, 0.7)
    for name, values in expected.items():
        torch.testing.assert_close(out[name], values.detach(), rtol=TOLERANCE, atol=TOLERANCE)


def test_gradients_equal_one_by_one(tools, architecture):
    model = tools.model(architecture)
    reference = copy.deepcopy(model).eval()
    batch = tools.batch(holes=True)
    mask = batch.batch["response_mask"]
    found = one_by_one(reference, batch, 0.7)
    per_token = -found["log_probs"] * batch.batch["advantages"] - 0.3 * found["entropy"]
    ((per_token * mask).sum() / mask.sum()).backward()
    expected = {name: param.grad for name, param in reference.named_parameters() if param.grad is not None}
    scale = max(float(grad.abs().max()) for grad in expected.values())
    for packed in (True, False):
        engine = tools.engine(model=copy.deepcopy(model), use_remove_padding=packed)
        engine.forward_backward(batch, tools.policy_loss, temperature=0.7, with_entropy=True)
        own = tools.gradients(engine)
        for name, grad in expected.items():
            torch.testing.assert_close(own[name], grad, rtol=1e-4, atol=TOLERANCE * max(scale, 1.0), msg=name)


def test_values_and_their_gradients_do_not_depend_on_packing(tools, architecture):
    model = tools.model(architecture)
    batch = tools.batch(holes=True)
    results = []
    for packed in (True, False):
        engine = tools.engine("critic", model=copy.deepcopy(model), use_remove_padding=packed)
        with torch.no_grad():
            tools.module(engine).head.weight.copy_(torch.linspace(-1, 1, 32)[None])
        values = engine.values(batch)
        assert values.abs().sum() > 0
        engine.forward_backward(batch, tools.value_loss)
        results.append((values, tools.gradients(engine)))
    (values, grads), (padded_values, padded_grads) = results
    torch.testing.assert_close(values, padded_values, rtol=TOLERANCE, atol=TOLERANCE)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, padded_grads[name], rtol=1e-4, atol=1e-4, msg=name)


def test_a_model_that_caps_its_scores_is_not_padded_with_sdpa_which_leaves_the_cap_out(tools):
    model = tools.model("gemma2")
    model.config._attn_implementation = "sdpa"
    engine = tools.engine(model=model, use_remove_padding=False)
    assert tools.module(engine).config._attn_implementation == "eager"


def test_a_sequence_does_not_see_its_neighbours(tools, architecture):
    """Bit-equal, not nearly equal: the other sequences' numbers must not be in the arithmetic at all. (Experts
    multiply all their tokens at once, in shapes that depend on the routing: there the last bit may differ.)"""
    engine = tools.engine(model=tools.model(architecture))
    batch = tools.batch()
    before = engine.log_probs(batch)["log_probs"]
    changed = batch[list(range(len(batch)))]
    ids = changed.batch["input_ids"].clone()
    ids[2] = (ids[2] + 5) % tools.vocab
    changed.batch["input_ids"] = ids
    after = engine.log_probs(changed)["log_probs"]
    others = [0, 1, 3, 4, 5]
    if architecture == "qwen3_moe":
        torch.testing.assert_close(before[others], after[others], rtol=0, atol=1e-6)
    else:
        assert torch.equal(before[others], after[others])
    assert not torch.equal(before[2], after[2])


def test_positions_start_at_zero_in_every_sequence(tools):
    """Learned absolute positions would show a shift at once."""
    model = tools.model("gpt2")
    engine = tools.engine(model=model)
    pack = tools.runner(engine).pack(tools.batch())
    lengths = pack.attention.lengths
    assert pack.position_ids[0].tolist() == [at for length in lengths for at in range(length)]


@pytest.mark.parametrize("cut", [{"ppo_micro_batch_size_per_gpu": 1}, {"ppo_micro_batch_size_per_gpu": 4}])
def test_gradients_do_not_depend_on_the_cut(tools, cut):
    model = tools.model()
    batch = tools.batch(holes=True)
    whole = tools.engine(model=copy.deepcopy(model))
    whole.forward_backward(batch, tools.policy_loss, with_entropy=True)
    budget = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 14}
    for role in (cut, budget):
        engine = tools.engine(model=copy.deepcopy(model), role=role)
        engine.forward_backward(batch, tools.policy_loss, with_entropy=True)
        for name, grad in tools.gradients(whole).items():
            torch.testing.assert_close(tools.gradients(engine)[name], grad, rtol=1e-4, atol=TOLERANCE)


def test_tied_embeddings_get_both_gradients(tools):
    model = tools.model(tie_word_embeddings=True)
    reference = copy.deepcopy(model).eval()
    batch = tools.batch()
    mask = batch.batch["response_mask"]
    expected = one_by_one(reference, batch, 1.0)["log_probs"]
    ((-expected * batch.batch["advantages"] * mask).sum() / mask.sum()).backward()
    engine = tools.engine(model=model)
    engine.forward_backward(batch, tools.policy_loss)
    torch.testing.assert_close(
        tools.gradients(engine)["model.embed_tokens.weight"],
        reference.model.embed_tokens.weight.grad,
        rtol=1e-4,
        atol=TOLERANCE,
    )
    engine.optimizer_step()
    assert tools.module(engine).lm_head.weight is tools.module(engine).model.embed_tokens.weight


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
