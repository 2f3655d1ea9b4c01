"""Live numbers of ranks on Ray: the controller serves those of all processes, and phases belong to a step."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scraping import scraped, scraping, spans, total
from verl.observe.live import Snapshot

pytestmark = [pytest.mark.components, pytest.mark.slow(seconds=10), pytest.mark.timeout(900)]


def test_the_controller_serves_every_process_and_a_resume_cuts_the_phases_of_ranks(
    train: Callable[..., Any], joined: Any
) -> None:
    keys = [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "trainer.save_freq=2",
        "trainer.total_training_steps=3",
    ]
    _, folder = train(*keys, *scraping())
    first = scraped(folder)
    assert [row["verl_steps_total process=controller"] for row in first] == [1, 2, 3]
    for row in first:
        tokens = row["verl_generated_tokens_total process=rollout_rank_0"]
        assert tokens >= total(row, "verl_response_length_tokens_sum") > 0
        for process in ("rank_0", "rank_1"):
            assert row[f"verl_phase_seconds_count phase=train_actor process={process}"] > 0
    shutil.rmtree(folder / "global_step_3")
    again = scraping()
    train(*keys, *again)
    last = scraped(folder)[3:]
    assert [row["verl_step process=controller"] for row in last] == [3]
    fallen = {name for name, value in first[-1].items() if value > last[0].get(name, value)}
    assert not {name for name in fallen if name.partition(" ")[0].endswith(("_total", "_count", "_bucket"))}
    for process, call in (
        ("rank_0", "train_actor"),
        ("rank_1", "train_actor"),
        ("rollout_rank_0", "generate"),
        ("controller", "step"),
    ):
        steps = [span["step"] for span in spans(folder, process) if span["name"] == call]
        assert sorted(set(steps)) == [1, 2, 3] and steps == sorted(steps)
        assert steps.count(3) == steps.count(2), "those of the step that was repeated are there once"


def test_fine_tuning_on_ray_serves_its_ranks(tiny_model_dir: Path, tmp_path: Path, joined: Any) -> None:
    from verl.config.load import load_sft_config
    from verl.trainer.sft_trainer import run

    draw = random.Random(0)
    rows = [{"prompt": f"repeat {n}", "response": str(n)} for n in (draw.randrange(10) for _ in range(16))]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [
        f"model.path={tiny_model_dir}",
        f"data.train_files={tmp_path}/train.jsonl",
        "data.train_batch_size=8",
        "data.max_length=64",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={tmp_path}/run",
        *scraping(),
    ]
    folder = run(load_sft_config(keys)).folder
    assert [row["verl_step process=controller"] for row in scraped(folder)] == [1, 2]
    for rank in (0, 1):
        built = f"verl_phase_seconds_count phase=build process=rank_{rank}"
        assert [row[built] for row in scraped(folder)] == [1, 1]
        assert [span["step"] for span in spans(folder, f"rank_{rank}") if span["name"] == "step"] == [1, 2]
        assert spans(folder, f"rank_{rank}")[-1]["step"] == 2


def test_a_rank_that_does_not_answer_keeps_its_last_numbers(
    joined: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from verl.workers import ray_group
    from verl.workers.ray_calls import RankCalls

    monkeypatch.setattr(ray_group, "FRESH_S", 0.0)
    monkeypatch.setattr(ray_group, "WAIT_S", 0.2)
    ray.init(address=joined.address, log_to_driver=False, ignore_reinit_error=True)

    @ray.remote(num_cpus=0)
    class Rank:
        """Answers while there is no file `stuck`."""

        def __init__(self, number: int, stuck: str) -> None:
            self.number, self.stuck, self.asked = number, Path(stuck), 0

        def control(self, call: str) -> Snapshot:
            assert call == "live"
            while self.stuck.exists():
                self.stuck.with_name("held").touch()
                time.sleep(0.01)
            self.asked += 1
            return Snapshot(f"rank_{self.number}", {"steps_total": float(self.asked)})

    try:
        stuck = tmp_path / "stuck"
        actors = [Rank.remote(0, str(tmp_path / "never")), Rank.remote(1, str(stuck))]
        ranks = ray_group.RankSnapshots([RankCalls(actors, 60.0)])

        def taken() -> list[float]:
            found = ranks.take()
            assert [each.process for each in found] == sorted(each.process for each in found)
            return [each.values["steps_total"] for each in found]

        def until(condition: Callable[[list[float]], bool]) -> list[float]:
            deadline = time.monotonic() + 120
            while not condition(found := taken()):
                assert time.monotonic() < deadline
            return found

        before = until(lambda found: len(found) == 2)
        stuck.touch()
        kept = until(lambda found: found[0] > before[0] and (tmp_path / "held").exists())[1]
        asked = until(lambda found: found[0] > before[0] + 3)
        assert asked[1] == taken()[1] == kept
        stuck.unlink()
        after = until(lambda found: found[1] > kept)
        assert after[1] == kept + 1 and after[0] >= asked[0], "it was asked once, not once per look"
        ranks.close()
        assert taken() == after == taken(), "nothing is asked after the end"
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.shutdown()
