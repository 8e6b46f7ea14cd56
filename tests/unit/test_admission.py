"""The host's limits: never exceeded, fair, and free again in the end."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cantelop_kernels.admission import Admission, Limits, Need
from cantelop_kernels.errors import Exhausted

LIMITS = Limits(memory_mib=4000, vcpus=8, sandboxes=5, overhead_mib=100)
NEEDS = st.builds(Need, st.integers(100, 3000), st.integers(1, 8))


def never() -> bool:
    return False


@given(st.lists(st.tuples(NEEDS, st.booleans()), max_size=40))
def test_limits_hold_whatever_comes(steps: list[tuple[Need, bool]]) -> None:
    async def play() -> None:
        admission = Admission(LIMITS)
        held: dict[int, Need] = {}
        for need, gives in steps:
            ticket = admission.try_take(need)
            if ticket is not None:
                held[ticket] = need
            if gives and held:
                oldest = next(iter(held))
                del held[oldest]
                admission.give(oldest)
                admission.give(oldest)  # harmless
            assert len(held) <= 5
            assert sum(one.memory_mib + 100 for one in held.values()) <= 4000
            assert sum(one.vcpus for one in held.values()) <= 8
        for ticket in held:
            admission.give(ticket)
        assert admission.try_take(Need(3900, 8)) is not None

    asyncio.run(play())


@given(st.lists(NEEDS, min_size=1, max_size=8), st.data())
def test_those_who_wait_are_served_in_their_order(needs: list[Need], data: st.DataObject) -> None:
    cancelled = data.draw(st.sets(st.integers(0, len(needs) - 1), max_size=len(needs)))

    async def play() -> None:
        admission = Admission(LIMITS)
        first = admission.force(Need(3900, 8))
        served: list[int] = []

        async def claim(number: int, need: Need) -> None:
            ticket = await admission.take(need, 60, never)
            served.append(number)
            await asyncio.sleep(0)
            admission.give(ticket)

        tasks = []
        for number, need in enumerate(needs):
            tasks.append(asyncio.ensure_future(claim(number, need)))
            await asyncio.sleep(0)
        assert admission.waiting == len(needs)
        assert admission.try_take(Need(100, 1)) is None  # a wish never overtakes
        for number in cancelled:
            tasks[number].cancel()
        await asyncio.sleep(0)
        admission.give(first)
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks, return_exceptions=True)
        assert served == [n for n in range(len(needs)) if n not in cancelled]
        assert admission.try_take(Need(3900, 8)) is not None

    asyncio.run(play())


async def test_a_deadline_ends_the_waiting_and_says_what_is_full() -> None:
    admission = Admission(LIMITS)
    admission.force(Need(3900, 1))
    asked: list[int] = []

    def make_room() -> bool:
        asked.append(1)
        return False

    with pytest.raises(Exhausted, match="1 of 5 sandboxes, 4000 of 4000 MiB, 1 of 8 vCPUs"):
        await admission.take(Need(100, 1), 0.01, make_room)
    assert asked == [1] and admission.waiting == 0


async def test_one_that_is_cancelled_just_when_it_is_served_gives_its_place_back() -> None:
    admission = Admission(LIMITS)
    first = admission.force(Need(3900, 8))
    task = asyncio.ensure_future(admission.take(Need(3900, 8), 60, never))
    await asyncio.sleep(0)
    admission.give(first)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert admission.try_take(Need(3900, 8)) is not None


async def test_what_is_too_large_for_the_host_does_not_wait() -> None:
    with pytest.raises(Exhausted, match="more than this host gives"):
        await Admission(LIMITS).take(Need(3950, 1), 60, never)


async def test_one_that_is_served_in_the_moment_of_its_deadline_is_served() -> None:
    for _ in range(20):
        admission = Admission(LIMITS)
        first = admission.force(Need(3900, 8))
        asyncio.get_running_loop().call_later(0.01, admission.give, first)
        try:
            admission.give(await admission.take(Need(3900, 8), 0.01, never))
        except Exhausted:
            await asyncio.sleep(0.02)
        assert admission.granted == 0
