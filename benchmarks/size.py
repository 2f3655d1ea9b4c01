"""`python -m benchmarks.size`: lines of code per package of `verl/`, beside those of the last release.

A line of code is one that is neither blank nor only a comment or docstring. The last line counts the modules of `verl`
that a single-process GRPO run imports, by running one (skip it with `--no-run`). `--write` records the figures.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import statistics
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RELEASE = Path(__file__).with_name("size_release.json")
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_IMPORTS = """
import sys
from verl.trainer.main_ppo import main
code = main(sys.argv[1:])
print(len([name for name in sys.modules if name.split(".")[0] == "verl"]))
sys.exit(code)
"""


def code_lines(source: str) -> int:
    """Lines that hold a token other than comments, docstrings and layout."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def count(root: Path) -> dict[str, Any]:
    """Code lines and files of each package below `root/verl`; the median and the largest file."""
    files: dict[str, int] = {}
    packages: dict[str, list[int]] = {}
    for path in sorted((root / "verl").rglob("*.py")):
        name = path.relative_to(root / "verl")
        files[str(name)] = code_lines(path.read_text())
        packages.setdefault(name.parts[0] if len(name.parts) > 1 else "(top)", []).append(files[str(name)])
    largest = max(files, key=files.__getitem__)
    return {
        "packages": {name: {"files": len(sizes), "code": sum(sizes)} for name, sizes in packages.items()},
        "files": len(files),
        "code": sum(files.values()),
        "median_file": statistics.median(size for size in files.values() if size),
        "largest_file": [largest, files[largest]],
    }


def modules_of_a_grpo_run(root: Path) -> int:
    """How many modules of ours one step of GRPO in one process imports."""
    from benchmarks.step import make_data, make_model

    with tempfile.TemporaryDirectory() as folder:
        rows, model = make_data(Path(folder), 4), make_model(Path(folder) / "model")
        overrides = [
            f"data.train_files={rows}",
            "data.train_batch_size=4",
            "data.max_prompt_length=32",
            "data.max_response_length=4",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "algorithm.adv_estimator=grpo",
            f"reward.custom_reward_function.path={rows.with_name('reward.py')}",
            "trainer.total_training_steps=1",
            "trainer.device=cpu",
            f"trainer.default_local_dir={folder}/run",
        ]
        done = subprocess.run(
            [sys.executable, "-c", _IMPORTS, *overrides],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the run failed:\n{done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


def table(now: dict[str, Any], before: dict[str, Any]) -> str:
    lines = [f"{'package':14} {'files':>6} {'code':>7} {before['commit']:>10}"]
    for name in sorted({*now["packages"], *before["packages"]}):
        here, there = (found["packages"].get(name, {"files": 0, "code": 0}) for found in (now, before))
        lines.append(f"{name:14} {here['files']:6} {here['code']:7} {there['code']:10}")
    lines.append(f"{'all':14} {now['files']:6} {now['code']:7} {before['code']:10}")
    for name in ("median_file", "largest_file", "grpo_modules"):
        here, there = (
            found.get(name, "-") if name != "largest_file" else " ".join(map(str, found[name]))
            for found in (now, before)
        )
        lines.append(f"{name.replace('_', ' ')}: {here} (before: {there})")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.size", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout (default: this one)")
    parser.add_argument("--no-run", action="store_true", help="do not count the modules a run imports")
    parser.add_argument("--write", metavar="COMMIT", help="record the figures as those of the last release")
    args = parser.parse_args(argv)
    found = count(args.root)
    if not args.no_run:
        found["grpo_modules"] = modules_of_a_grpo_run(args.root.resolve())
    if args.write:
        RELEASE.write_text(json.dumps({"commit": args.write, **found}, indent=1) + "\n")
    sys.stdout.write(table(found, json.loads(RELEASE.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
