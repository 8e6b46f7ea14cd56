"""Real child processes: what they leave, how they end, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cantelop_kernels.errors import DeadlineExceeded
from cantelop_kernels.process import CommandFailed, Process, finish, run, wait_pidfd

ENV = {"PATH": "/usr/bin:/bin"}


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def spawn_stubborn() -> Process:
    """A process that is known to ignore TERM already."""
    reading, writing = os.pipe()
    script = "trap '' TERM; echo; while :; do sleep 0.05; done"
    process = Process.spawn(["sh", "-c", script], env=ENV, stdout=writing)
    os.close(writing)
    await asyncio.to_thread(os.read, reading, 1)
    os.close(reading)
    return process


@pytest.fixture(autouse=True)
def others() -> Iterator[set[psutil.Process]]:
    """Children that were there before, such as another test module's daemon; none is added."""
    fds, before = open_fds(), children()
    yield before
    assert children() <= before
    assert open_fds() <= fds + 4  # the event loop's own


async def test_run_returns_output() -> None:
    result = await run(["sh", "-c", "echo out; echo err >&2"], deadline=10)
    assert (result.returncode, result.stdout, result.stderr_tail) == (0, "out\n", "err\n")


async def test_run_feeds_stdin_of_any_size() -> None:
    result = await run(["wc", "-c"], stdin=b"x" * 3_000_000, deadline=10)
    assert result.stdout.strip() == "3000000"


async def test_run_ignores_unread_stdin() -> None:
    assert (await run(["true"], stdin=b"x" * 3_000_000, deadline=10)).returncode == 0


async def test_run_reports_a_failure_by_its_last_line() -> None:
    with pytest.raises(CommandFailed, match="sh ended with status 3: boom") as caught:
        await run(["sh", "-c", "echo first >&2; echo boom >&2; exit 3"], deadline=10)
    assert caught.value.returncode == 3
    assert caught.value.details["stderr"] == "first\nboom\n"


async def test_run_without_check_returns_the_status() -> None:
    assert (await run(["false"], deadline=10, check=False)).returncode == 1


async def test_run_of_a_missing_program() -> None:
    with pytest.raises(CommandFailed, match="cannot be started: No such file"):
        await run(["/nonexistent/program"], deadline=10)


async def test_run_hands_on_lines() -> None:
    lines: list[str] = []
    await run(["printf", "a\\nb\\rc"], deadline=10, on_line=lines.append)
    assert lines == ["a", "b", "c"]


async def test_run_keeps_only_the_tail_of_stderr() -> None:
    result = await run(["sh", "-c", "seq 1 100000 >&2"], deadline=10)
    assert result.stderr_tail.endswith("99999\n100000\n")
    assert len(result.stderr_tail) == 4096


async def test_run_kills_the_whole_group_at_the_deadline() -> None:
    script = "trap '' TERM; sleep 1000 & sleep 1000 & wait; sleep 1000"
    with pytest.raises(DeadlineExceeded, match="sh did not end within"):
        await run(["sh", "-c", script], deadline=0.3)


async def test_run_kills_what_a_command_leaves_in_its_group() -> None:
    start = time.monotonic()
    result = await run(["sh", "-c", "sleep 1000 & echo done"], deadline=30)
    assert result.stdout == "done\n"
    assert time.monotonic() - start < 10


async def test_run_is_cancelled_cleanly(others: set[psutil.Process]) -> None:
    task = asyncio.create_task(run(["sleep", "1000"], deadline=1000))
    await asyncio.sleep(0.2)
    assert len(children() - others) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children() <= others


async def test_run_is_cancelled_cleanly_even_twice(others: set[psutil.Process]) -> None:
    script = "trap '' TERM; while :; do sleep 0.1; done"
    task = asyncio.create_task(run(["sh", "-c", script], deadline=1000))
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children() <= others


async def test_spawn_gives_exactly_the_environment(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("wb") as stream:
        process = Process.spawn(["/usr/bin/env"], env={"A": "1"}, stdout=stream.fileno())
        assert await process.wait() == 0
    process.close()
    assert out.read_text() == "A=1\n"


async def test_spawn_keeps_the_numbers_of_passed_descriptors() -> None:
    reading, writing = os.pipe()
    code = f"import os; os.write({writing}, b'hello')"
    process = Process.spawn([sys.executable, "-c", code], env=ENV, pass_fds=(writing,))
    os.close(writing)
    assert await process.wait() == 0
    assert os.read(reading, 100) == b"hello"
    os.close(reading)
    process.close()


async def test_spawn_of_a_missing_program() -> None:
    with pytest.raises(CommandFailed, match="cannot be started"):
        Process.spawn(["/nonexistent/program"], env=ENV)


async def test_many_waiters_and_one_is_cancelled() -> None:
    process = Process.spawn(["sleep", "0.3"], env=ENV)
    waiters = [asyncio.create_task(process.wait()) for _ in range(5)]
    other = asyncio.create_task(wait_pidfd(process.pidfd))
    await asyncio.sleep(0.05)
    waiters[0].cancel()
    assert await asyncio.gather(*waiters[1:]) == [0, 0, 0, 0]
    await other
    assert await process.wait() == 0
    process.close()


async def test_it_is_reaped_without_a_waiter() -> None:
    process = Process.spawn(["true"], env=ENV)
    await wait_pidfd(process.pidfd)
    await asyncio.sleep(0)
    assert not psutil.pid_exists(process.pid)
    process.close()


async def test_it_is_reaped_even_when_closed_before_its_end() -> None:
    process = Process.spawn(["sleep", "0.2"], env=ENV)
    process.close()
    assert await process.wait() == 0
    assert process.pidfd == -1


async def test_signal_and_a_late_signal() -> None:
    process = Process.spawn(["sleep", "1000"], env=ENV)
    process.signal(signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    process.signal(signal.SIGKILL)
    process.close()
    process.signal(signal.SIGKILL)


async def test_stop_asks_first() -> None:
    process = Process.spawn(["sleep", "1000"], env=ENV)
    assert await process.stop(10) == -signal.SIGTERM
    assert await process.stop(10) == -signal.SIGTERM
    process.close()


async def test_stop_kills_what_does_not_listen() -> None:
    process = await spawn_stubborn()
    assert await process.stop(0.3) == -signal.SIGKILL
    process.close()


async def test_stop_cancelled_kills_at_once() -> None:
    process = await spawn_stubborn()
    task = asyncio.create_task(process.stop(1000))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await process.wait() == -signal.SIGKILL
    process.close()


async def test_an_undoing_is_finished_however_often_its_caller_is_cancelled() -> None:
    done: list[int] = []

    async def undo() -> None:
        await asyncio.sleep(0.1)
        done.append(1)

    task = asyncio.ensure_future(finish(undo()))
    for _ in range(3):
        await asyncio.sleep(0.01)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [1]
