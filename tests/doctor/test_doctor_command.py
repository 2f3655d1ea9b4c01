"""`verl doctor` as it is typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl import cli
from verl.doctor.cli import as_config_needs, as_text, grouped, machine_probes, main, parse_target
from verl.doctor.runner import Check, DoctorProbe, ProbeAnswer
from verl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def answer(*findings: Check, section: str = "software") -> ProbeAnswer:
    return ProbeAnswer(DoctorProbe("p", "m:f", section), list(findings))


def typed(*words: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "verl", "doctor", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=ROOT,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_the_whole_command_on_this_machine_with_a_run(finished_run: Path) -> None:
    code, out, err = typed("--quick", "--json", str(finished_run))
    report: dict[str, Any] = json.loads(out)
    statuses: dict[str, list[str]] = {}
    for finding in report["findings"]:
        statuses.setdefault(finding["subject"], []).append(finding["status"])
    assert code == 0 and report["ok"], (out, err)
    for subject in ("torch", "transformers", "disk", "run", "config", "weights", "reward"):
        assert "ok" in statuses[subject], subject
    assert {f["section"] for f in report["findings"]} >= {"software", "machine", "this config", "this run"}


@pytest.mark.slow
def test_something_fatal_is_told_by_the_exit_code(keys: list[str], tmp_path: Path) -> None:
    code, out, _ = typed("--quick", *keys, "data.train_files=nowhere.jsonl")
    assert code == 1
    assert "nowhere.jsonl" in out and out.strip().splitlines()[-1].startswith("To fix first:")
    assert "\x1b" not in out


def test_a_question_nobody_understands_is_answered_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-place"]) == 2
    assert "neither a run folder nor a YAML file" in capsys.readouterr().err
    assert main(["--timeout", "0"]) == 2


def test_without_any_package_it_still_says_what_to_install(tmp_path: Path) -> None:
    """A bare Python: no torch, no rich, nothing."""
    program = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from verl.cli import main; sys.exit(main(['doctor']))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1, done.stderr
    assert "dependencies are not installed" in done.stdout and "-> pip install -e ." in done.stdout


@pytest.mark.slow
def test_a_hung_package_does_not_hold_the_command_up(tmp_path: Path) -> None:
    (tmp_path / "hydra").mkdir()
    (tmp_path / "hydra" / "__init__.py").write_text("import threading; threading.Event().wait()\n")
    code, out, err = typed("--quick", "--json", "--timeout", "5", PYTHONPATH=f"{tmp_path}:{ROOT}")
    found = {f["subject"]: f for f in json.loads(out)["findings"]}
    assert code == 1 and "no answer within 5 s" in found["hydra-core"]["seen"], err
    # Whatever else five seconds are too few for on this machine, it was asked and answered.
    assert {"python", "omegaconf", "torch", "memory", "disk"} <= set(found)


def test_the_command_imports_nothing_heavy() -> None:
    program = (
        "import sys, verl.doctor.cli, verl.observe.view, verl.cli\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'ray', 'omegaconf', 'yaml', 'pyarrow'}\n"
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_it_stands_in_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "  doctor" in out and "  view" in out


# -- what was typed -----------------------------------------------------------------------------------------------


def test_a_run_folder_brings_its_config(copied_run: Callable[[], Path]) -> None:
    folder = copied_run()
    assert parse_target([str(folder), "trainer.nnodes=2"]) == (
        folder,
        ["--config-path", str(folder), "--config-name", "config.yaml", "trainer.nnodes=2"],
    )
    (folder / "config.yaml").unlink()
    assert parse_target([str(folder)]) == (folder, [])


def test_a_yaml_file_and_keys_are_a_config(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("trainer: {nnodes: 1}\n")
    assert parse_target(["a.b=c", str(file)])[1][-1] == "a.b=c"
    assert parse_target([]) == (None, [])
    with pytest.raises(ConfigError, match="one run folder"):
        parse_target([str(file), str(tmp_path)])


# -- the report ---------------------------------------------------------------------------------------------------


def test_what_the_config_needs_is_taken_seriously() -> None:
    answers = [
        answer(Check("config", "ok", "", data={"needs": ["ray", "peft"], "processes": 2})),
        answer(Check("ray", "note", "not installed", "pip install 'ray>=2'", "missing extras")),
        answer(Check("peft", "warning", "0.1 is installed")),
        answer(Check("hostname", "warning", "no address")),
        answer(Check("vllm", "warning", "cannot be imported")),
    ]
    weighed = {a.findings[0].subject: a.findings[0] for a in as_config_needs(answers)}
    assert [weighed[name].status for name in ("ray", "peft", "hostname")] == ["fatal"] * 3
    assert weighed["vllm"].status == "warning" and weighed["ray"].seen.endswith("this config needs it")


def test_what_is_in_order_shares_a_line_and_what_is_not_has_its_own() -> None:
    lines = grouped(
        [
            Check("rich", "ok", "13.7", group="packages"),
            Check("numpy", "fatal", "broken"),
            Check("pyarrow", "ok", "17", group="packages"),
        ]
    )
    assert [(line.subject, line.seen) for line in lines] == [
        ("packages", "rich 13.7, pyarrow 17"),
        ("numpy", "broken"),
    ]


def test_missing_extras_are_named_as_pip_wants_them() -> None:
    from verl.doctor.software import package

    found = [*package("verl-no-gym", ">=1", "gym"), *package("verl-no-math", ">=1", "math")]
    (line,) = grouped(found)
    assert line.seen == "verl-no-gym, verl-no-math"
    assert line.fix == ("pip install 'verl-no-gym>=1' 'verl-no-math>=1'")


def test_a_line_has_what_was_seen_and_how_to_fix_it() -> None:
    text = as_text([answer(Check("disk", "warning", "5 GiB free", "free some"))], 1.0)
    assert " !  disk               5 GiB free\n" in text
    assert "-> free some" in text and text.endswith("Ready: a run can start; 1 warning (1 s)\n")
    assert "\x1b[33m" in as_text([answer(Check("disk", "warning", "x"))], 1.0, colour=True)


def test_control_characters_of_findings_are_written_out() -> None:
    text = as_text([answer(Check("a\x1b[2J", "fatal", "b\x1b[2J", "c\x1b[2J"))], 1.0)
    assert "\x1b" not in text and text.count("\\x1b[2J") == 4


def test_the_verdict_names_what_to_fix() -> None:
    text = as_text([answer(Check("torch", "fatal", "x"), Check("disk", "warning", "y"))], 2.0)
    assert text.endswith("To fix first: torch; 1 warning (2 s)\n")


def test_every_probe_can_be_found_and_has_a_limit() -> None:
    import importlib

    for group in machine_probes("."):
        for probe in group:
            module, _, function = probe.target.partition(":")
            assert callable(getattr(importlib.import_module(module), function)) and 0 < probe.limit_s <= 180
