"""No process that reads bytes of a guest has a right it does not need: each of a live sandbox."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from cantelop_kernels import client, schema
from tests.fakes.host_stack import KEY, connected, output, status_of
from tests.vm.test_residue import UID_BASE, environment, ours, serve, wait_for_none

pytestmark = [pytest.mark.vm, pytest.mark.timeout(240)]

FDS = re.compile(
    r"/dev/(null|kvm)|(pipe|socket):\[\d+\]|anon_inode:.*|/memfd:.* \(deleted\)"
    r"|/(image|disk)/\d-(vmlinux|initramfs\S*|root\S*|scratch\.img)"
    r"|.*/(vmlinux|initramfs\S*|root\.\S*|scratch\.img)"
)
TOPS = {
    "qemu-system-x86_64": {"usr", "run", "image", "disk", "bin", "lib", "lib64"},
    "vhost-device-vsock": {"usr", "run", "bin", "lib", "lib64"},
    "attendant": {"run"},
}


@asynccontextmanager
async def live(tmp_path: Path) -> AsyncIterator[tuple[client.Client, schema.SessionView, Path]]:
    """A session in a real VM, and the sandbox's folder."""
    env = environment(tmp_path)
    process = serve(env)
    try:
        daemon = client.Client(Path(env["CANTELOP_SOCKET"]))
        view = await daemon.create(schema.SessionRequest(key=KEY, allow_emulation=True))
        (folder,) = (Path(env["CANTELOP_STATE"]) / "sandboxes").glob(f"cantelop-{UID_BASE}-*")
        yield daemon, view, folder
        await daemon.end(view.id)
    finally:
        process.terminate()
        process.wait(60)
        wait_for_none()
        assert ours() == []


def members(folder: Path) -> dict[str, psutil.Process]:
    """The processes of a sandbox, by its cgroup: whatever uid they have."""
    found = {}
    for process in psutil.process_iter():
        try:
            groups = Path(f"/proc/{process.pid}/cgroup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if f"/{folder.name}\n" in groups:
            name = process.name()
            found["attendant" if "python" in name else name] = process
    return found


def check(name: str, process: psutil.Process) -> None:
    """THREATS 6 and 7 for one process."""
    proc = Path(f"/proc/{process.pid}")
    status = status_of(process.pid)
    uids = set(status["Uid"].split())
    assert len(uids) == 1 and int(uids.pop()) in range(UID_BASE, UID_BASE + 4096)
    assert int(status["Gid"].split()[0]) in range(UID_BASE, UID_BASE + 4096)
    assert status["Groups"] == ""
    assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    for kind in ("mnt", "net", "pid", "ipc", "uts", "cgroup"):
        assert (proc / "ns" / kind).readlink() != Path(f"/proc/self/ns/{kind}").readlink(), kind
    assert {path.name for path in (proc / "root").iterdir()} == TOPS[name]
    for fd in (proc / "fd").iterdir():
        assert FDS.fullmatch(str(fd.readlink())), f"{name} has {fd.readlink()} open"


async def test_every_process_of_a_live_sandbox_is_confined(tmp_path: Path) -> None:
    async with live(tmp_path) as (_, view, folder), connected(view) as kernel:
        assert await output(kernel, "print(6 * 7)") == "42\n"
        found = members(folder)
        assert set(found) == set(TOPS)
        for name, process in found.items():
            check(name, process)
            assert process.children() == []
        vmm, attendant = found["qemu-system-x86_64"], found["attendant"]
        assert vmm.uids().real != attendant.uids().real
        others_stay_outside(folder, view)
        code = "import os; print(os.path.exists('/dev/kvm'), open('/proc/cpuinfo').read())"
        said = await output(kernel, code)
        assert said.startswith("False ")  # THREATS 1
        assert not re.search(r"\b(vmx|svm)\b", said)
        refused = "import subprocess as s; print(s.run('sudo dd if=/dev/zero of=/dev/vda bs=4k \
count=1 conv=fsync', shell=True, capture_output=True, text=True).stderr)"
        assert re.search("not permitted|Read-only|I/O error", await output(kernel, refused))


def as_user(uid: int, body: Callable[[], int]) -> int:
    """What `body` returns (0 to 100) in a process of that uid, with no group and no capability."""
    pid = os.fork()
    if pid == 0:
        status = 101
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            status = body()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def others_stay_outside(folder: Path, view: schema.SessionView) -> None:
    """THREATS 11, as a host user that has nothing to do with it."""
    targets = [*folder.rglob("*.sock")]
    assert {path.name for path in targets} >= {"v.sock", "attendant.sock"}
    targets += [Path(f"{view.endpoints.ip}-{number}") for number in range(1, 6)]

    def denied() -> int:
        count = 0
        for target in targets:
            try:
                socket.socket(socket.AF_UNIX).connect(str(target))
            except PermissionError:
                count += 1
        return count

    assert as_user(65534, denied) == len(targets)


async def test_a_replaced_socket_leads_nowhere(tmp_path: Path) -> None:
    """THREATS 10: the VM's uid puts a link to a root-only socket in the place of its own."""
    secret = tmp_path / "secret.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(secret))
    secret.chmod(0o600)
    listener.listen()
    listener.setblocking(False)
    async with live(tmp_path) as (_, view, folder):
        run = folder / "run"

        def replace() -> int:
            (run / "v.sock").unlink()
            (run / "v.sock").symlink_to(secret)
            return 0

        assert as_user(run.stat().st_uid, replace) == 0
        with pytest.raises(RuntimeError):  # no channel leads to a kernel any more
            async with connected(view, seconds=5):
                pass
        with pytest.raises(BlockingIOError):
            listener.accept()
    listener.close()
