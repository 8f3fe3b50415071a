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

from pointup.visualization.viewer import document
from pointup.visualization.viewer.scenes import Channel, Layer, Scene

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js")

HARNESS = Path(__file__).with_name("page_in_node.js")
FRAME = "stage.frame(performance.now() + 1000);"
"""A frame at rest, which saves the state in the address."""


def page(
    scenes: Sequence[Scene],
    script: str,
    link: str = "",
    webgl: bool = True,
    hide: Sequence[str] = (),
) -> dict[str, Any]:
    """A page to open, and what to run in it.

    link: the part of the address from "#" on. hide: names that the browser does not know.
    """
    html = document.viewer_html(scenes, "a test")
    found = re.search(r'id="manifest">(.*?)</script>', html)
    assert found
    return {
        "page": str(Path(document.__file__).parent / "page"),
        "scripts": document.SCRIPTS,
        "manifest": json.loads(found[1]),
        "blocks": re.findall(r'id="block\d+">(.*?)</script>', html),
        "hash": link,
        "webgl": webgl,
        "hide": hide,
        "script": script,
    }


def in_pages(pages: list[dict[str, Any]]) -> list[Any]:
    """What the script of each page returns when it is opened."""
    words, asked = ["node", str(HARNESS)], json.dumps(pages)
    ran = subprocess.run(words, input=asked, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return list(json.loads(ran.stdout))


def in_page(scenes: Sequence[Scene], script: str, link: str = "") -> Any:
    return in_pages([page(scenes, script, link)])[0]


def survey(width: float, names: Sequence[str] = ("before", "after"), east: float = 0.0) -> Scene:
    x, y, z = np.random.default_rng(0).random((3, 500)) * [[width], [width], [width / 8]]
    points = np.column_stack([x + 500_000 + east, y + 4_100_000, z])
    return Scene("survey", [Layer(name, points) for name in names], unit="m")


def link_of(scenes: Sequence[Scene], script: str = "") -> str:
    """The address that the page has after a script, from "#" on."""
    return in_page(scenes, f"{script}; {FRAME} return location.hash")


def test_a_link_restores_the_view_of_the_same_data():
    changes = "await change({ color: 'layer', shown: [true, false], clip: { ...state.clip, "
    changes += "low: [-20, stage.scene.low[1], -2] } }); stage.look(90, 10);"
    script = "return [state.color, state.shown, state.clip, stage.pose.azimuth, stage.scene]"
    link = link_of([survey(100)], changes)
    color, shown, clip, azimuth, scene = in_page([survey(100)], script, link)
    assert (color, shown, round(azimuth)) == ("layer", [True, False], 90)
    # Where the box does not cut, its side is exactly that of the data.
    assert clip["low"] == [-20, scene["low"][1], -2] and clip["high"] == scene["high"]


def test_a_link_to_other_data_is_ignored_and_the_page_says_so():
    link = link_of([survey(100)], "await change({ size: 2 })")
    # Larger, elsewhere, of other names.
    others = survey(300), survey(100, east=50.0), survey(100, ("before", "dense"))
    script = "return [state.clip, state.size, stage.scene, byId('message').textContent]"
    for clip, size, scene, message in in_pages([page([other], script, link) for other in others]):
        assert clip["low"] == scene["low"] and clip["high"] == scene["high"] and size == 1
        assert "of other data" in message


def test_a_link_to_other_data_leaves_an_open_page_as_it_is():
    link = link_of([survey(300)])
    script = f"await change({{ size: 2 }}); location.hash = {link!r}; await listeners.hashchange();"
    size, message = in_page(
        [survey(100)], script + "return [state.size, byId('message').textContent]"
    )
    assert size == 2 and "of other data" in message


LOADING = "return byId('loading').removed ? '' : byId('loading').firstElementChild.textContent"
"""What the page says in place of the points; empty once these are shown."""


@pytest.fixture(scope="module")
def shaded() -> str:
    """A link to a view without shading."""
    return link_of([survey(100)], "await change({ shading: 0 })")


SHADING = "return [state.shading, byId('message').textContent, byId('loading').removed]"


def test_a_link_as_it_was_copied_is_followed(shaded):
    assert in_page([survey(100)], SHADING, shaded) == [0, "", True]


def test_a_link_that_was_edited_is_ignored_and_the_page_says_so(shaded):
    content = json.loads(unquote(shaded.removeprefix("#view=")))
    edits: list[dict[str, Any]] = [
        {"clip": {"low": [0, 0], "high": [1, 1, 1]}}, {"pose": None}, {"shown": [True]},
        {"color": "none"}, {"ranges": {"height": [2, 1]}}, {"colormaps": {"height": "none"}},
        {"points": [[1, 2]]}, {"size": "large"}, {"scene": "length"},
    ]  # fmt: skip
    links = [f"#view={quote(json.dumps(content | edit))}" for edit in edits]
    results = in_pages([page([survey(100)], SHADING, link) for link in links])
    for edit, (shading, message, is_shown) in zip(edits, results, strict=True):
        assert shading == 0.5 and "The link is ignored" in message and is_shown, edit


def test_a_link_that_was_cut_leaves_the_page_usable():
    links = ["#view=%7B%22scene", "#view=null", "#top"]
    assert in_pages([page([survey(100)], LOADING, link) for link in links]) == [""] * 3


def test_webgl_is_named_only_where_the_renderer_fails():
    options: list[dict[str, Any]] = [{"webgl": False}, {"hide": ["DecompressionStream"]}]
    without, old = in_pages([page([survey(100)], LOADING, **each) for each in options])
    assert "WebGL 2" in without
    assert "a browser of 2023 or later" in old and "WebGL" not in old


def test_a_click_in_a_fade_picks_the_cloud_that_is_better_seen():
    cases: list[tuple[float, list[float | None], str | None]] = [
        (0, [0, 1], "before"), (0.2, [0, 1], "before"), (0.8, [1, 0], "after"),
        (1, [1, 0], "after"), (0.5, [1, 0], "before"), (0.5, [0, 1], "after"),
        # The first cloud is elsewhere, and the second one invisible at first.
        (0, [None, 0], None), (0.01, [None, 0], "after"),
    ]  # fmt: skip

    def opened(share: float, heights: list[float | None]) -> dict[str, Any]:
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
        return page([Scene("a", layers)], script)

    picked = in_pages([opened(share, heights) for share, heights, _ in cases])
    assert picked == [expected for *_, expected in cases]


def test_the_opened_page_shows_all_points_as_large_as_its_panels_allow():
    pages = []
    for num_clouds, size in ((1, (90, 9, 5)), (2, (8, 70, 40)), (3, (5, 5, 5))):
        points = np.random.default_rng(0).random((500, 3)) * size
        scene = Scene("a", [Layer(str(i), points) for i in range(num_clouds)])
        for projection in ("perspective", "parallel"):
            script = f"await change({{ projection: {projection!r} }}); stage.look(); {FRAME}"
            script += """const panel = stage.panels[0]; stage.aim(panel);
              return [panel.width, panel.height,
                      stage.clouds[0].sample(500).map((point) => overlay.project(point, panel))]"""
            pages.append(page([scene], script))
    for width, height, places in in_pages(pages):
        low, high = np.min(places, axis=0), np.max(places, axis=0)
        # Captions are in the upper 54 pixels.
        assert (low >= [17, min(53, 0.2 * height)]).all()
        assert (high <= [width - 17, height - 13]).all()
        room = np.array([width - 36, max(height - 68, 0.4 * height)])
        assert max((high - low) / room) > 0.97


def heights(low: float, high: float) -> Scene:
    x, y, z = np.linspace(0, 1, 1001) * np.array([[50], [50], [high - low]])
    return Scene("a", [Layer("a", np.column_stack([x, y, z + low]))], unit="m")


RANGE = "return [byId('low').value, byId('high').value, rangeOf(state, scene)]"


def test_range_boxes_show_thousandths_of_the_span():
    cases = [(1650.1234, 1650.9876, 4), (12010.4, 12260.6, 1), (0, 3e5, 0)]
    results = in_pages([page([heights(low, high)], RANGE) for low, high, _ in cases])
    for (low, high, decimals), (*shown, ends) in zip(cases, results, strict=True):
        assert shown == [round(end, decimals) for end in ends]
        assert np.abs(np.subtract(shown, ends)).max() < 1e-3 * (high - low)


def test_an_edited_end_of_a_range_leaves_the_other_one_exact_and_an_empty_box_both():
    edit = "byId('{0}').value = '{1}'; await byId('{0}').onchange({{ target: byId('{0}') }});"
    edits = [edit.format(box, text) for text in ("1650.5", "") for box in ("low", "high")]
    scenes = [heights(1650.12345, 1650.98765)]
    whole, *others = in_pages([page(scenes, script + RANGE) for script in ("", *edits)])
    low, high = whole[2]
    assert [other[2] for other in others[:2]] == [[1650.5, high], [low, 1650.5]]
    assert others[2:] == [whole, whole], "an empty box is filled again"


def test_a_survey_in_us_feet_opens_on_its_heights():
    scene = Scene("a", [Layer("a", np.eye(3))], unit="US ft")
    ends = "const { label, low, high } = legendOf(state, scene, stage); return [label, low, high]"
    assert in_pages([page([scene], ends)]) == [["height", "0 US ft", "≥ 0.996 US ft"]]


def test_clouds_without_a_thickness_are_drawn_and_can_be_clicked():
    x, y = np.random.default_rng(0).random((2, 3000)) * 100
    plane = np.column_stack([x, y, np.full(len(x), np.pi)])
    clouds = {"plane": plane, "line": plane * (1, 0, 1), "point": plane[:1]}
    click = (
        "const [seen] = stage.panels; stage.aim(seen); const { nodes: [node] } = stage.clouds[0];"
        "const at = overlay.project(stage.clouds[0].place(node, 0, new THREE.Vector3()), seen);"
        "return [stage.clouds[0].drawn, pick(stage, ...at) !== null]"
    )
    found = in_pages([page([Scene(n, [Layer(n, c)])], FRAME + click) for n, c in clouds.items()])
    # A row of points needs one and a half for each of the pixels that it spans.
    for (drawn, is_picked), (name, least) in zip(
        found, {"plane": 3000, "line": 400, "point": 1}.items(), strict=True
    ):
        assert drawn >= least and is_picked, name


def test_a_point_without_a_value_has_none_where_it_is_clicked():
    values = np.array([np.nan, 7.0, 8.0, np.inf])
    layer = Layer("a", np.eye(4, 3), {"height": Channel(values, label="h", unit="m")})
    script = """const [cloud] = stage.clouds;
      return Promise.all([0, 1, 2, 3].map((row) => cloud.describe(row)))"""
    described = in_page([Scene("a", [layer])], script)
    texts = sorted(text for ((_, text),) in described)
    assert texts == ["7 m", "8 m", "8 m", "no value"]
