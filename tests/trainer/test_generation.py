"""`verl generate`: every row answered, the same whatever the batch, and nothing lost when it is killed."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from verl.errors import DataError, RolloutError
from verl.rollout import build_rollout, register_rollout
from verl.rollout.base import BatchEngine, Request, Response
from verl.trainer.generation import Journal
from verl.trainer.main_generation import main

ROOT = Path(__file__).resolve().parents[2]
ROWS = 7
Generate = Callable[..., Any]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Messages of different lengths, and columns of several types."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.parquet"
    rows = [
        {
            "prompt": [{"role": "user", "content": f"repeat {' '.join(str(n % 10) for n in range(i + 1))}"}],
            "reward_model": {"ground_truth": str(i)},
            "data_source": "digits",
            "number": i,
        }
        for i in range(ROWS)
    ]
    table = pa.Table.from_pylist(rows)
    types = table.schema.set(3, pa.field("number", pa.int16()))
    pq.write_table(table.cast(types), path)
    return path


@pytest.fixture
def keys(prompts: Path, tiny_model_dir: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """A small generation's command line."""

    def make(*more: str, output: str = "out.parquet") -> list[str]:
        return [
            f"model.path={tiny_model_dir}",
            f"data.path={prompts}",
            f"data.output_path={tmp_path / output}",
            "data.max_prompt_length=32",
            "data.max_response_length=6",
            "rollout.n=2",
            "trainer.device=cpu",
            f"data.cache_dir={tmp_path / 'cache'}",
            *more,
        ]

    return make


@pytest.fixture
def generate(keys: Callable[..., list[str]], tmp_path: Path) -> Generate:
    """Run the command; the rows of its output."""

    def go(*more: str, output: str = "out.parquet") -> list[dict[str, Any]]:
        assert main(keys(*more, output=output)) == 0
        return read(tmp_path / output)

    return go


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def test_every_row_keeps_its_columns_and_gets_its_responses(
    generate, prompts, tiny_tokenizer, tmp_path
) -> None:
    found = generate("data.save_token_ids=True", "data.save_log_probs=True")
    given = pq.read_table(prompts)
    assert [{name: row[name] for name in given.column_names} for row in found] == given.to_pylist()
    assert pq.read_schema(tmp_path / "out.parquet").field("number").type == pa.int16()
    for row in found:
        ids, lengths = row["responses_token_ids"], row["responses_length"]
        assert row["responses"] == [tiny_tokenizer.decode(one, skip_special_tokens=True) for one in ids]
        assert len(ids) == 2 and [len(one) for one in ids] == lengths
        assert [len(one) for one in row["responses_log_probs"]] == lengths
        for one, reason in zip(ids, row["responses_finish_reason"], strict=True):
            assert reason == ("stop" if one[-1] == tiny_tokenizer.eos_token_id else "length")
            assert reason == "stop" or len(one) == 6
    assert not list(tmp_path.glob("*.unfinished")) and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_greedy_responses_are_those_of_transformers(
    generate, tiny_model_dir, tiny_tokenizer, engine: str
) -> None:
    from transformers import AutoModelForCausalLM

    found = generate(
        "rollout.temperature=0", "rollout.n=1", "data.save_token_ids=True", f"rollout.name={engine}"
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    for row in found:
        text = tiny_tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        ids = tiny_tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        expected = model.generate(ids, do_sample=False, max_new_tokens=6)[0, ids.shape[1] :].tolist()
        assert row["responses_token_ids"] == [expected]


def test_log_probs_are_the_models(generate, tiny_model_dir, tiny_tokenizer) -> None:
    from transformers import AutoModelForCausalLM

    more = ("rollout.n=1", "rollout.temperature=0.7", "data.save_token_ids=True", "data.save_log_probs=True")
    row = generate(*more)[3]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    text = tiny_tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    prompt = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
    response = row["responses_token_ids"][0]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.7
    expected = logits.log_softmax(-1)[range(len(response)), response]
    assert row["responses_log_probs"][0] == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_same_responses_whatever_runs_together(generate) -> None:
    whole = generate()
    for number, more in enumerate((["data.batch_size=1"], ["data.batch_size=3", "rollout.max_num_seqs=2"])):
        assert generate(*more, output=f"{number}.parquet") == whole
    some = generate("data.max_samples=3", output="some.parquet")
    assert some == whole[:3]
    more = generate("data.n_samples=4", output="more.parquet")
    assert [row["responses"][:2] for row in more] == [row["responses"] for row in whole]
    other = generate("trainer.seed=2", output="other.parquet")
    assert [row["responses"] for row in other] != [row["responses"] for row in whole]


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_json_in_and_out(generate, prompts, tmp_path, kind: str) -> None:
    rows = pq.read_table(prompts).to_pylist()
    given = tmp_path / f"in.{kind}"
    given.write_text(json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    assert generate(f"data.path={given}", output=f"out.{kind}") == generate(output="same.parquet")


def test_rows_with_longer_prompts_can_be_left_out(generate) -> None:
    whole = generate(output="whole.parquet")
    rows = generate("data.max_prompt_length=9", "data.filter_overlong_prompts=True")
    assert 0 < len(rows) < ROWS and rows == whole[: len(rows)]


def test_a_column_name_of_its_own(generate) -> None:
    rows = generate("data.response_key=answers", "rollout.n=1")
    assert {"answers", "answers_finish_reason", "answers_length"} < set(rows[0])


# -- interruptions ------------------------------------------------------------------------------------------------

GATED = """
import os, time
from pathlib import Path
from verl.rollout import build_rollout, register_rollout
from verl.rollout.base import BatchEngine


@register_rollout("gated")
class Gated(BatchEngine):
    '''The native engine, which after some responses waits for a file; it notes what it is asked for.'''

    def __init__(self, source, tokenizer, config):
        self.inner = build_rollout("native", source, tokenizer, config)
        self.place = Path(__file__).parent

    def run_batch(self, requests):
        requests = list(requests)
        with (self.place / "asked").open("a") as notes:
            notes.writelines(request.request_id + "\\n" for request in requests)
        for number, response in enumerate(self.inner.generate(requests)):
            while number >= 6 and not (self.place / "open").exists():
                time.sleep(0.05)
            yield response

    def update_weights(self, source, version):
        raise NotImplementedError
"""


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_where_it_was(
    keys, generate, tmp_path, monkeypatch, capfd, fork_server
) -> None:
    (tmp_path / "gated_engine.py").write_text(GATED)
    more = ("trainer.plugins=[gated_engine]", "rollout.name=gated", "data.batch_size=5")
    journal = tmp_path / "out.parquet.unfinished"
    first = fork_server.start(
        "verl.trainer.main_generation",
        keys(*more),
        output=tmp_path / "log",
        environment={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    try:
        # It cannot finish: after six responses it waits for a file. Of five prompts with two each, one is then whole.
        deadline = time.monotonic() + 600
        while first.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 2):
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        assert first.poll() is None, (tmp_path / "log").read_text()
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert not (tmp_path / "out.parquet").exists()
    kept = [json.loads(line)["row"] for line in journal.read_text().splitlines()[1:]]
    assert 1 <= len(kept) <= 3

    (tmp_path / "open").touch()
    (tmp_path / "asked").unlink()
    monkeypatch.syspath_prepend(tmp_path)
    rows = generate(*more)
    assert f"continuing: {len(kept)} of {ROWS} rows" in capfd.readouterr().err
    asked = [int(line) for line in (tmp_path / "asked").read_text().split()]
    assert sorted(asked + kept) == list(range(ROWS))
    assert rows == generate(output="at_once.parquet")
    assert not journal.exists()


@register_rollout("failing")
class Failing(BatchEngine):
    """The native engine, which fails after some responses while `fails` is set."""

    fails = True

    def __init__(self, source: Any, tokenizer: Any, config: Any) -> None:
        self.inner = build_rollout("native", source, tokenizer, config)

    def run_batch(self, requests: Iterable[Request]) -> Iterator[Response]:
        for number, response in enumerate(self.inner.generate(requests)):
            if self.fails and number == 8:
                raise RolloutError("the engine gave up")
            yield response

    def update_weights(self, source: Any, version: int) -> None:
        raise NotImplementedError


@pytest.fixture
def interrupted(keys, tmp_path, monkeypatch) -> Path:
    """A generation that failed in the middle; its journal. The engine is well again."""
    assert main(keys("rollout.name=failing")) == 2
    monkeypatch.setattr(Failing, "fails", False)
    return tmp_path / "out.parquet.unfinished"


def test_an_engine_that_fails_costs_only_what_was_running(keys, generate, capfd, monkeypatch) -> None:
    assert main(keys("rollout.name=failing")) == 2
    said = capfd.readouterr().err
    assert "the engine gave up" in said and f"of {ROWS} rows are kept" in said and "same command" in said
    monkeypatch.setattr(Failing, "fails", False)
    assert generate("rollout.name=failing") == generate(output="at_once.parquet")
    assert "continuing: " in capfd.readouterr().err


def test_what_a_kill_left_of_a_line_is_dropped(interrupted, generate) -> None:
    whole = interrupted.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    interrupted.write_bytes(whole[: -len(last) // 2])
    assert generate("rollout.name=failing") == generate(output="at_once.parquet")


def test_other_settings_are_not_mixed_in(interrupted, keys, generate, capfd) -> None:
    before = interrupted.read_bytes()
    assert main(keys("rollout.name=failing", "rollout.temperature=0.5")) == 2
    said = capfd.readouterr().err
    assert "rollout.temperature: 1.0 -> 0.5" in said and "data.overwrite=True" in said
    assert interrupted.read_bytes() == before
    rows = generate("rollout.name=failing", "rollout.temperature=0.5", "data.overwrite=True")
    assert rows == generate("rollout.temperature=0.5", output="at_once.parquet")


def test_batches_and_limits_may_change_on_the_way(interrupted, generate) -> None:
    rows = generate("rollout.name=failing", "data.batch_size=2", "data.max_samples=6")
    assert rows == generate("data.max_samples=6", output="at_once.parquet")


def test_other_weights_are_not_mixed_in(interrupted, keys, tiny_model_dir, tmp_path, capfd) -> None:
    import shutil

    shutil.copytree(tiny_model_dir, tmp_path / "other")
    assert main(keys("rollout.name=failing", f"model.path={tmp_path / 'other'}")) == 2
    assert "model.path:" in capfd.readouterr().err


def test_one_process_at_a_time(tmp_path) -> None:
    with (
        Journal(tmp_path / "out.jsonl", {"a": 1}),
        pytest.raises(DataError, match="another process writes to"),
    ):
        Journal(tmp_path / "out.jsonl", {"a": 1})


def test_a_journal_gives_back_what_it_was_given(tmp_path) -> None:
    record = {"": ["a\nb", "\u2028 \U0001f600 \x00"], "_length": [1, 2]}
    with Journal(tmp_path / "out.jsonl", {"a": 1.5}) as journal:
        journal.add(7, record)
        journal.add(3, {"": []})
        assert journal.read(7) == record
    with Journal(tmp_path / "out.jsonl", {"a": 1.5}) as journal:
        assert len(journal) == 2 and 7 in journal and 0 not in journal
        assert journal.read(7) == record and journal.read(3) == {"": []}
        journal.add(0, {"": ["z"]})
        assert journal.read(0) == {"": ["z"]}


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["data.output_path=out.txt"], ".parquet, .jsonl, .json"),
        (["data.prompt_key=question"], "data.prompt_key=prompt"),
        (["data.max_prompt_length=4"], "data.path: 7 of 7 prompts are longer"),
        (["data.path=missing.parquet"], "missing.parquet does not exist"),
        (["rollout.name=natve"], "Did you mean native"),
        (["rollout.temprature=1"], "Did you mean 'rollout.temperature'?"),
        (["data.response_key=number"], "has a column number"),
        (["model.path=/nowhere"], "/nowhere"),
        (["rollout.max_model_len=8"], "at least 38"),
        (["rollout.name=sglang"], "rollout.mode=server"),
        (["rollout.name=vllm", "rollout.tensor_model_parallel_size=2"], "trainer.n_gpus_per_node=2"),
        (["data.max_samples=0"], "'data.max_samples' is 0"),
        (["rollout.name=vllm"], "pip install 'vllm>="),
        (["trainer.n_gpus_per_node=2"], "pip install 'ray[default]>="),
    ],
)
def test_what_cannot_work_is_refused_before_weights_are_loaded(
    keys, capfd, monkeypatch, tmp_path, more: list[str], said: str
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("verl.workers.generation.load_causal_lm", load)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: (n not in ("vllm", "ray") and found(n, *a)) or None
    )
    assert main(keys(*more)) == 2
    assert said in capfd.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_lengths_beyond_the_models_are_said(generate, capfd) -> None:
    generate("data.max_prompt_length=300", "data.max_samples=1")
    assert "supports 256 tokens" in capfd.readouterr().err


def test_a_finished_output_is_not_overwritten_unasked(generate, keys, capfd, tmp_path) -> None:
    rows = generate()
    assert main(keys("trainer.seed=5")) == 2
    assert "data.overwrite=True" in capfd.readouterr().err
    assert read(tmp_path / "out.parquet") == rows
    assert generate("trainer.seed=5", "data.overwrite=True") != rows


def test_rows_that_fit_no_table_are_refused_at_once(keys, generate, tmp_path, capfd) -> None:
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text('{"prompt": "repeat 1", "x": 1}\n{"prompt": "repeat 2", "x": "two"}\n')
    assert main(keys(f"data.path={mixed}")) == 2
    assert f"data.output_path={tmp_path / 'out.jsonl'}" in capfd.readouterr().err
    assert [row["x"] for row in generate(f"data.path={mixed}", output="out.jsonl")] == [1, "two"]


def test_help_lists_every_key_without_torch() -> None:
    code = (
        "import sys\nfrom verl.trainer import main_generation\n"
        "try:\n    main_generation.main(['--help', 'all'])\n"
        "except SystemExit as stop:\n    print('code', stop.code, 'torch' in sys.modules)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines()[-1] == "code 0 False"
    for word in ("output_path", "max_response_length", "temperature", "lora_path", "n_gpus_per_node", "512"):
        assert word in out
