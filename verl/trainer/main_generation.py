"""`python -m verl.trainer.main_generation`, `verl generate`: responses for a file of prompts."""

from __future__ import annotations

import sys

from verl.runtime import run_command


def main(argv: list[str] | None = None) -> int:
    """The command: config from the arguments, then `generate_file`."""
    arguments = sys.argv[1:] if argv is None else argv

    def body() -> int:
        from verl.config.load import load_config
        from verl.config.schema import GenerationConfig

        cfg = load_config(GenerationConfig, arguments)
        from verl.trainer.generation import generate_file

        generate_file(cfg)
        return 0

    return run_command(body)


if __name__ == "__main__":
    sys.exit(main())
