"""A plug-in's section reaches the ranks of a run on Ray."""

from __future__ import annotations

import pytest

from tests.config.test_plugin_sections import LOSS, PLUGIN, SECTION

pytestmark = [pytest.mark.components, pytest.mark.extended, pytest.mark.timeout(600)]


def test_ranks_read_the_section_of_a_plug_in(train, joined, tmp_path):
    (tmp_path / "my_sections.py").write_text(PLUGIN + LOSS)
    rows, _ = train(
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=1",
        f"trainer.plugins=[{tmp_path / 'my_sections.py'}]",
        "actor_rollout_ref.actor.policy_loss.loss_mode=mine",
        f"{SECTION}.beta=2",
    )
    assert rows[-1]["actor/doubled"] == 4.0
