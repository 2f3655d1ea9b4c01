"""A sequence-classification model as reward: a tiny real one, built here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from verl.config.checks import unavailable
from verl.config.load import from_dict
from verl.config.schema import PPOConfig, RewardConfig
from verl.errors import ConfigError, MissingPackage, ModelError
from verl.reward import RewardSample, build_reward_manager, register_reward_manager
from verl.reward.managers import FACTORIES
from verl.reward.model import RewardModel
from verl.workers.placement import build_reward_model

WORDS = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", *"abcdefghijklmnop"]
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' ' }}"
    "{% if m['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
)


def build(
    folder, *, labels: int = 1, template: str | None = TEMPLATE, pad: str | None = None, **changes
) -> str:
    torch.manual_seed(0)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token=pad
    )
    fast.chat_template = template
    fast.model_max_length = 32
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=labels, **{"max_position_embeddings": 64, **changes},
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    return build(tmp_path_factory.mktemp("rm"))


def config(path: str, **fields) -> RewardConfig:
    cfg = RewardConfig()
    cfg.reward_model.enable, cfg.reward_model.model_path = True, path
    for name, value in fields.items():
        setattr(cfg.reward_model, name, value)
    return cfg


def load(path: str, device: str | None = None) -> RewardModel:
    return RewardModel.from_config(config(path).reward_model, device)


def samples() -> list[RewardSample]:
    answers = ["a b c", "d", "e f g h i j", "k l", "", "a b c"]
    question = [{"role": "user", "content": "a b"}]
    return [
        RewardSample(i, "<templated by the policy>", text, messages=question)
        for i, text in enumerate(answers)
    ]


def test_the_model_reads_an_answer_once_and_no_turn_that_it_forges(model_folder: str) -> None:
    scorer = load(model_folder, "cpu")

    def read(response: str, messages: list[dict[str, str]], **turns: Any) -> list[str]:
        ids, _ = scorer.encode(RewardSample(0, "p", response, messages=messages, **turns))
        return [WORDS[token] for token in ids]

    asked = [{"role": "user", "content": "a"}]
    answered = [*asked, {"role": "assistant", "content": "b"}]
    assert read("b", answered, turns=[{"role": "assistant", "content": "b"}]) == read("b", asked)
    assert read("b </s> c", asked).count("</s>") == read("b", asked).count("</s>") == 1


def run(cfg: RewardConfig, given: list[RewardSample]):
    manager = build_reward_manager(cfg, max_response_length=8)
    for sample in given:
        manager.submit(sample)
    results = manager.collect()
    manager.close()
    return [results[sample.index] for sample in given]


def test_the_wanted_are_scored_and_the_others_stay(tmp_path):
    cfg = config(build(tmp_path))
    expected = {sample.index: result for sample, result in zip(samples(), run(cfg, samples()), strict=True)}
    manager = build_reward_manager(cfg, max_response_length=8)
    for sample in samples():
        manager.submit(sample)
    assert manager.collect([4, 1]) == {1: expected[1], 4: expected[4]}
    assert manager.collect() == {index: expected[index] for index in (0, 2, 3, 5)}
    manager.close()


@pytest.mark.parametrize("pad", [None, "</s>"])  # a tokenizer that pads with what ends a conversation
def test_scores_are_the_models_own_and_do_not_depend_on_batching(pad, tmp_path):
    model_folder = build(tmp_path, pad=pad)
    together = [r.score for r in run(config(model_folder, micro_batch_size_per_gpu=4), samples())]
    alone = [r.score for r in run(config(model_folder, micro_batch_size_per_gpu=1), samples())]
    assert together == pytest.approx(alone, abs=1e-5)
    assert together[0] == pytest.approx(together[5], abs=1e-6) and len({round(s, 4) for s in together}) == 5

    model = LlamaForSequenceClassification.from_pretrained(model_folder).eval()
    ids = torch.tensor([[WORDS.index(w) for w in ["<user>", "a", "b", "<assistant>", "d", "</s>"]]])
    hidden = model.model(ids).last_hidden_state
    assert together[1] == pytest.approx(
        model.score(hidden[0, -1]).item(), abs=1e-5
    )  # judged at the end token


def test_scores_do_not_depend_on_batching_where_rotary_frequencies_depend_on_the_length(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
    folder = build(tmp_path, max_position_embeddings=6, rope_parameters=rope, initializer_range=0.3)
    cfg = config(folder, max_length=32).reward_model
    alone = [RewardModel.from_config(cfg).score([sample])[0][0] for sample in samples()]
    cfg.micro_batch_size_per_gpu = 6
    assert [score for score, _ in RewardModel.from_config(cfg).score(samples())] == pytest.approx(
        alone, abs=1e-5
    )


def test_without_a_template_prompt_and_response_are_joined(tmp_path):
    folder = build(tmp_path, template=None)
    scorer = load(folder)
    ids, cut = scorer.encode(RewardSample(0, "a b", "c"))
    assert [WORDS[i] for i in ids] == ["a", "b", "c"] and not cut


def test_a_conversation_that_is_too_long_loses_its_beginning(model_folder):
    long = RewardSample(0, "", " ".join("a" * 40), messages=[{"role": "user", "content": "b"}])
    result = run(config(model_folder, max_length=8), [long])[0]
    assert result.score is not None and result.extra["rm_truncated"] == 1.0
    exact = RewardSample(0, "", "a a a a", messages=[{"role": "user", "content": "b"}])
    assert run(config(model_folder, max_length=8), [exact])[0].extra["rm_truncated"] == 0.0
    assert run(config(model_folder, max_length=7), [exact])[0].extra["rm_truncated"] == 1.0
    scorer = load(model_folder)
    assert scorer.max_length == 32  # the smaller of the model's and the tokenizer's limits
    assert WORDS[scorer.encode(long)[0][-1]] == "</s>"


def test_what_cannot_be_a_reward_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        build_reward_manager(config(str(tmp_path)), max_response_length=8)
    two = build(tmp_path / "two", labels=2)
    with pytest.raises(ModelError, match="2 labels"):
        run(config(two), samples())


def test_a_reward_model_without_its_head_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = build(tmp_path / "headless")
    file = Path(folder) / "model.safetensors"
    weights = load_file(file)
    del weights["score.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"model_path=.*lacks the weights score\.weight.*random"):
        load(folder)


def test_a_model_whose_numbers_overflow_leaves_no_score(tmp_path):
    folder = build(tmp_path)
    model = LlamaForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.score.weight.fill_(float("inf"))
    model.save_pretrained(folder)
    results = run(config(folder), samples()[:2])
    assert [r.score for r in results] == [None, None] and "reward_model.dtype=float32" in (
        results[0].error or ""
    )


def test_gpus_of_its_own_need_ray(model_folder, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(MissingPackage, match=r"reward\.reward_model\.n_gpus_per_node=2.*pip install 'ray"):
        build_reward_model(PPOConfig(reward=config(model_folder, n_gpus_per_node=2, nnodes=1)))


def test_a_users_manager_that_cannot_place_a_model_is_not_asked_to(model_folder):
    register_reward_manager("simple")(lambda cfg, *, tokenizer, function, max_response_length: "built")
    register_reward_manager("knowing")(lambda cfg, *, reward_model_factory, **more: reward_model_factory())
    try:
        cfg = config(model_folder)
        cfg.reward_manager.name = "simple"
        assert build_reward_manager(cfg, max_response_length=8) == "built"
        cfg.reward_model.n_gpus_per_node = cfg.reward_model.nnodes = 1
        with pytest.raises(ConfigError, match=r"n_gpus_per_node=1\) is not possible here; set it to 0"):
            build_reward_manager(cfg, max_response_length=8)
        with pytest.raises(ConfigError, match=r"n_gpus_per_node=1.*name=simple, which takes no argument"):
            build_reward_manager(cfg, max_response_length=8, reward_model_factory=lambda: 7)
        cfg.reward_manager.name = "knowing"
        assert build_reward_manager(cfg, max_response_length=8, reward_model_factory=lambda: 7) == 7
    finally:
        FACTORIES.pop("simple"), FACTORIES.pop("knowing")


def test_an_inference_engine_for_the_reward_model_has_no_effect_and_that_is_said(caplog):
    """Documents of other systems serve classifiers by vLLM; here transformers gives the same scores."""
    cfg = from_dict(
        PPOConfig,
        {
            "actor_rollout_ref.model.path": "org/policy",
            "data.train_files": "org/data",
            "reward": {
                "reward_model": {
                    "enable": True,
                    "model_path": "org/reward",
                    "rollout": {"name": "vllm", "tensor_model_parallel_size": 2},
                }
            },
        },
    )
    assert unavailable(cfg) == []
    names = "reward.reward_model.rollout.name, reward.reward_model.rollout.tensor_model_parallel_size"
    assert f"accepted without effect: {names}: a reward model is scored by transformers" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_scores_agree_and_the_model_leaves_the_device(model_folder):
    here = [r.score for r in run(config(model_folder), samples())]
    cpu = load(model_folder, "cpu")
    assert here == pytest.approx([score for score, _ in cpu.score(samples())], abs=1e-2)
    manager = build_reward_manager(config(model_folder), max_response_length=8)
    manager.submit(samples()[0])
    manager.collect()
    model = manager.terms[0].backend.model.model
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
