"""The scripts of the viewer, run by Node.js with a document that does nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointup.visualization.viewer import Layer, Scene, document

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js")

HARNESS = Path(__file__).with_name("page_in_node.js")
FRAME = "stage.frame(performance.now() + 1000);"
"""A frame at rest, which saves the state in the address."""


def in_page(scenes: Sequence[Scene], script: str, link: str = "", webgl: bool = True) -> Any:
    """What a script returns in the opened page; `link` is the part of the address after "#"."""
    html = document.viewer_html(scenes, "a test")
    found = re.search(r'id="manifest">(.*?)</script>', html)
    assert found
    asked = {
        "page": str(Path(document.__file__).parent / "page"),
        "scripts": document.SCRIPTS,
        "manifest": json.loads(found[1]),
        "blocks": re.findall(r'id="block\d+">(.*?)</script>', html),
        "hash": link,
        "webgl": webgl,
        "script": script,
    }
    ran = subprocess.run(
        ["node", str(HARNESS)], input=json.dumps(asked), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def survey(width: float, names: Sequence[str] = ("before", "after"), east: float = 0.0) -> Scene:
    x, y, z = np.random.default_rng(0).random((3, 500)) * [[width], [width], [width / 8]]
    points = np.column_stack([x + 500_000 + east, y + 4_100_000, z])
    return Scene("survey", [Layer(name, points) for name in names], unit="m")


def link_of(scenes: Sequence[Scene], script: str = "") -> str:
    """The address that the page has after a script, from "#" on."""
    return in_page(scenes, f"{script}; {FRAME} return location.hash")


def test_a_link_restores_the_view_of_the_same_data() -> None:
    changes = "await change({ color: 'layer', shown: [true, false], clip: { ...state.clip, "
    changes += "low: [-20, stage.scene.low[1], -2] } }); stage.look(90, 10);"
    script = "return [state.color, state.shown, state.clip, stage.pose.azimuth, stage.scene]"
    link = link_of([survey(100)], changes)
    color, shown, clip, azimuth, scene = in_page([survey(100)], script, link)
    assert (color, shown, round(azimuth)) == ("layer", [True, False], 90)
    # Where the box does not cut, its side is exactly that of the data.
    assert clip["low"] == [-20, scene["low"][1], -2] and clip["high"] == scene["high"]


@pytest.mark.parametrize(
    "other",
    [survey(300), survey(100, east=50.0), survey(100, ("before", "dense"))],
    ids=["larger", "elsewhere", "of other names"],
)
def test_a_link_to_other_data_is_ignored_and_the_page_says_so(other: Scene) -> None:
    link = link_of([survey(100)], "await change({ size: 2 })")
    script = "return [state.clip, state.size, stage.scene, byId('message').textContent]"
    clip, size, scene, message = in_page([other], script, link)
    assert clip["low"] == scene["low"] and clip["high"] == scene["high"] and size == 1
    assert "other data" in message


def test_a_link_to_other_data_leaves_an_open_page_as_it_is() -> None:
    link = link_of([survey(300)])
    script = f"await change({{ size: 2 }}); location.hash = {link!r}; await listeners.hashchange();"
    size, message = in_page(
        [survey(100)], script + "return [state.size, byId('message').textContent]"
    )
    assert size == 2 and "other data" in message


@pytest.mark.parametrize(
    ("share", "heights", "picked"),
    [
        (0, [0, 1], "before"),
        (0.2, [0, 1], "before"),
        (0.8, [1, 0], "after"),
        (1, [1, 0], "after"),
        (0.5, [1, 0], "before"),
        (0.5, [0, 1], "after"),
    ],
)
def test_a_click_in_a_fade_picks_the_cloud_that_is_better_seen(
    share: float, heights: list[float], picked: str
) -> None:
    layers = [
        Layer(name, np.array([[0, 0, height], [9, 9, height]], dtype=np.float64))
        for name, height in zip(("before", "after"), heights, strict=True)
    ]
    script = f"await change({{ mode: 'fade', share: {share} }}); stage.look(0, 90); {FRAME}"
    # The two points of a place are on one line of sight, the higher one in front.
    script += """stage.aim(stage.panels[0]);
      const at = overlay.project(new THREE.Vector3(4.5, 4.5, 0), stage.panels[0]);
      return pick(stage, ...at)?.cloud.layer.name"""
    assert in_page([Scene("a", layers)], script) == picked


@pytest.mark.parametrize(("share", "picked"), [(0, None), (0.01, "after"), (1, "after")])
def test_a_click_in_a_fade_picks_no_cloud_that_is_invisible(
    share: float, picked: str | None
) -> None:
    places = {"before": [[0.0, 0, 0], [2, 2, 0]], "after": [[9.0, 9, 0]]}
    layers = [Layer(name, np.array(points)) for name, points in places.items()]
    script = f"await change({{ mode: 'fade', share: {share} }}); stage.look(0, 90); {FRAME}"
    script += """stage.aim(stage.panels[0]);
      const at = overlay.project(new THREE.Vector3(4.5, 4.5, 0), stage.panels[0]);
      return pick(stage, ...at)?.cloud.layer.name"""
    assert in_page([Scene("a", layers)], script) == picked
