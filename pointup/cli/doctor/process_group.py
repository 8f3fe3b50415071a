"""Checks a process group: results and times of all collectives that training uses."""

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

from pointup.cli.doctor.accelerators import accelerator_findings, compute_finding, kernel_finding
from pointup.cli.doctor.finding import Finding, fail, in_bytes, in_time, ok, reason_of, warn
from pointup.cli.doctor.launch import machine_findings
from pointup.errors import ConfigError, TrainingError
from pointup.model.config import ModelConfig
from pointup.model.upsampler import Upsampler
from pointup.training.distributed.accelerator import make_accelerator
from pointup.training.distributed.process_group import connect_store
from pointup.training.faults.consistency import PACKAGES, checksum_of_code, differences

MINUTES = 2.0
"""Timeout of a collective, and of the start of the group."""
REPEATS = 5
SLOW_SECONDS = 0.25
REMEDY = (
    "set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME to the network interface, open its ports in the "
    "firewall; NCCL_DEBUG=INFO logs more"
)


class Collective(NamedTuple):
    """A collective operation, its expected result on every process, and its use in training."""

    name: str
    use: str
    run: Callable[[], Any]
    expected: Any


def join() -> Accelerator | Finding:
    """The process group of this launch, or a failed check if it can't be formed."""
    try:
        return make_accelerator(Path(), collective_timeout_minutes=MINUTES)
    except ConfigError as error:
        return fail("group", reason_of(error), "fix the launch configuration")
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
    """Findings of all processes, on the main one, and [] on others. Every process must call this.

    Findings that are equal on all machines are reported once.
    """
    own = [compute_finding(accelerator.device)]
    if accelerator.device.type == "cuda":
        own.append(kernel_finding(accelerator.device))
    if accelerator.is_local_main_process:
        own = [*machine_findings(num_workers, token_budget), *accelerator_findings(), *own]
    findings = joint_findings(accelerator, own)
    return findings if accelerator.is_main_process else []


def joint_findings(accelerator: Accelerator, own: list[Finding]) -> list[Finding]:
    """The findings `own` of all processes, followed by checks of the group and its collectives."""
    try:
        gathered = gather_object([(platform.node(), [asdict(finding) for finding in own])])
        findings = merged([(h, [Finding(**f) for f in found]) for h, found in gathered])
        findings += [group_finding(accelerator, [host for host, _ in gathered])]
        findings += consistency_findings()
        findings += collective_findings(accelerator)
    except RuntimeError as error:
        return [fail("group", f"a process has ended: {reason_of(error)}", REMEDY)]
    return findings


def merged(gathered: list[tuple[str, list[Finding]]]) -> list[Finding]:
    """Findings in the order of the processes, prefixed by the machines if not all have them."""
    hosts = {host for host, _ in gathered}
    hosts_of: dict[Finding, set[str]] = {}
    for host, findings in gathered:
        for finding in findings:
            hosts_of.setdefault(finding, set()).add(host)
    named = []
    for finding, some in hosts_of.items():
        prefix = "" if some == hosts else f"{', '.join(sorted(some))}: "
        named.append(Finding(finding.level, finding.subject, prefix + finding.text, finding.remedy))
    return named


def group_finding(accelerator: Accelerator, hosts: list[str]) -> Finding:
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
        return [ok("consistency", "all processes run the same versions and the same code")]
    return [fail("consistency", line, "install the same on all machines") for line in differing]


def collective_findings(accelerator: Accelerator) -> list[Finding]:
    """Run every collective of training some times on all processes, and check its result."""
    took, wrong = [], []
    collectives = collectives_of(accelerator)
    for _, _, run, expected in collectives:
        seconds = []
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            result = run()
            if isinstance(result, torch.Tensor):
                result[0].item()  # Waits for an accelerator.
            seconds.append(time.perf_counter() - began)
        if isinstance(result, torch.Tensor):
            result = result.cpu().double().sum().item()
        # The first run opens connections.
        took.append(float(np.median(seconds[1:])))
        wrong.append(result != expected)
    gathered = gather_object([(took, wrong)])
    longest = np.max([times for times, _ in gathered], axis=0)
    findings = []
    for i, collective in enumerate(collectives):
        text = f"{in_time(longest[i])}: {collective.use}"
        ranks = [str(rank) for rank, (_, is_wrong) in enumerate(gathered) if is_wrong[i]]
        if ranks:
            text = f"wrong result on process {', '.join(ranks)}; {text}"
            findings.append(fail(collective.name, text, "check network and accelerators"))
        elif longest[i] > SLOW_SECONDS:
            findings.append(warn(collective.name, text, f"slow: {REMEDY}"))
        else:
            findings.append(ok(collective.name, text))
    return findings


def collectives_of(accelerator: Accelerator) -> list[Collective]:
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
        Collective("store", "heartbeats", post, [str(r) for r in range(number)]),
        Collective("barrier", "the start", accelerator.wait_for_everyone, None),
        Collective("broadcast", f"{size} of weights", partial(broadcast, weights), num_weights),
        Collective(
            "all-reduce", f"{size} of gradients, every step",
            lambda: accelerator.reduce(weights, reduction="sum"), number * num_weights,
        ),
        Collective(
            "gather", "fingerprints",
            lambda: accelerator.gather(single), sum(range(number)),
        ),
        Collective(
            "gather objects", "evaluations",
            lambda: gather_object([rank]), list(range(number)),
        ),
        Collective(
            "broadcast objects", "outcome of saving",
            lambda: broadcast_object_list([rank]), [0],
        ),
    ]  # fmt: skip


def main(answer: Path) -> int:
    """Entry point of the processes that `launch` starts; the main one writes the findings."""
    accelerator = join()
    if isinstance(accelerator, Finding):
        findings = [accelerator]
    else:
        findings = joint_findings(accelerator, [])
    if os.environ.get("RANK", "0") == "0":
        answer.write_text(json.dumps([asdict(finding) for finding in findings]))
    if isinstance(accelerator, Accelerator):
        # Torch can abort a process that ends while it is in a group.
        accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
