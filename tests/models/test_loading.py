"""Loading policies and critics, and refusing folders that are neither."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest
import torch

from verl.data.tokenizer import generation_stop_ids
from verl.errors import ModelError
from verl.models.loading import load_causal_lm, load_value_model
from verl.models.meta_init import open_causal_lm
from verl.models.value_model import ValueModel

CPU = {"dtype": torch.float32, "device": "cpu"}


@pytest.fixture
def folder(tiny, tmp_path):
    tiny().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_saved_model_comes_back(tiny, folder):
    loaded = load_causal_lm(str(folder), **CPU)
    ids = torch.arange(5)[None]
    assert torch.equal(loaded(ids).logits, tiny()(ids).logits)


def test_precision_is_the_one_asked_for(folder):
    loaded = load_causal_lm(str(folder), dtype=torch.bfloat16, device="cpu")
    assert {param.dtype for param in loaded.parameters()} == {torch.bfloat16}


def test_overrides_change_the_configuration(folder):
    loaded = load_causal_lm(str(folder), override_config={"rms_norm_eps": 0.5}, **CPU)
    assert loaded.model.norm.variance_epsilon == 0.5


@pytest.mark.parametrize(
    ("architecture", "dropout"),
    [
        ("llama", {"attention_dropout": 0.4}),
        ("opt", {"dropout": 0.4, "ffn_dim": 24, "word_embed_proj_dim": 16}),
        ("seed_oss", {"residual_dropout": 0.4}),
    ],
)
def test_dropout_is_switched_off(tiny, tmp_path, architecture, dropout):
    """In modules, in attention, and where a layer calls the function with a share of its own."""
    tiny(architecture, **dropout).save_pretrained(tmp_path)
    loaded = load_causal_lm(str(tmp_path), **CPU).train()
    ids = torch.arange(6)[None]
    assert torch.equal(loaded(ids).logits, loaded(ids).logits)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "nothing", "model.path=.*does not exist"),
        (lambda path: path, "has no config.json"),
    ],
)
def test_a_folder_that_is_no_model_is_named(tmp_path, make, message):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=message):
        load_causal_lm(str(make(tmp_path)), **CPU)


def test_an_unknown_model_type_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(ModelError, match="no_such_model"):
        load_causal_lm(str(tmp_path), **CPU)


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot load weights"):
        load_causal_lm(str(folder), **CPU)


def test_a_pickle_that_is_no_weights_is_refused_and_not_run(folder, tmp_path):
    class Attack:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.save({"model.embed_tokens.weight": Attack()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot load weights"):
        load_causal_lm(str(folder), dtype=torch.float32, device="cpu")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000])
def test_a_generation_config_of_something_else_is_named(folder, text):
    (folder / "generation_config.json").write_text(text)
    for load in (open_causal_lm, partial(load_causal_lm, device="cpu")):
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            load(str(folder), dtype=torch.float32)


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000, '{"eos_token_id": ["a", {}]}'])
def test_end_tokens_that_are_no_numbers_are_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be used"):
        generation_stop_ids(tmp_path)


def test_an_index_of_pickles_that_leads_out_of_the_folder_is_refused(folder):
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../x.bin"}}')
    with pytest.raises(ModelError, match="not a file beside it"):
        load_causal_lm(str(folder), dtype=torch.float32, device="cpu")


def test_an_unknown_override_is_refused(folder):
    with pytest.raises(ModelError, match="rope_thet"):
        load_causal_lm(str(folder), override_config={"rope_thet": 1}, **CPU)


def test_a_new_critic_says_zero_everywhere(folder):
    critic = load_value_model(str(folder), **CPU)
    assert isinstance(critic, ValueModel)
    values = critic(input_ids=torch.arange(6)[None])
    assert values.shape == (1, 6) and not values.any()


def test_a_saved_head_is_used(folder):
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file({**load_file(file), "score.weight": torch.ones(1, 16)}, file, metadata={"format": "pt"})
    critic = load_value_model(str(folder), **CPU)
    assert torch.equal(critic.score.weight, torch.ones(1, 16)) and not critic.score.bias.any()


def test_a_head_of_several_labels_is_refused(folder):
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file({**load_file(file), "score.weight": torch.ones(3, 16)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="one scalar per token"):
        load_value_model(str(folder), **CPU)


def test_a_reward_model_has_no_bias_and_keeps_a_saved_weight(folder, tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForSequenceClassification

    file = folder / "model.safetensors"
    head = {"score.weight": torch.ones(1, 16), "score.bias": torch.ones(1)}
    save_file({**load_file(file), **head}, file, metadata={"format": "pt"})
    model = load_value_model(str(folder), reward=True, **CPU)
    assert torch.equal(model.score.weight, torch.ones(1, 16)) and model.score.bias is None
    model.save_config(tmp_path / "config")
    saved = AutoConfig.from_pretrained(tmp_path / "config")
    assert saved.num_labels == 1
    named = AutoModelForSequenceClassification.from_config(saved)
    assert named.state_dict().keys() == model.state_dict().keys()
    assert type(named).__name__ in saved.architectures


def test_a_reward_model_that_transformers_could_not_open_is_refused(tiny, tmp_path):
    tiny("granite").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no GraniteForSequenceClassification"):
        load_value_model(str(tmp_path), reward=True, **CPU)


def test_a_reward_model_whose_head_is_not_found_is_not_given_a_new_one(folder):
    import json

    file = folder / "config.json"
    document = json.loads(file.read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    file.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"LlamaForSequenceClassification, but its head .*safetensors"):
        load_value_model(str(folder), reward=True, **CPU)


@pytest.mark.parametrize(("lost", "load"), [
    ("model.layers.1.mlp.up_proj.weight", load_causal_lm),
    ("model.layers.1.mlp.up_proj.weight", load_value_model),
    ("lm_head.weight", load_causal_lm),
])  # fmt: skip
def test_a_weight_that_is_missing_is_never_made_up(tiny, tmp_path, lost, load):
    from safetensors.torch import load_file, save_file

    tiny("llama", tie_word_embeddings=False).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[lost]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"lack .*{lost.removeprefix('model.')}.*model.path"):
        load(str(tmp_path), dtype=torch.float32, device="cpu")
