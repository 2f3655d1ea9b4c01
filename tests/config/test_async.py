"""Generating ahead of training: what is refused, with lines to type that are then accepted; verl's names."""

from __future__ import annotations

import logging
import re

import pytest

from verl.config.load import load_ppo_config
from verl.config.parallelism import dedicated_server, rollout_pool
from verl.config.plan import batch_plan
from verl.config.plan_report import async_rows, check_text
from verl.config.run_checks import POOL
from verl.config.schema import PPOConfig
from verl.errors import ConfigError

NEEDED = ["actor_rollout_ref.model.path=o/m", "data.train_files=o/d", "trainer.device=cpu"]
MODE, STALENESS = "trainer.async_training.mode", "trainer.async_training.staleness"
GROUPS = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
CARRY = [f"{MODE}=carry_over", BYPASS]
ONE_STEP = [f"{MODE}=one_step_off", BYPASS, *POOL.split()]
FULLY = [f"{MODE}=fully_async", BYPASS, *POOL.split()]


def load(*typed: str) -> PPOConfig:
    return load_ppo_config([*NEEDED, *typed])


def refused(*typed: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(*typed)
    text = str(error.value)
    assert "\n" not in text, text  # one reason for one mistake
    return text


def accepted(text: str, typed: list[str], *lines: str) -> None:
    """Each of these lines is in the message, and typing it as well makes the config valid."""
    for line in lines:
        assert line in text, (line, text)
        load(*typed, *line.split())


def test_staleness_is_1_unless_it_is_given_and_only_where_it_means_something() -> None:
    for typed in (CARRY, ONE_STEP, FULLY):
        assert load(*typed).trainer.async_training.staleness == 1
    assert load().trainer.async_training.staleness is None
    assert load(*FULLY, f"{STALENESS}=3").trainer.async_training.staleness == 3
    for typed in (ONE_STEP, FULLY):
        assert load(*typed, f"{STALENESS}=0").trainer.async_training.staleness == 0


def test_one_step_off_is_one_step_off() -> None:
    typed = [*ONE_STEP, f"{STALENESS}=2"]
    text = refused(*typed)
    assert f"'{STALENESS}' is 2" in text
    accepted(text, typed, f"{STALENESS}=1", f"{MODE}=fully_async")


def test_carry_over_needs_at_least_1() -> None:
    typed = [*CARRY, f"{STALENESS}=0"]
    text = refused(*typed)
    assert f"'{STALENESS}' is 0" in text
    accepted(text, typed, f"{STALENESS}=1", f"{MODE}=off")


def test_weights_that_are_sent_rarely_are_older() -> None:
    every = "trainer.async_training.sync_every"
    load(*FULLY, f"{every}=2")
    typed = [*FULLY, f"{every}=4"]
    text = refused(*typed)
    assert f"'{every}' is 4" in text
    accepted(text, typed, f"{STALENESS}=3", f"{every}=2")


def test_more_prompts_than_can_be_trained_in_time() -> None:
    name = "trainer.async_training.over_sampling"
    load(*CARRY, f"{name}=1.0")
    typed = [*CARRY, f"{name}=2.5"]
    text = refused(*typed)
    assert f"'{name}' is 2.5" in text
    accepted(text, typed, f"{name}=1", f"{STALENESS}=3")


def test_the_last_responses_are_left_out_or_trained_later_and_are_not_less_than_one() -> None:
    name = "actor_rollout_ref.rollout.over_sample_rate"
    batch = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", *GROUPS]
    load(*batch, f"{name}=0.1")
    typed = [*CARRY, *batch, f"{name}=0.1"]
    text = refused(*typed)
    assert f"'{name}' is 0.1" in text
    accepted(text, typed, f"{name}=0", f"{MODE}=off")
    typed = [*batch, f"{name}=0.1", "actor_rollout_ref.rollout.name=hf"]
    accepted(refused(*typed), typed, f"{name}=0", "actor_rollout_ref.rollout.name=native")
    text = refused(*batch, f"{name}=0.05")
    assert "less than one of the 16 responses" in text and "set it to 0.0625 or more" in text
    load(*batch, f"{name}=0.0625")
    assert "below 1" in refused(*batch, f"{name}=1")


def test_a_loss_without_a_ratio_of_its_own_needs_weights_for_old_weights() -> None:
    typed = [*CARRY, "algorithm.rollout_correction.loss_type=reinforce"]
    text = refused(*typed)
    assert f"'{STALENESS}' is 1" in text
    accepted(
        text,
        typed,
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.loss_type=ppo_clip",
    )


@pytest.mark.parametrize("typed", [CARRY, ONE_STEP, FULLY], ids=["carry_over", "one_step_off", "fully_async"])
def test_old_weights_need_a_correction(typed: list[str]) -> None:
    without = [key for key in typed if key != BYPASS]
    text = refused(*without)
    assert f"'{STALENESS}' is 1" in text
    accepted(
        text,
        without,
        BYPASS,
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=seq_mean_k1 "
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
        f"{MODE}=off",
    )
    if "carry_over" not in typed[0]:
        load(*without, f"{STALENESS}=0")  # nothing to correct


def test_a_correction_needs_the_log_probs_of_generation() -> None:
    text = refused(*FULLY, "actor_rollout_ref.rollout.calculate_log_probs=False")
    assert "actor_rollout_ref.rollout.calculate_log_probs=True" in text


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_set_of_weights_cannot_train_and_generate_at_the_same_time(mode: str, device: str) -> None:
    typed = [f"{MODE}={mode}", BYPASS, f"trainer.device={device}"]
    text = refused(*typed)
    assert f"'{MODE}' is {mode}" in text and "share one set of weights" in text
    accepted(text, typed, POOL, f"{MODE}=carry_over")


def test_a_server_on_other_gpus_is_a_pool_when_it_generates_ahead() -> None:
    """Without Ray the trainer's one process could not talk to it while it trains."""
    server = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.mode=server", *POOL.split()]
    assert dedicated_server(load(*server)) and not rollout_pool(load(*server))
    for typed in (ONE_STEP, FULLY):
        config = load(*typed, *server)
        assert rollout_pool(config) and not dedicated_server(config)


def test_a_pool_would_idle_with_carry_over() -> None:
    typed = [*CARRY, *POOL.split()]
    text = refused(*typed)
    assert f"'{MODE}' is carry_over" in text and "actor_rollout_ref.rollout.n_gpus_per_node=1" in text
    shared = "actor_rollout_ref.rollout.nnodes=0 actor_rollout_ref.rollout.n_gpus_per_node=0"
    accepted(text, typed, f"{MODE}=one_step_off", f"{MODE}=fully_async", shared)


@pytest.mark.parametrize("mode", [CARRY, FULLY], ids=["carry_over", "fully_async"])
def test_an_engine_that_runs_batches_to_their_end_is_refused(mode: list[str]) -> None:
    typed = [*mode, "actor_rollout_ref.rollout.name=hf"]
    text = refused(*typed)
    assert "'actor_rollout_ref.rollout.name' is hf" in text
    accepted(text, typed, "actor_rollout_ref.rollout.name=native", f"{MODE}=off")


@pytest.mark.parametrize("typed", [CARRY, ONE_STEP, FULLY], ids=["carry_over", "one_step_off", "fully_async"])
def test_groups_that_cannot_be_whole_are_refused(typed: list[str]) -> None:
    remax = [*typed, "algorithm.adv_estimator=remax"]
    text = refused(*remax)
    assert "'algorithm.adv_estimator' is remax" in text and "actor_rollout_ref.rollout.n=2" in text
    accepted(text, [*remax, "actor_rollout_ref.rollout.n=2"], "algorithm.adv_estimator=rloo")
    accepted(text, remax, f"{MODE}=off")
    filtered = [*typed, *GROUPS, "algorithm.filter_groups.enable=True"]
    text = refused(*filtered)
    assert "'algorithm.filter_groups.enable' is True" in text
    accepted(text, filtered, "algorithm.filter_groups.enable=False", f"{MODE}=off")


def test_critic_warmup_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(*FULLY, "trainer.critic_warmup=5")
        assert "'trainer.critic_warmup'=5" in caplog.text and f"{STALENESS}=1" in caplog.text
        caplog.clear()
        load(*FULLY, "trainer.critic_warmup=5", f"{STALENESS}=0")
        load("trainer.critic_warmup=5")
        assert "critic_warmup" not in caplog.text


def test_a_run_that_only_validates_needs_none_of_it() -> None:
    only = ["trainer.val_only=True", "data.val_files=o/d"]
    for mode in ("carry_over", "one_step_off", "fully_async"):
        config = load(f"{MODE}={mode}", "algorithm.adv_estimator=remax", *only)
        assert "ahead" not in check_text(config)


def test_keys_without_effect_are_named(caplog: pytest.LogCaptureFixture) -> None:
    for typed, name in (
        ([f"{STALENESS}=2"], STALENESS),
        ([*ONE_STEP, "trainer.async_training.window=4"], "trainer.async_training.window"),
        ([*ONE_STEP, "trainer.async_training.sync_every=2"], "trainer.async_training.sync_every"),
        ([*FULLY, "trainer.async_training.over_sampling=0.75"], "trainer.async_training.over_sampling"),
        (
            [*ONE_STEP, "actor_rollout_ref.rollout.recompute_kv_cache=True"],
            "actor_rollout_ref.rollout.recompute_kv_cache",
        ),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load(*typed)
        assert re.search(f"'{name}'=.* has no effect: it needs {MODE}=|'{name}'=.*{MODE} is off", caplog.text)


# ---- the plan

SIZES = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64", *GROUPS]


@pytest.mark.parametrize(
    ("typed", "in_progress", "where"),
    [
        (CARRY, "128", "the trainer's processes"),
        ([*CARRY, "trainer.async_training.over_sampling=0.3"], "84", "the trainer's processes"),
        (ONE_STEP, "128", "1 separate process"),
        ([*FULLY, f"{STALENESS}=3", "actor_rollout_ref.rollout.n_gpus_per_node=2"], "256", "2 separate"),
    ],
)
def test_the_plan_says_how_far_ahead(typed: list[str], in_progress: str, where: str) -> None:
    config = load(*SIZES, *typed)
    text = check_text(config)
    block = text.partition("generation ahead of training\n")[2].partition("\n\n")[0]
    assert config.trainer.async_training.mode in block and where in block
    rows = {name: number for name, number, _ in async_rows(config, batch_plan(config))}
    assert rows["prompts in progress"] == in_progress and f" {in_progress} " in block
    assert rows["oldest weights"] == str(config.trainer.async_training.staleness)
    assert "optimiser steps" not in rows


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size=16", "4"),
        ("actor_rollout_ref.actor.ppo_epochs=2", "2"),
    ],
)
def test_the_plan_says_when_a_step_is_several_updates(change: str, steps: str) -> None:
    config = load(*SIZES, *FULLY, change)
    rows = {name: (number, remark) for name, number, remark in async_rows(config, batch_plan(config))}
    assert rows["optimiser steps"][0] == steps and "ratio" in rows["optimiser steps"][1]


def test_synchronous_training_has_no_such_lines() -> None:
    assert "ahead" not in check_text(load(*SIZES))


# ---- verl's names


def notices(caplog: pytest.LogCaptureFixture, *typed: str) -> tuple[PPOConfig, list[str]]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        config = load(*typed)
    about = re.compile("async_training|trainer_mode")
    return config, [record.getMessage() for record in caplog.records if about.search(record.getMessage())]


def test_names_of_verl_are_read_as_ours(caplog: pytest.LogCaptureFixture) -> None:
    config, lines = notices(
        caplog,
        *FULLY,
        "async_training.staleness_threshold=2.5",
        "async_training.trigger_parameter_sync_step=3",
        "async_training.window=8",
    )
    own = config.trainer.async_training
    assert (own.mode, own.staleness, own.sync_every, own.window) == ("fully_async", 3, 3, 8)
    assert lines == [
        f"'async_training.staleness_threshold=2.5' is read as '{STALENESS}=3'",
        "'async_training.trigger_parameter_sync_step' is read as 'trainer.async_training.sync_every'",
        "'async_training.window' is read as 'trainer.async_training.window'",
    ]
    assert {STALENESS, "trainer.async_training.sync_every"} <= config.user_set


@pytest.mark.parametrize(("share", "steps"), [("0", 0), ("0.1", 1), ("0.5", 1), ("1", 1), ("1.5", 2)])
def test_a_share_of_samples_becomes_whole_steps(share: str, steps: int) -> None:
    config = load(*FULLY, f"async_training.staleness_threshold={share}")
    assert config.trainer.async_training.staleness == steps


@pytest.mark.parametrize("value", ["-0.5", "many", "True", "[1]"])
def test_a_share_that_is_no_share_is_refused(value: str) -> None:
    assert "'async_training.staleness_threshold' is" in refused(
        *FULLY, f"async_training.staleness_threshold={value}"
    )


def test_the_same_key_under_both_names_must_agree(tmp_path) -> None:
    (tmp_path / "run.yaml").write_text(
        "async_training: {staleness_threshold: 0.5}\ntrainer: {async_training: {staleness: 2}}\n"
    )
    source = ["--config-path", str(tmp_path), "--config-name", "run"]
    assert f"another name of '{STALENESS}'" in refused(*FULLY, *source)


@pytest.mark.parametrize(
    ("theirs", "ours", "typed"),
    [
        ("sync", "off", []),
        ("colocate_async", "carry_over", []),
        ("separate_async", "fully_async", POOL.split()),
    ],
)
def test_modes_of_verl(caplog: pytest.LogCaptureFixture, theirs: str, ours: str, typed: list[str]) -> None:
    config, lines = notices(caplog, f"trainer.v1.trainer_mode={theirs}", BYPASS, *typed)
    assert config.trainer.async_training.mode == ours
    assert lines == [f"'trainer.v1.trainer_mode={theirs}' is read as '{MODE}={ours}'"]


def test_an_unknown_mode_of_verl_lists_the_known() -> None:
    text = refused("trainer.v1.trainer_mode=fully_async")
    assert "'trainer.v1.trainer_mode' is 'fully_async'" in text
    for name in ("sync", "colocate_async", "separate_async", f"{MODE}=carry_over", f"{MODE}=fully_async"):
        assert name in text


@pytest.mark.parametrize(
    "key", ["staleness_threshold=1", "trigger_parameter_sync_step=1", "partial_rollout=True"]
)
def test_verls_section_alone_means_fully_async(caplog: pytest.LogCaptureFixture, key: str) -> None:
    config, lines = notices(caplog, f"async_training.{key}", BYPASS, *POOL.split())
    assert config.trainer.async_training.mode == "fully_async"
    assert f"'async_training' without a mode is read as '{MODE}=fully_async'" in lines
    config, lines = notices(caplog, f"async_training.{key}", *ONE_STEP)
    assert config.trainer.async_training.mode == "one_step_off"
    assert not any("without a mode" in line for line in lines)


@pytest.mark.parametrize(("value", "words"), [("True", "needs no key"), ("False", f"{MODE}=one_step_off")])
def test_partial_rollout_is_answered(caplog: pytest.LogCaptureFixture, value: str, words: str) -> None:
    _, lines = notices(caplog, f"async_training.partial_rollout={value}", *FULLY)
    assert len(lines) == 1 and words in lines[0] and f"partial_rollout={value}" in lines[0]
    assert "'async_training.partial_rollout' is 'maybe'" in refused("async_training.partial_rollout=maybe")


def test_required_batches_are_mini_batches(caplog: pytest.LogCaptureFixture) -> None:
    mini, required = "actor_rollout_ref.actor.ppo_mini_batch_size=16", "async_training.require_batches=4"
    config, lines = notices(caplog, *FULLY, required, mini)
    assert config.data.train_batch_size == 64
    assert lines == ["'async_training.require_batches=4' is read as 'data.train_batch_size=64'"]
    default = PPOConfig().actor_rollout_ref.actor.ppo_mini_batch_size
    assert load(*FULLY, required).data.train_batch_size == 4 * default
    assert load(*FULLY, required, mini, "data.train_batch_size=64").data.train_batch_size == 64
    text = refused(*FULLY, required, mini, "data.train_batch_size=128")
    assert "'async_training.require_batches=4'" in text and "data.train_batch_size=128" in text
    assert "at least 1" in refused(*FULLY, "async_training.require_batches=0")


def test_a_name_that_no_one_has_is_still_unknown() -> None:
    assert "unknown key 'async_training.stalenes'" in refused("async_training.stalenes=1")
