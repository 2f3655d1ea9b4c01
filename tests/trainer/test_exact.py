"""`trainer.exact`: what a step trains on is, bit for bit, what the engine drew; a run that loses this stops."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.tiny_run import tiny_run
from verl.config.load import load_ppo_config
from verl.errors import ConfigError, TrainingHalted

EXACT = ["trainer.exact=True", "trainer.total_training_steps=2"]
GAP = "training/rollout_probs_diff_max"


@pytest.mark.parametrize(
    "keys",
    [
        ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.temperature=0.7"],
        ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"],
        ["actor_rollout_ref.model.enable_gradient_checkpointing=True", "actor_rollout_ref.actor.use_kl_loss=True"],
        ["actor_rollout_ref.model.share_prefixes=False", "actor_rollout_ref.rollout.max_num_seqs=5"],
        [
            "actor_rollout_ref.actor.use_dynamic_bsz=False",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
            "actor_rollout_ref.rollout.raw_log_probs=True",
            "actor_rollout_ref.rollout.temperature=0.7",
        ],
    ],
)  # fmt: skip
def test_every_step_trains_on_the_log_probs_it_drew(watch, keys):
    seen = watch(*EXACT, *keys)
    for step in (1, 2):
        assert seen.row(step)[GAP] == 0.0
        first = seen.of("actor", step)[0]
        assert first.metrics["actor/ppo_kl"] == 0.0
        assert first.mini.batch["exact_tokens"].any()
        assert not any("exact_tokens" in later.mini.batch for later in seen.of("actor", step)[1:])
        tensors = first.mini.batch
        assert torch.equal(tensors["old_log_probs"], tensors["rollout_log_probs"]), "no second pass"


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_with_carry_over_the_tokens_of_these_weights_are_compared(watch, recompute):
    """Those of a response that earlier weights began read what these kept of it, unless it is computed again."""
    long = ["data.max_response_length=48", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2"]
    mode = ["trainer.async_training.mode=carry_over", "trainer.total_training_steps=4"]
    seen = watch(*EXACT, *mode, *long, f"actor_rollout_ref.rollout.recompute_kv_cache={recompute}")
    mixed = continued = 0
    for step in range(1, 5):
        tensors = seen.of("actor", step)[0].mini.batch
        now, mask, versions = (tensors[name] for name in ("exact_tokens", "response_mask", "token_versions"))
        own = now & mask.bool()
        assert (versions[own] == step - 1).all()
        for row, drawn, compared in zip(versions, mask.bool(), own, strict=True):
            different = len(set(row[drawn].tolist())) > 1
            mixed += different
            continued += different and bool(compared.any())
        assert seen.row(step).get(GAP, 0.0) == 0.0
    assert mixed > 0 and (continued > 0) == recompute
    assert GAP in seen.row(1)


def plant(monkeypatch: pytest.MonkeyPatch, few: int, layer: int) -> None:
    """What a layer returns is the next float32, in passes over few tokens."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward = LlamaDecoderLayer.forward

    def planted(module: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = forward(module, hidden_states, *args, **kwargs)
        if module.self_attn.layer_idx == layer and out.shape[1] <= few:
            out = torch.nextafter(out, torch.tensor(torch.inf))
        return out

    monkeypatch.setattr(LlamaDecoderLayer, "forward", planted)


def test_a_planted_difference_of_one_ulp_is_found_before_the_first_step(watch, monkeypatch):
    plant(monkeypatch, 5, layer=0)
    with pytest.raises(Exception, match=r"cannot be kept on this machine: model.layers.0 \(Llama"):
        watch(*EXACT)


def test_a_run_that_loses_it_stops_and_names_the_place(watch, monkeypatch, tmp_path):
    monkeypatch.setattr("verl.rollout.native.exact_check.self_test", lambda model: None)
    plant(monkeypatch, 5, layer=1)
    with pytest.raises(TrainingHalted, match=r"trainer.exact=True: token \d+ of a response") as stopped:
        watch(*EXACT, "actor_rollout_ref.rollout.max_num_seqs=3", folder="run")
    assert "model.layers.1 (LlamaDecoderLayer): its output differs" in str(stopped.value)
    assert "generated in one row" in str(stopped.value)
    (row,) = (tmp_path / "run").rglob("exact_row.json")
    assert json.loads(row.read_text())["differing"] > 0


def test_log_probs_of_other_weights_are_told_from_arithmetic(watch):
    def other(seen: Any, batch: Any) -> None:
        batch.batch["rollout_log_probs"][0, 0] -= 1e-6

    with pytest.raises(TrainingHalted, match="the weights that drew it are not those that train"):
        watch(*EXACT, change=other)


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.dtype=fp8",
        "actor_rollout_ref.rollout.kv_cache_dtype=fp8",
        "actor_rollout_ref.actor.use_torch_compile=True",
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "algorithm.rollout_correction.rollout_is=token",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.rollout.calculate_log_probs=False",
    ],
)
def test_what_it_does_not_go_with_is_refused_by_its_key(key, tiny_model_dir, digits_data):
    name = key.partition("=")[0]
    more = ["actor_rollout_ref.rollout.nnodes=1"] if name.endswith("n_gpus_per_node") else []
    with pytest.raises(ConfigError, match=f"'{name}' is .* trainer.exact=True does not go with"):
        load_ppo_config(tiny_run(tiny_model_dir, digits_data, "trainer.exact=True", key, *more))


def test_half_precision_is_refused(watch):
    with pytest.raises(Exception, match="computes in float32 on CPUs, not in bfloat16 on cpu"):
        watch(*EXACT, "actor_rollout_ref.model.dtype=bfloat16")


def test_the_name_of_verl_is_another_name_of_the_key(tiny_model_dir, digits_data):
    key = "actor_rollout_ref.rollout.full_determinism=True"
    assert load_ppo_config(tiny_run(tiny_model_dir, digits_data, key)).trainer.exact
