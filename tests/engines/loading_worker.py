"""One rank of the loading tests: run as `loading_worker.py RANK WORLD MEETING FOLDER SCENARIO...`.

FOLDER holds the models to load, as sub-folders. A scenario loads one rank's shards of them, from the files and, to
compare, out of a whole model.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import conftest
import gloo_worker

from verl.engines import build
from verl.models.skeleton import CannotStream


@contextmanager
def whole_models() -> Iterator[None]:
    """Every rank loads the whole model, as for one that cannot be read in parts."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise CannotStream("the test says so")

    held = build.open_causal_lm, build.open_value_model
    build.open_causal_lm = build.open_value_model = refuse
    try:
        yield
    finally:
        build.open_causal_lm, build.open_value_model = held


def state(engine: Any) -> dict[str, Any]:
    """This rank's part of everything, bit for bit."""
    params = dict(engine.model.named_parameters())
    assert all(hasattr(param, "to_local") for param in params.values())
    return {
        "shards": {name: param.to_local().detach().clone() for name, param in params.items()},
        "trained": [name for name, param in params.items() if param.requires_grad],
        "masters": {name: m.to_local().detach().clone() for name, m in engine.optimizer.masters.items()}
        if engine.optimizer
        else {},
        "buffers": {name: buffer.clone() for name, buffer in engine.model.named_buffers()},
    }


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
                own[way]["exported"] = dict(engine.export_parameters())
            if kind != "ref":
                loss = conftest.value_loss if kind == "critic" else conftest.policy_loss
                engine.forward_backward(batch, loss)
                own[way]["norm"] = engine.optimizer_step()["grad_norm"]
                own[way]["after"] = state(engine)["shards"]
        found[name] = own
    return found


def _peak() -> int:
    """Most memory this process has held at once, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def peak(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """How far memory rises while an engine is built: until its shards are filled, and until it has run once; then,
    further, when it is built from a whole model. A tiny model goes first, so that code is in memory already."""
    conftest.make_engine(path=str(folder / "llama"))
    fill, found = build.fill, {}

    def fill_and_look(*arguments: Any) -> None:
        fill(*arguments)
        found["filled"] = _peak() - start

    build.fill = fill_and_look
    start = _peak()
    engine = conftest.make_engine(path=str(folder / "large"))
    found["built"] = _peak() - start
    del engine
    with whole_models():
        conftest.make_engine(path=str(folder / "large"))
    found["whole"] = _peak() - start
    return found


if __name__ == "__main__":
    gloo_worker.SCENARIOS = {"cases": cases, "few_cases": few_cases, "peak": peak}
    gloo_worker.main()
