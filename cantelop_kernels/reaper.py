"""What a daemon that died left behind: live sessions are found, all else is taken away.

Layer 5. Runs once, before a daemon serves. In normal running every acquisition has its own undo and
nothing is left for this. Nothing outside the daemon's own uid range, state folder and socket folder
is touched.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path

from cantelop_kernels import record, trees
from cantelop_kernels.cgroup import Hierarchy
from cantelop_kernels.errors import CantelopError
from cantelop_kernels.jail import sandboxes
from cantelop_kernels.record import SessionRecord
from cantelop_kernels.slot import Slot, uid_range
from cantelop_kernels.uids import kill_found


@dataclass(slots=True)
class Findings:
    """`removed` in words, for the log."""

    alive: list[SessionRecord] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


async def reap(state: Path, uid_base: int, cgroups: Hierarchy) -> Findings:
    """Find the sessions that still live, kill every other process, remove every other cgroup and
    folder.

    A folder that cannot be removed is set aside and told, and keeps nobody from serving. Raises
    DeadlineExceeded where a process does not die: it could be serving still.
    """
    findings = Findings()
    names = f"cantelop-{uid_base}-*"
    places = sandboxes(state)
    kept = set()
    for folder in sorted(places.glob(names)):
        known = record.load(folder)
        if known is None or Slot(known.slot, uid_base).name != folder.name or not known.alive():
            continue
        findings.alive.append(known)
        kept.add(folder)
    for name in sorted(cgroups.names(f"cantelop-{uid_base}-") - {folder.name for folder in kept}):
        findings.removed.append(await _said(f"cgroup {name}", cgroups.find(name).remove()))
    spared = {uid for one in findings.alive for uid in Slot(one.slot, uid_base).uids}
    findings.removed += await kill_found(set(uid_range(uid_base)) - spared)
    for old in trees.leftovers(places, names):
        findings.removed.append(await _said(f"folder {old.name}", trees.remove_leftover(old)))
    for folder in sorted(set(places.glob(names)) - kept):
        findings.removed.append(await _said(f"folder {folder.name}", trees.remove(folder)))
    return findings


async def _said(what: str, removal: Awaitable[None]) -> str:
    try:
        await removal
    except CantelopError as error:
        return f"{what}, which stays: {error}"
    return what
