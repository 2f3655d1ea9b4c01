"""A Session on two ranks beside one in this process: the same draws, numbers, updates and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import verl
from verl.algorithms import agg_loss
from verl.data.proto import DataProto
from verl.errors import ConfigError

pytestmark = [pytest.mark.components, pytest.mark.timeout(900)]

PROMPTS = ["repeat 1", "repeat 2 3", "sum 4 5"]


def squares(log_probs: torch.Tensor, batch: DataProto) -> torch.Tensor:
    return log_probs.square() * batch.batch["weight"][:, None]


def of_rows(log_probs: torch.Tensor, batch: DataProto) -> torch.Tensor:
    return -log_probs.sum(-1) * batch.batch["weight"]


def share(log_probs: torch.Tensor, batch: DataProto) -> torch.Tensor:
    return agg_loss(-log_probs, batch.batch["response_mask"], "token-mean")


def open_session(model: Any, **overrides: Any) -> verl.Session:
    keys = {"data.max_response_length": 4, **overrides}
    return verl.Session(model, device="cpu", lr=3e-3, overrides=keys)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_two_ranks_do_what_one_process_does(joined, tiny_model_dir: Path, tmp_path: Path) -> None:
    two, one = open_session(tiny_model_dir, **{"trainer.n_gpus_per_node": 2}), open_session(tiny_model_dir)
    try:
        for loss in ("vanilla", "clip_cov", "cross_entropy", squares, of_rows, share):
            ours, theirs = two.sample(PROMPTS, n=3), one.sample(PROMPTS, n=3)
            assert torch.equal(ours.batch["responses"], theirs.batch["responses"])
            for batch in (ours, theirs):
                batch.batch["advantages"] = torch.linspace(-1, 1, len(batch))
                batch.batch["weight"] = torch.linspace(0.5, 1, len(batch))
            found, expected = two.forward_backward(ours, loss), one.forward_backward(theirs, loss)
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), loss
            found, expected = two.optim_step(), one.optim_step()
            for name in ("actor/grad_norm", "actor/lr", "actor/skipped_updates"):
                assert found[name] == pytest.approx(expected[name], rel=1e-4), (loss, name)
            same(two.log_probs(ours), one.log_probs(theirs))
        same(two.log_probs(ours, reference=True), one.log_probs(theirs, reference=True))
        two.forward_backward(ours, squares)
        two.zero_grad()
        assert two.save(tmp_path).name == "global_step_6"
        with open_session(tiny_model_dir) as loaded:
            assert loaded.load(tmp_path) == 6
            same(loaded.log_probs(ours), two.log_probs(ours))
        two.forward_backward(ours, "cross_entropy")
        two.optim_step()
        assert two.load(tmp_path) == 6 and two.step == 6
        same(two.log_probs(ours), one.log_probs(ours))
    finally:
        two.close()
        one.close()


def test_an_object_cannot_learn_in_place_on_several_processes(tiny_model_dir: Path, tiny_tokenizer) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with pytest.raises(
        ConfigError, match=r"a session on 2 processes cannot train the object .* give the model's"
    ):
        open_session(model, **{"trainer.n_gpus_per_node": 2})
