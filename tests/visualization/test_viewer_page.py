"""The viewer in a real browser: every control does what it says, and the console stays clean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import OpenPage, open_browser

from pointup.visualization.viewer.document import write_viewer
from pointup.visualization.viewer.scenes import (
    CLASS_NAMES,
    Channel,
    Layer,
    Scene,
    error_channel,
)

pytestmark = pytest.mark.slow


def landscape(num_points: int, seed: int = 0) -> np.ndarray:
    x, y = np.random.default_rng(seed).random((2, num_points)) * 100
    return np.column_stack([x + 500_000, y + 4_100_000, 15 * np.sin(x / 12) * np.cos(y / 15)])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    reference = landscape(30_000, seed=9)
    layers = []
    for seed, (name, number) in enumerate({"before": 4000, "after": 16_000}.items()):
        points = landscape(number, seed)
        channels = {
            "error": error_channel(points, reference, "m"),
            "class": Channel((points[:, 0] > 500_050).astype(np.uint8), "category", "class"),
            "intensity": Channel(points[:, 1].astype(np.float32), label="intensity"),
        }
        layers.append(Layer(name, points, channels))
    layers.append(Layer("reference", reference))
    shape = np.random.default_rng(0).normal(size=(3000, 3))
    shape /= np.linalg.norm(shape, axis=1, keepdims=True)
    scenes = [
        Scene("survey", layers, unit="m", color="height"),
        Scene("shape", [Layer("ball", shape)], up="y", note="a ball"),
    ]
    path = tmp_path_factory.mktemp("viewer") / "page.html"
    write_viewer(path, scenes, "a test")
    return path


@contextmanager
def open_page(browser: Any, path: Path, *size: Any, **more: Any) -> Iterator[OpenPage]:
    """An opened page, whose console stays clean."""
    page = OpenPage(browser, path, *size, **more)
    yield page
    assert page.complaints == []
    page.page.context.close()


@pytest.fixture
def opened(browser, path) -> Iterator[OpenPage]:
    with open_page(browser, path) as page:
        yield page


def num_different(before: np.ndarray, after: np.ndarray) -> int:
    """Pixels that differ in what both pictures show: a high legend leaves the points less room."""
    rows = min(len(before), len(after))
    return int((np.abs(after[:rows] - before[:rows]).max(axis=2) > 8).sum())


def test_each_control_changes_the_picture(opened):
    changes = {
        "colour": "viewer.change({color: 'error'})",
        "class": "viewer.change({color: 'class'})",
        "hidden class": "viewer.change({hidden: {class: [1]}})",
        "intensity": "viewer.change({color: 'intensity'})",
        "range": "viewer.change({ranges: {intensity: [4100010, 4100020]}})",
        "colour map": "viewer.change({colormaps: {intensity: 'turbo'}})",
        "layer": "viewer.change({color: 'layer'})",
        "point size": "viewer.change({size: 2.5})",
        "shading": "viewer.change({shading: 0})",
        "background": "viewer.change({dark: false})",
        "one cloud": "viewer.change({shown: [true, true, false]})",
        "fade": "viewer.change({mode: 'fade', share: 0.2})",
        "faded farther": "viewer.change({share: 0.8})",
        "swipe": "viewer.change({mode: 'swipe'})",
        "together": "viewer.change({mode: 'together'})",
        "parallel": "viewer.change({projection: 'parallel'})",
        "slice": "document.getElementById('slice').click()",
        "view": "viewer.stage.look(90, 10)",
    }
    before = opened.pixels()
    for name, script in changes.items():
        opened.do(script)
        after = opened.pixels()
        different = num_different(before, after)
        assert different > 200, f"{name} changed {different} pixels"
        before = after


def test_the_slider_of_a_colour_hides_the_points_above_it(opened):
    opened.do("viewer.change({color: 'intensity', colormaps: {intensity: 'turbo'}})")
    num_colored = []
    for share in (1, 0.5, 0):
        opened.do(
            f"const slider = document.getElementById('limit'); slider.value = {share}; "
            "slider.dispatchEvent(new Event('input'))"
        )
        num_colored.append(opened.colored())
    everything, half, least = num_colored
    assert everything > 1000
    assert 0.3 * everything < half < 0.7 * everything and least < 0.05 * everything


def test_the_names_of_colour_maps_are_shown_whole(opened):
    opened.page.select_option("#color", "error")
    wide = "() => document.getElementById('colormap').getBoundingClientRect().width"
    given = opened.do(wide)
    opened.page.add_style_tag(content="#colormap { flex: none; width: max-content; }")
    assert given >= opened.do(wide) > 0


def test_the_ends_of_a_range_and_the_number_of_points_are_shown_whole(opened):
    cut = "(id) => byId(id).scrollWidth > byId(id).clientWidth"
    opened.do("viewer.change({color: 'height', ranges: {height: [1234.567, 1239.567]}})")
    assert not opened.page.evaluate(cut, "low") and not opened.page.evaluate(cut, "high")
    opened.do("viewer.change({color: 'error', mode: 'fade'})")
    assert not opened.page.evaluate(cut, "status")


def test_the_legend_says_that_some_points_are_higher_than_its_last_colour(browser, tmp_path):
    points = landscape(4000)
    points[0, 2] = 90
    write_viewer(tmp_path / "mast.html", [Scene("mast", [Layer("mast", points)], unit="m")], "")
    with open_page(browser, tmp_path / "mast.html") as page:
        assert "≥ 14.9 m" in page.page.inner_text("#legend")
        page.do("viewer.change({ranges: {height: [0, 90]}})")
        assert "≥" not in page.page.inner_text("#legend")


def test_the_ends_of_a_legend_are_beside_its_bar(browser, path):
    with open_page(browser, path) as page:
        item = "document.querySelector('#legend .item')"
        assert page.do(f"{item}.innerText.split(/\\n/).length") == 2
        assert page.do(f"{item}.clientHeight") < 25


def test_points_that_a_slice_a_class_or_a_slider_hides_are_not_counted_as_drawn(opened):
    changes = {
        "": "50,000 of 50,000 points drawn",
        "clip: {...viewer.state.clip, on: true}": "some of 50,000 points drawn",
        "clip: {...viewer.state.clip, on: false}": "50,000 of 50,000 points drawn",
        "color: 'class', hidden: {class: [1]}": "some of 50,000 points drawn",
        "color: 'intensity', limits: {}": "50,000 of 50,000 points drawn",
        "limits: {intensity: 4100050}": "some of 50,000 points drawn",
    }
    for change, text in changes.items():
        opened.do(f"viewer.change({{{change}}})")
        assert opened.page.inner_text("#status") == text


def test_each_key_changes_the_picture_or_the_page(opened):
    for key in ("2", "3", "4", "1", "p", "c", "m", "f", "x", "]", "[", "l", "b", "+", "ArrowLeft"):
        before = opened.pixels()
        opened.press(key)
        changed = num_different(before, opened.pixels())
        assert changed > 100, f"key {key} changed {changed} pixels"
    opened.press("?")
    assert opened.page.is_visible("dialog#keys")
    opened.page.keyboard.press("Escape")
    opened.press("h")
    assert not opened.page.is_visible("#panel")


def test_a_key_works_after_a_click_on_a_check_box(opened):
    opened.page.click("#slice")
    place = opened.page.evaluate("viewer.state.clip.place")
    opened.press("]")
    assert opened.page.evaluate("viewer.state.clip.place") > place


def test_the_pointer_turns_the_view_and_the_wheel_comes_nearer(opened):
    pose = opened.page.evaluate("viewer.stage.pose")
    opened.page.mouse.move(150, 250)
    opened.page.mouse.down()
    opened.page.mouse.move(230, 280, steps=4)
    opened.page.mouse.up()
    opened.settle()
    turned = opened.page.evaluate("viewer.stage.pose")
    assert abs(turned["azimuth"] - pose["azimuth"]) > 10
    opened.page.mouse.wheel(0, -300)
    opened.page.wait_for_timeout(100)
    opened.settle()
    assert opened.page.evaluate("viewer.stage.pose.distance") < 0.95 * turned["distance"]


def test_a_click_shows_the_values_of_the_point_and_two_clicks_measure(opened):
    opened.do("viewer.change({mode: 'together', shown: [false, false, true]})")
    opened.press("2")
    place = """(place) => { const { overlay, stage } = viewer; stage.aim(stage.panels[0]);
      return overlay.project(new THREE.Vector3(...place), stage.panels[0]) }"""
    # Seen from above, 40 m apart along x.
    clicks = [opened.page.evaluate(place, at) for at in ([-20, 5, 0], [20, 5, 0])]
    opened.page.mouse.click(*clicks[0])
    opened.page.wait_for_selector("#card:not([hidden])")
    rows = dict(line.split("\t") for line in opened.page.inner_text("#card table").splitlines())
    assert rows["cloud"] == "reference"
    assert float(rows["x"]) == pytest.approx(500_030, abs=3)
    assert float(rows["y"]) == pytest.approx(4_100_055, abs=3)
    opened.press("d")
    for x, y in clicks:
        opened.page.mouse.click(x, y)
    ends = np.array(opened.page.evaluate("viewer.overlay.measured.map((point) => point.toArray())"))
    length = np.linalg.norm(ends[1] - ends[0])
    message = opened.page.inner_text("#message")
    assert length == pytest.approx(40, abs=8) and message.startswith(f"{length:.3g} m:"), message


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("category", ("hidden: {class: []}", "hidden: {class: [1]}")),
        ("scalar", ("limits: {}", "limits: {class: 0.5}")),
    ],
)
def test_a_click_passes_through_points_that_are_hidden(kind, changes, browser, tmp_path):
    x, y = (part.ravel() for part in np.meshgrid(np.arange(60.0), np.arange(60.0)))
    heights = np.concatenate([np.zeros(3600), np.full(3600, 5.0)])
    points = np.column_stack([np.tile(x, 2), np.tile(y, 2), heights])
    values = (heights > 0).astype(np.uint8 if kind == "category" else np.float32)
    channel = Channel(values, kind, "class")
    write_viewer(tmp_path / "a.html", [Scene("a", [Layer("a", points, {"class": channel})])], "a")
    with open_page(browser, tmp_path / "a.html") as page:
        page.do("viewer.change({color: 'class'})")
        page.press("2")
        middle = """() => { const { overlay, stage } = viewer; stage.aim(stage.panels[0]);
          return overlay.project(new THREE.Vector3(0, 0, 0), stage.panels[0]) }"""
        seen = []
        for change in changes:
            page.do(f"viewer.change({{{change}}})")
            page.page.mouse.click(*page.page.evaluate(middle))
            page.page.wait_for_selector("#card:not([hidden])")
            text = page.page.inner_text("#card table")
            seen.append(float(dict(line.split("\t") for line in text.splitlines())["z"]))
        assert seen == [5, 0]


def test_a_link_restores_the_view(opened, browser, path):
    opened.do("viewer.change({color: 'error', mode: 'swipe', share: 0.3, size: 2})")
    opened.do("viewer.stage.pose = {...viewer.stage.pose, azimuth: 70, elevation: 50}")
    opened.page.click("#link")
    address = opened.page.evaluate("location.hash")
    assert "view=" in address
    with open_page(browser, path) as other:
        other.page.evaluate("(hash) => { location.hash = hash }", address)
        other.page.wait_for_timeout(300)
        other.settle()
        assert np.abs(other.pixels() - opened.pixels()).mean() < 1
        assert other.page.evaluate("viewer.state.mode") == "swipe"


def test_a_screenshot_is_a_picture_of_the_view_with_its_legend(opened, tmp_path):
    from PIL import Image

    with opened.page.expect_download() as download:
        opened.page.click("#screenshot")
    download.value.save_as(tmp_path / "shot.png")
    picture = np.asarray(Image.open(tmp_path / "shot.png").convert("RGB")).astype(int)
    drawn = opened.pixels()
    height, width, _ = drawn.shape
    assert picture.shape[1:] == drawn.shape[1:] and 30 < len(picture) - height < 100
    assert np.abs(picture[100:height] - drawn[100:]).mean() < 1, "the points"
    legend = picture[height + 5 :, width // 2 :]
    assert (np.ptp(legend, axis=2) > 60).sum() > 1000, "its colour bar"


def test_points_without_a_value_are_grey(browser, tmp_path):
    points = landscape(4000)
    east = points[:, 0]
    layer = Layer("a", points, {"rough": Channel(np.where(east > np.median(east), np.nan, east))})
    write_viewer(tmp_path / "page.html", [Scene("a", [layer], color="height")], "")
    with open_page(browser, tmp_path / "page.html") as page:
        all_of_them = page.colored()
        page.do("viewer.change({color: 'rough'})")
        assert 0.3 * all_of_them < page.colored() < 0.7 * all_of_them


def test_a_screenshot_names_each_class_of_its_legend_and_what_is_hidden(browser, tmp_path):
    points = landscape(4000)
    classes = Channel(
        np.arange(4000, dtype=np.uint8) % 12, "category", "class", categories=CLASS_NAMES
    )
    layer = Layer("classes", points, {"class": classes})
    write_viewer(tmp_path / "page.html", [Scene("classes", [layer], color="class")], "")
    with open_page(browser, tmp_path / "page.html") as page:
        written = page.page.evaluate("""() => {
            const context = document.createElement("canvas").getContext("2d"), written = [];
            context.fillText = (text, right) =>
                written.push([text, right - context.measureText(text).width]);
            const legend = legendOf(viewer.state, manifest.scenes[0], viewer.stage);
            drawLegend(context, legend, viewer.overlay);
            return written;
        }""")
    texts, lefts = zip(*written, strict=True)
    assert {"class", "never classified", "high vegetation", "water", "and 2 more"} <= set(texts)
    assert min(lefts) > 140, "beside the scale bar"


def test_on_a_phone_the_button_of_the_controls_leaves_the_caption_free(browser, path):
    with open_page(browser, path, (390, 780)) as page:
        page.page.click("#toggle")
        page.do("viewer.change({mode: 'swipe'})")
        right = page.page.evaluate("""() => {
            let right = 0;
            viewer.overlay.write = (text, x) => (right = Math.max(right, x));
            viewer.overlay.draw();
            return right;
        }""")
        assert right < page.page.locator("#toggle").bounding_box()["x"]


def test_the_name_of_a_cloud_ends_where_the_next_one_begins(browser, tmp_path):
    layers = [Layer(f"a long name of a survey, {i}, " * 3, landscape(99)) for i in range(2)]
    write_viewer(tmp_path / "a.html", [Scene("a", layers)])
    with open_page(browser, tmp_path / "a.html", (1400, 500)) as page:
        for mode in ("side", "swipe"):
            page.do(f"viewer.change({{mode: '{mode}'}})")
            spans = page.page.evaluate("""() => {
                const { overlay } = viewer, { context } = overlay, spans = [];
                context.fillText = (text, x) => {
                    const { width } = context.measureText(text);
                    const left = context.textAlign === "right" ? x - width : x;
                    if (text.includes("long")) spans.push([left, left + width]);
                };
                overlay.draw();
                delete context.fillText;
                return spans;
            }""")
            (_, end), (start, last) = sorted(spans)
            assert end < start and last < page.page.evaluate("innerWidth")


def test_another_sample_opens_and_a_phone_folds_the_controls(browser, path):
    with open_page(browser, path, (390, 780), has_touch=True, is_mobile=True) as page:
        assert not page.page.is_visible("#panel")
        page.page.tap("#toggle")
        assert page.page.is_visible("#panel")
        page.page.select_option("#scene", "1")
        page.page.wait_for_function("viewer.state.scene === 1 && viewer.stage.clouds.length === 1")
        page.settle()
        assert page.page.inner_text("#note") == "a ball"
        assert page.colored() > 500


def test_a_large_cloud_is_thinned_to_what_the_screen_needs(browser, tmp_path):
    write_viewer(tmp_path / "a.html", [Scene("a", [Layer("a", landscape(1_000_000))])])
    with open_page(browser, tmp_path / "a.html") as page:
        far = page.page.evaluate("viewer.stage.clouds[0].drawn")
        assert far < 700_000
        full = page.colored()
        # Half of the points, larger ones: no holes appear.
        page.page.evaluate(f"viewer.stage.draw({far // 2})")
        assert page.page.evaluate("viewer.stage.clouds[0].drawn") <= far // 2 + 1000
        page.do(
            "viewer.stage.pose = {...viewer.stage.pose, distance: viewer.stage.pose.distance / 40}"
        )
        near = page.page.evaluate(
            "viewer.stage.clouds[0].nodes.filter((node) => node.drawn)"
            ".map((node) => [node.drawn, node.count])"
        )
        # From near by, the nodes in view are drawn in full.
        assert sum(drawn == count for drawn, count in near) > len(near) / 2
        assert full > 20_000
