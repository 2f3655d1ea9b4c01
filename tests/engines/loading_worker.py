"""One rank of the loading tests: run as `loading_worker.py RANK WORLD MEETING FOLDER SCENARIO...`.

FOLDER holds the models to load, as sub-folders. A scenario loads one rank's shards of them, from the files and, to
compare, out of a whole model.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
import conftest
import gloo_worker

from verl.engines import build
from verl.engines.sharding import decoder_layers
from verl.models import meta_init
from verl.models.loading import CannotStream, SafetensorsFiles


@contextmanager
def whole_models() -> Iterator[None]:
    """Every rank loads the whole model, as for one that cannot be read in parts."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise CannotStream("the test says so")

    held = meta_init.open_causal_lm, meta_init.open_value_model
    meta_init.open_causal_lm = meta_init.open_value_model = refuse
    try:
        yield
    finally:
        meta_init.open_causal_lm, meta_init.open_value_model = held


def state(engine: Any) -> dict[str, Any]:
    """This rank's part of everything, bit for bit."""
    params = dict(conftest.module_of(engine).named_parameters())
    assert all(hasattr(param, "to_local") for param in params.values())
    return {
        "shards": {name: param.to_local().detach().clone() for name, param in params.items()},
        "trained": [name for name, param in params.items() if param.requires_grad],
        "masters": {name: m.to_local().detach().clone() for name, m in engine.state()["model"].items()},
        "buffers": {name: buffer.clone() for name, buffer in conftest.module_of(engine).named_buffers()},
    }


LARGE = {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 12, "num_attention_heads": 8}

CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    # name: kind, folder, role, model section
    "policy": ("actor", "llama", {}, {}),
    "tied": ("actor", "tied", {}, {}),
    "parts": ("actor", "parts", {}, {}),
    "half": ("actor", "llama", {}, {"dtype": "bfloat16"}),
    "half_in_place": ("actor", "tied", {"optim.stochastic_rounding": True}, {"dtype": "bfloat16"}),
    "hybrid": ("actor", "llama", {"fsdp_config.fsdp_size": 1}, {}),
    "adapters": ("actor", "llama", {}, {"lora_rank": 4}),
    "reference": ("ref", "qwen2", {}, {}),
    "new_critic": ("critic", "gemma", {}, {"dtype": "bfloat16"}),
    "critic_adapters": ("critic", "qwen2", {}, {"lora_rank": 4}),
    "saved_critic": ("critic", "critic", {}, {}),
    "padded_critic": ("critic", "qwen2", {}, {"use_remove_padding": False}),
    "experts": ("actor", "qwen3_moe", {}, {}),
    "tied_twice": ("actor", "twice", {}, {}),
}


class Notices(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "into host memory" in record.getMessage():
            self.texts.append(record.getMessage())


SAVED = ("tied", "new_critic", "experts")
FEW = ("tied", "half", "policy", "new_critic", "experts")


def few_cases(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return cases(rank, world, folder, FEW)


def cases(rank: int, world: int, folder: Path, names: Sequence[str] = tuple(CASES)) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        kind, model, role, options = CASES[name]
        own: dict[str, Any] = {}
        for way in ("streamed", "whole"):
            notices = Notices()
            logging.getLogger("verl").addHandler(notices)
            make = lambda: conftest.make_engine(kind, path=str(folder / model), role=role, **options)  # noqa: B023, E731
            if way == "whole":
                with whole_models():
                    engine = make()
            else:
                engine = make()
                own["notices"] = notices.texts
            logging.getLogger("verl").removeHandler(notices)
            own[way] = state(engine)
            batch = gloo_worker.share(conftest.make_batch(), rank, world)
            answers = engine.values(batch) if kind == "critic" else engine.log_probs(batch)["log_probs"]
            own[way]["answers"] = answers
            if name in SAVED:
                engine.save_hf(folder / f"saved_{name}_{world}_{way}")
                own[way]["exported"] = dict(engine.weights().named_tensors())
            if kind != "ref":
                loss = conftest.value_loss if kind == "critic" else conftest.policy_loss
                engine.forward_backward(batch, loss)
                own[way]["norm"] = engine.optimizer_step()["grad_norm"]
                own[way]["after"] = state(engine)["shards"]
        found[name] = own
    return found


@contextmanager
def most_held(mapped: int) -> Iterator[list[int]]:
    """The most bytes that tensors made inside held at once, as torch's allocator counts them; a file of `mapped`
    bytes that is mapped meanwhile holds none. Only for code without collectives: gloo's threads free their buffers
    whenever they are next scheduled."""
    found: list[int] = []
    gc.collect()  # what is freed inside must have been made inside
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [(event.start_ns(), event.nbytes()) for event in events if abs(event.nbytes()) != mapped]
    found.append(max(accumulate(change for _, change in sorted(changes))))


def live_bytes() -> int:
    """Bytes of the tensors that Python code refers to, without frozen ones; buffers of gloo's threads do not count."""
    gc.collect()
    tensors = [held for held in gc.get_objects() if issubclass(type(held), torch.Tensor)]
    # A DTensor has no data of its own: its shard is another tensor.
    storages = [t.untyped_storage() for t in tensors if t.device.type == "cpu" and not isinstance(t, DTensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def live_while_building(path: Path, **role: Any) -> int:
    """The most bytes of tensors an engine has at the last layer of any of its first passes, and when it is built."""
    fill, found = build.load_shards, []

    def watch(module: Any, *arguments: Any) -> None:
        fill(module, *arguments)
        decoder_layers(module)[-1].register_forward_pre_hook(lambda *_: found.append(live_bytes()))

    gc.collect()
    gc.freeze()  # what there is already is not looked through again and again
    build.load_shards = watch
    engine = conftest.make_engine(path=str(path), role=role)
    build.load_shards = fill
    assert found, "no pass was seen"
    found.append(live_bytes())
    del engine
    gc.unfreeze()
    return max(found)


def memory(rank: int, world: int, folder: Path) -> dict[str, int]:
    """Bytes of weights read from the file, the most bytes held until the shards are filled and, to compare, to make
    the whole model; then the most bytes of live tensors until the engine is built, with the layers that ran sharded
    again and, to compare, kept whole."""
    path = folder / "large"
    size = (path / "model.safetensors").stat().st_size
    fill, read_rows, found = build.load_shards, SafetensorsFiles.read_rows, {"read": 0}

    def count(self: Any, name: str, start: int, stop: int, into: Any, *options: Any) -> None:
        found["read"] += into.nbytes
        read_rows(self, name, start, stop, into, *options)

    def fill_and_stop(*arguments: Any) -> None:
        fill(*arguments)
        raise Filled

    SafetensorsFiles.read_rows, build.load_shards = count, fill_and_stop
    with most_held(size) as held, suppress(Filled):
        conftest.make_engine(path=str(path))
    found["filled"] = held[0]
    SafetensorsFiles.read_rows, build.load_shards = read_rows, fill
    with most_held(size) as held:
        conftest.make_model(**LARGE)
    found["whole"] = held[0]
    found["built"] = live_while_building(path)
    found["kept"] = live_while_building(path, **{"fsdp_config.reshard_after_forward": False})
    return found


class Filled(Exception):
    """The shards have their weights."""


if __name__ == "__main__":
    gloo_worker.SCENARIOS = {"cases": cases, "few_cases": few_cases, "memory": memory}
    gloo_worker.main()
