"""`python -m verl.trainer.main_eval`, `verl eval`: what a file of responses is worth, or a model on a known dataset."""

from __future__ import annotations

import sys

from verl.runtime import run_command


def main(argv: list[str] | None = None) -> int:
    """The command: config from the arguments, then `evaluate_file`; with --suite NAME `run_suite`."""
    arguments = sys.argv[1:] if argv is None else argv

    def body() -> int:
        if "--suite" in arguments:
            from verl.trainer.suites import run_suite

            at = arguments.index("--suite")
            run_suite("".join(arguments[at + 1 : at + 2]), arguments[:at] + arguments[at + 2 :])
            return 0
        from verl.config.load import load_config
        from verl.config.schema import EvaluationConfig

        cfg = load_config(EvaluationConfig, arguments)
        from verl.trainer.evaluation import evaluate_file

        evaluate_file(cfg)
        return 0

    return run_command(body)


if __name__ == "__main__":
    sys.exit(main())
