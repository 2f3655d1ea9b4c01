"""Rotary frequencies that depend on the length of a sequence: each row has those it has alone in transformers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from verl.models.introspection import checkpoint_contexts, per_row, position_limit, row_lengths

LIMIT = 16
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS = {
    "longrope": (
        "phi3",
        {
            "original_max_position_embeddings": LIMIT,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": LIMIT,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "dynamic": ("llama", {"max_position_embeddings": LIMIT, "rope_parameters": DYNAMIC}),
    "by_layer": (
        "gemma3_text",
        {
            "max_position_embeddings": LIMIT,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": DYNAMIC,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
LENGTHS = [(4, 6), (4, 14), (4, 30), (4, 12), (4, 30), (3, 5)]
"""Below, slightly beyond, far beyond and at the limit; two rows are equally long."""


@pytest.fixture(params=MODELS)
def model(request, tools):
    architecture, changes = MODELS[request.param]
    return tools.model(architecture, **changes)


def alone(model, batch):
    """Log-probs [B, T] of each row by itself, by a copy that has seen nothing else, and the gradients of their sum
    with the batch's advantages."""
    wanted = batch.batch["response_mask"]
    found = torch.zeros(wanted.shape)
    gradients: dict[str, torch.Tensor] = {}
    for row in range(len(batch)):
        stock = copy.deepcopy(model).eval()
        attended = batch.batch["attention_mask"][row].bool()
        ids = batch.batch["input_ids"][row][attended][None]
        logs = torch.log_softmax(stock(input_ids=ids, use_cache=False).logits[0, :-1], dim=-1)
        each = logs.gather(1, ids[0, 1:, None]).squeeze(1)[-int(wanted[row].sum()) :]
        found[row][wanted[row].bool()] = each.detach()
        (-(each * batch.batch["advantages"][row][wanted[row].bool()]).sum() / wanted.sum()).backward()
        for name, param in stock.named_parameters():
            if param.grad is not None:
                gradients[name] = gradients.get(name, 0.0) + param.grad
    return found, gradients


def check(engine, tools, batch, expected, gradients):
    torch.testing.assert_close(engine.log_probs(batch)["log_probs"], expected, rtol=1e-4, atol=2e-5)
    engine.forward_backward(batch, tools.policy_loss)
    torch.testing.assert_close(tools.gradients(engine), gradients, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("form", ["packed", "padded", "recomputed"])
def test_a_row_has_the_log_probs_and_gradients_it_has_alone(tools, model, form):
    batch = tools.batch(LENGTHS)
    expected, gradients = alone(model, batch)
    options = {"use_remove_padding": form != "padded", "enable_gradient_checkpointing": form == "recomputed"}
    engine = tools.engine(model=model, role={"ppo_micro_batch_size_per_gpu": 6}, **options)
    assert engine.info.packed == (form != "padded")
    check(engine, tools, batch, expected, gradients)


def test_a_row_does_not_depend_on_what_ran_before(tools, model):
    batch = tools.batch(LENGTHS)
    expected, _ = alone(model, batch)
    engine = tools.engine(model=model, role={"ppo_micro_batch_size_per_gpu": 1})
    for row in (1, 2, 1, 3, 0, 1):
        found = engine.log_probs(batch[[row]])["log_probs"]
        torch.testing.assert_close(found[0], expected[row], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("second", [8, 30])
def test_a_common_beginning_is_computed_once_only_where_both_rows_have_its_frequencies(tools, model, second):
    batch = tools.batch([(8, 7), (8, second), (8, 5), (8, 6)])
    for row in (1, 3):
        batch.batch["input_ids"][row, :8] = batch.batch["input_ids"][row - 1, :8]
    expected, gradients = alone(model, batch)
    batch.meta_info["rows_together"] = 2
    engine = tools.engine(model=model, role={"ppo_micro_batch_size_per_gpu": 2})
    sizes = []
    run = model.verl_forward
    model.verl_forward = lambda pack, options: sizes.append(pack.input_ids.numel()) or run(pack, options)
    check(engine, tools, batch, expected, gradients)
    attended = int(batch.batch["attention_mask"].sum())
    assert sizes == [attended if second == 30 else attended - 16] * 2


def test_ranks_that_split_a_row_use_the_frequencies_of_the_whole(tools, model):
    """Neither the first nor the second half of a pack has all positions of its rows."""
    rotary = next(
        module for module in model.modules() if position_limit(module) and hasattr(module, "rope_type")
    )
    layer = ("full_attention",) if isinstance(rotary.rope_type, dict) else ()
    stock = copy.deepcopy(rotary)
    per_row(model)
    lengths = [10, 34, 18]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    each = np.repeat(lengths, lengths)[None]
    x = torch.zeros(1, 1, 8)
    expected = torch.cat(
        [copy.deepcopy(stock)(x, torch.arange(length)[None], *layer)[0] for length in lengths], dim=1
    )
    for part in (slice(0, 31), slice(31, 62)):
        with row_lengths(each[:, part]):
            found = rotary(x, positions[:, part], *layer)[0]
        torch.testing.assert_close(found, expected[:, part], rtol=0, atol=0)


def test_a_layer_that_is_recomputed_sees_the_lengths_it_was_computed_with(tools):
    architecture, changes = MODELS["dynamic"]
    model = tools.model(architecture, **changes)
    per_row(model)
    seen = []

    def layer(x):
        seen.append(model.model.rotary_emb(x, torch.arange(18)[None])[0])
        return (x * seen[-1].sum()).square()

    x = torch.ones(1, requires_grad=True)
    with row_lengths(np.full((1, 18), 34)):
        out = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts)
    out.backward()
    assert len(seen) == 2
    torch.testing.assert_close(*seen, rtol=0, atol=0)
    assert not torch.equal(seen[0], model.model.rotary_emb(x, torch.arange(18)[None])[0])
