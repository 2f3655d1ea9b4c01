"""The merged folder is the training model, or there is no folder."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl import model_merger
from verl.checkpoint import CheckpointManager, PartSettings, hf_folder
from verl.checkpoint import merge as merge_module
from verl.checkpoint.hf_folder import empty_model, stored_as_is, write_weights
from verl.checkpoint.merge import MergeOptions, merge
from verl.checkpoint.tensors import TensorChunk, local_chunks, write_chunks, write_stream
from verl.checkpoint.weights import ShardedReader, TensorReader, same_bits
from verl.errors import CheckpointError

STATE = {"actor": PartSettings(["model", "optimizer", "extra"]), "critic": PartSettings(["model"])}


def save(folder: Path, engine: Any, part: str = "actor", tokenizer: Any = None) -> Path:
    CheckpointManager(folder, STATE).save(5, {part: engine}, {}, tokenizer=tokenizer)
    return folder / "global_step_5" / part


@pytest.mark.parametrize("kind", [{}, {"tied": True}, {"dtype": "bfloat16"}], ids=str)
def test_the_merged_folder_is_what_the_engine_would_have_written(
    tmp_path: Path, job: ModuleType, tiny_tokenizer: Any, kind: Any
) -> None:
    engine = job.make_engine(**kind)
    job.train(engine, 1)
    target = merge(MergeOptions(save(tmp_path / "run", engine, tokenizer=tiny_tokenizer), tmp_path / "out"))
    engine.save_hf(tmp_path / "live")
    found, live = (load_file(f / "model.safetensors") for f in (target, tmp_path / "live"))
    assert set(found) == set(live) and all(same_bits(found[name], live[name]) for name in live)
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= set(
        os.listdir(target)
    )
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == kind.get("dtype", "float32")
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_the_word_merge_may_be_left_out_and_a_run_folder_names_its_newest_step(
    tmp_path: Path, job: ModuleType, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    part = save(tmp_path / "run", job.make_engine(), tokenizer=tiny_tokenizer)
    line = ["--backend", "fsdp", "--target_dir", str(tmp_path / "out"), "--local_dir"]
    assert model_merger.main([*line, str(tmp_path / "run")]) == 2
    assert f"is a run folder; give one of its steps, e.g. {part}" in capsys.readouterr().err
    assert model_merger.main([*line, str(part)]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_checkpoint_of_ours_has_either_backend_and_a_folder_that_is_named_wrongly_is_corrected(
    tmp_path: Path, job: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    part = save(tmp_path / "run", job.make_engine())
    plural = Path(str(part).replace("global_step_", "global_steps_"))
    for number, (backend, folder, notices) in enumerate(
        [
            (
                ["--backend", "megatron"],
                part,
                [f"{part} is no checkpoint of Megatron-core: it is read in verl's"],
            ),
            (["--backend", "fsdp"], plural, [f"using {part}"]),
            ([], part, []),
        ]
    ):
        target = ["--target_dir", str(tmp_path / f"out{number}"), "--no-logits"]
        assert model_merger.main(["merge", *backend, "--local_dir", str(folder), *target]) == 0
        lines = [
            line for line in capsys.readouterr().err.splitlines() if "using " in line or "is read" in line
        ]
        assert len(lines) == len(notices) and all(
            text in line for text, line in zip(notices, lines, strict=True)
        )


def test_a_folder_without_a_checkpoint_is_refused_with_both_kinds_that_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["--target_dir", str(tmp_path / "out")]
    assert model_merger.main(["merge", "--backend=megatron", f"--local_dir={tmp_path}", *target]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "no ckpt_contents.json" in said and "no folder with .metadata" in said
    assert "give .../global_step_N/actor" in said and not (tmp_path / "out").exists()


def test_greedy_answers_of_the_merged_model_are_the_trainers(tmp_path: Path, job: ModuleType) -> None:
    from transformers import AutoModelForCausalLM

    engine = job.make_engine(tied=True)
    for seed in range(4):
        job.train(engine, seed)
    target = merge(MergeOptions(save(tmp_path / "run", engine), tmp_path / "out"))
    merged = AutoModelForCausalLM.from_pretrained(target).eval()
    prompt = torch.tensor([[5, 9, 3]])
    answers = []
    with engine.weights().module() as own:
        own.set_attn_implementation("sdpa")
        for model in (own.eval(), merged):
            tokens = prompt
            for _ in range(12):
                step = model(tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat([tokens, step], dim=1)
            answers.append(tokens.tolist())
    assert answers[0] == answers[1]


def test_a_value_model_merges_and_is_recognised(tmp_path: Path, job: ModuleType) -> None:
    from transformers import AutoModelForTokenClassification

    engine = job.make_engine("critic")
    job.train(engine, 1)
    part = save(tmp_path / "run", engine, "critic")
    target = merge(MergeOptions(part, tmp_path / "out", is_value_model=True))
    model = AutoModelForTokenClassification.from_pretrained(target)
    assert torch.equal(model.score.weight, dict(engine.weights().named_tensors())["score.weight"])
    actor = save(tmp_path / "other", job.make_engine())
    with pytest.raises(CheckpointError, match="--is-value-model was given, but .* holds a LlamaForCausalLM"):
        merge(MergeOptions(actor, tmp_path / "out2", is_value_model=True))


def test_accelerate_is_not_needed(tmp_path: Path, job: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' `device_map` needs it, and verl's own requirements do not bring it."""
    for module in ("transformers.integrations.accelerate", "transformers.utils"):
        monkeypatch.setattr(f"{module}.is_accelerate_available", lambda: False)
    target = merge(MergeOptions(save(tmp_path / "run", job.make_engine()), tmp_path / "out"))
    assert (target / "model.safetensors").is_file()


def test_another_precision_can_be_asked_for(tmp_path: Path, job: ModuleType) -> None:
    engine = job.make_engine()
    job.train(engine, 1)
    target = merge(MergeOptions(save(tmp_path / "run", engine), tmp_path / "out", dtype="bfloat16"))
    found = load_file(target / "model.safetensors")
    for name, value in engine.weights().named_tensors():
        assert same_bits(found[name], value.to(torch.bfloat16))
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"


def test_lora_of_transposed_weights_is_merged_as_the_engine_merges_it(tmp_path: Path) -> None:
    """GPT-2's; the weight of attn.c_proj is square."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from verl.config.schema import ActorConfig, ModelConfig
    from verl.engines import build_engine

    config = GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    model = ModelConfig(path=str(tmp_path / "base"), lora_rank=2, target_modules=["attn.c_proj", "c_attn"])
    engine = build_engine("actor", model, ActorConfig(), device="cpu", total_steps=1)
    with engine.weights().structure() as module:
        for name, param in module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param)
    merged = load_file(
        merge(MergeOptions(save(tmp_path / "run", engine), tmp_path / "m")) / "model.safetensors"
    )
    exported = dict(engine.weights().named_tensors())
    for name, value in merged.items():
        assert torch.allclose(value, exported[name], atol=1e-6), name


def test_lora_is_merged_as_the_engine_merges_it_or_kept(tmp_path: Path, job: ModuleType) -> None:
    peft = pytest.importorskip("peft")
    base = job.make_model(0)
    base.save_pretrained(tmp_path / "base")
    engine = job.make_engine(lora_rank=2)
    for seed in range(3):
        job.train(engine, seed)
    part = save(tmp_path / "run", engine)
    merged = load_file(
        merge(MergeOptions(part, tmp_path / "m", base_dir=tmp_path / "base")) / "model.safetensors"
    )
    exported = dict(engine.weights().named_tensors())
    assert set(merged) == set(exported)
    for name, value in exported.items():
        assert torch.allclose(merged[name], value, atol=1e-7), name
    assert not torch.equal(
        merged["model.layers.0.mlp.up_proj.weight"], base.model.layers[0].mlp.up_proj.weight
    )

    kept = merge(MergeOptions(part, tmp_path / "k", lora="keep"))
    assert (kept / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o644
    assert model_merger.main(["test", "--local_dir", str(kept), "--test_hf_dir", str(kept)]) == 0
    model = peft.PeftModel.from_pretrained(job.make_model(0), kept).merge_and_unload()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, exported[name], atol=1e-6), name
    with pytest.raises(CheckpointError, match="--base_dir"):
        merge(MergeOptions(part, tmp_path / "x"))


def _change(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


FAULTS = {
    "a bit": lambda w: w["model.norm.weight"].view(torch.int32)[3].bitwise_xor_(1),
    "a lost tensor": lambda w: w.pop("model.layers.1.mlp.up_proj.weight"),
    "two swapped": lambda w: w.update(
        {
            "model.layers.0.mlp.up_proj.weight": w["model.layers.1.mlp.up_proj.weight"],
            "model.layers.1.mlp.up_proj.weight": w["model.layers.0.mlp.up_proj.weight"].clone(),
        }
    ),
    "a surplus tensor": lambda w: w.update({"model.extra": torch.zeros(2)}),
    "another type": lambda w: w.update({"model.norm.weight": w["model.norm.weight"].double()}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_merge_that_loses_or_changes_a_tensor_is_refused_and_leaves_nothing(
    tmp_path: Path, job: ModuleType, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    part = save(tmp_path / "run", job.make_engine())

    def faulty(folder: Path, *arguments: Any) -> Any:
        written = write_weights(folder, *arguments)
        _change(folder, FAULTS[fault])
        return written

    monkeypatch.setattr(hf_folder, "write_weights", faulty)
    arguments = ["merge", "--local_dir", str(part), "--target_dir", str(tmp_path / "out")]
    assert model_merger.main(arguments) == 2
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_model_that_answers_otherwise_is_refused(
    tmp_path: Path, job: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tensors right, but the configuration makes another model of them."""
    part = save(tmp_path / "run", job.make_engine())
    original = merge_module.check_tensors

    def then_spoil(folder: Path, *arguments: Any) -> int:
        count = original(folder, *arguments)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
        return count

    monkeypatch.setattr(merge_module, "check_tensors", then_spoil)
    with pytest.raises(CheckpointError, match="differ on a fixed prompt"):
        merge(MergeOptions(part, tmp_path / "out"))
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_damaged_checkpoint_is_not_merged(tmp_path: Path, job: ModuleType) -> None:
    part = save(tmp_path / "run", job.make_engine())
    file = next((part / "model").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged: actor/model/model_world_size_1_rank_0.safetensors"):
        merge(MergeOptions(part, tmp_path / "out"))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_earlier_merge_is_replaced_where_that_is_asked(
    tmp_path: Path, job: ModuleType, tiny_tokenizer: Any
) -> None:
    part = save(tmp_path / "run", job.make_engine(), tokenizer=tiny_tokenizer)
    target = merge(MergeOptions(part, tmp_path / "run/merged", logits=False))
    with pytest.raises(CheckpointError, match="not empty.*--overwrite"):
        merge(MergeOptions(part, target))
    assert load_file(target / "model.safetensors")["lm_head.weight"].dtype == torch.float32
    (tmp_path / "link").symlink_to(target)
    merge(MergeOptions(part, tmp_path / "link", dtype="bfloat16", overwrite=True, logits=False))
    assert load_file(target / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    assert (tmp_path / "link").is_symlink()
    assert not [path for path in target.parent.iterdir() if "merg" in path.name and path != target]


@pytest.mark.parametrize("other", ["results.jsonl", "eval_results.json", "global_step_2", "link.json"])
def test_a_folder_with_anything_but_a_merged_model_is_not_replaced(
    tmp_path: Path, job: ModuleType, other: str
) -> None:
    part = save(tmp_path / "run", job.make_engine())
    target = merge(MergeOptions(part, tmp_path / "out", logits=False))
    if other == "global_step_2":
        (target / other).mkdir()
    elif other == "link.json":
        (target / "config.json").rename(tmp_path / "config.json")
        (target / "config.json").symlink_to(tmp_path / "config.json")
        other = "config.json"
    else:
        (target / other).write_text("{}")
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=f"--overwrite replaces only.*also holds '{other}'"):
        merge(MergeOptions(part, target, overwrite=True))
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "target",
    [
        "run", ".", "run/global_step_5", "run/global_step_5/actor", "run/global_step_5/actor/huggingface",
        "run/global_step_5/new", "run/global_step_7", "run/new/../global_step_5/actor/huggingface",
        "link/actor/huggingface",
    ],
)  # fmt: skip
def test_a_run_and_its_checkpoints_are_never_replaced(
    tmp_path: Path, job: ModuleType, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    engine = job.make_engine()
    contents = {"actor": PartSettings(["model", "hf_model"])}
    CheckpointManager(tmp_path / "run", contents).save(5, {"actor": engine}, {})
    part = tmp_path / "run/global_step_5/actor"
    (tmp_path / "link").symlink_to(part.parent)
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match="--target_dir .*(is part of the checkpoint|which is read)"):
        merge(MergeOptions(part, Path(target), overwrite=True))
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("shard_size", ["1GB", "20kB"])
def test_of_a_base_model_what_transformers_reads_is_read_and_it_is_never_replaced(
    tmp_path: Path, job: ModuleType, shard_size: str
) -> None:
    """Mistral's repositories have the weights a second time, under other names, in consolidated.safetensors."""
    base = tmp_path / "base"
    job.make_model(0).save_pretrained(base, max_shard_size=shard_size)
    assert (base / "model.safetensors.index.json").exists() == (shard_size == "20kB")
    part = save(tmp_path / "run", job.make_engine(lora_rank=2))
    before = snapshot(base)
    with pytest.raises(CheckpointError, match="base, which is read"):
        merge(MergeOptions(part, base, base_dir=base, overwrite=True))
    assert snapshot(base) == before
    save_file({"layers.0.attention.wq.weight": torch.zeros(4, 4)}, base / "consolidated.safetensors")
    merged = merge(MergeOptions(part, tmp_path / "m", base_dir=base, logits=False))
    assert set(load_file(merged / "model.safetensors")) == set(job.make_model(0).state_dict())
    arguments = ["--local_dir", str(base), "--test_hf_dir", str(merged)]
    assert model_merger.main(["test", *arguments]) == 0  # the adapter has had no step


def test_a_target_that_is_no_folder_is_refused(tmp_path: Path, job: ModuleType) -> None:
    part = save(tmp_path / "run", job.make_engine())
    (tmp_path / "file").write_text("f")
    with pytest.raises(CheckpointError, match="is a file; give a folder"):
        merge(MergeOptions(part, tmp_path / "file", overwrite=True))
    with pytest.raises(CheckpointError, match="file/out failed: .*Not a directory|File exists"):
        merge(MergeOptions(part, tmp_path / "file/out"))
    assert (tmp_path / "file").read_text() == "f"


def test_a_second_merge_into_one_target_is_refused(
    tmp_path: Path, job: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = save(tmp_path / "run", job.make_engine())
    (tmp_path / ".out.merging").mkdir()
    (tmp_path / ".out.merging/of_a_killed_merge").touch()
    write = hf_folder.write_weights

    def meanwhile(*arguments: Any) -> Any:
        with pytest.raises(CheckpointError, match="another merge into .* is running"):
            merge(MergeOptions(part, tmp_path / "out"))
        return write(*arguments)

    monkeypatch.setattr(hf_folder, "write_weights", meanwhile)
    target = merge(MergeOptions(part, tmp_path / "out", logits=False))
    assert (target / "model.safetensors").exists() and not (target / "of_a_killed_merge").exists()
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), Exception("I/O error (os error 28)")]
)
def test_a_full_disk_is_reported_with_the_option_to_change(
    tmp_path: Path,
    job: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    part = save(tmp_path / "run", job.make_engine())

    def full(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(hf_folder, "write_weights", full)
    assert model_merger.main(["--local_dir", str(part), "--target_dir", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "Free some space, or give a --target_dir on another disk" in told and "trainer." not in told
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_the_folder_may_be_named_as_the_pages_name_it(tmp_path: Path, job: ModuleType) -> None:
    save(tmp_path / "run", job.make_engine())
    for index, name in enumerate(("global_step_5", "global_step_5/actor/")):
        assert merge(MergeOptions(tmp_path / "run" / name, tmp_path / f"out{index}", logits=False)).exists()
    for name, words in (
        ("global_step_5/critic", "not a folder"),
        ("", "is a run folder|not a folder"),
    ):
        with pytest.raises(CheckpointError, match=words):
            merge(MergeOptions(tmp_path / "run" / name, tmp_path / "no"))


def test_tying_is_refused_when_the_output_matrix_is_another(tmp_path: Path, job: ModuleType) -> None:
    part = save(tmp_path / "run", job.make_engine(tied=False))
    with pytest.raises(CheckpointError, match="'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        merge(MergeOptions(part, tmp_path / "out", tie_word_embedding=True))
    engine = job.make_engine(tied=True)
    target = merge(MergeOptions(save(tmp_path / "tied", engine), tmp_path / "out2", tie_word_embedding=True))
    assert "lm_head.weight" not in load_file(target / "model.safetensors")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "phi", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_architecture_is_written_as_transformers_writes_it(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    """In several shard files, from a source cut into two ranks' shards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {
        "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32,
        "tie_word_embeddings": tied, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if architecture == "qwen3_moe":
        options |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **options)
    model = AutoModelForCausalLM.from_config(config)
    state = {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    halves: list[list[TensorChunk]] = [[], []]
    for name, value in state.items():
        cut = (value.shape[0] + 1) // 2
        rest = (0,) * (value.ndim - 1)
        halves[0].append(TensorChunk(name, (0, *rest), value[:cut]))
        if cut < value.shape[0]:
            halves[1].append(TensorChunk(name, (cut, *rest), value[cut:]))
    files = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    for file, chunks in zip(files, halves, strict=True):
        write_chunks(file, chunks)
    (tmp_path / "out").mkdir()
    written = write_weights(
        tmp_path / "out", ShardedReader(files), empty_model(config), torch.float32, shard_bytes=8000
    )
    assert len(written) > 2
    model.save_pretrained(tmp_path / "reference")
    reference = load_file(tmp_path / "reference/model.safetensors")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(reference)
    for file in set(index.values()):
        for name, value in load_file(tmp_path / "out" / file).items():
            assert index[name] == file and same_bits(value, reference[name]), name


def test_only_a_file_that_transformers_would_write_alike_counts_as_such(job: ModuleType) -> None:
    from transformers import Qwen3MoeConfig

    def as_is(config: Any, dtype: torch.dtype = torch.float32, **more: torch.Tensor) -> bool:
        model = empty_model(config)
        names = {name for name, _ in model.named_parameters()}  # a tied matrix once
        state = {
            name: torch.zeros(value.shape) for name, value in model.state_dict().items() if name in names
        }
        return stored_as_is(TensorReader(state | more), model, dtype)

    plain, tied = job.make_model().config, job.make_model(tied=True).config
    assert as_is(plain) and as_is(tied)
    assert not as_is(plain, torch.bfloat16)
    shape = (tied.vocab_size, tied.hidden_size)
    assert not as_is(tied, **{"lm_head.weight": torch.zeros(shape)}), (
        "it would be written without the second one"
    )
    fused = Qwen3MoeConfig(
        hidden_size=8,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    assert not as_is(fused), "experts are fused in memory and apart on the disk"


def test_writing_large_files_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def made(count: int) -> Iterator[torch.Tensor]:
        nonlocal most
        for number in range(count):
            most = max(most, sum(ref() is not None for ref in alive))
            alive.append(weakref.ref(tensor := torch.full((1 << 18,), float(number))))
            yield tensor

    entries = [(f"t{number}", torch.float32, (1 << 18,)) for number in range(30)]
    record = write_stream(tmp_path / "x.safetensors", entries, made(30), {})
    assert record.size > 30 << 20 and most <= 1
    assert all(float(t[-1]) == int(name[1:]) for name, t in load_file(tmp_path / "x.safetensors").items())


def test_writing_holds_one_tensor_at_a_time(
    tmp_path: Path, job: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import weakref

    model = job.make_model(num_hidden_layers=6)
    write_chunks(tmp_path / "x.safetensors", local_chunks(model.state_dict()))
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    original = ShardedReader.get

    def counted(self: ShardedReader, name: str) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(value := original(self, name)))
        return value

    monkeypatch.setattr(ShardedReader, "get", counted)
    (tmp_path / "out").mkdir()
    reader = ShardedReader([tmp_path / "x.safetensors"])
    write_weights(tmp_path / "out", reader, empty_model(model.config), torch.float32)
    assert len(alive) > 50 and most <= 1


def test_the_test_word_tells_what_differs(
    tmp_path: Path, job: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = job.make_engine()
    part = save(tmp_path / "run", engine)
    target = merge(MergeOptions(part, tmp_path / "out"))
    compare = ["test", "--backend", "fsdp", "--local_dir", str(part), "--test_hf_dir", str(target)]
    assert model_merger.main(compare) == 0
    assert "all equal" in capsys.readouterr().out
    merge(MergeOptions(part, tmp_path / "half", dtype="bfloat16"))
    assert model_merger.main([*compare[:-1], str(tmp_path / "half")]) == 0
    assert "equal as bfloat16" in capsys.readouterr().out
    _change(target, lambda w: w["model.norm.weight"].add_(0.5))
    assert model_merger.main(compare) == 1
    out = capsys.readouterr().out
    assert (
        "model.norm.weight: 16 of 16 numbers differ, by at most 0.5" in out
        and "1 of 21 tensors differ" in out
    )


def test_a_shard_missing_in_the_middle_is_noticed(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(6, 2)
    files = [tmp_path / f"{first}.safetensors" for first in (0, 2, 4)]
    for first, file in zip((0, 2, 4), files, strict=True):
        write_chunks(file, [TensorChunk("w", (first, 0), whole[first : first + 2])])
    assert torch.equal(ShardedReader(files).get("w"), whole)
    with pytest.raises(CheckpointError, match="shard of tensor 'w' is missing: 8 of 12"):
        ShardedReader([files[0], files[2]]).get("w")
