"""Common beginnings of rows are computed once, and nothing else changes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data.proto import DataProto
from verl.models.packing import pack_shared
from verl.models.shared_prefixes import FEWEST_SHARED, PrefixTree, prompt_lengths

CPU = torch.device("cpu")
INPUTS = ("input_ids", "attention_mask", "response_mask")


def batch_of(rows: list[tuple[list[int], list[int]]], seed: int = 0) -> DataProto:
    """Of prompts and responses, prompts padded on the left; every fifth response token but the first has no output."""
    generator = torch.Generator().manual_seed(seed)
    prompt, width = max(len(p) for p, _ in rows), max(len(r) for _, r in rows)
    ids = torch.zeros(len(rows), prompt + width, dtype=torch.long)
    attended, wanted = torch.zeros_like(ids), torch.zeros(len(rows), width, dtype=torch.long)
    for at, (p, r) in enumerate(rows):
        start = prompt - len(p)
        ids[at, start : prompt + len(r)] = torch.tensor(p + r)
        attended[at, start : prompt + len(r)] = 1
        wanted[at, : len(r)] = 1
        wanted[at, 4::5] = 0
    values = {name: torch.randn(wanted.shape, generator=generator) for name in ("advantages", "returns")}
    tensors = {"input_ids": ids, "attention_mask": attended, "response_mask": wanted, **values}
    return DataProto.from_dict(tensors=tensors)


def groups(vocabulary: int = 60, seed: int = 0, system: int = 9, shuffled: bool = True) -> DataProto:
    """Groups of unequal sizes behind one system prompt; responses that begin alike, are equal or a beginning of
    another; a conversation whose rows continue one another; a row by itself."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, vocabulary, (count,), generator=generator).tolist()

    begin, rows = tokens(system), []
    for prompt, responses in ((12, (3, 5, 9, 1)), (2, (4, 4)), (16, (7, 2, 6))):
        asked = begin + tokens(prompt)
        rows += [(asked, tokens(count)) for count in responses]
    asked, answer = begin + tokens(10), tokens(10)
    rows += [(asked, answer), (asked, answer), (asked, answer[:9]), (asked, answer[:9] + tokens(3))]
    turn = asked + tokens(2)
    for count in (3, 8, 4):
        rows.append((turn, reply := tokens(count)))
        turn = turn + reply + tokens(2)
    rows.append((tokens(3), tokens(4)))
    if shuffled:
        rows = [rows[at] for at in torch.randperm(len(rows), generator=generator).tolist()]
    return batch_of(rows, seed)


def tokens_of(batch: DataProto) -> list[tuple[int, ...]]:
    masks = batch.batch["attention_mask"].bool()
    return [tuple(ids[mask].tolist()) for ids, mask in zip(batch.batch["input_ids"], masks, strict=True)]


def beginnings(rows: list[tuple[int, ...]]) -> int:
    """How many different beginnings they have: the fewest tokens a pack can have."""
    return len({row[: at + 1] for row in rows for at in range(len(row))})


def checked_tree(rows: list[list[int]]) -> int:
    """The tokens of a tree over the rows, whose nodes must hold each token of each row once."""
    width = max(len(row) for row in rows)
    ids, mask = np.zeros((2, len(rows), width), dtype=np.int64)
    for at, row in enumerate(rows):
        ids[at, width - len(row) :], mask[at, width - len(row) :] = row, 1
    tree = PrefixTree.of(ids, mask)
    covered: list[list[int]] = [[] for _ in rows]
    for node in tree.nodes():
        members = tree.order[node.first : node.last].tolist()
        assert len({tuple(rows[row][node.start : node.end]) for row in members}) == 1
        for row in members:
            assert len(covered[row]) == node.start, "a node comes after those it continues"
            covered[row] += rows[row][node.start : node.end]
    assert covered == rows
    computed = sum(node.end - node.start for node in tree.nodes())
    assert computed <= tree.costs().sum()
    return computed


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 14), st.lists(st.integers(0, 2), min_size=1, max_size=8)),
        min_size=1,
        max_size=12,
    )
)
def test_the_nodes_of_a_tree_are_its_rows(drawn):
    bases = [[0] * 14, [256] * 14, [0, 1] * 7]  # numbers with bytes of zero sort as any others
    rows = [bases[base][:length] + rest for base, length, rest in drawn]
    computed, fewest = checked_tree(rows), beginnings([tuple(row) for row in rows])
    assert fewest <= computed <= fewest + (FEWEST_SHARED - 1) * len(rows)


def test_a_common_beginning_is_in_the_pack_once():
    batch = groups()
    packed = pack_shared(*(batch.batch[name] for name in INPUTS), CPU)
    rows = tokens_of(batch)
    computed = packed.input_ids.numel()
    assert computed + packed.repeated == sum(map(len, rows))
    assert beginnings(rows) <= computed < beginnings(rows) + 20 < sum(map(len, rows)) / 2
    wanted = batch.batch["response_mask"].bool()
    width = wanted.shape[1]
    found = packed.unpack(packed.target.float()).long()
    assert torch.equal(found[wanted], batch.batch["input_ids"][:, -width:][wanted])
    positions = packed.unpack(packed.sources_of(packed.position_ids[0, :, None].float())[:, 0]).long()
    expected = batch.batch["attention_mask"].cumsum(1)[:, -width:] - 2
    assert torch.equal(positions[wanted], expected[wanted])


def both(tools, model, batch, kind="actor", role=None, **options):
    """Outputs and gradients with the key off and on."""
    found = []
    for shares in (False, True):
        engine = tools.engine(kind, copy.deepcopy(model), role, share_prefixes=shares, **options)
        if kind == "critic":
            outputs = {"values": engine.values(batch)}
            engine.forward_backward(batch, tools.value_loss)
        else:
            outputs = engine.log_probs(batch, temperature=0.7, with_entropy=True)
            engine.forward_backward(batch, tools.policy_loss, temperature=0.7, with_entropy=True)
        found.append({**outputs, **tools.gradients(engine)})
    return found


def worst(plain, shared) -> float:
    """The largest difference of a tensor, relative to its norm or a hundredth of the largest (the gradient of a key's
    bias is zero but for rounding)."""
    assert plain.keys() == shared.keys()
    smallest = max(value.norm() for value in plain.values()) / 100
    gaps = [
        (plain[name] - shared[name]).norm() / torch.maximum(plain[name].norm(), smallest) for name in plain
    ]
    return float(torch.stack(gaps).max())


def test_outputs_and_gradients_are_those_of_separate_rows(tools, architecture):
    plain, shared = both(tools, tools.model(architecture), groups())
    # The experts of gpt_oss are steep: in float32 their rounding alone is above the bound of the others.
    assert worst(plain, shared) < (3e-6 if architecture == "gpt_oss" else 1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_gradient_checkpointing": True},
        {"lora_rank": 4, "role": {"ppo_micro_batch_size_per_gpu": 4}},
        {"kind": "critic"},
    ],
    ids=["recomputed", "lora", "critic"],
)
def test_with_what_else_a_pass_may_do(tools, options):
    plain, shared = both(tools, tools.model("llama"), groups(), **options)
    assert worst(plain, shared) < 1e-6


def test_in_double_precision_nothing_differs_and_two_passes_are_equal(tools):
    results = [pass_in_double(tools, shares) for shares in (False, True, True)]
    assert worst(*results[:2]) < 1e-12
    assert all(torch.equal(results[1][name], results[2][name]) for name in results[1])


def pass_in_double(tools, shares: bool):
    """The hidden states that predict the targets and the gradients of their products with the advantages, of a model
    without float32 inside."""
    from verl.models.packing import hidden_of_targets

    batch = groups()
    engine = tools.engine(model=tools.model("phi"), share_prefixes=shares)
    module = tools.module(engine).double()
    packed = tools.runner(engine).pack(batch)
    assert bool(packed.repeated) == shares
    hidden = packed.unpack(hidden_of_targets(module, packed))
    (hidden * batch.batch["advantages"][..., None].double()).sum().backward()
    grads = {name: param.grad for name, param in module.named_parameters() if param.grad is not None}
    return {"hidden": hidden.detach(), **grads}


CUTS = [
    {"ppo_micro_batch_size_per_gpu": 1},
    {"ppo_micro_batch_size_per_gpu": 5},
    {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 40},
    {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 90},
]


@pytest.mark.parametrize("role", CUTS, ids=["row", "rows", "few", "many"])
def test_micro_batches_of_any_size_have_the_same_gradients(tools, role):
    model, batch, sizes = tools.model("llama"), groups(), []
    engines = [
        tools.engine(model=copy.deepcopy(model), role=role, share_prefixes=shares)
        for role, shares in (({}, False), (role, True))
    ]
    runner = tools.runner(engines[1])
    run = runner._model.verl_forward
    runner._model.verl_forward = lambda pack, options: (
        sizes.append((pack.input_ids.numel(), pack.rows)) or run(pack, options)
    )
    for engine in engines:
        engine.forward_backward(batch, tools.policy_loss)
    assert worst(*map(tools.gradients, engines)) < 1e-6
    most = role.get("ppo_max_token_len_per_gpu")
    assert sum(rows for _, rows in sizes) == len(batch)
    assert most is None or all(tokens <= most or rows == 1 for tokens, rows in sizes)


def test_a_group_stays_together_where_it_fits(tools):
    batch = groups()
    engine = tools.engine(
        model=tools.model(), role={"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 70}
    )
    units, counts = tools.runner(engine).units(batch, "train")
    rows = tokens_of(batch)
    prompts = prompt_lengths(*(batch.batch[name].numpy() for name in INPUTS[1:]))
    asked: dict[tuple[int, ...], set[int]] = {}
    for number, unit in enumerate(units):
        assert sum(counts[row] for row in unit) <= 70
        assert beginnings([rows[row] for row in unit]) <= sum(counts[row] for row in unit)
        for row in unit:
            asked.setdefault(rows[row][: prompts[row]], set()).add(number)
    assert all(len(numbers) == 1 for prompt, numbers in asked.items() if len(prompt) > 12)
    assert sum(counts) < 0.75 * sum(map(len, rows))


def test_the_share_that_is_not_computed_is_a_metric(tools):
    batch = groups()
    rows = tokens_of(batch)
    for shares in (True, False):
        engine = tools.engine(model=tools.model(), share_prefixes=shares)
        found = engine.forward_backward(batch, tools.policy_loss).get("perf/shared_tokens/actor")
        assert (found is not None) == shares
        if found:
            saved = 1 - beginnings(rows) / sum(map(len, rows))
            assert saved - 0.05 < found.value <= saved


def together(batch: DataProto, rows: int = 2) -> DataProto:
    return DataProto(dict(batch.batch), {}, {**batch.meta_info, "rows_together": rows})


@pytest.mark.parametrize(
    "size", [{"ppo_micro_batch_size_per_gpu": 1}, {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 60}]
)
def test_a_pair_is_never_cut(tools, size):
    batch, seen = together(groups()), []
    batch = batch[list(range(len(batch) // 2 * 2))]

    def loss(output, micro):
        assert len(micro) % 2 == 0
        seen.extend(micro.batch["returns"].tolist())
        return tools.policy_loss(output, micro)

    model = tools.model("llama")
    whole, cut = (tools.engine(model=copy.deepcopy(model), role=role) for role in ({}, size))
    whole.forward_backward(batch, tools.policy_loss, with_entropy=True)
    cut.forward_backward(batch, loss, with_entropy=True)
    position = {tuple(row): at for at, row in enumerate(batch.batch["returns"].tolist())}
    order = [position[tuple(row)] for row in seen]
    assert sorted(order) == list(range(len(batch)))
    assert all(order[at] % 2 == 0 and order[at + 1] == order[at] + 1 for at in range(0, len(order), 2))
    assert worst(tools.gradients(whole), tools.gradients(cut)) < 1e-6


def test_rows_without_anything_in_common_and_padding_rows():
    """Padding rows are one token each, which is less than is worth sharing."""
    ids = torch.tensor([[5, 0, 0], [5, 0, 0]])
    attended = torch.tensor([[1, 0, 0], [1, 0, 0]])
    packed = pack_shared(ids, attended, torch.zeros(2, 2, dtype=torch.long), CPU)
    assert packed.input_ids.tolist() == [[5, 5]] and packed.repeated == 0
