"""Every idea of docs/extending.md trains as the page shows it: its file as it stands, its command as it is typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.tiny_run import read_metrics, tiny_run
from verl.trainer.main_ppo import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
FILE = re.compile(r'^```python title="(\w+\.py)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^```bash\nverl train (.*?)\n```", re.MULTILINE)
IDEAS = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("idea", IDEAS, ids=[idea.splitlines()[0] for idea in IDEAS])
def test_an_idea_of_the_page_trains_as_it_is_written(
    idea: str, tiny_model_dir: Path, digits_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files, commands = FILE.findall(idea), COMMAND.findall(idea)
    assert len(files) == len(commands) == 1
    name, source = files[0]
    Path(name).write_text(source, encoding="utf-8")
    run = tiny_run(
        tiny_model_dir,
        digits_data,
        "trainer.total_training_steps=1",
        "data.max_prompt_length=96",
        # The tiny model's template ends no turn, so that turns cannot be appended.
        *(["actor_rollout_ref.rollout.multi_turn.history=split"] if "multi_turn" in commands[0] else []),
        *shlex.split(commands[0]),
        folder=tmp_path / "run",
    )
    assert main(run) == 0
    assert read_metrics(tmp_path / "run")[-1]["training/global_step"] == 1
