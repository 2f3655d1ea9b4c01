"""Training steps to be timed: ours through the engine, and plain Hugging Face on a padded batch.

Both see the same sequences, the same GRPO loss, clip gradients and step AdamW. Plain Hugging Face keeps bf16
parameters and bf16 moments (no master copy) and materialises the logits; ours keeps float32 masters and moments
and also computes the entropy, as the training loop does.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.train_shapes import Shape
from verl.config.schema import ActorConfig, ModelConfig
from verl.data.proto import DataProto

PROMPT_SHARE = 8
CLIP = 0.2


@dataclass(frozen=True)
class Workload:
    """Sequences of the given lengths; one micro-batch per step, or with groups those that the engine chooses."""

    shape: Shape
    lengths: tuple[int, ...]
    checkpointing: bool = False
    lora_rank: int = 0
    compiled: bool = False
    strategy: str = "fsdp"
    group: int = 1
    """So many consecutive sequences have one prompt."""
    prompt: int | None = None
    """Its tokens; None: the first eighth of each sequence."""
    shares_prompts: bool = True
    backend: str = "auto"
    """`model.attention_backend` of ours."""

    @property
    def answered(self) -> int:
        return sum(length - self.prompt_of(length) for length in self.lengths)

    def prompt_of(self, length: int) -> int:
        return self.prompt or max(length // PROMPT_SHARE, 1)

    @property
    def flops(self) -> float:
        return self.shape.model_flops(list(self.lengths), self.answered, self.lora_rank > 0)


@dataclass
class Measured:
    seconds: float
    peak_gib: float
    loss: float

    def tokens_per_s(self, work: Workload) -> float:
        return sum(work.lengths) / self.seconds

    def mfu(self, work: Workload, peak_tflops: float) -> float:
        return work.flops / self.seconds / (peak_tflops * 1e12)


def ragged(longest: int, tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Long-tailed lengths of at most `longest` that add up to at most `tokens`."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while True:
        length = int(longest * float(torch.rand((), generator=generator)) ** 2)
        length = max(length, 16)
        if sum(lengths) + length > tokens:
            return tuple(lengths) or (min(longest, tokens),)
        lengths.append(length)


def make_batch(work: Workload, seed: int = 0) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(work.lengths), max(work.lengths)
    ids = torch.randint(0, work.shape.vocab_size, (rows, width), generator=generator)
    at = torch.arange(width)[None, :]
    length = torch.tensor(work.lengths)[:, None]
    prompt = torch.tensor([work.prompt_of(length) for length in work.lengths])[:, None]
    if work.group > 1:
        first = torch.arange(rows) // work.group * work.group
        ids = torch.where(at < prompt, ids[first], ids)
    attention = (at < length).long()
    response = ((at >= prompt) & (at < length)).long()
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, width).contiguous()
    tensors = {
        "input_ids": ids,
        "attention_mask": attention,
        "response_mask": response,
        "advantages": advantages,
    }
    return DataProto.from_dict(tensors=tensors)


def new_model(work: Workload, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(work.shape.config(max(work.lengths)), dtype=dtype)


def grpo_loss(log_probs: torch.Tensor, batch: DataProto, tokens: int) -> torch.Tensor:
    mask, advantages = batch.batch["response_mask"], batch.batch["advantages"]
    ratio = (log_probs - log_probs.detach()).exp()
    per_token = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return (per_token * mask).sum() / tokens


def our_step(work: Workload, device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
    from verl.engines import build_engine

    role = ActorConfig()
    role.strategy = work.strategy
    role.use_torch_compile = work.compiled
    role.ppo_micro_batch_size_per_gpu = len(work.lengths) if work.group == 1 else None
    role.use_cuda_graphs = work.group > 1
    role.optim.lr = 1e-5
    name = str(dtype).removeprefix("torch.")
    model_cfg = ModelConfig(
        dtype=name,
        enable_gradient_checkpointing=work.checkpointing,
        lora_rank=work.lora_rank,
        share_prefixes=work.shares_prompts,
        attention_backend=work.backend,
    )
    engine = build_engine("actor", model_cfg, role, model=new_model(work, device, dtype), device=device)
    batch = make_batch(work)
    last: dict[str, torch.Tensor] = {}

    def loss_fn(output: Any, micro: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
        loss = grpo_loss(output.log_probs, micro, micro.meta_info["batch_num_tokens"])
        last["loss"] = loss.detach()
        return loss, {}

    def step() -> float:
        engine.forward_backward(batch, loss_fn, with_entropy=True)
        engine.optimizer_step()
        return float(last["loss"])

    return step


def plain_step(work: Workload, device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
    model = new_model(work, device, dtype)
    model.set_attn_implementation("sdpa")
    if work.lora_rank:
        import peft

        config = peft.LoraConfig(r=work.lora_rank, lora_alpha=16, target_modules="all-linear")
        model = peft.get_peft_model(model, config)
        if work.checkpointing:
            model.enable_input_require_grads()
    if work.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-5, fused=device.type == "cuda" or None)
    batch = make_batch(work).to(device)
    tokens = work.answered

    def step() -> float:
        ids = batch.batch["input_ids"]
        logits = model(input_ids=ids, attention_mask=batch.batch["attention_mask"], use_cache=False).logits
        logs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        chosen = logs.gather(2, ids[:, 1:, None]).squeeze(2)
        log_probs = torch.nn.functional.pad(chosen, (1, 0))
        loss = grpo_loss(log_probs, batch, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def measure(
    make: Callable[[], Callable[[], float]], device: torch.device, steps: int, warmup: int = 3
) -> Measured:
    """Seconds per step after warm-up, and the peak of device memory over the timed steps."""
    clean(device)
    step = make()
    for _ in range(warmup):
        loss = step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    for _ in range(steps):
        loss = step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - begin) / steps
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else float("nan")
    del step
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    clean(device)
    return Measured(seconds, peak, loss)


def clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
