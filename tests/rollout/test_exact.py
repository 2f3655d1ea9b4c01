"""Exact mode: engine and trainer give the same bits, for every architecture and under every circumstance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import SHAPE

from verl.models.attention import use_verl_attention
from verl.models.exact import use_exact
from verl.models.fused_linear import HeadOptions
from verl.models.packing import pack, pack_shared, packed_forward
from verl.rollout.base import Request, Response, SamplingParams
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.engine_state import Limits

CPU = torch.device("cpu")
MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama_odd": ("LlamaConfig", {"hidden_size": 20, "intermediate_size": 27, "head_dim": 6}),
    "mistral": ("MistralConfig", {"sliding_window": 70}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 70, "query_pre_attn_scalar": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", MOE),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
SAMPLING = SamplingParams(max_tokens=40, temperature=0.9, ignore_eos=True)


def exact_model(name: str, seed: int = 0) -> Any:
    import transformers

    config_name, extra = MODELS[name]
    config = getattr(transformers, config_name)(**{**SHAPE, "num_hidden_layers": 3, **extra})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4.0)
    assert use_verl_attention(model)
    use_exact(model, CPU, torch.float32)
    return model


def prompts_of(*lengths: int, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]


def trainer_log_probs(
    model: Any, rows: list[tuple[list[int], list[int]]], packed: Any = pack, temperature: float = 0.9
) -> list[list[float]]:
    """Of the responses, by one pass over all rows."""
    width, length = max(len(r) for _, r in rows), max(len(p) + len(r) for p, r in rows)
    prompt = length - min(len(r) for _, r in rows)
    prompt = max(len(p) for p, _ in rows)
    ids = torch.zeros(len(rows), prompt + width, dtype=torch.long)
    attended, wanted = torch.zeros_like(ids), torch.zeros(len(rows), width, dtype=torch.long)
    for row, (p, r) in enumerate(rows):
        ids[row, prompt - len(p) : prompt + len(r)] = torch.tensor(p + r)
        attended[row, prompt - len(p) : prompt + len(r)] = 1
        wanted[row, : len(r)] = 1
    found = packed(ids, attended, wanted, CPU)
    out = found.unpack(packed_forward(model, found, HeadOptions(temperature=temperature))["log_probs"])
    return [out[row, : len(r)].tolist() for row, (_, r) in enumerate(rows)]


def assert_exact(model: Any, prompts: dict[str, list[int]], responses: list[Response]) -> None:
    assert sum(len(response.token_ids) for response in responses) > 0
    rows = [(list(prompts[r.request_id]), list(r.token_ids)) for r in responses if r.token_ids]
    drawn = [list(r.log_probs) for r in responses if r.token_ids]
    together = trainer_log_probs(model, rows)
    assert drawn == together
    assert drawn == trainer_log_probs(model, rows, pack_shared)
    for split in (1, 3):
        parts = [rows[at : at + split] for at in range(0, len(rows), split)]
        assert drawn == [row for part in parts for row in trainer_log_probs(model, part)]


@pytest.mark.parametrize("name", MODELS)
def test_engine_and_trainer_agree(name: str) -> None:
    """Groups with a common prompt, lengths around the borders of blocks, prompts in chunks, few rows at a time."""
    model = exact_model(name)
    prompts = dict(zip("abcdef", prompts_of(1, 15, 33, 63, 64, 130), strict=True))
    engine = NativeRollout(model, None, Limits(max_num_batched_tokens=50, max_num_seqs=7))
    responses = list(engine.generate([Request(name, ids, SAMPLING, n=2) for name, ids in prompts.items()]))
    assert len(responses) == 12
    assert_exact(model, prompts, responses)
