"""A page of a picture: clouds, captions, colour bars, histograms; and its file.

The page draws on its own matplotlib figure with an Agg canvas, not through pyplot's global state,
so that pictures can be drawn anywhere, in a training loop too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from pointup.disk import check_output_file
from pointup.errors import FileError
from pointup.visualization.rendering import Camera

INK, FAINT = "#22262b", "#6b727b"
SERIES = ("#3b6fb6", "#e08a3c")
LABEL = 26
"""Height of a line above a picture."""
PICTURES = (".png", ".jpg", ".jpeg")


class Page:
    """A white page, measured in pixels from its lower left corner."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / 100, height / 100), dpi=100, facecolor="white")
        self.canvas = FigureCanvasAgg(self.figure)

    def pixels(self) -> np.ndarray:
        self.canvas.draw()
        return np.asarray(self.canvas.buffer_rgba())[..., :3].copy()

    def paste(self, left: int, bottom: int, image: np.ndarray) -> None:
        self.figure.figimage(image, left, bottom, origin="upper")

    def stack(self, left: int, bottom: int, image: np.ndarray, label: str) -> int:
        """Paste a picture with a label above it; returns the bottom of what comes above both."""
        self.paste(left, bottom, image)
        self.write(left, bottom + len(image) + 6, label, 18, FAINT)
        return bottom + len(image) + LABEL

    def write(
        self, left: float, bottom: float, text: str, size: int, color: str = INK, **font: Any
    ) -> float:
        """Write one line, `size` pixels high, and return the x of its right end."""
        place = (left / self.width, bottom / self.height)
        # A name with two dollar signs must not be parsed as a formula.
        font |= {"fontsize": 0.72 * size, "color": color, "parse_math": False}
        line = self.figure.text(*place, text, **font)
        return float(line.get_window_extent(self.canvas.get_renderer()).x1)

    def heading(self, left: float, bottom: float, name: str, note: str) -> None:
        end = self.write(left, bottom, name, 22, weight="bold")
        self.write(end + 12, bottom, note, 20, FAINT)

    def caption(self, left: float, bottom: float, name: str, note: str) -> None:
        """Write two lines, the name above the note."""
        self.write(left, bottom + 28, name, 22, weight="bold")
        self.write(left, bottom, note, 20, FAINT)

    def axes(self, left: float, bottom: float, width: float, height: float) -> Axes:
        place = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(place)
        axes.tick_params(labelsize=0.72 * 17, colors=FAINT, length=3)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(FAINT)
        return axes

    def color_bar(
        self, left: float, width: float, colors: Colormap, span: tuple[float, float], label: str
    ) -> None:
        """Draw a colour bar near the lower edge of the page, to the right of its label."""
        end = self.write(left, 42, label, 18, FAINT) + 14
        bar = self.axes(end, 42, left + width - end, 14)
        ramp = np.linspace(0, 1, 256)[None]
        bar.imshow(ramp, cmap=colors, aspect="auto", extent=(*span, 0, 1), vmin=0, vmax=1)
        bar.xaxis.set_major_locator(MaxNLocator(3, min_n_ticks=2))
        bar.xaxis.set_major_formatter(lambda value, _: _tick(value, span))
        bar.set_yticks([])

    def _rectangle(
        self, left: float, bottom: float, width: float, height: float, **style: Any
    ) -> None:
        corner = (left / self.width, bottom / self.height)
        style["transform"] = self.figure.transFigure
        box = Rectangle(corner, width / self.width, height / self.height, **style)
        self.figure.add_artist(box)

    def frame(self, left: float, bottom: float, width: float, height: float) -> None:
        """Draw the outline of a rectangle over the picture, with a white edge for contrast."""
        for line, color in ((3.0, "white"), (1.2, INK)):
            outline = {"fill": False, "linewidth": line, "edgecolor": color}
            self._rectangle(left, bottom, width, height, **outline)

    def outline(self, left: float, bottom: float, camera: Camera, close: Camera) -> None:
        """Frame what `close` shows in the picture of `camera`, as far as it lies within it."""
        middle = (close.centre - camera.centre) @ camera.axes[:2].T * camera.scale
        half = np.array([close.width, close.height]) / 2 * camera.scale / close.scale
        sides = np.array([camera.width, camera.height])
        low, high = (np.clip(middle + sides / 2 + sign * half, 0, sides) for sign in (-1, 1))
        self.frame(left + low[0], bottom + low[1], *(high - low))

    def scale_bar(
        self, left: float, scale: float, unit: str, note: str = "", longest: int = 180
    ) -> float:
        """Draw a scale bar of a round length, for `scale` pixels per unit of the cloud.

        Returns the x of the right end of its label.
        """
        length = longest / scale
        power = 10.0 ** np.floor(np.log10(length))
        length = power * max(step for step in (1, 2, 5) if step * power <= length)
        self._rectangle(left, 46, length * scale, 4, color=INK)
        label = f"{length:g} {unit}".strip()
        end = self.write(left + length * scale + 10, 42, label, 18)
        return self.write(end + 10, 42, note, 18, FAINT) if note else end

    def histogram(self, left: float, label: str, series: dict[str, np.ndarray]) -> None:
        axes = self.axes(left, 84, 440, 220)
        values = {name: data[np.isfinite(data)] for name, data in series.items()}
        together = np.concatenate(list(values.values()))
        low, high = (together.min(), together.max()) if len(together) else (0.0, 1.0)
        wide = low > 0 and high / low > 30
        # Room at both ends, also where all values are equal.
        room = 0.02 * (high - low) or 0.05 * abs(high) or 0.5
        edges = np.geomspace(low, high, 41) if wide else np.linspace(low - room, high + room, 41)
        for (name, data), color in zip(values.items(), SERIES, strict=False):
            axes.hist(data, edges.tolist(), color=color, alpha=0.75, label=name)
        if wide:
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        _label(axes, label)
        if len(values) > 1:
            axes.legend(fontsize=0.72 * 17, frameon=False, loc="best")


def _label(axes: Axes, label: str) -> None:
    axes.grid(axis="y", color="#e4e6e9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(label, fontsize=0.72 * 18, color=INK, parse_math=False)


def labelled(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit else name


def number(value: float, unit: str = "") -> str:
    """A value with three digits (large ones with all digits and no exponent) and its unit."""
    return f"{value:,.0f} {unit}".strip() if value >= 100 else f"{value:.3g} {unit}".strip()


def _tick(value: float, span: tuple[float, float]) -> str:
    """The label of a tick of an axis over `span`, with the decimals that tell its ticks apart."""
    width, largest = span[1] - span[0], max(map(abs, span))
    if width > 0 and 1e-3 <= largest < 1e9:
        decimals = max(2 - int(np.floor(np.log10(width))), 0)
        # A zero that is slightly negative has no sign.
        text = f"{round(value, decimals) + 0.0:,.{decimals}f}"
        text = text.rstrip("0").rstrip(".") if decimals else text
    else:
        text = f"{value:.4g}"
    return text.replace("-", "\N{MINUS SIGN}")


def save_picture(picture: np.ndarray, path: str | Path) -> None:
    """Write a picture (height, width, 3) uint8 as PNG or JPEG, by the file's extension.

    Raises FileError for another extension and where the file can't be written.
    """
    path = Path(path)
    check_picture_path(path)
    try:
        imsave(path, picture)
    except OSError as error:
        reason = error.strerror or error
        message = f"{path}: can't write the picture ({reason}); choose another path"
        raise FileError(message) from error


def stacked(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Pictures (height, width, 3) below each other, on a white page of the largest width."""
    width = max(picture.shape[1] for picture in pictures)
    return np.concatenate(
        [
            np.pad(picture, ((0, 0), (0, width - picture.shape[1]), (0, 0)), constant_values=255)
            for picture in pictures
        ]
    )


def beside(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Pictures (height, width, 3) side by side, on a white page of the largest height."""
    return stacked([picture.transpose(1, 0, 2) for picture in pictures]).transpose(1, 0, 2)


def check_picture_path(path: Path) -> None:
    """Raise FileError for a path that no picture can be written to. Call it before the work."""
    if path.suffix.lower() not in PICTURES:
        raise FileError(f"{path}: pictures are written as .png or .jpg; change the extension")
    check_output_file(path)


def dataset_picture(
    num_source: np.ndarray, num_target: np.ndarray, extent: np.ndarray, unit: str = ""
) -> np.ndarray:
    """Histograms of a dataset: points per sample, ratio of target to source, extent of the source.

    num_source, num_target: (B,) number of points of each sample.
    extent: (B,) longest side of the bounding box of each sample's source, in `unit`.
    """
    num_source, num_target = np.asarray(num_source), np.asarray(num_target)
    ratio = num_target[num_source > 0] / num_source[num_source > 0]
    page = Page(1600, 400)
    total = int(num_source.sum()) + int(num_target.sum())
    page.heading(24, 366, f"{len(num_source):,} samples", f"{total:,} points")
    page.histogram(72, "points per sample", {"source": num_source, "target": num_target})
    page.histogram(592, "upsampling ratio, target / source", {"": ratio})
    page.histogram(1112, labelled("longest side of the source", unit), {"": np.asarray(extent)})
    return page.pixels()


def reliability_picture(found: Mapping[str, Any], unit: str = "") -> np.ndarray:
    """How reliable uncertainties are, by tenth of the new points: the share that is within, and the
    uncertainty beside distances to the truth.

    found: of `pointup.evaluation.uncertainty.reliability`. Its distances are in `unit`.
    """
    page, tenths = Page(1300, 400), np.arange(1, 11)
    note = f"{found['within']:.1f} % of the new points are within it, 90 % should be"
    page.heading(24, 366, "uncertainty", note)
    shares, lengths = page.axes(72, 76, 440, 240), page.axes(608, 76, 440, 240)
    shares.bar(tenths, found["within_by_decile"], color=SERIES[0], alpha=0.75)
    shares.axhline(90, color=INK, linewidth=1, linestyle="--")
    shares.set_ylim(0, 100)
    lengths.set_yscale("log", nonpositive="mask")
    drawn = {"uncertainty": INK, "90 % of the distances": SERIES[0], "mean distance": SERIES[1]}
    keys = ("uncertainty_by_decile", "distance_90_by_decile", "distance_by_decile")
    for (name, color), key, line in zip(drawn.items(), keys, ("--", "-", "-"), strict=True):
        lengths.plot(tenths, found[key], line, color=color, marker="o", markersize=4, label=name)
    lengths.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    lengths.yaxis.set_major_formatter("{x:g}")
    lengths.yaxis.set_minor_locator(NullLocator())
    for axes, title in ((shares, "share within, %"), (lengths, labelled("distance", unit))):
        page.write(axes.bbox.x0, 326, title, 18, FAINT)
        axes.set_xticks(tenths)
        _label(axes, "tenth of the new points, by uncertainty")
    font = 0.72 * 17
    lengths.legend(fontsize=font, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return page.pixels()
