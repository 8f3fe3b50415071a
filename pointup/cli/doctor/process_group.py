"""A group of processes: whether each collective that training uses works, and how long it takes."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list, gather_object

from pointup.cli.doctor.accelerators import accelerator_findings, compute_finding
from pointup.cli.doctor.finding import Finding, fail, in_bytes, in_time, ok, reason_of, warn
from pointup.cli.doctor.kernels import kernel_finding
from pointup.cli.doctor.machine import machine_findings
from pointup.errors import ConfigError, TrainingError
from pointup.model.config import ModelConfig
from pointup.model.upsampler import Upsampler
from pointup.training.distributed.accelerator import make_accelerator
from pointup.training.distributed.process_group import connect_store
from pointup.training.faults.consistency import PACKAGES, checksum_of_code, differences

MINUTES = 2.0
"""For a collective that another process doesn't come to, and for all to come at the start."""
REPEATS = 5
SLOW_SECONDS = 0.25
REMEDY = (
    "name the network to use in NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, open it in the firewall; "
    "NCCL_DEBUG=INFO says more"
)


class Meeting(NamedTuple):
    """Something all processes do together, what each must get of it, and what it is used for."""

    name: str
    use: str
    meet: Callable[[], Any]
    expected: Any


def join() -> Accelerator | Finding:
    """The group that this process was launched in, or why there is none."""
    try:
        return make_accelerator(Path(), collective_timeout_minutes=MINUTES)
    except ConfigError as error:
        return fail("group", reason_of(error), "mend the launch configuration")
    except (TrainingError, RuntimeError, OSError) as error:
        reason = reason_of(error.__cause__ or error)
        where = f"process {os.environ.get('RANK')} on {platform.node()}"
        text = f"{where} found no group of {os.environ.get('WORLD_SIZE')}: {reason}"
        return fail(
            "group", text, "start all machines at once, on one --main_process_ip; " + REMEDY
        )


def group_findings(
    accelerator: Accelerator, num_workers: int, token_budget: int | str
) -> list[Finding]:
    """What all processes found, for the main one to tell; every process must call this.

    What all machines found alike is told once.
    """
    mine = [compute_finding(accelerator.device)]
    if accelerator.device.type == "cuda":
        mine.append(kernel_finding(accelerator.device))
    if accelerator.is_local_main_process:
        mine = [*machine_findings(num_workers, token_budget), *accelerator_findings(), *mine]
    findings = meeting_findings(accelerator, mine)
    return findings if accelerator.is_main_process else []


def meeting_findings(accelerator: Accelerator, mine: list[Finding]) -> list[Finding]:
    """What all processes found together, after what each of them found before."""
    try:
        everyones = gather_object([(platform.node(), [asdict(finding) for finding in mine])])
        findings = merged([(h, [Finding(**f) for f in found]) for h, found in everyones])
        findings += [place_finding(accelerator, [host for host, _ in everyones])]
        findings += consistency_findings()
        findings += collective_findings(accelerator)
    except RuntimeError as error:
        return [fail("group", f"a process has gone: {reason_of(error)}", REMEDY)]
    return findings


def merged(everyones: list[tuple[str, list[Finding]]]) -> list[Finding]:
    """Findings in the order of the processes, with the machine's name where machines differ."""
    hosts = {host for host, _ in everyones}
    having: dict[Finding, set[str]] = {}
    for host, findings in everyones:
        for finding in findings:
            having.setdefault(finding, set()).add(host)
    named = []
    for finding, its in having.items():
        place = "" if its == hosts else f"{', '.join(sorted(its))}: "
        named.append(Finding(finding.level, finding.subject, place + finding.text, finding.remedy))
    return named


def place_finding(accelerator: Accelerator, hosts: list[str]) -> Finding:
    on = ", ".join(f"{number} on {host}" for host, number in Counter(hosts).items())
    number, backend = accelerator.num_processes, torch.distributed.get_backend()
    return ok("group", f"{number} processes over {backend}: {on}")


def consistency_findings() -> list[Finding]:
    """Whether all processes run the same versions and the same code."""
    facts = {
        "packages": {"python": platform.python_version(), **{n: version(n) for n in PACKAGES}},
        "code": checksum_of_code(),
    }
    texts = {name: json.dumps(fact) for name, fact in facts.items()}
    differing = differences(gather_object([(platform.node(), texts)]))
    if not differing:
        return [ok("agreement", "the same versions and the same code everywhere")]
    return [fail("agreement", line, "install the same on all machines") for line in differing]


def collective_findings(accelerator: Accelerator) -> list[Finding]:
    """A line for each kind of meeting that training has."""
    took, wrong = [], []
    meetings = meetings_of(accelerator)
    for _, _, meet, expected in meetings:
        seconds = []
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            result = meet()
            if isinstance(result, torch.Tensor):
                result[0].item()  # Waits for an accelerator.
            seconds.append(time.perf_counter() - began)
        if isinstance(result, torch.Tensor):
            result = result.cpu().double().sum().item()
        # The first one opens connections.
        took.append(float(np.median(seconds[1:])))
        wrong.append(result != expected)
    everyones = gather_object([(took, wrong)])
    longest = np.max([times for times, _ in everyones], axis=0)
    findings = []
    for i, meeting in enumerate(meetings):
        text = f"{in_time(longest[i])}: {meeting.use}"
        ranks = [str(rank) for rank, (_, is_wrong) in enumerate(everyones) if is_wrong[i]]
        if ranks:
            wrongly = f"wrong on process {', '.join(ranks)}; {text}"
            findings.append(fail(meeting.name, wrongly, "see to network and accelerators"))
        elif longest[i] > SLOW_SECONDS:
            findings.append(warn(meeting.name, text, f"slow: {REMEDY}"))
        else:
            findings.append(ok(meeting.name, text))
    return findings


def meetings_of(accelerator: Accelerator) -> list[Meeting]:
    rank, number = accelerator.process_index, accelerator.num_processes
    store = connect_store()
    assert store is not None
    network = Upsampler(**asdict(ModelConfig()))
    num_weights = sum(weight.numel() for weight in network.parameters())
    weights = torch.ones(num_weights, device=accelerator.device)
    single = torch.full((1,), rank, device=accelerator.device)

    def post() -> list[str]:
        store.set(f"doctor_{rank}", str(rank))
        return [text.decode() for text in store.multi_get([f"doctor_{r}" for r in range(number)])]

    size = in_bytes(4 * num_weights)
    return [
        Meeting("store", "heartbeats", post, [str(r) for r in range(number)]),
        Meeting("barrier", "the start", accelerator.wait_for_everyone, None),
        Meeting("broadcast", f"{size} of weights", partial(broadcast, weights), num_weights),
        Meeting(
            "all-reduce", f"{size} of gradients, every step",
            lambda: accelerator.reduce(weights, reduction="sum"), number * num_weights,
        ),
        Meeting("gather", "fingerprints", lambda: accelerator.gather(single), sum(range(number))),
        Meeting(
            "gather objects", "evaluations",
            lambda: gather_object([rank]), list(range(number)),
        ),
        Meeting(
            "broadcast objects", "outcome of saving",
            lambda: broadcast_object_list([rank]), [0],
        ),
    ]  # fmt: skip


def main(answer: Path) -> int:
    """A process of a group that was launched to be looked at; the main one writes what it found."""
    accelerator = join()
    if isinstance(accelerator, Finding):
        findings = [accelerator]
    else:
        findings = meeting_findings(accelerator, [])
    if os.environ.get("RANK", "0") == "0":
        answer.write_text(json.dumps([asdict(finding) for finding in findings]))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
