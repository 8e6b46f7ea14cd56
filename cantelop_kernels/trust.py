"""Who can change a file that root relies on? (THREATS.md 12)

Layer 1. Used by `preflight`, and wherever root is about to run a program or boot an image.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cantelop_kernels.errors import ConfigError


def require(path: Path) -> None:
    """Raises ConfigError where others than root and this user could change what will be run."""
    found = changeable_by_others(path)
    if found is not None:
        raise ConfigError(
            f"{found} can be changed by others than root, and {path.name} would run from there",
            hint=f"chown root {found}; chmod go-w {found}",
        )


def changeable_by_others(path: Path) -> Path | None:
    """The file itself, or the folder above it, that others than root and this user can change.

    In a folder with the sticky bit nobody can replace what belongs to someone else. Links are
    followed, and the folders they stand in are looked at too. A missing file is nobody's.
    """
    given = path.absolute()
    for one in (path.resolve(), *given.parents, *path.resolve().parents):
        try:
            found = one.stat()
        except OSError:
            continue
        group = found.st_mode & 0o020 and found.st_gid != 0
        shared = (group or found.st_mode & 0o002) and not _sticky_folder(found)
        if shared or found.st_uid not in (0, os.geteuid()):
            return one
    return None


def _sticky_folder(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and bool(found.st_mode & stat.S_ISVTX)
