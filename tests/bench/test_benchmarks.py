"""Every benchmark starts with tiny sizes and prints what it promises."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM

from benchmarks import (
    agents,
    algorithms,
    attention,
    checkpoint,
    compare,
    reward,
    rollout,
    size,
    step,
    token_budget,
    train,
    ulysses,
)
from benchmarks.planted_lengths import Lengths, PlantedRollout
from verl.algorithms import adv_estimator_names
from verl.config.methods import POLICY_LOSS, builtin_names
from verl.rollout.base import Request, SamplingParams

SHORT_STEP = ["--prompts", "4", "--n", "2", "--max-tokens", "4", "--steps", "2", "--warm-up", "1"]


@pytest.mark.slow(seconds=8)
def test_every_estimator_and_loss_agrees_with_its_loop(capsys):
    sizes = ["--batch", "8", "--width", "12", "--group", "4", "--repeat", "1"]
    assert algorithms.main(sizes) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {(line[0], line[1]): line for line in lines if line and line[0] in ("estimator", "loss")}
    estimators = {name for name in adv_estimator_names() if not name.endswith("_vectorized")}
    assert {name for kind, name in rows if kind == "estimator"} == estimators
    assert {name for kind, name in rows if kind == "loss"} == set(
        builtin_names(POLICY_LOSS, lambda method: not method.whole_groups)
    )
    for row in rows.values():
        assert row[4].endswith("x") and float(row[5]) < 1e-4, row


def test_an_unknown_estimator_is_refused(capsys):
    assert algorithms.main(["--only", "grpoo"]) == 2
    assert "grpoo" in capsys.readouterr().err


@pytest.mark.slow(seconds=8)
def test_a_grpo_step_is_timed_by_phase(tmp_path):
    assert step.main([*SHORT_STEP, "--set", "trainer.device=cpu", "--json", str(tmp_path / "out.json")]) == 0
    figures = json.loads((tmp_path / "out.json").read_text())["verl"]
    assert figures["step_s"] > figures["gen_s"] > 0


@pytest.mark.slow(seconds=15)
def test_a_split_sequence_takes_less_memory_of_a_rank(capsys):
    assert ulysses.main(["--tokens", "256", "--layers", "1", "--hidden", "32"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [row[0] for row in rows] == ["1", "2"]
    assert float(rows[1][2].rstrip("x")) < 0.7, "what autograd keeps is counted, not resident memory"


def test_rollout_prints_tokens_per_second(capsys):
    sizes = ["--model", "tiny", "--prompts", "2", "--n", "2", "--max-tokens", "4", "--repeat", "1"]
    assert rollout.main([*sizes, "--no-warm-up", "--device", "cpu", "--against", "hf"]) == 0
    assert re.search(r"^native +\d", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [(["--against", "hf,vllm"], "--model to be a folder"), (["--against", "trl"], "'trl' is unknown")],
)
def test_rollout_refuses_peers_before_a_model_is_loaded(arguments, cause, monkeypatch, capsys):
    monkeypatch.setattr(rollout, "load_model", lambda *_: pytest.fail("a model was loaded first"))
    assert rollout.main(["--device", "cpu", *arguments]) == 2
    assert cause in capsys.readouterr().err


def test_checkpoint_prints_ratios_and_cleans_up(tmp_path, capsys):
    assert checkpoint.main(["--millions", "1", "--repeat", "1", "--folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"bar \d\.\dx: (held|MISSED)", out)) == 2
    sizes = [float(found) for found in re.findall(r"x +(\d+\.\d+)$", out, flags=re.MULTILINE)]
    # Weights and two moments of 4 bytes each; headers add a little, whole weights in the same precision nothing.
    assert [round(found) for found in sizes] == [12, 12, 12, 12]
    assert list(tmp_path.iterdir()) == []


def test_reward_prints_its_ratio(capsys):
    reward.main(["--responses", "16", "--milliseconds", "1"])
    assert "of the ideal time" in capsys.readouterr().out


def test_each_token_budget_cuts_the_same_update_into_its_micro_batches(capsys):
    arguments = ["--token-budgets", "1024,256,64", "--shape", "tiny", "--tokens", "256", "--device", "cpu"]
    assert train.main(arguments) == 0
    cells = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny")]
    total = sum(token_budget.CASES["tiny"].workload(256).lengths)
    assert [row[1] for row in cells] == ["64", "256"], "1024 is more than the update has"
    assert cells[1][2] == "1" and int(cells[0][2]) >= total / 256


def test_the_smallest_budget_close_to_the_fastest_is_proposed():
    speeds = {8192: 80.0, 16384: 97.5, 32768: 100.0, 65536: 99.0}
    found = [token_budget.Found(budget, 1, speed, 1.0, 0.0) for budget, speed in speeds.items()]
    assert token_budget.best(found) == 16384


def test_training_steps_are_measured_beside_plain_hugging_face(capsys):
    sizes = ["--shape", "tiny", "--seq", "32", "--tokens", "64", "--steps", "1", "--device", "cpu"]
    assert train.main(sizes) == 0
    assert re.search(r"\d\.\d\dx \|$", capsys.readouterr().out, re.M)


def test_compare_refuses_a_folder_that_is_no_checkout(tmp_path, capsys):
    assert compare.main(["--old", str(tmp_path)]) == 2
    assert "verl/__init__.py" in capsys.readouterr().err


def test_size_counts_neither_comments_nor_docstrings_nor_blank_lines():
    source = (
        '"""Doc.\n\nmore"""\n\nX = """\ntext\n"""  # value\n\n# why\ndef f():\n    """Doc."""\n    return 1\n'
    )
    assert size.code_lines(source) == 5


def test_size_prints_each_package_beside_the_last_release(tmp_path, capsys):
    (tmp_path / "verl" / "observe").mkdir(parents=True)
    (tmp_path / "verl" / "observe" / "view.py").write_text("X = 1\n")
    assert size.main(["--no-run", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (
        re.search(r"^observe +1 +1 +\d+ +2968$", out, re.M)
        and "largest file: observe/view.py 1 (before: " in out
    )


@pytest.mark.slow(seconds=8)
def test_both_schedules_hold_the_same_conversations(capsys):
    sizes = ["--conversations", "6", "--n", "2", "--turns", "3", "--median", "0.01", "--device", "cpu"]
    assert agents.main(sizes) == 0
    out = capsys.readouterr().out
    assert "the same conversations: True" in out
    computed, asked = map(int, re.search(r"prefill: (\d+) of (\d+) tokens", out).groups())
    assert computed < asked


def test_a_planted_length_holds_however_often_its_sample_is_interrupted(tiny_model_dir):
    lengths = Lengths(median=8, sigma=1.0, longest=20, tail=40, tail_share=0.2)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    engine = PlantedRollout(model, None, lengths=lengths)
    request = Request("0-7", [3, 4, 5], SamplingParams(max_tokens=40, ignore_eos=True), n=6)
    whole = {r.sample: r.token_ids for r in engine.generate([request])}
    assert {sample: len(ids) for sample, ids in whole.items()} == {s: lengths.of("0-7", s) for s in range(6)}
    assert len({*map(len, whole.values())}) > 2

    engine.submit([request])
    parts = {response.sample: response.token_ids for response in engine.poll(0)}
    engine.abort(["0-7"])
    while responses := engine.poll():
        parts |= {response.sample: response.token_ids for response in responses}
    cut = {sample: ids for sample, ids in parts.items() if len(ids) < len(whole[sample])}
    assert cut
    for sample, ids in cut.items():
        part = replace(request, request_id=f"0-7#{sample}", n=1, partial=(ids,) if ids else ())
        (rest,) = engine.generate([part])
        assert (rest.request_id, rest.sample) == (part.request_id, 0)
        assert [*ids, *rest.token_ids] == whole[sample]


@pytest.mark.slow(seconds=8)
def test_carry_over_trains_what_was_planted(tmp_path, capsys):
    sizes = (
        "--prompts 2 --n 2 --median 4 --longest 8 --tail 16 --tail-share 0.2 --steps 1 --warm-up 1 --epochs 1"
    )
    modes = "--device cpu --processes 1 --staleness 1 --over-sampling 0.5"
    bench = importlib.import_module("benchmarks.async")  # its name is a keyword
    assert bench.main([*sizes.split(), *modes.split(), "--json", str(tmp_path / "out.json")]) == 0
    assert "every planted response trained once: True" in capsys.readouterr().out
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    carried = figures["carry_over staleness=1 over_sampling=0.5"]
    assert figures["off"]["age_max"] == 0 and carried["age_max"] <= 1
    assert sum(carried["age_shares"].values()) == pytest.approx(1)


def test_attention_is_measured_by_each_kernel(capsys):
    assert attention.main(["--device", "cpu", "--shape", "3x16:2/1:8", "--backend", "sdpa,auto"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "heads of 8" in line]
    assert [line.split(" | ")[1] for line in lines] == ["sdpa", "auto: sdpa"]
    assert all(float(line.split(" | ")[2]) > 0 for line in lines)
