"""The KL to a teacher through the engines: what a teacher gives, and one gradient however the batch is cut."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from verl.models.distillation import HIDDEN, LOG_PROBS, TEACHER_TENSORS, TOKENS, Teacher

TEMPERATURE = 0.7


def kl_loss(output, micro):
    info, mask = micro.meta_info, micro.batch["response_mask"]
    assert not set(TEACHER_TENSORS) & set(micro.batch)  # they are not sent to the device once more
    return (output.kl * mask).sum() / info["batch_num_tokens"] * info["dp_size"], {}


def teach(tools, teacher_model, batch, top_k, kind="reverse", **role):
    """The batch with the teacher's outputs, and what the student's rank has of it."""
    engine = tools.engine("ref", model=copy.deepcopy(teacher_model), role=role)
    vocabulary = engine.info.vocab_size
    found = engine.teacher_outputs(batch, vocabulary=vocabulary, top_k=top_k, temperature=TEMPERATURE)
    taught = replace(batch, batch={**batch.batch, **found})
    return taught, Teacher(kind, vocabulary, engine.output_head() if top_k is None else None)


def gradient(tools, model, batch, teacher, **role):
    """Of all weights as one vector, and the loss."""
    engine = tools.engine(model=copy.deepcopy(model), role=role)
    losses = []

    def loss(output, micro):
        value, metrics = kl_loss(output, micro)
        losses.append(float(value.detach()))
        return value, metrics

    engine.forward_backward(batch, loss, temperature=TEMPERATURE, teacher=teacher)
    return torch.cat([each.flatten() for each in tools.gradients(engine).values()]), sum(losses)


def plain(model, batch):
    """Log-probs [B, T, V] of each next token, by the model's own forward pass, row by row."""
    tensors = batch.batch
    width = tensors["response_mask"].shape[1]
    rows = []
    for ids, attended in zip(tensors["input_ids"], tensors["attention_mask"], strict=True):
        real = attended.bool()
        logits = torch.zeros(len(ids), model.config.vocab_size, dtype=next(model.parameters()).dtype)
        logits[real] = model(input_ids=ids[real][None]).logits[0]
        rows.append(torch.log_softmax(logits / TEMPERATURE, dim=-1)[-width - 1 : -1])
    return torch.stack(rows)


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("student,teacher", [("llama", "qwen2"), ("gemma2", "phi")])
def test_loss_and_gradient_equal_the_models_own(tools, student, teacher, top_k):
    model, teacher_model = tools.model(student), tools.model(teacher, seed=5, hidden_size=48)
    batch = tools.batch(holes=True)
    taught, given = teach(tools, teacher_model, batch, top_k)
    found, loss = gradient(tools, model, taught, given)

    model.eval()
    own = plain(model, batch)
    with torch.no_grad():
        other = plain(teacher_model.eval(), batch)
    if top_k is not None:
        tokens = other.topk(top_k, dim=-1).indices
        rest = torch.ones_like(own, dtype=torch.bool).scatter(-1, tokens, False)
        own, other = (
            torch.cat(
                [x.gather(-1, tokens), x.masked_fill(~rest, -torch.inf).logsumexp(-1, keepdim=True)], -1
            )
            for x in (own, other)
        )
    mask = batch.batch["response_mask"]
    expected = ((own.exp() * (own - other)).sum(-1) * mask).sum() / mask.sum()
    wanted = torch.autograd.grad(expected, [each for each in model.parameters() if each.requires_grad])
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    torch.testing.assert_close(found, torch.cat([each.flatten() for each in wanted]), rtol=1e-3, atol=2e-4)


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen_shannon"])
def test_micro_batches_order_and_padding_do_not_matter(tools, kind, top_k):
    model, teacher_model = tools.model(num_hidden_layers=1), tools.model(num_hidden_layers=1, seed=5)
    batch = tools.batch(holes=True)
    taught, given = teach(tools, teacher_model, batch, top_k, kind)
    whole, loss = gradient(tools, model, taught, given, ppo_micro_batch_size_per_gpu=6)
    assert whole.abs().max() > 1e-3
    order = [3, 0, 5, 1, 4, 2]
    moved, _ = teach(tools, teacher_model, batch[order], top_k, kind, log_prob_micro_batch_size_per_gpu=2)
    for name in moved.batch.keys() & set(TEACHER_TENSORS):
        torch.testing.assert_close(moved.batch[name], taught.batch[name][order], rtol=1e-4, atol=1e-4)
    for rows in (taught, taught[order], moved):
        for role in (
            {"ppo_micro_batch_size_per_gpu": 1},
            {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 16},
        ):
            found, value = gradient(tools, model, rows, given, **role)
            assert value == pytest.approx(loss, rel=1e-5)
            torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


def test_what_a_teacher_gives(tools):
    batch, model = tools.batch(holes=True), tools.model("qwen2")
    mask = batch.batch["response_mask"].bool()
    hidden, given = teach(tools, model, batch, None)
    assert hidden.batch[HIDDEN].shape == (*mask.shape, model.config.hidden_size)
    assert hidden.batch[HIDDEN][mask].any(-1).all() and not hidden.batch[HIDDEN][~mask].any()
    torch.testing.assert_close(given.head.weight, model.lm_head.weight.detach())
    top, _ = teach(tools, model, batch, 3)
    with torch.no_grad():
        best = plain(model.eval(), batch).topk(3, dim=-1)
    assert torch.equal(top.batch[TOKENS][mask].long(), best.indices[mask])
    torch.testing.assert_close(top.batch[LOG_PROBS][mask][:, :3], best.values[mask], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(top.batch[LOG_PROBS][mask].exp().sum(-1), torch.ones(int(mask.sum())))


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen_shannon"])
def test_a_student_equal_to_its_teacher_learns_nothing(tools, kind):
    model = tools.model("gemma2")
    taught, given = teach(tools, model, tools.batch(), None, kind)
    found, loss = gradient(tools, model, taught, given)
    assert loss == pytest.approx(0, abs=1e-6)
    assert found.abs().max() < 1e-5


def test_adapters_learn_from_a_teacher(tools):
    taught, given = teach(tools, tools.model(seed=5), tools.batch(), None)
    engine = tools.engine(model=tools.model(), lora_rank=4, role={"optim.lr": 0.02})
    values = []

    def loss(output, micro):
        value, metrics = kl_loss(output, micro)
        values.append(float(value.detach()))
        return value, metrics

    for _ in range(8):
        engine.forward_backward(taught, loss, temperature=TEMPERATURE, teacher=given)
        engine.optimizer_step()
    assert values[-1] < 0.9 * values[0]
