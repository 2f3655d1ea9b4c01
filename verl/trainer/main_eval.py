"""`python -m verl.trainer.main_eval`, `verl eval`: what a file of responses is worth."""

from __future__ import annotations

import logging
import sys

from verl.runtime import run_command

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """The command: config from the arguments, `evaluate_file`, and the numbers as a table."""
    arguments = sys.argv[1:] if argv is None else argv

    def body() -> int:
        from verl.config.load import load_config
        from verl.config.schema import EvaluationConfig

        cfg = load_config(EvaluationConfig, arguments)
        from verl.reward.base import causes
        from verl.trainer.evaluation import evaluate_file, show

        result = evaluate_file(cfg)
        show(result.sources)
        if result.failures:
            text = "%d responses got no score, in %d rows. %s"
            logger.warning(text, len(result.failures), result.failed_rows, causes(result.failures))
        logger.info("numbers: %s", result.metrics_path)
        return 0

    return run_command(body)


if __name__ == "__main__":
    sys.exit(main())
