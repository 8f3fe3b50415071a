"""The exit status of a training program, and what it prints when it fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from pointup.errors import PointupError
from pointup.terminal import status_with_output
from pointup.training.distributed.preemption import EXIT_INTERRUPTED
from pointup.training.distributed.process_group import report_error


def exit_status(program: Callable[[], None], prog: str) -> int:
    """Run a program that is called `prog`; returns its exit status.

    0: success; 1: a PointupError or ValueError, printed in one line on stderr; EXIT_INTERRUPTED:
    interrupted during the start; PIPE_CLOSED: success, but the reader of stdout closed the pipe.
    With POINTUP_TRACEBACK=1 in the environment errors are raised.
    """
    return status_with_output(partial(_status, program, prog))


def _status(program: Callable[[], None], prog: str) -> int:
    try:
        program()
    except (PointupError, ValueError) as error:
        if os.environ.get("POINTUP_TRACEBACK"):
            raise
        report_error(f"{prog}: error: {error}")
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # During the start there is nothing to save.
    return 0
