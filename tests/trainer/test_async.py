"""Asynchronous modes through the real loop: equal to the synchronous one at staleness 0, exact at staleness 1, bounded
and exactly once in general, also after the run was cut off."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.async_run import BYPASS, MODE, POOL, STALENESS, assert_same, states, steps_in_order, trained
from tests.tiny_run import read_metrics, tiny_run, untimed
from tests.trainer.pool import PoolGroup, SharedEngine
from verl.config.load import load_ppo_config
from verl.reward.managers import FunctionRewardManager
from verl.trainer.experience import SyncExperience

LONG = ("data.max_response_length=48", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2")
STEPS = 4
SAVED = ("trainer.save_freq=1", "trainer.test_freq=2")

CARRY_OVER = (f"{MODE}=carry_over", BYPASS)
ONE_STEP = (f"{MODE}=one_step_off", BYPASS, *POOL)
FULLY = (f"{MODE}=fully_async", BYPASS, *POOL)
SGLANG = ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.mode=server")


class Cut(Exception):
    """The process ends here."""


@pytest.fixture
def fake_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in where Python, ours and the child's, looks for sglang."""
    tests = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(str(tests / "rollout/fake_sglang"))
    monkeypatch.setenv("PYTHONPATH", f"{tests}/rollout/fake_sglang:{tests.parent}")


@pytest.fixture
def go(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Run the loop; `within(loop)` is called when a step is complete. Returns the loop."""
    from verl.trainer import assembly
    from verl.trainer.loop import RLLoop
    from verl.trainer.main_ppo import run_once

    step, build = RLLoop.step, assembly.build_group

    def train(*extra: str, folder: str = "run", within: Any = None, prepare: Any = None) -> Any:
        found: list[Any] = []

        def watched(loop: Any) -> dict[str, float]:
            if not found:
                found.append(loop)
                if prepare is not None:
                    prepare(loop)
            metrics = step(loop)
            if within is not None:
                within(loop)
            return metrics

        def group(cfg: Any, tokenizer: Any, **rest: Any) -> Any:
            if not cfg.actor_rollout_ref.rollout.n_gpus_per_node:
                return build(cfg, tokenizer, **rest)
            return PoolGroup(cfg, tokenizer, training_steps=rest["training_steps"])

        with monkeypatch.context() as patch:
            patch.setattr(RLLoop, "step", watched)
            patch.setattr(assembly, "build_group", group)
            arguments = tiny_run(
                tiny_model_dir,
                digits_data,
                *LONG,
                f"data.val_files={digits_data}/val.jsonl",
                f"trainer.total_training_steps={STEPS}",
                *extra,
                folder=tmp_path / folder,
            )
            run_once(load_ppo_config(arguments), {}, model=None, live=False)
        return found[0]

    return train


@pytest.fixture
def in_order(tiny_model_dir: Path, digits_data: Path, tiny_tokenizer: Any) -> list[list[str]]:
    return steps_in_order(tiny_run(tiny_model_dir, digits_data, *LONG), tiny_tokenizer, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
def test_staleness_0_is_the_synchronous_run_bit_for_bit(go, tmp_path, mode):
    go(*SAVED, "actor_rollout_ref.actor.ppo_mini_batch_size=2", *POOL, folder="off")
    go(
        *SAVED,
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        *POOL,
        f"{MODE}={mode}",
        f"{STALENESS}=0",
        folder="on",
    )
    assert untimed(read_metrics(tmp_path / "off")) == untimed(read_metrics(tmp_path / "on"))
    assert trained(tmp_path / "off") == trained(tmp_path / "on")
    for step in range(1, STEPS + 1):
        assert_same(states(tmp_path / "off", step), states(tmp_path / "on", step))


class OldWeights(SyncExperience):
    """One step off-policy as a plain loop: batch t is drawn by the weights before update t-1, which are kept aside."""

    kept: list[torch.Tensor] | None = None

    def weights_changed(self, step: int) -> dict[str, float]:
        engine = self.workers.rollout
        with self.workers.actor_engine.weights().module() as module:
            now = [parameter.detach().clone() for parameter in module.parameters()]
        if self.kept is not None:
            with torch.no_grad():
                for mine, old in zip(engine.module.parameters(), self.kept, strict=True):
                    mine.copy_(old)
            engine.engine.update_weights(None, step - 1)
        self.kept = now
        return {}


@pytest.mark.slow(seconds=3)
def test_one_step_off_trains_every_batch_with_the_weights_before(go, tmp_path):
    def reference(loop: Any) -> None:
        old = loop.experience
        loop.experience = OldWeights(old.cfg, old.workers, old.rewards, old.tokenizer, old.loader)
        loop.experience.staleness = 1

    no_validation = ("data.val_files=[]", "trainer.save_freq=-1")
    go(*ONE_STEP, *no_validation, folder="mode")
    go(BYPASS, *POOL, *no_validation, folder="reference", prepare=reference)
    ours, theirs = (untimed(read_metrics(tmp_path / name)) for name in ("mode", "reference"))
    assert ours == theirs
    assert [row["training/age/max"] for row in ours] == [0.0] + [1.0] * (STEPS - 1)
    weights = [states(tmp_path / name, STEPS) for name in ("mode", "reference")]
    for name, value in weights[0].items():
        if isinstance(value, torch.Tensor) and "trainer_state" not in name:
            assert torch.equal(value, weights[1][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("mode", [CARRY_OVER, ONE_STEP], ids=["carry_over", "one_step_off"])
def test_the_modes_that_draw_in_order_repeat_exactly(go, tmp_path, mode):
    for name in ("one", "two"):
        go(*mode, *SAVED, folder=name)
    assert untimed(read_metrics(tmp_path / "one")) == untimed(read_metrics(tmp_path / "two"))
    assert_same(states(tmp_path / "one", STEPS), states(tmp_path / "two", STEPS))


@pytest.mark.parametrize(
    "mode",
    [
        CARRY_OVER,
        (*CARRY_OVER, f"{STALENESS}=2", "trainer.async_training.over_sampling=1.5"),
        ONE_STEP,
        (*FULLY, f"{STALENESS}=2"),
        (*FULLY, f"{STALENESS}=3", "trainer.async_training.sync_every=3"),
        (*FULLY, "trainer.async_training.window=1"),
        pytest.param((*CARRY_OVER, *SGLANG), marks=pytest.mark.slow(seconds=5)),
        pytest.param((*FULLY, *SGLANG), marks=pytest.mark.slow(seconds=5)),
    ],
    ids=[
        "carry_over", "carry_over_2", "one_step_off", "fully_async", "sync_every", "window",
        "carry_over_sglang", "fully_async_sglang",
    ],
)  # fmt: skip
def test_every_prompt_is_trained_once_and_no_token_is_too_old(go, fake_sglang, tmp_path, in_order, mode):
    generated: list[tuple[str, int, int]] = []
    lengths: list[tuple[str, int]] = []

    def prepare(loop: Any) -> None:
        ended = loop.experience.on_finish

        def on_finish(finished: Any) -> None:
            generated.append((finished.group, finished.sample, len(finished.result.token_ids)))
            ended(finished)

        loop.experience.on_finish = on_finish

    def within(loop: Any) -> None:
        batch = loop.batch
        mask = batch.batch["response_mask"].sum(-1).tolist()
        lengths.extend(zip(map(str, batch.non_tensor_batch["uid"]), mask, strict=True))
        ages = (loop.step_number - 1 - batch.batch["token_versions"])[batch.batch["response_mask"].bool()]
        assert int(ages.min()) >= 0 and int(ages.max()) <= loop.experience.staleness

    loop = go(*mode, "data.val_files=[]", folder="on", prepare=prepare, within=within)
    steps, expected = trained(tmp_path / "on"), in_order
    assert [len(uids) for uids in steps] == [4] * STEPS
    assert Counter(chain(*steps)) == Counter(chain(*expected))
    # Nothing is thrown away for being long: what is trained is what was generated.
    assert Counter((uid, length) for uid, _, length in generated) == Counter(lengths)
    if f"{MODE}=carry_over" not in mode and loop.experience.admission.window == 1:
        assert steps == expected


def test_carry_over_continues_samples_with_new_weights(go, tmp_path):
    rows: list[torch.Tensor] = []
    go(*CARRY_OVER, "data.val_files=[]", within=lambda loop: rows.append(loop.batch))
    mixed = 0
    for batch in rows:
        for versions, mask in zip(
            batch.batch["token_versions"], batch.batch["response_mask"].bool(), strict=True
        ):
            mixed += len(set(versions[mask].tolist())) > 1
    assert mixed, "no response was continued in a later step"
    found = read_metrics(tmp_path / "run")
    assert max(row["training/age/max"] for row in found) == 1
    for row in found:
        assert row["training/age/share_0"] + row["training/age/share_1"] == pytest.approx(1)


def test_weights_are_taken_between_two_tokens_of_a_running_sample(go):
    """When the first batch is complete the generation thread stops until the weights of the first update came."""
    never, mixed = threading.Event(), []

    def prepare(loop: Any) -> None:
        engine: SharedEngine = loop.workers.rollout
        experience = loop.experience

        def before_poll() -> None:
            first = [group for group in list(experience.groups.values()) if group.number < 4]
            while all(group.complete for group in first) and engine.engine.version == 0:
                if experience._closing:
                    break
                never.wait(0.01)

        engine.before_poll = before_poll

    def within(loop: Any) -> None:
        versions, mask = loop.batch.batch["token_versions"], loop.batch.batch["response_mask"].bool()
        mixed.extend(len(set(row[own].tolist())) > 1 for row, own in zip(versions, mask, strict=True))

    go(*FULLY, "trainer.async_training.window=1", "data.val_files=[]", prepare=prepare, within=within)
    assert any(mixed)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [CARRY_OVER, ONE_STEP], ids=["carry_over", "one_step_off"])
def test_a_resumed_run_continues_bit_for_bit(go, tmp_path, mode):
    go(*mode, *SAVED, folder="whole")

    def stop(loop: Any) -> None:
        if loop.step_number == 2:
            loop.request_stop()

    go(*mode, *SAVED, folder="parts", within=stop)
    assert len(trained(tmp_path / "parts")) == 2
    go(*mode, *SAVED, folder="parts")
    whole = untimed(read_metrics(tmp_path / "whole"))
    assert untimed(read_metrics(tmp_path / "parts")) == whole
    assert_same(states(tmp_path / "whole", STEPS), states(tmp_path / "parts", STEPS))


@pytest.mark.slow
def test_a_resumed_run_asks_for_no_score_again(go, tmp_path, monkeypatch):
    """Some samples of prompts that are ahead have ended when the checkpoint is made: their scores are in it."""
    asked: list[int] = []
    submit = FunctionRewardManager.submit

    def submit_and_keep(self: Any, sample: Any) -> None:
        if sample.index >= 2 * 4 * 2:  # of steps after the second; before training a few rows are tried
            asked.append(sample.index)
        submit(self, sample)

    monkeypatch.setattr(FunctionRewardManager, "submit", submit_and_keep)
    keys = (*CARRY_OVER, "trainer.save_freq=1", "data.val_files=[]")
    ends = [f"actor_rollout_ref.rollout.stop_token_ids={list(range(3, 15))}"]
    first: list[int] = []

    def stop(loop: Any) -> None:
        if loop.step_number == 2:
            first.extend(asked)
            loop.request_stop()

    go(*keys, *ends, folder="whole")
    whole, asked[:] = Counter(asked), []
    go(*keys, *ends, folder="parts", within=stop)
    assert first, "samples of later steps had ended"
    asked.clear()
    go(*keys, *ends, folder="parts")
    assert Counter(first) + Counter(asked) == whole and set(whole.values()) == {1}
    assert untimed(read_metrics(tmp_path / "parts")) == untimed(read_metrics(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [CARRY_OVER, ONE_STEP, (*FULLY, f"{STALENESS}=2")],
    ids=["carry_over", "one_step_off", "fully_async"],
)
@pytest.mark.parametrize("at", [1, 3])
def test_a_run_that_was_cut_off_trains_every_prompt_once(go, tmp_path, in_order, mode, at):
    """Cut off after the update of a step and before its checkpoint."""

    def cut(loop: Any) -> None:
        if loop.step_number == at + 1:
            raise Cut

    with pytest.raises(Cut):
        go(*mode, "trainer.save_freq=2", "data.val_files=[]", within=cut)
    go(*mode, "trainer.save_freq=2", "data.val_files=[]")
    assert Counter(chain(*trained(tmp_path / "run"))) == Counter(chain(*in_order))


def test_the_critic_may_warm_up(go, tmp_path):
    go(
        *FULLY,
        "algorithm.adv_estimator=gae",
        "trainer.critic_warmup=3",
        "data.val_files=[]",
        "critic.optim.lr=1e-3",
    )
    ages = [row["training/age/max"] for row in read_metrics(tmp_path / "run")]
    assert ages[:4] == [0.0] * 4, "the policy does not change while the critic warms up"


@pytest.mark.slow
@pytest.mark.parametrize("mode", [ONE_STEP, FULLY], ids=["one_step_off", "fully_async"])
def test_validation_is_of_the_current_policy(go, tmp_path, mode):
    """A learning rate of 0 makes all policies equal: what is left is the draws, which must be the synchronous ones."""
    sampled = (
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "trainer.test_freq=1",
    )
    versions: dict[str, list[Any]] = {}
    for name, extra in (("off", POOL), ("on", mode)):
        seen: list[Any] = []

        def prepare(loop: Any, seen: list[Any] = seen) -> None:
            score = loop.experience.score

            def watched(prompts: Any, settings: Any, timer: Any) -> Any:
                batch = score(prompts, settings, timer)
                seen.append((loop.workers.policy_version, set(batch.non_tensor_batch["policy_version"])))
                return batch

            loop.experience.score = watched

        go(*extra, *sampled, "actor_rollout_ref.actor.optim.lr=0.0", folder=name, prepare=prepare)
        versions[name] = seen
    assert all(drawn == {current} for current, drawn in versions["on"])
    metrics = [read_metrics(tmp_path / name) for name in ("off", "on")]
    for off, on in zip(*metrics, strict=True):
        validation = {name for name in off if name.startswith("val")}
        assert validation and {n: off[n] for n in validation} == {n: on[n] for n in validation}


@pytest.mark.parametrize("mode", [ONE_STEP, FULLY], ids=["one_step_off", "fully_async"])
def test_an_error_while_generating_ends_the_run(go, mode):
    class Broken(Exception):
        pass

    def prepare(loop: Any) -> None:
        def before_poll() -> None:
            if loop.step_number >= 2:
                raise Broken

        loop.workers.rollout.before_poll = before_poll

    with pytest.raises(Broken):
        go(*mode, "data.val_files=[]", prepare=prepare)
    assert not [thread for thread in threading.enumerate() if thread.name == "verl-generation"]


def test_both_sides_waiting_is_measured(go, tmp_path):
    go(*FULLY, "data.val_files=[]")
    for row in read_metrics(tmp_path / "run"):
        assert 0 <= row["perf/wait_share/trainer"] <= 1.001
        assert 0 <= row["perf/wait_share/generation"] <= 1.001
