"""What a daemon that died left behind: found by uid and name, and taken away.

Layer 5. Runs once, before a daemon serves. In normal running every acquisition has its own undo and
nothing is left for this. Nothing outside the daemon's own uid range, state folder and socket folder
is touched.
"""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path

from cantelop_kernels import trees
from cantelop_kernels.errors import CantelopError
from cantelop_kernels.jail import sandboxes
from cantelop_kernels.slot import uid_range
from cantelop_kernels.uids import kill_found


async def reap(state: Path, uid_base: int) -> list[str]:
    """Kill the left-over processes, then remove their folders; returns what was found, in words.

    A folder that cannot be removed is set aside and told, and keeps nobody from serving. Raises
    DeadlineExceeded where a process does not die: it could be serving still.
    """
    found = await kill_found(uid_range(uid_base))
    names = f"cantelop-{uid_base}-*"
    places = sandboxes(state)
    for old in trees.leftovers(places, names):
        found.append(await _said(f"folder {old.name}", trees.remove_leftover(old)))
    for folder in sorted(places.glob(names)):
        found.append(await _said(f"folder {folder.name}", trees.remove(folder)))
    return found


async def _said(what: str, removal: Awaitable[None]) -> str:
    try:
        await removal
    except CantelopError as error:
        return f"{what}, which stays: {error}"
    return what
