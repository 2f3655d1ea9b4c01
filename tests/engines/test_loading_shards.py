"""Several ranks load a model: each reads its own rows, and has what it would have of a whole model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

WORKER = Path(__file__).with_name("loading_worker.py")
LARGE = {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 12, "num_attention_heads": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory, tools_of_session):
    """Sizes are odd on purpose: rows that do not divide by the ranks."""
    make = tools_of_session.model
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "qwen2", "gemma", "qwen3_moe"):
        make(name).save_pretrained(folder / name)
    make(tie_word_embeddings=True).save_pretrained(folder / "tied")
    make(**LARGE).save_pretrained(folder / "large")
    make().save_pretrained(folder / "parts", max_shard_size="20KB")
    assert (folder / "parts/model.safetensors.index.json").is_file()
    weights = {**load_file(folder / "tied/model.safetensors"), "lm_head.weight": torch.ones(61, 32)}
    shutil.copytree(folder / "tied", folder / "twice")
    save_file(weights, folder / "twice/model.safetensors", metadata={"format": "pt"})
    critic = tools_of_session.engine("critic", model=make("qwen2"))
    torch.nn.init.normal_(tools_of_session.module(critic).score.weight)
    critic.save_hf(folder / "critic")
    return folder


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)])
def loaded(request, models, run_ranks):
    world = request.param
    results = run_ranks(WORKER, world, models, ["cases" if world == 2 else "few_cases", "memory"])
    return {"cases": results.pop("few_cases", None), **results}, models


def bit_equal(found, expected, label):
    assert found.keys() == expected.keys(), label
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, (label, name)
        assert torch.equal(found[name], value), (label, name)


def test_every_rank_has_the_shards_of_the_whole_model_bit_for_bit(loaded):
    results, _ = loaded
    for rank, cases in enumerate(results["cases"]):
        for name, case in cases.items():
            streamed, whole = case["streamed"], case["whole"]
            label = f"{name}, rank {rank}"
            for part in ("shards", "masters", "buffers"):
                bit_equal(streamed[part], whole[part], f"{label}, {part}")
            assert streamed["trained"] == whole["trained"], label


def test_a_streamed_model_answers_and_trains_like_a_whole_one(loaded):
    """Also shows that the optimiser works on the shards the model computes with."""
    results, _ = loaded
    for cases in results["cases"]:
        for name, case in cases.items():
            streamed, whole = case["streamed"], case["whole"]
            assert torch.equal(streamed["answers"], whole["answers"]), name
            if "norm" in whole:
                assert streamed["norm"] == whole["norm"] > 0, name
                bit_equal(streamed["after"], whole["after"], name)


def test_a_streamed_model_is_saved_and_handed_over_like_a_whole_one(loaded):
    results, models = loaded
    world = len(results["cases"])
    saved = {name for case in results["cases"] for name, own in case.items() if "exported" in own["whole"]}
    assert saved == {"tied", "new_critic", "experts"}
    for name in saved:
        for case in results["cases"]:
            bit_equal(case[name]["streamed"]["exported"], case[name]["whole"]["exported"], name)
        streamed, whole = (models / f"saved_{name}_{world}_{way}" for way in ("streamed", "whole"))
        files = {file.name for file in whole.iterdir()}
        assert {"config.json", "model.safetensors"} <= files == {file.name for file in streamed.iterdir()}
        for file in files:
            if file.endswith(".json"):
                assert (streamed / file).read_text() == (whole / file).read_text(), (name, file)
        bit_equal(load_file(streamed / "model.safetensors"), load_file(whole / "model.safetensors"), name)


def test_only_what_is_not_in_the_usual_files_is_loaded_whole_and_said_so(loaded):
    results, _ = loaded
    for cases in results["cases"]:
        for name, case in cases.items():
            if name == "tied_twice":
                (text,) = case["notices"]
                assert "every rank loads all of" in text and "have lm_head.weight" in text
            else:
                assert case["notices"] == [], name


def test_weights_are_those_of_the_files(loaded):
    """Guards the comparisons above: rank 0's shard is the first rows of what the file holds."""
    results, models = loaded
    weights = load_file(models / "llama/model.safetensors")
    for name, shard in results["cases"][0]["policy"]["streamed"]["shards"].items():
        assert torch.equal(shard, weights[name][: shard.shape[0]]), name
        assert 0 < shard.shape[0] < weights[name].shape[0]


def test_a_rank_holds_its_share_of_the_model_and_not_the_whole(loaded):
    """While it loads, counted by torch's allocator; while it first runs, by the live tensors: its shards and one whole
    layer. A whole model and layers that stay whole show that either count can tell."""
    results, models = loaded
    file = models / "large/model.safetensors"
    size, world = sum(tensor.nbytes for tensor in load_file(file).values()), len(results["memory"])
    assert sum(rank["read"] for rank in results["memory"]) == size
    for rank in results["memory"]:
        shares = {name: round(held / size, 3) for name, held in rank.items()}
        assert 1 / world - 0.05 < shares["read"] <= shares["filled"] < 1 / world + 0.05, shares
        assert shares["filled"] < shares["built"] < 1 / world + 0.3, shares
        assert shares["whole"] >= 1 and shares["kept"] > 1, shares
