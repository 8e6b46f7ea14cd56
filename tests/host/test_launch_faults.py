"""Every step of a launch made to fail: the error names the step, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from cantelop_kernels import config, daemon, trees, vsock, wire
from cantelop_kernels.errors import (
    CantelopError,
    ConfigError,
    EmulationRefused,
    Exhausted,
    ImageError,
    LaunchError,
)
from cantelop_kernels.image import ImageStore
from cantelop_kernels.jail import Jail
from cantelop_kernels.process import Process
from cantelop_kernels.sandbox import Sandbox
from cantelop_kernels.schema import Logs
from cantelop_kernels.uids import kill_all
from cantelop_kernels.vmm import Machine, VmSpec
from tests.fakes.fake_vmm import FakeVmm
from tests.fakes.host_stack import UID_BASE, Running, Stack, eventually, processes


class BadVmm(FakeVmm):
    """A machine that runs this Python text instead of a guest; `V` is its vsock socket's path."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    @asynccontextmanager
    async def run(
        self, spec: VmSpec, jail: Jail, *, console: int, log: int
    ) -> AsyncIterator[Machine]:
        vsock_path = str(jail.run / vsock.SOCKET)
        text = f"import json, socket, sys, time\nV = {vsock_path!r}\n{self._text}"
        argv = ["setpriv", "--pdeathsig=KILL", sys.executable, "-c", text]
        machine = Process.spawn(argv, env={}, stdout=console, stderr=log)
        try:
            yield Machine(machine)
        finally:
            await machine.stop(0.0)
            machine.close()


async def failing(stack: Stack, **fields: object) -> LaunchError:
    """The error of a launch, and the check that it left nothing."""
    with pytest.raises(LaunchError) as caught:
        await stack.create(**fields)
    assert stack.folders() == []
    assert processes() == []
    assert stack.sessions.live == 0
    return caught.value


async def test_a_machine_that_ends_at_once(running: Running) -> None:
    text = "print('cantelop: FATAL: cannot mount the root'); sys.exit(7)"
    async with running(BadVmm(text)) as stack:
        begun = time.monotonic()
        error = await failing(stack)
        assert time.monotonic() - begun < 2
        assert error.details["step"] == "guest boot"
        assert "the virtual machine ended (status 7)" in error.message
        assert "cannot mount the root" in error.details["console"]


async def test_a_machine_that_never_says_hello(running: Running) -> None:
    async with running(
        BadVmm("print('stuck here', flush=True); time.sleep(60)"), boot_deadline=1.0
    ) as stack:
        error = await failing(stack)
        assert "nothing came from the guest within 1 s" in error.message
        assert "stuck here" in error.details["console"]


DIAL = f"""
s = socket.socket(socket.AF_UNIX); s.connect(V + "_{wire.CONTROL_PORT}")
def say(m): b = json.dumps(m).encode(); s.sendall(len(b).to_bytes(4, "big") + b)
HELLO = dict(type="hello", version={wire.VERSION}, boot_id="b", release="r", memory=1, vcpus=1)
"""


@pytest.mark.parametrize(
    ("says", "named"),
    [
        ("s.sendall(b'\\xff' * 100)", "over the limit"),
        ("say(dict(type='ready', pid=1, more=2))", "not those of its schema"),
        ("say([1, 2])", "not a JSON object"),
        ("say(dict(type='done', id=7))", "nobody asked for"),
        ("say(HELLO); say(HELLO)", "second time"),
        ("s.close()", "closed its control line"),
    ],
)
async def test_a_guest_that_breaks_the_rules(running: Running, says: str, named: str) -> None:
    """Its attendant ends the line; root sees a sentence, never the bytes."""
    async with running(BadVmm(f"{DIAL}\n{says}\ntime.sleep(60)"), boot_deadline=5.0) as stack:
        begun = time.monotonic()
        error = await failing(stack)
        assert time.monotonic() - begun < 4
        assert named in error.message


async def test_an_agent_of_another_version(running: Running) -> None:
    says = "say(HELLO | dict(version=999)); time.sleep(60)"
    async with running(BadVmm(DIAL + says)) as stack:
        error = await failing(stack)
        assert "speaks version 999" in error.message
        assert "image build" in error.hint


async def test_a_guest_that_says_it_is_ready_and_is_not(running: Running) -> None:
    """Clients are refused, not left hanging; the session can be ended."""
    says = "say(HELLO); d = s.recv(9999); i = json.loads(d[4:])['id']\n"
    says += "say(dict(type='done', id=i)); say(dict(type='ready', pid=1)); time.sleep(60)"
    async with running(BadVmm(DIAL + says)) as stack:
        view = await stack.create()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(f"{view.endpoints.ip}-1")
            assert await asyncio.to_thread(sock.recv, 10) == b""
        await stack.client.end(view.id)


async def test_endless_lines_on_the_console_cost_nothing(running: Running) -> None:
    text = "b = 'x' * 100000 + chr(10)\nfor _ in range(500): sys.stdout.write(b)\nsys.exit(1)"
    async with running(BadVmm(text)) as stack:
        error = await failing(stack)
        assert 0 < len(error.details["console"]) <= 5000


@pytest.mark.parametrize(
    ("argv", "named"),
    [(["false"], "status 1"), (["/does/not/exist"], "/does/not/exist")],
)
async def test_a_kernel_that_does_not_start(stack: Stack, argv: list[str], named: str) -> None:
    error = await failing(stack, argv=argv)
    assert error.details["step"] == "kernel start"
    assert named in error.message + error.details["kernel"]


async def test_a_kernel_that_says_why_it_does_not_start(stack: Stack) -> None:
    argv = [sys.executable, "-c", "raise SystemExit('no such module: toy')"]
    error = await failing(stack, argv=argv)
    assert "no such module: toy" in error.details["kernel"]


async def test_no_slot_is_left(running: Running) -> None:
    async with running(max_sessions=1) as stack:
        view = await stack.create()
        with pytest.raises(Exhausted, match=r"no room .* within 0\.5 s: 1 of 1"):
            await stack.create()
        assert len(stack.folders()) == 2
        await stack.client.end(view.id)
        await stack.create()


async def test_missing_and_corrupt_images(stack: Stack) -> None:
    with pytest.raises(ImageError, match="cantelop image build"):
        await stack.create(image="nope")
    root = ImageStore(stack.state).resolve("python3").root
    root.write_bytes(b"x" * root.stat().st_size)  # same size, other content
    with pytest.raises(ImageError, match="not what was built"):
        await stack.create()
    root.write_bytes(b"short")
    with pytest.raises(ImageError, match="corrupt"):
        await stack.create()
    assert stack.folders() == []


async def test_what_lies_at_the_place_is_refused_and_stays(stack: Stack, tmp_path: Path) -> None:
    """THREATS 9: a jail path that was made before, as a symlink."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "canary").write_text("alive")
    trap = stack.state / "sandboxes" / f"cantelop-{UID_BASE}-0"
    trap.symlink_to(target)
    with pytest.raises(LaunchError, match="exists already"):
        await stack.create()
    assert (target / "canary").read_text() == "alive"
    assert trap.is_symlink()
    trap.unlink()


@contextmanager
def small_disk(where: Path, size: str) -> Iterator[None]:
    where.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "tmpfs", where], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", where], check=True)


def fill(path: Path) -> None:
    """Write until nothing more fits."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        while os.write(fd, b"x" * 4096):
            pass
    except OSError:
        return
    finally:
        os.close(fd)


async def test_a_full_disk(running: Running, place: Path) -> None:
    with small_disk(place / "state", "600k"):
        async with running() as stack:
            fill(place / "state" / "filler")
            error = await failing(stack)
            assert error.details["step"] in ("folder", "disk")
            (place / "state" / "filler").unlink()


async def test_an_attendant_that_cannot_start(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = SimpleNamespace(executable="/does/not/exist")
    monkeypatch.setattr("cantelop_kernels.sandbox.sys", missing)
    error = await failing(stack)
    assert "attendant ended" in error.message or error.details["step"] == "attendant"


async def test_emulation_must_be_allowed(running: Running) -> None:
    class Emulated(FakeVmm):
        emulated = True

    async with running(Emulated()) as stack:
        with pytest.raises(EmulationRefused, match="no hardware virtualization"):
            await stack.create()
        view = await stack.create(allow_emulation=True)  # root is the operator
        assert "no security boundary" in view.notices[0]
    async with running(Emulated(), allow_emulation=True) as stack:
        assert (await stack.create()).emulated


async def test_a_second_daemon_is_refused(stack: Stack, place: Path) -> None:
    async def make(_: Path) -> FakeVmm:
        return FakeVmm()

    options = daemon.Options(stack.socket, stack.state)
    with pytest.raises(ConfigError, match="another daemon serves"):
        async with daemon.running(config.load(uid_base=920_000), options, make):
            pass
    other = daemon.Options(place / "other.sock", place / "other")
    with pytest.raises(ConfigError, match="another daemon uses the uids"):
        async with daemon.running(config.load(uid_base=UID_BASE), other, make):
            pass
    await stack.client.info()


async def test_folders_that_others_can_change_are_refused(place: Path) -> None:
    """THREATS 12, and a state folder that a VMM could not reach."""
    for mode, named in ((0o777, "can be changed by others"), (0o700, "closed to other users")):
        state = place / "state"
        state.mkdir(exist_ok=True)
        state.chmod(mode)
        with pytest.raises(ConfigError, match=named):
            daemon.prepare_folders(daemon.Options(place / "c.sock", state))


async def test_what_a_dead_daemon_left_is_taken_away(running: Running, place: Path) -> None:
    leftover = place / "state" / "sandboxes" / f"cantelop-{UID_BASE}-5" / "run"
    leftover.mkdir(parents=True)
    orphan, other = _sleeper(UID_BASE + 20), _sleeper(UID_BASE + 15_020)
    try:
        await asyncio.to_thread(_running_as, orphan.pid, UID_BASE + 20)
        async with running():
            assert orphan.wait(5) == -9
            assert other.poll() is None  # not of our range
            assert not leftover.exists()
    finally:
        for process in (orphan, other):
            process.kill()
            process.wait()


@contextmanager
def stuck(sandboxes: Path, folder: Path) -> Iterator[None]:
    """A mount inside a sandbox's folder: rm cannot take it away, wherever the folder moves."""
    inside = folder / "run" / "stuck"
    inside.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", inside], check=True)
    try:
        yield
    finally:
        (now,) = sandboxes.glob("*/run/stuck")
        subprocess.run(["umount", "-l", now], check=True)


async def test_what_cannot_be_reaped_keeps_nobody_from_serving(
    running: Running, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sandboxes = place / "state" / "sandboxes"
    with stuck(sandboxes, sandboxes / f"cantelop-{UID_BASE}-0"):
        options = daemon.Options(place / "c.sock", place / "state")

        async def make(_: Path) -> FakeVmm:
            return FakeVmm()

        async with daemon.running(config.load(uid_base=UID_BASE), options, make):
            assert "which stays" in caplog.text
            (left,) = sandboxes.iterdir()
            assert left.name.startswith(f".cantelop-{UID_BASE}-0.gone-")
    async with running():  # the mount is gone: now it can be removed
        assert list(sandboxes.iterdir()) == []


async def test_a_sandbox_that_cannot_be_removed_keeps_its_slot(running: Running) -> None:
    async with running() as stack:
        sandboxes = stack.state / "sandboxes"
        view = await stack.create()
        with stuck(sandboxes, sandboxes / f"cantelop-{UID_BASE}-0"):
            with pytest.raises(CantelopError, match="could not be removed"):
                await stack.client.end(view.id)
            await stack.create()
            assert (sandboxes / f"cantelop-{UID_BASE}-1").exists()
        (left,) = trees.leftovers(sandboxes, f"cantelop-{UID_BASE}-0")
        await trees.remove_leftover(left)


async def test_a_users_folder_of_any_depth_is_released(stack: Stack) -> None:
    view = await stack.create()
    folder = Path(view.endpoints.ip).parent
    fd = os.open(folder, os.O_DIRECTORY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    await stack.client.release(view.endpoints.token)
    assert stack.folders() == []


async def test_processes_that_fork_while_they_are_killed_are_all_found() -> None:
    """A child is forked before its parent dies, over and over."""
    forks = "import os, time\nwhile True:\n if os.fork(): time.sleep(0.1); os._exit(0)"
    runner = _as_uid(UID_BASE + 30, sys.executable, "-S", "-c", forks)
    await asyncio.to_thread(_running_as, runner.pid, UID_BASE + 30)
    await kill_all([UID_BASE + 30])
    runner.wait()
    assert processes() == []


async def test_a_process_that_kills_its_killer_is_killed() -> None:
    kills = "import os, signal\nwhile True:\n try: os.kill(-1, 9)\n except OSError: pass"
    runner = _as_uid(UID_BASE + 30, sys.executable, "-S", "-c", kills)
    await asyncio.to_thread(_running_as, runner.pid, UID_BASE + 30)
    await asyncio.sleep(0.3)
    async with asyncio.timeout(20):
        await kill_all([UID_BASE + 30])
    assert await asyncio.to_thread(runner.wait, 5) == -9
    assert processes() == []


@pytest.mark.parametrize("pause", [0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0])
async def test_a_failed_launch_that_is_given_up_leaves_nothing(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    """Also where its client goes away while the reason is being looked for."""
    logs = Sandbox.logs

    async def slow(self: Sandbox) -> Logs:
        await asyncio.sleep(0.5)
        return await logs(self)

    monkeypatch.setattr(Sandbox, "logs", slow)
    work = asyncio.ensure_future(stack.create(argv=["false"]))
    await asyncio.sleep(pause)
    work.cancel()
    await asyncio.wait([work])
    await eventually(lambda: stack.sessions.live == 0 and stack.folders() == [], 10)
    assert processes() == [] and stack.sessions.taken == 0


def _sleeper(uid: int) -> subprocess.Popen[bytes]:
    return _as_uid(uid, "sleep", "60")


def _as_uid(uid: int, *argv: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["setpriv", f"--reuid={uid}", "--clear-groups", *argv])


def _running_as(pid: int, uid: int) -> None:
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").stat().st_uid != uid and time.monotonic() < deadline:
        time.sleep(0.01)


async def test_a_socket_swapped_for_a_link_gives_nothing_away(place: Path) -> None:
    """THREATS 10: no file outside changes hands, whoever owns the folder."""
    target = place / "secret"
    target.touch(mode=0o600)
    with pytest.MonkeyPatch.context() as patch:
        bind = vsock.bind

        def bind_and_swap(listener: socket.socket, folder: Path, name: str) -> None:
            bind(listener, folder, name)
            (folder / name).unlink()
            (folder / name).symlink_to(target)

        patch.setattr(vsock, "bind", bind_and_swap)
        vsock.listen(place, 1024, uid=UID_BASE + 1, gid=UID_BASE).close()
    found = target.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (0, 0, 0o600)


async def test_a_lock_that_is_a_link_is_refused(running: Running, place: Path) -> None:
    target = place / "precious"
    target.write_text("kept")
    (place / "c.lock").symlink_to(target)
    with pytest.raises(ConfigError, match="cannot use the lock"):
        async with running():
            pass
    assert target.read_text() == "kept"
    (place / "c.lock").unlink()
