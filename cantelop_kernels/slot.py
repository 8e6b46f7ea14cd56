"""A slot is a small integer from which a sandbox's names, uids and paths derive.

Layer 0. Nothing about a sandbox needs to be stored to find it again: given the slot and the
daemon's uid base, every uid, name and folder that could be left over is known.
"""

from __future__ import annotations

from dataclasses import dataclass

STRIDE = 4
"""Uids per slot: the VMM, the attendant, and two kept for later helpers."""

MAX_SLOTS = 1024


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """`uid_base` is the daemon's; two daemons on one host must have ranges that do not overlap."""

    index: int
    uid_base: int

    @property
    def name(self) -> str:
        """Prefix of everything named after this slot; the reaper goes by it."""
        return f"cantelop-{self.uid_base}-{self.index}"

    @property
    def vmm_uid(self) -> int:
        return self.uid_base + STRIDE * self.index

    @property
    def attendant_uid(self) -> int:
        return self.vmm_uid + 1

    @property
    def uids(self) -> range:
        """Every uid of this slot."""
        return range(self.vmm_uid, self.vmm_uid + STRIDE)

    @property
    def gid(self) -> int:
        """The group through which the VMM's helper and the attendant share the vsock socket."""
        return self.vmm_uid


def uid_range(uid_base: int, slots: int = MAX_SLOTS) -> range:
    """Every uid that a daemon with this base may give to a process of a sandbox."""
    return range(uid_base, uid_base + STRIDE * slots)


class SlotTable:
    """Hands out the lowest free slot. Synchronous, so a claim can never be half made."""

    def __init__(self, uid_base: int, size: int) -> None:
        self._uid_base = uid_base
        self._size = size
        self._taken: set[int] = set()
        self._quarantined: set[int] = set()

    def __repr__(self) -> str:
        return f"<SlotTable {len(self._taken)} of {self._size} taken>"

    def acquire(self) -> Slot | None:
        """A slot nobody has, or None when all are taken."""
        for index in range(self._size):
            if index not in self._taken:
                self._taken.add(index)
                return Slot(index, self._uid_base)
        return None

    def take(self, slot: Slot) -> None:
        """Mark a slot as taken that is in use already; an adopted sandbox's."""
        self._taken.add(slot.index)

    def release(self, slot: Slot) -> None:
        """Give it back; releasing twice is harmless. One in quarantine stays taken."""
        if slot.index not in self._quarantined:
            self._taken.discard(slot.index)

    def quarantine(self, slot: Slot) -> None:
        """Never hand it out again: something that goes by its names or uids is still there."""
        self._quarantined.add(slot.index)
