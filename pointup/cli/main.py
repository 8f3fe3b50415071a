"""The `pointup` command: finds the app that was asked for and runs it.

An app is a module of `pointup.cli` with a frozen keyword-only dataclass of its own name, whose
fields are the options and whose `run` does the work and returns the exit status. Apps import what
is heavy inside `run`, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, Union

import tyro

import pointup
from pointup.errors import PointupError

APPS = ("prepare", "inspect", "upsample", "evaluate", "doctor", "bench")
TYRO_CONFIG = (
    tyro.conf.OmitArgPrefixes,
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.FlagCreatePairsOff,
)
INTERRUPTED = 130
PIPE_CLOSED = 141


def parse(args: Sequence[str]) -> Any:
    """The app with its options filled in. Exits with 2 for wrong usage and 0 after `--help`."""
    apps: Any = [
        Annotated[
            getattr(import_module(f"pointup.cli.{name}"), name.capitalize()),
            tyro.conf.subcommand(name),
        ]
        for name in APPS
        if find_spec(f"pointup.cli.{name}")
    ]
    any_app: Any = Union[tuple(apps)]  # noqa: UP007
    return tyro.cli(
        any_app,
        prog="pointup",
        description=f"pointup {pointup.__version__}: upsampling of point clouds of any size.",
        args=args,
        config=TYRO_CONFIG,
    )


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: done; 1: an error, told in one line on stderr; 2: wrong usage; 130: interrupted.
    POINTUP_TRACEBACK=1 in the environment shows where an error came from.
    """
    args = list(sys.argv[1:] if args is None else args)
    try:
        try:
            return _run(args)
        finally:
            # Here rather than at exit, where a reader that has gone could not be handled.
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\npointup: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # As in `pointup inspect DIR | head`; the flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (PointupError, ValueError, OSError) as error:
        if os.environ.get("POINTUP_TRACEBACK"):
            raise
        message = " ".join(str(error).split())
        print(f"pointup: error: {message}", file=sys.stderr)
        return 1


def _run(args: Sequence[str]) -> int:
    if args == ["--version"]:
        print(f"pointup {pointup.__version__}")
        return 0
    return int(parse(args or ["--help"]).run())


if __name__ == "__main__":
    sys.exit(main())
