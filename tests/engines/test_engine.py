"""The engine's verbs on one rank: counting, memory, guards, state, saving, refusals."""

from __future__ import annotations

import copy
import json
import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl.engines import build_engine, known_strategies
from verl.errors import ConfigError, DataError, ModelError, TrainingHalted
from verl.observe.metrics import Metric


def weights(engine):
    return {name: value.clone() for name, value in engine.weights().named_tensors()}


def same(left, right, **tolerance):
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], msg=name, **tolerance)


# -- counting -------------------------------------------------------------------------------------------------------


def test_missing_denominators_are_filled_in(tools):
    engine = tools.engine(model=tools.model(), role={"ppo_micro_batch_size_per_gpu": 2})
    batch = tools.batch(holes=True)
    batch.batch["response_mask"][1] = 0
    seen = []

    def loss(output, micro):
        seen.append(dict(micro.meta_info))
        return output.log_probs.sum(), {}

    engine.forward_backward(batch, loss)
    mask = batch.batch["response_mask"]
    counts = {"batch_num_tokens": int(mask.sum()), "global_batch_size": int(mask.any(-1).sum()), "dp_size": 1}
    assert len(seen) == 3 and all(info == counts for info in seen)


def test_given_denominators_are_kept(tools):
    engine = tools.engine(model=tools.model())
    batch = tools.batch()
    batch.meta_info = {"batch_num_tokens": 1000, "global_batch_size": 77, "temperature": 0.5}

    def loss(output, micro):
        assert micro.meta_info["batch_num_tokens"] == 1000 and micro.meta_info["global_batch_size"] == 77
        return output.log_probs.sum(), {}

    engine.forward_backward(batch, loss)


def test_metrics_of_micro_batches_are_joined(tools):
    engine = tools.engine(model=tools.model(), role={"ppo_micro_batch_size_per_gpu": 2})

    def loss(output, micro):
        tokens = micro.batch["response_mask"].sum()
        return output.log_probs.sum(), {
            "rows": Metric(float(len(micro)), "sum"),
            "one": Metric(1.0, "mean", tokens),
        }

    metrics = engine.forward_backward(tools.batch(), loss)
    assert metrics["rows"].value == 6 and metrics["one"].value == 1.0


def test_micro_batches_respect_the_budget(tools):
    engine = tools.engine(
        model=tools.model(), role={"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 15}
    )
    batch = tools.batch()
    sizes = []

    def loss(output, micro):
        lengths = micro.batch["attention_mask"].sum(1)
        sizes.append((int(lengths.sum()), len(lengths)))
        return output.log_probs.sum(), {}

    engine.forward_backward(batch, loss)
    assert sum(rows for _, rows in sizes) == len(batch)
    assert all(tokens <= 15 or rows == 1 for tokens, rows in sizes)


@pytest.mark.parametrize("together", [1, 2])
def test_padding_counts_in_the_budget_of_a_padded_model(tools, together):
    model = tools.model()
    role = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 40}
    engine = tools.engine(model=model, role=role, use_remove_padding=False)
    batch = tools.batch([(6, 14), (2, 2), (2, 2), (2, 2), (2, 2), (2, 2)])  # 40 tokens without padding
    batch.meta_info["rows_together"] = together
    shapes, run = [], model.verl_forward
    model.verl_forward = lambda pack, options: (
        shapes.append(tuple(pack.input_ids.shape)) or run(pack, options)
    )
    engine.forward_backward(batch, tools.policy_loss)
    assert sum(rows for rows, _ in shapes) == len(batch)
    assert all(rows * longest <= 40 or rows == together for rows, longest in shapes)
    assert len(shapes) < len(batch) // together


def test_a_padded_batch_that_does_not_fit_is_reported_and_split_with_its_padding(tools, caplog):
    model, batch = tools.model(), tools.batch([(6, 7), (1, 1), (3, 2), (1, 2)])
    expected = tools.engine(model=copy.deepcopy(model), use_remove_padding=False)
    role = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 1000}
    engine = tools.engine(model=model, role=role, use_remove_padding=False)
    TooSmall(tools.module(engine), 13)
    with caplog.at_level(logging.WARNING):
        for each in (expected, engine):
            each.forward_backward(batch, tools.policy_loss)
    assert "a micro-batch of 52 tokens (4 sequences)" in caplog.text
    same(tools.gradients(engine), tools.gradients(expected), rtol=1e-4, atol=1e-5)


# -- memory ---------------------------------------------------------------------------------------------------------


class TooSmall:
    """A device that holds `limit` tokens: a forward pass beyond that fails at once, a backward pass near its end,
    when the later layers have their gradients already."""

    def __init__(self, module, limit):
        self.limit, self.failures, self.pending = limit, 0, False
        self.run = module.verl_forward
        module.verl_forward = self
        module.model.layers[0].self_attn.q_proj.weight.register_hook(self._backward)

    def __call__(self, pack, options):
        answers = self.run(pack, options)
        self.pending = pack.input_ids.numel() > self.limit
        if self.pending and not torch.is_grad_enabled():
            self._fail()
        return answers

    def _backward(self, gradient):
        if self.pending:
            self._fail()

    def _fail(self):
        self.failures += 1
        assert self.failures < 20, "the retries do not end"
        raise torch.OutOfMemoryError("injected: out of memory")


def test_out_of_memory_in_the_backward_pass_changes_nothing_but_the_cut(tools, caplog):
    """The failed attempt has left gradients in the later layers: they must not be counted twice."""
    model = tools.model()
    batch = tools.batch(holes=True)
    expected = tools.engine(model=copy.deepcopy(model))
    expected.forward_backward(batch, tools.policy_loss, with_entropy=True)
    engine = tools.engine(model=model, role={"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 1000})
    device = TooSmall(tools.module(engine), 30)
    with caplog.at_level(logging.WARNING):
        engine.forward_backward(batch, tools.policy_loss, with_entropy=True)
    assert device.failures > 0
    assert caplog.text.count("did not fit into device memory") == 1
    same(tools.gradients(engine), tools.gradients(expected), rtol=1e-4, atol=1e-5)
    assert tools.runner(engine).sizes["train"].max_tokens < 30


def test_out_of_memory_keeps_gradients_that_were_there_before(tools):
    model = tools.model()
    first, second = tools.batch(seed=1), tools.batch(seed=2)
    expected = tools.engine(model=copy.deepcopy(model))
    engine = tools.engine(model=model)
    for each in (expected, engine):
        each.forward_backward(first, tools.policy_loss)
    device = TooSmall(tools.module(engine), 30)
    for each in (expected, engine):
        each.forward_backward(second, tools.policy_loss)
    assert device.failures > 0
    same(tools.gradients(engine), tools.gradients(expected), rtol=1e-4, atol=1e-5)


def test_out_of_memory_without_gradient_splits_too(tools, caplog):
    model = tools.model()
    batch = tools.batch()
    expected = tools.engine(model=copy.deepcopy(model)).log_probs(batch)["log_probs"]
    engine = tools.engine(model=model, role={"ppo_micro_batch_size_per_gpu": 6})
    device = TooSmall(tools.module(engine), 20)
    with caplog.at_level(logging.WARNING):
        found = engine.log_probs(batch)["log_probs"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert device.failures >= 2 and caplog.text.count("did not fit") == 1
    failures = device.failures
    engine.log_probs(batch)
    assert device.failures == failures, "what did not fit is not tried again"


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
    run, attempts = model.verl_forward, []

    def small(pack, options):
        attempts.append(pack.rows)
        if pack.rows > 1 and len(attempts) > 1:  # the first micro-batch of the first attempt gets through
            raise torch.OutOfMemoryError("injected: out of memory")
        return run(pack, options)

    model.verl_forward = small
    found = engine.forward_backward(batch, counted)
    assert max(attempts[1:]) > 1 and attempts[-6:] == [1] * 6, (
        "something did not fit behind something that did"
    )
    for name, metric in plain.items():
        assert float(found[name].value) == pytest.approx(float(metric.value), rel=1e-4)


def test_one_sequence_that_does_not_fit_names_the_keys(tools):
    engine = tools.engine(model=tools.model(), role={"ppo_micro_batch_size_per_gpu": 6})
    TooSmall(tools.module(engine), 3)
    with pytest.raises(TrainingHalted, match=r"single sequence of \d+ tokens.*enable_gradient_checkpointing"):
        engine.log_probs(tools.batch())


@pytest.mark.parametrize("together", [2, 3])
@pytest.mark.parametrize(
    "role",
    [
        {"ppo_micro_batch_size_per_gpu": 2},
        {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 1000},
    ],
    ids=["sequences", "tokens"],
)
@pytest.mark.parametrize("kind", ["train", "forward"])
def test_rows_that_stay_together_and_do_not_fit_stop_with_the_key(tools, role, together, kind):
    engine = tools.engine(model=tools.model(), role=role)
    batch = tools.batch()
    batch.meta_info["rows_together"] = together
    TooSmall(tools.module(engine), 3)
    with pytest.raises(
        TrainingHalted, match=f"{together} sequences that stay in one.*data.max_length.*injected"
    ):
        if kind == "train":
            engine.forward_backward(batch, tools.policy_loss)
        else:
            engine.log_probs(batch)


@pytest.mark.parametrize("kind", ["train", "forward"])
def test_several_pairs_that_do_not_fit_are_split_between_pairs(tools, kind):
    """The micro-batch size counts pairs, the report of what failed sequences: two pairs become one, not two again."""
    model, batch = tools.model(), tools.batch()
    batch.meta_info["rows_together"] = 2
    expected = tools.engine(model=copy.deepcopy(model), role={"ppo_micro_batch_size_per_gpu": 1})
    engine = tools.engine(model=model, role={"ppo_micro_batch_size_per_gpu": 2})
    pair = int(batch.batch["attention_mask"].sum(1).view(-1, 2).sum(1).max())
    device = TooSmall(tools.module(engine), pair)
    if kind == "train":
        for each in (expected, engine):
            each.forward_backward(batch, tools.policy_loss)
        same(tools.gradients(engine), tools.gradients(expected), rtol=1e-4, atol=1e-5)
    else:
        same(engine.log_probs(batch), expected.log_probs(batch), rtol=1e-4, atol=1e-5)
    assert device.failures == 1


def test_without_settings_a_budget_is_measured_once(tools, monkeypatch):
    from verl.engines import budget

    calls = []
    monkeypatch.setattr(budget, "free_bytes", lambda device: calls.append(device) or 40 * 2**20)
    engine = tools.engine(model=tools.model())
    batch = tools.batch()
    engine.forward_backward(batch, tools.policy_loss)
    found = tools.runner(engine).sizes["train"].max_tokens
    assert found & (found - 1) == 0 and budget.SMALLEST <= found < budget.CAP_CPU
    assert all(gradient.abs().sum() > 0 for gradient in tools.gradients(engine).values())
    count = len(calls)
    engine.forward_backward(batch, tools.policy_loss)
    assert len(calls) == count


def test_a_probe_that_does_not_fit_gives_the_smallest_budget(tools):
    from verl.engines import budget

    engine = tools.engine(model=tools.model())
    TooSmall(tools.module(engine), 50)
    engine.log_probs(tools.batch())
    engine.forward_backward(tools.batch(), tools.policy_loss)
    assert {rule.max_tokens for rule in tools.runner(engine).sizes.values()} == {budget.SMALLEST}


def test_measuring_leaves_no_gradient_behind(tools):
    model = tools.model()
    batch = tools.batch()
    measured = tools.engine(model=copy.deepcopy(model))
    fixed = tools.engine(model=model, role={"ppo_micro_batch_size_per_gpu": 6})
    for engine in (measured, fixed):
        engine.forward_backward(batch, tools.policy_loss)
    same(tools.gradients(measured), tools.gradients(fixed), rtol=1e-5, atol=1e-6)


def test_fitting_tokens_is_a_power_of_two_within_bounds():
    from verl.engines.budget import SMALLEST, fitting_tokens

    assert fitting_tokens(1e9, 0, 1e5, 65536) == 4096  # 8000 fit
    assert fitting_tokens(1e9, 0, 1.0, 65536) == 65536
    assert fitting_tokens(10, 1e9, 1e5, 65536) == SMALLEST


def test_offloading_and_back_changes_nothing(tools):
    """On a CPU the storage still moves: shared parameters must stay the same objects."""
    engine = tools.engine(model=tools.model(), role={"optim.lr": 0.01})
    batch = tools.batch()
    engine.forward_backward(batch, tools.policy_loss)
    engine.optimizer_step()
    held = dict(tools.module(engine).named_parameters())
    before = weights(engine)
    engine.offload()
    engine.onload()
    same(weights(engine), before, rtol=0, atol=0)
    assert all(param is held[name] for name, param in tools.module(engine).named_parameters())
    engine.offload()
    engine.forward_backward(batch, tools.policy_loss)  # brings itself back
    assert engine.optimizer_step()["skipped"] == 0.0


def test_weights_come_back_to_their_addresses_so_generation_keeps_its_session(tools):
    """A session holds the captured CUDA graphs and is used again only while no weight has moved."""
    from verl.rollout.base import Request, SamplingParams
    from verl.rollout.native import Limits, NativeRollout

    found = []
    for offloads in (True, False):
        engine = tools.engine(model=tools.model(), role={"optim.lr": 0.01})
        rollout = NativeRollout(
            engine.weights(), None, Limits(max_num_seqs=4, cache_tokens=512), on_device=True
        )
        tokens, sessions, addresses = [], [], []
        for _ in range(2):
            if offloads:
                engine.offload()
            request = Request("a", [5, 3, 8], SamplingParams(max_tokens=6, ignore_eos=True))
            tokens.append([response.token_ids for response in rollout.generate([request])])
            sessions.append(rollout.state)
            addresses.append(
                [x.data_ptr() for x in (*tools.module(engine).parameters(), *tools.module(engine).buffers())]
            )
            engine.forward_backward(tools.batch(), tools.policy_loss)
            engine.optimizer_step()
        assert sessions[0] is sessions[1] and addresses[0] == addresses[1]
        found.append((tokens, weights(engine)))
    assert found[0][0] == found[1][0]
    same(found[0][1], found[1][1], rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_activations_kept_elsewhere_give_the_same_gradients(tools, device):
    """With and without an index: an engine on a GPU has the device `cuda`, its tensors are on `cuda:0`."""
    from verl.engines.offload import ActivationOffload

    model = tools.model()
    batch = tools.batch()
    plain = tools.engine(model=copy.deepcopy(model))
    engine = tools.engine(model=model)
    offload = tools.runner(engine).activation_offload = ActivationOffload(
        torch.device(device), smallest_bytes=64
    )
    for each in (plain, engine):
        each.forward_backward(batch, tools.policy_loss, with_entropy=True)
    assert offload.moved_bytes > 10_000
    same(tools.gradients(engine), tools.gradients(plain), rtol=0, atol=0)


def test_the_work_of_a_token_leaves_out_lookups_idle_experts_and_gradients_of_frozen_weights(tools):
    from verl.workers.local import LocalGroup

    def size(**options):
        engine = tools.engine(model=tools.model("qwen3_moe"), **options)
        return tools.module(engine), LocalGroup.model_size(SimpleNamespace(actor_engine=engine))

    model, full = size()
    lookup = model.get_input_embeddings().weight.numel()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    everything = sum(p.numel() for p in model.parameters())
    assert full.parameters == everything - lookup - experts // 2 and full.frozen == 0
    _, adapted = size(lora_rank=4, target_modules=["q_proj", "v_proj"])
    assert adapted.frozen == full.parameters < adapted.parameters


def test_a_device_without_an_index_is_the_same_device():
    from verl.engines.offload import same_device

    def same_named(first: str, second: str) -> bool:
        return same_device(torch.device(first), torch.device(second))

    assert same_named("cuda", "cuda:0") and same_named("cuda:1", "cuda") and same_named("cpu", "cpu:0")
    assert same_named("cuda:1", "cuda:1") and not same_named("cuda:0", "cuda:1")
    assert not same_named("cuda", "cpu") and not same_named("meta", "cpu")


def test_gradient_checkpointing_recomputes_and_agrees(tools):
    model = tools.model()
    batch = tools.batch()
    plain = tools.engine(model=copy.deepcopy(model))
    engine = tools.engine(model=model, enable_gradient_checkpointing=True)
    calls = []
    tools.module(engine).model.layers[0].mlp.register_forward_hook(lambda *args: calls.append(1))
    for each in (plain, engine):
        each.forward_backward(batch, tools.policy_loss)
    same(tools.gradients(engine), tools.gradients(plain), rtol=1e-5, atol=1e-6)
    assert len(calls) == 2, "once forward, once again in the backward pass"


# -- guards ---------------------------------------------------------------------------------------------------------


def poisoned(output, micro):
    return output.log_probs.sum() * float("nan"), {}


def test_non_finite_steps_are_skipped_saved_and_stop_the_run(tools, tmp_path, caplog):
    engine = tools.engine(model=tools.model(), bad_batch_dir=tmp_path, max_skipped_steps=3)
    batch = tools.batch()
    batch.non_tensor_batch["uid"] = np.array([f"u{i}" for i in range(6)], dtype=object)
    before = weights(engine)
    for _ in range(2):
        engine.forward_backward(batch, poisoned)
        assert engine.optimizer_step()["skipped"] == 1.0
    same(weights(engine), before, rtol=0, atol=0)
    engine.forward_backward(batch, tools.policy_loss)
    assert engine.optimizer_step()["skipped"] == 0.0  # a good step starts the count again
    for _ in range(2):
        engine.forward_backward(batch, poisoned)
        engine.optimizer_step()
    engine.forward_backward(batch, poisoned)
    with pytest.raises(TrainingHalted, match=r"3 optimiser steps in a row.*max_skipped_steps=3"):
        engine.optimizer_step()
    from safetensors.torch import load_file

    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 5
    assert torch.equal(load_file(files[0])["input_ids"], batch.batch["input_ids"])
    assert json.loads(files[0].with_suffix(".json").read_text())["rows"]["uid"] == [f"u{i}" for i in range(6)]


def test_freezing_embeddings(tools):
    engine = tools.engine(model=tools.model(), freeze_embeddings=True, role={"optim.lr": 0.1})
    before = weights(engine)
    engine.forward_backward(tools.batch(), tools.policy_loss)
    engine.optimizer_step()
    after = weights(engine)
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


# -- compiling ------------------------------------------------------------------------------------------------------


def test_compiling_that_fails_is_noticed_and_undone(tools, monkeypatch, caplog):
    from torch import nn

    def broken(self, **options):
        def fail(*args, **kwargs):
            raise RuntimeError("no compiler on this machine")

        self._compiled_call_impl = fail

    monkeypatch.setattr(nn.Module, "compile", broken)
    model = tools.model()
    expected = tools.engine(model=copy.deepcopy(model)).log_probs(tools.batch())["log_probs"]
    with caplog.at_level(logging.WARNING):
        engine = tools.engine(model=model, role={"use_torch_compile": True})
    assert "training continues without it (RuntimeError: no compiler" in caplog.text
    assert torch.equal(engine.log_probs(tools.batch())["log_probs"], expected)
    assert not tools.gradients(engine).values()


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradients(tools, monkeypatch):
    """Captured by the real tracer; the code generator is left out because it takes minutes on a small machine."""
    from torch import nn

    plain = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: plain(self, backend="eager", **options))
    model = tools.model()
    expected = tools.engine(model=copy.deepcopy(model))
    engine = tools.engine(model=model, role={"use_torch_compile": True})
    assert all(layer._compiled_call_impl is not None for layer in tools.module(engine).model.layers)
    batch = tools.batch()
    for each in (expected, engine):
        each.forward_backward(batch, tools.policy_loss, with_entropy=True)
    assert all(layer._compiled_call_impl is not None for layer in tools.module(engine).model.layers)
    same(tools.gradients(engine), tools.gradients(expected), rtol=1e-4, atol=1e-5)


# -- falling back to padding ----------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_packed_is_padded_with_a_notice(tools, caplog):
    model = tools.model("mamba", state_size=4, expand=2, conv_kernel=3)
    with caplog.at_level(logging.WARNING):
        engine = tools.engine(model=model, role={"ppo_micro_batch_size_per_gpu": 1})
    assert "cannot be packed" in caplog.text and not engine.info.packed
    batch = tools.batch()
    found = engine.log_probs(batch)["log_probs"]
    ids = batch.batch["input_ids"][0][None]
    logs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None]).squeeze(1)
    torch.testing.assert_close(found[0], logs[-7:], rtol=1e-4, atol=1e-4)


# -- state and folders ----------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_tied_weights_once(tools):
    engine = tools.engine(model=tools.model(tie_word_embeddings=True))
    held = engine.state()["model"]
    assert "model.embed_tokens.weight" in held and "lm_head.weight" not in held
    apart = tools.engine(model=tools.model(tie_word_embeddings=False)).state()["model"]
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= apart.keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_from_a_saved_state_as_if_nothing_happened(tools, dtype):
    batch = tools.batch()
    role = {"optim.lr": 0.01, "optim.lr_scheduler_type": "cosine"}
    first = tools.engine(model=tools.model(), role=role, dtype=dtype, total_steps=10)
    for _ in range(2):
        first.forward_backward(batch, tools.policy_loss)
        first.optimizer_step()
    state = copy.deepcopy(first.state())
    second = tools.engine(model=tools.model(seed=5), role=role, dtype=dtype, total_steps=10)
    second.load_state(state)
    for engine in (first, second):
        for _ in range(2):
            engine.forward_backward(batch, tools.policy_loss)
            last = engine.optimizer_step()
    same(weights(second), weights(first), rtol=0, atol=0)
    assert second.state()["scheduler"] == {"step": 4} and last["lr"] < 0.01


def test_a_state_without_a_weight_is_refused(tools):
    engine = tools.engine(model=tools.model())
    state = engine.state()
    state["model"].pop("lm_head.weight")
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        engine.load_state(state)


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_folder_gives_the_same_answers(tools, tmp_path, tied):
    from transformers import AutoModelForCausalLM

    engine = tools.engine(model=tools.model(tie_word_embeddings=tied), role={"optim.lr": 0.05})
    batch = tools.batch()
    engine.forward_backward(batch, tools.policy_loss)
    engine.optimizer_step()
    engine.save_hf(tmp_path)
    assert "verl" not in (tmp_path / "config.json").read_text()
    again = tools.engine(model=AutoModelForCausalLM.from_pretrained(tmp_path))
    expected = engine.log_probs(batch)["log_probs"]
    torch.testing.assert_close(again.log_probs(batch)["log_probs"], expected, rtol=1e-5, atol=1e-5)


def test_lora_engine_trains_adapters_and_keeps_its_reference(tools, tmp_path):
    model = tools.model()
    batch = tools.batch()
    before = tools.engine(model=copy.deepcopy(model)).log_probs(batch)["log_probs"]
    engine = tools.engine(model=model, lora_rank=4, role={"optim.lr": 0.05})
    for _ in range(3):
        engine.forward_backward(batch, tools.policy_loss)
        engine.optimizer_step()
    now = engine.log_probs(batch)["log_probs"]
    assert (now - before).abs().max() > 0.1
    torch.testing.assert_close(engine.reference_log_probs(batch), before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(engine.log_probs(batch)["log_probs"], now)
    assert all("lora_" in name for name in engine.state()["model"])
    engine.save_hf(tmp_path / "merged")
    engine.save_adapter(tmp_path / "adapter")
    merged = tools.engine(path=str(tmp_path / "merged"))
    torch.testing.assert_close(merged.log_probs(batch)["log_probs"], now, rtol=1e-4, atol=1e-4)
    adapter = sum(file.stat().st_size for file in (tmp_path / "adapter").glob("*.safetensors"))
    assert adapter < (tmp_path / "merged/model.safetensors").stat().st_size
    modes = [file.stat().st_mode & 0o777 for file in tmp_path.glob("*/*.safetensors")]
    assert modes == [0o644, 0o644]  # others may read them


def test_experts_are_exported_under_the_names_of_their_files(tools, tmp_path):
    from safetensors.torch import load_file

    engine = tools.engine(model=tools.model("qwen3_moe"))
    engine.save_hf(tmp_path)
    exported = weights(engine)
    same(exported, load_file(tmp_path / "model.safetensors"), rtol=0, atol=0)


def test_tied_weights_are_exported_under_both_names(tools):
    exported = weights(tools.engine(model=tools.model(tie_word_embeddings=True)))
    assert torch.equal(exported["lm_head.weight"], exported["model.embed_tokens.weight"])


def test_generating_sees_the_very_tensors_that_are_trained(tools):
    engine = tools.engine(model=tools.model(), dtype="bfloat16", role={"optim.lr": 0.05})
    with engine.weights().module() as module:
        shared = module.lm_head.weight
    before = shared.detach().clone()
    engine.forward_backward(tools.batch(), tools.policy_loss)
    engine.optimizer_step()
    assert not torch.equal(shared, before) and tools.module(engine).lm_head.weight is shared


# -- refusals -------------------------------------------------------------------------------------------------------


def test_kinds_do_only_what_they_can(tools):
    batch = tools.batch()
    actor, ref = tools.engine(model=tools.model()), tools.engine("ref", model=tools.model())
    critic = tools.engine("critic", model=tools.model())
    with pytest.raises(ModelError, match="of a policy has no values"):
        actor.values(batch)
    with pytest.raises(ModelError, match="of a critic has no log-probs"):
        critic.log_probs(batch)
    with pytest.raises(ConfigError, match="frozen"):
        ref.forward_backward(batch, tools.policy_loss)
    with pytest.raises(ConfigError, match="lora_rank"):
        actor.reference_log_probs(batch)
    assert not any(param.requires_grad for param in tools.module(ref).parameters())
    torch.testing.assert_close(ref.log_probs(batch)["log_probs"], actor.log_probs(batch)["log_probs"])


@pytest.mark.parametrize(
    ("role", "options", "error", "message"),
    [
        ({"strategy": "ddp"}, {}, ConfigError, "ddp.*allowed: fsdp, fsdp2, megatron"),
        ({}, {"dtype": "float8"}, ConfigError, "float8.*bfloat16"),
        ({"optim.lr_scheduler_type": "cosine"}, {}, ConfigError, "total_training_steps"),
        ({}, {"lora_rank": 2, "target_modules": ["nowhere"]}, ConfigError, "nowhere"),
    ],
)
def test_impossible_settings_are_refused(tools, role, options, error, message):
    with pytest.raises(error, match=message):
        tools.engine(model=tools.model(), role=role, **options)


def test_no_model_at_all_is_refused(tools):
    with pytest.raises(ModelError, match="model.path"):
        tools.engine()


def test_the_strategies_are_known():
    assert {"fsdp", "fsdp2", "megatron"} <= set(known_strategies())
    assert callable(build_engine)


def test_a_batch_with_contradicting_masks_is_refused(tools):
    batch = tools.batch()
    batch.batch["response_mask"] = torch.ones_like(batch.batch["response_mask"])
    with pytest.raises(DataError, match="row 1"):
        tools.engine(model=tools.model()).log_probs(batch)


def test_a_users_own_optimizer_steps_the_model(tools):
    model = tools.model()
    engine = tools.engine(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), role={"grad_clip": 0.0}
    )
    before = model.lm_head.weight.detach().clone()
    engine.forward_backward(tools.batch(), tools.policy_loss)
    gradient = tools.gradients(engine)["lm_head.weight"].clone()
    assert engine.optimizer_step()["lr"] == 0.5
    torch.testing.assert_close(model.lm_head.weight, before - 0.5 * gradient)
    assert engine.state()["scheduler"] == {"step": 1}
    foreign = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError, match="none of the model's parameters"):
        tools.engine(model=tools.model(), optimizer=foreign)


def test_graphs_of_attention_that_a_step_builds_are_counted(tools, monkeypatch):
    """None of the metric where no kernel has graphs; 0 in a step that builds none."""
    engine, batch = tools.engine(model=tools.model("llama")), tools.batch()
    metrics = engine.forward_backward(batch, tools.policy_loss)
    assert "perf/attention_graphs_built" not in metrics
    graphs = SimpleNamespace(built=2)
    monkeypatch.setitem(sys.modules, "verl.models.cudnn_attention", SimpleNamespace(graphs=graphs))

    def loss(output, micro):
        graphs.built = 3
        return tools.policy_loss(output, micro)

    built = [engine.forward_backward(batch, loss)["perf/attention_graphs_built"].value for _ in range(2)]
    assert built == [1, 0]
