"""Findings of `pointup doctor`: one line each, followed by a fix if the check did not pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SUBJECT_WIDTH = 18


@dataclass(frozen=True)
class Finding:
    """The result of one check; a warning is a problem that keeps nothing from working."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<5} {self.subject:<{SUBJECT_WIDTH}} {' '.join(self.text.split())}"
        return f"{line}\n{'':{SUBJECT_WIDTH + 6}} -> {self.remedy}" if self.remedy else line


def ok(subject: str, text: str) -> Finding:
    return Finding("ok", subject, text)


def warn(subject: str, text: str, remedy: str) -> Finding:
    return Finding("warn", subject, text, remedy)


def fail(subject: str, text: str, remedy: str) -> Finding:
    return Finding("fail", subject, text, remedy)


def graded(
    subject: str, text: str, remedy: str, value: float, least: float, enough: float
) -> Finding:
    """A finding that fails below `least`, and warns below `enough`."""
    if value >= enough:
        return ok(subject, text)
    return (warn if value >= least else fail)(subject, text, remedy)


def reason_of(error: BaseException) -> str:
    """The first line of the message of an error, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
