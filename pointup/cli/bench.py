"""`pointup bench`: measures the speed of training and upsampling on this machine."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Annotated, Any

from pointup.cli.input_files import File
from pointup.disk import check_output_file, write_text
from pointup.option_help import optional


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure the speed of reading, neighbour search, training and upsampling.

    Times of searches and of training steps are medians.
    """

    quick: bool = False
    """Measure small sizes only; takes less than a minute on two cores."""
    json: File = None
    """Write all figures to this JSON file."""
    compare: File = None
    """JSON file of an earlier run; print the figures that changed by more than 5 %."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """Device to measure, by its torch name, such as cpu or cuda:1. By default an accelerator if
    there is one, else the CPU."""

    def run(self) -> int:
        from pointup.benchmark.machine import (
            describe_machine,
            device_named,
            machine_differences,
            machine_lines,
        )
        from pointup.benchmark.section import Effort, read_results
        from pointup.benchmark.sections import ALL
        from pointup.upsampling.in_memory import default_device

        if self.json is not None:
            check_output_file(self.json)
        before = read_results(self.compare) if self.compare else None
        device = default_device() if self.device is None else device_named(self.device)
        machine = {**describe_machine(device), "quick": self.quick}
        print("\n".join(machine_lines(machine)))
        differences = machine_differences(before["machine"], machine) if before else []
        if differences:
            differences.insert(0, f"\n{self.compare} was not measured in the same way:")
            print("\n".join(differences))
        measured: dict[str, Any] = {}
        for section in ALL:
            began = time.monotonic()
            print(f"\n{section.title} [{section.name}]", flush=True)
            rows = list(section.measure(Effort(self.quick, device)))
            measured[section.name] = rows
            print("\n".join(filter(None, (section.table(rows), section.note))))
            print(f"({time.monotonic() - began:.0f} s)", flush=True)
            if self.json:
                content = {"machine": machine, "sections": measured}
                write_text(self.json, json.dumps(content, indent=2) + "\n")
        if before:
            # Again, because the sections lie between.
            print("\n".join(differences))
            print(f"\nChanged by more than 5 % since {self.compare}:")
            lines = [
                f"  {section.name}: {line}"
                for section in ALL
                if (earlier := before["sections"].get(section.name))
                for line in section.changes(earlier, measured[section.name])
            ]
            print("\n".join(lines) or "  nothing")
        return 0
