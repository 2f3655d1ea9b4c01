"""Through the engine: every policy loss in every aggregation mode has one gradient, however the batch is cut."""

from __future__ import annotations

import copy

import pytest
import torch

from verl.algorithms import LOSS_AGG_MODES, get_policy_loss_fn, get_policy_loss_prepare
from verl.config.methods import POLICY_LOSS, builtin_names
from verl.config.schema import ActorConfig

CUTS = [{"ppo_micro_batch_size_per_gpu": 6}, {"ppo_micro_batch_size_per_gpu": 1}]
CUTS.append({"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 16})


class Config:
    """The actor section with the denominators a loss asks for."""

    def __init__(self, section, info):
        self._section, self.global_batch_info = section, info

    def __getattr__(self, name):
        return getattr(self._section, name)


def prepared_batch(tools, loss_mode, section, engine):
    batch = tools.batch(holes=True)
    logs = engine.log_probs(batch)["log_probs"]
    noise = torch.randn(logs.shape, generator=torch.Generator().manual_seed(3))
    batch.batch["old_log_probs"] = logs + 0.3 * noise
    prepare = get_policy_loss_prepare(loss_mode)
    if prepare is not None:
        found = prepare(
            old_log_prob=batch.batch["old_log_probs"],
            log_prob=logs,
            advantages=batch.batch["advantages"],
            response_mask=batch.batch["response_mask"],
            config=section,
            generator=torch.Generator().manual_seed(4),
        )
        batch.batch.update({f"prepared.{name}": value for name, value in found.items()})
    return batch


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize(
    "loss_mode",
    [
        name if name == "vanilla" else pytest.param(name, marks=pytest.mark.slow(seconds=1))
        for name in builtin_names(POLICY_LOSS, lambda method: not method.whole_groups)
    ],
)
def test_gradient_does_not_depend_on_the_cut(tools, loss_mode, mode):
    section = ActorConfig(loss_agg_mode=mode)
    section.policy_loss.loss_mode = loss_mode
    section.policy_loss.clip_cov_ratio = section.policy_loss.kl_cov_ratio = 0.2
    section.policy_loss.clip_cov_lb = -1.0
    loss_fn = get_policy_loss_fn(loss_mode)

    def loss(output, micro):
        tensors = micro.batch
        info = {key: micro.meta_info[key] for key in ("dp_size", "batch_num_tokens", "global_batch_size")}
        prepared = {k.removeprefix("prepared."): v for k, v in tensors.items() if k.startswith("prepared.")}
        return loss_fn(
            old_log_prob=tensors["old_log_probs"],
            log_prob=output.log_probs,
            advantages=tensors["advantages"],
            response_mask=tensors["response_mask"],
            loss_agg_mode=mode,
            config=Config(section, {**info, "loss_scale_factor": 7}),
            rollout_is_weights=None,
            kl=output.log_probs,
            **({"prepared": prepared} if prepared else {}),
        )

    model = tools.model(num_hidden_layers=1)
    found = []
    for cut in CUTS:
        engine = tools.engine(model=copy.deepcopy(model), role=cut)
        engine.forward_backward(prepared_batch(tools, loss_mode, section, engine), loss)
        found.append(torch.cat([gradient.flatten() for gradient in tools.gradients(engine).values()]))
    assert found[0].abs().max() > 1e-3
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5 * float(found[0].abs().max() + 1))
