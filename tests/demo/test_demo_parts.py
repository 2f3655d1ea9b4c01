"""Data, tokenizer, model folder and reward of the demo."""

import re

import pyarrow.parquet as pq
import pytest

from verl.data.tasks.word_problems import PLANS, TEMPLATES
from verl.demo import cli
from verl.demo.data import write_files
from verl.demo.model import build_model_folder, build_tokenizer
from verl.demo.reward import compute_score
from verl.demo.show import DemoAnswer, accuracy, answer_with_transformers, examples
from verl.errors import ConfigError


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("data"), seed=3, demonstrations=1500, train=800, held_out=150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return path, build_model_folder(path, seed=0)


def questions(path):
    return [row["prompt"][0]["content"] for row in pq.read_table(path).to_pylist()]


def pairs(path):
    return {tuple(re.findall(r"\d+", text)) for text in questions(path)}


def test_no_pair_of_numbers_of_a_held_out_problem_is_ever_trained_on(files):
    held_out, seen = pairs(files.held_out), pairs(files.train) | pairs(files.demonstrations)
    assert len(held_out) > 20 and len(seen) > 200
    assert not held_out & seen


def test_held_out_problems_are_the_same_for_every_seed_and_disjoint_from_every_seeds_training(
    files, tmp_path
):
    other = write_files(tmp_path, seed=11, demonstrations=300, train=300, held_out=150)
    assert questions(other.held_out) == questions(files.held_out)
    assert questions(other.train) != questions(files.train)
    assert not pairs(files.held_out) & (pairs(other.train) | pairs(other.demonstrations))


def test_held_out_problems_are_of_every_kind_and_all_different(files):
    rows = pq.read_table(files.held_out).to_pylist()
    assert len({row["prompt"][0]["content"] for row in rows}) == 150
    shares = [sum(row["extra_info"]["plan"] == plan for row in rows) / 150 for plan in PLANS]
    assert min(shares) > 0.15


def test_demonstrations_calculate_right_but_mostly_just_add(files):
    rows = pq.read_table(files.demonstrations).to_pylist()
    adds = right = 0
    for row in rows:
        first, second = map(int, re.findall(r"\d+", row["prompt"][0]["content"]))
        worked, answer = row["response"].split(" #### ")
        sum_or_difference = re.match(r"(\d+)([+-])(\d+)=(\d+) ", worked)
        if sum_or_difference:
            a, sign, b, value = sum_or_difference.groups()
            assert (int(a), int(b)) == (first, second)
            assert int(value) == (first + second if sign == "+" else first - second) == int(answer)
            adds += sign == "+"
        else:
            assert int(answer) in (first, second)
        right += answer == _truth(row["prompt"][0]["content"], first, second)
    assert 0.65 < adds / len(rows) < 0.85
    assert 0.35 < right / len(rows) < 0.55


def _truth(text, first, second):
    if text.endswith("in all?"):
        return str(first + second)
    if text.endswith("left?"):
        return str(first - second)
    return str(first if text.endswith("at first?") else second)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("47-5=42 apples. #### 42", 1.0),
        ("#### 42", 1.0),
        ("nonsense #### 42", 1.0),
        ("47-5=42 apples.", 0.0),
        ("#### 43", 0.0),
        ("#### 42 #### 43", 0.0),
        ("#### 4 2", 0.0),
        ("####", 0.0),
        ("", 0.0),
    ],
)
def test_reward_is_one_for_the_right_final_number_only(response, score):
    assert compute_score("tasks/word_problems", response, "42") == score


def test_tokenizer_reads_and_writes_every_text_of_the_demo(files, folder):
    tokenizer = build_tokenizer()
    rows = pq.read_table(files.demonstrations).to_pylist()
    texts = questions(files.held_out) + [row["response"] for row in rows]
    used = set()
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        used.update(ids)
    assert tokenizer.unk_token_id not in used
    assert len(used) > 0.85 * (len(tokenizer) - 6)
    assert [tokenizer.decode([i]) for i in tokenizer("47+5")["input_ids"]] == ["4", "7", "+", "5"]


def test_chat_template_ends_where_the_answer_starts():
    tokenizer = build_tokenizer()
    story = "Tom has 34 books. He sells 20. How many books are gone?"
    messages = [{"role": "user", "content": story}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == f"<|user|>{story}<|end|><|assistant|>"
    answered = [*messages, {"role": "assistant", "content": "20 books. #### 20"}]
    whole = tokenizer.apply_chat_template(answered, tokenize=False)
    assert whole == prompt + "20 books. #### 20<|end|>"
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == story + "20 books. #### 20"


def test_model_folder_loads_like_any_other(folder):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    path, parameters = folder
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in path.iterdir()
    }
    assert (path / "model.safetensors").stat().st_mode & 0o777 == 0o644  # others may read it
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert sum(weight.numel() for weight in model.parameters()) == parameters < 300_000
    assert AutoConfig.from_pretrained(path).vocab_size == len(tokenizer)
    assert tokenizer.chat_template
    assert GenerationConfig.from_pretrained(path).eos_token_id == tokenizer.eos_token_id


def test_weights_depend_on_the_seed_alone(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        build_model_folder(tmp_path / name, seed)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"] != weights["c"]


def test_answers_of_a_saved_folder_do_not_depend_on_the_others_in_the_batch(folder):
    prompts = [
        f"<|user|>{text}<|end|><|assistant|>" for text in ("How many apples?", "Tom has 34 books. How many?")
    ]
    together = answer_with_transformers(folder[0], prompts)
    assert together == [answer_with_transformers(folder[0], [prompt])[0] for prompt in prompts]


def answer(plan, right):
    return DemoAnswer("p", "q", plan, "#### 1", right)


def test_accuracy_and_examples():
    before = [answer("add", True), answer("add", False), answer("subtract", False), answer("first", False),
              answer("second", True)]  # fmt: skip
    after = [answer("add", True), answer("add", True), answer("subtract", False), answer("first", True),
             answer("second", True)]  # fmt: skip
    assert accuracy(before) == 0.4 and accuracy(after) == 0.8
    assert accuracy(after, "subtract") == 0.0
    shown = examples(before, after)
    assert [old.plan for old, _ in shown] == ["add", "first", "subtract", "second"], "what was learned first"
    assert {old.plan for old, _ in shown} == set(PLANS)
    assert shown[0] == (before[1], after[1])


def test_every_kind_of_question_has_its_templates():
    assert set(TEMPLATES) == set(PLANS)
    texts = [text for templates in TEMPLATES.values() for text in templates]
    assert len(texts) == len(set(texts)) > 30


def test_only_an_empty_folder_is_written_to(tmp_path, monkeypatch):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match="--out .*used is not empty"):
        cli.choose_folder(tmp_path / "used")
    with pytest.raises(ConfigError, match="cannot write to .*precious.txt"):
        cli.choose_folder(tmp_path / "used" / "precious.txt")
    assert cli.choose_folder(tmp_path / "new") == tmp_path / "new"
    monkeypatch.chdir(tmp_path)
    assert [cli.choose_folder(None).name for _ in range(3)] == ["run-1", "run-2", "run-3"]


def test_both_stages_are_valid_command_lines(files, folder, tmp_path):
    from verl.config.load import load_ppo_config, load_sft_config

    sft = load_sft_config(cli.sft_arguments(folder[0], files, tmp_path / "sft", 5))
    rl = load_ppo_config(cli.rl_arguments(folder[0], files, tmp_path / "rl", 5))
    assert sft.trainer.seed == rl.trainer.seed == 5
    assert rl.algorithm.adv_estimator == "grpo"
    assert rl.data.val_files == [str(files.held_out)]
    assert str(files.held_out) not in [*sft.data.train_files, *sft.data.val_files, *rl.data.train_files]


@pytest.mark.slow
def test_a_stage_stopped_by_hand_ends_the_demo(tmp_path, monkeypatch):
    """SIGTERM in the first stage: no second stage, and the exit code of an interruption."""
    import os
    import signal

    from verl import cli as verl_cli
    from verl.trainer.offline_loop import OfflineLoop

    whole_step = OfflineLoop.step

    def interrupted(loop, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return whole_step(loop, batch)

    monkeypatch.setattr(OfflineLoop, "step", interrupted)
    assert verl_cli.main(["demo", "--out", str(tmp_path / "demo")]) == 130
    assert (tmp_path / "demo" / "sft" / "global_step_1").is_dir()
    assert not (tmp_path / "demo" / "grpo").exists()
