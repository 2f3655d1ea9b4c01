"""SGLang's adapter against a server of ours with SGLang's documented interface (fake_sglang/)."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.config.schema import RolloutConfig
from verl.errors import ConfigError, MissingPackage, RolloutError, TrainingHalted
from verl.models.weight_source import NamedTensors, Names, SourceLogProbs
from verl.rollout import build_rollout
from verl.rollout.base import Request, SamplingParams
from verl.rollout.external_engine import TPFollower, require_engine
from verl.rollout.server_engine import ServerRollout
from verl.rollout.sglang import generate_body, server_arguments
from verl.rollout.source import ModuleWeights, model_info
from verl.rollout.weight_sync.broadcast import ReceivedWeights
from verl.rollout.weight_sync.fingerprint import WeightManifest

FAKE = Path(__file__).parent / "fake_sglang"
PROMPTS = [[5, 9, 33], [7], [60, 3, 44, 20]]


def section(**changes: Any) -> RolloutConfig:
    config = RolloutConfig(name="sglang", mode="server", max_model_len=128, max_num_seqs=8)
    for key, value in changes.items():
        setattr(config, key, value)
    return config


@pytest.fixture(scope="module")
def beside() -> Iterator[pytest.MonkeyPatch]:
    """The stand-in where Python, ours and the child's, looks for sglang."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(FAKE))
    patch.setenv("PYTHONPATH", f"{FAKE}:{Path(__file__).parents[2]}")
    patch.setenv("OMP_NUM_THREADS", "1")
    yield patch
    patch.undo()


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Any]) -> Any:
    return tiny("llama_tied")


@pytest.fixture(scope="module")
def engine(model: Any, beside: pytest.MonkeyPatch) -> Iterator[Any]:
    made = build_rollout("sglang", model, None, section())
    yield made
    made.close()


def log_probs(model: Any, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    rows = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


def calls(engine: Any, path: str) -> list[Any]:
    return [body for seen, body in engine.client.call("GET", "/seen")["calls"] if seen == path]


def test_every_sample_is_answered_with_its_own_log_probs(engine: Any, model: Any) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=0.7)
    requests = [Request(f"r{i}", prompt, sampling, n=3, seed=2) for i, prompt in enumerate(PROMPTS)]
    first = {(r.request_id, r.sample): r for r in engine.generate(requests)}
    again = {(r.request_id, r.sample): r for r in engine.generate(requests[:1])}
    assert len(first) == 9
    assert all(again[place].token_ids == first[place].token_ids for place in again)
    assert len({tuple(first["r0", i].token_ids) for i in range(3)}) > 1
    for (name, _), response in first.items():
        expected = log_probs(model, PROMPTS[int(name[1:])], response.token_ids, 0.7)
        assert response.log_probs == pytest.approx(expected, abs=1e-4)
        assert response.finish_reason == ("stop" if response.token_ids[-1] == 2 else "length")


def test_new_weights_reach_the_server(engine: Any, model: Any) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    engine.update_weights(ModuleWeights(model), 4)
    (response,) = engine.generate([Request("a", [5, 9], SamplingParams(max_tokens=6))])
    assert response.policy_version == 4
    assert response.log_probs == pytest.approx(log_probs(model, [5, 9], response.token_ids, 1.0), abs=1e-4)
    sent = calls(engine, "/update_weights_from_disk")[-1]
    assert sent["flush_cache"] is True and sent["weight_version"] == "4"
    assert calls(engine, "/flush_cache"), "prefixes of the old weights are forgotten"
    assert not Path(sent["model_path"]).exists(), "nothing stays in shared memory"


def test_weights_from_another_process_reach_the_server(engine: Any, model: Any) -> None:
    """What arrives is what the server gets; log-probs are compared by whoever also has the trainer."""
    source = ReceivedWeights(model_info(ModuleWeights(model), None))
    shifted = {name: tensor + 0.05 for name, tensor in model.state_dict().items()}
    source.broadcast = SimpleNamespace(receive=lambda: iter(shifted.items()))  # type: ignore[assignment]
    source.expect(5)
    engine.update_weights(source, 5)
    sent = WeightManifest()
    list(sent.watch(shifted.items()))
    assert source.received == sent
    (response,) = engine.generate([Request("a", [5, 9], SamplingParams(max_tokens=6))])
    assert response.policy_version == 5
    there = copy.deepcopy(model)
    there.load_state_dict(shifted)
    assert response.log_probs == pytest.approx(log_probs(there, [5, 9], response.token_ids, 1.0), abs=1e-4)
    engine.update_weights(ModuleWeights(model), 6)


class Noting(ModuleWeights):
    """Notes what is asked of it: on several ranks each of these is a collective."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.asked: list[str] = []

    def named_tensors(self, names: Names = "hf") -> NamedTensors:
        for name, tensor in super().named_tensors(names):
            self.asked.append(name)
            yield name, tensor

    def log_probs(self, prompt_ids: Any, responses: Any) -> SourceLogProbs:
        self.asked.append("log-probs")
        return super().log_probs(prompt_ids, responses)


def test_a_rank_that_shares_the_server_asks_the_trainer_for_what_its_host_asks(
    engine: Any, model: Any
) -> None:
    host, follower = Noting(model), Noting(model)
    engine.update_weights(host, 7)
    TPFollower("sglang", follower, None, section(tensor_model_parallel_size=2))
    assert host.asked == follower.asked and host.asked[-1] == "log-probs" and len(host.asked) > 5


def test_sampling_keys_are_passed_in_sglangs_names(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(max_tokens=5, stop_token_ids=(11,), ignore_eos=True, top_p=0.9, min_p=0.1)
    list(engine.generate([Request("a", [5], sampling, partial=((8, 8),))]))
    body = calls(engine, "/generate")[-1]
    params = body["sampling_params"]
    assert params["max_new_tokens"] == 3 and params["stop_token_ids"] == [11] and params["top_p"] == 0.9
    assert params["min_p"] == 0.1 and params["top_k"] == -1 and body["return_logprob"] is True
    assert params["sampling_seed"] is not None
    monkeypatch.setattr(engine.config, "per_request_seed", False)
    list(engine.generate([Request("a", [5], sampling)]))
    assert calls(engine, "/generate")[-1]["sampling_params"]["sampling_seed"] is None


def wait_until_held(engine: Any, count: int) -> None:
    """Until so many samples have the tokens that /hold allows."""
    deadline = time.monotonic() + 300
    while engine.client.call("GET", "/seen")["held"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hold(engine: Any, tokens: int | None) -> None:
    engine.client.call("POST", "/hold", {"tokens": tokens})


def test_an_answer_comes_in_few_pieces_and_an_abort_gets_the_rest_of_it(engine: Any) -> None:
    sampling = SamplingParams(max_tokens=70, ignore_eos=True)
    requests = [Request(f"long{i}", [6, i], sampling, seed=4) for i in range(3)]
    events = engine.client.call("GET", "/seen")["events"]
    whole = {response.request_id: response for response in engine.generate(requests)}
    pieces = engine.client.call("GET", "/seen")["events"] - events
    assert pieces == 3 * 4, "with tokens 1, 33, 65 and 70"
    hold(engine, 40)
    engine.submit(requests)
    wait_until_held(engine, 3)
    engine.abort(["long1"])
    (one,) = engine.poll(60)
    hold(engine, None)
    others = [*engine.poll()]
    others += engine.poll() if len(others) < 2 else []
    assert one.request_id == "long1" and one.finish_reason == "abort"
    assert one.token_ids == whole["long1"].token_ids[:40] and one.log_probs == whole["long1"].log_probs[:40]
    assert {r.request_id: r.token_ids for r in others} == {k: whole[k].token_ids for k in ("long0", "long2")}


def test_a_sample_that_waits_for_a_place_is_aborted_at_once(engine: Any) -> None:
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    hold(engine, 1)
    engine.submit([Request("a", [5], sampling, n=8), Request("late", [5], sampling)])
    wait_until_held(engine, 8)
    engine.abort(["late"])
    (late,) = engine.poll(60)
    assert (late.request_id, late.token_ids, late.finish_reason) == ("late", [], "abort")
    hold(engine, None)
    found = [response.finish_reason for responses in iter(engine.poll, []) for response in responses]
    assert found == ["length"] * 8


def test_a_server_that_ends_no_single_sample_ends_it_with_its_next_piece(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's: `end` does nothing there."""
    monkeypatch.setattr(engine, "end", partial(ServerRollout.end, engine))
    hold(engine, 40)
    engine.submit([Request("ended", [6], SamplingParams(max_tokens=90, ignore_eos=True))])
    wait_until_held(engine, 1)
    engine.abort(["ended"])
    hold(engine, None)
    (response,) = engine.poll()
    assert response.finish_reason == "abort" and len(response.token_ids) in (33, 65)


def test_what_a_piece_repeats_counts_once_and_what_it_lacks_is_an_error(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request("a", [6], SamplingParams(max_tokens=70, ignore_eos=True), seed=4)]
    (whole,) = engine.generate(requests)

    def repeating(*args: Any, **rest: Any) -> dict[str, Any]:
        return {**generate_body(*args, **rest), "incremental_streaming_output": False}

    with monkeypatch.context() as patch:
        patch.setattr("verl.rollout.sglang.generate_body", repeating)
        (again,) = engine.generate(requests)
    assert again == whole

    async def lacking(path: str, body: Any) -> AsyncIterator[Any]:
        rows = [[-1.0, 5, None]]
        yield {"meta_info": {"completion_tokens": 3, "finish_reason": None, "output_token_logprobs": rows}}

    monkeypatch.setattr(engine.client, "events", lacking)
    with pytest.raises(RolloutError, match="sent 1 of 3 new tokens of a/0"):
        list(engine.generate(requests))


def test_stop_strings_end_within_a_piece(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = SimpleNamespace(decode=lambda ids, **_: "".join(f"w{token} " for token in ids))
    monkeypatch.setattr(engine.stopper, "tokenizer", words)
    sampling = SamplingParams(max_tokens=90, ignore_eos=True)
    (whole,) = engine.generate([Request("stopped", [6], sampling, seed=4)])
    end = whole.token_ids.index(whole.token_ids[50]) + 1
    sampling = replace(sampling, stop=(f"w{whole.token_ids[50]} ",))
    (stopped,) = engine.generate([Request("stopped", [6], sampling, seed=4)])
    assert stopped.finish_reason == "stop" and stopped.token_ids == whole.token_ids[:end]


@pytest.mark.slow(seconds=10)
def test_as_many_samples_run_as_the_engine_takes(model: Any, beside: pytest.MonkeyPatch) -> None:
    def loops() -> int:
        return sum(thread.name == "verl-samples" for thread in threading.enumerate())

    before = loops()
    engine = build_rollout("sglang", model, None, section(max_num_seqs=300))
    try:
        threads = threading.active_count()
        hold(engine, 1)
        engine.submit([Request("a", [5], SamplingParams(max_tokens=4, ignore_eos=True), n=300)])
        wait_until_held(engine, 300)
        assert engine.stats().running == 300 and threading.active_count() == threads
        hold(engine, None)
        found = 0
        while responses := engine.poll():
            found += sum(len(response.token_ids) for response in responses)
        assert found == 4 * 300
    finally:
        engine.close()
    assert loops() == before


def test_weights_arrive_while_samples_run(engine: Any, model: Any) -> None:
    """Eight of eleven samples have three tokens, of which one has come; the others wait for a place."""
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [Request("a", [5, 9], sampling, n=2, seed=3), Request("b", [7], sampling, partial=([4, 4],))]
    requests.append(Request("c", [60, 3], sampling, n=8))
    prompts = {"a": [5, 9], "b": [7, 4, 4], "c": [60, 3]}
    old, before = copy.deepcopy(model), engine.version
    hold(engine, 3)
    engine.submit(requests)
    wait_until_held(engine, 8)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) * 0.1)
    engine.update_weights(ModuleWeights(model), before + 1)
    found: dict[tuple[str, int], Any] = {}
    while responses := engine.poll():
        found |= {(response.request_id, response.sample): response for response in responses}
    assert len(found) == 11
    assert sorted(r.version_changes for r in found.values()) == [[]] * 3 + [[(3, before + 1)]] * 8
    for (name, sample), response in found.items():
        prompt, tokens = prompts[name], response.token_ids
        change = 3 if response.version_changes else 0
        assert len(tokens) == (6 if name == "b" else 8)
        assert response.versions == [before] * change + [before + 1] * (len(tokens) - change)
        expected = log_probs(old, prompt, tokens[:change], 1.0) if change else []
        expected += log_probs(model, [*prompt, *tokens[:change]], tokens[change:], 1.0)
        assert response.log_probs == pytest.approx(expected, abs=1e-4)
        if (name, sample) == ("b", 0):
            resumed = Request("b", [7], sampling, partial=([4, 4, *tokens[:change]],))
            assert [r.token_ids for r in engine.generate([resumed])] == [tokens[change:]]
    assert calls(engine, "/update_weights_from_disk")[-1]["abort_all_requests"] is True
    names = [body["rid"] for body in calls(engine, "/generate")]
    assert {f"a/0@{before}", f"a/0@{before + 1}"} <= set(names)


def test_the_server_wants_its_key_and_listens_on_loopback(engine: Any) -> None:
    import httpx

    assert engine.client.call("GET", "/seen")["arguments"]["host"] == "127.0.0.1"
    assert httpx.get(f"http://{engine.client.address}/health").status_code == 401
    assert (engine.folder / "server.yaml").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("corrupt", "model.norm.weight begins with"),
        ("stale", "log-probs of a fixed prompt differ"),
        ("refuse", "out of memory"),
    ],
)
def test_faults_of_a_hand_over_are_caught(
    model: Any, beside: pytest.MonkeyPatch, tiny: Callable[..., Any], fault: str, message: str
) -> None:
    beside.setenv("FAKE_SGLANG_FAULT", fault)
    engine: Any = None
    try:
        with pytest.raises((TrainingHalted, RolloutError), match=message):
            engine = build_rollout("sglang", model, None, section())
            engine.update_weights(ModuleWeights(tiny("llama_tied", seed=9)), 1)
    finally:
        beside.delenv("FAKE_SGLANG_FAULT")
        if engine is not None:
            engine.close()


def test_a_server_that_cannot_start_says_why(model: Any, beside: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = section()
    config.engine_kwargs.sglang = {"no_such_flag": 1}
    with pytest.raises(RolloutError, match=r"(?s)ended with status.*no-such-flag"):
        build_rollout("sglang", model, None, config, run_folder=tmp_path)
    (log,) = (tmp_path / "engine_logs").iterdir()
    assert log.name.startswith("sglang_server_") and "no-such-flag" in log.read_text()


def test_versions_and_arguments(model: Any, beside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import verl.requirements as adapter

    info = replace(model_info(ModuleWeights(model), None), device="cuda", dtype="bfloat16")
    given = server_arguments(
        section(gpu_memory_utilization=0.4, dtype="fp8", enforce_eager=True), info, Path("/model")
    )
    expected = {
        "quantization": "fp8",
        "mem_fraction_static": 0.4,
        "disable_cuda_graph": True,
        "enable_memory_saver": True,
        "context_length": 128,
        "tp_size": 1,
        "max_running_requests": 8,
    }
    assert {key: given[key] for key in expected} == expected
    assert given["enable_deterministic_inference"] is True
    assert "enable_deterministic_inference" not in server_arguments(
        section(per_request_seed=False), info, Path("/model")
    )
    with pytest.raises(ConfigError, match=r"log-probs before repetition_penalty=1.1.*name=native"):
        server_arguments(section(repetition_penalty=1.1), info, Path("/model"))
    bad = section()
    bad.engine_kwargs.sglang = {"port": 1}
    with pytest.raises(ConfigError, match=r"engine_kwargs.sglang.port is set by verl"):
        server_arguments(bad, info, Path("/model"))
    monkeypatch.setattr(adapter.metadata, "version", lambda name: "0.4.9")
    with pytest.raises(ConfigError, match=r"sglang 0.4.9 is installed, .* works with >=0.5.17,<0.6"):
        require_engine("sglang")

    def missing(name: str) -> str:
        raise adapter.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(adapter.metadata, "version", missing)
    with pytest.raises(MissingPackage, match="pip install .sglang>="):
        require_engine("sglang")
