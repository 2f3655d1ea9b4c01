"""Megatron's layout undone, exactly; and a folder from a stranger, which can be wrong but cannot run anything."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from verl.checkpoint.megatron.distcp import DistTensors
from verl.checkpoint.merge import MergeOptions, merge
from verl.errors import CheckpointError
from verl.model_merger import main
from verl.models.value_model import set_in_config

COMMON: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("mistral", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "tied qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 with experts": ("qwen3_moe", EXPERTS),
}


def make_model(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = MODELS[name]
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **({"tie_word_embeddings": False} | COMMON | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return model


def megatron_state(model: Any, padding: int = 14) -> dict[str, torch.Tensor]:
    """The model's weights as Megatron-core names and lays them out, layer by layer."""
    own, config = {k: v.detach().clone() for k, v in model.state_dict().items()}, model.config
    groups, head = config.num_key_value_heads, 8
    state = {}

    def padded(weight: torch.Tensor) -> torch.Tensor:
        return torch.cat([weight, torch.full((padding, weight.shape[1]), 9.0)])

    state["embedding.word_embeddings.weight"] = padded(own["model.embed_tokens.weight"])
    state["decoder.final_layernorm.weight"] = own["model.norm.weight"]
    if not config.tie_word_embeddings:
        state["output_layer.weight"] = padded(own["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        hf, mine = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for kind in ("weight", "bias"):
            if hf + f"self_attn.q_proj.{kind}" in own:
                q, k, v = (own[hf + f"self_attn.{x}_proj.{kind}"] for x in "qkv")
                rows = []
                per = q.shape[0] // groups
                for group in range(groups):
                    rows += [q[group * per : (group + 1) * per]]
                    rows += [part[group * head : (group + 1) * head] for part in (k, v)]
                state[mine + f"self_attention.linear_qkv.{kind}"] = torch.cat(rows)
            if hf + f"mlp.gate_proj.{kind}" in own:
                both = [own[hf + f"mlp.{x}_proj.{kind}"] for x in ("gate", "up")]
                state[mine + f"mlp.linear_fc1.{kind}"] = torch.cat(both)
            for theirs, ours in (
                ("self_attn.o_proj", "self_attention.linear_proj"),
                ("mlp.down_proj", "mlp.linear_fc2"),
                ("self_attn.q_norm", "self_attention.q_layernorm"),
                ("self_attn.k_norm", "self_attention.k_layernorm"),
                ("mlp.gate", "mlp.router"),
            ):
                if hf + f"{theirs}.{kind}" in own:
                    state[mine + f"{ours}.{kind}"] = own[hf + f"{theirs}.{kind}"]
        state[mine + "self_attention.linear_qkv.layer_norm_weight"] = own[hf + "input_layernorm.weight"]
        after = "pre_mlp_layernorm.weight"
        if hf + "mlp.experts.gate_up_proj" in own:
            state[mine + "mlp.experts.experts.linear_fc1.weight"] = own[hf + "mlp.experts.gate_up_proj"]
            state[mine + "mlp.experts.experts.linear_fc2.weight"] = own[hf + "mlp.experts.down_proj"]
        else:
            after = "mlp.linear_fc1.layer_norm_weight"
        state[mine + after] = own[hf + "post_attention_layernorm.weight"]
    return state


def stacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The layers of each kind as one tensor, which is how Megatron saves them by default."""
    joined: dict[str, list[torch.Tensor]] = {}
    result = {}
    for key, tensor in state.items():
        if key.startswith("decoder.layers."):
            joined.setdefault("decoder.layers." + key.split(".", 3)[3], []).append(tensor)
        else:
            result[key] = tensor
    return result | {key: torch.stack(parts) for key, parts in joined.items()}


def write_dist(folder: Path, state: dict[str, torch.Tensor], cuts: int = 2) -> None:
    """As torch.distributed.checkpoint does it on several ranks: each tensor in chunks, over several files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [(folder / f"__{rank}_0.distcp").open("wb") for rank in range(2)]
    known: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}

    def put(content: bytes) -> _StorageInfo:
        file = files[len(places) % len(files)]
        info = _StorageInfo(Path(file.name).name, file.tell(), len(content))
        file.write(content)
        return info

    for key, tensor in state.items():
        chunks = []
        for piece, begin in _pieces(tensor, cuts):
            chunks.append(ChunkStorageMetadata(torch.Size(begin), piece.shape))
            stream = io.BytesIO()
            torch.save(piece.clone(), stream)
            places[MetadataIndex(key, torch.Size(begin))] = put(stream.getvalue())
        known[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
    known["decoder.layers.mlp.linear_fc1._extra_state/shard_0_1"] = BytesStorageMetadata()
    places[MetadataIndex("decoder.layers.mlp.linear_fc1._extra_state/shard_0_1")] = put(b"never read")
    for file in files:
        file.close()
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(known, planner_data=None, storage_data=places), file)


def _pieces(tensor: torch.Tensor, cuts: int) -> list[tuple[torch.Tensor, list[int]]]:
    """Cut along the two first dimensions."""
    pieces = [(tensor, [0] * tensor.ndim)]
    for axis in range(min(2, tensor.ndim)):
        cut = []
        for piece, begin in pieces:
            at = begin[axis]
            for part in piece.chunk(cuts, axis):
                cut.append((part, [*begin[:axis], at, *begin[axis + 1 :]]))
                at += part.shape[axis]
        pieces = cut
    return pieces


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """global_step_5/actor of a qwen3."""
    return write_checkpoint(tmp_path / "global_step_5/actor", "qwen3")


def write_checkpoint(
    actor: Path, name: str, *, below: str = "dist_ckpt", layers_apart: bool = False, **changes: torch.Tensor
) -> Path:
    model = make_model(name)
    state = megatron_state(model)
    write_dist(actor / below, (state if layers_apart else stacked(state)) | changes)
    model.config.save_pretrained(actor / "huggingface")
    return actor


def merged(actor: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The model that transformers loads from the merged folder."""
    from transformers import AutoModelForCausalLM

    target = merge(MergeOptions(actor, actor.parent / "out", **options))
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).state_dict()  # type: ignore[no-any-return]


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("layers_apart", [False, True], ids=["stacked", "apart"])
@pytest.mark.parametrize("name", MODELS)
def test_every_weight_comes_back_bit_for_bit(tmp_path: Path, name: str, layers_apart: bool) -> None:
    actor = write_checkpoint(tmp_path / "actor", name, layers_apart=layers_apart)
    found, expected = merged(actor), make_model(name).state_dict()
    assert set(found) == set(expected)
    for key, weight in expected.items():
        assert torch.equal(found[key], weight), key


def test_the_fixture_is_what_torch_itself_reads(checkpoint: Path) -> None:
    state = stacked(megatron_state(make_model("qwen3")))
    targets = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        dcp.load(targets, checkpoint_id=str(checkpoint / "dist_ckpt"), no_dist=True)
    read = DistTensors(checkpoint / "dist_ckpt")
    for key, tensor in state.items():
        assert torch.equal(targets[key], tensor) and torch.equal(read.read(key), tensor)


@pytest.mark.parametrize("below", ["dist_ckpt", "model/dist_ckpt"])
def test_the_folder_is_found_however_one_points_at_it(tmp_path: Path, below: str) -> None:
    actor = write_checkpoint(tmp_path / "global_step_5/actor", "qwen2", below=below)
    for local, backend in ((actor, "megatron"), (actor / below, "megatron"), (actor.parent, "fsdp")):
        out = tmp_path / "out"
        line = ["merge", f"--backend={backend}", f"--local_dir={local}", f"--target_dir={out}", "--overwrite"]
        assert main(line) == 0, "a backend that does not fit is corrected"
    assert main(["test", "--backend=megatron", f"--local_dir={actor}", f"--test_hf_dir={out}"]) == 0


def test_a_configuration_from_elsewhere_and_another_precision(checkpoint: Path, tmp_path: Path) -> None:
    shutil.move(checkpoint / "huggingface", tmp_path / "base")
    with pytest.raises(CheckpointError, match="no config.json is next to.*--base_dir"):
        merged(checkpoint)
    found = merged(checkpoint, base_dir=tmp_path / "base", dtype="bfloat16")
    expected = make_model("qwen3").state_dict()
    assert all(torch.equal(found[key], weight.bfloat16().float()) for key, weight in expected.items())


def test_an_output_matrix_that_is_not_there_is_the_embedding_only_if_one_says_so(tmp_path: Path) -> None:
    actor = write_checkpoint(tmp_path / "actor", "tied qwen2")
    make_model("qwen2").config.save_pretrained(actor / "huggingface")
    with pytest.raises(CheckpointError, match="no output matrix.*--tie-word-embedding"):
        merged(actor)
    arguments = ["--backend", "megatron", "--local_dir", str(actor), "--target_dir", str(tmp_path / "out")]
    assert main(["merge", *arguments, "--tie-word-embedding", "--use_cpu_initialization"]) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 2, "layer_types": None}, "holds 3 layers, config.json says 2"),
        ({"num_hidden_layers": 2}, "(?s)config.json cannot be used.*layer_types"),
        ({"num_key_value_heads": 4}, "linear_qkv.weight' has 64 rows.*needs 96"),
        ({"intermediate_size": 20}, "linear_fc1.weight' has 48 rows.*needs 40"),
        ({"vocab_size": 70}, "has 64 rows.*needs 70"),
        ({"hidden_size": 24}, "has 16 rows|has shape"),
        (
            {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]},
            "'gemma' models cannot be read.*known: llama",
        ),
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            "tensors that no weight.*q?k?_layernorm",
        ),
        ({"architectures": ["Qwen3ForTokenClassification"]}, "as a language model only"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_that_does_not_fit_is_refused(
    checkpoint: Path, change: dict[str, Any], words: str
) -> None:
    set_in_config(checkpoint / "huggingface", **change)
    with pytest.raises(CheckpointError, match=words):
        merged(checkpoint)
    assert [path.name for path in checkpoint.parent.iterdir()] == ["actor"]


def test_a_missing_or_surplus_tensor_is_named(checkpoint: Path) -> None:
    state = stacked(megatron_state(make_model("qwen3")))
    write_dist(checkpoint / "dist_ckpt", state | {"vision_model.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match="no weight of .* uses, first 'vision_model.weight'"):
        merged(checkpoint)
    del state["decoder.layers.self_attention.linear_proj.weight"]
    optimizer = {
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight": torch.ones(2)
    }  # is passed over
    write_dist(checkpoint / "dist_ckpt", state | optimizer)
    with pytest.raises(CheckpointError, match="lacks 3 weights.*o_proj"):
        merged(checkpoint)


def test_weights_whose_scale_is_kept_elsewhere_are_refused(checkpoint: Path) -> None:
    state = stacked(megatron_state(make_model("qwen3")))
    name = "decoder.layers.mlp.linear_fc2.weight"
    write_dist(checkpoint / "dist_ckpt", state | {name: state[name].to(torch.float8_e4m3fn)})
    with pytest.raises(
        CheckpointError, match="linear_fc2.weight' is torch.float8_e4m3fn; only weights of float32"
    ):
        merged(checkpoint)


def test_no_tensor_is_read_before_names_and_shapes_fit(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DistTensors, "read", lambda *_: pytest.fail("read"))
    set_in_config(checkpoint / "huggingface", num_hidden_layers=4, layer_types=None)
    with pytest.raises(CheckpointError, match="holds 3 layers"):
        merged(checkpoint)


def test_without_logits_it_says_so(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    merged(checkpoint, logits=False)
    assert "not compared (--no-logits)" in caplog.text


# -- hostile files ------------------------------------------------------------------------------------------


class Program:
    """Unpickled by someone careless, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.mark}'",)


def test_a_program_in_any_pickle_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    mark, folder = tmp_path / "mark", checkpoint / "dist_ckpt"
    with (folder / "common.pt").open("wb") as file:  # not opened at all
        pickle.dump(Program(mark), file)
    merged(checkpoint)
    assert not mark.exists()

    whole = pickle.loads((folder / ".metadata").read_bytes())
    whole.planner_data = Program(mark)
    for content in (Program(mark), whole, {"state_dict_metadata": Program(mark)}):
        (folder / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointError, match="asks for posix.system"):
            DistTensors(folder)
    assert not mark.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert mark.exists(), "the program would have run, had it been let"


class _AttributePickler(pickle.Pickler):
    """Writes members of an enum as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_an_enum_may_be_written_as_an_attribute_and_nothing_else(checkpoint: Path) -> None:
    expected, metadata = merged(checkpoint), checkpoint / "dist_ckpt" / ".metadata"
    stream = io.BytesIO()
    _AttributePickler(stream).dump(pickle.loads(metadata.read_bytes()))
    assert b"getattr" in stream.getvalue()
    metadata.write_bytes(stream.getvalue())
    found = merged(checkpoint, overwrite=True)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)

    for owner in (torch.Size, {"a": 1}):
        metadata.write_bytes(pickle.dumps(Attribute(owner)))
        with pytest.raises(CheckpointError, match="asks for an attribute of"):
            DistTensors(metadata.parent)


class Attribute:
    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __reduce__(self) -> Any:
        return getattr, (self.owner, "__class__")


def test_a_program_in_a_tensor_file_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    mark, folder = tmp_path / "mark", checkpoint / "dist_ckpt"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    stream = io.BytesIO()
    torch.save(Program(mark), stream)
    (folder / "bad.distcp").write_bytes(stream.getvalue())
    for index in metadata.storage_data:
        metadata.storage_data[index] = _StorageInfo("bad.distcp", 0, len(stream.getvalue()))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="bad.distcp: a chunk of .* cannot be read"):
        merged(checkpoint)
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "builtins.setattr", "subprocess.Popen", "torch.load", "os.path.join", "megatronx.evil"],
)
def test_names_that_no_such_file_needs_are_refused(tmp_path: Path, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(CheckpointError, match=f"asks for {name}"):
        DistTensors(tmp_path)


@pytest.mark.parametrize(
    "name", ["torch.distributed.checkpoint.api.load", "megatron.core.parallel_state.destroy"]
)
def test_names_that_are_let_through_are_not_imported(tmp_path: Path, name: str) -> None:
    """A class of the writer is noted, not called: what comes out is no description of tensors."""
    module, _, attribute = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{attribute}\n(tR.".encode())
    with pytest.raises(CheckpointError, match=f"a {name} found where Metadata is expected"):
        DistTensors(tmp_path)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd"])
def test_a_file_outside_the_folder_is_not_opened(checkpoint: Path, path: str) -> None:
    folder = checkpoint / "dist_ckpt"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.offset is not None)
    metadata.storage_data[index] = _StorageInfo(path, 0, 10)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="outside its folder"):
        DistTensors(folder)


def test_damage_is_named_and_leaves_no_target(checkpoint: Path) -> None:
    folder = checkpoint / "dist_ckpt"
    whole = (folder / ".metadata").read_bytes()
    for content in (b"", whole[:-10], b"\x80\x04" + os.urandom(50), pickle.dumps([1, 2])):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"\.metadata (cannot be read|is refused)"):
            merged(checkpoint)
    (folder / ".metadata").write_bytes(whole)
    file = folder / "__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(
        CheckpointError, match=r"__1_0.distcp: a chunk of .* cannot be read: the file is too short"
    ):
        merged(checkpoint)
    file.unlink()
    with pytest.raises(CheckpointError, match="__1_0.distcp"):
        merged(checkpoint)
    assert [path.name for path in checkpoint.parent.iterdir()] == ["actor"]


def test_a_chunk_of_another_shape_or_type_or_a_missing_one_is_refused(checkpoint: Path) -> None:
    folder = checkpoint / "dist_ckpt"
    state = stacked(megatron_state(make_model("qwen3")))
    name = "decoder.final_layernorm.weight"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    first = metadata.storage_data[MetadataIndex(name, torch.Size([0]))]
    for wrong in (torch.zeros(3), state[name][:8].double(), {"a": 1}):
        stream = io.BytesIO()
        torch.save(wrong, stream)
        (folder / "other.distcp").write_bytes(stream.getvalue())
        metadata.storage_data[MetadataIndex(name, torch.Size([0]))] = _StorageInfo(
            "other.distcp", 0, len(stream.getvalue())
        )
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match="final_layernorm.weight' is .*says torch.float32"):
            DistTensors(folder).read(name)
    metadata.storage_data[MetadataIndex(name, torch.Size([0]))] = first
    metadata.state_dict_metadata[name].chunks.pop()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        CheckpointError, match="8 of 16 numbers of 'decoder.final_layernorm.weight' are there"
    ):
        DistTensors(folder).read(name)


def test_adapters_are_not_read_from_megatron(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="--lora keep: adapters cannot be read"):
        merged(checkpoint, lora="keep")


@pytest.mark.parametrize("target", ["huggingface", "dist_ckpt", "dist_ckpt/new", "."])
def test_a_megatron_checkpoint_is_not_replaced(checkpoint: Path, target: str) -> None:
    before = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="--target_dir .*(is part of the checkpoint|which is read)"):
        merge(MergeOptions(checkpoint, checkpoint / target, overwrite=True))
    assert {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()} == before
