"""The weights of a Megatron stage: read in slices, viewed, gathered and handed over under Hugging Face names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("megatron.core", reason="needs megatron-core (make test-components)")
pytestmark = [pytest.mark.components, pytest.mark.timeout(1200)]

WORKER = Path(__file__).with_name("megatron_weights_worker.py")


@pytest.fixture(scope="module")
def models(tmp_path_factory, tools_of_session):
    """An odd vocabulary, so that the last rank has fewer rows than the others."""
    folder, tools = tmp_path_factory.mktemp("models"), tools_of_session
    for name in ("llama", "mistral", "qwen2", "qwen3"):
        tools.model(name).save_pretrained(folder / name)
        if name != "mistral":
            tools.model(name, tie_word_embeddings=True).save_pretrained(folder / f"{name}_tied")
    tools.model("qwen3_moe").save_pretrained(folder / "qwen3_moe")
    tools.model("mixtral", num_local_experts=4, num_experts_per_tok=2).save_pretrained(folder / "mixtral")
    biased = tools.model("llama", attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        for name, param in biased.named_parameters():
            if name.endswith("bias"):
                param.normal_()
    biased.save_pretrained(folder / "biases")
    critic = tools.engine("critic", model=tools.model("qwen2"))
    torch.nn.init.normal_(tools.module(critic).score.weight)
    critic.save_hf(folder / "critic")
    return folder


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, models, run_ranks):
    names = ["loading", "critics", "mixtures"] + (["uneven"] if request.param == 4 else [])
    return run_ranks(WORKER, request.param, models, names)


def test_ranks_read_their_slices_and_give_back_the_files_bit_for_bit(ranks):
    assert all(name in ranks for name in ("loading", "mixtures"))  # checked by the ranks themselves


def test_a_critic_has_the_head_of_its_files_or_zeros(ranks, models):
    saved = load_file(models / "critic/model.safetensors")
    for found in ranks["critics"]:
        assert all(not value.any() for value in found["qwen2"].values()) and len(found["qwen2"]) == 2
        for name, value in found["critic"].items():
            assert torch.equal(value, saved[name]), name
        assert found["critic"]["score.weight"].any()
