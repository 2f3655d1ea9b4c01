"""Passwords and keys are neither shown nor written, and a config says so where one is missing."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml

from verl.config.keys import mask_override, mask_text, mask_values
from verl.config.load import from_dict, load_ppo_config, recorded, to_yaml
from verl.config.schema import PPOConfig
from verl.errors import ConfigError
from verl.observe.run_facts import flat_config
from verl.observe.run_folder import RunFolder
from verl.observe.terminal import SafeStream
from verl.trainer.fork import Recorded
from verl.trainer.setup import record_config

URL = "http://user:PASSWORD@127.0.0.1:9/v1"
MASKED = "http://***@127.0.0.1:9/v1"
JUDGE = "reward.judge.base_url"
NEEDED = [
    "actor_rollout_ref.model.path=model",
    "data.train_files=train.jsonl",
    "data.train_batch_size=4",
    "reward.judge.model=m",
]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (URL, MASKED),
        (f"the judge at {URL} failed; see {URL}", f"the judge at {MASKED} failed; see {MASKED}"),
        ("https://TOKEN@host", "https://***@host"),
        ("http://u:a@b@host/x@y", "http://***@host/x@y"),
        ("http://host/path@x?q=a@b", "http://host/path@x?q=a@b"),
        ("no address: a@b.example", "no address: a@b.example"),
        ("http://u:${oc.env:PW}@host", "http://u:${oc.env:PW}@host"),
        ("a://" * 1000, "a://" * 1000),
    ],
)
def test_addresses_lose_user_and_password(text: str, shown: str) -> None:
    assert mask_text(text) == shown


def test_values_under_names_of_secrets_are_masked() -> None:
    values = {
        "api_key": "x",
        "OPENAI_API_KEY": "x",
        "password": "x",
        "token": "x",
        "HF_TOKEN": "x",
        "api_key_env": "OPENAI_API_KEY",
        "eos_token": "</s>",
        "max_tokens": 5,
        "token_data": True,
        "secret": "${oc.env:X}",
        "urls": [URL, {"password": ""}],
    }
    hidden = dict.fromkeys(("api_key", "OPENAI_API_KEY", "password", "token", "HF_TOKEN"), "***")
    assert mask_values(values) == {**values, **hidden, "urls": [MASKED, {"password": ""}]}
    assert mask_override(f"{JUDGE}={URL}") == f"{JUDGE}={MASKED}"
    assert mask_override("ray_kwargs.x.api_key=abc") == "ray_kwargs.x.api_key=***"


def test_the_terminal_shows_no_password() -> None:
    shown = io.StringIO()
    SafeStream(shown).write(f"error: {URL}\n")
    assert shown.getvalue() == f"error: {MASKED}\n"


def test_the_run_folder_holds_no_password(tmp_path: Path) -> None:
    cfg = load_ppo_config([*NEEDED, f"{JUDGE}={URL}", f"trainer.default_local_dir={tmp_path}/run"])
    assert cfg.reward.judge.base_url == URL
    with RunFolder(tmp_path / "run") as folder:
        record_config(cfg, folder)
        folder.write_crash(ValueError(f"{URL} failed"))
    for name in ("config.yaml", "crash.txt"):
        text = (tmp_path / "run" / name).read_text()
        assert "PASSWORD" not in text and MASKED in text
    assert flat_config({"reward": {"judge": {"base_url": URL}}}) == {JUDGE: MASKED}


def test_a_masked_value_is_asked_for_again(tmp_path: Path) -> None:
    cfg = load_ppo_config([*NEEDED, f"{JUDGE}={URL}"])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(cfg))
    with pytest.raises(ConfigError, match=r"'reward\.judge\.base_url' has '\*\*\*' in place of a password"):
        load_ppo_config(["--config-path", str(file)])
    assert load_ppo_config(["--config-path", str(file), f"{JUDGE}={URL}"]).reward.judge.base_url == URL


def test_environment_variables_stand_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2")
    monkeypatch.setenv("MY_STEPS", "7")
    monkeypatch.setenv("MY_FOLDER", str(tmp_path))
    cfg = load_ppo_config(
        [
            *NEEDED,
            f"{JUDGE}='http://u:${{oc.env:MY_SECRET}}@127.0.0.1:9/v1'",
            f"actor_rollout_ref.rollout.multi_turn.tool_server='${{{JUDGE}}}'",
            "trainer.project_name='${oc.env:MY_SECRET}'",
            "trainer.default_local_dir=run",
            "data.val_files=['${oc.env:MY_SECRET}.jsonl']",
            "trainer.total_training_steps='${oc.env:MY_STEPS}'",
            "trainer.rollout_data_dir='${oc.env:MY_FOLDER}/rollouts'",
        ]
    )
    assert cfg.reward.judge.base_url == "http://u:hunter2@127.0.0.1:9/v1"
    assert cfg.trainer.project_name == "hunter2" and cfg.trainer.total_training_steps == 7
    values = recorded(cfg)
    assert "hunter2" not in json.dumps(values)
    assert values["data"]["val_files"] == ["${oc.env:MY_SECRET}.jsonl"]
    assert values["trainer"]["total_training_steps"] == 7
    assert values["trainer"]["rollout_data_dir"] == f"{tmp_path}/rollouts"
    again = from_dict(PPOConfig, yaml.safe_load(to_yaml(cfg)))
    assert again == cfg
    given = Recorded(tmp_path, values).given()
    assert "hunter2" not in json.dumps(given) and given["trainer"]["project_name"] == "${oc.env:MY_SECRET}"
