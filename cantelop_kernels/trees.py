"""Folder trees taken away whole, whoever built them and however deep they are.

Layer 1. A jailed process or a user may have filled a folder that root removes: with thousands of
levels, links, or names that change meanwhile. rm(1) walks by directory descriptors, follows no link
and needs no stack for a level.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from cantelop_kernels.errors import CantelopError
from cantelop_kernels.process import finish, run_patiently

_DEADLINE = 60.0
"""Seconds for one tree. Millions of files take longer; then it is told, and stays set aside."""


async def remove(path: Path) -> None:
    """Set `path` aside, which frees its name at once, then remove it; nothing where it is missing.

    The folder above must be root's alone. A link is removed, not what it points to. Raises
    CantelopError where something is left; `leftovers` finds that again.
    """
    aside = path.with_name(f".{path.name}.gone-{secrets.token_hex(6)}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    except OSError as error:  # somebody has mounted something on it
        raise CantelopError(
            f"{path} could not be removed: {error.strerror}",
            hint="see what is mounted on it, and unmount it",
        ) from error
    await finish(_rm(aside))


def leftovers(folder: Path, names: str) -> list[Path]:
    """What `remove` had set aside and could not remove, for paths in `folder` like `names`."""
    return sorted(folder.glob(f".{names}.gone-*"))


async def remove_leftover(path: Path) -> None:
    """Try again. Raises as `remove` does."""
    await _rm(path)


async def _rm(path: Path) -> None:
    try:
        await run_patiently(["rm", "-rf", "--one-file-system", "--", str(path)], deadline=_DEADLINE)
    except CantelopError as error:
        raise CantelopError(
            f"{path} could not be removed: {error.message}",
            hint="see what is in it, and remove it by hand",
        ) from error
