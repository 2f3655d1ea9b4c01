"""A small training job on the real engine, for the tests of checkpoints; also run as a program that gets killed.

    python training.py RUN_FOLDER STEPS [--async] [--model KIND]

Each step draws its batch from a loader position and from every kind of random state, so a resume that forgets any
of them goes another way. After each step it saves, then appends one line to `metrics.jsonl`.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.checkpoint.manager import CheckpointManager, PartSettings
from verl.config.schema import ActorConfig, CriticConfig, ModelConfig
from verl.data.proto import DataProto
from verl.engines import build_engine
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

    state = engine.state_dict()
    walk(state["model"], "model")
    walk(state["optimizer"], "optimizer")
    return found


def run(run_folder: Path, steps: int, *, background: bool = False, kind: str = "llama") -> None:
    torch.set_num_threads(1)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    contents = ["model", "optimizer", "extra", "hf_model"]
    with RunFolder(run_folder) as folder:
        engines = {"actor": make_engine(tied=kind == "tied"), "critic": make_engine("critic", 1)}
        settings = {name: PartSettings(contents, None, background) for name in engines}
        manager = CheckpointManager(run_folder, settings, max_actor_to_keep=2, max_critic_to_keep=2)
        state = manager.resume(engines)
        step = 0 if state is None else state["step"]
        loader = 0 if state is None else state["loader"]["position"]
        if state is None:
            random.seed(1), np.random.seed(2), torch.manual_seed(3)
        folder.rewind(step)
        sys.stdout.write(f"ready {step}\n")
        sys.stdout.flush()
        while step < steps:
            step += 1
            seeds = (random.getrandbits(16), int(np.random.randint(1 << 16)), int(torch.randint(1 << 16, ())))
            loader += 1 + seeds[0] % 3
            norms = {name: train(engine, loader * 7 + sum(seeds)) for name, engine in engines.items()}
            trainer_state = {"step": step, "loader": {"position": loader}}
            folder.append_metrics(step, {"seeds": seeds, "loader": loader, **norms})
            manager.save(step, engines, trainer_state)
            sys.stdout.write(f"step {step}\n")
            sys.stdout.flush()
        manager.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--kind", default="llama")
    args = parser.parse_args()
    run(args.run_folder, args.steps, background=args.background, kind=args.kind)
