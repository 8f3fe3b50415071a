"""`pointup train`: train.py, also where pointup is installed without a checkout."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from itertools import takewhile
from typing import Annotated

import tyro

from pointup.disk import check_dataset_exists
from pointup.errors import ConfigError
from pointup.shipped import shipped_file


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train an upsampler on pairs.

    `pointup train --help` lists its options. On several processes: accelerate launch --config_file
    $(pointup config 8gpu) -m pointup train ...
    """

    options: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="OPTIONS")] = ()
    """Options of train.py."""

    def run(self) -> int:
        return run_train(self.options)


def run_train(args: Sequence[str]) -> int:
    """Run train.py with these arguments; returns its exit status."""
    if sys.platform == "win32":
        raise ConfigError("training on Windows needs WSL 2: run the same command there")
    # Before train.py imports PyTorch, which takes a second or more.
    is_first = os.environ.get("RANK", "0") == "0"
    data = args[args.index("--data") + 1 :] if is_first and "--data" in args else ()
    for name in takewhile(lambda arg: not arg.startswith("-"), data):
        if "=" not in name:
            check_dataset_exists(name)
    spec = spec_from_file_location("train", shipped_file("train.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["train"] = module
    spec.loader.exec_module(module)
    return int(module.main(list(args), prog="pointup train"))
