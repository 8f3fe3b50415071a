"""`pointup train`: train.py, also where pointup is installed without a checkout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from typing import Annotated

import tyro

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
    spec = spec_from_file_location("train", shipped_file("train.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["train"] = module
    spec.loader.exec_module(module)
    return int(module.main(list(args), prog="pointup train"))
