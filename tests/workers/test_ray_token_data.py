"""Numbers of tokens from several ranks are those of one process, in its order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from verl.observe.token_table import TokenFile

pytest.importorskip("megatron.core", reason="needs megatron-core (make test-components)")
pytestmark = pytest.mark.components

SETTINGS = ["trainer.total_training_steps=1", "actor_rollout_ref.actor.ppo_mini_batch_size=5"]
LAYOUTS = {
    "fsdp": ["trainer.n_gpus_per_node=3"],
    "pipeline": [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    ],
    "ulysses": ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"],
}


def tokens_of(folder: Path) -> TokenFile:
    return TokenFile(folder / "rollouts" / "1.parquet")


def test_ranks_give_the_numbers_of_one_process(train, joined):
    alone = tokens_of(train(*SETTINGS, folder="alone")[1])
    for name, layout in LAYOUTS.items():
        found = tokens_of(train(*SETTINGS, *layout, folder=name)[1])
        assert len(found) == len(alone)
        for mine, one in zip(found.rows(), alone.rows(), strict=True):
            assert mine.texts == one.texts, name
            assert mine.computed is not None and one.computed is not None, "rows were left out"
            assert mine.computed.tolist() == one.computed.tolist(), name
            for column in ("log_prob", "entropy", "ratio"):
                theirs = getattr(one, column)
                assert theirs is not None
                assert np.isfinite(theirs).all() == bool(one.computed.all() or column == "log_prob")
                np.testing.assert_allclose(
                    getattr(mine, column), theirs, atol=0.05, err_msg=f"{name} {column}"
                )
