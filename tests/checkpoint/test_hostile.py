"""Whatever is wrong with the newest checkpoint, `resume_mode=auto` takes the next older one and says why."""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl.checkpoint import CheckpointManager, PartSettings
from verl.checkpoint.files import record_of
from verl.checkpoint.manifest import MANIFEST, document_crc
from verl.errors import CheckpointError
from verl.workers.placement import RayCheckpoints

ONLY_STATE = {"actor": PartSettings(["model", "optimizer", "extra"])}
DEEP = "[" * 100_000 + "]" * 100_000
MODEL = "actor/model/model_world_size_1_rank_0.safetensors"
OPTIMIZER = "actor/optimizer/optimizer_world_size_1_rank_0.safetensors"
EXTRA = "actor/extra/extra_world_size_1_rank_0.json"
RANDOM = "random/rank_0"


@pytest.fixture(scope="module")
def saved(job: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    engine = job.make_engine()
    manager = CheckpointManager(folder, ONLY_STATE)
    for step in (1, 2):
        job.train(engine, step)
        assert manager.save(step, {"actor": engine}, {"step": step, "generator": torch.arange(4)})
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


# -- how to forge -------------------------------------------------------------------------------------------------


def vouch(folder: Path, change: Callable[[dict[str, Any]], object] = lambda document: None) -> None:
    """A manifest with the right checksums, its own included, after `change`."""
    path = folder / MANIFEST
    document = json.loads(path.read_text())
    del document["crc32"]
    document["files"] = {name: asdict(record_of(folder / name)) for name in document["files"]}
    change(document)
    path.write_text(json.dumps({**document, "crc32": document_crc(document)}))


def manifest_with(**entries: Any) -> Callable[[Path], None]:
    return lambda folder: vouch(folder, lambda document: document.update(entries))


def listing(name: str, size: Any = 0) -> Callable[[Path], None]:
    entry = {"size": size, "crc32": "00000000"}
    return lambda folder: vouch(folder, lambda document: document["files"].update({name: entry}))


def manifest_text(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / MANIFEST).write_text(text) and None


def manifest_is(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        (folder / MANIFEST).unlink()
        make(folder / MANIFEST)

    return forge


def huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(100 << 20)


def lists_a_fifo(folder: Path) -> None:
    listing("actor/pipe")(folder)
    os.mkfifo(folder / "actor/pipe")


def containing(name: str, content: str | bytes) -> Callable[[Path], None]:
    """A file of other contents, with the right checksum."""

    def forge(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        vouch(folder)

    return forge


def tensors(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        held = load_file(folder / name)
        change(held)
        save_file(held, folder / name)
        vouch(folder)

    return forge


def header(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Another header before the same bytes."""

    def forge(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        document = json.loads(content[8 : 8 + length])
        change(document)
        text = json.dumps(document).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
        vouch(folder)

    return forge


def claim_everything(document: dict[str, Any]) -> None:
    """A tensor of 4 PB whose other shards are said to be elsewhere."""
    name = next(key for key in document if key != "__metadata__")
    place = {name: {"saved_offsets": [1 << 49]}}
    document["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(place)}


def nowhere(document: dict[str, Any]) -> None:
    places = '{"lm_head.weight": {"saved_offsets": [Infinity]}}'
    document["__metadata__"] = {"DCP_SHARDING_INFO": places}


def first_entry(document: dict[str, Any], **entries: Any) -> None:
    document[next(key for key in document if key != "__metadata__")].update(entries)


def swap(folder: Path) -> None:
    model, optimizer = (folder / MODEL).read_bytes(), (folder / OPTIMIZER).read_bytes()
    (folder / MODEL).write_bytes(optimizer)
    (folder / OPTIMIZER).write_bytes(model)
    vouch(folder)


def without(prefix: str) -> Callable[[Path], None]:
    def change(document: dict[str, Any]) -> None:
        document["files"] = {n: r for n, r in document["files"].items() if not n.startswith(prefix)}

    return lambda folder: vouch(folder, change)


def to_one(held: dict[str, torch.Tensor]) -> None:
    for name in held:
        held[name] = torch.zeros(1)


DAMAGED: dict[str, Callable[[Path], None]] = {
    "step Infinity": manifest_with(step=float("inf")),
    "step of 400 digits": manifest_with(step=10**400),
    "step a text": manifest_with(step="2"),
    "step a truth": manifest_with(step=True),
    "step of another folder": manifest_with(step=1),
    "world size below zero": manifest_with(world_size=-1),
    "size Infinity": listing("x", float("inf")),
    "metric of 400 digits": manifest_with(metrics={"a": 10**400}),
    "metric a list": manifest_with(metrics={"a": []}),
    "number of 100000 digits": manifest_text('{"step": ' + "9" * 100_000 + "}"),
    "nested too deeply": manifest_text(DEEP),
    "no file": manifest_with(files={}),
    "files a list": manifest_with(files=[1]),
    "parts a list": manifest_with(parts=[1]),
    "versions a number": manifest_with(versions=3),
    "name with a NUL": listing("a\0b"),
    "name with half a pair": listing("a\ud800"),
    "name too long": listing("a" * 5000),
    "name outside": listing("../../x"),
    "a FIFO": manifest_is(os.mkfifo),
    "a device without end": manifest_is(lambda path: path.symlink_to("/dev/zero")),
    "a folder": manifest_is(Path.mkdir),
    "larger than any manifest": manifest_is(huge),
    "lists a FIFO": lists_a_fifo,
    "lists a folder": listing("actor/model"),
}
UNUSABLE: dict[str, Callable[[Path], None]] = {
    "trainer state nested too deeply": containing("trainer_state.json", DEEP),
    "trainer state a list": containing("trainer_state.json", "[1]"),
    "trainer state no JSON": containing("trainer_state.json", "nonsense"),
    "trainer state no text": containing("trainer_state.json", b"\xff\xfe"),
    "trainer state of another step": containing("trainer_state.json", '{"step": 7}'),
    "trainer state at step Infinity": containing("trainer_state.json", '{"step": Infinity}'),
    "trainer state with a number of 100000 digits": containing("trainer_state.json", "9" * 100_000),
    "trainer state with no such tensor": containing("trainer_state.json", '{"a": {"__tensor__": "b"}}'),
    "no trainer state": without("trainer_state.json"),
    "trainer tensors that claim all memory": header("trainer_state.safetensors", claim_everything),
    "random states of wrong types": containing(f"{RANDOM}.json", '{"python": 5}'),
    "random states a list": containing(f"{RANDOM}.json", "[]"),
    "random states of shape [1]": tensors(f"{RANDOM}.safetensors", to_one),
    "no random states": without("random/"),
    "weights of shape [1]": tensors(MODEL, to_one),
    "weights swapped with the optimiser's": swap,
    "a weight missing": tensors(MODEL, lambda held: held.popitem()),
    "a weight too many": tensors(MODEL, lambda held: held.update(more=torch.zeros(2))),
    "no weights": without("actor/model/"),
    "weights no tensor file": containing(MODEL, b"nonsense"),
    "header longer than the file": containing(MODEL, struct.pack("<Q", 1 << 60) + b"{}"),
    "header nested too deeply": containing(MODEL, struct.pack("<Q", len(DEEP)) + DEEP.encode()),
    "header a list": containing(MODEL, struct.pack("<Q", 2) + b"[]"),
    "header with an unknown type": header(MODEL, lambda held: first_entry(held, dtype="F4096")),
    "header with a shape of texts": header(MODEL, lambda held: first_entry(held, shape=["a"])),
    "header with an endless shape": header(MODEL, lambda held: first_entry(held, shape=[1 << 62, 4])),
    "header with data behind the end": header(
        MODEL, lambda held: first_entry(held, data_offsets=[1 << 40, (1 << 40) + 4])
    ),
    "header with places Infinity": header(
        MODEL,
        lambda held: held.update(
            __metadata__={"DCP_SHARDING_INFO": '{"lm_head.weight": {"saved_offsets": [Infinity]}}'}
        ),
    ),
    "schedule at a text": containing(EXTRA, '{"scheduler": {"step": "x"}}'),
    "schedule at Infinity": containing(EXTRA, '{"scheduler": {"step": Infinity}}'),
    "schedule of 400 digits": containing(EXTRA, f'{{"scheduler": {{"step": {10**400}}}}}'),
    "schedule a list": containing(EXTRA, '{"scheduler": [1]}'),
    "extra nested too deeply": containing(EXTRA, DEEP),
}
every_forgery = pytest.mark.parametrize(
    "forge", [*DAMAGED.values(), *UNUSABLE.values()], ids=[*DAMAGED, *UNUSABLE]
)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- resuming -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(job: ModuleType) -> Any:
    """One for all tests that only ask what it holds before and after."""
    return job.make_engine(seed=9)


@pytest.fixture(scope="module")
def first(job: ModuleType, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What an engine holds after step 1."""
    engine, alone = job.make_engine(seed=9), tmp_path_factory.mktemp("first")
    shutil.copytree(saved / "global_step_1", alone / "global_step_1")
    assert CheckpointManager(alone, ONLY_STATE).resume({"actor": engine}) is not None
    return job.weights(engine)  # type: ignore[no-any-return]


@every_forgery
def test_a_forged_checkpoint_fails_where_it_is_named_and_is_skipped_where_it_is_not(
    run: Path,
    job: ModuleType,
    engine: Any,
    first: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
    forge: Callable[[Path], None],
) -> None:
    forge(run / "global_step_2")
    before = job.weights(engine)
    if forge is not DAMAGED["step of another folder"]:  # a copy under another name is fine, once it is named
        given = {"resume_mode": "resume_path", "resume_from_path": run / "global_step_2"}
        with pytest.raises(CheckpointError, match="global_step_2"):
            CheckpointManager(run, ONLY_STATE, **given).resume({"actor": engine})
        assert same(job.weights(engine), before)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "verl"):
        state = CheckpointManager(run, ONLY_STATE).resume({"actor": engine})
    assert state is not None and state["step"] == 1
    assert same(job.weights(engine), first)
    told = [record.getMessage() for record in caplog.records if record.name.startswith("verl")]
    assert len(told) == 1 and told[0].startswith("checkpoint global_step_2 is skipped: "), told
    assert len(told[0]) < 700 and told[0].isprintable()


@pytest.mark.parametrize("forge", DAMAGED.values(), ids=DAMAGED)
def test_a_run_with_nothing_but_damage_begins_again_and_puts_it_aside(
    run: Path, job: ModuleType, engine: Any, forge: Callable[[Path], None]
) -> None:
    shutil.rmtree(run / "global_step_1")
    forge(run / "global_step_2")
    before = job.weights(engine)
    manager = CheckpointManager(run, ONLY_STATE, max_actor_to_keep=1)
    assert manager.resume({"actor": engine}) is None
    assert same(job.weights(engine), before)
    assert manager.save(1, {"actor": engine}, {"step": 1}) == run / "global_step_1"
    assert (run / "global_step_2.earlier").is_dir() and not (run / "global_step_2").exists()


@pytest.mark.parametrize("forge", UNUSABLE.values(), ids=UNUSABLE)
def test_a_whole_checkpoint_that_cannot_be_used_never_makes_a_run_begin_again(
    run: Path, job: ModuleType, engine: Any, forge: Callable[[Path], None]
) -> None:
    shutil.rmtree(run / "global_step_1")
    forge(run / "global_step_2")
    before = job.weights(engine)
    with pytest.raises(CheckpointError, match="global_step_2"):
        CheckpointManager(run, ONLY_STATE).resume({"actor": engine})
    assert same(job.weights(engine), before)


def test_a_state_the_trainer_refuses_is_skipped_before_an_engine_changes(
    run: Path, job: ModuleType, first: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[int] = []

    def take(state: dict[str, Any]) -> None:
        if state["step"] == 2:
            raise TypeError("an int was expected")
        taken.append(state["step"])

    engine = job.make_engine(seed=9)
    assert CheckpointManager(run, ONLY_STATE).resume({"actor": engine}, take)["step"] == 1
    assert taken == [1] and same(job.weights(engine), first)
    assert "global_step_2 is skipped: TypeError: an int was expected" in caplog.text
    before = job.weights(engine)
    shutil.rmtree(run / "global_step_1")
    with pytest.raises(CheckpointError, match="cannot be used: TypeError: an int was expected"):
        CheckpointManager(run, ONLY_STATE).resume({"actor": engine}, take)
    assert same(job.weights(engine), before)


class OneRank:
    """Calls to a rank that is in this process."""

    def __init__(self, folder: Path, engine: Any) -> None:
        self._manager, self._parts = CheckpointManager(folder, ONLY_STATE), {"actor": engine}

    def all(self, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        if call.__name__ == "do_save":
            step, state, metrics = arguments
            return [(self._manager.save(step, self._parts, state, metrics=metrics), self._manager.failure)]
        if call.__name__ == "do_find_checkpoint":
            found = self._manager.find(self._parts, *arguments)
            return [(None if found is None else found[0], found)]
        return [self._manager.load_found(self._parts)]


@pytest.mark.parametrize("damage", ["random states of the controller", "a state the trainer refuses"])
def test_a_state_the_controller_of_several_ranks_cannot_use_is_skipped_by_all(
    job: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    engine = job.make_engine()
    checkpoints = RayCheckpoints(OneRank(tmp_path, engine))  # type: ignore[arg-type]
    held = {}
    for step in (1, 2):
        job.train(engine, step)
        held[step] = job.weights(engine)
        assert checkpoints.save(step, {}, {"step": step})
    if damage.startswith("random"):
        state = json.loads((tmp_path / "global_step_2/trainer_state.json").read_text())
        containing("trainer_state.json", json.dumps({**state, "controller_random": {"python": 5}}))(
            tmp_path / "global_step_2"
        )

    def take(state: dict[str, Any]) -> None:
        if state["step"] == 2 and damage.startswith("a state"):
            raise TypeError("an int was expected")

    found = checkpoints.resume({}, take)
    assert found == {"step": 1} and same(job.weights(engine), held[1])
    assert "global_step_2 is skipped: TypeError" in caplog.text


class Unlucky:
    """An engine that fails at its first load, after it has changed."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.loads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load_state(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self._engine.load_state(state)
        if self.loads == 1:
            raise RuntimeError("in the middle")


def test_an_engine_that_fails_while_loading_gets_the_older_one_whole(
    run: Path, job: ModuleType, first: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    engine = Unlucky(job.make_engine(seed=9))
    state = CheckpointManager(run, ONLY_STATE).resume({"actor": engine})  # type: ignore[dict-item]
    assert state is not None and state["step"] == 1 and engine.loads == 2
    assert same(job.weights(engine), first)
    assert "global_step_2 is skipped: RuntimeError: in the middle" in caplog.text


@pytest.mark.parametrize("older", ["none", "without an optimizer"])
def test_an_engine_left_in_between_never_trains(run: Path, job: ModuleType, older: str) -> None:
    shutil.rmtree(run / "global_step_1")
    if older != "none":
        part = {"actor": PartSettings(["model", "extra"])}
        CheckpointManager(run, part).save(1, {"actor": job.make_engine()}, {"step": 1})
    engine = Unlucky(job.make_engine(seed=9))
    words = "no older one" if older == "none" else "holds no optimizer of the actor"
    with pytest.raises(CheckpointError, match=words):
        CheckpointManager(run, ONLY_STATE).resume({"actor": engine})  # type: ignore[dict-item]


def test_memory_that_runs_out_while_loading_is_not_the_checkpoints_fault(run: Path, job: ModuleType) -> None:
    class Full(Unlucky):
        def load_state(self, state: Any) -> None:
            raise MemoryError

    with pytest.raises(MemoryError):
        CheckpointManager(run, ONLY_STATE).resume({"actor": Full(job.make_engine())})  # type: ignore[dict-item]


@pytest.mark.parametrize("forge", DAMAGED.values(), ids=DAMAGED)
def test_verl_ckpt_copes(run: Path, forge: Callable[[Path], None]) -> None:
    from verl import cli

    forge(run / "global_step_2")
    assert cli.main(["ckpt", "ls", str(run)]) == 0
    assert cli.main(["ckpt", "verify", str(run)]) == 1
    assert cli.main(["ckpt", "prune", str(run), "--damaged"]) == 0
    assert [path.name for path in run.glob("global_step_*")] == ["global_step_1"]
