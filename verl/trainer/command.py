"""How every command ends: a result, one clear message, or a crash report."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable

from verl.errors import VerlError

logger = logging.getLogger(__name__)


def run_command(body: Callable[[], int | None]) -> int:
    """Run a command's body and turn what it raises into one message and an exit code.

    0: done; 2: something the user can mend (the message says how); 3: training stopped itself; 130: interrupted.
    Anything else is a defect of ours and keeps its traceback."""
    from verl.observe.logs import setup_logging

    setup_logging()
    try:
        return body() or 0
    except VerlError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        from verl.observe.causes import likely_fix

        sys.stderr.write(f"error: {error}. {likely_fix(error)}\n")
        return VerlError.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
