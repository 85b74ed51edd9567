"""Draw the outcomes of simulated runs as a PNG: tokens/s over supernodes, one line for each deployment and bound."""

from collections.abc import Mapping
from math import floor, log10
from pathlib import Path
from typing import Any

from stalesync.simulator.cluster import Case
from stalesync.simulator.outcome import Outcome

WIDTH, HEIGHT = 900, 540
LEFT, RIGHT, TOP, BOTTOM = 90, 250, 50, 60
COLOURS = ("#1f77b4", "#d1622b", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")


def draw(outcomes: Mapping[Case, Outcome], path: Path, title: str) -> None:
    """Write the plot; grey lines are linear growth from the first point of each line. Raise ValueError if Pillow is not
    installed, or the file cannot be written."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise ValueError("--png needs Pillow: pip install pillow") from None
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    axes = _Axes(outcomes)
    pen.text((LEFT, 16), title, fill="black", font=font)
    pen.text((LEFT, HEIGHT - 26), "supernodes", fill="black", font=font)
    for value in axes.ticks:
        y = axes.y(value)
        pen.line([(LEFT, y), (WIDTH - RIGHT, y)], fill="#dddddd")
        pen.text((10, y - 8), f"{value:,.0f}", fill="black", font=font)
    for count in axes.supernodes:
        pen.text((axes.x(count) - 4, HEIGHT - BOTTOM + 8), str(count), fill="black", font=font)
    lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for case, outcome in outcomes.items():
        lines.setdefault((case.deployment, case.max_staleness), []).append((case.supernodes, outcome.tokens_per_s))
    for number, ((deployment, bound), points) in enumerate(lines.items()):
        _draw_line(pen, axes, sorted(points), COLOURS[number % len(COLOURS)])
        place = WIDTH - RIGHT + 20, TOP + 22 * number
        pen.rectangle([place[0], place[1] + 4, place[0] + 14, place[1] + 12], fill=COLOURS[number % len(COLOURS)])
        pen.text((place[0] + 22, place[1]), f"{deployment}, staleness {bound}", fill="black", font=font)
    try:
        image.save(path, format="PNG")
    except OSError as error:
        raise ValueError(f"--png {path}: {error}") from None


def _draw_line(pen: Any, axes: "_Axes", points: list[tuple[int, float]], colour: str) -> None:
    places = [(axes.x(count), axes.y(speed)) for count, speed in points]
    if len(points) > 1:
        first, last = points[0], points[-1][0]
        ideal = first[1] * last / first[0]
        pen.line([places[0], (axes.x(last), axes.y(min(ideal, axes.most)))], fill="#bbbbbb")
        pen.line(places, fill=colour, width=3)
    for x, y in places:
        pen.ellipse([x - 4, y - 4, x + 4, y + 4], fill=colour)


class _Axes:
    """Map supernodes and tokens/s to pixels."""

    def __init__(self, outcomes: Mapping[Case, Outcome]) -> None:
        self.supernodes = sorted({case.supernodes for case in outcomes})
        first, last = self.supernodes[0], self.supernodes[-1]
        self._span = max(1e-9, last - first)
        self._first = first
        self.most = max(outcome.tokens_per_s * last / case.supernodes for case, outcome in outcomes.items())
        tick = _round_below(self.most / 4)
        self.ticks = [tick * number for number in range(int(self.most / tick) + 1)]

    def x(self, supernodes: int) -> float:
        return LEFT + (supernodes - self._first) / self._span * (WIDTH - RIGHT - LEFT)

    def y(self, tokens_per_s: float) -> float:
        return HEIGHT - BOTTOM - tokens_per_s / self.most * (HEIGHT - TOP - BOTTOM)


def _round_below(value: float) -> float:
    """Return the largest of 1, 2 and 5 times a power of ten that is at most ``value``."""
    power = 10.0 ** floor(log10(value))
    return max(power * factor for factor in (1, 2, 5) if power * factor <= value)
