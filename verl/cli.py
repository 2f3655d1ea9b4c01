"""The `verl` command: a thin table from words to programs. Nothing heavy is imported before a word is chosen."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

from verl.observe.terminal import protect_terminal, while_read

# Programs have `add_arguments(parser)` and `run(args) -> int`, or `main(arguments) -> int`, which reads the rest of the
# command line itself (Hydra-style overrides). A nested table makes a second word.
PROGRAMS: dict[str, tuple[str, str] | dict[str, tuple[str, str]]] = {
    "train": ("verl.trainer.main_ppo", "reinforcement learning: verl train key=value ... (--help, --check)"),
    "sft": ("verl.trainer.sft_trainer", "supervised fine-tuning: verl sft key=value ... (--help, --check)"),
    "dpo": ("verl.trainer.dpo_trainer", "preference training: verl dpo key=value ... (--help, --check)"),
    "generate": (
        "verl.trainer.main_generation",
        "responses for a file of prompts: verl generate key=value ...",
    ),
    "serve": ("verl.trainer.main_serve", "a model behind the HTTP interfaces of OpenAI and Anthropic"),
    "eval": (
        "verl.trainer.main_eval",
        "scores for a file of responses, or of a model on a --suite: verl eval key=value ...",
    ),
    "fork": (
        "verl.trainer.fork",
        "a new run from a checkpoint under other settings: verl fork RUN --step N key=value ...",
    ),
    "merge": ("verl.model_merger", "checkpoint to a Hugging Face folder, verified"),
    "doctor": ("verl.doctor.cli", "what works on this machine: verl doctor [RUN or CONFIG] [key=value ...]"),
    "demo": ("verl.demo.cli", "watch a tiny model learn, in minutes, with no download"),
    "prepare": ("verl.data.prepare.cli", "turn a known dataset into training files"),
    "data": {"inspect": ("verl.data.inspect", "what the trainer would make of a data file")},
    "env": {"test": ("verl.trainer.env_test", "try an environment, tools or users before training")},
    "reward": {
        "test": ("verl.reward.cli", "try a reward function on a few rows before training"),
        "train": (
            "verl.trainer.reward_trainer",
            "a reward model from pairs: key=value ... (--help, --check)",
        ),
    },
    "recipes": ("verl.config.recipes", "published methods, for verl train recipe=NAME"),
    "plan": (
        "verl.trainer.plan_cli",
        "whether a run fits on N GPUs that need not be here, and whether its prompts teach (--learn)",
    ),
    "ckpt": ("verl.checkpoint.cli", "list, verify and prune checkpoints"),
    "tool-server": (
        "verl.agents.serve",
        "tools over HTTP: Python in a sandbox, a calculator, search, your own",
    ),
    "replay": ("verl.trainer.replay", "repeat steps of a run and report the first number that differs"),
    "why": ("verl.trainer.why", "what a step did to the responses it trained on, group by group"),
    "trace": ("verl.observe.trace", "phases, metrics and profiles of a run in one file for Perfetto"),
    "view": (
        "verl.observe.view",
        "state, metrics, findings and samples of a run: terminal, browser, one file",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    protect_terminal()
    arguments = list(sys.argv[1:] if argv is None else argv)
    return while_read(lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    if arguments and arguments[0] in PROGRAMS:
        return _run_program(arguments)
    if arguments in (["--version"], ["-V"]):
        sys.stdout.write(importlib.import_module("verl.doctor.software").version_report())
        return 0
    if arguments[:1] == ["completion"]:
        from verl.completion import main as completion

        return completion(arguments[1:], PROGRAMS)
    if arguments and arguments[0] not in ("-h", "--help", "help"):
        sys.stderr.write(
            f"{_unknown(arguments[0], [*PROGRAMS, 'completion'])} `verl --help` lists all commands\n"
        )
        return 2
    sys.stdout.write(_usage())
    return 0


def _unknown(word: str, known: Sequence[str], before: str = "verl") -> str:
    near = difflib.get_close_matches(word.lower(), known, n=1)
    return f"error: unknown command {word!r}." + (f" Did you mean `{before} {near[0]}`?" if near else "")


def _run_program(arguments: list[str]) -> int:
    entry, words, rest = PROGRAMS[arguments[0]], arguments[:1], arguments[1:]
    if isinstance(entry, dict):
        if not rest or rest[0] not in entry:
            wanted = ""
            if rest and not rest[0].startswith("-"):
                wanted = _unknown(rest[0], list(entry), f"verl {words[0]}") + "\n"
            lines = [f"  verl {words[0]} {name:12} {about}" for name, (_, about) in entry.items()]
            out = sys.stdout if rest[:1] in (["-h"], ["--help"]) else sys.stderr
            out.write(f"{wanted}usage:\n" + "\n".join(lines) + "\n")
            return 0 if out is sys.stdout else 2
        words, rest, entry = [*words, rest[0]], rest[1:], entry[rest[0]]
    module = importlib.import_module(entry[0])
    if not hasattr(module, "add_arguments"):
        return int(module.main(rest))
    parser = argparse.ArgumentParser(prog=f"verl {' '.join(words)}", description=entry[1])
    module.add_arguments(parser)
    args = parser.parse_args(rest)

    from verl.runtime import run_command

    return run_command(lambda: module.run(args))


def _usage() -> str:
    lines = ["usage: verl COMMAND ...", ""]
    for name, entry in PROGRAMS.items():
        about = [entry[1]] if isinstance(entry, tuple) else [f"{k}: {a}" for k, (_, a) in entry.items()]
        lines.append(f"  {name:10} {'; '.join(about)}")
    lines += [
        "  completion completion of commands and keys in bash, zsh and fish: verl completion --help",
        "  --version  the versions that matter in a bug report",
    ]
    return "\n".join([*lines, "", "verl COMMAND --help says more.", ""])


if __name__ == "__main__":
    sys.exit(main())
