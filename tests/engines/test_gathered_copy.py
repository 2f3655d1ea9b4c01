"""The copy of a model that generates while the model itself is sharded; what it computes is tested with real ranks."""

from __future__ import annotations

import logging
import threading

import torch

from verl.engines.weights import copy_to_meta
from verl.models.lora import add_lora
from verl.models.packing import FORWARD_METHODS, attach


def test_a_copy_has_the_classes_and_ties_of_the_model_and_none_of_its_weights(tools):
    model = tools.model(tie_word_embeddings=True)
    add_lora(model, rank=2, alpha=4, target_modules=["q_proj"])
    attach(model)
    copied = copy_to_meta(model)
    assert [type(part) for part in copied.modules()] == [type(part) for part in model.modules()]
    assert all(param.is_meta for param in copied.parameters())
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    for (name, own), (_, theirs) in zip(copied.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(own, theirs) and own is not theirs, name
    adapted = copied.model.layers[0].self_attn.q_proj
    assert adapted.forward.__self__ is adapted, "a method bound to the model would compute with its shards"
    assert getattr(copied, FORWARD_METHODS[0]).__self__ is copied


def test_a_model_that_cannot_be_copied_is_named(tools, caplog):
    model = tools.model()
    model.lock = threading.Lock()
    with caplog.at_level(logging.WARNING):
        assert copy_to_meta(model) is None
    assert "LlamaForCausalLM cannot be copied" in caplog.text and "lock" in caplog.text
