"""The Python API: the model that is handed in learns, its copies do not; a dataloader of one's own."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl import DataProto, GRPOTrainer, PPOTrainer
from verl.config.sections.data import DataConfig
from verl.errors import ConfigError, DataError
from verl.trainer import TrainingConfig
from verl.trainer.external_batches import ExternalLoader
from verl.trainer.loop import RLLoop
from verl.workers import RolloutWorker, TrainerWorker
from verl.workers.local import LocalGroup


def reward(response: str, prompt: str) -> float:
    return len(set(response.split())) / 4


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("trainer", [PPOTrainer, GRPOTrainer])
def test_the_model_handed_in_learns_and_its_reference_does_not(
    trainer, tiny_model_dir, tiny_tokenizer, tmp_path, monkeypatch
):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    before, untouched = weights(model), copy.deepcopy(model)
    groups, make = [], LocalGroup.__init__

    def watched(self, *arguments, **more):
        make(self, *arguments, **more)
        groups.append(self)

    monkeypatch.setattr(LocalGroup, "__init__", watched)
    batches, step = [], RLLoop.step

    def kept(self):
        metrics = step(self)
        batches.append(self.batch)
        return metrics

    monkeypatch.setattr(RLLoop, "step", kept)
    config = TrainingConfig(
        batch_size=4,
        n=4,
        learning_rate=3e-3,
        kl_coef=0.01,
        max_prompt_length=16,
        max_response_length=4,
        mini_batch_size=2,
        temperature=0.9,
        device="cpu",
        output_dir=str(tmp_path / "run"),
        overrides={"trainer.logger": [], "reward.in_process": True, "critic.optim.lr": 1e-2},
    )
    data = [[f"repeat {digit}" for digit in range(start, start + 4)] for start in (0, 4)]
    result = trainer(model, tiny_tokenizer, config, reward_function=reward).train(data)
    assert result.steps == 2 and len(batches) == 2
    (group,) = groups
    assert group.cfg.actor_rollout_ref.rollout.temperature == 0.9
    assert any(not torch.equal(value, before[name]) for name, value in weights(model).items())
    with group.actor_engine.weights().structure() as module:
        assert module is model, "no copy learns in its place"
    with group.engines()["ref"].weights().structure() as module:
        reference = weights(module)
    assert all(torch.equal(value, reference[name]) for name, value in before.items())
    if trainer is PPOTrainer:
        ours = {value.data_ptr() for value in model.parameters()}
        with group.engines()["critic"].weights().structure() as module:
            assert ours.isdisjoint(value.data_ptr() for value in module.parameters())
        assert group.cfg.algorithm.use_kl_in_reward and group.cfg.algorithm.kl_ctrl.kl_coef == 0.01
    else:
        actor = group.cfg.actor_rollout_ref.actor
        assert actor.use_kl_loss and actor.kl_loss_coef == 0.01
    t = batches[1].batch
    ids, attended, width = t["input_ids"], t["attention_mask"], t["responses"].shape[1]
    with torch.no_grad():
        logits = untouched(
            input_ids=ids, attention_mask=attended, position_ids=(attended.cumsum(-1) - 1).clamp(min=0)
        ).logits
    each = (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(t["ref_log_prob"], each[:, -width:] * t["response_mask"], atol=1e-5, rtol=0)


def loader(batches, tokenizer) -> ExternalLoader:
    return ExternalLoader(batches, DataConfig(max_prompt_length=16, truncation="left"), tokenizer)


def texts(batch: DataProto) -> list[str]:
    return [str(prompt) for prompt in batch.non_tensor_batch["raw_prompt"]]


def test_a_given_dataloader_goes_on_where_it_stood(tiny_tokenizer):
    batches = [["repeat 1"], ["repeat 2"], ["repeat 3"]]
    whole = loader(batches, tiny_tokenizer)
    first_epoch = [texts(batch) for batch in whole]
    assert first_epoch == batches and (whole.epoch, whole.position, whole.last_epoch) == (1, 0, 0)
    start = loader(batches, tiny_tokenizer)
    taken = iter(start)
    first = next(taken)
    assert (start.epoch, start.position) == (0, 1)
    rest = loader(batches, tiny_tokenizer)
    rest.load_state_dict(start.state_dict())
    assert [texts(batch) for batch in rest] == batches[1:]
    assert [texts(batch) for batch in rest] == batches, "and then the next epoch, whole"
    assert (rest.epoch, rest.last_epoch) == (2, 1)
    again = list(loader(batches, tiny_tokenizer))
    assert first.non_tensor_batch["uid"][0] == again[0].non_tensor_batch["uid"][0]
    uids = {uid for batch in again for uid in batch.non_tensor_batch["uid"]}
    assert len(uids) == 3


@pytest.mark.parametrize("said", [2, 4])
def test_a_dataloader_that_miscounts_itself_is_refused(tiny_tokenizer, said):
    class Wrong:
        def __len__(self) -> int:
            return said

        def __iter__(self):
            return iter([["repeat 1"], ["repeat 2"], ["repeat 3"]])

    with pytest.raises(DataError, match=rf"len\(dataloader\) is {said}, but it yielded 3"):
        list(loader(Wrong(), tiny_tokenizer))


@pytest.mark.parametrize(("given", "raw", "kept"), [(0.6, False, 0.6), (0.6, True, 1.0), (0.0, False, 1.0)])
def test_a_rollout_worker_says_which_distribution_its_log_probs_are_of(
    tiny_model_dir, tiny_tokenizer, given, raw, kept
):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    worker = RolloutWorker(
        model,
        tokenizer=tiny_tokenizer,
        temperature=given,
        max_response_length=4,
        overrides={"actor_rollout_ref.rollout.raw_log_probs": raw},
    )
    out = worker.generate(["repeat 1", "repeat 2"])
    assert out.meta_info["temperature"] == kept


def test_a_rollout_worker_uses_the_weights_that_its_model_has_now(tiny_model_dir, tiny_tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    worker = RolloutWorker(model, tokenizer=tiny_tokenizer, max_response_length=4)
    even = -math.log(model.get_input_embeddings().num_embeddings)
    drawn = [worker.generate(["repeat 1"]).batch]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # all tokens are then equally likely
    drawn.append(worker.generate(["repeat 1"]).batch)
    before, after = (batch["rollout_log_probs"][batch["response_mask"].bool()] for batch in drawn)
    assert (before - even).abs().max() > 1e-3
    torch.testing.assert_close(after, torch.full_like(after, even))


@pytest.mark.parametrize(("trainer", "n"), [(PPOTrainer, 1), (GRPOTrainer, 8)])
def test_the_few_numbers_reach_the_config(tiny_model_dir, tiny_tokenizer, trainer, n, caplog):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    given = TrainingConfig(
        total_epochs=3,
        batch_size=6,
        learning_rate=2e-5,
        ppo_epochs=4,
        clip_range=0.3,
        kl_coef=0.0,
        mini_batch_size=3,
        max_prompt_length=33,
        max_response_length=44,
        temperature=0.6,
        seed=9,
        device="cpu",
        output_dir="somewhere",
        overrides={"algorithm.gamma": 0.9, "rollout.temperature": 0.7},
    )
    cfg = trainer(model, tiny_tokenizer, given).run_config()
    actor, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    assert (cfg.data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_epochs) == (6, 3, 4)
    assert (actor.optim.lr, actor.clip_ratio) == (2e-5, 0.3)
    assert (cfg.data.max_prompt_length, cfg.data.max_response_length) == (33, 44)
    assert (cfg.trainer.total_epochs, cfg.trainer.seed, cfg.trainer.device) == (3, 9, "cpu")
    assert cfg.trainer.default_local_dir == "somewhere" and cfg.trainer.resume_mode == "disable"
    assert (rollout.n, rollout.temperature, cfg.algorithm.gamma) == (n, 0.7, 0.9), "overrides win"
    assert not cfg.algorithm.use_kl_in_reward and not actor.use_kl_loss, "a weight of 0 needs no reference"
    assert "kl_" not in caplog.text, "keys that nobody wrote are not warned about"
    plain = trainer(model, tiny_tokenizer, TrainingConfig(batch_size=6, n=4, device="cpu")).run_config()
    assert plain.actor_rollout_ref.actor.ppo_mini_batch_size == 6, "the whole batch"
    assert plain.actor_rollout_ref.rollout.n == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("worker", [RolloutWorker, TrainerWorker])
def test_a_gpu_that_is_not_there_is_said(worker, tiny_model_dir, tiny_tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    extra = {"tokenizer": tiny_tokenizer} if worker is RolloutWorker else {}
    with pytest.raises(ConfigError, match="device='cuda:0'.*no GPU.*device='cpu'"):
        worker(model, device="cuda:0", **extra)


@pytest.mark.slow(seconds=10)
def test_a_second_worker_trains_the_model_of_a_first(tiny_model_dir, tiny_tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    first = TrainerWorker(model, reward_function=reward)
    second = TrainerWorker(model, reward_function=reward)
    rollout = RolloutWorker(model, tokenizer=tiny_tokenizer, n=4, max_response_length=4)
    before = weights(model)
    for worker in (second, first):
        assert "actor/pg_loss" in worker.train_step(rollout.generate(["a b"] * 2))
    assert any(not torch.equal(before[name], value) for name, value in weights(model).items())
