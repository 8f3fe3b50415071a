"""Findings of `pointup doctor`: one line each, followed by a fix if the check did not pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SUBJECT_WIDTH = 18


@dataclass(frozen=True)
class Finding:
    """The result of one check; `remedy` is empty if nothing has to be fixed."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        lines = f"{self.level:<5} {self.subject:<{SUBJECT_WIDTH}} {' '.join(self.text.split())}"
        return f"{lines}\n{'':{SUBJECT_WIDTH + 6}} -> {self.remedy}" if self.remedy else lines


def ok(subject: str, text: str) -> Finding:
    return Finding("ok", subject, text)


def warn(subject: str, text: str, remedy: str) -> Finding:
    """A problem that does not keep pointup from working."""
    return Finding("warn", subject, text, remedy)


def fail(subject: str, text: str, remedy: str) -> Finding:
    return Finding("fail", subject, text, remedy)


def in_bytes(number: float) -> str:
    """A size with three digits."""
    for unit in ("B", "kB", "MB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB" if number < 999.5 else f"{number:,.0f} GB"


def in_time(seconds: float) -> str:
    """A duration in a suitable unit."""
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms"
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def reason_of(error: BaseException) -> str:
    """The first line of the message of an error, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
