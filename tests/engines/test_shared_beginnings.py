"""Rows that stay together: their common beginning is computed once, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch

from verl.data.proto import DataProto
from verl.models.packing import pack_shared, token_counts


def pairs(vocabulary: int = 60, seed: int = 0) -> DataProto:
    """Pairs of unequal lengths whose rows begin alike: with a long and a short beginning, with answers that begin alike
    too, one a beginning of the other, none in common; padded on both sides, with holes in the mask."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(6, 3, 5, 0), (1, 4, 2, 0), (4, 6, 6, 3), (5, 2, 4, 2), (0, 3, 4, 0), (4, 6, 6, 0)]
    length, width = 14, 9
    ids = torch.zeros(2 * len(shapes), length, dtype=torch.long)
    attended, wanted = torch.zeros_like(ids), torch.zeros(2 * len(shapes), width, dtype=torch.long)
    for number, (prompt, first, second, alike) in enumerate(shapes):
        begin = torch.randint(3, vocabulary, (prompt,), generator=generator)
        same = torch.randint(3, vocabulary, (alike,), generator=generator)
        for side, count in enumerate((first, second)):
            rest = torch.randint(3, vocabulary, (count - alike,), generator=generator)
            # The first tokens that differ do: 0 and 1 are not drawn.
            rest[:1] = side
            row, tokens = 2 * number + side, torch.cat([begin, same, rest])
            start = length - width - min(prompt, length - width)
            ids[row, start : start + len(tokens)] = tokens
            attended[row, start : start + len(tokens)] = 1
            learned = torch.ones(len(tokens), dtype=torch.long)
            learned[: max(prompt, 1)] = 0
            learned[prompt + 1 : prompt + 2] = side
            whole = torch.zeros(length, dtype=torch.long)
            whole[start : start + len(tokens)] = learned
            wanted[row] = whole[length - width :]
    advantages = torch.randn(wanted.shape, generator=generator) * wanted
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attended,
            "response_mask": wanted,
            "advantages": advantages,
        }
    )


def together(batch: DataProto, rows: int = 2) -> DataProto:
    return DataProto(dict(batch.batch), {}, {**batch.meta_info, "rows_together": rows})


def test_a_common_beginning_is_in_the_pack_once():
    batch = pairs()
    names = ("input_ids", "attention_mask", "response_mask")
    packed = pack_shared(*(batch.batch[name] for name in names), torch.device("cpu"), 2)
    counts = token_counts(batch.batch["input_ids"], batch.batch["attention_mask"], 2)
    shared = [6, 1, 7, 7, 0, 4]
    lengths = batch.batch["attention_mask"].sum(1).tolist()
    assert counts[::2] == lengths[::2]
    assert [a - b for a, b in zip(lengths[1::2], counts[1::2], strict=True)] == shared
    assert packed.input_ids.numel() == sum(lengths) - sum(shared)
    wanted = batch.batch["response_mask"].bool()
    assert torch.equal(
        packed.unpack(packed.target.float())[wanted].long(), batch.batch["input_ids"][:, -9:][wanted]
    )


def test_outputs_and_gradients_are_those_of_separate_rows(tools, architecture):
    model = tools.model(architecture)
    batch = pairs()
    results = []
    for rows in (1, 2):
        engine = tools.engine(model=copy.deepcopy(model))
        out = engine.log_probs(together(batch, rows), temperature=0.7, with_entropy=True)
        engine.forward_backward(together(batch, rows), tools.policy_loss, temperature=0.7, with_entropy=True)
        results.append((out, tools.gradients(engine)))
    (out, grads), (shared_out, shared_grads) = results
    for name, values in out.items():
        torch.testing.assert_close(shared_out[name], values, rtol=1e-5, atol=1e-5)
    scale = max(float(grad.abs().max()) for grad in grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(shared_grads[name], grad, rtol=1e-4, atol=1e-5 * max(scale, 1.0), msg=name)


@pytest.mark.parametrize(
    "size", [{"ppo_micro_batch_size_per_gpu": 1}, {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 20}]
)
def test_a_pair_is_never_cut(tools, size):
    batch, seen = together(pairs()), []

    def loss(output, micro):
        assert len(micro) % 2 == 0
        seen.extend(micro.batch["input_ids"].tolist())
        return tools.policy_loss(output, micro)

    model = tools.model("llama")
    whole, cut = (tools.engine(model=copy.deepcopy(model), role=role) for role in ({}, size))
    whole.forward_backward(batch, tools.policy_loss, with_entropy=True)
    cut.forward_backward(batch, loss, with_entropy=True)
    position = {tuple(row): at for at, row in enumerate(batch.batch["input_ids"].tolist())}
    order = [position[tuple(row)] for row in seen]
    assert sorted(order) == list(range(len(batch)))
    assert all(order[at] % 2 == 0 and order[at + 1] == order[at] + 1 for at in range(0, len(order), 2))
    expected, found = tools.gradients(whole), tools.gradients(cut)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5, msg=name)


def test_rows_without_anything_in_common_and_padding_rows():
    """Padding rows are one token each, alike in a pair: nothing follows their beginning."""
    ids = torch.tensor([[5, 0, 0], [5, 0, 0]])
    attended = torch.tensor([[1, 0, 0], [1, 0, 0]])
    packed = pack_shared(ids, attended, torch.zeros(2, 2, dtype=torch.long), torch.device("cpu"), 2)
    assert packed.input_ids.tolist() == [[5, 5]]
