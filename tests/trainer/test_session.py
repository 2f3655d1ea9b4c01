"""Session: its verbs are those of the training loop, and their results do not depend on how work is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import verl
from tests.tiny_run import tiny_run
from verl.data.proto import DataProto
from verl.errors import CheckpointError, ConfigError, DataError, VerlError
from verl.trainer.session import Session

PROMPTS = ["repeat 1", "repeat 2 3", "sum 4 5"]
LR = 3e-3
Open = Callable[..., Session]


@pytest.fixture
def session(tiny_model_dir: Path) -> Iterator[Open]:
    """Opens sessions on the tiny model and closes them."""
    opened: list[Session] = []

    def make(model: Any = None, **options: Any) -> Session:
        keys = {"data.max_response_length": 4, **options.pop("overrides", {})}
        options = {"device": "cpu", "lr": LR, **options}
        opened.append(verl.Session(model or tiny_model_dir, overrides=keys, **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def weights(session: Session) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in session._group.actor_engine.state()["model"].items()}


def gradients(session: Session) -> dict[str, torch.Tensor]:
    return session._group.actor_engine._optimizer.gradient_snapshot()  # type: ignore[attr-defined]


def sampled(session: Session, n: int = 4) -> DataProto:
    """Rows with advantages that differ."""
    batch = session.sample(PROMPTS, n=n)
    batch.batch["advantages"] = torch.linspace(-1, 1, len(batch))
    return batch


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], **close: float) -> None:
    assert left.keys() == right.keys() and left
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], msg=lambda text, name=name: f"{name}: {text}", **close)


EXACT = {"atol": 0.0, "rtol": 0.0}


# -- against the loop ------------------------------------------------------------------------------------------------


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("loss", ["vanilla", "clip_cov"])
def test_a_step_of_a_session_is_a_step_of_the_training_loop(
    loss: str,
    session: Open,
    tiny_model_dir: Path,
    digits_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from verl.config.load import load_ppo_config
    from verl.trainer.loop import RLLoop
    from verl.trainer.main_ppo import run

    loops: list[RLLoop] = []
    fit = RLLoop.fit
    monkeypatch.setattr(RLLoop, "fit", lambda loop: (loops.append(loop), fit(loop))[1])
    policy = "actor_rollout_ref.actor.policy_loss"
    # Many of the tokens that clip_cov draws among, or it would be vanilla here.
    keys = {f"{policy}.clip_cov_ratio": 0.3, f"{policy}.clip_cov_lb": -5.0, f"{policy}.clip_cov_ub": 5.0}
    more = (
        "trainer.total_training_steps=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.skip_zero_advantage=False",  # a session computes what it is given
        f"{policy}.loss_mode={loss}",
        *(f"{name}={value}" for name, value in keys.items()),
    )
    result = run(load_ppo_config(tiny_run(tiny_model_dir, digits_data, *more, folder=tmp_path / "run")))
    batch = loops[0].batch
    assert batch is not None
    ours = session(overrides=keys)
    # The same prompts under the same names, drawn as the loop's first step draws them.
    once = batch[list(range(0, len(batch), 4))]
    prompts = DataProto({}, {name: once.non_tensor_batch[name] for name in ("uid", "prompt_ids")}, {})
    drawn = ours.sample(prompts, n=4)
    assert torch.equal(drawn.batch["input_ids"], batch.batch["input_ids"])
    torch.testing.assert_close(drawn.batch["rollout_log_probs"], batch.batch["rollout_log_probs"])
    drawn.batch["advantages"] = batch.batch["advantages"]
    assert drawn.batch["advantages"].any()
    metrics = {**ours.forward_backward(drawn, loss), **ours.optim_step()}
    for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/lr"):
        assert metrics[name] == pytest.approx(result.metrics[name], rel=1e-6, abs=1e-9), name
    assert loss == "vanilla" or metrics["actor/cov_share"] > 0.1
    exported = AutoModelForCausalLM.from_pretrained(result.folder / "global_step_1" / "actor" / "huggingface")
    kept = {name: value for name, value in exported.state_dict().items() if name in weights(ours)}
    assert_same(kept, weights(ours), **EXACT)


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "cross_entropy"])
def test_parts_of_a_batch_add_up_to_the_batch(session: Open, loss: str) -> None:
    ours = session()
    batch = sampled(ours)
    whole = ours.forward_backward(batch, loss)
    expected = gradients(ours)
    ours.zero_grad()
    parts = [batch[:5], batch[5:6], batch[6:]]
    found = [ours.forward_backward(part, loss, of=batch) for part in parts]
    assert_same(gradients(ours), expected, atol=1e-7, rtol=1e-4)
    name = "actor/loss" if loss == "cross_entropy" else "actor/pg_loss"
    assert sum(each[name] for each in found) == pytest.approx(whole[name], abs=1e-6)
    ours.zero_grad()
    ours.forward_backward(parts[0], loss)
    with pytest.raises(AssertionError):
        assert_same(gradients(ours), expected, atol=1e-7, rtol=1e-4)


def token_losses(log_probs: torch.Tensor, batch: DataProto) -> torch.Tensor:
    return -batch.batch["advantages"] * log_probs


def share(log_probs: torch.Tensor, batch: DataProto) -> torch.Tensor:
    mask = batch.batch["response_mask"]
    return (token_losses(log_probs, batch) * mask).sum() / batch.meta_info["batch_num_tokens"]


@pytest.mark.parametrize("micro", [1, 5])
def test_a_function_is_the_named_loss_whatever_the_micro_batches(session: Open, micro: int) -> None:
    # On fresh samples the ratio is 1: the gradient of vanilla is that of -advantage * log-prob.
    ours, other = (
        session(),
        session(overrides={"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": micro}),
    )
    batch = sampled(ours)
    batch.batch["advantages"] = batch.batch["advantages"][:, None] * batch.batch["response_mask"]
    ours.forward_backward(batch, "vanilla")
    expected = gradients(ours)
    for loss in ("vanilla", token_losses, share):
        other.forward_backward(batch, loss)
        assert_same(gradients(other), expected, atol=1e-7, rtol=1e-4)
        other.zero_grad()


def test_losses_of_sequences_are_averaged_over_those_of_the_whole_batch(session: Open) -> None:
    ours = session(overrides={"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2})
    batch = sampled(ours)
    batch.batch["response_mask"][3] = 0
    found = ours.forward_backward(batch, lambda log_probs, rows: -log_probs.sum(-1))["actor/loss"]
    log_probs = ours.log_probs(batch)
    assert found == pytest.approx(float(-log_probs.sum() / (len(batch) - 1)), rel=1e-5)


def test_cross_entropy_learns_given_answers(session: Open) -> None:
    ours = session(lr=1e-2)
    batch = ours.encode(PROMPTS, ["1", "2 3", "9"])
    assert batch.batch["response_mask"].sum(-1).tolist() == [2, 3, 2], "with the end token"
    losses = []
    for _ in range(20):
        losses.append(ours.forward_backward(batch, "cross_entropy")["actor/loss"])
        ours.optim_step()
    assert losses[0] > 1 and losses[-1] < 0.2
    assert ours.sample(PROMPTS, temperature=0).non_tensor_batch["response_text"].tolist() == ["1", "2 3", "9"]


def test_a_call_that_fails_leaves_no_gradients(session: Open) -> None:
    ours = session(overrides={"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1})
    batch, calls = sampled(ours), []

    def fails(log_probs: torch.Tensor, rows: DataProto) -> torch.Tensor:
        calls.append(len(rows))
        if len(calls) == 3:
            raise ValueError("third micro-batch")
        return -log_probs

    with pytest.raises(ValueError, match="third"):
        ours.forward_backward(batch, fails)
    assert not gradients(ours)
    with pytest.raises(VerlError, match="no gradients"):
        ours.optim_step()


# -- steps -----------------------------------------------------------------------------------------------------------


def test_sampling_uses_the_weights_of_the_last_step(session: Open) -> None:
    ours = session()
    batch = sampled(ours)
    before = ours.log_probs(batch)
    torch.testing.assert_close(batch.batch["rollout_log_probs"], before, atol=1e-5, rtol=0)
    ours.forward_backward(batch)
    metrics = ours.optim_step(lr=0.05)
    assert metrics["actor/lr"] == 0.05 and metrics["actor/skipped_updates"] == 0 and ours.step == 1
    after = ours.log_probs(batch)
    assert (after - before).abs().max() > 0.01
    again = ours.sample(PROMPTS, n=4)
    torch.testing.assert_close(again.batch["rollout_log_probs"], ours.log_probs(again), atol=1e-5, rtol=0)
    assert set(again.non_tensor_batch["policy_version"]) == {1}
    assert not set(again.non_tensor_batch["uid"]) & set(batch.non_tensor_batch["uid"])


def test_rows_are_ready_for_training(session: Open) -> None:
    ours = session()
    rows = [{"prompt": "repeat 7", "answer": "7"}, {"prompt": "repeat 8", "answer": "8"}]
    batch = ours.sample(rows, n=3, max_tokens=2, temperature=0.7)
    assert len(batch) == 6 and batch.meta_info["temperature"] == 0.7
    assert batch.batch["response_mask"].shape[1] <= 2
    assert batch.non_tensor_batch["ground_truth"].tolist() == ["7"] * 3 + ["8"] * 3
    uids = batch.non_tensor_batch["uid"].tolist()
    assert uids[0] == uids[2] != uids[3] == uids[5]
    assert all(isinstance(text, str) for text in batch.non_tensor_batch["response_text"])
    torch.testing.assert_close(batch.batch["rollout_log_probs"], ours.log_probs(batch), atol=1e-5, rtol=0)
    first, second = (ours.sample(rows, n=3, seed=5).batch["responses"] for _ in range(2))
    assert first.shape == second.shape and not torch.equal(ours.sample(rows, n=3).batch["responses"], first)


@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_stays_at_the_start(session: Open, rank: int) -> None:
    ours = session(lora_rank=rank)
    batch = sampled(ours)
    start = ours.log_probs(batch)
    ours.forward_backward(batch)
    ours.optim_step(lr=0.05)
    assert (ours.log_probs(batch) - start).abs().max() > 1e-3
    torch.testing.assert_close(ours.log_probs(batch, reference=True), start, atol=1e-6, rtol=0)


def test_a_model_given_as_an_object_learns_in_place(session: Open, tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    attention = model.config._attn_implementation
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ours = session(model, reference=True)
    batch = sampled(ours)
    start = ours.log_probs(batch)
    ours.forward_backward(batch)
    ours.optim_step()
    torch.testing.assert_close(ours.log_probs(batch, reference=True), start, atol=1e-6, rtol=0)
    ours.close()
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config._attn_implementation == attention
    other = session(model)
    with pytest.raises(ConfigError, match="reference=True"):
        other.log_probs(batch, reference=True)


def test_an_optimizer_of_ones_own_takes_the_step_and_is_saved(
    session: Open, tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    ours = session(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), overrides=NO_CLIP)
    batch = sampled(ours)
    ours.forward_backward(batch)
    step, start = gradients(ours), weights(ours)
    with pytest.raises(ConfigError, match="param_groups"):
        ours.optim_step(lr=0.1)
    assert ours.optim_step()["actor/lr"] == 0.5
    moved = weights(ours)
    assert_same({name: start[name] - 0.5 * grad for name, grad in step.items()}, {n: moved[n] for n in step})
    ours.close()
    pair = []
    for _ in range(2):
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
        pair.append(session(model, optimizer=torch.optim.AdamW(model.parameters(), lr=LR)))
    one_step(pair[0])
    pair[0].save(tmp_path)
    assert pair[1].load(tmp_path) == 1
    for each in pair:
        one_step(each)
    assert_same(weights(pair[0]), weights(pair[1]), **EXACT)


NO_CLIP = {"actor_rollout_ref.actor.grad_clip": 0.0}


# -- checkpoints -----------------------------------------------------------------------------------------------------


def one_step(session: Session) -> DataProto:
    batch = sampled(session)
    session.forward_backward(batch)
    session.optim_step()
    return batch


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("rank", [0, 4])
def test_a_loaded_session_continues_as_if_it_had_never_stopped(
    session: Open, tmp_path: Path, rank: int
) -> None:
    schedule = {
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
        "trainer.total_training_steps": 6,
    }
    first = session(lora_rank=rank, overrides=schedule)
    for _ in range(2):
        one_step(first)
    saved = first.save(tmp_path)
    assert saved == tmp_path / "global_step_2"
    expected = [one_step(first) for _ in range(2)]
    second = session(lora_rank=rank, overrides=schedule)
    assert second.load(tmp_path) == 2
    for batch in expected:
        again = one_step(second)
        assert torch.equal(again.batch["input_ids"], batch.batch["input_ids"])
        assert again.non_tensor_batch["uid"].tolist() == batch.non_tensor_batch["uid"].tolist()
    assert_same(weights(first), weights(second), **EXACT)
    third = session(lora_rank=rank, overrides=schedule)
    third.load(saved)
    plain = AutoModelForCausalLM.from_pretrained(saved / "actor" / "huggingface")
    ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"]
    with torch.no_grad():
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = plain(input_ids=ids, attention_mask=mask, position_ids=places).logits
    each = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    width = batch.batch["response_mask"].shape[1]
    torch.testing.assert_close(
        third.log_probs(batch), each[:, -width:] * batch.batch["response_mask"], atol=1e-5, rtol=0
    )


def test_going_back_to_an_earlier_checkpoint(session: Open, tmp_path: Path) -> None:
    ours = session()
    start = weights(ours)
    ours.save(tmp_path)
    batch = one_step(ours)
    ours.forward_backward(batch, "cross_entropy")
    assert ours.load(tmp_path / "global_step_0") == 0 and ours.step == 0
    assert_same(weights(ours), start, **EXACT)
    with pytest.raises(VerlError, match="no gradients"):
        ours.optim_step()
    again = ours.sample(PROMPTS, n=4)
    torch.testing.assert_close(again.batch["rollout_log_probs"], ours.log_probs(again), atol=1e-5, rtol=0)


def test_steps_of_an_earlier_session_are_not_taken_for_those_of_this_one(
    session: Open, tmp_path: Path
) -> None:
    earlier = session()
    for _ in range(2):
        one_step(earlier)
    earlier.save(tmp_path)
    ours = session()
    for _ in range(2):
        ours.save(tmp_path)
        one_step(ours)
    ours.save(tmp_path / "." / "")
    assert sorted(path.name for path in tmp_path.glob("global*")) == [
        "global_step_0",
        "global_step_1",
        "global_step_2",
        "global_step_2.earlier",
    ]
    assert session().load(tmp_path) == 2
    assert ours.load(tmp_path / "global_step_1") == 1
    ours.save(tmp_path)
    assert session().load(tmp_path) == 1  # step 2 was left behind by going back


# -- errors ----------------------------------------------------------------------------------------------------------


def test_wrong_calls_are_answered_in_one_line(session: Open, tmp_path: Path, tiny_model_dir: Path) -> None:
    ours = session()
    batch = ours.sample(PROMPTS, n=2)

    def says(match: str, call: Callable[[], object], kind: type[VerlError] = VerlError) -> None:
        with pytest.raises(kind, match=match) as caught:
            call()
        assert "\n" not in str(caught.value)

    says("needs advantages.*batch has: attention_mask", lambda: ours.forward_backward(batch), DataError)
    says("call forward_backward", ours.optim_step)
    says("'vanila' is unknown.*Did you mean 'vanilla'", lambda: ours.forward_backward(batch, "vanila"))
    says("'cross_entropi'.*'cross_entropy'", lambda: ours.forward_backward(batch, "cross_entropi"))
    says("is no checkpoint", lambda: ours.load(tiny_model_dir), CheckpointError)
    says("is not a folder", lambda: ours.load(tmp_path / "nowhere"), CheckpointError)
    says(r"at least 1 response", lambda: ours.sample(PROMPTS, n=0), ConfigError)
    says(r"returned \(3,\)", lambda: ours.forward_backward(batch, lambda x, rows: x.new_ones(3)))
    says("does not depend", lambda: ours.forward_backward(batch, lambda x, rows: x.detach().sum()))
    says("no 'response_mask'", lambda: ours.log_probs(batch.select(["input_ids", "attention_mask"])))
    batch.batch["advantages"] = torch.ones(len(batch), 99)
    says(r"advantages have the shape \[6, 99\]", lambda: ours.forward_backward(batch), DataError)
    batch.batch["advantages"] = torch.ones(len(batch))
    ours.forward_backward(batch)
    says("'vanila' is unknown", lambda: ours.forward_backward(batch, "vanila"))
    says("would lose the gradients of 1 ", lambda: ours.save(tmp_path))
    says("lr=-1", lambda: ours.optim_step(lr=-1.0))
    ours.optim_step()
    says("sampled at step 0 and this is step 1.*old_log_probs", lambda: ours.forward_backward(batch))
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    ours.forward_backward(batch)
    batch.batch["response_mask"] = torch.zeros_like(batch.batch["response_mask"])
    says("response_mask is 0", lambda: ours.forward_backward(batch), DataError)
    ours.close()
    says("closed", lambda: ours.sample(PROMPTS))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": 3}, "the model is 3; give a folder"),
        ({"model": "/nowhere"}, "/nowhere"),
        ({"overrides": {"trainer.save_freq": 5}}, "'trainer.save_freq', which a Session does not read"),
        ({"overrides": {"data.train_batch_size": 5}}, "'data.train_batch_size', which a Session does not"),
        ({"overrides": {"actor_rollout_ref.actor.clip_ration": 5}}, "actor_rollout_ref.actor.clip_ratio"),
        ({"lr": -1.0}, "actor_rollout_ref.actor.optim.lr"),
        ({"device": "gpu"}, "trainer.device"),
    ],
)
def test_a_session_that_cannot_work_is_not_opened(session: Open, options: dict[str, Any], says: str) -> None:
    with pytest.raises(VerlError, match=says):
        session(**options)
