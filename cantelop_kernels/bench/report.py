"""A run's figures for people: a table with ratios, and the files that are kept.

Layer 6. Called by `cli.bench` and `tests/bench`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from cantelop_kernels.bench import chart
from cantelop_kernels.bench.figures import About, Results, Row
from cantelop_kernels.errors import BadRequest

_NONE = "–"


def table(results: Results) -> Table:
    """One line per figure, one column per target, and the ratio of each to the base."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.title, made.caption = title(results), caption(results)
    made.title_justify = made.caption_justify = "left"
    made.add_column("medians")
    for target in results.targets:
        made.add_column(target.label, justify="right", no_wrap=True)
        if target in results.compared:
            made.add_column("ratio", justify="right", style="bold", no_wrap=True)
    for row in results.rows:
        if row.values:
            made.add_row(*_cells(row, results))
    return made


def _cells(row: Row, results: Results) -> list[Text]:
    cells = [Text(row.label)]
    for target in results.targets:
        value = row.values.get(target.name)
        unit = f" {row.unit}" if row.unit and value is not None else ""
        cells.append(Text(number(value) + unit))
        if target in results.compared:
            cells.append(Text(number(row.ratio(target.name))))
    return cells


def number(value: float | None) -> str:
    """Three digits that count, and no more; whole numbers whole."""
    if value is None:
        return _NONE
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def title(results: Results) -> str:
    """What is compared with what."""
    others = ", ".join(map(_named, results.compared))
    return f"A plain local ipykernel and {others}: the same run"


def _named(target: About) -> str:
    notes = ["emulated"] if target.emulated else []
    notes += [f"{target.warm} warm"] if target.warm else []
    return f"{target.label} ({', '.join(notes)})" if notes else target.label


def caption(results: Results) -> str:
    """What it was measured on."""
    machine = results.machine
    versions = ", ".join(f"{name} {text}" for name, text in machine["versions"].items())
    memory = machine["memory_bytes"] / (1 << 30)
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {memory:.0f} GiB, Linux {machine['linux']},"
        f" {machine['virtualization']}; {versions}; {machine['taken']}"
    )


def as_json(results: Results) -> str:
    return json.dumps(results.to_json(), indent=1) + "\n"


def prepare(folder: Path) -> None:
    """Make the folder that `write` will write to, before long measuring ends in an error.

    Raises BadRequest where that cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadRequest(
            f"cannot write to {folder}: {error.strerror}", hint="name another folder with -o"
        ) from error


def files(folder: Path) -> tuple[Path, Path]:
    """The JSON and the chart."""
    return folder / "bench.json", folder / "bench.svg"


def write(results: Results, folder: Path) -> None:
    data, picture = files(folder)
    data.write_text(as_json(results), encoding="utf-8")
    picture.write_text(chart.svg(results), encoding="utf-8")
