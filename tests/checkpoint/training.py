"""A small training job on the real engine, for the tests of checkpoints; as a program (`training.py CALL ARGUMENTS`) it
runs one of its functions.

Each step draws its batch from a loader position and from every kind of random state, so a resume that forgets any
of them goes another way.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl.checkpoint.files import record_of
from verl.checkpoint.manager import CheckpointManager, PartSettings
from verl.checkpoint.manifest import read_manifest, write_manifest
from verl.config.schema import ActorConfig, CriticConfig, ModelConfig
from verl.data.proto import DataProto
from verl.engines import build_engine
from verl.errors import VerlError
from verl.observe.run_folder import RunFolder

VOCAB = 40


def make_model(seed: int = 0, tied: bool = False, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(options | changes)))


def make_engine(
    kind: str = "actor",
    seed: int = 0,
    *,
    dtype: str = "auto",
    lora_rank: int = 0,
    tied: bool = False,
    model: Any = None,
    fsdp_size: int = -1,
) -> Any:
    model_cfg = ModelConfig(dtype=dtype, lora_rank=lora_rank)
    role = CriticConfig() if kind == "critic" else ActorConfig()
    role.optim.lr = 1e-2
    role.optim.lr_scheduler_type = "cosine"
    role.ppo_micro_batch_size_per_gpu = 2
    role.fsdp_config.fsdp_size = fsdp_size
    if kind == "critic":
        from verl.models.value_model import ValueModel

        torch.manual_seed(seed)
        model = ValueModel((model or make_model(seed, tied)).model)
    else:
        model = model or make_model(seed, tied)
    return build_engine(kind, model_cfg, role, model=model, device="cpu", total_steps=1000, seed=seed)


def make_batch(seed: int, rows: int = 6) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, 9), generator=generator)
    mask = torch.ones(rows, 5, dtype=torch.long)
    mask[::2, 3:] = 0
    attention = torch.cat([torch.ones(rows, 4, dtype=torch.long), mask], dim=1)
    target = torch.randn(rows, 5, generator=generator)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids * attention,
            "attention_mask": attention,
            "response_mask": mask,
            "target": target,
        }
    )


def loss_fn(output: Any, micro: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    mask, target = micro.batch["response_mask"], micro.batch["target"]
    value = output.log_probs if output.log_probs is not None else output.values
    loss = (
        ((value - target) ** 2 * mask).sum()
        / micro.meta_info["batch_num_tokens"]
        * micro.meta_info["dp_size"]
    )
    return loss, {"loss": loss.detach()}


def train(engine: Any, seed: int, rows: int = 6) -> float:
    """One optimiser step; the gradient norm."""
    engine.forward_backward(make_batch(seed, rows), loss_fn)
    return float(engine.optimizer_step()["grad_norm"])


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Whole copies of everything the engine's state holds, by path."""
    found: dict[str, torch.Tensor] = {}

    def walk(tree: Any, path: str) -> None:
        if isinstance(tree, torch.Tensor):
            whole = tree.full_tensor() if hasattr(tree, "full_tensor") else tree
            found[path] = whole.detach().clone()
        elif isinstance(tree, dict):
            for key, value in tree.items():
                walk(value, f"{path}/{key}")

    state = engine.state()
    walk(state["model"], "model")
    walk(state["optimizer"], "optimizer")
    return found


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def run(run_folder: str, steps: int, background: bool = False, tied: bool = False) -> None:
    """Train up to `steps`, going on from what is there. Says `ready S`, then `saving N`, `saved N` for each step."""
    torch.set_num_threads(1)
    contents = ["model", "optimizer", "extra", "hf_model"]
    with RunFolder(run_folder) as folder:
        engines = {"actor": make_engine(tied=tied), "critic": make_engine("critic", 1)}
        settings = {name: PartSettings(contents, None, background) for name in engines}
        manager = CheckpointManager(run_folder, settings, max_actor_to_keep=2, max_critic_to_keep=2)
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        state = manager.resume(engines) or {"step": 0, "loader": {"position": 0}}
        step, loader = state["step"], state["loader"]["position"]
        folder.rewind(step)
        say(f"ready {step}")
        while step < steps:
            step += 1
            seeds = (random.getrandbits(16), int(np.random.randint(1 << 16)), int(torch.randint(1 << 16, ())))
            loader += 1 + seeds[0] % 3
            norms = {name: train(engine, loader * 7 + sum(seeds)) for name, engine in engines.items()}
            folder.append_metrics(step, {"seeds": seeds, "loader": loader, **norms})
            say(f"saving {step}")
            manager.save(step, engines, {"step": step, "loader": {"position": loader}})
            say(f"saved {step}")
        manager.wait()


def rank(
    rank: int, world_size: int, store: str, folders: dict[str, str], lora_rank: int = 0, fsdp_size: int = -1
) -> None:
    """One of `world_size` ranks: train, save to `folders[world_size]`, then load what every other group saved and
    compare it, tensor by tensor, with what that group had."""
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
        )
    own = Path(folders[str(world_size)])
    engine = make_engine(seed=0, lora_rank=lora_rank, fsdp_size=fsdp_size if world_size > 1 else -1)
    for step in range(3):
        train(engine, 100 * world_size + 10 * step)
    manager = CheckpointManager(own)
    saved = manager.save(3, {"actor": engine}, {"step": 3})
    whole = weights(engine)
    engine.save_hf(own / "live")
    if rank == 0:
        if saved is None:
            raise RuntimeError("nothing was saved")
        torch.save(whole, own / "whole.new")
        os.replace(own / "whole.new", own / "whole.pt")
    for other in folders.values():
        while not (Path(other) / "whole.pt").exists():
            time.sleep(0.02)
        fresh = make_engine(seed=5, lora_rank=lora_rank, fsdp_size=fsdp_size if world_size > 1 else -1)
        state = CheckpointManager(other).resume({"actor": fresh})
        expected = torch.load(Path(other) / "whole.pt", weights_only=True)
        found = weights(fresh)
        if state != {"step": 3} or set(found) != set(expected):
            raise RuntimeError(f"{world_size} ranks loading {other}: {state}, {set(found) ^ set(expected)}")
        for name, value in expected.items():
            if not torch.equal(found[name], value):
                raise RuntimeError(f"{world_size} ranks loading {other}: {name} differs")
        say(f"equal {Path(other).name} {train(fresh, 7):.6f}")
    if world_size > 1:
        dist.destroy_process_group()


class FullDisk:
    """A tokenizer whose library fails as tokenizers does on a full disk."""

    def save_pretrained(self, folder: Path) -> None:
        raise Exception("No space left on device (os error 28)")


def fall_back(rank: int, world_size: int, store: str, folder: str) -> None:
    """One of several ranks, of which one alone has a problem: with a save, then with the newest checkpoint."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    engine = make_engine(
        lora_rank=2
    )  # whose whole weights and adapter are gathered by all ranks while saving
    manager = CheckpointManager(folder)
    held = {}
    for step in (1, 2):
        train(engine, 10 * step)
        held[step] = weights(engine)
        say(f"saved {manager.save(step, {'actor': engine}, {'step': step}) is not None}")
    say(f"saved {manager.save(3, {'actor': engine}, {'step': 3}, tokenizer=FullDisk()) is not None}")
    if rank == 0:
        forge(Path(folder) / "global_step_2", f"random/rank_{world_size - 1}.json", '{"python": 5}')
    dist.barrier()
    fresh = make_engine(seed=5, lora_rank=2)
    state = CheckpointManager(folder).resume({"actor": fresh})
    found = weights(fresh)
    equal = all(torch.equal(found[name], value) for name, value in held[1].items())
    say(f"took {state and state['step']} {equal}")
    dist.destroy_process_group()


def apart(rank: int, world_size: int, store: str, folders: list[str]) -> None:
    """Ranks whose run folders have one name on disks of their own: what a start says, then what saves say."""
    from verl.checkpoint import save_op

    save_op.VISIBLE_S = 0.0
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    manager = CheckpointManager(folders[rank], peer_timeout_s=1000)
    engine = make_engine()
    for attempt in (
        lambda: manager.rehearse({"actor": engine}, {}),
        *[partial(manager.save, 1, {"actor": engine}, {})] * 2,
    ):
        try:
            say(f"result {attempt()} {manager.failure}")
        except VerlError as error:
            say(f"{type(error).__name__} {error}")
    shared = CheckpointManager(folders[0])
    shared.rehearse({"actor": engine}, {})
    say(f"saved {shared.save(1, {'actor': engine}, {}) is not None}")
    dist.destroy_process_group()


def forge(folder: Path, name: str, text: str) -> None:
    """Other contents, with the right checksums."""
    (folder / name).write_text(text)
    manifest = read_manifest(folder)
    files = {each: record_of(folder / each) for each in manifest.files}
    write_manifest(folder, replace(manifest, files=files), replace=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
