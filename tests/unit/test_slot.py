"""Slots: names and uids derive from the index and never overlap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cantelop_kernels.slot import MAX_SLOTS, Slot, SlotTable, uid_range


@given(st.sets(st.integers(0, MAX_SLOTS - 1), min_size=2), st.integers(1000, 1 << 30))
def test_no_two_slots_share_a_uid(indexes: set[int], base: int) -> None:
    slots = [Slot(index, base) for index in indexes]
    uids = [uid for slot in slots for uid in (slot.vmm_uid, slot.attendant_uid)]
    assert len(set(uids)) == len(uids)
    assert all(uid in uid_range(base) for uid in uids)
    assert len({slot.name for slot in slots}) == len(slots)


@given(st.lists(st.booleans()))
def test_a_slot_is_never_given_twice(takes: list[bool]) -> None:
    table = SlotTable(5000, 3)
    held: list[Slot] = []
    for take in takes:
        if take:
            slot = table.acquire()
            assert (slot is None) == (len(held) == 3)
            assert slot not in held
            held += [slot] if slot else []
        elif held:
            table.release(held.pop(0))


def test_releasing_twice_is_harmless() -> None:
    table = SlotTable(5000, 1)
    slot = table.acquire()
    assert slot is not None
    table.release(slot)
    table.release(slot)
    assert table.acquire() == slot
    assert table.acquire() is None


def test_a_slot_in_quarantine_is_never_handed_out_again() -> None:
    table = SlotTable(600_000, 2)
    first = table.acquire()
    assert first is not None
    table.quarantine(first)
    table.release(first)
    second = table.acquire()
    assert second is not None and second.index == 1
    assert table.acquire() is None
