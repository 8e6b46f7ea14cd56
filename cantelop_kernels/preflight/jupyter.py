"""Does Jupyter offer our kernels?

Layer 6, part of `preflight`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from cantelop_kernels.preflight.model import Check

PROVISIONER = "cantelop"
PROVISIONERS = "jupyter_client.kernel_provisioners"


def kernelspecs() -> Iterator[Check]:
    """Jupyter hides a kernelspec whose provisioner is not installed, and says so to nobody."""
    from jupyter_core.paths import jupyter_path

    folders = [Path(folder) for folder in jupyter_path("kernels")]
    known = {point.name for point in entry_points(group=PROVISIONERS)}
    yield from kernelspec_checks(folders, known)


def kernelspec_checks(folders: list[Path], known: set[str]) -> Iterator[Check]:
    """`known` are the provisioners that this Python has."""
    ours: list[str] = []
    for path in sorted(file for folder in folders for file in folder.glob("*/kernel.json")):
        provisioner = _provisioner(path)
        if provisioner == PROVISIONER:
            ours.append(path.parent.name)
        if provisioner is not None and provisioner not in known:
            yield Check(
                "kernelspec",
                "fail" if provisioner == PROVISIONER else "warn",
                f"{path.parent.name}: its provisioner {provisioner!r} is not installed for"
                f" {sys.executable}, so Jupyter hides it",
                "install the package that has the provisioner beside Jupyter, or remove "
                f"{path.parent}",
            )
    if ours:
        yield Check("kernelspec", "ok", f"installed: {', '.join(sorted(set(ours)))}")
    else:
        yield Check(
            "kernelspec",
            "warn",
            "none of ours is installed, so Jupyter's menus do not offer one",
            "cantelop kernelspec install",
        )


def _provisioner(path: Path) -> str | None:
    """The name in the file's stanza; None without one, or where Jupyter could not read it."""
    try:
        spec: Any = json.loads(path.read_text(encoding="utf-8"))
        return str(spec["metadata"]["kernel_provisioner"]["provisioner_name"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
