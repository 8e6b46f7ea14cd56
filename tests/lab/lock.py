"""The lab's Python packages: what the project and its tests need, resolved and pinned.

`python -m tests.lab lock` renews `lab-host/requirements.txt`; a unit test says when that is due.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from cantelop_kernels.process import run
from tests.lab import image

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
REQUIREMENTS = image.FOLDER / image.NAME / "requirements.txt"

NOT_INSIDE = {"mypy", "ruff", "types-psutil", "hatchling", "installer"}
"""Of the extra `test`: what checks or packs the sources, which happens outside."""

_HEAD = """\
# The lab's Python packages, pinned with everything they need, for CPython 3.13 on x86_64: what
# pyproject.toml asks for. Renewed by `python -m tests.lab lock`.

"""


def wanted(pyproject: str) -> list[str]:
    """The requirements that the lab must meet, from the text of pyproject.toml."""
    project = tomllib.loads(pyproject)["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    return sorted(one for one in asked if _name(one) not in NOT_INSIDE)


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


async def renew() -> None:
    """Resolve with pip, for the lab's Python, and write the file. Raises CommandFailed."""
    with tempfile.TemporaryDirectory(prefix="lab-lock-") as folder:
        report = Path(folder) / "report.json"
        await run(resolve_argv(wanted(PYPROJECT.read_text()), report), deadline=600)
        REQUIREMENTS.write_text(render(json.loads(report.read_text())))


def resolve_argv(requirements: list[str], report: Path) -> list[str]:
    """pip wants a target for another Python than its own, also where it installs nothing."""
    platforms = ["manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (28, 34))]
    return [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--dry-run", "--ignore-installed", "--report", str(report)),
        *("--only-binary=:all:", "--python-version", "3.13", "--target", str(report.parent)),
        *(part for platform in platforms for part in ("--platform", platform)),
        *requirements,
    ]


def render(report: dict[str, Any]) -> str:
    """The requirements file for pip's installation report (version 1)."""
    lines = []
    for one in report["install"]:
        digest = one["download_info"]["archive_info"]["hashes"]["sha256"]
        name = str(one["metadata"]["name"]).lower().replace("_", "-")
        lines.append(f"{name}=={one['metadata']['version']} \\\n    --hash=sha256:{digest}\n")
    return _HEAD + "".join(sorted(lines))
