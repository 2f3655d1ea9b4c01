"""Modules that engines of this process generate from: as weight sources, and in generation mode.

A rollout engine calls a model in ways its authors did not: with an attention of ours, a cache of ours, several prompts
laid end to end. An architecture that keeps state elsewhere, or asks more of its attention, would be sampled from
wrongly and without an error. So `verify` generates a few tokens before any that count and recomputes their log-probs by
the stock forward without a cache; both in float32, so that rounding can neither hide nor cause a difference.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl.errors import RolloutError
from verl.models.attention import ATTENTION_NAME, caps_scores, register_attention
from verl.models.float32 import float32_arithmetic
from verl.models.introspection import position_limit
from verl.models.lora import has_lora
from verl.models.packability import FAULTS, exact_if_possible, first_line, majority_fault
from verl.models.weight_source import (
    Adapter,
    NamedTensors,
    Names,
    SourceLogProbs,
    WeightSource,
    adapter_of,
    base_tensors,
    merged_tensors,
)
from verl.rollout.base import Request, Response, RolloutEngine, SamplingParams
from verl.rollout.sequence import Stopper, eos_token_ids

log = logging.getLogger(__name__)

_PROBE_TOKENS = 4
_BOUND = 5e-4
"""Of the largest difference of log-probs, with the temperature at which logits have unit variance."""
_NOISE = 8
_INSTEAD = {"native": "rollout.name=vllm or rollout.name=hf", "hf": "rollout.name=vllm"}


class ModuleWeights(WeightSource):
    """The weights of a plain causal language model."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        weight = causal_lm(module).get_input_embeddings().weight
        self.dtype, self.device = weight.dtype, weight.device

    def named_tensors(self, names: Names = "hf") -> NamedTensors:
        return merged_tensors(causal_lm(self._module), self.dtype, names)

    def base_tensors(self, names: Names = "hf") -> NamedTensors:
        return base_tensors(causal_lm(self._module), self.dtype, names)

    def adapter(self) -> Adapter | None:
        return adapter_of(causal_lm(self._module), self.dtype)

    def module(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self._module)

    structure = module

    def log_probs(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> SourceLogProbs:
        with torch.no_grad(), generation_mode(self._module, None) as model:
            log_probs = _log_probs(model, prompt_ids, responses).tolist()
            try:
                with float32_arithmetic(model):
                    return SourceLogProbs(log_probs, _log_probs(model, prompt_ids, responses).tolist())
            except FAULTS as error:
                log.info("rounding noise of log-probs cannot be measured in float32: %s", first_line(error))
                return SourceLogProbs(log_probs, None)


def _log_probs(
    model: Any, prompt: Sequence[int], rows: Sequence[Sequence[int]], temperature: float = 1.0
) -> torch.Tensor:
    """[rows, tokens of a row] by the model's forward, without a cache."""
    ids = torch.tensor([[*prompt, *row] for row in rows], device=model.get_input_embeddings().weight.device)
    logits_BTV = model(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1].float() / temperature
    return logits_BTV.log_softmax(-1).gather(2, ids[:, len(prompt) :, None])[..., 0]


def as_source(source: WeightSource | nn.Module) -> WeightSource:
    """A module handed in by a user serves as its own weight source."""
    return source if isinstance(source, WeightSource) else ModuleWeights(source)


def causal_lm(module: nn.Module) -> Any:
    """The Hugging Face causal language model inside wrappers such as PEFT's."""
    wrapper: Any = module
    return wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else wrapper


class ModuleEngine(RolloutEngine):
    """What engines share that generate with the trainer's module itself. `source` is a TrainEngine's weights or a
    causal language model."""

    def __init__(self, source: WeightSource | nn.Module, tokenizer: Any | None) -> None:
        self.source = as_source(source)
        self.tokenizer = tokenizer
        self.version = 0
        self._stopper = Stopper(tokenizer, frozenset())
        self._vocab_size = 0
        self._position_limit: tuple[int, str] | None = None

    def _read_model(self) -> None:
        """What requests are checked against."""
        with self.source.structure() as module:
            model = causal_lm(module)
            self._stopper = Stopper(self.tokenizer, eos_token_ids(model, self.tokenizer))
            self._vocab_size = int(model.get_input_embeddings().num_embeddings)
            self._position_limit = position_limit(model)

    def update_weights(self, source: WeightSource | nn.Module | None, version: int) -> None:
        """The weights are the trainer's own: only the version changes (and the source, unless None)."""
        if source is not None:
            self.source = as_source(source)
        self.version = version


def stock_attention(model: Any) -> str:
    """transformers' own attention for this model: SDPA, or eager where the model has no SDPA form."""
    return "sdpa" if getattr(model, "_supports_sdpa", True) and not caps_scores(model) else "eager"


@contextmanager
def generation_mode(module: nn.Module, attention: str | None) -> Iterator[Any]:
    """The causal model in evaluation mode with another attention implementation (None: transformers' own); both are
    restored on exit."""
    model = causal_lm(module)
    attention = attention or stock_attention(model)
    if attention == ATTENTION_NAME:
        register_attention()
        if not getattr(model, "_supports_attention_backend", False):
            raise RolloutError(
                f"{type(model).__name__} does not call its attention through transformers' attention interface, which "
                "rollout.name=native needs; use rollout.name=hf"
            )
    training = [inner for inner in module.modules() if inner.training]
    before = getattr(model.config, "_attn_implementation", None)
    module.eval()
    try:
        if before != attention:
            model.set_attn_implementation(attention)
        yield model
    finally:
        if before is not None and before != attention:
            model.set_attn_implementation(before)
        for inner in training:
            inner.training = True


def cannot_generate(model: Any, fault: str, engine: str = "native") -> RolloutError:
    return RolloutError(
        f"rollout.name={engine} cannot generate from {type(model).__name__}: {fault}; use {_INSTEAD[engine]}"
    )


def verify(model: Any, engine: str, generate: Callable[[list[Request]], list[Response]]) -> None:
    """RolloutError where `generate`, which uses this model, gives other log-probs than the model's own forward."""
    try:
        fault = majority_fault(lambda seed: _difference(model, generate, seed))
    except torch.OutOfMemoryError:
        raise
    except FAULTS as error:
        raise cannot_generate(model, first_line(error), engine) from error
    if fault is not None:
        raise cannot_generate(model, fault, engine)


def _difference(model: Any, generate: Callable[[list[Request]], list[Response]], seed: int) -> str | None:
    def stock_log_probs(
        rows: list[tuple[list[int], list[int]]], temperature: float, times: int = 1
    ) -> torch.Tensor:
        """Each row alone (in a batch of `times` equal ones), by the stock forward."""
        with torch.no_grad(), generation_mode(model, None):
            found = [_log_probs(model, prompt, [ids] * times, temperature)[0] for prompt, ids in rows]
        return torch.stack(found).double().cpu()

    def compare(exact: bool) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        with float32_arithmetic(model) if exact else nullcontext():
            prompts = _probe_prompts(model, seed)
            ids = torch.tensor(prompts[:1], device=model.get_input_embeddings().weight.device)
            with torch.no_grad(), generation_mode(model, None):
                logits_V = model(input_ids=ids, use_cache=False).logits[0, -1].float()
            if not bool(logits_V.isfinite().all()):
                return None  # broken weights are reported by the generation that counts
            temperature = float(logits_V.std()) or 1.0
            sampling = SamplingParams(max_tokens=_PROBE_TOKENS, temperature=temperature, ignore_eos=True)
            responses = generate(
                [Request(str(at), ids, sampling, n=2 - at, seed=seed) for at, ids in enumerate(prompts)]
            )
            rows = [(prompts[int(response.request_id)], response.token_ids) for response in responses]
            ours = torch.tensor([response.log_probs for response in responses]).double()
            stock = stock_log_probs(rows, temperature)
            # Without float32 the size of rounding errors is seen from another batch size, which takes other kernels.
            noise = 0.0 if exact else float((stock - stock_log_probs(rows, temperature, 3)).abs().mean())
            return ours, stock, noise

    found, exact = exact_if_possible(compare)
    if found is None:
        return None
    ours, stock, noise = found
    differences = (ours - stock).abs()
    gap = float(differences.max() if exact else differences.mean())
    if gap <= (_BOUND if exact else max(10 * _BOUND, _NOISE * noise)):
        return None
    return f"its log-probs differ from those of the model's own forward by {gap:.2g}"


def _probe_prompts(model: Any, seed: int) -> list[list[int]]:
    """Two prompts with a common prefix, so that blocks of the cache are shared."""
    vocab = int(model.get_input_embeddings().num_embeddings)
    longest = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20)
    length = max(min(23, longest - _PROBE_TOKENS), 2)
    generator = torch.Generator().manual_seed(seed)
    first, other = torch.randint(min(3, vocab - 1), vocab, (2, length), generator=generator).tolist()
    shared = min(16, length - 1)
    return [first, (first[:shared] + other)[: length - 2 if length > shared + 3 else length]]


@dataclass(frozen=True)
class ModelInfo:
    """Everything but the weights."""

    config_json: str
    """Content of the model's config.json."""
    vocab_size: int
    eos_ids: frozenset[int]
    dtype: str
    device: str
    lora_rank: int
    """0: without LoRA, or with adapters merged into the weights."""
    max_positions: int | None


def model_info(source: WeightSource, tokenizer: Any | None) -> ModelInfo:
    with source.structure() as module:
        model = causal_lm(module)
        content = json.loads(model.config.to_json_string(use_diff=False))
        # FSDP renames the class of a module; engines find their own class by this name.
        content["architectures"] = [type(model).__name__.removeprefix("FSDP")]
        return ModelInfo(
            config_json=json.dumps(content, indent=2),
            vocab_size=int(model.get_input_embeddings().num_embeddings),
            eos_ids=eos_token_ids(model, tokenizer),
            dtype=str(source.dtype).removeprefix("torch."),
            device=source.device.type,
            lora_rank=int(model.verl_lora_config.r) if has_lora(model) else 0,
            max_positions=getattr(model.config.get_text_config(), "max_position_embeddings", None),
        )
