"""Words that were replaced do not come back: each thing has one name, the one of the field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT

# A pattern, and what to write in its place. Case counts only where a pattern has a capital letter.
REPLACED = {
    r"\bwish(es|ed)?\b": "upsampling options",
    r"\bwhat people want\b": "upsampling options",
    r"\bDemand\b|\bmost_wanted\b|\bWANTED\b": "target counts",
    r"\bMadePoints\b": "pass output",
    r"\bpass (has )?made\b|\b\w+\.made\b": "pass output",
    r"\bdraft(s|ed|ing)?\b": "second pass, oversampling",
    r"\bhalving\b": "bisection order, k-d blocks",
    r"\bevening\b|\beven_out\b|\beven(s|ed|ing)? (it |them |points )?out\b": "relaxation",
    r"\bquota_trust\b": "density_exponent",
    r"\bpull(s|ed|ing)?\b": "offset",
    r"\bLaunchedShares\b|\bShares[(\]:]|\.mine\b|\.together\b": "worker group, shard, barrier",
    r"\bbad_?steps?\b|\bbad steps?\b": "non-finite steps",
    r"\bagreement\b": "consistency",
    r"\bsigns? of life\b|(?<!hard.to.)\bbeats?\b": "heartbeat",
    r"\bfieldfiles\b|\bfield's\b": "HDF5 patches, the PU-GAN / PU-GCN protocol",
    r"\b(the|a|its|and|or|no) floor\b|(?<!mode=)[\"'*`]floor[\"'*`]": "resampled ground truth",
    r"\bmidpoints'": "midpoint baseline",
    r"\bCD shared\b|\bchamfer_shared\b|\bcd_shared\b": "CD in the target's frame",
    r"\bUneven\b": "spacing CV",
    r"\bunevenness\b|\buniformity\b": "spacing CV",
    r"\bplain (mean )?(distances?|chamfer)\b|\b(is|are) plain\b|[,;(] plain\b[,;.)]": "unsquared",
    r"\bown[_-]normali[sz]ed\b|\bnormali[sz]ed (each )?by (itself|themselves)\b": "per cloud",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\btold\b": "reported",
    r"\bwithout a word\b": "silently",
    r"\b(made|makes?|making)( \w+){0,4} denser\b": "upsampled",
    r"\bis over\b": "ends",
    r"\bshipped (models?|files?|configurations?|presets?|ones?)\b": "included",
}
SCANNED = (
    "train.py", "README.md", "CONTRIBUTING.md", "pointup/**/*.py", "pointup/**/*.md",
    "docs/**/*.md", "docs/*.py", "docs/*.sh", "tests/**/*.py",
)  # fmt: skip
ALLOWED = {
    # Names of stored weights, which trained models and checkpoints keep.
    "pointup/model/children.py": {"pull"},
    "pointup/benchmark/reference_implementation.py": {"pull"},
    "tests/model/test_model.py": {"pull"},
    "tests/model/test_shipped.py": {"pull"},
    "tests/training/test_initialization.py": {"pull"},
    "tests/training/test_train.py": {"pull"},
    "tests/training/test_train_steps.py": {"pull"},
    "tests/upsampling/test_candidates.py": {"pull"},
    # Old names of model options, which are still read.
    "pointup/model/config.py": {"quota_trust"},
    "tests/training/test_command_line.py": {"quota_trust"},
    # The key of a row, in quotes.
    "pointup/evaluation/lidar_metrics.py": {"midpoints'"},
    # The title of a paper.
    "pointup/metrics.py": {"uniformity"},
}
"""By file, words that stay, with the reason."""
FILES = sorted({path for pattern in SCANNED for path in ROOT.glob(pattern)} - {Path(__file__)})


def replaced_words(text: str) -> list[tuple[int, str, str]]:
    """Line number, word and better word of each replaced word in a text."""
    found = []
    for pattern, better in REPLACED.items():
        flags = 0 if re.search(r"[A-Z]", pattern) else re.IGNORECASE
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, flags):
            found.append((text.count("\n", 0, match.start()) + 1, match[0], better))
    return sorted(found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_replaced_word_is_left(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    allowed = ALLOWED.get(name, set())
    lines = [
        f"{name}:{line}: {' '.join(word.split())!r}; write: {better}"
        for line, word, better in replaced_words(path.read_text(encoding="utf-8"))
        if word.lower() not in allowed
    ]
    assert not lines, "\n" + "\n".join(lines)


def test_an_allowed_word_is_there() -> None:
    for name, words in ALLOWED.items():
        found = {word.lower() for _, word, _ in replaced_words((ROOT / name).read_text())}
        assert words <= found, f"{name}: {words - found} is no longer there; take it off ALLOWED"


@pytest.mark.parametrize(
    "text",
    ["What a pass has made, block by block.", "the midpoints' Chamfer distance", "P2F, plain.",
     "A sign of\n    life", "evened out", "a draft from which", "stays above the floor",
     "a shipped model"],
)  # fmt: skip
def test_replaced_words_are_found(text: str) -> None:
    assert replaced_words(text)


@pytest.mark.parametrize(
    "text",
    ["np.floor(x)", "rounding_mode='ceil'", "the evenly spaced input", "a forest's ground",
     "midpoints between neighbours", "shares of the work", "a plain sum"],
)  # fmt: skip
def test_other_words_are_not(text: str) -> None:
    assert not replaced_words(text)
