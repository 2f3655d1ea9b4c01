"""The policy as its own teacher, which reads another prompt: what it is given, what it learns, what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from tests.tiny_run import read_metrics, tiny_run
from verl.config.load import load_ppo_config
from verl.config.methods import skips_zero_advantage
from verl.data.proto import DataProto
from verl.data.rl_dataset import RLDataset
from verl.errors import ConfigError, DataError
from verl.models.distillation import LOG_PROBS, TOKENS
from verl.observe.metrics import Timer
from verl.trainer.main_ppo import run
from verl.workers.local import LocalGroup

pytestmark = pytest.mark.slow(seconds=3)

TEACHER = "actor_rollout_ref.teacher"
DISTILL = "actor_rollout_ref.actor.policy_loss.loss_mode=distillation"
LETTERS = [f"l{number}" for number in range(8)]
QUESTIONS = [f"q{number}" for number in range(12)]
LENGTH = 3
"""Letters of an answer: one of 512, so that guessing earns nothing."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Path:
    """A model that writes a code which its prompt tells, and random letters where none is told; the questions'
    codes, and a reward for the right one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("reader")
    words = ["<pad>", "<eos>", "known", *QUESTIONS, *LETTERS]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    first, questions = words.index("l0"), torch.arange(3, 3 + len(QUESTIONS))
    for _ in range(200):
        asked = questions[torch.randint(len(questions), (64, 1))]
        code, drawn = torch.randint(first, first + 8, (2, 64, LENGTH)).unbind()
        told = torch.cat([asked, torch.full((64, 1), 2), code, drawn], dim=1)
        logits = model(told).logits[:, 1 + LENGTH : -1].flatten(0, 1)
        of_told = torch.nn.functional.cross_entropy(logits, code.flatten())
        untold = model(torch.cat([asked, drawn], dim=1)).logits[:, :-1].flatten(0, 1)
        of_untold = torch.nn.functional.cross_entropy(untold, drawn.flatten())
        (of_told + of_untold).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert of_told < 0.2
    model.save_pretrained(folder)
    draw = random.Random(1)
    codes = {question: " ".join(draw.choices(LETTERS, k=LENGTH)) for question in QUESTIONS}
    rows = [{"prompt": question, "ground_truth": code} for question, code in codes.items()]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "digits_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str.split() == ground_truth.split())\n"
    )
    return folder


def settings(reader, folder, *extra):
    return tiny_run(
        reader,
        reader,
        "data.train_batch_size=12",
        f"data.max_response_length={LENGTH}",
        "data.apply_chat_template=never",
        "actor_rollout_ref.rollout.ignore_eos=True",
        f"{TEACHER}.prompt_template='{{prompt}} known {{ground_truth}}'",
        *extra,
        folder=folder,
    )


@pytest.fixture
def train(reader, tmp_path):
    def run_with(*extra, folder="run"):
        return read_metrics(run(load_ppo_config(settings(reader, tmp_path / folder, *extra))).folder)

    return run_with


def mean_reward(rows):
    return sum(row["critic/rewards/mean"] for row in rows) / len(rows)


STEPS = "trainer.total_training_steps=60", "actor_rollout_ref.actor.optim.lr=3e-3"


@pytest.mark.slow(seconds=6)
def test_grpo_does_not_learn_where_no_group_has_a_reward(train):
    rows = train(*STEPS)
    assert sum(row["training/groups_constant"] for row in rows) > 0.95 * len(rows) * len(QUESTIONS)
    assert mean_reward(rows[-10:]) < 0.1


@pytest.mark.slow(seconds=12)
@pytest.mark.parametrize(
    "extra", [(DISTILL, f"{TEACHER}.kl=jensen_shannon"), (f"{TEACHER}.coef=1.0", f"{TEACHER}.kl=forward")]
)
def test_self_distillation_learns_there(train, extra):
    rows = train(*STEPS, f"{TEACHER}.source=start", *extra)
    assert mean_reward(rows[-10:]) > 0.5
    assert rows[-1]["actor/distillation_kl"] < 0.5 * rows[0]["actor/distillation_kl"]


def test_the_teacher_reads_its_prompt_before_the_students_response(reader, tmp_path):
    """Log-probs of the teacher's column against the model's own forward over its prompt and the response."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(reader)
    cfg = load_ppo_config(
        settings(reader, tmp_path, f"{TEACHER}.source=current", f"{TEACHER}.top_k=5", f"{TEACHER}.coef=1.0")
    )
    dataset = RLDataset(
        cfg.data,
        cfg.data.train_files,
        tokenizer,
        teacher_template=cfg.actor_rollout_ref.teacher.prompt_template,
    )
    prompts = dataset.batch([0, 1], ["a", "b"])
    known = prompts.non_tensor_batch["ground_truth"]
    assert tokenizer.batch_decode(list(prompts.non_tensor_batch["teacher_prompt_ids"])) == [
        f"q0 known {known[0]}", f"q1 known {known[1]}"
    ]  # fmt: skip
    group = LocalGroup(cfg, tokenizer, training_steps=1)
    ids = torch.tensor([[0, 3, 16, 17, 18], [0, 4, 15, 19, 0]])
    seen = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 0]])
    batch = DataProto.from_dict(
        {"input_ids": ids, "attention_mask": seen, "response_mask": seen[:, 2:]},
        {"teacher_prompt_ids": prompts.non_tensor_batch["teacher_prompt_ids"]},
        {"temperature": 1.0},
    )
    group.add_columns(batch, {"teacher_tokens", "teacher_log_probs"}, Timer())
    model = LlamaForCausalLM.from_pretrained(reader)
    for row, count in ((0, 3), (1, 2)):
        before = list(prompts.non_tensor_batch["teacher_prompt_ids"][row])
        whole = torch.tensor([[*before, *ids[row, 2 : 2 + count].tolist()]])
        with torch.no_grad():
            log_probs = model(whole).logits[0].log_softmax(-1)[len(before) - 1 : -1]
        tokens = batch.batch[TOKENS][row, :count].long()
        torch.testing.assert_close(
            batch.batch[LOG_PROBS][row, :count, :5], log_probs.gather(1, tokens), atol=1e-5, rtol=1e-4
        )


def test_the_last_message_of_the_user_is_replaced(reader, tmp_path):
    from transformers import AutoTokenizer

    turns = [("system", "l7"), ("user", "q0"), ("assistant", "l1 l2"), ("user", "q1"), ("assistant", "l3")]
    row = {
        "prompt": [{"role": role, "content": text} for role, text in turns],
        "extra_info": {"hint": "l5 l6"},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    cfg = load_ppo_config(settings(reader, tmp_path, "data.apply_chat_template=always"))
    tokenizer = AutoTokenizer.from_pretrained(reader)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    template = "known {extra_info[hint]} {prompt}"
    dataset = RLDataset(cfg.data, [str(tmp_path / "rows.jsonl")], tokenizer, teacher_template=template)
    (ids,) = dataset.batch([0], ["a"]).non_tensor_batch["teacher_prompt_ids"]
    assert tokenizer.decode(ids) == "l7 q0 l1 l2 known l5 l6 q1 l3"


@pytest.mark.parametrize("source", ["start", "current"])
def test_with_adapters_there_is_one_model_and_the_start_is_what_is_below_them(reader, tmp_path, source):
    from transformers import AutoTokenizer

    keys = DISTILL, f"{TEACHER}.source={source}", f"{TEACHER}.top_k=5", "actor_rollout_ref.model.lora_rank=4"
    group = LocalGroup(
        load_ppo_config(settings(reader, tmp_path, *keys)),
        AutoTokenizer.from_pretrained(reader),
        training_steps=1,
    )
    assert set(group.engines()) == {"actor"}
    ids = torch.tensor([[3, 16, 17, 18]])
    seen = torch.ones_like(ids)

    def log_probs():
        batch = DataProto.from_dict(
            {"input_ids": ids, "attention_mask": seen, "response_mask": seen[:, 1:]},
            {"teacher_prompt_ids": [[3, 2, 16, 17, 18]]},
            {"temperature": 1.0},
        )
        group.add_columns(batch, {LOG_PROBS, TOKENS}, Timer())
        return batch.batch[LOG_PROBS]

    before = log_probs()
    with torch.no_grad(), group.actor_engine.weights().structure() as module:
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter += 0.5
    assert torch.equal(log_probs(), before) == (source == "start")


def test_the_kl_beside_a_policy_loss_reaches_rows_without_advantage(train):
    common = (f"{TEACHER}.source=current", f"{TEACHER}.top_k=8", "trainer.total_training_steps=1")
    (row,) = train(*common, f"{TEACHER}.coef=0.5")
    assert row["training/groups_constant"] == 12 and row["actor/grad_norm"] > 0.01
    assert row["actor/distillation_kl"] > 0.1
    (bound,) = train(*common, f"{TEACHER}.coef=0.5", f"{TEACHER}.clip=0.01", folder="bound")
    assert 0 < bound["actor/distillation_kl"] <= 0.01 and bound["actor/grad_norm"] < row["actor/grad_norm"]


def test_rows_without_advantage_are_not_left_out(reader, tmp_path):
    keys = f"{TEACHER}.source=current", f"{TEACHER}.top_k=8", f"{TEACHER}.coef=0.5"
    assert not skips_zero_advantage(load_ppo_config(settings(reader, tmp_path, *keys)))
    assert skips_zero_advantage(load_ppo_config(tiny_run(reader, reader, folder=tmp_path)))


@pytest.mark.parametrize(
    "template,words",
    [
        ("{solution}", ["prompt_template cannot be filled", "solution", "ground_truth"]),
        ("{prompt", ["prompt_template cannot be filled", "written twice"]),
    ],
)
def test_a_template_that_a_row_cannot_fill_is_refused(train, template, words):
    with pytest.raises(DataError) as caught:
        train(DISTILL, f"{TEACHER}.source=start", f"{TEACHER}.prompt_template='{template}'")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "extra,words",
    [
        ([DISTILL], ["'actor_rollout_ref.teacher.path' is required", "source=start"]),
        (
            [DISTILL, f"{TEACHER}.source=start", f"{TEACHER}.path=x"],
            [f"'{TEACHER}.path' is given", "set one"],
        ),
        ([DISTILL, f"{TEACHER}.source=current"], [f"'{TEACHER}.top_k' is not set"]),
        (
            [DISTILL, f"{TEACHER}.source=current", f"{TEACHER}.top_k=8", f"{TEACHER}.prompt_template=null"],
            [f"'{TEACHER}.prompt_template' is not set"],
        ),
        (
            [DISTILL, f"{TEACHER}.source=start", f"{TEACHER}.coef=1"],
            [f"'{TEACHER}.coef' is 1", "set it to 0"],
        ),
        ([DISTILL, f"{TEACHER}.source=ema"], [f"{TEACHER}.source", "path, start, current"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(reader, tmp_path, extra, words):
    with pytest.raises(ConfigError) as caught:
        load_ppo_config(settings(reader, tmp_path, *extra))
    for word in words:
        assert word in str(caught.value)
