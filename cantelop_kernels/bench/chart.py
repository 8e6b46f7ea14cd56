"""The ratios of one run as a bar chart: SVG, made by hand, readable on light and dark pages.

Layer 6. Called by `report`. Bars are on a log scale and begin at 1, a plain local ipykernel: to the
left is better, to the right is worse, whatever the figure's unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from cantelop_kernels.bench.figures import Results, Row

_LABELS, _PLOT, _RIGHT = 330, 520, 70
_TOP, _BOTTOM = 78, 34
_BAR, _GAP = 14, 10
_COLOURS = ("#4c78a8", "#e4872e", "#54a24b")

_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-size: 16px; font-weight: 600 }
.small { font-size: 12px; fill: #6b7280 }
.grid { stroke: #d0d7de; stroke-width: 1 }
.one { stroke: #57606a; stroke-width: 1.5 }
.back { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .small { fill: #9198a1 }
  .grid { stroke: #30363d }
  .one { stroke: #9198a1 }
  .back { fill: #0d1117 }
}
""".strip()


@dataclass(frozen=True, slots=True)
class _Scale:
    """Ratios to x, over whole decades; `low` and `high` are exponents of ten."""

    low: int
    high: int

    @classmethod
    def over(cls, ratios: list[float]) -> _Scale:
        logs = [math.log10(ratio) for ratio in ratios] or [0.0]
        return cls(min(math.floor(min(logs)), -1), max(math.ceil(max(logs)), 1))

    def x(self, ratio: float) -> float:
        part = (math.log10(ratio) - self.low) / (self.high - self.low)
        return _LABELS + _PLOT * part

    def ticks(self) -> Iterator[float]:
        return (10.0**exponent for exponent in range(self.low, self.high + 1))


def svg(results: Results) -> str:
    """The whole file. Rows without a ratio are left out."""
    names = [target.name for target in results.compared]
    rows = [row for row in results.rows if any(row.cost(name) for name in names)]
    scale = _Scale.over([cost for row in rows for name in names if (cost := row.cost(name))])
    step = len(names) * _BAR + _GAP
    bottom = _TOP + len(rows) * step
    parts = [*_head(results), *_axis(scale, bottom)]
    for at, row in enumerate(rows):
        parts += _row(row, names, scale, _TOP + at * step + _GAP / 2)
    width, height = _LABELS + _PLOT + _RIGHT, bottom + _BOTTOM
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img">',
            f"<style>{_STYLE}</style>",
            f'<rect class="back" width="{width}" height="{height}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _head(results: Results) -> Iterator[str]:
    yield _text(16, 26, "Cost of a kernel, as a multiple of a plain local ipykernel's", "title")
    x = 16.0
    for colour, target in zip(_COLOURS, results.compared, strict=False):
        emulated = " (emulated)" if target.emulated else ""
        label = f"{target.label}{emulated}"
        yield f'<rect x="{x:.0f}" y="40" width="12" height="12" rx="2" fill="{colour}"/>'
        yield _text(x + 18, 51, label)
        x += 40 + 7.5 * len(label)


def _axis(scale: _Scale, bottom: float) -> Iterator[str]:
    for tick in scale.ticks():
        x, kind = scale.x(tick), "one" if tick == 1 else "grid"
        yield f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
        yield _text(x, bottom + 18, f"{tick:g}×", "small", "middle")
    yield _text(scale.x(1) - 8, _TOP - 6, "← cheaper", "small", "end")
    yield _text(scale.x(1) + 8, _TOP - 6, "dearer →", "small")


def _row(row: Row, names: list[str], scale: _Scale, top: float) -> Iterator[str]:
    middle = top + len(names) * _BAR / 2 + 4
    yield _text(_LABELS - 12, middle, row.label, "", "end")
    for at, name in enumerate(names):
        cost = row.cost(name)
        if cost is None or cost <= 0:
            continue
        y, one, end = top + at * _BAR, scale.x(1), scale.x(cost)
        yield (
            f'<rect x="{min(one, end):.1f}" y="{y + 1:.1f}" width="{max(abs(end - one), 1):.1f}"'
            f' height="{_BAR - 2}" rx="2" fill="{_COLOURS[at % len(_COLOURS)]}"/>'
        )
        left = end < one
        yield _text(
            end - 5 if left else end + 5, y + 11, f"{cost:.2g}×", "small", "end" if left else ""
        )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    extra = f' class="{kind}"' if kind else ""
    extra += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(text)}</text>'
