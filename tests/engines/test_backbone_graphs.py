"""Captured training passes without a GPU: the padding, the sums of gradients, and when nothing is captured. (On a
device: tests/engines/device_checks.py.)"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.engines import backbone_graphs
from verl.engines.backbone_graphs import BackboneGraphs, attention_inputs, graph_size, padded_lengths
from verl.engines.budget import MicroBatchSize
from verl.models.attention import dense_runs
from verl.models.packing import pack_shared


@pytest.mark.parametrize("lengths", [[1], [64] * 64, [700, 3, 128], [5] * 1000, [1024] * 15 + [1], [3000]])
def test_a_size_holds_its_pack_and_wastes_little(lengths):
    size = graph_size(lengths)
    padded = padded_lengths(lengths, size)
    assert padded[: len(lengths)] == lengths and sum(padded) == size.tokens and len(padded) == size.sequences
    assert max(padded) <= size.longest < 2 * max(max(lengths), 512)
    assert size.tokens <= max(sum(lengths) * 9 / 8, sum(lengths) + 64)
    assert size.sequences <= max(2 * (len(lengths) + 8), size.tokens // 64)


def test_batches_of_one_run_share_few_sizes():
    generator = torch.Generator().manual_seed(0)
    rows = torch.empty(200, 64).log_normal_(5.4, 0.45, generator=generator).clamp(4, 1024).long()
    assert len({graph_size(lengths.tolist()) for lengths in rows}) < 30


def test_mini_batches_of_which_rows_are_left_out_share_few_sizes():
    """Between a quarter and a half of 1,024 rows, which end at 360 tokens at most."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.empty(100, 1024).log_normal_(5.4, 0.3, generator=generator).clamp(60, 360).long()
    counts = torch.randint(256, 512, (100,), generator=generator)
    sizes = {graph_size(row[:count].tolist()) for row, count in zip(rows, counts, strict=True)}
    assert len(sizes) < 20


class Replayed:
    """Stands for a CUDA graph: a replay runs the work again."""

    def __init__(self, work):
        self.replay = torch.enable_grad()(work)


class Recorder:
    fails: str | None = None

    def __init__(self, device):
        pass

    def record(self, work, warm_up=None):
        if Recorder.fails:
            raise RuntimeError(Recorder.fails)
        (warm_up or work)()
        return Replayed(work)


class Adder:
    """Stands for the kernel that adds all gradients."""

    def __init__(self, sums, dtype):
        self.sums = sums

    def launch(self, gradients):
        for total, gradient in zip(self.sums, gradients, strict=bool(gradients)):
            total.add_(gradient)

    def write_table(self):
        pass


def attend(self, call):
    """Of sequences whose bounds are read at each pass, as the kernel does."""
    self.lengths = [length for length in self.cu_seqlens.diff().tolist() if length]
    lengths = [(length, length) for length in self.lengths]
    return dense_runs(call, lengths)


def attend_shared(self, call):
    call = self.inputs.copied(call)
    sides = (bounds.diff().tolist() for bounds in (self.inputs.cu_queries, self.inputs.cu_keys))
    lengths = [segment for segment in zip(*sides, strict=True) if any(segment)]
    used = sum(keys for _, keys in lengths)
    return dense_runs(call.on(call.q, call.k[:, :, :used], call.v[:, :, :used]), lengths)


@pytest.fixture
def pair(tools, monkeypatch):
    """Two engines with the same half-precision weights and micro-batches of three rows; the first one captures."""
    pytest.importorskip("triton")
    from verl.models.kernels import adamw

    monkeypatch.setattr(backbone_graphs, "GraphRecorder", Recorder)
    monkeypatch.setattr(backbone_graphs._FixedAttention, "attend", attend)
    monkeypatch.setattr(backbone_graphs._FixedSharedAttention, "attend", attend_shared)
    monkeypatch.setattr(adamw, "AddAll", Adder)
    monkeypatch.setattr(Recorder, "fails", None)
    role = {"ppo_micro_batch_size_per_gpu": 3, "optim.lr": 1e-2}
    engines = []
    for _ in range(2):
        model = tools.model("llama", tie_word_embeddings=True)
        engines.append(tools.engine(model=model, role=role, dtype="bfloat16"))
    runner = tools.runner(engines[0])
    runner.graphs = BackboneGraphs(runner._model, runner.optimizer, torch.device("cpu"), 1e6)
    return engines


def difference(tools, pair):
    ours, plain = (tools.gradients(engine) for engine in pair)
    assert ours.keys() == plain.keys()
    return max(float((ours[n].float() - plain[n].float()).norm() / plain[n].float().norm()) for n in plain)


def test_gradients_are_those_of_passes_that_are_not_captured(tools, pair):
    """Over two micro-batches, in later steps too; of a tied embedding also the head's part."""
    graphs = tools.runner(pair[0]).graphs
    for seed in range(3):
        for engine in pair:
            engine.forward_backward(tools.batch(seed=seed), tools.policy_loss, with_entropy=True)
        assert difference(tools, pair) < 0.03
        norms = [engine.optimizer_step()["grad_norm"] for engine in pair]
        assert norms[0] == pytest.approx(norms[1], rel=0.02)
    assert len(graphs._passes) == 1, "both micro-batches fit into one size"


def groups(tools, seed):
    """Three rows with one prompt and three with another, in an order of their own."""
    batch = tools.batch([(14, 5), (12, 7), (14, 2), (12, 1), (14, 6), (12, 4)], seed=seed)
    ids = batch.batch["input_ids"]
    ids[2::2, :14], ids[3::2, 2:14] = ids[0, :14], ids[1, 2:14]
    return batch[torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()]


def test_passes_with_shared_beginnings_are_captured(tools, pair):
    graphs = tools.runner(pair[0]).graphs
    for engine in pair:
        tools.runner(engine).sizes["train"] = MicroBatchSize(max_tokens=60)
    for seed in range(4):
        batch = groups(tools, seed)
        for engine in pair:
            found = engine.forward_backward(batch, tools.policy_loss, with_entropy=True)
            assert found["perf/shared_tokens/actor"].value > 0.2
        assert difference(tools, pair) < 0.01
        for engine in pair:
            engine.zero_grad()
    assert len(graphs._passes) == 1 and all(size.keys for size in graphs._passes)


@pytest.mark.parametrize("seed", range(3))
def test_a_size_holds_the_keys_of_shared_beginnings(tools, seed):
    batch = groups(tools, seed).batch
    names = ("input_ids", "attention_mask", "response_mask")
    attention = pack_shared(*(batch[name] for name in names), torch.device("cpu")).attention
    size = graph_size(attention.lengths, attention.key_lengths)
    inputs = attention_inputs(attention, size, torch.device("cpu"))
    cu_queries, cu_keys, rows = (x.numpy() for x in inputs[:3])
    assert cu_queries[-1] == size.tokens and len(cu_queries) == len(cu_keys) == size.sequences + 1
    assert cu_keys[-1] == len(rows) <= size.keys and rows.max() == size.tokens - 1
    assert np.diff(cu_keys).max() <= size.longest and (np.diff(cu_keys) >= np.diff(cu_queries)).all()
    for end, key_end in zip(cu_queries[1:], cu_keys[1:], strict=True):
        assert rows[key_end - 1] == end - 1, "the last key of a segment is its last token"


def test_a_captured_pass_adds_to_one_that_was_not(tools, pair):
    runner = tools.runner(pair[0])
    graphs, runner.graphs = runner.graphs, None
    for engine in pair:
        engine.forward_backward(tools.batch(seed=1), tools.policy_loss)
    runner.graphs = graphs
    for seed in (2, 3):
        for engine in pair:
            engine.forward_backward(tools.batch(seed=seed), tools.policy_loss)
    assert graphs.captured == 1
    assert difference(tools, pair) < 0.03


def test_other_memory_of_the_weights_is_captured_anew(tools, pair):
    engine = pair[0]
    engine.forward_backward(tools.batch(), tools.policy_loss)
    (before,) = tools.runner(engine).graphs._passes.values()
    for param in tools.module(engine).parameters():
        param.data = param.data.clone()
    engine.forward_backward(tools.batch(), tools.policy_loss)
    (after,) = tools.runner(engine).graphs._passes.values()
    assert after is not before


def test_a_model_that_cannot_be_captured_is_launched_and_that_is_said_once(tools, pair, monkeypatch, caplog):
    monkeypatch.setattr(Recorder, "fails", "operation not permitted when stream is capturing\nmore")
    for _ in range(2):
        for engine in pair:
            engine.forward_backward(tools.batch(), tools.policy_loss)
    assert difference(tools, pair) < 0.03
    assert caplog.text.count("cannot be captured as CUDA graphs (operation not permitted") == 1


def micro_gradients(tools, engine, seed=0):
    engine.forward_backward(tools.batch(seed=seed)[[0, 1, 2]], tools.policy_loss)
    found = {name: gradient.float().clone() for name, gradient in tools.gradients(engine).items()}
    engine.zero_grad()
    return found


def test_a_size_is_captured_when_it_is_met_again_and_gives_the_same_numbers(tools, pair):
    graphs = tools.runner(pair[0]).graphs
    launched = micro_gradients(tools, pair[0])
    assert graphs.captured == 0
    replayed = micro_gradients(tools, pair[0])
    assert graphs.captured == 1
    for name, gradient in launched.items():
        torch.testing.assert_close(replayed[name], gradient, rtol=0, atol=0)


def test_passes_beyond_the_memory_share_are_launched_with_the_same_numbers(tools, pair, monkeypatch):
    allocated = iter(range(0, 100_000, 1000))
    monkeypatch.setattr(backbone_graphs, "_allocated", lambda device: next(allocated))
    graphs = tools.runner(pair[0]).graphs
    graphs._most_bytes = 999
    launched = micro_gradients(tools, pair[0])
    again = micro_gradients(tools, pair[0])
    assert graphs.captured == 0
    graphs._most_bytes = 1000
    replayed = micro_gradients(tools, pair[0])
    assert graphs.captured == 1
    for name, gradient in launched.items():
        torch.testing.assert_close(again[name], gradient, rtol=0, atol=0)
        torch.testing.assert_close(replayed[name], gradient, rtol=0, atol=0)


def test_graphs_are_released_when_memory_runs_out(tools, pair):
    runner = tools.runner(pair[0])
    for _ in range(3):
        micro_gradients(tools, pair[0])
    assert runner.graphs.captured == 1

    def fails(rows):
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner.run_or_oom(fails, [0], [5])
    assert runner.graphs.captured == 0


@pytest.mark.parametrize(
    ("layer_weights", "best", "expected"),
    [(3.54e6, 131072, 49152), (46.8e6, 16384, 16384), (15e6, 16384, 11264), (1e6, 16384, 16384)],
)
def test_micro_batches_of_small_models_are_such_that_they_are_captured(
    tools, pair, layer_weights, best, expected
):
    runner = tools.runner(pair[0])
    graphs = BackboneGraphs(runner._model, runner.optimizer, torch.device("cpu"), layer_weights)
    assert graphs.tokens_within(best) == expected
    assert graph_size([128] * (expected // 128)).tokens == expected


def test_the_engine_knows_what_generation_takes_of_the_device():
    from verl.config.schema import ActorConfig, ModelConfig, RolloutConfig
    from verl.engines.settings import read_settings

    rollout = RolloutConfig(gpu_memory_utilization=0.7)
    options = {"device": "cpu", "log_prob_cfg": rollout}
    settings = read_settings("actor", ModelConfig(), ActorConfig(), **options)
    assert settings.rollout_memory == 0.7
    assert read_settings("actor", ModelConfig(), ActorConfig(), device="cpu").rollout_memory == 0


def test_large_packs_are_not_captured(tools, pair):
    runner = tools.runner(pair[0])
    runner.graphs = BackboneGraphs(runner._model, runner.optimizer, torch.device("cpu"), 1.2e11)
    pair[0].forward_backward(tools.batch(), tools.policy_loss)
    assert not runner.graphs._passes
