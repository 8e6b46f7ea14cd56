"""A daemon that is killed at any moment: live sessions go on, everything else goes (THREATS 29)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cantelop_kernels import client, schema, trees
from cantelop_kernels.errors import CantelopError
from cantelop_kernels.slot import uid_range
from tests.fakes.fake_vmm_daemon import MOMENTS, PROGRAM, STEPS
from tests.fakes.host_stack import KEY, UID_BASE, connected, eventually, output, processes

REPO = Path(__file__).parents[2]


@dataclass
class Host:
    """A place for daemons to come and go in."""

    folder: Path
    name: str = "c"
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def client(self) -> client.Client:
        return client.Client(self.folder / f"{self.name}.sock")

    def serve(self, *, die_at: str = "", **settings: object) -> subprocess.Popen[bytes]:
        """A daemon that already answers."""
        quick = {"uid_base": UID_BASE, "grace_seconds": 0.5, "drain_seconds": 0.0} | settings
        lines = [f"{key} = {value}" for key, value in quick.items() if key != "apps"]
        (self.folder / "c.toml").write_text("\n".join([*lines, str(settings.get("apps", ""))]))
        read, write = os.pipe()
        argv = [*PROGRAM, "--ready-fd", str(write)]
        argv += [
            "--socket",
            str(self.folder / f"{self.name}.sock"),
            "--config",
            str(self.folder / "c.toml"),
        ]
        argv += ["--die-at", die_at] if die_at else []
        env = os.environ | {"CANTELOP_STATE": str(self.folder / "state")}
        with (self.folder / "daemon.log").open("ab") as log:
            daemon = subprocess.Popen(
                argv, env=env, cwd=REPO, pass_fds=[write], stdout=log, stderr=log
            )
        os.close(write)
        self.daemons.append(daemon)
        with os.fdopen(read) as ready:
            assert ready.read() == "ready\n", self.log()
        return daemon

    def log(self) -> str:
        return (self.folder / "daemon.log").read_text()

    def left(self) -> list[str]:
        """What of sandboxes is there: folders, endpoints, processes, fake machines."""
        found = [p.name for p in (self.folder / "state" / "sandboxes").glob("*")]
        found += [p.name for p in (self.folder / "c.ipc").glob("*")]
        found += [p.name() for p in processes()]
        return found + machines(self.folder)

    async def create(self, **fields: object) -> schema.SessionView:
        return await self.client.create(schema.SessionRequest(key=KEY, **fields))  # type: ignore[arg-type]


def machines(folder: Path) -> list[str]:
    """Fake machines and what they started: all have the folder in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{folder}/state/sandboxes" in line:
            found.append(line)
    return found


@pytest.fixture
def host(place: Path) -> Iterator[Host]:
    made = Host(place)
    yield made
    for daemon in made.daemons:
        if daemon.poll() is None:
            daemon.terminate()
            assert daemon.wait(30) == 0, made.log()
    assert made.left() == []


def kill(daemon: subprocess.Popen[bytes]) -> None:
    daemon.kill()
    daemon.wait()


ALIVE = ("after the record", "before the destruction")


@pytest.mark.parametrize("where", [*STEPS, *(one for one in MOMENTS if one not in ALIVE)])
async def test_what_was_not_yet_or_no_longer_a_session_is_destroyed(host: Host, where: str) -> None:
    daemon = host.serve(die_at=where)
    with pytest.raises(CantelopError):
        async with asyncio.timeout(20):
            view = await host.create()
            await host.client.end(view.id)
    assert daemon.wait(5) == -signal.SIGKILL
    again = host.serve()
    assert host.left() == [], host.log()
    view = await host.create()
    await host.client.end(view.id)
    again.terminate()
    assert again.wait(30) == 0


@pytest.mark.parametrize("where", ALIVE)
async def test_a_session_with_a_record_is_adopted(host: Host, where: str) -> None:
    """Before its client knows of it, and after its client has wanted its end."""
    daemon = host.serve(die_at=where)
    with pytest.raises(CantelopError):
        view = await host.create()
        await host.client.end(view.id)
    assert daemon.wait(5) == -signal.SIGKILL
    host.serve()
    (view,) = await host.client.sessions()
    assert view.state == "running"
    async with connected(view) as kernel:
        assert await output(kernel, "print(1)") == "1\n"


COUNT = """
import time
for n in range(40):
    print(n, flush=True)
    time.sleep(0.05)
"""


async def test_a_cell_runs_on_and_its_output_arrives(host: Host) -> None:
    daemon = host.serve()
    view = await host.create()
    bystander = await host.create()
    async with connected(view) as kernel:
        await output(kernel, "kept = 42")
        running = asyncio.ensure_future(output(kernel, COUNT))
        await asyncio.sleep(0.5)
        kill(daemon)
        await asyncio.sleep(0.5)
        again = host.serve()
        assert await running == "".join(f"{n}\n" for n in range(40))
        assert await output(kernel, "print(kept)") == "42\n"
        now = await host.client.get(view.id)
        fields = ("id", "endpoints", "created", "app", "user", "digest", "boot_seconds")
        assert [getattr(now, one) for one in fields] == [getattr(view, one) for one in fields]
        assert {one.id for one in await host.client.sessions()} == {view.id, bystander.id}
        kernel.execute("import time; time.sleep(60)")
        await asyncio.sleep(0.3)
        await host.client.signal(view.id, signal.SIGINT)
        usage = await host.client.usage(view.id)
        assert usage.memory > 0 and usage.to_client > 0
        # and a restart keeps its place
        second = await host.create(endpoints=view.endpoints.token)
        assert second.endpoints == view.endpoints
        await kernel.wait_for_ready(timeout=20)
    kill(again)
    host.serve()  # a second time
    assert {one.id for one in await host.client.sessions()} == {second.id, bystander.id}
    for one in (second.id, bystander.id):
        await host.client.end(one)
    await host.client.release(second.endpoints.token)
    await host.client.release(bystander.endpoints.token)
    assert host.left() == []


async def test_a_kernel_that_ended_while_there_was_no_daemon(host: Host) -> None:
    daemon = host.serve()
    view = await host.create()
    async with connected(view) as kernel:
        kill(daemon)
        kernel.execute("import os; os._exit(7)")
        await asyncio.sleep(1)
    host.serve()
    ended = await host.client.wait(view.id, 5)
    assert ended.exit is not None and ended.exit.exit_code == 7
    await eventually(lambda: machines(host.folder) == [])


CLIENT = """
import asyncio, sys
from pathlib import Path
from cantelop_kernels.client import Client
from cantelop_kernels.schema import SessionRequest
async def main():
    print((await Client(Path(sys.argv[1])).create(SessionRequest(key="k"))).id, flush=True)
asyncio.run(main()); sys.stdin.read()
"""


async def test_a_client_that_ended_while_there_was_no_daemon(host: Host) -> None:
    daemon = host.serve()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT, str(host.folder / "c.sock")),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    session_id = (await child.stdout.readline()).decode().strip()
    kill(daemon)
    child.kill()
    await child.wait()
    host.serve()
    ended = await host.client.wait(session_id, 10)
    assert ended.exit is not None and "client's process ended" in ended.exit.reason
    await eventually(lambda: host.left() == [])


async def test_sessions_are_left_to_the_next_daemon_when_told_so(host: Host) -> None:
    daemon = host.serve(apps="[apps.default]\nwarm = 1")
    view = await host.create()
    daemon.send_signal(signal.SIGUSR1)
    assert daemon.wait(20) == 0
    async with connected(view) as kernel:
        assert await output(kernel, "print(1)") == "1\n"
    host.serve()
    assert [one.id for one in await host.client.sessions()] == [view.id]


async def test_warm_sandboxes_do_not_outlive_their_daemon(host: Host) -> None:
    daemon = host.serve(apps="[apps.default]\nwarm = 1")
    async with asyncio.timeout(20):
        while not [one for one in await host.client.pool() if one.ready]:
            await asyncio.sleep(0.1)
    kill(daemon)
    await eventually(lambda: processes() == [] and machines(host.folder) == [], 10)
    host.serve()
    assert host.left() == []


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP])  # a lost terminal is no crash
async def test_a_stopped_daemon_waits_for_sessions_a_while(host: Host, told: int) -> None:
    daemon = host.serve(drain_seconds=20.0)
    view = await host.create()
    async with connected(view) as kernel:
        running = asyncio.ensure_future(output(kernel, "import time; time.sleep(1); print('done')"))
        await asyncio.sleep(0.2)
        daemon.send_signal(told)
        assert await running == "done\n"
        with pytest.raises(CantelopError, match="stopping"):
            await host.create()
        kernel.shutdown()
        assert daemon.wait(15) == 0
    assert host.left() == []


async def test_sessions_are_adopted_by_a_daemon_on_another_socket(host: Host) -> None:
    daemon = host.serve()
    view = await host.create()
    kill(daemon)
    first, host.name = host.name, "other"
    host.serve()
    assert [one.id for one in await host.client.sessions()] == [view.id]
    async with connected(view) as kernel:
        assert await output(kernel, "print(1)") == "1\n"
    await host.client.end(view.id)
    await host.client.release(view.endpoints.token)
    assert list((host.folder / f"{first}.ipc").iterdir()) == []
    (host.folder / f"{first}.ipc").rmdir()
    (host.folder / f"{first}.sock").unlink()


async def test_a_mount_on_endpoints_keeps_no_daemon_from_serving(host: Host) -> None:
    """As a user may do it with FUSE."""
    daemon = host.serve()
    view = await host.create()
    folder = Path(view.endpoints.ip).parent
    mount = await asyncio.create_subprocess_exec(
        "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)
    )
    assert await mount.wait() == 0
    try:
        await host.client.end(view.id)
        with pytest.raises(CantelopError, match="could not be removed"):
            await host.client.release(view.endpoints.token)
        kill(daemon)
        host.serve()
        other = await host.create()
        await host.client.end(other.id)
    finally:
        (now,) = [p for p in host.folder.glob("*c.ipc*/*") if p.is_mount()]
        umount = await asyncio.create_subprocess_exec("umount", "-l", str(now))
        assert await umount.wait() == 0
    await trees.remove(now)
    for left in trees.leftovers(host.folder, "c.ipc"):
        await trees.remove_leftover(left)


async def test_a_record_of_processes_that_are_others_now_is_not_believed(host: Host) -> None:
    daemon = host.serve()
    view = await host.create()
    kill(daemon)
    (path,) = (host.folder / "state" / "sandboxes").glob("*/session.json")
    path.write_text(path.read_text().replace('"start": ', '"start": 1'))
    host.serve()
    assert await host.client.sessions() == []
    await eventually(lambda: host.left() == [])
    assert view.endpoints.token not in os.listdir(host.folder / "c.ipc")


def test_the_range_of_these_tests_is_theirs() -> None:
    assert UID_BASE in uid_range(UID_BASE)


ACTIVATED = """
import os, sys
fd = int(sys.argv[1])
os.dup2(fd, 3)
os.set_inheritable(3, True)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.execv(sys.executable, [sys.executable, "-m", "tests.fakes.fake_vmm_daemon", *sys.argv[2:]])
"""


async def test_systemd_opens_the_socket_and_is_told_when_it_is_served(host: Host) -> None:
    """Socket activation and Type=notify: a client that comes before the daemon waits, no more."""
    (host.folder / "c.toml").write_text(f"uid_base = {UID_BASE}\ndrain_seconds = 0.0\n")
    path, notify = host.folder / "c.sock", host.folder / "n.sock"
    loop = asyncio.get_running_loop()
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as manager,
    ):
        listener.bind(str(path))
        listener.listen()
        manager.bind(str(notify))
        early = asyncio.ensure_future(host.client.info())
        await asyncio.sleep(0.1)
        read, write = os.pipe()
        os.set_inheritable(write, True)
        fds = [listener.fileno(), write]
        env = os.environ | {
            "CANTELOP_STATE": str(host.folder / "state"),
            "NOTIFY_SOCKET": str(notify),
        }
        argv = [*("--socket", str(path)), *("--config", str(host.folder / "c.toml"))]
        daemon = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ACTIVATED, str(fds[0]), *argv, "--ready-fd", str(write)),
            pass_fds=fds,
            env=env,
            cwd=REPO,
        )
        os.close(write)
        async with asyncio.timeout(20):
            assert await loop.sock_recv(manager, 100) == b"READY=1"
            assert (await early).pid == daemon.pid
            daemon.terminate()
            assert await daemon.wait() == 0
            assert await loop.sock_recv(manager, 100) == b"STOPPING=1"
        os.close(read)
        assert path.exists()  # it is systemd's
        path.unlink()
