"""Notes of `pointup prepare pairs` and `thin` on the points of surveys that are in no pair."""

from __future__ import annotations

from pointup.cli.prepare.summary import note


def note_left_out_noise(num_points: int) -> None:
    """Print how many points of a survey were left out as noise, if any."""
    if num_points:
        note(f"left out {num_points:,} points: noise, withheld or synthetic (see --include-noise)")


def note_left_out_points(num_repeated: int, num_outside: int, num_read: int) -> None:
    """Print how many of `num_read` points in tiles were left out, if any, and why.

    `num_repeated` are there twice, `num_outside` are on ground that only one survey covers.
    """
    if num_repeated:
        note(f"left out {num_repeated:,} points that are at the position of another point")
    if num_outside:
        note(
            f"left out {num_outside:,} points ({num_outside / num_read:.1%} of those in tiles of "
            "both surveys) on ground that only one survey covers"
        )
