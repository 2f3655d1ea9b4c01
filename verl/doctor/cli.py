"""`verl doctor [RUN | CONFIG.yaml] [key=value ...]`: which probes there are, and the report.

Exit code 0: a run could start; 1: something is marked X; 2: the arguments are wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl import __version__
from verl.doctor.runner import Check, DoctorProbe, ProbeAnswer, run_groups
from verl.errors import ConfigError
from verl.observe.terminal import escape_control, raw

if TYPE_CHECKING:
    from verl.requirements import PackageRequirement

DEFAULT_FOLDER = "checkpoints"
SOFTWARE, MACHINE, CONFIG, RUN = "software", "machine", "this config", "this run"
_MARKS = {"ok": ("ok", "32"), "note": (" -", "2"), "warning": (" !", "33"), "fatal": (" X", "31;1")}
_NAME_WIDTH = 18
_NO_PACKAGES = "verl's dependencies are not installed"


def main(argv: list[str] | None = None) -> int:
    from verl.runtime import run_command

    arguments = sys.argv[1:] if argv is None else argv
    parsed = build_parser().parse_intermixed_args(arguments)  # may exit, as argparse does
    return run_command(lambda: run(parsed))


def build_parser() -> argparse.ArgumentParser:
    parsed = argparse.ArgumentParser(
        prog="verl doctor",
        description="Checks this machine, and a config or a run folder where one is given.",
        epilog="Marks: ok; - for information; ! works less well; X must be fixed (exit code 1).",
    )
    parsed.add_argument(
        "what",
        nargs="*",
        metavar="RUN|CONFIG.yaml|key=value",
        help="a run folder, a YAML file, and keys as `verl train` and `verl sft` take them",
    )
    parsed.add_argument(
        "--exact",
        action="store_true",
        help="compare the passes of trainer.exact with the model of the run folder",
    )
    parsed.add_argument("--json", action="store_true", help="for programs")
    parsed.add_argument("--quick", action="store_true", help="do not import optional packages")
    parsed.add_argument("--timeout", type=float, metavar="S", help="seconds for each check")
    return parsed


def run(args: argparse.Namespace) -> int:
    start = time.monotonic()
    if args.timeout is not None and args.timeout <= 0:
        raise ConfigError(f"--timeout is {args.timeout:g}; it must be above 0")
    folder, arguments = parse_target(args.what)
    if args.exact and folder is None:
        raise ConfigError("--exact needs a run folder: verl doctor --exact RUN")
    default = [word.partition("=")[2] for word in arguments if word.startswith("trainer.default_local_dir=")]
    # The core packages we need here.
    if all(importlib.util.find_spec(name) is not None for name in ("packaging", "psutil")):
        groups = machine_probes(str(folder or (default or [DEFAULT_FOLDER])[-1]), quick=args.quick)
        if folder is not None:
            groups.insert(0, [_probe("run", "config:run_folder", RUN, path=str(folder))])
        if args.exact:
            probe = _probe("exact", "exact:exact", RUN, path=str(folder))
            groups.insert(1, [replace(probe, limit_s=600.0, on_failure="fatal")])
        if arguments:
            groups.insert(0, config_probes(arguments))
        answers = as_config_needs(run_groups(groups, args.timeout))
    else:
        missing = Check("packages", "fatal", _NO_PACKAGES, "pip install -e . in the checkout")
        answers = [ProbeAnswer(_probe("packages", "", SOFTWARE), [missing])]
    if args.json:
        write(as_json(answers) + "\n")
    else:
        terminal = sys.stdout.isatty()
        width = min(140, shutil.get_terminal_size((110, 24)).columns) if terminal else 110
        colour = terminal and "NO_COLOR" not in os.environ
        write(as_text(answers, time.monotonic() - start, width=width, colour=colour))
    return 1 if any(answer.fatal for answer in answers) else 0


def parse_target(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """(run folder, arguments of a training command) from the command line."""
    paths = [word for word in arguments if "=" not in word and not word.startswith(("+", "~"))]
    keys = [word for word in arguments if word not in paths]
    if len(paths) > 1:
        raise ConfigError(f"give one run folder or YAML file, not {len(paths)}: {', '.join(paths)}")
    if not paths:
        return None, keys
    path = Path(paths[0]).expanduser()
    if path.is_dir():
        found = (path / "config.yaml").is_file()
        return path, [*(["--config-path", str(path), "--config-name", "config.yaml"] if found else []), *keys]
    if path.is_file():
        return None, ["--config-path", str(path.parent), "--config-name", path.name, *keys]
    raise ConfigError(f"'{paths[0]}' is neither a run folder nor a YAML file; keys are given as key=value")


# -- the probes ---------------------------------------------------------------------------------------------------


def _probe(label: str, target: str, section: str, **arguments: Any) -> DoctorProbe:
    return DoctorProbe(label, f"verl.doctor.{target}", section, arguments=arguments)


def machine_probes(folder: str, *, quick: bool = False) -> list[list[DoctorProbe]]:
    """Groups of probes, each run in one process. `folder`: where run folders go."""
    from verl.requirements import package_requirements

    required = package_requirements()
    packages = {each.name: _package_probe(each, quick) for each in required}
    core = [each.name for each in required if not each.extra]
    torch = replace(packages["torch"], target="verl.doctor.software:torch", required=True)
    torch = replace(torch, arguments={"versions": torch.arguments["versions"]})
    light = [
        _probe("python", "software:python", SOFTWARE),
        *(packages[name] for name in core if name not in ("torch", "transformers")),
        _probe("hugging face", "machine:hub", SOFTWARE),
        _probe("cpu cores", "machine:cores", MACHINE),
        _probe("memory", "machine:memory", MACHINE),
        _probe("shared memory", "machine:shared_memory", MACHINE),
        _probe("limits", "machine:limits", MACHINE),
        replace(_probe("disk", "machine:disk", MACHINE, folder=folder), on_failure="fatal"),
        _probe("hostname", "software:hostname", MACHINE),
        _probe("sandbox", "machine:sandbox", MACHINE),
    ]
    extras = [[packages[each.name]] for each in required if each.extra]
    ray = _probe("ray cluster", "software:ray_cluster", MACHINE)
    return [light, [torch, _probe("gpu", "software:gpus", MACHINE), packages["transformers"]], [ray], *extras]


def _package_probe(package: PackageRequirement, quick: bool) -> DoctorProbe:
    return DoctorProbe(
        package.name,
        "verl.doctor.software:package",
        SOFTWARE,
        limit_s=180.0,  # importing vLLM on a busy machine
        on_failure="warning" if package.extra else "fatal",
        fix=f"pip install --force-reinstall '{package.requirement}'",
        arguments={**asdict(package), "load": not (quick and package.extra)},
    )


def config_probes(arguments: list[str]) -> list[DoctorProbe]:
    """For the command line of a training command."""
    targets = {"config": "config", "model": "model", "data.train_files": "data", "data.val_files": "data"}
    probes = []
    for name, target in (*targets.items(), ("reward", "reward")):
        more = {"key": name} if target == "data" else {}
        probe = _probe(name, f"config:{target}", CONFIG, arguments=arguments, **more)
        # Offline: a check must not download anything.
        probe = replace(probe, limit_s=180.0, environment={"HF_HUB_OFFLINE": "1"})
        probes.append(replace(probe, on_failure="fatal", required=name == "config"))
    return probes


def as_config_needs(answers: list[ProbeAnswer]) -> list[ProbeAnswer]:
    """A warning about something optional is fatal where the config needs it."""
    needs: set[str] = set()
    for finding in (finding for answer in answers for finding in answer.findings):
        needs |= set(finding.data.get("needs", ()))
        if finding.data.get("processes", 1) > 1:
            needs |= {"hostname", "ray cluster"}

    def weighed(finding: Check) -> Check:
        missing = finding.status == "warning" or finding.group == "missing extras"
        if finding.subject not in needs or not missing:
            return finding
        return replace(finding, status="fatal", group="", seen=f"{finding.seen}; this config needs it")

    return [ProbeAnswer(answer.probe, [weighed(f) for f in answer.findings]) for answer in answers]


# -- the report ---------------------------------------------------------------------------------------------------


def as_json(answers: Sequence[ProbeAnswer]) -> str:
    findings = [
        {"section": answer.probe.section, **{k: v for k, v in asdict(finding).items() if k != "group"}}
        for answer in answers
        for finding in answer.findings
    ]
    ok = not any(answer.fatal for answer in answers)
    return json.dumps({"verl": __version__, "ok": ok, "findings": findings}, indent=1)


def as_text(answers: Sequence[ProbeAnswer], seconds: float, *, width: int = 110, colour: bool = False) -> str:
    """One line per finding, by section, and a verdict."""
    lines = [f"verl {__version__} on this machine"]
    for section in (SOFTWARE, MACHINE, CONFIG, RUN):
        findings = [f for answer in answers if answer.probe.section == section for f in answer.findings]
        if findings:
            lines += ["", section]
            lines += [line for finding in grouped(findings) for line in _lines(finding, width, colour)]
    found = [finding for answer in answers for finding in answer.findings]
    broken = dict.fromkeys(escape_control(finding.subject) for finding in found if finding.status == "fatal")
    count = sum(finding.status == "warning" for finding in found)
    warnings = f"{count} warning{'' if count == 1 else 's'} ({seconds:.0f} s)"
    verdict = f"To fix first: {', '.join(broken)}" if broken else "Ready: a run can start"
    return "\n".join([*lines, "", f"{verdict}; {warnings}"]) + "\n"


def grouped(findings: Sequence[Check]) -> list[Check]:
    """Findings of one group as one, in the place of the first."""
    lines: dict[str, Check] = {}
    for number, finding in enumerate(findings):
        if not finding.group:
            lines[str(number)] = finding
            continue
        missing = finding.group.startswith("missing")
        seen = finding.subject if missing else f"{finding.subject} {finding.seen}"
        before = lines.get(finding.group)
        if before is None:
            lines[finding.group] = replace(finding, subject=finding.group, seen=seen)
        else:
            fix = f"{before.fix} {finding.fix.removeprefix('pip install ')}" if missing else ""
            lines[finding.group] = replace(before, seen=f"{before.seen}, {seen}", fix=fix)
    return list(lines.values())


def _lines(finding: Check, width: int, colour: bool) -> Iterator[str]:
    mark, code = _MARKS[finding.status]
    indent = " " * (_NAME_WIDTH + 5)
    text_width = max(40, width - len(indent))
    lines = textwrap.TextWrapper(text_width, break_long_words=False, break_on_hyphens=False)
    first, *rest = lines.wrap(escape_control(finding.seen)) or [""]
    painted = f"\x1b[{code}m{mark}\x1b[0m" if colour else mark
    yield f"{painted}  {escape_control(finding.subject):<{_NAME_WIDTH}} {first}"
    if finding.fix and finding.status != "ok":
        lines.initial_indent, lines.subsequent_indent = "-> ", "   "
        rest += lines.wrap(escape_control(finding.fix))
    yield from (indent + line for line in rest)


def write(text: str) -> None:
    """Write a report, whose only control characters are its colours."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    raw(sys.stdout).write(text)
    sys.stdout.flush()
