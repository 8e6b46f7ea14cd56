"""What is in a root, and under which licences: the package list of an image's manifest.

Layer 2, used by the image builder. Reads only, from a root that is not running. Licences are told
where a machine can read them: Debian's copyright files in the standard format, and the metadata of
Python packages; elsewhere the list is empty.
"""

from __future__ import annotations

import asyncio
import re
from email.message import Message
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, cast

from .process import run

_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
_FIELDS = "${db:Status-Abbrev}\t${Package}\t${Version}\n"


async def collect(root: Path, python: str) -> dict[str, list[dict[str, Any]]]:
    """Debian's and Python's packages below `root`, each with name, version and licences."""
    database = root / "var/lib/dpkg"
    argv = ["dpkg-query", f"--admindir={database}", "-W", f"--showformat={_FIELDS}"]
    done = await run(argv, env=_ENV, deadline=60)
    return await asyncio.to_thread(
        lambda: {
            "debian": _debian(done.stdout, root / "usr/share/doc"),
            "python": _python(root / f"usr/local/lib/python{python}/dist-packages"),
        }
    )


def _debian(listing: str, docs: Path) -> list[dict[str, Any]]:
    found = []
    for line in listing.splitlines():
        status, name, version = line.split("\t")
        if status.startswith("ii"):
            licences = copyright_licences(_text(docs / name / "copyright"))
            found.append({"name": name, "version": version, "licences": licences})
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def copyright_licences(text: str) -> list[str]:
    """The short names of the licences in a Debian copyright file (DEP-5, version 1.0)."""
    if not text.lstrip().startswith(("Format: http", "Format-Specification: http")):
        return []
    names = re.findall(r"^License:[ \t]*(\S.*?)\s*$", text, re.MULTILINE)
    return sorted(set(names))


def _python(folder: Path) -> list[dict[str, Any]]:
    found = [
        {
            "name": distribution.metadata["Name"],
            "version": distribution.version,
            "licences": python_licences(distribution),
        }
        for distribution in distributions(path=[str(folder)])
    ]
    return sorted(found, key=lambda entry: str(entry["name"]).lower())


def python_licences(distribution: Distribution) -> list[str]:
    """A Python package's licence: the SPDX expression, else the short field, else classifiers."""
    metadata = cast(Message, distribution.metadata)
    for field in ("License-Expression", "License"):
        value = str(metadata.get(field) or "").strip()
        if value and "\n" not in value and len(value) < 100:
            return [value]
    classifiers = [str(value) for value in metadata.get_all("Classifier") or []]
    return sorted(c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License ::"))
