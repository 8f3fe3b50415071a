"""The scripts of the viewer, run by Node.js with a document that does nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import pytest

from pointup.visualization.viewer import Layer, Scene, document

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js")

HARNESS = Path(__file__).with_name("page_in_node.js")
FRAME = "stage.frame(performance.now() + 1000);"
"""A frame at rest, which saves the state in the address."""


def in_page(
    scenes: Sequence[Scene],
    script: str,
    link: str = "",
    webgl: bool = True,
    hide: Sequence[str] = (),
) -> Any:
    """What a script returns in the opened page.

    link: the part of the address from "#" on. hide: names that the browser does not know.
    """
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
        "hide": hide,
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
    assert "of other data" in message


def test_a_link_to_other_data_leaves_an_open_page_as_it_is() -> None:
    link = link_of([survey(300)])
    script = f"await change({{ size: 2 }}); location.hash = {link!r}; await listeners.hashchange();"
    size, message = in_page(
        [survey(100)], script + "return [state.size, byId('message').textContent]"
    )
    assert size == 2 and "of other data" in message


def loading_message(scenes: Sequence[Scene], **options: Any) -> str:
    """What the page says in place of the points; empty once these are shown."""
    script = "return byId('loading').removed ? '' : byId('loading').firstElementChild.textContent"
    return in_page(scenes, script, **options)


@pytest.fixture(scope="module")
def shaded() -> str:
    """A link to a view without shading."""
    return link_of([survey(100)], "await change({ shading: 0 })")


SHADING = "return [state.shading, byId('message').textContent, byId('loading').removed]"


def test_a_link_as_it_was_copied_is_followed(shaded: str) -> None:
    assert in_page([survey(100)], SHADING, shaded) == [0, "", True]


@pytest.mark.parametrize(
    "edit",
    [
        {"clip": {"low": [0, 0], "high": [1, 1, 1]}},
        {"pose": None},
        {"shown": [True]},
        {"color": "none"},
        {"ranges": {"height": [2, 1]}},
        {"colormaps": {"height": "none"}},
        {"points": [[1, 2]]},
        {"size": "large"},
        {"scene": "length"},
    ],
    ids=str,
)
def test_a_link_that_was_edited_is_ignored_and_the_page_says_so(
    edit: dict[str, Any], shaded: str
) -> None:
    content = json.loads(unquote(shaded.removeprefix("#view=")))
    changed = f"#view={quote(json.dumps(content | edit))}"
    shading, message, is_shown = in_page([survey(100)], SHADING, changed)
    assert shading == 0.5 and "The link is ignored" in message and is_shown


@pytest.mark.parametrize("link", ["#view=%7B%22scene", "#view=null", "#top"])
def test_a_link_that_was_cut_leaves_the_page_usable(link: str) -> None:
    assert loading_message([survey(100)], link=link) == ""


def test_webgl_is_named_only_where_the_renderer_fails() -> None:
    assert "WebGL 2" in loading_message([survey(100)], webgl=False)
    message = loading_message([survey(100)], hide=["DecompressionStream"])
    assert "a browser of 2023 or later" in message and "WebGL" not in message


@pytest.mark.parametrize(
    ("share", "heights", "picked"),
    [
        (0, [0, 1], "before"),
        (0.2, [0, 1], "before"),
        (0.8, [1, 0], "after"),
        (1, [1, 0], "after"),
        (0.5, [1, 0], "before"),
        (0.5, [0, 1], "after"),
        # The first cloud is elsewhere, and the second one invisible at first.
        (0, [None, 0], None),
        (0.01, [None, 0], "after"),
    ],
)
def test_a_click_in_a_fade_picks_the_cloud_that_is_better_seen(
    share: float, heights: list[float | None], picked: str | None
) -> None:
    layers = [
        Layer(name, np.array([[0, 0, height or 0], [9, 9, height or 0]], dtype=np.float64))
        if height is not None
        else Layer(name, np.array([[0.0, 0, 0], [2, 2, 0]]))
        for name, height in zip(("before", "after"), heights, strict=True)
    ]
    script = f"await change({{ mode: 'fade', share: {share} }}); stage.look(0, 90); {FRAME}"
    # The two points of a place are on one line of sight, the higher one in front.
    script += """stage.aim(stage.panels[0]);
      const at = overlay.project(new THREE.Vector3(4.5, 4.5, 0), stage.panels[0]);
      return pick(stage, ...at)?.cloud.layer.name"""
    assert in_page([Scene("a", layers)], script) == picked


@pytest.mark.parametrize("projection", ["perspective", "parallel"])
@pytest.mark.parametrize(
    ("num_clouds", "size"), [(1, (90, 9, 5)), (2, (8, 70, 40)), (3, (5, 5, 5))]
)
def test_the_opened_page_shows_all_points_as_large_as_its_panels_allow(
    projection: str, num_clouds: int, size: tuple[float, ...]
) -> None:
    points = np.random.default_rng(0).random((500, 3)) * size
    scene = Scene("a", [Layer(str(i), points) for i in range(num_clouds)])
    script = f"await change({{ projection: {projection!r} }}); stage.look(); {FRAME}"
    script += """const panel = stage.panels[0]; stage.aim(panel);
      return [panel.width, panel.height,
              stage.clouds[0].sample(500).map((point) => overlay.project(point, panel))]"""
    width, height, places = in_page([scene], script)
    low, high = np.min(places, axis=0), np.max(places, axis=0)
    # Captions are in the upper 54 pixels.
    assert (low >= [17, min(53, 0.2 * height)]).all() and (high <= [width - 17, height - 13]).all()
    room = np.array([width - 36, max(height - 68, 0.4 * height)])
    assert max((high - low) / room) > 0.97


def heights(low: float, high: float) -> Scene:
    x, y, z = np.linspace(0, 1, 1001) * np.array([[50], [50], [high - low]])
    return Scene("a", [Layer("a", np.column_stack([x, y, z + low]))], unit="m")


RANGE = "return [byId('low').value, byId('high').value, rangeOf(state, scene)]"


@pytest.mark.parametrize(
    ("low", "high", "decimals"), [(1650.1234, 1650.9876, 4), (12010.4, 12260.6, 1), (0, 3e5, 0)]
)
def test_range_boxes_show_thousandths_of_the_span(low: float, high: float, decimals: int) -> None:
    shown_low, shown_high, ends = in_page([heights(low, high)], RANGE)
    assert [shown_low, shown_high] == [round(end, decimals) for end in ends]
    assert max(abs(shown_low - ends[0]), abs(shown_high - ends[1])) < 1e-3 * (high - low)


def test_an_edited_end_of_a_range_leaves_the_other_one_exact() -> None:
    scenes = [heights(1650.12345, 1650.98765)]
    _, _, (low, high) = in_page(scenes, RANGE)
    edit = "byId('{}').value = '{}'; await byId('{}').onchange({{ target: byId('{}') }});"
    first = edit.format("low", "1650.5", "low", "low")
    assert in_page(scenes, first + RANGE)[2] == [1650.5, high]
    assert in_page(scenes, edit.format("high", "1650.5", "high", "high") + RANGE)[2] == [
        low,
        1650.5,
    ]


def test_an_empty_range_box_changes_nothing_and_is_filled_again() -> None:
    scenes = [heights(1650.12345, 1650.98765)]
    before = in_page(scenes, RANGE)
    for box in ("low", "high"):
        script = (
            f"byId('{box}').value = ''; await byId('{box}').onchange({{ target: byId('{box}') }});"
        )
        assert in_page(scenes, script + RANGE) == before
