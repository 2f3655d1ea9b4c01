"""Checkpoints that Megatron-core itself writes, merged, answer as Megatron's own model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.components, pytest.mark.timeout(900)]
pytest.importorskip("megatron.core", reason="needs megatron-core")

WRITER = Path(__file__).with_name("megatron_writer.py")
NUMBERS: dict[str, Any] = {
    "layers": 2,
    "hidden": 32,
    "ffn": 48,
    "heads": 4,
    "groups": 2,
    "head": 8,
    "vocabulary": 96,
    "tied": False,
    "qk_norm": False,
    "qkv_bias": False,
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "metadata": {},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"qkv_bias": True}),
    "qwen2 with layers apart": ("qwen2", {"qkv_bias": True, "metadata": {"singleton_local_shards": True}}),
    "tied qwen3 on two tensor ranks": (
        "qwen3",
        {"qk_norm": True, "head": 16, "tied": True, "tensor_parallel": 2},
    ),
    "llama on two stages": ("llama", {"layers": 4, "groups": 4, "pipeline_parallel": 2}),
    "mistral with a padded vocabulary": ("mistral", {"vocabulary": 128}),
    "qwen3 with experts": ("qwen3_moe", {"qk_norm": True, "experts": 4}),
}


def write(fork_server: Any, folder: Path, numbers: dict[str, Any]) -> None:
    log = folder / "log.txt"
    running = [
        fork_server.start(WRITER, [json.dumps(numbers), str(folder), str(rank)], output=log)
        for rank in range(numbers["tensor_parallel"] * numbers["pipeline_parallel"])
    ]
    assert not any(process.wait(timeout=600) for process in running), log.read_text()[-4000:]


def write_config(folder: Path, kind: str, numbers: dict[str, Any]) -> None:
    from transformers import AutoConfig

    experts = (
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True} if "experts" in numbers else {}
    )
    config = AutoConfig.for_model(
        kind,
        hidden_size=numbers["hidden"],
        intermediate_size=numbers["ffn"],
        moe_intermediate_size=numbers["ffn"],
        num_hidden_layers=numbers["layers"],
        num_attention_heads=numbers["heads"],
        num_key_value_heads=numbers["groups"],
        head_dim=numbers["head"],
        vocab_size=96,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=numbers["tied"],
        **experts,
    )
    config.save_pretrained(folder / "actor/huggingface")


@pytest.mark.parametrize("case", CASES)
def test_the_merged_model_answers_as_megatron_does(tmp_path: Path, case: str, fork_server: Any) -> None:
    from transformers import AutoModelForCausalLM

    from verl.model_merger import main

    kind, changes = CASES[case]
    numbers = NUMBERS | changes
    write(fork_server, tmp_path, numbers)
    write_config(tmp_path, kind, numbers)
    arguments = ["--backend", "megatron", "--local_dir", str(tmp_path / "actor")]
    assert main(["merge", *arguments, "--target_dir", str(tmp_path / "out")]) == 0
    expected = load_file(tmp_path / "logits.safetensors")["logits"][:, :96]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(torch.arange(12)[None]).logits[0]
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    assert main(["test", *arguments, "--test_hf_dir", str(tmp_path / "out")]) == 0
