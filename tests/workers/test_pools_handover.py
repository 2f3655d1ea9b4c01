"""Weights on their way to processes that only generate, without Ray: threads stand for the processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from verl.config.schema import RolloutConfig
from verl.errors import RolloutError, TrainingHalted
from verl.models.lora import add_lora
from verl.models.weight_source import Adapter, NamedTensors, Names, SourceLogProbs
from verl.rollout import build_rollout
from verl.rollout.base import Request, Response, SamplingParams
from verl.rollout.external_engine import RemoteEngine, TPFollower
from verl.rollout.source import ModuleWeights
from verl.rollout.vllm.engine import VLLMRollout
from verl.rollout.weight_sync.broadcast import Broadcast, load_into, report
from verl.rollout.weight_sync.fingerprint import WeightManifest, compare
from verl.rollout.weight_sync.probe import ProbeCheck

CPU = torch.device("cpu")
PAIRS = {
    "a.weight": torch.randn(7, 5),
    "b.weight": torch.randn(3, 2, dtype=torch.bfloat16),
    "large": torch.randn(400),
    "nothing": torch.empty(0, 4),
    "one number": torch.tensor(7, dtype=torch.int64),
    "odd": torch.randint(0, 255, (13,), dtype=torch.uint8),
    "last": torch.randn(2, 3).T,
}


def linked(bodies: list[Callable[[Broadcast], Any]], timeout_s: float = 240.0) -> list[Any]:
    """Each body with its own end of a link, all at once; what they return or raise, in order."""
    store, found = dist.HashStore(), [None] * len(bodies)

    def run(place: int) -> None:
        try:
            found[place] = bodies[place](Broadcast(store, place, len(bodies), CPU, timeout_s))
        except TrainingHalted as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(280)
    return found


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="module")
def llama() -> Callable[..., Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(seed: int, **changes: Any) -> Any:
        torch.manual_seed(seed)
        shape: dict[str, Any] = {
            "vocab_size": 50,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
        }
        return LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).eval()

    return make


@pytest.mark.parametrize("limit", [1, 100, 1 << 20])
def test_every_receiver_gets_every_pair_whatever_the_size_of_buckets(limit: int) -> None:
    def receive(broadcast: Broadcast) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in broadcast.receive()}

    sent, *received = linked([lambda broadcast: broadcast.send(PAIRS.items(), limit), receive, receive])
    for pairs in received:
        assert list(pairs) == list(PAIRS)
        for name, tensor in PAIRS.items():
            assert pairs[name].dtype == tensor.dtype and torch.equal(pairs[name], tensor)
        arrived = WeightManifest()
        list(arrived.watch(pairs.items()))
        compare(sent, arrived, 1, "engine")


def test_a_receiver_that_leaves_is_said_on_the_other_side() -> None:
    """Its end of the link is gone with it."""
    sent, _ = linked(
        [lambda broadcast: [broadcast.send(PAIRS.items(), 1) for _ in range(50)], lambda broadcast: None], 5.0
    )
    assert isinstance(sent, TrainingHalted) and "died or stopped answering" in str(sent)


def test_a_module_takes_the_weights_and_shows_them_by_log_probs(llama: Callable[..., Any]) -> None:
    trainer, engine_module = llama(1), llama(2)
    engine = build_rollout("native", engine_module, None, None)

    def receive(broadcast: Broadcast) -> Any:
        received = load_into(engine_module, broadcast.receive())
        engine.update_weights(ModuleWeights(engine_module), 4)
        info: Any = SimpleNamespace(vocab_size=50, dtype="float32")
        return report(engine, received, info, RolloutConfig(max_model_len=20), lambda responses: None)

    sent, arrival = linked([lambda broadcast: broadcast.send(trainer.state_dict().items()), receive])
    compare(sent, arrival.received, 4, "engine")
    assert len(arrival.prompt) + len(arrival.tokens[0]) <= 20, "within the engine's longest sequence"
    ours = ModuleWeights(trainer).log_probs(arrival.prompt, arrival.tokens)
    assert ProbeCheck("engine", "float32").add(4, arrival.log_probs, ours).gap < 1e-4
    others = ModuleWeights(llama(3)).log_probs(arrival.prompt, arrival.tokens)
    with pytest.raises(TrainingHalted, match="rollout rank 1.*policy version 4.*and look at it"):
        ProbeCheck("rollout rank 1", "float32", "look at it").add(4, arrival.log_probs, others)


def test_what_is_fingerprinted_is_what_the_module_has(llama: Callable[..., Any]) -> None:
    class Deaf(nn.Linear):
        """A weight that does not take what is written to it."""

        def __init__(self) -> None:
            super().__init__(2, 2, bias=False)
            self.weight.copy_ = lambda other: self.weight  # type: ignore[method-assign]

    deaf, other = Deaf(), {"weight": torch.zeros(2, 2)}
    sent = WeightManifest()
    received = load_into(deaf, sent.watch(other.items()))
    with pytest.raises(TrainingHalted, match="weight: sent float32"):
        compare(sent, received, 1, "engine")


def test_weights_in_another_type_are_compared_as_they_arrived(llama: Callable[..., Any]) -> None:
    half, sent = llama(2).to(torch.bfloat16), WeightManifest()
    compare(sent, load_into(half, sent.watch(llama(1).state_dict().items())) or sent, 1, "engine")
    torch.testing.assert_close(half.model.norm.weight.float(), llama(1).model.norm.weight)


def test_a_weight_too_few_or_too_many_is_refused(llama: Callable[..., Any]) -> None:
    weights = dict(llama(1).state_dict())
    norm = weights.pop("model.norm.weight")
    with pytest.raises(TrainingHalted, match=r"1 weights .*model\.norm\.weight"):
        load_into(llama(2), weights.items())
    with pytest.raises(TrainingHalted, match="sent extra of shape"):
        load_into(llama(2), {"extra": norm}.items())
    with pytest.raises(TrainingHalted, match=r"sent model\.norm\.weight of shape \(5,\); .* has \(32,\)"):
        load_into(llama(2), {"model.norm.weight": norm[:5]}.items())


class Recorded(ModuleWeights):
    """Notes what is asked of it: on several ranks each of these is a collective."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.asked: list[str] = []

    def _noted(self, tensors: NamedTensors) -> NamedTensors:
        for name, tensor in tensors:
            self.asked.append(name)
            yield name, tensor

    def named_tensors(self, names: Names = "hf") -> NamedTensors:
        return self._noted(super().named_tensors(names))

    def base_tensors(self, names: Names = "hf") -> NamedTensors:
        return self._noted(super().base_tensors(names))

    def adapter(self) -> Adapter | None:
        adapter = super().adapter()
        return adapter and Adapter(adapter.config, self._noted(adapter.named_tensors))

    def log_probs(self, prompt_ids: Any, responses: Any) -> SourceLogProbs:
        self.asked.append(f"log-probs of {len(responses)}")
        zeros = [[0.0] * len(row) for row in responses]
        return SourceLogProbs(zeros, zeros)


class Host(VLLMRollout):
    """vLLM's adapter as it is, without vLLM behind it."""

    def create_llm(self) -> Any:
        llm = MagicMock()
        llm.collective_rpc.return_value = []
        return llm

    def deliver(self, tensors: NamedTensors) -> list[str]:
        list(tensors)
        return []

    def _load_adapter(self, name: str, number: int, folder: str) -> Any:
        return MagicMock()

    def _advance(self, timeout_s: float | None) -> list[Response]:
        samples = [self._new.popleft() for _ in range(len(self._new))]
        for sample in samples:
            sample.append([1] * 8, [0.0] * 8, self.stopper)
        return [self._finish(sample, "length") for sample in samples]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("sleeps", [False, True])
def test_a_follower_asks_the_trainer_for_what_the_host_asks(
    llama: Callable[..., Any], lora: bool, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl.rollout.vllm.engine.set_environment", lambda **more: None)
    section = RolloutConfig(name="vllm", tensor_model_parallel_size=2, max_model_len=64)
    section.engine_kwargs.vllm = {"enable_sleep_mode": sleeps}
    asked = []
    for make in (partial(Host, watchdog_s=600), partial(TPFollower, "vllm")):
        model = llama(1)
        if lora:
            add_lora(model, rank=2, alpha=4, target_modules=["q_proj"])
        source = Recorded(model)
        engine: Any = make(source, None, section)  # type: ignore[operator]
        for version in (1, 2):
            engine.sleep()
            engine.update_weights(source, version)
            source.asked.append("generation")
            engine.wake()
        engine.close()
        asked.append(source.asked)
    assert asked[0] == asked[1]
    after = [at for at, what in enumerate(asked[0]) if what == "generation"]
    proven_late = [asked[0][at + 1 : at + 2] == ["log-probs of 4"] for at in after]
    assert proven_late == [sleeps, sleeps], "an engine that sleeps is compared when it wakes"
    assert ("model.norm.weight" in asked[0][after[0] :]) != lora, "with an adapter only that is gathered"
    with pytest.raises(RolloutError, match="requests go to that one"):
        list(engine.generate([Request("a", [1], SamplingParams(max_tokens=4))]))


def test_a_rank_that_only_trains_says_where_to_ask() -> None:
    with pytest.raises(RolloutError, match="separate processes"):
        RemoteEngine().generate([])
