"""Weight sync: buckets through shared memory, fingerprints, the probe, tied matrices."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import RolloutError, TrainingHalted
from verl.models.weight_source import WeightSource
from verl.rollout.source import ModuleWeights
from verl.rollout.vllm.base import check_report
from verl.rollout.vllm.worker import LoadCheck
from verl.rollout.weight_sync.buckets import split_buckets
from verl.rollout.weight_sync.fingerprint import WeightManifest, compare, fingerprint
from verl.rollout.weight_sync.probe import ProbeCheck, measure, probe_request
from verl.rollout.weight_sync.shared_memory import SharedMemorySender, receive_tensors

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


@given(place=st.integers(0, 599), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_any_single_changed_value_changes_the_fingerprint(place: int, dtype: torch.dtype) -> None:
    tensor = torch.linspace(-1, 1, 600, dtype=torch.float32).to(dtype).reshape(20, 30)
    changed = tensor.clone()
    changed.view(-1)[place] += 0.25
    assert fingerprint(changed) != fingerprint(tensor)


def test_the_fingerprint_sees_order_shape_and_type_but_not_strides() -> None:
    tensor = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    assert fingerprint(tensor) == fingerprint(tensor.t().contiguous().t())
    assert fingerprint(tensor) != fingerprint(tensor.flip(0))
    assert fingerprint(tensor) != fingerprint(tensor.reshape(60, 40))
    assert fingerprint(tensor) != fingerprint(tensor.half())
    assert fingerprint(torch.empty(0, 3)) != fingerprint(torch.empty(0, 4))
    for dtype in TYPES:
        assert fingerprint(tensor.to(dtype)) == fingerprint(tensor.to(dtype).clone())


def test_a_difference_stops_the_run_with_both_values() -> None:
    sent = {"a": "1", "b": "2"}
    compare(sent, dict(sent), 3, "engine")
    for received, shown in (
        ({"a": "1", "b": "9"}, "b: sent 2, received 9"),
        ({"a": "1"}, "b: sent 2, received nothing"),
        ({"a": "1", "b": "2", "c": "4"}, "c: not sent, received 4"),
    ):
        with pytest.raises(TrainingHalted, match="policy version 3") as caught:
            compare(sent, received, 3, "engine")
        assert shown in str(caught.value)


def some_weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(8, 8), (100,), (50, 20), (3,), (64, 64), (1,)]
    pairs = [(f"w{i}", torch.randn(*size, generator=generator)) for i, size in enumerate(sizes)]
    return [*pairs, ("tied", pairs[0][1]), ("half", torch.ones(7, dtype=torch.bfloat16))]


def test_buckets_keep_to_their_size_and_lose_nothing() -> None:
    pairs = some_weights()
    buckets = list(split_buckets(pairs, 4000))
    assert [name for bucket in buckets for name in bucket] == [name for name, _ in pairs]
    for bucket in buckets:
        size = sum(t.numel() * t.element_size() for t in bucket.values())
        assert size <= 4000 or len(bucket) == 1


@pytest.mark.parametrize("receivers", [1, 3])
def test_every_receiver_gets_every_weight_and_nothing_stays_behind(receivers: int) -> None:
    sent, most = WeightManifest(), 0
    received: list[dict[str, torch.Tensor]] = [{} for _ in range(receivers)]

    def receive(number: int, sender: SharedMemorySender) -> None:
        nonlocal most
        for name, tensor in receive_tensors(sender.address, 300):
            received[number][name] = tensor  # kept, as vLLM keeps the tensors of a layer until it is complete
            most = max(most, len(list(sender.folder.glob("bucket*"))))

    with SharedMemorySender(receivers, 300) as sender:
        threads = [threading.Thread(target=receive, args=(i, sender)) for i in range(receivers)]
        for thread in threads:
            thread.start()
        sender.send(sent.watch(some_weights()), limit=1000)
        for thread in threads:
            thread.join()
    assert most == 1, "no more than one bucket is in shared memory"
    for tensors in received:
        manifest = WeightManifest()
        list(manifest.watch(tensors.items()))
        compare(sent, manifest, 0, "test")
    assert not sender.folder.exists()


def test_a_side_that_does_not_come_is_named() -> None:
    with SharedMemorySender(1, 0.3) as sender:
        with pytest.raises(RolloutError, match="waited 0.3 s for the engine's workers to connect"):
            sender.send(some_weights())
        with pytest.raises(RolloutError, match="the trainer sent no weights for 0.2 s"):
            list(receive_tensors(sender.address, 0.2))


def test_a_failure_of_either_side_ends_the_other_at_once() -> None:
    def dead() -> None:
        raise RolloutError("the engine died")

    with SharedMemorySender(1, 600, dead) as sender, pytest.raises(RolloutError, match="the engine died"):
        sender.send(some_weights())
    broken: list[RolloutError] = []

    def receive() -> None:
        try:
            list(receive_tensors(sender.address, 600))
        except RolloutError as error:
            broken.append(error)

    def failing() -> Any:
        yield from some_weights()[:2]
        raise ValueError("no more weights")

    thread = threading.Thread(target=receive)
    with pytest.raises(ValueError, match="no more weights"), SharedMemorySender(1, 600) as sender:
        thread.start()
        sender.send(failing(), limit=1)
    thread.join()
    assert "broke off the weight sync" in str(broken[0])

    def leave() -> None:
        next(iter(receive_tensors(sender.address, 600)))

    thread = threading.Thread(target=leave)
    with pytest.raises(ConnectionError), SharedMemorySender(1, 600) as sender:
        thread.start()
        sender.send(some_weights(), limit=1)
    thread.join()


def test_shared_memory_without_room_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*about: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with SharedMemorySender(1, 300) as sender:
        monkeypatch.setattr(sender, "_accept", list)
        with pytest.raises(RolloutError, match="is too small for a bucket .* --shm-size"):
            sender.send(some_weights())


def test_a_tied_output_matrix_is_always_sent(tiny: Callable[..., Any]) -> None:
    model = tiny("llama_tied")
    names = [name for name, _ in ModuleWeights(model).named_tensors()]
    assert names.count("lm_head.weight") == names.count("model.embed_tokens.weight") == 1


def test_base_weights_leave_adapters_out_and_merged_ones_take_them_in(tiny: Callable[..., Any]) -> None:
    from verl.models.lora import add_lora

    plain, model = tiny("llama"), tiny("llama")
    add_lora(model, rank=2, alpha=4, target_modules=["q_proj"])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.1)
    expected = plain.state_dict()
    source = ModuleWeights(model)
    base, merged = dict(source.base_tensors()), dict(source.named_tensors())
    assert set(base) == set(merged) == set(expected)
    assert all(torch.equal(base[name], expected[name]) for name in expected)
    different = {name for name in expected if not torch.equal(merged[name], expected[name])}
    assert different == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}


def test_the_probe_compares_with_the_trainers_log_probs(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    prompt = list(probe_request(97, None).prompt_ids)
    assert len(set(prompt)) > 8
    tokens = [[3, 50, 9], [7, 7, 80]]
    with torch.no_grad():
        found = model(torch.tensor([[*prompt, *row] for row in tokens]), use_cache=False).logits.log_softmax(
            -1
        )
    expected = [
        [float(found[i, len(prompt) - 1 + place, token]) for place, token in enumerate(row)]
        for i, row in enumerate(tokens)
    ]
    ours = ModuleWeights(model).log_probs(prompt, tokens)
    assert ours.exact is not None
    for rows in (ours.log_probs, ours.exact):
        assert rows[0] == pytest.approx(expected[0], abs=1e-5) and rows[1] == pytest.approx(
            expected[1], abs=1e-5
        )
    assert ProbeCheck("test", "float32").add(1, expected, ours).gap < 1e-4
    wrong = [[value + 0.01 for value in row] for row in expected]
    with pytest.raises(
        TrainingHalted, match=r"version 4: .* differ by 0.01 on average, 0.002 is what float32"
    ):
        ProbeCheck("test", "float32").add(4, wrong, ours)
    ProbeCheck("test", "bfloat16").add(4, wrong, ours)


def training_engine(model: Any) -> Any:
    from verl.config.schema import ActorConfig, ModelConfig
    from verl.engines import build_engine

    return build_engine("actor", ModelConfig(), ActorConfig(), model=model, device="cpu", total_steps=1)


def trained_weights(model: Any) -> WeightSource:
    weights: WeightSource = training_engine(model).weights()
    return weights


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("weights", [trained_weights, ModuleWeights])
def test_the_noise_is_what_rounding_to_bfloat16_changes(
    tiny: Callable[..., Any], weights: Callable[[Any], WeightSource]
) -> None:
    """And not what a batch of another shape changes, which is nothing with the kernels for packs on a GPU."""
    model = tiny("llama").bfloat16()
    exact = copy.deepcopy(model).float()
    prompt, tokens = list(probe_request(97, None).prompt_ids), [[3, 50, 9], [7, 7, 80]]
    rounded, expected = (weights(each).log_probs(prompt, tokens) for each in (model, exact))
    assert rounded is not None and expected is not None and rounded.exact is not None
    for row, known in zip(rounded.exact, expected.log_probs, strict=True):
        assert row == pytest.approx(known, abs=1e-5)
    noise = measure(rounded.log_probs, rounded).noise
    gap = measure(rounded.log_probs, expected).gap
    assert noise == pytest.approx(gap, rel=0.01) and gap > 1e-4
    assert measure(expected.log_probs, expected).noise == pytest.approx(0.0, abs=1e-6)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_model_that_refuses_float32_is_probed_without_noise(
    tiny: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = training_engine(tiny("llama").bfloat16())
    refused = []

    def refuse(module: Any, args: Any) -> None:
        if args[0].dtype == torch.float32:
            refused.append(module)
            raise RuntimeError("expected bfloat16")

    with engine.weights().structure() as module:
        module.model.layers[1].mlp.register_forward_pre_hook(refuse)
    prompt, tokens = list(probe_request(97, None).prompt_ids), [[3, 50, 9], [7, 7, 80]]
    with caplog.at_level(logging.WARNING):
        first, second = (engine.weights().log_probs(prompt, tokens) for _ in range(2))
    assert first is not None and first == second and first.exact is None
    assert len(refused) == len(caplog.records) == 1, "tried once"
    assert "log-probs cannot be computed in float32: expected bfloat16" in caplog.text
    check = ProbeCheck("test", "bfloat16")
    check.add(1, first.log_probs, first)
    assert check.metrics() == {"rollout/probe_gap": 0.0}


def test_a_parameter_that_the_first_load_moved_away_from_captured_graphs_stops_the_run() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    held = LoadCheck()
    for _ in range(2):
        held.remember_addresses(model)
        with torch.no_grad():
            model[0].weight.copy_(torch.ones(2, 2))
        assert held.moved(model) == []
    held = LoadCheck()
    held.remember_addresses(model)
    old = model[1].weight
    model[1].weight = torch.nn.Parameter(old.detach().clone())
    assert held.moved(model) == ["1.weight"]
    report = {"missing": [], "wrong": {}, "moved": held.moved(model)}
    with pytest.raises(TrainingHalted, match="enforce_eager=True"):
        check_report(report, 0)
