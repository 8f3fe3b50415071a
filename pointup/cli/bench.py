"""`pointup bench`: measures the speed of sampling, training and upsampling on this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from pointup.cli.input_files import File
from pointup.errors import ConfigError

SECTIONS = ("sampler", "reading", "data-path", "knn", "step", "reference", "upsampling", "scaling")
QUICK_SECONDS = 7.0
SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure the speed of sampling, reading, neighbour search, training and upsampling.

    Every figure is a median. Variants that are compared run alternately. On a machine with other
    load, only the ratios between variants are meaningful.
    """

    quick: bool = False
    """Measure small sizes only; takes less than a minute on two cores."""
    only: Annotated[str, tyro.conf.arg(metavar="NAME,...")] = ",".join(SECTIONS)
    """Sections to measure, separated by commas."""
    json: File = None
    """Write all figures to this JSON file."""
    compare: File = None
    """JSON file of an earlier run; print the figures that changed by more than 5 %."""
    device: Annotated[
        str | None, tyro.conf.arg(metavar="DEVICE", help_behavior_hint="(optional)")
    ] = None
    """Device to measure, by its torch name, such as cpu or cuda:1. By default an accelerator if
    there is one, else the CPU."""
    seconds: Annotated[
        float | None, tyro.conf.arg(metavar="SECONDS", help_behavior_hint="(optional)")
    ] = None
    """Time limit of each section in seconds: it starts no new measurement after it. By default 300,
    with --quick 7."""

    def run(self) -> int:
        names = self._names()
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"--seconds {self.seconds:g}: must be above 0")

        from pointup.benchmark.machine import (
            describe_machine,
            device_named,
            machine_differences,
            machine_lines,
        )
        from pointup.benchmark.sections import ALL
        from pointup.benchmark.tables import check_results_path, read_results, write_results
        from pointup.benchmark.timing import Effort
        from pointup.upsampling.in_memory import default_device

        if self.json is not None:
            check_results_path(self.json)
        before = read_results(self.compare) if self.compare else None
        device = default_device() if self.device is None else device_named(self.device)
        seconds = QUICK_SECONDS if self.quick else SECONDS
        if self.seconds is not None:
            seconds = self.seconds
        effort = Effort(self.quick, device, seconds)
        machine = {**describe_machine(device), "quick": self.quick}
        print("\n".join(machine_lines(machine)))
        differences = machine_differences(before["machine"], machine) if before else []
        if differences:
            differences.insert(0, f"\n{self.compare} was not measured in the same way:")
            print("\n".join(differences))
        measured: dict[str, Any] = {}
        for section in ALL:
            if section.name not in names:
                continue
            began = time.monotonic()
            print(f"\n{section.title} [{section.name}]\n{section.head()}", flush=True)
            measured[section.name] = []
            for row in section.measure(effort):
                measured[section.name].append(row)
                print(section.line(row), flush=True)
            if section.note:
                print(section.note)
            print(f"({time.monotonic() - began:.0f} s)", flush=True)
            if self.json:
                write_results(self.json, machine, measured)
        if before:
            # Again, because the sections lie between.
            print("\n".join(differences))
            print(f"\nChanged by more than 5 % since {self.compare}:")
            print("\n".join(changes(ALL, before["sections"], measured)) or "  nothing")
        return 0

    def _names(self) -> list[str]:
        names = [name.strip() for name in self.only.split(",") if name.strip()]
        unknown = [name for name in names if name not in SECTIONS]
        if unknown or not names:
            raise ConfigError(
                f"--only {self.only}: no section {', '.join(unknown)}; "
                f"there are {', '.join(SECTIONS)}"
            )
        return names


def changes(sections: Any, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each figure that changed, in the sections that both runs measured."""
    return [
        f"  {section.name}: {line}"
        for section in sections
        if section.name in before and section.name in after
        for line in section.changes(before[section.name], after[section.name])
    ]
