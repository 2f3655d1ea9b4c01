"""Sequences split over ranks give what one rank gives."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from packaging.version import parse as version

from verl.engines.build import assemble
from verl.engines.settings import read_settings
from verl.engines.sharding import EngineRanks
from verl.errors import ConfigError, ModelError
from verl.models.attention import PackedAttention
from verl.models.packing import pack, pack_shared, part_of
from verl.models.ulysses import SequenceGroup, check_heads

WORKER = Path(__file__).with_name("ulysses_worker.py")
CPU = torch.device("cpu")
INPUTS = ("input_ids", "attention_mask", "response_mask")


def parts_of(batch, size, packing=pack):
    whole = packing(*(batch.batch[name] for name in INPUTS), CPU)
    return whole, [part_of(whole, SequenceGroup(None, rank, size, 1.0), CPU) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("lengths", [None, [(1, 1)], [(9, 12)]], ids=["ragged", "two_tokens", "one_sequence"])
def test_parts_are_the_pack(tools, lengths, size):
    """Also where a cut falls inside a sequence, between a source and its target, or a part is only padding."""
    batch = tools.batch(lengths, holes=True) if lengths else tools.batch(holes=True)
    whole, parts = parts_of(batch, size)
    tokens = whole.input_ids.shape[1]
    padding = -tokens % size
    assert len({part.input_ids.shape for part in parts}) == 1
    ids = torch.cat([part.input_ids for part in parts], dim=1)
    positions = torch.cat([part.position_ids for part in parts], dim=1)
    assert torch.equal(ids[:, :tokens], whole.input_ids) and ids.shape[1] == tokens + padding
    assert torch.equal(positions[:, :tokens], whole.position_ids)
    assert positions[0, tokens:].tolist() == list(range(padding))
    for part in parts:
        assert list(part.attention.whole.lengths) == [*whole.attention.lengths, *[padding] * bool(padding)]
        assert torch.equal(
            part.input_ids[0, part.source], whole.input_ids[0, whole.source][_own(whole, part)]
        )
    assert torch.equal(torch.cat([part.target for part in parts]), whole.target[_order(whole)])
    assert torch.equal(torch.cat([part.slot for part in parts]), whole.slot[_order(whole)])


@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_a_pack_with_shared_beginnings(tools, size):
    whole, parts = parts_of(tools.groups(), size, pack_shared)
    tokens = whole.input_ids.shape[1]
    padding = -tokens % size
    assert torch.equal(torch.cat([part.input_ids for part in parts], 1)[:, :tokens], whole.input_ids)
    for part in parts:
        attention, own = part.attention.whole, _own(whole, part)
        assert attention.segments == (*whole.attention.segments, *[(padding, padding)] * bool(padding))
        assert attention.key_index.max() == tokens + padding - 1 and part.repeated == whole.repeated
        found = part.sources_of(part.input_ids[0, :, None])[:, 0]
        assert torch.equal(found, whole.input_ids[0, whole.source][own])
        assert torch.equal(part.slot, whole.slot[own])


def _order(whole):
    return whole.source.argsort(stable=True)


def _own(whole, part):
    return torch.isin(whole.slot, part.slot)


def test_a_cut_falls_inside_a_sequence(tools):
    """Guards the test above against packs that happen to be cut between sequences."""
    _, parts = parts_of(tools.batch(), 2)
    assert parts[1].position_ids[0, 0] > 0
    last = parts[0].input_ids.shape[1] - 1
    assert last in parts[0].source, "its target is on the other rank"


def test_a_degree_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"=3 does not divide the 4 attention heads .* allowed: 1, 2, 4$"):
        check_heads(4, 3)
    with pytest.raises(ConfigError, match="=2 does not divide the 1 ranks; allowed: 1$"):
        EngineRanks(CPU).sequence_group(2)


@pytest.mark.parametrize(
    ("padding", "error", "message"),
    [
        (True, ConfigError, "model.use_remove_padding is false"),
        (
            False,
            ModelError,
            "does not use transformers' attention interface.* ulysses_sequence_parallel_size=1",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(tools, padding, error, message):
    from verl.config.schema import ActorConfig, ModelConfig

    model = tools.model()
    if not padding:
        model._supports_attention_backend = False
    settings = read_settings(
        "actor", ModelConfig(use_remove_padding=not padding, dtype="float32"), ActorConfig(), device=CPU
    )
    with pytest.raises(error, match=message):
        assemble(model, settings, EngineRanks(CPU), sequence=SequenceGroup(None, 0, 2, 2.0))


def test_a_model_that_fails_the_check_is_refused(tools, monkeypatch):
    """One whose attention goes by transformers' interface but leaks between sequences."""
    from verl.config.schema import ActorConfig, ModelConfig

    plain = PackedAttention.attend

    def leaking(self, call):
        return plain(self, call) + call.v.mean(dim=2).mean()

    monkeypatch.setattr(PackedAttention, "attend", leaking)
    settings = read_settings("actor", ModelConfig(dtype="float32"), ActorConfig(), device=CPU)
    with pytest.raises(ModelError, match="cannot be packed .one sequence changes its neighbour"):
        assemble(tools.model(), settings, EngineRanks(CPU), sequence=SequenceGroup(None, 0, 2, 2.0))


# -- several ranks ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone():
    """Each case by one process, when it is first asked for."""
    spec = importlib.util.spec_from_file_location("ulysses_worker", WORKER)
    assert spec and spec.loader
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    return functools.cache(lambda name: worker.train(worker.CASES[name], 0, 1, 1))


@pytest.fixture(scope="module")
def two(tmp_path_factory, run_ranks):
    names = ["attention", "split_over_all", "half_precision", "out_of_memory"]
    return run_ranks(WORKER, 2, tmp_path_factory.mktemp("two"), names)


@pytest.fixture(scope="module")
def four(tmp_path_factory, run_ranks):
    names = ["attention", "split_over_all", "split_over_two"]
    return run_ranks(WORKER, 4, tmp_path_factory.mktemp("four"), names)


def check_case(ranks, want, degree, name):
    close = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
    for key, values in want["outputs"].items():
        assert values.abs().sum() > 0, f"{name} {key}"
        close(torch.cat([rank["outputs"][key] for rank in ranks[::degree]]), values, msg=f"{name} {key}")
        for at, rank in enumerate(ranks):
            assert torch.equal(rank["outputs"][key], ranks[at - at % degree]["outputs"][key])
    assert sum(rank["loss"] for rank in ranks[::degree]) == pytest.approx(want["loss"], rel=1e-6, abs=1e-6)
    for rank in ranks:
        assert rank["norms"] == pytest.approx(want["norms"], rel=1e-6)
        for part in ("gradients", "weights"):
            assert rank[part].keys() == want[part].keys()
            for key, value in want[part].items():
                close(rank[part][key], value, msg=lambda text, key=key: f"{name} {key}: {text}")


@pytest.mark.slow(seconds=60)
def test_two_ranks_agree_with_one(alone, two):
    ranks = two["split_over_all"]
    for name in ranks[0]:
        check_case([rank[name] for rank in ranks], alone(name), 2, name)


@pytest.mark.extended
@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize(("scenario", "degree"), [("split_over_all", 4), ("split_over_two", 2)])
def test_four_ranks_agree_with_one(alone, four, scenario, degree):
    ranks = four[scenario]
    for name in ranks[0]:
        check_case([rank[name] for rank in ranks], alone(name), degree, name)


@pytest.mark.slow(seconds=5)
def test_half_precision_and_float32_arithmetic(tools, two):
    engine = tools.engine(model=tools.model(), dtype="bfloat16")
    expected = engine.float32_log_probs(tools.batch(holes=True))
    # Before 2.13, a sharded pass that failed cannot be reset.
    always = version(torch.__version__) >= version("2.13")
    for rank in two["half_precision"]:
        if always or rank["exact"] is not None:
            torch.testing.assert_close(rank["exact"], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rank["rounded"], expected, rtol=0.05, atol=0.05)
        assert (rank["rounded"] - expected).abs().max() > 1e-4, "bfloat16 rounds, or nothing was tested"
        assert rank["norm"] > 0


@pytest.mark.slow(seconds=5)
def test_out_of_memory_ends_the_run(two):
    for rank in two["out_of_memory"]:
        assert "cannot be split" in rank["message"] and "ppo_max_token_len_per_gpu" in rank["message"]
