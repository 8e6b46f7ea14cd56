"""What a daemon that died left behind: found by uid and name, and taken away.

Layer 5. Runs once, before a daemon serves. In normal running every acquisition has its own undo and
nothing is left for this. Nothing outside the daemon's own uid range, state folder and socket folder
is touched.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from cantelop_kernels.jail import sandboxes
from cantelop_kernels.slot import uid_range
from cantelop_kernels.uids import kill_all


async def reap(state: Path, uid_base: int) -> list[str]:
    """Kill the left-over processes, then remove their folders; returns what was found, in words.

    Raises DeadlineExceeded where a process does not die.
    """
    found = await kill_all(uid_range(uid_base))
    for folder in sorted(sandboxes(state).glob(f"cantelop-{uid_base}-*")):
        shutil.rmtree(folder)
        found.append(f"folder {folder.name}")
    return found
