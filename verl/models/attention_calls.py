"""Records a model's attention calls by running it on a few tokens: shapes, masks, unknown arguments.

A few tokens cannot show everything: a window of 4096 tokens, or chunks of 8192, look like plain causal attention. So
the mask is recorded as transformers defines it, a function of two positions, which can be evaluated at any distance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from verl.models.attention import observe_attention

TOKENS = 4
_HARMLESS = {"position_ids", "cache_position", "position_embeddings", "input_ids", "labels"}
"""Tensors that attention functions get and that do not change their result."""
_LONGEST = 1 << 18
"""Positions up to this one are compared, where the model's configuration names no limit below it."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention interface: shapes of the keys and values, and what the call says about masking."""

    layer: int | None
    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device
    sliding_window: int | None
    mask: Callable[..., torch.Tensor] | None
    """transformers' function of (batch, head, query position, key position); None: there is none."""
    own_mask: bool
    """Whether the layer made a mask tensor by itself."""
    tensors: tuple[str, ...]
    """Names of keyword arguments that hold tensors and mean something we do not implement (sinks, biases, indices)."""
    has_context: bool


@dataclass
class _Recorder:
    calls: list[AttentionCall] = field(default_factory=list)
    masks: dict[int, Callable[..., torch.Tensor]] = field(default_factory=dict)
    _markers: list[torch.Tensor] = field(default_factory=list)

    def mask(self, function: Callable[..., torch.Tensor], device: torch.device | None) -> torch.Tensor:
        """A placeholder that identifies the mask when it arrives with an attention call."""
        # Of bool, since FSDP2 would exchange a float for another tensor on its way into a layer.
        marker = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool, device=device)
        self._markers.append(marker)  # else its address might be used again
        self.masks[marker.untyped_storage().data_ptr()] = function
        return marker

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        named: dict[str, Any],
    ) -> torch.Tensor:
        known = None
        if isinstance(mask, torch.Tensor):
            known = self.masks.get(mask.untyped_storage().data_ptr())
        layer = getattr(module, "layer_idx", None)
        self.calls.append(
            AttentionCall(
                layer=None if layer is None else int(layer),
                kv_heads=k.shape[1],
                key_size=k.shape[3],
                value_size=v.shape[3],
                dtype=k.dtype,
                device=k.device,
                sliding_window=named["sliding_window"],
                mask=known,
                own_mask=known is None and mask is not None,
                tensors=tuple(
                    name
                    for name, value in named.items()
                    if isinstance(value, torch.Tensor)
                    and name not in _HARMLESS
                    and not name.startswith("cu_seq")
                ),
                has_context=named["verl_attn"] is not None,
            )
        )
        return v.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


@torch.no_grad()
def attention_calls(model: nn.Module, backbone: nn.Module) -> list[AttentionCall]:
    """The calls of one forward pass, in order. The model uses our attention ("verl")."""
    device = model.get_input_embeddings().weight.device  # type: ignore[operator]
    ids = torch.arange(3, 3 + TOKENS, device=device)[None]
    recorder = _Recorder()
    with observe_attention(recorder):
        backbone(input_ids=ids, use_cache=False, verl_attn="observed")
    return recorder.calls


def attention_fault(calls: Sequence[AttentionCall], config: Any) -> str | None:
    """Why our attention cannot replace the model's, or None as far as the calls tell."""
    if not calls:
        return "its layers do not call transformers' attention interface"
    if not all(call.has_context for call in calls):
        return "its layers do not pass keyword arguments on to their attention"
    others = sorted({name for call in calls for name in call.tensors})
    if others:
        return f"its attention takes more than queries, keys and values ({', '.join(others)})"
    for call in calls:
        if call.own_mask:
            return f"layer {call.layer} computes its own attention mask"
    longest = min(int(getattr(config, "max_position_embeddings", None) or _LONGEST), _LONGEST)
    for call in calls:
        if call.mask is not None and not _same_mask(call, longest):
            window = "" if call.sliding_window is None else f" within {call.sliding_window} tokens"
            return f"layer {call.layer} masks attention otherwise than causally{window}"
    return None


def _same_mask(call: AttentionCall, longest: int) -> bool:
    """Whether the last position sees exactly the earlier ones within the window that the attention call names."""
    assert call.mask is not None
    with call.device:  # a mask may have tensors of its own
        nothing, last, places = torch.tensor(0), torch.tensor(longest - 1), torch.arange(longest + 1)
    try:
        theirs = call.mask(nothing, nothing, last, places).expand(longest + 1)
    except IndexError:  # it looks at the tokens of this very batch and knows no others
        return True
    ours = places <= last
    if call.sliding_window is not None:
        ours &= places > last - call.sliding_window
    return bool((theirs == ours).all())
