"""What vLLM holds after a load, bit for bit, and the names its loaders ask for under LoRA."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from verl.errors import TrainingHalted
from verl.rollout import build_rollout
from verl.rollout.base import Request, SamplingParams
from verl.rollout.source import ModuleWeights

pytest.importorskip("vllm", reason="needs vLLM (make test-components)")
pytestmark = [pytest.mark.components, pytest.mark.timeout(600)]

JOINED = {"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v")}
JOINED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}


def worker_of(engine: Any) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def shaken(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.02)


def likely(engine: Any, model: Any, reference: Callable[..., list[float]], version: int) -> None:
    """The engine generates with the model's weights."""
    request = Request("a", [5, 9, 33], SamplingParams(max_tokens=8, ignore_eos=True), seed=version)
    (response,) = engine.generate([request])
    assert response.policy_version == version
    assert response.log_probs == pytest.approx(reference(model, [5, 9, 33], response.token_ids), abs=5e-4)


@pytest.fixture(scope="module")
def model(small_model: Callable[..., Any]) -> Any:
    """Biases, grouped heads, and a vocabulary that vLLM pads (160 to 192)."""
    return small_model(attention_bias=True, num_attention_heads=4, num_key_value_heads=2, hidden_size=256)


@pytest.fixture(scope="module")
def engine(model: Any, rollout_section: Callable[..., Any]) -> Iterator[Any]:
    """Without oneDNN vLLM keeps linear weights as they came, as it does on a GPU."""
    import vllm._custom_ops as ops

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_supports_onednn", False)
        made = build_rollout("vllm", model, None, rollout_section())
        yield made
        made.close()


def test_every_tensor_is_compared_where_it_is_held(
    engine: Any, model: Any, reference: Callable[..., list[float]]
) -> None:
    """But the output matrix, of which the CPU build computes with a copy."""
    forms = worker_of(engine).verl_load_check.forms
    assert set(forms) == {name for name, _ in model.state_dict().items()}
    assert {name for name, form in forms.items() if form != "exact"} == {"lm_head.weight"}
    for version in (1, 2, 3):
        shaken(model, version)
        engine.update_weights(ModuleWeights(model), version)
        likely(engine, model, reference, version)


@pytest.mark.parametrize(
    ("name", "where", "rows"),
    [
        ("model.norm.weight", "model.norm.weight", slice(None)),
        ("model.embed_tokens.weight", "model.embed_tokens.weight", slice(100, 101)),
        (
            "model.layers.0.self_attn.k_proj.weight",
            "model.layers.0.self_attn.qkv_proj.weight",
            slice(256, 384),
        ),
        ("model.layers.1.self_attn.v_proj.bias", "model.layers.1.self_attn.qkv_proj.bias", slice(384, 512)),
        ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_up_proj.weight", slice(192, 384)),
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight", slice(7, 8)),
    ],
)
def test_a_tensor_that_stayed_old_is_caught_by_its_bits(
    engine: Any, model: Any, monkeypatch: pytest.MonkeyPatch, name: str, where: str, rows: slice
) -> None:
    worker = worker_of(engine)
    load, held = worker.reload_weights, dict(worker.model_runner.get_model().named_parameters())[where]

    def stale(**arguments: Any) -> None:
        before = held[rows].clone()
        load(**arguments)
        held.data[rows] = before

    monkeypatch.setattr(worker, "reload_weights", stale)
    shaken(model, 10)
    with pytest.raises(TrainingHalted, match=r"vLLM holds 1 tensors .* policy version 11") as caught:
        engine.update_weights(ModuleWeights(model), 11)
    assert f"\n  {name}: arrived " in str(caught.value)
    monkeypatch.undo()
    engine.update_weights(ModuleWeights(model), 12)


def test_tensors_in_each_others_places_are_caught(
    engine: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(engine)
    load = worker.reload_weights
    held = dict(worker.model_runner.get_model().named_parameters())[
        "model.layers.0.self_attn.qkv_proj.weight"
    ]

    def swapped(**arguments: Any) -> None:
        load(**arguments)
        held.data[256:512] = held.data[256:512].roll(128, 0)

    monkeypatch.setattr(worker, "reload_weights", swapped)
    with pytest.raises(
        TrainingHalted, match=r"vLLM holds 2 tensors .*\n.*k_proj.weight: .*\n.*v_proj.weight: "
    ):
        engine.update_weights(ModuleWeights(model), 13)
    monkeypatch.undo()
    engine.update_weights(ModuleWeights(model), 14)


def test_a_stale_output_matrix_is_caught_by_log_probs(
    engine: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the CPU build computes logits with is a packed copy that no fingerprint sees."""
    head = worker_of(engine).model_runner.get_model().lm_head
    old, before = model.lm_head.weight.detach().clone(), head.cpu_linear
    shaken(model, 20)
    monkeypatch.setattr(head, "cpu_linear", lambda x, weight, bias: torch.nn.functional.linear(x, old, bias))
    monkeypatch.setattr(type(head.quant_method), "process_weights_after_loading", lambda self, layer: None)
    with pytest.raises(TrainingHalted, match="log-probs of a fixed prompt differ by"):
        engine.update_weights(ModuleWeights(model), 21)
    monkeypatch.undo()
    head.cpu_linear = before
    engine.update_weights(ModuleWeights(model), 22)


class Part(torch.nn.Module):
    """A layer of one tensor-parallel worker."""

    def __init__(self, weight: torch.Tensor, **attributes: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_worker_finds_its_own_part_of_a_tensor(size: int) -> None:
    """Eight heads of queries and two of keys and values, which four workers hold twice; 100 tokens, padded."""
    from types import SimpleNamespace

    from verl.rollout.vllm.worker import ShardIndex

    def whole(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))

    sent = {
        "model.embed_tokens.weight": whole(100, 24),
        "model.self_attn.q_proj.weight": whole(32, 24),
        "model.self_attn.k_proj.weight": whole(8, 24),
        "model.self_attn.v_proj.weight": whole(8, 24) + 1,
        "model.self_attn.o_proj.weight": whole(24, 32),
        "model.mlp.gate_proj.weight": whole(40, 24),
        "model.mlp.up_proj.weight": whole(40, 24) + 1,
        "model.norm.weight": torch.randn(24),
        "lm_head.other": torch.randn(3),
    }
    q, k, v = (sent[f"model.self_attn.{name}_proj.weight"] for name in "qkv")
    gate, up = (sent[f"model.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    heads = max(2 // size, 1)
    for rank in range(size):
        first = rank * 2 // size
        own = [x[first * 4 : (first + heads) * 4] for x in (k, v)]
        model = torch.nn.Module()
        model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # type: ignore[assignment]
        model.packed_modules_mapping["gate_up_proj"] = ["gate_proj", "up_proj"]  # type: ignore[index,operator]
        model.model = torch.nn.Module()
        model.model.self_attn, model.model.mlp = torch.nn.Module(), torch.nn.Module()
        rows = 32 // size
        sizes = [rows, heads * 4, heads * 4]
        joined = torch.cat([q[rank * rows : (rank + 1) * rows], *own])
        model.model.self_attn.qkv_proj = Part(joined, output_partition_sizes=sizes)
        model.model.self_attn.o_proj = Part(
            sent["model.self_attn.o_proj.weight"][:, rank * rows : (rank + 1) * rows].clone()
        )
        rows = 40 // size
        joined = torch.cat([x[rank * rows : (rank + 1) * rows] for x in (gate, up)])
        model.model.mlp.gate_up_proj = Part(joined, output_partition_sizes=[rows, rows])
        rows = 128 // size
        start, end = min(rank * rows, 100), min((rank + 1) * rows, 100)
        padded = torch.zeros(rows, 24)
        padded[: end - start] = sent["model.embed_tokens.weight"][start:end]
        indices = SimpleNamespace(
            org_vocab_start_index=start, org_vocab_end_index=end, num_org_elements=end - start
        )
        model.model.embed_tokens = Part(padded, shard_indices=indices)
        model.model.norm = Part(sent["model.norm.weight"].clone())
        places = ShardIndex(model, rank, size)
        found = {name: places.find(name, tensor) for name, tensor in sent.items()}
        assert [name for name, place in found.items() if place is None] == ["lm_head.other"]
        for name, place in found.items():
            if place is not None:
                assert torch.equal(place.cut(sent[name]), place.loaded()), (name, rank)


def by_name(self: Any, weights: Any) -> set[str]:
    """A loader that looks parameters up by name, as vLLM's own did up to 0.24."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    parameters, loaded = dict(self.named_parameters()), set()
    for name, tensor in weights:
        part = name.split(".")[-2]
        joined, shard = JOINED.get(part, (part, None))
        name = name.replace(f".{part}.", f".{joined}.")
        load = getattr(parameters[name], "weight_loader", default_weight_loader)
        load(parameters[name], tensor, *(() if shard is None else (shard,)))
        loaded.add(name)
    return loaded


def test_weights_under_lora_layers_are_found_by_the_names_of_the_files(
    small_model: Callable[..., Any],
    rollout_section: Callable[..., Any],
    reference: Callable[..., list[float]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.model_executor.models.llama import LlamaModel

    from verl.models.lora import add_lora

    monkeypatch.setattr(LlamaModel, "load_weights", by_name)
    model = small_model()
    add_lora(model, rank=4, alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    with caplog.at_level(logging.INFO, "verl.rollout.vllm.base"):
        engine: Any = build_rollout("vllm", model, None, rollout_section())
    try:
        assert "of 21 tensors are loaded, and compared, bit for bit" in caplog.text
        inner = worker_of(engine).model_runner.get_model()
        wrapped = [name for name, part in inner.named_modules() if isinstance(part, BaseLayerWithLoRA)]
        assert any(name.endswith("qkv_proj") for name in wrapped), "the wrappers are back"
        forms = worker_of(engine).verl_load_check.forms
        assert forms["model.embed_tokens.weight"] == forms["model.norm.weight"] == "exact"
        generator = torch.Generator().manual_seed(0)
        for version in (1, 2, 3):
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    change = torch.randn(weight.shape, generator=generator)
                    if "lora_" in name:
                        weight.copy_(change * 0.2)
                    elif version == 3:  # the weights underneath come again, too
                        weight.add_(change * 0.02)
            if version == 3:
                engine._send_weights(ModuleWeights(model).base_tensors())
            engine.update_weights(ModuleWeights(model), version)
            likely(engine, model, reference, version)
    finally:
        engine.close()
