"""What `accelerate launch` was asked for; several processes learn only a part from it."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import NamedTuple

import psutil
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser


class LaunchRequest(NamedTuple):
    """The processes and the device that an `accelerate launch` command requests."""

    num_processes: int
    use_cpu: bool


def is_cpu_requested() -> bool | None:
    """Whether the launcher was to use the CPU; None if `accelerate launch` did not say.

    It sets ACCELERATE_USE_CPU for a single process only: the environments of several processes are
    the same with `use_cpu: true` as with `use_cpu: false`. These read the command of the launcher.
    """
    text = os.environ.get("ACCELERATE_USE_CPU", "").lower()
    if text:
        return text in ("true", "1", "yes")
    request = launch_request()
    return request.use_cpu if request else None


def launch_request() -> LaunchRequest | None:
    """The request of the `accelerate launch` that started this process, directly or by a script.

    None for another launcher, for none, and for one whose command or configuration is unreadable.
    """
    try:
        for process in psutil.Process().parents():
            arguments = launch_arguments(process.cmdline())
            if arguments is not None:
                return read_request(arguments, Path(process.cwd()))
    except (psutil.Error, FileNotFoundError):
        pass  # The process of another user, which a system may hide, or a file removed since.
    return None


def launch_arguments(command: list[str]) -> list[str] | None:
    """The arguments of an `accelerate launch` command line; None for any other."""
    words = [Path(word).name for word in command]
    for name in ("accelerate-launch", "accelerate-launch.exe", "accelerate.commands.launch"):
        if name in words:
            return command[words.index(name) + 1 :]
    if "launch" in words and any(word.startswith("accelerate") for word in words):
        return command[words.index("launch") + 1 :]
    return None


def read_request(arguments: list[str], folder: Path) -> LaunchRequest:
    """The request of these arguments, given in `folder`, and of their configuration file."""
    with contextlib.redirect_stderr(io.StringIO()):
        options, _ = launch_command_parser().parse_known_args(arguments)
    config_file = options.config_file
    if config_file is None and not options.cpu and Path(default_config_file).is_file():
        config_file = default_config_file
    num_processes, use_cpu = options.num_processes, options.cpu
    if config_file is not None:
        config = load_config_from_file(str(folder / config_file))
        use_cpu = use_cpu or config.use_cpu
        if num_processes is None:
            num_processes = config.num_processes
    return LaunchRequest(int(num_processes or 1), bool(use_cpu))
