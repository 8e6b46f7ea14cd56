"""THREATS 6 to 9: what a jailed process is, tried from inside with that process's own rights."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from cantelop_kernels import cgroup, jail, runtime, seccomp, trees
from cantelop_kernels.cgroup import Caps, Leaf
from cantelop_kernels.errors import LaunchError
from cantelop_kernels.jail import Jail, Rights
from cantelop_kernels.process import CommandFailed, Process
from cantelop_kernels.runtime import Runtime
from cantelop_kernels.slot import Slot
from tests.fakes.host_stack import eventually, status_of

UID_BASE = 985_000
SLOT = Slot(3, UID_BASE)
CAPS = Caps(cpus=1.5, memory=256 << 20, pids=32)
PERL = Path("/usr/bin/perl")
SLEEP = Path("/usr/bin/sleep")
MIB = 1 << 20
NULL = ("/dev/null", "/dev/null", "d")  # Perl asks for it


@pytest.fixture
def state() -> Iterator[Path]:
    """A state folder that other users can reach."""
    with tempfile.TemporaryDirectory(prefix="ctj-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "sandboxes").mkdir()
        yield folder


@asynccontextmanager
async def place(state: Path, caps: Caps = CAPS) -> AsyncIterator[tuple[Jail, Leaf]]:
    """A jail with its cgroup; both are gone when the context is left."""
    leaf = cgroup.hierarchy("cantelop-tests").make(SLOT.name, caps)
    try:
        made = jail.make(state, SLOT, leaf.procs)
        try:
            yield made, leaf
        finally:
            await leaf.remove()
            await jail.remove(made)
    finally:
        await leaf.remove()


async def programs(state: Path) -> Runtime:
    return await runtime.ensure(state / "runtime" / "tests", [PERL, SLEEP])


async def rights_of(state: Path, kind: str = "vmm") -> Rights:
    return Rights(await programs(state), getattr(seccomp, kind)(), [NULL])


@asynccontextmanager
async def jailed(
    made: Jail, rights: Rights, *argv: str, stdout: int = -3, log: int = -3
) -> AsyncIterator[Process]:
    process = await made.start(argv, rights, stdout=stdout, log=log)
    try:
        yield process
    finally:
        await process.stop(0.0)
        process.close()


async def says(made: Jail, rights: Rights, code: str) -> tuple[str, int]:
    """What this Perl text prints in the jail, with its errors, and how it ends."""
    reading, writing = os.pipe()
    try:
        process = await made.start([str(PERL), "-e", code], rights, stdout=writing, log=writing)
        os.close(writing)
        writing = -1
        text = await asyncio.to_thread(Path(f"/proc/self/fd/{reading}").read_text)
        status = await process.wait()
        process.close()
        return text, status
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


async def test_it_has_no_right_but_its_own(state: Path) -> None:
    """THREATS 6."""
    async with place(state) as (made, _):
        rights = await rights_of(state, "helper")
        async with jailed(made, rights, str(SLEEP), "60") as process:
            status = status_of(process.pid)
    uid, gid = str(SLOT.vmm_uid), str(SLOT.gid)
    assert status["Uid"].split() == [uid] * 4
    assert status["Gid"].split() == [gid] * 4
    assert status["Groups"] == ""
    assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert status["NSpid"].split()[1:] == ["1"]


async def test_its_world_is_an_exact_list(state: Path) -> None:
    """THREATS 7: namespaces, files and descriptors, whatever the daemon had open."""
    leaking = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(leaking, True)
    try:
        async with place(state) as (made, _):
            rights = await rights_of(state, "helper")
            async with jailed(made, rights, str(SLEEP), "60") as process:
                proc = Path(f"/proc/{process.pid}")
                for kind in ("mnt", "net", "pid", "ipc", "uts", "cgroup"):
                    ours = Path(f"/proc/self/ns/{kind}").readlink()
                    assert (proc / "ns" / kind).readlink() != ours, kind
                tops = {path.name for path in (proc / "root").iterdir()}
                files = [path for path in (proc / "root/usr").rglob("*") if path.is_file()]
                fds = {int(one.name): str(one.readlink()) for one in (proc / "fd").iterdir()}
                environment = (proc / "environ").read_bytes()
                interfaces = (proc / "net/dev").read_text().count(":")
        expected = {path for path in rights.runtime.folder.rglob("*") if path.is_file()}
    finally:
        os.close(leaking)
    assert tops == {"usr", "run", "dev", *(name.lstrip("/") for _, name in rights.runtime.links)}
    assert {path.name for path in files} == {path.name for path in expected}
    assert fds == {0: "/dev/null", 1: "/dev/null", 2: "/dev/null"}
    assert environment == b"PATH=/usr/sbin:/usr/bin:/sbin:/bin\0LC_ALL=C\0"
    assert interfaces == 1  # lo, which is down


FORBIDDEN = {
    "mount": 165,
    "ptrace": 101,
    "bpf": 321,
    "keyctl": 250,
    "io_uring_enter": 426,
    "userfaultfd": 323,
    "open_by_handle_at": 304,
    "perf_event_open": 298,
    "setns": 308,
    "unshare": 272,
    "pivot_root": 155,
    "init_module": 175,
    "mknod": 133,
    "clone (a user namespace)": 56,
}
"""By their numbers on x86-64; each with arguments that an attacker would give."""

ARGUMENTS = {"clone (a user namespace)": "0x10000011, 0, 0, 0, 0", "unshare": "0x10000000"}


@pytest.mark.parametrize("kind", ["vmm", "helper"])
@pytest.mark.parametrize("name", FORBIDDEN)
async def test_a_forbidden_call_kills_it(state: Path, kind: str, name: str) -> None:
    """THREATS 8."""
    call = f"syscall({FORBIDDEN[name]}, {ARGUMENTS.get(name, '0, 0, 0, 0, 0')})"
    async with place(state) as (made, _):
        rights = await rights_of(state, kind)
        text, status = await says(made, rights, f"$| = 1; print 'on'; {call}; print 'off'")
    assert (text, status) == ("on", -signal.SIGSYS)


@pytest.mark.parametrize("number", [425, 435])
@pytest.mark.parametrize("kind", ["vmm", "helper"])
async def test_io_uring_and_clone3_are_not_there(state: Path, kind: str, number: int) -> None:
    async with place(state) as (made, _):
        text, _ = await says(
            made, await rights_of(state, kind), f"syscall({number}, 0, 0); print $!"
        )
    assert text == "Function not implemented"


@pytest.mark.parametrize("kind", ["vmm", "helper"])
async def test_no_socket_but_a_unix_one(state: Path, kind: str) -> None:
    async with place(state) as (made, _):
        rights = await rights_of(state, kind)
        for family in (2, 10, 16, 17, 40):  # inet, inet6, netlink, packet, vsock
            assert (await says(made, rights, f"syscall(41, {family}, 2, 0)"))[1] == -signal.SIGSYS
        assert (await says(made, rights, "print syscall(41, 1, 1, 0) > 0"))[0] == "1"


async def test_it_writes_nowhere_but_in_its_run_folder(state: Path) -> None:
    code = """
    for my $path ('/x', '/usr/x', '/usr/bin/sleep', '/run/x') {
        print $path, ' ', (open(my $file, '>', $path) ? 'written' : $!), "\\n";
    }
    system('/run/x'); print $? == -1 ? "not run: $!\\n" : "run\\n";
    """
    async with place(state) as (made, _):
        text, _ = await says(made, await rights_of(state), code)
    assert text.splitlines() == [
        "/x Read-only file system",
        "/usr/x Read-only file system",
        "/usr/bin/sleep Read-only file system",
        "/run/x written",
        "not run: Permission denied",
    ]


async def test_a_device_is_a_node_of_its_own(state: Path) -> None:
    """As /dev/kvm, which on the host is a group's; none can be made elsewhere, and none changed."""
    code = """
    my @found = stat '/dev/null';
    printf "%o %d %d %d\n", $found[2], $found[4], $found[5], $found[6];
    print open(my $file, '>>', '/dev/null') ? "open\n" : $!;
    print chmod(0666, '/dev/null') ? 'changed' : $!;
    """
    async with place(state) as (made, _):
        text, _ = await says(made, await rights_of(state), code)
    device = os.stat("/dev/null").st_rdev  # noqa: PTH116 - the number
    owner = f"{SLOT.vmm_uid} {SLOT.gid}"
    assert text == f"20600 {owner} {device}\nopen\nRead-only file system"


async def test_nothing_of_the_host_is_in_reach(state: Path) -> None:
    code = """
    for my $path ('/etc/passwd', '/proc/self/status', '/sys', '/dev/kvm', '/run/../..', '/home') {
        print -e $path ? "$path is there\\n" : '';
    }
    print kill(0, 1) ? 'signals' : $!;
    """
    async with place(state) as (made, _):
        text, _ = await says(made, await rights_of(state), code)
    assert text == "/run/../.. is there\nsignals"  # process 1 of its own namespace is itself


async def test_a_link_is_not_bound(state: Path) -> None:
    """THREATS 9: what root binds into a jail is the file itself."""
    target = state / "secret"
    target.write_text("s")
    link = state / "link"
    link.symlink_to(target)
    async with place(state) as (made, _):
        rights = Rights(await programs(state), seccomp.vmm(), [(str(link), "/secret", "")])
        with pytest.raises(CommandFailed, match="is a symbolic link"):
            await made.start([str(SLEEP), "1"], rights)
    assert target.read_text() == "s"


@pytest.mark.parametrize("trap", ["symlink", "folder"])
def test_a_place_that_somebody_made_before_is_refused(state: Path, trap: str) -> None:
    """THREATS 9."""
    canary = state / "canary"
    canary.mkdir()
    (canary / "file").write_text("alive")
    at = jail.sandboxes(state) / SLOT.name
    at.symlink_to(canary) if trap == "symlink" else at.mkdir()
    with pytest.raises(LaunchError, match="exists already"):
        jail.make(state, SLOT)
    assert [path.name for path in canary.iterdir()] == ["file"]


async def test_teardown_follows_no_link(state: Path) -> None:
    """THREATS 9: links out of the jail, made by its own uid, and swapped while root removes it."""
    canary = state / "canary"
    canary.mkdir()
    (canary / "file").write_text("alive")
    code = f"""
    for my $n (1 .. 200) {{
        mkdir "d$n"; symlink '{canary}', "d$n/out"; rename "d$n", "e$n"; symlink '{canary}', "d$n";
    }}
    """
    async with place(state) as (made, _):
        assert await says(made, await rights_of(state), code) == ("", 0)
        assert len(list(made.run.iterdir())) == 400
    assert (canary / "file").read_text() == "alive"
    assert not made.folder.exists()


async def test_the_memory_cap_holds(state: Path) -> None:
    """THREATS 23, seen from the host: what takes more is killed, and only that."""
    caps = Caps(cpus=1.0, memory=64 * MIB, pids=32)
    async with place(state, caps) as (made, leaf):
        rights = await rights_of(state)
        _, status = await says(made, rights, "my $x = 'a' x (200 << 20); print length $x")
        taken = leaf.taken()
    assert status == -signal.SIGKILL
    assert 32 * MIB < taken.peak <= 64 * MIB
    assert taken.oom_kills >= 1


async def test_the_cap_of_processes_holds(state: Path) -> None:
    code = (
        "my $n = 0; for (1 .. 100) { defined(my $p = fork) or last; $p or sleep 60; $n++ } print $n"
    )
    async with place(state) as (made, leaf):
        text, _ = await says_before_the_end(made, await rights_of(state), code)
        assert int(text) < CAPS.pids
        await leaf.remove()
    assert not [p for p in psutil.process_iter() if p.uids().real == SLOT.vmm_uid]


async def says_before_the_end(made: Jail, rights: Rights, code: str) -> tuple[str, Process]:
    """The first that is printed; the process runs on."""
    reading, writing = os.pipe()
    argv = [str(PERL), "-e", f"$| = 1; {code}; sleep 60"]
    process = await made.start(argv, rights, stdout=writing)
    os.close(writing)
    text = (await asyncio.to_thread(os.read, reading, 100)).decode()
    os.close(reading)
    return text, process


async def test_the_cpu_quota_holds(state: Path) -> None:
    caps = Caps(cpus=0.25, memory=64 * MIB, pids=32)
    async with place(state, caps) as (made, leaf):
        rights = await rights_of(state)
        async with jailed(made, rights, str(PERL), "-e", "while (1) {}"):
            before = leaf.taken()
            await asyncio.sleep(2)
            after = leaf.taken()
    assert 0.2 < after.cpu - before.cpu < 0.7
    assert after.throttled > before.throttled


async def test_a_leaf_that_is_removed_takes_its_processes_along(state: Path) -> None:
    code = "while (1) { fork }"
    async with place(state) as (made, leaf):
        process = await made.start([str(PERL), "-e", code], await rights_of(state))
        await eventually(lambda: len(Path(leaf.procs[0]).read_text().split()) > 4)
        await leaf.remove()
        assert await process.wait() == -signal.SIGKILL
        process.close()
    assert cgroup.hierarchy("cantelop-tests").names(SLOT.name) == set()


@pytest.mark.parametrize("where", ["cgroup", "mount", "filter", "program"])
async def test_what_cannot_be_confined_never_runs(state: Path, where: str) -> None:
    """THREATS 13: the program would have left a file."""
    code = "open(my $f, '>', '/run/ran')"
    async with place(state) as (made, _):
        rights = await rights_of(state)
        argv = [str(PERL), "-e", code]
        bad = made
        match where:
            case "cgroup":
                bad = Jail(made.slot, made.folder, ("/sys/fs/cgroup/cpu/nonexistent/cgroup.procs",))
            case "mount":
                rights = Rights(rights.runtime, rights.filter, [("/nonexistent", "/x", "")])
            case "filter":
                rights = Rights(rights.runtime, b"\xff" * 8)
            case "program":
                argv = ["/usr/bin/nonexistent"]
        with pytest.raises(CommandFailed, match="cannot be confined"):
            await bad.start(argv, rights)
        assert list(made.run.iterdir()) == []
    assert not [p for p in psutil.process_iter() if p.uids().real == SLOT.vmm_uid]


async def test_a_cancelled_start_leaves_no_process(state: Path) -> None:
    async with place(state) as (made, _):
        rights = await rights_of(state)
        for pause in (0, 0.005, 0.02, 0.04):
            task = asyncio.ensure_future(made.start([str(SLEEP), "60"], rights))
            await asyncio.sleep(pause)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():  # it was quicker
                await task.result().stop(0.0)
                task.result().close()
            assert not [p for p in psutil.process_iter() if p.uids().real == SLOT.vmm_uid]


async def test_the_runtime_is_gathered_once_and_anew_when_a_program_changes(state: Path) -> None:
    program = state / "program"
    program.write_bytes(SLEEP.read_bytes())
    program.chmod(0o755)
    home = state / "runtime" / "one"
    first = await runtime.ensure(home, [program])
    assert await runtime.ensure(home, [program]) == first
    os.utime(program, (1, 1))
    second = await runtime.ensure(home, [program])
    assert second != first
    assert list(home.iterdir()) == [second.folder]
    await trees.remove(home)
