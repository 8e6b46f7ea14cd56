"""What a check says, and the small things that all checks share.

Layer 6, part of `preflight`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `fix` is what to do about it, empty where there is nothing to do.

    `fail` is for what makes a boundary hollow or a start impossible, `warn` for the rest.
    """

    name: str
    status: Status
    found: str
    fix: str = ""


def text_of(path: Path) -> str:
    """What stands in a small file of /proc, /sys or /etc, stripped; empty where nothing can be
    read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
