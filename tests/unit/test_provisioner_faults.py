"""What goes wrong: launches that fail, kernels that die, a daemon that does not answer."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from jupyter_client.ioloop.manager import AsyncIOLoopKernelManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from cantelop_kernels import errors
from cantelop_kernels.schema import Exit
from tests.fakes.clients import Start, WriteSpec, run
from tests.fakes.fake_daemon import FakeDaemon

pytest_plugins = ["tests.fakes.provisioner_fixtures"]

LAUNCH_ERROR = errors.LaunchError(
    "the guest said nothing", hint="look at the console", step="hello", console="panic: no root"
)
OOM = Exit("killed by signal 9", signal=9, oom=True, memory_limit=512 << 20, memory_peak=500 << 20)


async def until(condition: Callable[[], bool], seconds: float = 15) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def die(daemon: FakeDaemon, ended: Exit | None = None) -> None:
    daemon.last.exit = ended
    os.killpg(daemon.last.process.pid, signal.SIGKILL)


# ---- launches


async def test_a_failed_launch_says_why_and_leaves_nothing(
    write_spec: WriteSpec, fake_daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    fake_daemon.faults.launch = LAUNCH_ERROR
    manager = AsyncKernelManager(kernel_name="sandboxed")
    with pytest.raises(errors.LaunchError) as caught:
        await manager.start_kernel()
    for part in ("the guest said nothing", "look at the console", "panic: no root"):
        assert part in str(caught.value)
        assert part in caplog.text
    assert not manager.has_kernel
    assert not await manager.is_alive()
    assert not Path(manager.connection_file).is_file()


async def test_a_launch_may_be_tried_again(write_spec: WriteSpec, fake_daemon: FakeDaemon) -> None:
    fake_daemon.faults.launch = errors.Exhausted("no slot", hint="later")
    fake_daemon.faults.launches = 1
    manager = AsyncKernelManager(kernel_name="sandboxed")
    with pytest.raises(errors.Exhausted):
        await manager.start_kernel()
    await manager.start_kernel()
    assert await manager.is_alive()
    await manager.shutdown_kernel(now=True)
    assert fake_daemon.alive() == []


async def test_no_daemon(write_spec: WriteSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # root would start one
    monkeypatch.setenv("CANTELOP_SOCKET", "/nonexistent/d.sock")
    manager = AsyncKernelManager(kernel_name="sandboxed")
    with pytest.raises(errors.DaemonUnavailable, match="cantelop serve"):
        await manager.start_kernel()


async def test_a_cancelled_launch_leaves_nothing(
    write_spec: WriteSpec, fake_daemon: FakeDaemon
) -> None:
    fake_daemon.faults.launch_seconds = 30
    manager = AsyncKernelManager(kernel_name="sandboxed")
    task = asyncio.ensure_future(manager.start_kernel())
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: len(fake_daemon.requests) == 1)  # written down when the client went away
    assert fake_daemon.sessions == {}
    assert not manager.has_kernel


async def test_a_connection_file_that_cannot_be_written_ends_the_sandbox(
    write_spec: WriteSpec, fake_daemon: FakeDaemon, tmp_path: Path
) -> None:
    file = tmp_path / "missing" / "kernel.json"
    manager = AsyncKernelManager(kernel_name="sandboxed", connection_file=str(file))
    with pytest.raises(OSError, match="missing"):
        await manager.start_kernel()
    assert fake_daemon.alive() == []
    assert len(fake_daemon.released) == 1
    assert not manager.has_kernel


async def test_a_restart_that_fails_keeps_the_endpoints_for_the_next(
    start: Start, fake_daemon: FakeDaemon
) -> None:
    manager, client = await start()
    fake_daemon.faults.launch, fake_daemon.faults.launches = LAUNCH_ERROR, 1
    with pytest.raises(errors.LaunchError):
        await manager.restart_kernel(now=True)
    assert fake_daemon.released == []
    await manager.restart_kernel(now=True)
    await client.wait_for_ready(timeout=30)
    assert await run(client, "print(1)") == "1"


async def test_endpoints_go_back_after_a_restart_that_failed(
    start: Start, fake_daemon: FakeDaemon
) -> None:
    manager, _ = await start()
    fake_daemon.faults.launch = LAUNCH_ERROR
    with pytest.raises(errors.LaunchError):
        await manager.restart_kernel(now=True)
    await manager.shutdown_kernel(now=True)
    assert len(fake_daemon.released) == 1


async def test_endpoints_that_the_daemon_has_lost_are_replaced(
    start: Start, fake_daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    manager, _ = await start()
    ip = manager.ip
    fake_daemon.released.append(fake_daemon.last.view.endpoints.token)
    await manager.restart_kernel(now=True)
    assert manager.ip != ip
    assert "connect anew" in caplog.text
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=30)
    client.stop_channels()


async def test_nbclient_shows_why_a_kernel_did_not_start(
    write_spec: WriteSpec, fake_daemon: FakeDaemon
) -> None:
    fake_daemon.faults.launch = LAUNCH_ERROR
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])
    with pytest.raises(errors.LaunchError, match="panic: no root"):
        await NotebookClient(notebook, kernel_name="sandboxed").async_execute()


# ---- a daemon that does not answer


@pytest.mark.parametrize("fault", ["answer", "drop", "hang", "gone"])
async def test_a_daemons_hiccup_is_no_death(
    start: Start,
    fake_daemon: FakeDaemon,
    fault: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start_again(path: Path) -> None:
        """A daemon that is started anew adopts what lives."""
        path.with_suffix(".away").rename(path)

    monkeypatch.setattr("cantelop_provisioner.kernel.ensure_daemon", start_again)
    manager, client = await start()
    faults = fake_daemon.faults
    if fault == "answer":
        faults.answer = errors.OutcomeUnknown("broken", hint="?")
    elif fault == "gone":
        fake_daemon.path.rename(fake_daemon.path.with_suffix(".away"))
    else:
        setattr(faults, fault, True)
    began = time.monotonic()
    assert await manager.is_alive()
    assert await manager.is_alive()
    assert time.monotonic() - began < 6  # the restarter polls every 3 s
    await manager.interrupt_kernel() if fault != "hang" else None
    assert len([one for one in caplog.records if "no word from" in one.getMessage()]) == 1
    faults.answer, faults.drop, faults.hang = None, False, False
    assert fake_daemon.path.exists()
    assert await manager.is_alive()
    assert await run(client, "print(1)") == "1"


@pytest.mark.parametrize(
    ("crashed", "said"),
    [(True, "the daemon is gone, and its sandbox with it"), (False, "the daemon was stopped")],
)
async def test_a_kernel_is_dead_when_the_daemon_and_its_endpoints_are_gone(
    start: Start,
    fake_daemon: FakeDaemon,
    caplog: pytest.LogCaptureFixture,
    crashed: bool,
    said: str,
) -> None:
    """One that was stopped in order takes its socket away."""
    manager, _ = await start()
    fake_daemon.path.rename(fake_daemon.path.with_suffix(".away"))
    if crashed:
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(fake_daemon.path))
    assert await manager.is_alive()
    fake_daemon.last.end()
    began = time.monotonic()
    assert not await manager.is_alive()
    assert time.monotonic() - began < 3
    assert said in caplog.text
    fake_daemon.path.with_suffix(".away").rename(fake_daemon.path)


async def test_a_session_the_daemon_does_not_know_is_dead(
    start: Start, fake_daemon: FakeDaemon
) -> None:
    manager, _ = await start()
    fake_daemon.last.forgotten = True
    assert not await manager.is_alive()


async def test_cleanup_without_a_daemon_does_not_raise(
    start: Start,
    fake_daemon: FakeDaemon,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(_: Path) -> None:
        """As for a user who may not start a daemon."""
        raise errors.DaemonUnavailable("nobody answers")

    monkeypatch.setattr("cantelop_provisioner.kernel.ensure_daemon", refuse)
    manager, _ = await start()
    provisioner = manager.provisioner
    assert provisioner is not None
    fake_daemon.path.rename(fake_daemon.path.with_suffix(".away"))
    await provisioner.kill()
    assert await provisioner.poll() is None
    await provisioner.cleanup(restart=False)
    assert not provisioner.has_process
    assert "could not be ended" in caplog.text


# ---- deaths


async def test_a_death_is_told_once_and_why(
    start: Start, fake_daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    manager, _ = await start()
    die(fake_daemon, OOM)
    await until(lambda: fake_daemon.last.process.poll() is not None)
    for _ in range(3):
        assert not await manager.is_alive()
    told = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert len(told) == 1
    for part in ("out of memory", "limit 512 MiB", "peak 500 MiB"):
        assert part in told[0].getMessage()


@pytest.mark.parametrize("now", [False, True])
async def test_an_end_that_was_asked_for_is_no_news(
    start: Start, caplog: pytest.LogCaptureFixture, now: bool
) -> None:
    manager, _ = await start()
    await manager.restart_kernel(now=now)
    await manager.shutdown_kernel(now=now)
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


async def test_nbclient_learns_of_a_death_and_the_sandbox_is_ended(
    write_spec: WriteSpec, fake_daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    cell = nbformat.v4.new_code_cell("import time; print('up', flush=True); time.sleep(60)")
    client = NotebookClient(nbformat.v4.new_notebook(cells=[cell]), kernel_name="sandboxed")
    task = asyncio.create_task(client.async_execute())
    await until(lambda: bool(cell.outputs))
    began = time.monotonic()
    die(fake_daemon, OOM)
    with pytest.raises(DeadKernelError):
        await asyncio.wait_for(task, 10)
    assert time.monotonic() - began < 5
    assert "limit 512 MiB" in caplog.text
    assert len(fake_daemon.ended) == 1
    assert len(fake_daemon.released) == 1


async def autorestarting(name: str = "sandboxed") -> AsyncIOLoopKernelManager:
    manager = AsyncIOLoopKernelManager(kernel_name=name)
    manager.config.KernelRestarter.time_to_dead = 0.1
    await manager.start_kernel()
    return manager


async def test_autorestart(write_spec: WriteSpec, fake_daemon: FakeDaemon) -> None:
    manager = await autorestarting()
    ip = manager.ip
    die(fake_daemon)
    await until(lambda: len(fake_daemon.sessions) == 2 and manager.ready.done())
    assert await manager.is_alive()
    assert manager.ip == ip
    await manager.shutdown_kernel(now=True)
    assert fake_daemon.alive() == []


async def test_autorestart_of_a_kernel_that_always_dies_is_bounded(
    write_spec: WriteSpec, fake_daemon: FakeDaemon
) -> None:
    write_spec("brief", argv=["python3", "-c", "import time; time.sleep(0.3)"])
    dead = asyncio.Event()
    manager = AsyncIOLoopKernelManager(kernel_name="brief")
    manager.config.KernelRestarter.time_to_dead = 0.1
    manager.config.KernelRestarter.stable_start_time = 0.5
    fake_daemon.faults.launch_seconds = 0.6  # the restarter counts from the death that it saw
    await manager.start_kernel()
    manager.add_restart_callback(dead.set, "dead")
    await asyncio.wait_for(dead.wait(), 60)
    assert len(fake_daemon.sessions) == 6  # the first, and five tries
    await manager.shutdown_kernel(now=True)


async def test_autorestart_stops_when_the_launch_fails(
    write_spec: WriteSpec, fake_daemon: FakeDaemon
) -> None:
    manager = await autorestarting()
    fake_daemon.faults.launch = LAUNCH_ERROR
    die(fake_daemon)
    await until(lambda: len(fake_daemon.requests) > 1)
    await asyncio.sleep(1)
    assert len(fake_daemon.requests) <= 6
    await manager.shutdown_kernel(now=True)
    assert fake_daemon.alive() == []


async def test_the_restarter_does_not_revive_a_kernel_that_is_shut_down(
    write_spec: WriteSpec, fake_daemon: FakeDaemon
) -> None:
    manager = await autorestarting()
    await manager.shutdown_kernel()
    await asyncio.sleep(0.5)
    assert len(fake_daemon.sessions) == 1


# ---- nbclient, with every warning an error


@pytest.mark.filterwarnings("error")
async def test_many_runs_leave_nothing(write_spec: WriteSpec, fake_daemon: FakeDaemon) -> None:
    for _ in range(3):
        cell = nbformat.v4.new_code_cell("print(6 * 7)")
        await NotebookClient(
            nbformat.v4.new_notebook(cells=[cell]), kernel_name="sandboxed"
        ).async_execute()
        assert cell.outputs[0]["text"] == "42\n"
    assert fake_daemon.alive() == []
    assert len(fake_daemon.released) == 3


async def test_input_can_be_interrupted(start: Start) -> None:
    manager, client = await start()
    client.execute("input('? ')", allow_stdin=True)
    message = await asyncio.wait_for(client.get_stdin_msg(timeout=10), 15)
    assert message["content"]["prompt"] == "? "
    await manager.interrupt_kernel()
    reply = await client.get_shell_msg(timeout=10)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
