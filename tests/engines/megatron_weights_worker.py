"""One rank of the tests of weights: run as `megatron_weights_worker.py RANK WORLD MEETING FOLDER SCENARIO...`.

FOLDER holds the models, as sub-folders. Scenarios check what they find and leave what the test is to compare.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import gloo_worker

from verl.checkpoint.tensors import local_chunks, read_into, write_chunks
from verl.config.parallelism import Layout
from verl.engines.megatron.build import load_stage
from verl.engines.megatron.engine import GatheredStages, StageTensors, as_dtensor, elsewhere
from verl.engines.megatron.groups import groups_of
from verl.engines.megatron.model import StageModel
from verl.engines.megatron.places import Place, places
from verl.models import loading as model_files
from verl.models import meta_init
from verl.models.weight_source import renamed

CPU = torch.device("cpu")
LAYOUTS = {
    2: [Layout(tp=2), Layout(pp=2), Layout(dp=2)],
    4: [Layout(tp=2, pp=2), Layout(tp=2, dp=2), Layout(pp=2, dp=2)],
}
MODELS = ("llama", "mistral", "qwen2", "qwen3", "llama_tied", "qwen2_tied", "qwen3_tied", "biases")


class Recorded:
    """A file of weights that counts the numbers taken out of it, by tensor."""

    def __init__(self, handle: Any, taken: dict[str, int]) -> None:
        self._handle, self._taken = handle, taken

    def __getattr__(self, name: str) -> Any:
        assert name == "keys", f"{name} was called: only slices may be read"
        return getattr(self._handle, name)

    def get_slice(self, name: str) -> Any:
        whole, taken = self._handle.get_slice(name), self._taken

        class Slice:
            def get_shape(self) -> list[int]:
                return whole.get_shape()

            def __getitem__(self, key: Any) -> torch.Tensor:
                part = whole[key]
                taken[name] = taken.get(name, 0) + part.numel()
                return part

        return Slice()


@contextmanager
def recorded_reads() -> Iterator[dict[str, int]]:
    opened, taken = model_files._opened, {}

    @contextmanager
    def recording(file: Path) -> Iterator[Any]:
        with opened(file) as handle:
            yield Recorded(handle, taken)

    model_files._opened = recording
    try:
        yield taken
    finally:
        model_files._opened = opened


def open_stage(path: Path, layout: Layout, critic: bool = False) -> tuple[Any, StageModel, list[Place]]:
    """A rank's stage, filled; checks that its own slices were read and nothing else."""
    open_model = meta_init.open_value_model if critic else meta_init.open_causal_lm
    hf, index = open_model(str(path), dtype=torch.float32)
    stage = StageModel(hf, groups_of(layout), dtype=torch.float32, device=CPU, value_head=critic)
    with torch.no_grad():
        for param in stage.parameters():
            param.fill_(math.nan)
    table = places(stage)
    with recorded_reads() as taken:
        load_stage(stage, table, index)
    expected: dict[str, int] = {}
    for place in table:
        if not place.name.startswith("score."):
            expected[place.name] = expected.get(place.name, 0) + math.prod(place.sizes)
    assert sum(taken.values()) == sum(expected.values()), path.name
    if not any(place.expert for place in table):  # whose weights have other names in the files
        assert taken == expected, path.name
    return hf, stage, table


def check_views(stage: StageModel, table: list[Place], files: dict[str, torch.Tensor]) -> None:
    """Every place has its part of the file; every number of every parameter belongs to one place or is padding."""
    params = dict(stage.named_parameters())
    covered = {name: torch.zeros(param.shape) for name, param in params.items()}
    for place in table:
        part = files[place.name][
            tuple(slice(o, o + n) for o, n in zip(place.offsets, place.sizes, strict=True))
        ]
        view = place.view(params[place.parameter])
        assert view.is_contiguous() and torch.equal(view, part), place.name
        place.view(covered[place.parameter]).add_(1)
    for name, count in covered.items():
        assert count.max() == 1, name
        assert not params[name][count == 0].any(), f"padding of {name}"
        assert (count > 0).all() or "word_embeddings" in name or "output_layer" in name, name


def check_coverage(table: list[Place], layout: Layout, files: dict[str, torch.Tensor]) -> None:
    """Together the ranks of one model hold every number of every weight once."""
    tables: list[Any] = [None] * dist.get_world_size()
    own = [(p.name, p.shape, p.offsets, p.sizes, p.split) for p in table if not p.duplicate]
    dist.all_gather_object(tables, own)
    counts = {name: torch.zeros(value.shape, dtype=torch.int) for name, value in files.items()}
    for rank, entries in enumerate(tables):
        if layout.data_rank(rank) == 0:
            for name, shape, offsets, sizes, split in entries:
                assert tuple(counts[name].shape) == shape, name
                if split is not None or rank % layout.tp == 0:
                    counts[name][tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    assert all((count == 1).all() for count in counts.values())


def loading(rank: int, world: int, folder: Path) -> dict[str, Any]:
    for layout in LAYOUTS[world]:
        for name in MODELS:
            files = load_file(folder / name / "model.safetensors")
            hf, stage, table = open_stage(folder / name, layout)
            check_views(stage, table, files)
            check_coverage(table, layout, files)
            check_export(hf, stage, table, files, name.endswith("_tied"))
    return {}


def check_export(
    hf: Any, stage: StageModel, table: list[Place], files: dict[str, torch.Tensor], tied: bool
) -> None:
    """Every rank gets every weight as it is in the files, a tied one under both names."""
    tensors = StageTensors(hf, stage, table, torch.float32)
    wanted = files | ({"lm_head.weight": files["model.embed_tokens.weight"]} if tied else {})
    found = {name: tensor.clone() for name, tensor in tensors.each()}
    assert list(found) == list(hf.state_dict()) and found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    half = StageTensors(hf, stage, table, torch.bfloat16)
    assert all(torch.equal(tensor, wanted[name].bfloat16()) for name, tensor in half.each())
    copy = GatheredStages(hf, tensors, CPU)
    with copy.gathered() as module:
        addresses = [param.data_ptr() for param in module.parameters()]
        assert all(torch.equal(module.state_dict()[name], value) for name, value in wanted.items())
        assert not any(param.requires_grad for param in module.parameters()) and not module.training
    assert not any(param.any() for param in module.parameters()), "the memory is released"
    with torch.no_grad():
        next(stage.parameters()).add_(1)
    with copy.gathered() as module:
        assert addresses == [param.data_ptr() for param in module.parameters()]
        assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in tensors.each())


def critics(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """A head that the files lack is zero, one they have is read."""
    found = {}
    for name in ("qwen2", "critic"):
        hf, stage, table = open_stage(folder / name, LAYOUTS[world][-1 if world == 2 else 0], critic=True)
        tensors = StageTensors(hf, stage, table, torch.float32)
        found[name] = {key: value.clone() for key, value in tensors.each() if key.startswith("score.")}
    return found


def mixtures(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Experts are read by the ranks that have them, and come out one by one as they are in the files."""
    layouts = {"qwen3_moe": Layout(dp=2, ep=2, pp=world // 2), "mixtral": Layout(tp=2, ep=2, pp=world // 2)}
    for name, layout in layouts.items():
        files = load_file(folder / name / "model.safetensors")
        hf, stage, table = open_stage(folder / name, layout)
        assert sum(place.expert for place in table) >= 2 and not any(
            p.isnan().any() for p in stage.parameters()
        )
        tensors = StageTensors(hf, stage, table, torch.float32)
        found = {
            key: value.clone()
            for own, tensor in tensors.each()
            for key, value in renamed(hf, own, tensor, "hf")
        }
        assert found.keys() == files.keys(), name
        assert all(torch.equal(found[key], value) for key, value in files.items()), name
    return {}


def uneven(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Parts of parts, some empty: torch's idea of the offsets is ours, in memory and through files."""
    cases = [(Layout(tp=2, dp=2), 97, 0), (Layout(tp=2, dp=2), 5, 1), (Layout(dp=4), 3, None)]
    for number, (layout, rows, split) in enumerate(cases):
        groups = groups_of(layout)
        whole = torch.arange(rows * 6.0).view(rows, 6)
        place = Place("w", "w", 0, 0, (rows, 6), split, groups.tp_rank if split is not None else 0, layout.tp)
        if split is None:
            place = Place("w", "w", 0, 0, (rows, 6))
        part = whole[
            tuple(slice(o, o + n) for o, n in zip(place.offsets, place.sizes, strict=True))
        ].contiguous()
        each = -(-part.shape[0] // groups.replicas)
        own = part[min(groups.replica * each, len(part)) :][:each].clone()
        assert torch.equal(as_dtensor(place, own, groups, rows_sharded=True).full_tensor(), whole)
        assert torch.equal(as_dtensor(place, part, groups, rows_sharded=False).full_tensor(), whole)
        step = torch.tensor(7.0)
        state = {"w": as_dtensor(place, own, groups, True), "step": as_dtensor(None, step, groups)}
        file = folder / f"uneven_{number}_{rank}.safetensors"
        chunks = local_chunks(state | elsewhere({"weight": (4, 2), "bias": (4,)}, state), rank)
        assert [chunk.key for chunk in chunks if chunk.key != "w"] == ["step"] * (rank == 0)
        if chunks:
            write_chunks(file, chunks)
        dist.barrier()
        files = [f for r in range(world) if (f := folder / f"uneven_{number}_{r}.safetensors").exists()]
        assert len(files) == (3 if rows == 3 else 4), "a rank without rows writes nothing"
        plain = {"w": torch.empty(rows, 6), "step": torch.empty(())}
        read_into(files, plain, "test")
        assert torch.equal(plain["w"], whole) and plain["step"] == 7
        read_into(files, {"step": torch.empty((), device="meta"), "w": state["w"]}, "test")
        own.zero_()
        read_into(files, {"step": torch.empty((), device="meta"), "w": state["w"]}, "test")
        assert torch.equal(state["w"].full_tensor(), whole)
    return {}


SCENARIOS = {function.__name__: function for function in (loading, critics, mixtures, uneven)}

if __name__ == "__main__":
    gloo_worker.main(SCENARIOS)
