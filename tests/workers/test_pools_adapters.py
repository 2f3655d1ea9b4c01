"""LoRA adapters on their way to processes that only generate: the weights under them once, then only the adapter.

Without Ray: the trainer's rank and the one that generates are the real ones, in threads of this process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from verl.config.load import load_ppo_config
from verl.config.schema import RolloutConfig
from verl.errors import TrainingHalted
from verl.models.lora import add_lora, plain_name
from verl.models.weight_source import Adapter
from verl.rollout.base import Request, SamplingParams
from verl.rollout.source import ModuleWeights, model_info
from verl.rollout.vllm import base as vllm_base
from verl.rollout.vllm.base import read_adapter, write_adapter
from verl.rollout.vllm.engine import VLLMRollout
from verl.rollout.weight_sync import broadcast
from verl.rollout.weight_sync.broadcast import Broadcast, ReceivedWeights
from verl.rollout.weight_sync.fingerprint import WeightManifest, compare
from verl.rollout.weight_sync.probe import ProbeCheck
from verl.workers.rank import RankSetup
from verl.workers.rollout_rank import RolloutRank
from verl.workers.train_rank import TrainRank

pytest.importorskip("peft", reason="needs the package peft")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a process of its own would take with it."""
    root, folder, threads = logging.getLogger(), os.getcwd(), torch.get_num_threads()
    level, handlers = root.level, list(root.handlers)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    os.chdir(folder)
    torch.set_num_threads(threads)


def at_once(*bodies: Callable[[], Any]) -> list[Any]:
    """All of them, each in a thread; what they return, or the first that was raised."""
    found: list[Any] = [None] * len(bodies)

    def run(place: int) -> None:
        try:
            found[place] = bodies[place]()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(280)
    for value in found:
        if isinstance(value, Exception):
            raise value
    return found


class Pair:
    """A rank that trains and one that generates, and the bytes that crossed between them."""

    def __init__(self, cfg: Any, tokenizer: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        pack = broadcast.pack

        def counting(bucket: dict[str, torch.Tensor], buffer: torch.Tensor) -> None:
            self.bytes += sum(tensor.nbytes for tensor in bucket.values())
            pack(bucket, buffer)

        monkeypatch.setattr(broadcast, "pack", counting)
        self.trainer, self.rollout = TrainRank(0, 1), RolloutRank(0)
        setup = RankSetup(cfg, tokenizer, training_steps=3, run_folder=folder)
        setup.store = self.trainer.do_open_store("127.0.0.1")
        self.trainer.do_build(setup)
        self.rollout.do_build(replace(setup), self.trainer.group.model_info(), self.trainer.group.adapter())
        at_once(lambda: self.trainer.do_link(2), lambda: self.rollout.do_link(2))

    @property
    def model(self) -> Any:
        engine: Any = self.trainer.group.actor_engine
        with engine.weights().structure() as module:
            return module

    def sync_weights(self, version: int) -> float:
        """As the controller does it; the difference of log-probs."""
        self.bytes = 0
        sent, arrival = at_once(
            lambda: self.trainer.do_sync_weights(version), lambda: self.rollout.do_sync_weights(version)
        )
        compare(sent, arrival.received, version, "rollout rank 0")
        (ours,) = self.trainer.group.probe(arrival.prompt, [arrival.tokens])
        check = ProbeCheck("rollout rank 0", arrival.precision)
        return check.add(version, arrival.log_probs, ours).gap

    def learn(self) -> None:
        """What an update does to the weights."""
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if weight.requires_grad:
                    weight += (
                        torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) / 10
                    )

    def size(self, which: Callable[[str], bool]) -> int:
        held = self.model.state_dict()
        return sum(t.numel() * t.element_size() for name, t in held.items() if which(name))


@pytest.fixture
def pair(overrides: Any, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = []

    def make(*extra: str) -> Pair:
        pool = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"]
        cfg = load_ppo_config(overrides("actor_rollout_ref.model.lora_rank=4", *pool, *extra))
        made.append(Pair(cfg, tiny_tokenizer, tmp_path, monkeypatch))
        return made[-1]

    yield make
    for one in made:
        one.trainer.do_close()
        one.rollout.do_close()


def is_adapter(name: str) -> bool:
    return plain_name(name) is None


REQUESTS = [
    Request(f"r{i}", [3 + i, 5], SamplingParams(max_tokens=12, ignore_eos=True), n=2, seed=5)
    for i in range(4)
]


@pytest.mark.parametrize("name", ["native", "hf"])
def test_only_the_adapter_crosses_after_the_first_time(pair: Any, name: str) -> None:
    from verl.rollout import build_rollout

    both = pair(f"actor_rollout_ref.rollout.name={name}")
    assert both.sync_weights(0) < 1e-4
    assert both.bytes == both.size(lambda name: True)
    own = build_rollout(name, both.trainer.group.actor_engine.weights(), None, None)
    before = {}
    for version in (1, 2):
        both.learn()
        assert both.sync_weights(version) < 1e-4
        assert both.bytes == both.size(is_adapter) < both.size(lambda name: True) / 5
        # The tokens and log-probs of one process with this adapter.
        here = {(r.request_id, r.sample): r for r in own.generate(REQUESTS)}
        both.rollout.control_submit(REQUESTS)
        there = [r for flush in both.rollout.do_generate(version) for r in flush]
        assert len(there) == len(here) == 8
        for response in there:
            mine = here[response.request_id, response.sample]
            assert response.token_ids == mine.token_ids and response.policy_version == version
            assert response.log_probs == pytest.approx(mine.log_probs, abs=1e-4)
        tokens = [here[key].log_probs for key in sorted(here)]
        assert tokens != before, "the adapter matters"
        before = tokens


def test_one_changed_number_of_the_adapter_is_caught(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both = pair("actor_rollout_ref.rollout.name=native")
    both.sync_weights(0)
    both.learn()
    receive = Broadcast.receive

    def changed(group: Broadcast) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in receive(group):
            if name.endswith("layers.1.mlp.up_proj.lora_B.default.weight"):
                tensor[3, 2] *= 1.01
            yield name, tensor

    monkeypatch.setattr(Broadcast, "receive", changed)
    with pytest.raises(TrainingHalted, match="policy version 1") as caught:
        both.sync_weights(1)
    text = str(caught.value)
    assert "1 of 28 tensors differ" in text and "up_proj.lora_B.default.weight: sent float32:" in text, text


def test_an_adapter_that_arrives_but_is_not_used_is_caught(pair: Any) -> None:
    both = pair("actor_rollout_ref.rollout.name=native")
    both.sync_weights(0)
    both.learn()
    for module in both.rollout._module.modules():
        if hasattr(module, "_disable_adapters"):
            module._disable_adapters = True
    with pytest.raises(TrainingHalted, match="rollout rank 0 does not compute with the trainer's weights"):
        both.sync_weights(1)


def test_eight_bits_and_sglang_get_whole_weights(overrides: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.train_rank import RankGroup

    def apart(name: str, dtype: str, rank: int) -> bool:
        cfg = load_ppo_config(overrides())
        cfg.actor_rollout_ref.rollout.name, cfg.actor_rollout_ref.rollout.dtype = name, dtype
        cfg.actor_rollout_ref.model.lora_rank = rank
        group = RankGroup.__new__(RankGroup)
        group.cfg = cfg
        return group.separate_adapter

    assert [apart(name, "auto", 4) for name in ("native", "hf", "vllm", "sglang")] == [
        True,
        True,
        True,
        False,
    ]
    assert [apart(name, "fp8", 4) for name in ("native", "vllm")] == [False, True]
    assert not apart("native", "auto", 0)


# -- vLLM -------------------------------------------------------------------------------------------------------


class WithoutVLLM(VLLMRollout):
    """vLLM's adapter as it is, without vLLM behind it: notes what reaches it."""

    def create_llm(self) -> Any:
        assert self.arguments["enable_lora"] and self.arguments["max_lora_rank"] == 8
        self.base: list[list[str]] = []
        self.loaded: list[WeightManifest] = []
        return MagicMock()

    def deliver(self, tensors: Any) -> list[str]:
        self.base.append([name for name, _ in tensors])
        return []

    def _load_adapter(self, name: str, number: int, folder: str) -> Any:
        self.loaded.append(read_adapter(Path(folder), WeightManifest()))
        return MagicMock()


@pytest.fixture
def adapted(tiny_model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    add_lora(model, rank=4, alpha=8, target_modules=["all-linear"])
    return model


@pytest.fixture
def without_vllm(adapted: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("verl.rollout.vllm.engine.set_environment", lambda **more: None)
    monkeypatch.setattr("verl.rollout.vllm.engine.destroy_process_groups", lambda: None)
    source = ReceivedWeights(model_info(ModuleWeights(adapted), None), adapted.verl_lora_config)
    engine = WithoutVLLM(source, None, RolloutConfig(name="vllm", max_model_len=64), watchdog_s=600)
    yield engine
    engine.close()
    assert not engine.folder.exists()


def send_to(engine: Any, version: int, parts: list[dict[str, torch.Tensor]]) -> None:
    engine.source.broadcast = MagicMock()
    engine.source.broadcast.receive = MagicMock(side_effect=[iter(part.items()) for part in parts])
    engine.source.expect(version)
    engine.update_weights(engine.source, version)


def test_vllm_gets_the_weights_once_and_every_adapter_as_an_adapter(adapted: Any, without_vllm: Any) -> None:
    weights, engine = ModuleWeights(adapted), without_vllm
    assert engine.base == [] and engine.loaded == [], "nothing has arrived"
    found = weights.adapter()
    assert found is not None
    base, adapter = dict(weights.base_tensors()), dict(found.named_tensors)
    for version, parts in ((0, [base, adapter]), (1, [adapter]), (2, [adapter])):
        send_to(engine, version, parts)
        expected = WeightManifest()
        for part in parts:
            list(expected.watch(part.items()))
        assert engine.source.received == expected
    assert engine.base == [list(base)]
    assert len(engine.loaded) == 3 and len(engine.loaded[0]) == len(adapter)


def test_what_vllm_would_read_is_compared_with_what_was_taken(
    adapted: Any, without_vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(adapter: Adapter, folder: Path) -> None:
        tensors = [(name, tensor + (".layers.0." in name)) for name, tensor in adapter.named_tensors]
        write_adapter(Adapter(adapter.config, tensors), folder)

    weights = ModuleWeights(adapted)
    found = weights.adapter()
    assert found is not None
    adapter = dict(found.named_tensors)
    send_to(without_vllm, 6, [dict(weights.base_tensors()), adapter])
    monkeypatch.setattr(vllm_base, "write_adapter", damaged)
    with pytest.raises(TrainingHalted, match="vllm received for policy version 7 .* 14 of 28 tensors differ"):
        send_to(without_vllm, 7, [adapter])
    assert len(without_vllm.loaded) == 1, "it was not loaded"


def test_a_written_adapter_is_one_that_peft_opens(adapted: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.02)
    found = ModuleWeights(adapted).adapter()
    assert found is not None
    write_adapter(found, tmp_path / "adapter")
    ids = torch.tensor([[3, 4, 5, 6]])
    opened = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model_dir), tmp_path / "adapter"
    )
    with torch.no_grad():
        torch.testing.assert_close(opened(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-5)
