"""The implicit reward model as a role on a real engine: what it learns, from what, and that cuts do not show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verl.config.roles import find_role
from verl.config.schema import ImplicitRewardConfig, ModelConfig, OptimConfig
from verl.data.proto import DataProto
from verl.engines import build_engine
from verl.engines.base import ModelOutput
from verl.errors import ModelError
from verl.workers.implicit_reward import ImplicitRewardRole
from verl.workers.roles import StartRole

VOCAB, PROMPT, WIDTH = 25, 2, 6


@pytest.fixture(scope="module")
def flat_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model that finds all tokens nearly equally likely."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("flat") / "model"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def build(folder: Path, *, lr: float = 3e-3, lora_rank: int = 0, tokens: int = VOCAB, **keys: Any):
    model = ModelConfig(path=str(folder), lora_rank=lora_rank)
    cfg = ImplicitRewardConfig(model=model, optim=OptimConfig(lr=lr), **keys)
    return Trained(cfg, tokens)


class Trained(ImplicitRewardRole):
    """The role, connected to its start as a worker group does it."""

    def __init__(self, cfg: ImplicitRewardConfig, tokens: int) -> None:
        options: dict[str, Any] = {"device": torch.device("cpu"), "log_prob_cfg": cfg, "total_steps": 100}
        super().__init__(build_engine("actor", cfg.model, cfg, **options), cfg)
        no_config: Any = None
        self.connect(find_role("implicit_reward"), no_config, {}, tokens)
        own = self.engine if cfg.model.lora_rank else build_engine("ref", cfg.model, cfg, **options)
        self.start = StartRole(own, cfg)
        row = find_role("implicit_reward_start")
        self.start.connect(row, no_config, {"implicit_reward": self}, tokens)

    def start_log_probs(self, batch: DataProto) -> torch.Tensor:
        return self.start.forward(batch, ["start_log_prob"])["start_log_prob"]

    def scores(self, batch: DataProto) -> torch.Tensor:
        return self.forward(batch, ["process_rewards"])["process_rewards"]


def responses(role: Trained, planted: torch.Tensor, rows: int, generator: Any, *, ragged=False):
    """Random tokens; a response is right where the planted rewards of its tokens sum to more than 0."""
    ids = torch.randint(3, VOCAB, (rows, PROMPT + WIDTH), generator=generator)
    mask = torch.ones(rows, WIDTH, dtype=torch.long)
    if ragged:
        mask = (torch.arange(WIDTH) < torch.randint(1, WIDTH + 1, (rows, 1), generator=generator)).long()
        mask[1] = 0  # its reward function failed
    attention = torch.cat([torch.ones(rows, PROMPT, dtype=torch.long), mask], -1)
    right = ((planted[ids[:, PROMPT:]] * mask).sum(-1) > 0).long()
    tensors = {"input_ids": ids, "attention_mask": attention, "response_mask": mask, "outcome": right}
    batch = DataProto.from_dict(tensors=tensors)
    batch.batch["start_log_prob"] = role.start_log_probs(batch)
    return batch


def rank_correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    ranks = [np.unique(values.numpy(), return_inverse=True)[1] for values in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1])


def test_it_recovers_a_planted_token_reward_from_outcomes_alone(flat_model_dir):
    role = build(flat_model_dir, beta=2.0)
    generator = torch.Generator().manual_seed(1)
    planted = torch.randn(VOCAB, generator=generator)
    untrained = role.scores(responses(role, planted, 16, generator))
    assert torch.equal(untrained, torch.zeros_like(untrained)), "at its start it is its start"
    for _ in range(40):
        metrics = role.train(responses(role, planted, 64, generator))
    unseen = responses(role, planted, 256, generator)
    found = role.scores(unseen)
    wanted = planted[unseen.batch["input_ids"][:, PROMPT:]]
    assert rank_correlation(found.flatten(), wanted.flatten()) > 0.9
    right = (found.sum(-1) > 0) == unseen.batch["outcome"].bool()
    assert right.double().mean() > 0.85
    assert float(metrics["implicit_reward/accuracy"].value) > 0.8
    assert float(metrics["implicit_reward/loss"].value) < 0.5


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_training_leaves_the_start_as_it_was(tiny_model_dir, lora_rank):
    """With adapters there is no second copy of the weights."""
    role = build(tiny_model_dir, lr=1e-2, lora_rank=lora_rank, beta=0.5)
    assert (role.start.engine is role.engine) == (lora_rank > 0)
    generator = torch.Generator().manual_seed(2)
    planted = torch.randn(VOCAB, generator=generator)
    batch = responses(role, planted, 32, generator)
    before = batch.batch["start_log_prob"].clone()
    losses = [float(role.train(batch)["implicit_reward/loss"].value) for _ in range(8)]
    assert losses[0] == pytest.approx(np.log(2), rel=1e-5) and losses[-1] < 0.9 * losses[0]
    assert torch.equal(role.start_log_probs(batch), before)
    assert not torch.allclose(role.engine.log_probs(batch)["log_probs"], before, atol=1e-2)


def reference_gradient(folder: Path, batch: DataProto, beta: float) -> dict[str, torch.Tensor]:
    """Autograd through transformers in float64, row by row."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    losses = []
    for row in range(len(batch)):
        mask = batch.batch["response_mask"][row].bool()
        if not mask.any():
            continue
        ids = batch.batch["input_ids"][row : row + 1, : PROMPT + int(mask.sum())]
        logs = model(ids).logits[0, PROMPT - 1 : -1].log_softmax(-1)
        log_prob = logs.gather(-1, ids[0, PROMPT:].unsqueeze(-1)).squeeze(-1)
        z = beta * (log_prob - batch.batch["start_log_prob"][row][mask].double()).sum()
        losses.append(-torch.nn.functional.logsigmoid(z if batch.batch["outcome"][row] else -z))
    torch.stack(losses).mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_loss_and_gradient_do_not_depend_on_micro_batches(tiny_model_dir):
    """The first moment after one step is a tenth of the gradient."""
    cuts: list[dict[str, Any]] = [
        {"ppo_micro_batch_size_per_gpu": 16},
        {"ppo_micro_batch_size_per_gpu": 1},
        {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 20},
    ]
    for cut in cuts:
        role = build(tiny_model_dir, beta=0.7, grad_clip=0.0, **cut)
        generator = torch.Generator().manual_seed(3)
        planted = torch.randn(VOCAB, generator=generator)
        batch = responses(role, planted, 11, generator, ragged=True)
        # A start that is not the model itself, so that the logits are not all 0.
        noise = torch.randn(batch.batch["start_log_prob"].shape, generator=generator)
        batch.batch["start_log_prob"] += noise * batch.batch["response_mask"]
        metrics = role.train(batch)
        moments = role.engine.state()["optimizer"]["exp_avg"]
        wanted = reference_gradient(tiny_model_dir, batch, 0.7)
        assert set(moments) <= set(wanted) and len(moments) > 10
        norm = sum(float(gradient.square().sum()) for gradient in wanted.values()) ** 0.5
        assert float(metrics["implicit_reward/grad_norm"].value) == pytest.approx(norm, rel=1e-4)
        for name, moment in moments.items():
            torch.testing.assert_close(10 * moment.double(), wanted[name], rtol=1e-3, atol=1e-5 * norm)


def test_ranks_and_micro_batches_add_up_to_the_whole():
    """In float64: the mean over ranks of the sums of their micro-batches' losses; the same for metrics."""
    engine: Any = None  # the loss needs none
    role = ImplicitRewardRole(engine, ImplicitRewardConfig(beta=0.4))
    generator = torch.Generator().manual_seed(4)
    rows = 9
    mask = (torch.arange(WIDTH) < torch.randint(0, WIDTH + 1, (rows, 1), generator=generator)).long()
    mask[0], mask[1] = 0, 1
    whole = {
        "response_mask": mask,
        "outcome": torch.arange(rows) % 2,
        "start_log_prob": -torch.rand(rows, WIDTH, generator=generator, dtype=torch.float64),
    }
    log_prob = -torch.rand(rows, WIDTH, generator=generator, dtype=torch.float64)
    counted = int(mask.bool().any(-1).sum())

    def run(ranks: list[list[list[int]]]) -> tuple[torch.Tensor, float, float]:
        leaf, total, accuracy = log_prob.clone().requires_grad_(), 0.0, 0.0
        info = {"dp_size": len(ranks), "global_batch_size": counted}
        for cut in [cut for rank in ranks for cut in rank]:
            tensors = {name: tensor[cut] for name, tensor in whole.items()}
            micro = DataProto.from_dict(tensors=tensors, meta_info=info)
            loss, metrics = role.loss(ModelOutput(log_probs=leaf[cut]), micro)
            (loss / len(ranks)).backward()  # as averaging over ranks does
            total += float(metrics["implicit_reward/loss"].value)
            right = metrics["implicit_reward/accuracy"]
            accuracy += float(right.value) * float(right.weight) / counted
        assert leaf.grad is not None
        return leaf.grad, total, accuracy

    once = run([[list(range(rows))]])
    for ranks in ([[[8, 0], [3]], [[1, 2, 7], [4, 5, 6]]], [[[row] for row in range(rows)]]):
        for mine, one in zip(run(ranks), once, strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-12, atol=1e-12)


def test_a_model_with_fewer_tokens_than_the_policy_is_refused(flat_model_dir):
    with pytest.raises(
        ModelError, match=r"implicit_reward.model.path=.*25 tokens, fewer than the policy's 26"
    ):
        build(flat_model_dir, tokens=26)
