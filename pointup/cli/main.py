"""The `pointup` command: parses the command line and runs a subcommand.

A subcommand is a frozen keyword-only dataclass. Its fields are the options; its method `run` does
the work and returns the exit status. Heavy imports are inside `run`, so that `--help` is fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Annotated, Any, Union

import tyro

import pointup
from pointup.cli.input_files import check_inputs
from pointup.errors import ConfigError, PointupError
from pointup.option_help import with_option_help
from pointup.processes import stopping_as_interrupts
from pointup.progress import heartbeat
from pointup.terminal import (
    escape_output,
    one_line,
    print_error,
    status_with_output,
)

COMMANDS = {
    "train": "pointup.cli.train:Train",
    "prepare": "pointup.cli.prepare.subcommands:Prepare",
    "inspect": "pointup.cli.inspect:Inspect",
    "upsample": "pointup.cli.upsample.upsample_command:Upsample",
    "evaluate": "pointup.cli.evaluate:Evaluate",
    "view": "pointup.cli.view:View",
    "report": "pointup.cli.report:Report",
    "push": "pointup.cli.push:Push",
    "config": "pointup.cli.presets:Config",
    "doctor": "pointup.cli.doctor:Doctor",
    "bench": "pointup.cli.bench:Bench",
}
"""Module and class of each subcommand, in the order of `pointup --help`."""
LINES = {
    "prepare": "Make pairs from surveys, meshes, patches or simulated scenes.",
    "inspect": "Print statistics of a pair dataset, or of a file of points.",
    "evaluate": "Measure a model or upsampled clouds beside baselines.",
    "report": "Write an HTML page about training runs.",
    "push": "Upload a model with its card to the Hugging Face Hub.",
    "config": "Print the path of a launch configuration or a preset.",
    "doctor": "Check this machine, a dataset or a run.",
    "bench": "Measure the speed of this machine.",
}
"""Lines of `pointup --help` for commands whose own first lines are longer."""
IN_ONE_PROCESS = ("prepare", "evaluate")
"""Commands that several processes would all run in full, and whose files they would all write."""
TYRO_CONFIG = (
    tyro.conf.OmitArgPrefixes,
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.FlagCreatePairsOff,
)
INTERRUPTED = 130


def parse(args: Sequence[str]) -> Any:
    """Parse a command line. Exits with status 2 for wrong usage, and 0 after `--help`."""
    if args and args[0] in COMMANDS:
        command, args_of_tyro = with_option_help(command_class(args[0]), args[1:])
        return tyro.cli(command, prog=f"pointup {args[0]}", args=args_of_tyro, config=TYRO_CONFIG)
    # The list of all commands has a line for each.
    commands: Any = []
    for name in COMMANDS:
        command, args_of_tyro = with_option_help(command_class(name), args)
        text = LINES.get(name) or str(command.__doc__).partition("\n")[0]
        commands.append(Annotated[command, tyro.conf.subcommand(name, description=text)])
    any_command: Any = Union[tuple(commands)]  # noqa: UP007
    return tyro.cli(
        any_command,
        prog="pointup",
        description=f"pointup {pointup.__version__}: upsampling of point clouds of any size.",
        args=args_of_tyro,
        config=TYRO_CONFIG,
    )


def command_class(name: str) -> Any:
    module, _, attribute = COMMANDS[name].partition(":")
    return getattr(import_module(module), attribute)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: success; 1: an error, printed in one line on stderr; 2: wrong usage; 130: interrupted; 141:
    success, with all files written, but the reader of stdout closed the pipe before the end.
    POINTUP_TRACEBACK=1 in the environment prints the traceback of an error.
    """
    args = list(sys.argv[1:] if args is None else args)
    return status_with_output(partial(_status, args))


def _status(args: list[str]) -> int:
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("\npointup: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (PointupError, ValueError, OSError) as error:
        if os.environ.get("POINTUP_TRACEBACK"):
            raise
        print_error(f"pointup: error: {one_line(error)}")
        return 1


def _run(args: Sequence[str]) -> int:
    if args == ["--version"]:
        print(f"pointup {pointup.__version__}")
        return 0
    if args[:1] == ["train"]:
        # train.py parses its own options, which are too heavy to import for any other command.
        from pointup.cli.train import run_train

        return run_train(args[1:])
    command = parse(args or ["--help"])
    escape_output()
    if args[0] in IN_ONE_PROCESS and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"`pointup {args[0]}` runs in one process; start it without `accelerate launch`, or "
            "unset WORLD_SIZE"
        )
    check_inputs(command)
    shown = heartbeat(f"pointup {args[0]}") if os.environ.get("RANK", "0") == "0" else nullcontext()
    # A stopped call leaves neither an incomplete file nor anything in the temporary folder.
    with stopping_as_interrupts(), shown:
        return int(command.run())


if __name__ == "__main__":
    sys.exit(main())
