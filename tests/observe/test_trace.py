"""`verl trace` on a real run and on files of every kind: valid trace events, nested slices, times that agree."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_run import read_metrics, tiny_run
from verl import cli
from verl.errors import ConfigError, DataError
from verl.observe.live import live
from verl.observe.run_folder import RunFolder
from verl.observe.trace import Span, nested_tracks, parse_steps, read_phases, write_trace

Event = dict[str, Any]
FIELDS = {
    "X": {"name", "pid", "tid", "ts", "dur"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts"},
}


def read_trace(file: Path) -> list[Event]:
    """The events of a trace, after checking each against the trace event format."""
    text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text()
    events: list[Event] = json.loads(text)["traceEvents"]
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    for event in events:
        assert event.keys() >= FIELDS[event["ph"]], event
        assert event["pid"] in processes and event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0, event
        if event["ph"] != "C" and event.get("tid"):
            assert isinstance(event["tid"], int) and (event["pid"], event["tid"]) in threads, event
        if event["ph"] == "C":
            assert isinstance(event["args"]["value"], int | float), event
    starts, ends = ([e["id"] for e in events if e["ph"] == ph] for ph in "sf")
    assert sorted(starts) == sorted(set(starts)) == sorted(set(ends))
    for pid, tid in threads:
        track = [
            (e["ts"], e["ts"] + e["dur"])
            for e in events
            if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)
        ]
        assert_nested(track)
    return events


def assert_nested(track: list[tuple[float, float]]) -> None:
    open_ends: list[float] = []
    for start, end in sorted(track, key=lambda each: (each[0], -each[1])):
        while open_ends and open_ends[-1] <= start + 1e-3:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 1e-3, "a slice that ends after the one around it"
        open_ends.append(end)


def slices(events: list[Event], name: str, cat: str = "phase") -> list[Event]:
    return [event for event in events if event.get("cat") == cat and event["name"] == name]


@pytest.fixture(scope="module")
def finished(tiny_model_dir: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, the second profiled."""
    from verl.config.load import load_ppo_config
    from verl.trainer.loop import RLLoop
    from verl.trainer.main_ppo import run

    folder, step = tmp_path_factory.mktemp("trace") / "project" / "first", RLLoop.step

    def counted(loop: RLLoop) -> dict[str, float]:
        metrics = step(loop)
        live.set("step", loop.step_number)
        return metrics

    live.set("step", 0)
    keys = tiny_run(
        tiny_model_dir,
        digits_data,
        "trainer.total_training_steps=3",
        "trainer.profile.steps=[2]",
        folder=folder,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RLLoop, "step", counted)
        live.record_phases(folder / "phases" / "controller.jsonl")
        try:
            run(load_ppo_config(keys))
        finally:
            live.record_phases(None)
            live.values.pop("step", None)
    return folder


def test_phases_metrics_and_profile_of_a_run_share_one_time(finished: Path, tmp_path: Path) -> None:
    write_trace(finished, tmp_path / "trace.json.gz")
    events = read_trace(tmp_path / "trace.json.gz")
    steps = slices(events, "step")
    assert [event["args"]["step"] for event in steps] == [1, 2, 3]
    for name in ("gen", "adv", "update_actor"):
        inner = slices(events, name)
        assert len(inner) == 3
        for part, whole in zip(inner, steps, strict=True):
            assert whole["ts"] <= part["ts"] and part["ts"] + part["dur"] <= whole["ts"] + whole["dur"]
            assert (part["pid"], part["tid"]) == (whole["pid"], whole["tid"])
    rewards = [(e["ts"], e["args"]["value"]) for e in events if e["ph"] == "C" and e["name"] == "reward"]
    recorded = [row["reward/mean"] for row in read_metrics(finished) if row["step"] > 0]
    assert rewards == [(step["ts"], value) for step, value in zip(steps, recorded, strict=True)]
    products = slices(events, "aten::mm", "cpu_op")
    assert {event["pid"] for event in products} == {steps[0]["pid"]}
    middle = sorted(event["ts"] for event in products)[len(products) // 2]
    assert steps[1]["ts"] < middle < steps[1]["ts"] + steps[1]["dur"], "the profile lies in the step it is of"


def test_the_command_writes_the_chosen_steps(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", str(finished)]) == 0
    assert str(finished / "trace.json.gz") in capsys.readouterr().out
    out = tmp_path / "third.json"
    assert cli.main(["trace", str(finished), "--steps", "3", "--out", str(out)]) == 0
    events = read_trace(out)
    assert {event["args"]["step"] for event in events if event.get("cat") == "phase"} == {3}
    assert not [event for event in events if event.get("cat") == "cpu_op"], "step 2 was profiled"
    capsys.readouterr()
    assert cli.main(["trace", str(finished), "--steps", "7-9"]) != 0
    assert "no phases of steps 7 to 9; it has those of 1 to" in capsys.readouterr().err
    assert cli.main(["trace", str(finished), "--out", str(tmp_path / "absent" / "t.json")]) != 0
    assert "Give another file with --out" in capsys.readouterr().err


def test_ranges_of_steps() -> None:
    assert parse_steps(None) is None
    assert (parse_steps("4"), parse_steps("4-6")) == (range(4, 5), range(4, 7))
    for wrong in ("", "a", "6-4", "-3", "1-2-3"):
        with pytest.raises(ConfigError, match="a step or a range of steps"):
            parse_steps(wrong)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10))))
def test_every_phase_is_on_one_track_and_tracks_nest(found: list[tuple[int, int]]) -> None:
    spans = [Span(str(number), start, start + length, 1) for number, (start, length) in enumerate(found)]
    spans.sort(key=lambda span: (span.start, -span.end))
    tracks = nested_tracks(spans)
    assert sorted((s for track in tracks for s in track), key=lambda s: s.name) == sorted(
        spans, key=lambda s: s.name
    )
    for track in tracks:
        assert_nested([(float(span.start), float(span.end)) for span in track])


def test_phases_that_nest_need_one_track() -> None:
    spans = [Span("step", 0, 10, 1), Span("gen", 0, 4, 1), Span("reward", 1, 4, 1), Span("update", 4, 10, 1)]
    assert nested_tracks(spans) == [spans]


def made_run(folder: Path, phases: dict[str, list[Any]]) -> Path:
    (folder / "phases").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": null}\n'
    )
    for process, rows in phases.items():
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        (folder / "phases" / f"{process}.jsonl").write_text(text)
    return folder


def phase(name: str, start: float, end: float, step: float = 1) -> dict[str, Any]:
    return {"name": name, "start": 1.7e9 + start, "end": 1.7e9 + end, "step": step}


def made_profile(folder: Path, step: int, rank: int, at: float) -> None:
    """As torch writes it: one operator on a thread, its kernel on a stream, joined by a flow."""
    times = {"ts": at * 1e6, "dur": 100.5}
    flow = {"cat": "ac2g", "name": "ac2g", "id": 7, "ts": at * 1e6}
    named = {"ph": "M", "ts": 0}
    events: list[Event] = [
        {**named, "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        {**named, "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7 "}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 4242, "tid": 4242, **times},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, **times},
        {"ph": "s", "pid": 4242, "tid": 4242, **flow},
        {"ph": "f", "bp": "e", "pid": 0, "tid": 7, **flow},
        {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler", **times},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 0},
    ]
    content = {"baseTimeNanoseconds": 1_700_000_000_000_000_000, "traceEvents": events}
    (folder / "profile").mkdir(exist_ok=True)
    with gzip.open(folder / "profile" / f"step_{step}_rank_{rank}.json.gz", "wt") as file:
        json.dump(content, file)


def test_every_process_has_its_own_track_and_its_own_profiles(tmp_path: Path) -> None:
    run = made_run(
        tmp_path / "run",
        {
            "rank_10": [phase("log_probs", 1, 2)],
            "rank_2": [phase("log_probs", 1.5, 2)],
            "controller": [phase("gen", 0.5, 3, 1.0), phase("step", 0, 10), phase("reward", 2, 4)],
        },
    )
    for rank, at in ((2, 1.6), (10, 1.6)):
        made_profile(run, 1, rank, at)
    write_trace(run, tmp_path / "out.json")
    events = read_trace(tmp_path / "out.json")
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert sorted(names, key=lambda name: names[name]) == ["controller", "rank_2", "rank_10"]
    assert {e["tid"] for e in slices(events, "reward")} != {e["tid"] for e in slices(events, "gen")}
    assert {e["pid"] for e in slices(events, "gemm", "kernel")} == {names["rank_2"], names["rank_10"]}
    assert "step 1: GPU 0 stream 7" in [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    operator, around = slices(events, "aten::mm", "cpu_op")[0], slices(events, "log_probs")[0]
    assert operator["ts"] - around["ts"] == pytest.approx(0.1e6, abs=1.0)
    assert operator["dur"] == 100.5
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2, "flows of two profiles stay apart"
    assert [e["args"]["value"] for e in events if e["ph"] == "C"] == [0.5]


def test_steps_choose_by_the_controllers_time_as_ranks_count_none(tmp_path: Path) -> None:
    run = made_run(
        tmp_path / "run",
        {
            "controller": [phase("step", 0, 10, 1), phase("step", 10, 20, 2)],
            "rank_0": [phase("early", 1, 2, 1), phase("late", 11, 12, 1)],
        },
    )
    write_trace(run, tmp_path / "out.json", range(2, 3))
    events = read_trace(tmp_path / "out.json")
    assert [event["name"] for event in events if event["ph"] == "X"] == ["step", "late"]


def test_damaged_lines_and_profiles_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = phase("step", 0, 1)
    damaged = [
        "{", "[]", "null", '{"name": 3}', json.dumps({**whole, "end": None}), json.dumps({**whole, "start": "x"}),
        json.dumps({**whole, "end": whole["start"] - 1}), '{"name": "x", "start": 1e999, "end": 1e999, "step": 1}',
    ]  # fmt: skip
    run = made_run(tmp_path / "run", {"controller": [*damaged, whole]})
    with (run / "phases" / "controller.jsonl").open("a") as file:
        file.write('{"name": "cut", "sta')
    made_profile(run, 1, 0, 0.5)
    good = (run / "profile" / "step_1_rank_0.json.gz").read_bytes()
    event = {"pid": 1, "ts": 1, "ph": "X", "tid": 1, "name": "x"}
    foreign = [
        {"baseTimeNanoseconds": 10**400, "traceEvents": [event]},
        {"baseTimeNanoseconds": 0, "traceEvents": [{**event, "ts": 10**400}]},
        {"baseTimeNanoseconds": 0, "traceEvents": [{**event, "tid": [1]}]},
        {"baseTimeNanoseconds": 0, "traceEvents": [{**event, "id": {}}]},
    ]
    packed = [gzip.compress(json.dumps(content).encode()) for content in foreign]
    for rank, content in enumerate(
        (good[:-20], b"text", gzip.compress(b"[]"), gzip.compress(b"{}"), *packed), start=1
    ):
        (run / "profile" / f"step_1_rank_{rank}.json.gz").write_bytes(content)
    assert [span.name for span in read_phases(run)["controller"]] == ["step"]
    with caplog.at_level(logging.WARNING):
        write_trace(run, tmp_path / "out.json")
    events = read_trace(tmp_path / "out.json")
    assert len(slices(events, "step")) == len(slices(events, "gemm", "kernel")) == 1
    assert caplog.text.count("is damaged") == 8


def test_a_profile_that_unpacks_to_very_much_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_run(tmp_path / "run", {"controller": [phase("step", 0, 1)]})
    made_profile(run, 1, 0, 0.5)
    monkeypatch.setattr("verl.observe.trace.MAX_PROFILE_BYTES", 100)
    with caplog.at_level(logging.WARNING):
        write_trace(run, tmp_path / "out.json")
    assert "it unpacks to more than 100 bytes" in caplog.text


def test_a_run_without_phases_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no phases"):
        write_trace(made_run(tmp_path / "run", {}), tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_a_resumed_run_removes_the_profiles_of_later_steps_and_a_new_one_all(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        for step in (1, 2, 3):
            made_profile(folder.path, step, 0, 0.5)
        folder.rewind(2)
        left = sorted(file.name for file in (folder.path / "profile").iterdir())
        assert left == ["step_1_rank_0.json.gz", "step_2_rank_0.json.gz"]
        folder.restart()
        assert not list((folder.path / "profile").iterdir())
