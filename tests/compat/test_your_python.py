"""Every kind of plug-in in "Your Python" of docs/from-verl.md trains as the page shows it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.tiny_run import read_metrics, tiny_run
from verl.trainer.main_ppo import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "from-verl.md").read_text(encoding="utf-8")
FILE = re.compile(r'^```python title="(\w+\.py)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^```bash\nverl train (.*?)\n```", re.MULTILINE)
KINDS = [
    kind
    for kind in re.split(r"^### ", PAGE.partition("\n## Your Python\n")[2], flags=re.MULTILINE)[1:]
    if COMMAND.search(kind)
]


@pytest.mark.slow(seconds=5)
@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize("kind", KINDS, ids=[kind.splitlines()[0] for kind in KINDS])
def test_a_kind_of_plug_in_trains_as_the_page_shows_it(
    kind: str, tiny_model_dir: Path, digits_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, source in FILE.findall(kind):
        Path(name).write_text(source, encoding="utf-8")
    (command,) = COMMAND.findall(kind)
    keys = ["trainer.total_training_steps=2", *shlex.split(command)]
    assert main(tiny_run(tiny_model_dir, digits_data, *keys, folder=tmp_path / "run")) == 0
    assert read_metrics(tmp_path / "run")[-1]["training/global_step"] == 2
