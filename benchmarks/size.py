"""`python -m benchmarks.size`: lines of code per package of `verl/`, beside the budget and the last release.

A line of code is one that is neither blank nor only a comment or docstring. The last line counts the modules of `verl`
that a single-process GRPO run imports, by running one (skip it with `--no-run`). Exit code 1 where a figure is above
`size_budget.json`. `--write` records the figures as those of the last release.
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
BUDGET = Path(__file__).with_name("size_budget.json")
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
    """Code lines and files of each package below `root/verl`; the median and the largest file; the longest file by
    all of its lines."""
    files: dict[str, int] = {}
    lengths: dict[str, int] = {}
    packages: dict[str, list[int]] = {}
    for path in sorted((root / "verl").rglob("*.py")):
        name = path.relative_to(root / "verl")
        source = path.read_text()
        files[str(name)], lengths[str(name)] = code_lines(source), len(source.splitlines())
        packages.setdefault(name.parts[0] if len(name.parts) > 1 else "(top)", []).append(files[str(name)])
    largest, longest = max(files, key=files.__getitem__), max(lengths, key=lengths.__getitem__)
    return {
        "packages": {name: {"files": len(sizes), "code": sum(sizes)} for name, sizes in packages.items()},
        "files": len(files),
        "code": sum(files.values()),
        "median_file": statistics.median(size for size in files.values() if size),
        "largest_file": [largest, files[largest]],
        "longest_file": [longest, lengths[longest]],
    }


def over_budget(sizes: dict[str, Any], budget: dict[str, Any]) -> list[str]:
    """A line for each figure that is above the budget."""
    checked = [
        ("code lines of verl/", sizes["code"], budget["code"]),
        (f"lines of verl/{sizes['longest_file'][0]}", sizes["longest_file"][1], budget["longest_file"]),
    ]
    for name, package in sizes["packages"].items():
        checked.append((f"code lines of {name}", package["code"], budget["packages"].get(name, 0)))
    if "grpo_modules" in sizes:
        checked.append(("modules of a GRPO run", sizes["grpo_modules"], budget["grpo_modules"]))
    return [f"{what}: {size}, the budget is {limit}" for what, size, limit in checked if size > limit]


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


def table(now: dict[str, Any], before: dict[str, Any], budget: dict[str, Any]) -> str:
    lines = [f"{'package':14} {'files':>6} {'code':>7} {'budget':>7} {before['commit']:>10}"]
    for name in sorted({*now["packages"], *before["packages"]}):
        here, there = (sizes["packages"].get(name, {"files": 0, "code": 0}) for sizes in (now, before))
        limit = budget["packages"].get(name, 0)
        lines.append(f"{name:14} {here['files']:6} {here['code']:7} {limit:7} {there['code']:10}")
    lines.append(f"{'all':14} {now['files']:6} {now['code']:7} {budget['code']:7} {before['code']:10}")
    for name in ("median_file", "largest_file", "longest_file", "grpo_modules"):
        figures = [sizes.get(name, "-") for sizes in (now, before)]
        here, there = (" ".join(map(str, each)) if isinstance(each, list) else each for each in figures)
        limit = f", budget: {budget[name]}" if name in budget else ""
        lines.append(f"{name.replace('_', ' ')}: {here} (before: {there}{limit})")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.size", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout (default: this one)")
    parser.add_argument("--no-run", action="store_true", help="do not count the modules a run imports")
    parser.add_argument("--write", metavar="COMMIT", help="record the figures as those of the last release")
    args = parser.parse_args(argv)
    sizes = count(args.root)
    if not args.no_run:
        sizes["grpo_modules"] = modules_of_a_grpo_run(args.root.resolve())
    if args.write:
        RELEASE.write_text(json.dumps({"commit": args.write, **sizes}, indent=1) + "\n")
    budget = json.loads(BUDGET.read_text())
    sys.stdout.write(table(sizes, json.loads(RELEASE.read_text()), budget))
    exceeded = over_budget(sizes, budget)
    sys.stderr.writelines(f"error: {line} (benchmarks/size_budget.json)\n" for line in exceeded)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
