"""Batch arithmetic against counting, on whole ranges of sizes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config.load import from_dict
from verl.config.plan import batch_plan
from verl.config.schema import PPOConfig, SFTConfig


def ppo(**values: object) -> PPOConfig:
    return from_dict(
        PPOConfig, {key.replace("__", "."): value for key, value in values.items()}, checked=False
    )


@settings(max_examples=60, deadline=None)
@given(
    mini=st.integers(1, 12),
    minis=st.integers(1, 5),
    n=st.integers(1, 5),
    gpus=st.integers(1, 5),
    micro=st.integers(1, 9),
    epochs=st.integers(1, 3),
)
def test_the_numbers_agree_with_cutting_a_real_list(
    mini: int, minis: int, n: int, gpus: int, micro: int, epochs: int
) -> None:
    config = from_dict(
        PPOConfig,
        {
            "data.train_batch_size": mini * minis,
            "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": micro,
            "actor_rollout_ref.actor.ppo_epochs": epochs,
            "actor_rollout_ref.rollout.n": n,
            "trainer.n_gpus_per_node": gpus,
        },
        checked=False,
    )
    plan = batch_plan(config)
    sequences = [f"{prompt}/{sample}" for prompt in range(mini * minis) for sample in range(n)]
    size = mini * n
    mini_batches = [sequences[at : at + size] for at in range(0, len(sequences), size)]
    padded = mini_batches[0] + ["pad"] * (-len(mini_batches[0]) % gpus)
    busiest = padded[: len(padded) // gpus]
    micro_batches = [busiest[at : at + micro] for at in range(0, len(busiest), micro)]
    assert plan.sequences == len(sequences)
    assert plan.mini_batches == len(mini_batches)
    assert plan.optimiser_steps == epochs * len(mini_batches)
    assert plan.rank_sequences == len(busiest)
    assert plan.padding_rows == padded.count("pad")
    assert plan.micro_batches == len(micro_batches)
    assert plan.sequences * plan.sequence_tokens == len(sequences) * 1024


def test_a_token_budget_holds_at_least_one_sequence() -> None:
    base = {"data__train_batch_size": 64, "actor_rollout_ref__actor__use_dynamic_bsz": True}
    plan = batch_plan(ppo(**base, actor_rollout_ref__actor__ppo_max_token_len_per_gpu=4096))
    assert (plan.micro_batches, plan.micro_batch_tokens) == (16, 4096)
    plan = batch_plan(ppo(**base, actor_rollout_ref__actor__ppo_max_token_len_per_gpu=100))
    assert plan.micro_batches == 64
    assert batch_plan(ppo(**base)).micro_batches is None


def test_ranks_that_share_sequences_count_once() -> None:
    plan = batch_plan(
        ppo(trainer__n_gpus_per_node=8, actor_rollout_ref__actor__ulysses_sequence_parallel_size=2)
    )
    assert plan.ranks == 4
    plan = batch_plan(
        ppo(
            trainer__n_gpus_per_node=8,
            trainer__nnodes=2,
            actor_rollout_ref__actor__strategy="megatron",
            actor_rollout_ref__actor__megatron={
                "tensor_model_parallel_size": 4,
                "pipeline_model_parallel_size": 2,
            },
        )
    )
    assert plan.ranks == 2


def test_fine_tuning_has_one_optimiser_step_per_batch() -> None:
    config = from_dict(
        SFTConfig,
        {"data.train_batch_size": 32, "data.micro_batch_size_per_gpu": 4, "trainer.n_gpus_per_node": 2},
        checked=False,
    )
    plan = batch_plan(config, total_steps=7)
    assert (plan.optimiser_steps, plan.rank_sequences, plan.micro_batches, plan.total_steps) == (1, 16, 4, 7)


def test_the_table_shows_every_number() -> None:
    config = ppo(data__train_batch_size=48, actor_rollout_ref__rollout__n=8, trainer__n_gpus_per_node=5)
    text = str(batch_plan(config, total_steps=1234))
    for words in ("48", "384", "77", "1 of them masked padding", "measured", "1,024", "393,216", "1,234"):
        assert words in text
    for name in (
        "prompts per step",
        "sequences per step",
        "mini-batches",
        "micro-batches per rank",
        "tokens per step",
    ):
        assert name in text
