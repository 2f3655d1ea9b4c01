"""Evaluation programs against the server: the scores are those of the model loaded by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import KEY, Running, running

pytestmark = [pytest.mark.components, pytest.mark.timeout(600)]
NUMBERS = [(a, b) for a in range(1, 5) for b in range(1, 4)]
CHOICE = """
task: sums_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ANSWER = """
task: sums_answer
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["z"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""
TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def letters():
    samples = [Sample(id=number, input="Say a letter", target="a") for number in (1, 2, 3)]
    return Task(dataset=samples, solver=generate(), scorer=includes())
"""


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that reads and writes bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("scored") / "bytes"
    words = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", bos_token="<end>",
        chat_template="{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, bos_token_id=1, eos_token_id=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def command(*words: str, cwd: Path | None = None, **environment: str) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def scores(folder: Path) -> tuple[dict[str, float], dict[tuple[str, int], Any]]:
    """(the metrics, what the model answered to each question)."""
    (results,) = folder.rglob("results_*.json")
    metrics = {
        f"{task} {name}": value
        for task, found in json.loads(results.read_text())["results"].items()
        for name, value in found.items()
        if isinstance(value, float)
    }
    answers = {}
    for path in folder.rglob("samples_*.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            answers[path.name.split("_")[2], row["doc_id"]] = row["resps"]
    return metrics, answers


def test_lm_eval_scores_through_the_server_what_it_scores_with_the_model(
    scored: Path, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval (make test-components)")
    rows = [
        {"question": f"{a} + {b} =", "choices": [f" {a + b + wrong}" for wrong in (0, 1, 10)], "right": 0,
         "answer": f" {a + b}"}
        for a, b in NUMBERS
    ]  # fmt: skip
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", CHOICE), ("answer", ANSWER)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("FILE", str(questions)))
    asked = (
        "--tasks",
        "sums_choice,sums_answer",
        "--include_path",
        str(tmp_path),
        "--batch_size",
        "4",
        "--log_samples",
    )
    command(
        "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={scored},dtype=float32", "--device", "cpu",
        "--output_path", str(tmp_path / "hf"), *asked,
    )  # fmt: skip
    with running(scored) as server:
        command(
            "lm_eval", "run", "--model", "local-completions", "--model_args",
            f"base_url={server.url}/v1/completions,model=tiny,tokenizer={scored}",
            "--output_path", str(tmp_path / "served"), *asked, OPENAI_API_KEY=KEY,
        )  # fmt: skip
    (alone, by_model), (served, by_server) = scores(tmp_path / "hf"), scores(tmp_path / "served")
    assert served == alone and len(alone) >= 3
    assert by_server.keys() == by_model.keys() and len(by_model) == 2 * len(NUMBERS)
    for place, answer in by_model.items():
        if place[0] == "choice":
            for (ours, *greedy), (theirs, *also) in zip(
                (each[0] for each in by_server[place]), (each[0] for each in answer), strict=True
            ):
                assert float(ours) == pytest.approx(float(theirs), abs=1e-3) and greedy == also
        else:
            assert by_server[place] == answer


def test_inspect_runs_a_task_through_the_server(talker: Running, tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai", reason="needs inspect-ai (make test-components)")
    (tmp_path / "letters.py").write_text(TASK)
    command(
        "inspect_ai", "eval", "letters.py", "--model", "openai-api/verl/tiny", "--max-tokens", "8",
        "--temperature", "0", "--log-dir", "logs", "--log-format", "json", "--display", "plain",
        cwd=tmp_path, VERL_BASE_URL=f"{talker.url}/v1", VERL_API_KEY=KEY,
    )  # fmt: skip
    (log,) = (tmp_path / "logs").glob("*.json")
    run = json.loads(log.read_text())
    assert run["status"] == "success" and run["results"]["completed_samples"] == 3
    said = {row["output"]["choices"][0]["message"]["content"] for row in run["samples"]}
    content = talker.chat(messages=[{"role": "user", "content": "Say a letter"}], max_tokens=8, temperature=0)
    assert said == {content["choices"][0]["message"]["content"]}
