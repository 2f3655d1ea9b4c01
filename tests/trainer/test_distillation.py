"""Distillation from a teacher through the training command: the KL falls, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.tiny_run import read_metrics, tiny_run
from verl.config.load import load_ppo_config
from verl.config.plan_report import check_text
from verl.errors import ConfigError, ModelError
from verl.trainer.main_ppo import run
from verl.trainer.preflight import preflight

DISTILL = "actor_rollout_ref.actor.policy_loss.loss_mode=distillation"


def make_teacher(student: Path, folder: Path, **changes) -> Path:
    """Another model, wider than the student, with the student's tokenizer."""
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(student)
    for name, value in {"hidden_size": 96, "initializer_range": 0.3, **changes}.items():
        setattr(config, name, value)
    config.head_dim = config.hidden_size // config.num_attention_heads
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(student / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def teacher(tiny_model_dir, tmp_path_factory) -> Path:
    return make_teacher(tiny_model_dir, tmp_path_factory.mktemp("teacher"))


@pytest.fixture
def config(tiny_model_dir, digits_data, teacher, tmp_path):
    def make(*extra, folder="run"):
        path = f"actor_rollout_ref.teacher.path={teacher}"
        lines = tiny_run(tiny_model_dir, digits_data, DISTILL, path, *extra, folder=tmp_path / folder)
        return load_ppo_config(lines)

    return make


@pytest.fixture
def train(config):
    return lambda *extra, folder="run": read_metrics(run(config(*extra, folder=folder)).folder)


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("kl,top_k", [("reverse", "null"), ("forward", "8")])
def test_the_kl_to_the_teacher_falls(train, kl, top_k):
    rows = train(
        f"actor_rollout_ref.teacher.kl={kl}",
        f"actor_rollout_ref.teacher.top_k={top_k}",
        "trainer.total_training_steps=30",
        "actor_rollout_ref.actor.optim.lr=1e-2",
    )
    values = [row["actor/distillation_kl"] for row in rows]
    assert all(math.isfinite(value) and value > 0 for value in values)
    assert sum(values[-3:]) < 0.6 * sum(values[:3]), values
    assert "timing_s/teacher" in rows[0]


def test_the_student_as_its_own_teacher_stays_what_it_is(train, tiny_model_dir):
    (row,) = train(f"actor_rollout_ref.teacher.path={tiny_model_dir}", "trainer.total_training_steps=1")
    assert row["actor/distillation_kl"] == pytest.approx(0, abs=1e-6)
    assert row["actor/grad_norm"] < 1e-5


@pytest.mark.slow(seconds=3)
def test_mini_batches_micro_batches_and_the_loss(train):
    """With one update, the loss is the mean KL of all tokens of the batch; micro-batches change nothing."""
    settings = "trainer.total_training_steps=1", "actor_rollout_ref.actor.ppo_mini_batch_size=8"
    (one,) = train(*settings, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32")
    (many,) = train(
        *settings,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.teacher.log_prob_micro_batch_size_per_gpu=5",
        folder="many",
    )
    assert one["actor/pg_loss"] == pytest.approx(one["actor/distillation_kl"], rel=1e-5)
    for name in ("actor/pg_loss", "actor/distillation_kl", "actor/grad_norm"):
        assert many[name] == pytest.approx(one[name], rel=1e-4), name


def test_padding_rows_of_the_teacher_are_left_out(train, tiny_model_dir, tmp_path):
    wider = make_teacher(tiny_model_dir, tmp_path / "wider", vocab_size=400)
    (row,) = train(f"actor_rollout_ref.teacher.path={wider}", "trainer.total_training_steps=1")
    assert row["actor/distillation_kl"] > 0


REFUSED = [
    (["actor_rollout_ref.teacher.path="], ["'actor_rollout_ref.teacher.path' is required"]),
    (["actor_rollout_ref.teacher.top_k=0"], ["actor_rollout_ref.teacher.top_k", "at least 1"]),
    (["actor_rollout_ref.teacher.kl=both"], ["actor_rollout_ref.teacher.kl", "reverse, forward"]),
    (
        ["actor_rollout_ref.actor.strategy=megatron"],
        ["'actor_rollout_ref.actor.strategy' is megatron", "distillation", "set it to fsdp"],
    ),
    (
        ["actor_rollout_ref.teacher.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2"],
        ["'actor_rollout_ref.teacher.ulysses_sequence_parallel_size' is 2", "set it to 1"],
    ),
]


@pytest.mark.parametrize("extra,words", REFUSED)
def test_settings_that_do_not_fit_are_refused(config, extra, words):
    with pytest.raises(ConfigError) as caught:
        config(*extra)
    for word in words:
        assert word in str(caught.value)


def test_other_tokens_are_refused_before_weights_are_read(config, tiny_model_dir, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_model_dir, other)
    file = other / "tokenizer.json"
    text = json.loads(file.read_text())
    vocab = text["model"]["vocab"]
    first, second = list(vocab)[10:12]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(text))
    cfg = config(f"actor_rollout_ref.teacher.path={other}")
    for refuse in (preflight, check_text):
        with pytest.raises(
            ConfigError, match=r"'actor_rollout_ref.teacher.path'.* 2 are not the same tokens"
        ):
            refuse(cfg)


def test_another_number_of_tokens_without_tokenizers_is_refused(config, tiny_model_dir, tmp_path):
    other = make_teacher(tiny_model_dir, tmp_path / "other", vocab_size=400)
    (other / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"'actor_rollout_ref.teacher.path'.*400 tokens, the student"):
        preflight(config(f"actor_rollout_ref.teacher.path={other}"))


def test_a_top_k_above_the_vocabulary_is_refused(config):
    with pytest.raises(ConfigError, match=r"'actor_rollout_ref.teacher.top_k' is 100000.*at most"):
        preflight(config("actor_rollout_ref.teacher.top_k=100000"))


def test_a_missing_folder_is_refused(config, tmp_path):
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.teacher.path: there is no model folder"):
        preflight(config(f"actor_rollout_ref.teacher.path={tmp_path}/nothing"))


def test_a_teacher_too_small_for_the_tokenizer_is_refused_for_a_model_given_as_an_object(
    config, tiny_model_dir, tmp_path
):
    from transformers import AutoTokenizer, LlamaForCausalLM

    from verl.workers.local import LocalGroup

    small = make_teacher(tiny_model_dir, tmp_path / "small", vocab_size=8, eos_token_id=1, pad_token_id=0)
    with pytest.raises(ModelError, match=r"actor_rollout_ref.teacher.path: the teacher has 8 tokens"):
        LocalGroup(
            config(f"actor_rollout_ref.teacher.path={small}"),
            AutoTokenizer.from_pretrained(tiny_model_dir),
            training_steps=1,
            model=LlamaForCausalLM.from_pretrained(tiny_model_dir),
        )


def test_the_plan_counts_the_teacher(config):
    cfg = config("trainer.n_gpus_per_node=2")
    text = check_text(cfg)
    assert "teacher: weights" in text and "teacher" in text.split("layout")[1]


def test_a_teacher_without_distillation_has_no_effect(tiny_model_dir, digits_data, teacher):
    from verl.config.unused_keys import unused_keys

    cfg = load_ppo_config(tiny_run(tiny_model_dir, digits_data, f"actor_rollout_ref.teacher.path={teacher}"))
    assert any("actor_rollout_ref.teacher.path" in line for line in unused_keys(cfg))
