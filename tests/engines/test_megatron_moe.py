"""The mixture of experts of a Megatron stage against transformers, on one rank and with its experts split."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="needs megatron-core")

from verl.config.parallelism import Layout
from verl.engines.megatron.groups import groups_of
from verl.engines.megatron.model import StageModel
from verl.engines.megatron.places import places
from verl.errors import ModelError
from verl.models.packing import pack

pytestmark = pytest.mark.components

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
SEQUENCES = [[5, 9, 2, 7, 33], [1, 4], [8, 8, 30, 11, 12, 40, 3], [6, 17, 25]]
CASES = {
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": False}),
    "normalised": ("qwen3_moe", {"norm_topk_prob": True}),
    # Rows of these experts do not begin on 16 bytes, which a grouped product needs.
    "odd_sizes": ("qwen3_moe", {"moe_intermediate_size": 13}),
    "some_layers_dense": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
}


def build(case):
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture, changes = CASES[case]
    options = {
        "vocab_size": 43,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4 if case == "some_layers_dense" else 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    if architecture == "qwen3_moe":
        options["moe_intermediate_size"] = 20
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **{**options, **changes})
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager").float()


def pack_of(sequences):
    """All tokens but the first of each sequence are targets."""
    longest = max(map(len, sequences))
    ids, attended = (torch.zeros(len(sequences), longest, dtype=torch.long) for _ in range(2))
    for row, tokens in enumerate(sequences):
        ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        attended[row, longest - len(tokens) :] = 1
    wanted = attended.clone()
    for row, tokens in enumerate(sequences):
        wanted[row, longest - len(tokens)] = 0
    return pack(ids, attended, wanted, torch.device("cpu"))


def stage_of(hf, groups, recompute=False):
    """With the weights of `hf`."""
    model = StageModel(hf, groups, dtype=torch.float32, device=torch.device("cpu"), recompute=recompute)
    state = hf.state_dict()
    for place in places(model):
        begins_and_sizes = enumerate(zip(place.offsets, place.sizes, strict=True))
        value = state[place.name]
        assert value.shape == place.shape
        for dimension, (begin, size) in begins_and_sizes:
            value = value.narrow(dimension, begin, size)
        place.view(model.get_parameter(place.parameter).data).copy_(value)
    return model


def loss_of(log_probs, slots):
    """A different coefficient for each target, whichever rank has it."""
    return (log_probs * torch.sin(1.0 + slots)).sum()


def gradients_of(model):
    return {
        place.name: place.view(model.get_parameter(place.parameter).grad).clone() for place in places(model)
    }


def expected_of(hf, sequences):
    """Log-probs of each sequence's targets and the gradients of their loss, by transformers alone."""
    longest = max(map(len, sequences))
    found = []
    for row, tokens in enumerate(sequences):
        ids = torch.tensor([tokens])
        logs = hf(input_ids=ids).logits[0, :-1].log_softmax(dim=-1)
        found.append(logs.gather(1, ids[0, 1:, None]).squeeze(1))
        slots = row * longest + torch.arange(longest - len(tokens) + 1, longest)
        loss_of(found[-1], slots).backward()
    gradients = {name: parameter.grad for name, parameter in hf.named_parameters()}
    return torch.cat(found).detach(), gradients


@pytest.mark.parametrize("case", CASES)
def test_one_rank_gives_what_transformers_gives(case):
    hf = build(case)
    model = stage_of(hf, groups_of(Layout()))
    table = places(model)
    assert sorted(place.name for place in table) == sorted(hf.state_dict())
    assert sum(
        place.rows * place.view(model.get_parameter(place.parameter))[0].numel() for place in table
    ) == (sum(parameter.numel() for parameter in model.parameters()))
    batch = pack_of(SEQUENCES)
    log_probs = model.verl_forward(batch, None)["log_probs"]
    loss_of(log_probs, batch.slot).backward()
    expected, gradients = expected_of(hf, SEQUENCES)
    torch.testing.assert_close(log_probs[batch.slot.argsort()], expected, **CLOSE)
    for name, own in gradients_of(model).items():
        torch.testing.assert_close(
            own, gradients[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )


def expert_groups(rank, ranks, store):
    """Of a rank in a thread: torch.distributed itself knows one rank per process."""
    groups = copy.copy(groups_of(Layout()))
    groups.layout, groups.ep_rank = Layout(dp=ranks, ep=ranks), rank
    groups.ep = dist.ProcessGroup(store, rank, ranks)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, ranks, timeout=timedelta(seconds=300))
    groups.ep._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return groups


def rank_of(rank, ranks, store, hf, sequences, recompute):
    """Log-probs and gradients of one rank's sequences, with its share of the experts."""
    model = stage_of(hf, expert_groups(rank, ranks, store), recompute)
    own, slots = sequences
    batch = pack_of(own)
    log_probs = model.verl_forward(batch, None)["log_probs"]
    loss_of(log_probs, slots[batch.slot]).backward()
    kinds = {place.name: place.expert for place in places(model)}
    return log_probs[batch.slot.argsort()].detach(), gradients_of(model), kinds


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("case", "ranks"), [("mixtral", 2), ("qwen3_moe", 4), ("odd_sizes", 2)])
def test_experts_split_over_ranks_give_the_same(case, ranks, recompute):
    """Each rank in a thread, with its own gloo process group and its own sequences."""
    hf = build(case)
    groups_of(Layout())  # starts torch.distributed, once
    longest = max(map(len, SEQUENCES))
    cuts = [0, 1, 4] if ranks == 2 else [0, 1, 2, 3, 4]
    shares = []
    for first, last in pairwise(cuts):
        own = SEQUENCES[first:last]
        width = max(map(len, own))
        # Where a target of the rank's own batch is in the batch of all.
        row, column = torch.meshgrid(torch.arange(len(own)), torch.arange(width), indexing="ij")
        shares.append((own, ((row + first) * longest + column + longest - width).flatten()))
    store = dist.HashStore()
    with ThreadPoolExecutor(ranks) as threads:
        found = list(
            threads.map(lambda rank: rank_of(rank, ranks, store, hf, shares[rank], recompute), range(ranks))
        )
    expected, gradients = expected_of(hf, SEQUENCES)
    torch.testing.assert_close(torch.cat([log_probs for log_probs, *_ in found]), expected, **CLOSE)
    for name, whole in gradients.items():
        parts = [own[name] for _, own, _ in found]
        joined = torch.cat(parts) if found[0][2][name] else sum(parts)
        torch.testing.assert_close(joined, whole, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def test_a_rank_and_experts_without_tokens():
    """All tokens of the only rank that has any go to the experts of the other one."""
    groups_of(Layout())  # starts torch.distributed, once
    hf, store = build("qwen3_moe"), dist.HashStore()
    hf.model.layers[0].mlp.gate.weight.data = torch.tensor([-1.0, -1, 1, 1])[:, None].expand(4, 16)

    def layer_of(groups):
        return stage_of(hf, groups).gpt.decoder.layers[0].mlp

    def run(rank):
        layer = layer_of(expert_groups(rank, 2, store))
        x = torch.ones(5 * (1 - rank), 1, 16, requires_grad=True)
        out, _ = layer(x)
        out.sum().backward()
        return out.detach(), x.grad, layer.experts.down_proj.grad

    with ThreadPoolExecutor(2) as threads:
        (out, grad, unused), (nothing, no_grad, used) = threads.map(run, range(2))
    assert nothing.shape == no_grad.shape == (0, 1, 16)
    layer = layer_of(groups_of(Layout()))
    x = torch.ones(5, 1, 16, requires_grad=True)
    expected, _ = layer(x)
    expected.sum().backward()
    torch.testing.assert_close(out, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, x.grad, **CLOSE)
    assert used.any() and not unused.any()
    torch.testing.assert_close(torch.cat([unused, used]), layer.experts.down_proj.grad, **CLOSE)


def test_noise_in_the_router_is_refused():
    hf = build("mixtral")
    hf.config.router_jitter_noise = 0.1
    with pytest.raises(ModelError, match=r"router_jitter_noise is 0\.1"):
        stage_of(hf, groups_of(Layout()))
