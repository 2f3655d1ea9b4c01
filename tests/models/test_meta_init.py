"""A model opened without its weights is the loaded one in everything else, and knows where its weights are."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl.errors import ModelError
from verl.models.loading import CannotStream, cast_parameters, load_causal_lm, load_value_model
from verl.models.lora import add_lora
from verl.models.meta_init import open_causal_lm, open_value_model

ARCHITECTURES = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4},
    "phi": {},
    "phi3": {},
    "mixtral": {"num_local_experts": 12, "num_experts_per_tok": 2},
}
BOTH = [(open_causal_lm, load_causal_lm), (open_value_model, load_value_model)]


def read_whole(model, source):
    """Every weight, in two pieces, so that offsets count."""
    found = {}
    for name, param in model.named_parameters():
        if param.is_meta:
            found[name] = torch.empty(param.shape, dtype=param.dtype)
            middle = param.shape[0] // 2 + 1
            source.read_rows(name, 0, middle, found[name][:middle])
            source.read_rows(name, middle, param.shape[0], found[name][middle:])
        else:
            found[name] = param.detach()
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_the_skeleton_is_the_loaded_model_without_weights(tiny, tmp_path, architecture, dtype, tied):
    model = tiny(architecture, tie_word_embeddings=tied, **ARCHITECTURES[architecture])
    model.generation_config.temperature, model.generation_config.do_sample = 0.7, True
    model.save_pretrained(tmp_path)
    for open_model, load in BOTH:
        opened, source = open_model(str(tmp_path), dtype=dtype)
        loaded = load(str(tmp_path), dtype=dtype, device="cpu")
        weights, expected = read_whole(opened, source), dict(loaded.named_parameters())
        assert list(weights) == list(expected)
        for name, value in expected.items():
            assert weights[name].dtype == value.dtype and torch.equal(weights[name], value), name
        buffers = dict(loaded.named_buffers())
        for name, value in opened.named_buffers():
            own = buffers.pop(name)
            assert value.dtype == own.dtype and value.device == own.device and torch.equal(value, own), name
        assert not buffers
        assert opened.config.to_dict() == loaded.config.to_dict()
        assert opened.training == loaded.training
        if open_model is open_causal_lm:
            assert opened.generation_config.to_dict() == loaded.generation_config.to_dict()
            shared = opened.get_output_embeddings().weight is opened.get_input_embeddings().weight
            assert shared == tied


def test_weights_take_no_memory_until_they_are_read(tiny, tmp_path):
    tiny().save_pretrained(tmp_path)
    opened, source = open_causal_lm(str(tmp_path), dtype=torch.float32)
    assert all(param.is_meta for param in opened.parameters())
    assert set(source.locations) == {name for name, _ in opened.named_parameters()}


def test_opening_draws_no_random_numbers(tiny, tmp_path):
    """Adapters drawn afterwards must be those a loaded model would get."""
    tiny().save_pretrained(tmp_path)
    for open_model, load in BOTH:
        drawn = []
        for make in (
            open_model,
            lambda path, dtype, load=load: (load(path, dtype=dtype, device="cpu"), None),
        ):
            torch.manual_seed(5)
            model, _ = make(str(tmp_path), dtype=torch.float32)
            add_lora(model, rank=2, alpha=4, target_modules=["q_proj", "up_proj"])
            adapters = {name: param for name, param in model.named_parameters() if "lora_" in name}
            assert adapters and not any(param.is_meta for param in adapters.values())
            drawn.append(adapters)
        assert drawn[0].keys() == drawn[1].keys()
        assert all(torch.equal(drawn[0][name], value) for name, value in drawn[1].items())


def test_adapters_leave_the_weights_where_they_were(tiny, tmp_path):
    tiny(tie_word_embeddings=True).save_pretrained(tmp_path)
    opened, _ = open_causal_lm(str(tmp_path), dtype=torch.float32)
    before = opened.get_input_embeddings().weight
    add_lora(opened, rank=2, alpha=4, target_modules=["all-linear"])
    assert opened.get_input_embeddings().weight is before is opened.get_output_embeddings().weight
    assert opened.model.layers[0].self_attn.q_proj.base_layer.weight.is_meta


def test_a_critic_opens_the_backbone_saved_alone(tiny, tmp_path):
    """Its files lack the prefix that the critic's names have."""
    tiny().model.save_pretrained(tmp_path)
    opened, source = open_value_model(str(tmp_path), dtype=torch.float32)
    loaded = load_value_model(str(tmp_path), dtype=torch.float32, device="cpu")
    for name, value in read_whole(opened, source).items():
        assert torch.equal(value, loaded.get_parameter(name)), name


def test_a_model_of_the_hub_is_read_from_its_cache(tiny, tmp_path, monkeypatch):
    import huggingface_hub.constants

    store = tmp_path / "models--someone--tiny"
    tiny().save_pretrained(store / "snapshots/abc", max_shard_size="4KB")
    (store / "refs").mkdir()
    (store / "refs/main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    from verl.models.loading import SafetensorsFiles

    files = SafetensorsFiles.of("someone/tiny")
    assert len(set(files.files.values())) > 1
    assert files.shapes["model.norm.weight"] == (16,)
    with pytest.raises(CannotStream, match="no safetensors"):
        SafetensorsFiles.of("someone/other")


def test_other_safetensors_files_in_the_folder_are_ignored(tiny, tmp_path):
    """A consolidated copy or an old save beside the model's own files."""
    model = tiny()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    stale = {name: value + 1 for name, value in model.state_dict().items()}
    save_file(stale, tmp_path / "consolidated.safetensors", metadata={"format": "pt"})
    opened, source = open_causal_lm(str(tmp_path), dtype=torch.float32)
    for name, value in read_whole(opened, source).items():
        assert torch.equal(value, model.get_parameter(name)), name


def edit(folder, change):
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def configure(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda f: edit(f, lambda w: w.pop("model.norm.weight")), "lack model.norm.weight"),
        (
            lambda f: edit(f, lambda w: w.update({"model.norm.weight": torch.ones(3)})),
            r"is \(3,\) in its files",
        ),
        (
            lambda f: edit(f, lambda w: w.update({"lm_head.weight": torch.ones(53, 16)})),
            "have lm_head.weight, which is tied",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "no safetensors"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), "not in the usual files"),
        (lambda f: configure(f, quantization_config={"quant_method": "fp8"}), "quantized"),
    ],
)
def test_what_cannot_be_read_one_by_one_is_refused_with_the_reason(tiny, tmp_path, spoil, reason):
    tiny(tie_word_embeddings=True).save_pretrained(tmp_path)
    spoil(tmp_path)
    with pytest.raises(CannotStream, match=reason):
        open_causal_lm(str(tmp_path), dtype=torch.float32)


def test_a_file_that_is_cut_short_is_named(tiny, tmp_path):
    tiny().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"cannot read weights from .*model\.safetensors"):
        open_causal_lm(str(tmp_path), dtype=torch.float32)


EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_are_joined_on_loading_are_read_row_by_row(tiny, tmp_path, dtype):
    """More than ten of them: as text, expert 10 would stand before expert 2."""
    tiny("qwen3_moe", **EXPERTS).save_pretrained(tmp_path)
    assert "model.layers.0.mlp.experts.11.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    for open_model, load in BOTH:
        opened, source = open_model(str(tmp_path), dtype=dtype)
        loaded = load(str(tmp_path), dtype=dtype, device="cpu")
        weights = read_whole(opened, source)
        assert weights["model.layers.1.mlp.experts.gate_up_proj"].shape == (12, 16, 16)
        for name, value in loaded.named_parameters():
            assert torch.equal(weights[name], value), name


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda w: w.pop("model.layers.0.mlp.experts.3.up_proj.weight"), "lack some of"),
        (lambda w: [w.pop(f"model.layers.0.mlp.experts.{i}.up_proj.weight") for i in range(12)], "some of"),
        (
            lambda w: w.update({"model.layers.0.mlp.experts.3.up_proj.weight": torch.ones(5, 16)}),
            "differ in shape",
        ),
        (
            lambda w: [w.pop(n) for n in list(w) if "layers.0.mlp.experts.11." in n],
            r"gate_up_proj is \(11, 16, 16\) in its files",
        ),
    ],
)
def test_experts_that_are_not_all_there_are_refused(tiny, tmp_path, spoil, reason):
    tiny("qwen3_moe", **EXPERTS).save_pretrained(tmp_path)
    edit(tmp_path, spoil)
    with pytest.raises(CannotStream, match=reason):
        open_causal_lm(str(tmp_path), dtype=torch.float32)


def test_weights_that_change_in_another_way_are_refused(tiny, tmp_path, monkeypatch):
    """A conversion that we do not know must not be taken for a copy."""
    import transformers.conversion_mapping as mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    tiny().save_pretrained(tmp_path)
    change = WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", [Transpose()])
    monkeypatch.setattr(mapping, "get_model_conversion_mapping", lambda *_, **__: [change])
    with pytest.raises(CannotStream, match=r"converts its weights on loading \(model.layers.0.mlp.down_proj"):
        open_causal_lm(str(tmp_path), dtype=torch.float32)


def test_half_precision_leaves_rotary_frequencies_alone(tiny, tmp_path):
    """Rounded to bfloat16 they would turn position 1000 by up to two radians."""
    plain = tiny()
    plain.save_pretrained(tmp_path)
    exact = plain.model.rotary_emb.inv_freq
    critic = load_value_model(str(tmp_path), dtype=torch.bfloat16, device="cpu")
    cast_parameters(plain, torch.bfloat16)
    for model in (critic.backbone, plain.model):
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
        assert model.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(model.rotary_emb.inv_freq, exact)
    assert critic.score.weight.dtype == torch.bfloat16
