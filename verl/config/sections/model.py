"""The model and how it is trained: weights, LoRA, optimiser, sharding, what a checkpoint holds."""

# ruff: noqa: RUF009 - `key` and `section` return dataclasses.field

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.capabilities import STRATEGIES
from verl.config.keys import key, section

MODEL_DTYPES = ("auto", "float32", "bfloat16", "float16")
SAVE_CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass
class ModelConfig:
    """A Hugging Face model folder and what is done to it on loading."""

    path: str = key("", "Hugging Face model folder or id", required=True, path=True)
    tokenizer_path: str | None = key(None, "folder of the tokenizer; default: the model's", path=True)
    dtype: str = key("auto", "auto: bfloat16 on a GPU, float32 on a CPU", known=MODEL_DTYPES)
    enable_gradient_checkpointing: bool = key(False, "recompute activations in the backward pass")
    enable_activation_offload: bool = key(False, "keep activations in host memory", used_if="@gpu")
    use_remove_padding: bool = key(True, "pack sequences without padding; False: padded micro-batches")
    peft_type: str = key("lora", "kind of adapter", known=("lora",), used_if=".lora_rank")
    lora_rank: int = key(0, "rank of the LoRA adapters; 0: train all weights", ge=0)
    lora_alpha: int = key(
        16, "the adapter's output is multiplied by lora_alpha / lora_rank", ge=1, used_if=".lora_rank"
    )
    target_modules: list[str] = key(
        ["all-linear"], "modules that get an adapter, by name", used_if=".lora_rank"
    )
    freeze_embeddings: bool = key(False, "do not train the input embeddings", used_if="!.lora_rank")
    trust_remote_code: bool = key(False, "run the model's own Python code; only if you trust it")
    override_config: dict[str, Any] = key({}, "entries that replace those of the model's config.json")
    external_lib: list[str] = key([], "modules to import first (register your own models, losses)")


@dataclass
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = key(1e-6, "learning rate after warm-up", ge=0)
    weight_decay: float = key(0.01, "decoupled weight decay", ge=0)
    betas: list[float] = key([0.9, 0.999], "decay of the first and second moment", ge=0, le=1)
    eps: float = key(1e-8, "added to the denominator of the update", gt=0)
    lr_scheduler_type: str = key("constant", "schedule after warm-up", known=("constant", "cosine", "linear"))
    lr_warmup_steps: int = key(-1, "optimiser steps of linear warm-up; -1: take lr_warmup_steps_ratio", ge=-1)
    lr_warmup_steps_ratio: float = key(0.0, "warm-up as a share of all optimiser steps", ge=0, le=1)
    min_lr_ratio: float = key(0.0, "final share of lr", ge=0, le=1, used_if=".lr_scheduler_type!=constant")
    moments: str = key("float32", "storage of the moments; int8 saves memory", known=("float32", "int8"))
    stochastic_rounding: bool = key(
        False, "update 16-bit weights without float32 master copies", used_if="@16bit"
    )

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        if len(self.betas) != 2 or max(self.betas) >= 1:
            yield f"'{name}.betas' is {self.betas}; it must be two numbers of at least 0 and below 1"
        if self.lr_warmup_steps >= 0 and self.lr_warmup_steps_ratio > 0:
            yield (
                f"'{name}.lr_warmup_steps' is {self.lr_warmup_steps} and '{name}.lr_warmup_steps_ratio' is "
                f"{self.lr_warmup_steps_ratio:g}; keep one of them"
            )


@dataclass
class SFTOptimConfig(OptimConfig):
    """AdamW for supervised fine-tuning."""

    lr: float = key(1e-5, "learning rate after warm-up", ge=0)
    grad_clip: float = key(1.0, "largest gradient norm; 0: no clipping", ge=0)


@dataclass
class FSDPConfig:
    """Sharding with fully_shard."""

    param_offload: bool = key(
        False, "keep idle parameters in host memory", used_if=("!.offload_policy", "@gpu")
    )
    optimizer_offload: bool = key(
        False, "keep idle optimiser state in host memory", used_if=("!.offload_policy", "@gpu")
    )
    offload_policy: bool = key(False, "keep all shards in host memory all the time", used_if="@gpu")
    fsdp_size: int = key(
        -1, "ranks that share the weights; -1: all", ge=-1, used_if="@ranks or .offload_policy"
    )
    reshard_after_forward: bool = key(
        True, "free gathered weights after the forward pass", used_if="@ranks or .offload_policy"
    )


@dataclass
class MegatronConfig:
    """Parallel sizes of the megatron strategy, and what it keeps in host memory."""

    tensor_model_parallel_size: int = key(1, "ranks that split each matrix", ge=1)
    pipeline_model_parallel_size: int = key(1, "ranks that split the layers", ge=1)
    virtual_pipeline_model_parallel_size: int | None = key(
        None, "layer chunks per pipeline rank; only null", ge=1
    )
    context_parallel_size: int = key(1, "ranks that split each sequence", ge=1)
    expert_model_parallel_size: int = key(1, "ranks that split the experts", ge=1)
    sequence_parallel: bool = key(
        False, "split norms along the sequence in a tensor-parallel group; only False"
    )
    param_offload: bool = key(False, "keep idle parameters in host memory", used_if="@gpu")
    optimizer_offload: bool = key(False, "keep idle optimiser state in host memory", used_if="@gpu")


HF_BY_DEFAULT_BELOW = 10_000_000_000  # parameters from which on checkpoints leave hf_model out by default


@dataclass
class CheckpointConfig:
    """What a checkpoint holds and how it is written."""

    save_contents: list[str] | None = key(
        None, "default: model, optimizer, extra, and hf_model below 10B", known=SAVE_CONTENTS
    )
    load_contents: list[str] | None = key(None, "to load on resume; default: all", known=SAVE_CONTENTS)
    async_save: bool = key(False, "copy to host memory and write in the background")

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        if self.load_contents is not None and "model" not in self.load_contents:
            yield (
                f"'{name}.load_contents' is {self.load_contents}: a resumed run would continue with the weights it "
                "began with; add model"
            )


@dataclass
class ShardingConfig:
    """The engine of a model and how its weights are split over ranks."""

    strategy: str = key("fsdp", "training engine", known=STRATEGIES, plugin="strategy")
    ulysses_sequence_parallel_size: int = key(1, "ranks that split each sequence by attention heads", ge=1)
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding", used_if=".strategy!=megatron")
    megatron: MegatronConfig = section(
        MegatronConfig, "megatron's parallel sizes", used_if=".strategy=megatron"
    )


@dataclass
class TrainEngineConfig(ShardingConfig):
    """The engine that trains a model."""

    use_torch_compile: bool = key(False, "compile the model; falls back with a notice where that fails")
    use_cuda_graphs: bool = key(
        False, "capture passes over few tokens; keeps their memory", used_if=("@gpu", ".strategy!=megatron")
    )


@dataclass
class SFTModelConfig(TrainEngineConfig, ModelConfig):
    """The model of supervised fine-tuning, with the engine that trains it."""

    use_cuda_graphs: bool = key(
        True, "capture passes over few tokens; keeps their memory", used_if=("@gpu", ".strategy!=megatron")
    )
