"""The figures of one run: their rows, ratios and percentiles, and the JSON they are kept in.

Layer 6. Filled by `suite`; read by `report`, `chart` and, as JSON, by `notebooks/benchmarks.ipynb`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = 1
"""Of the JSON; raised where a reader would have to change."""

BASE = "local"
"""The name of the target that ratios are against."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, and its value for each target by name. No value: it does not apply there."""

    name: str
    label: str
    unit: str
    better: Literal["lower", "higher"] = "lower"
    values: dict[str, float] = field(default_factory=dict)

    def ratio(self, target: str) -> float | None:
        """The target's value in terms of the base's; None where one is missing or the base is 0."""
        return ratio(self.values.get(target), self.values.get(BASE))

    def cost(self, target: str) -> float | None:
        """As `ratio`, but always the more the worse: above 1 is worse than the base."""
        found = self.ratio(target)
        if self.better == "lower" or found is None:
            return found
        return 1 / found if found else None


@dataclass(frozen=True, slots=True)
class About:
    """One target. `warm` is how many sandboxes a pool held ready for it."""

    name: str
    label: str
    vmm: str = ""
    emulated: bool = False
    warm: int = 0


@dataclass(slots=True)
class Results:
    """One run. `samples` are the single measurements, in the order in which they were taken."""

    machine: dict[str, Any]
    sizes: dict[str, Any]
    targets: list[About]
    rows: list[Row]
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def compared(self) -> list[About]:
        """The targets that have ratios."""
        return [target for target in self.targets if target.name != BASE]

    def put(self, name: str, target: str, value: float) -> None:
        """Fill in the row `name`. KeyError where there is none."""
        self.row(name).values[target] = value

    def add(self, name: str, target: str, samples: Sequence[float]) -> None:
        """Keep samples; those of several calls are taken together."""
        self.samples.setdefault(name, {}).setdefault(target, []).extend(samples)

    def summarise(self, name: str) -> None:
        """Fill in the row of these samples with their median, and its p99 row where it has one."""
        for target, samples in self.samples[name].items():
            self.put(name, target, statistics.median(samples))
            if self._has(f"{name}_p99"):
                self.put(f"{name}_p99", target, percentile(samples, 99))

    def row(self, name: str) -> Row:
        found = {row.name: row for row in self.rows}
        return found[name]

    def _has(self, name: str) -> bool:
        return any(row.name == name for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Whole: with the ratios, so that readers need not know how they are made."""
        return {
            "schema": SCHEMA,
            "machine": self.machine,
            "sizes": self.sizes,
            "base": BASE,
            "targets": [asdict(target) for target in self.targets],
            "figures": [asdict(row) | {"ratios": self._ratios(row)} for row in self.rows],
            "samples": self.samples,
        }

    def _ratios(self, row: Row) -> dict[str, float]:
        found = {target.name: row.ratio(target.name) for target in self.compared}
        return {name: value for name, value in found.items() if value is not None}


def ratio(value: float | None, base: float | None) -> float | None:
    """None where one of them is missing, or there is nothing to compare with."""
    if value is None or base is None or base <= 0:
        return None
    return value / base


def percentile(samples: Sequence[float], percent: float) -> float:
    """The nearest rank: the least sample that so many percent are not above.

    Never a value that was not seen: the 99th of 20 samples is the slowest. ValueError on none.
    """
    if not samples or not 0 <= percent <= 100:
        raise ValueError("a percentile needs samples, and 0 to 100 percent")
    rank = math.ceil(percent * len(samples) / 100)
    return sorted(samples)[max(rank, 1) - 1]
