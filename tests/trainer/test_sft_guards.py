"""Fine-tuning that is asked to stop between two epochs."""

from __future__ import annotations

import json

from verl.config.load import load_sft_config
from verl.observe.trackers import FanOut
from verl.trainer import sft_trainer


def test_who_asks_while_the_last_step_of_an_epoch_is_logged_gets_a_checkpoint(
    tiny_model_dir, tmp_path, monkeypatch
):
    rows = [{"prompt": f"repeat {digit}", "response": f"{digit}"} for digit in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loops, log, step = [], FanOut.log, sft_trainer.SFTLoop.step

    def watched(loop, batch):
        loops.append(loop)
        return step(loop, batch)

    def late(self, number, metrics):
        if number == 2:
            loops[0].request_stop()
        return log(self, number, metrics)

    monkeypatch.setattr(sft_trainer.SFTLoop, "step", watched)
    monkeypatch.setattr(FanOut, "log", late)
    result = sft_trainer.run(
        load_sft_config(
            [
                f"model.path={tiny_model_dir}",
                f"data.train_files={tmp_path}/rows.jsonl",
                "data.train_batch_size=4",
                "data.max_length=32",
                "trainer.total_epochs=50",
                f"trainer.default_local_dir={tmp_path}/run",
                "trainer.device=cpu",
                "trainer.logger=[]",
            ]
        )
    )
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    saved = [path.name for path in result.folder.glob("global_step_*")]
    assert result.steps == lines[-1]["step"] == 3 and saved == ["global_step_3"]
