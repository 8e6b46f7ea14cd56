"""`setup-firecracker`: a release is installed whole, or nothing changes and one line says why."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import io
import os
import stat
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from cantelop_kernels import __main__ as entry
from cantelop_kernels.cli import setup_firecracker
from cantelop_kernels.errors import CantelopError, ToolError
from cantelop_kernels.vmm import firecracker_install
from cantelop_kernels.vmm.firecracker_install import install
from cantelop_kernels.vmm.firecracker_release import find
from tests.fakes.tiny_elf import program

GOOD = "1.16.2"
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def programs(version: str, padding: int = 0) -> dict[str, bytes]:
    return {
        "firecracker": program(f"Firecracker v{version}\n\nno snapshots\n", padding=padding),
        "jailer": program(f"Jailer v{version}\n", padding=padding),
    }


def release(version: str = GOOD, padding: int = 0) -> list[tuple[tarfile.TarInfo, bytes]]:
    """As the project packs one, with what else lies in it."""
    folder = f"release-v{version}-x86_64"
    made = [member(folder, type=tarfile.DIRTYPE)]
    for name, data in programs(version, padding).items():
        made.append(member(f"{folder}/{name}-v{version}-x86_64", data, mode=0o4777, uid=1234))
        made.append(member(f"{folder}/{name}-v{version}-x86_64.debug", b"symbols"))
    return [*made, member(f"{folder}/SHA256SUMS", b"sums"), member(f"{folder}/LICENSE", b"free")]


def tgz(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return tmp_path / "state"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "firecracker.tgz"


def left(state: Path) -> list[str]:
    """What lies among the tools, besides the lock."""
    return sorted(set(os.listdir(state / "tools")) - {".lock"})


async def refused(state: Path, source: Path | str, sum_: str = "") -> str:
    """One line, and nothing left."""
    wanted = sum_ or digest(Path(source))
    with pytest.raises(CantelopError) as caught:
        await install(state, str(source), wanted)
    assert left(state) == []
    assert await find(state) is None
    assert "\n" not in caught.value.message and caught.value.hint is not None
    return caught.value.message


async def test_a_release_is_installed(state: Path, archive: Path) -> None:
    tgz(archive, release())
    steps: list[str] = []
    before = os.umask(0o077)
    try:
        made = await install(state, str(archive), digest(archive).upper(), begin=steps.append)
    finally:
        os.umask(before)
    folder = state / "tools" / "firecracker-1.16.2"
    assert made == await find(state) and str(made.version) == GOOD
    assert left(state) == ["firecracker", "firecracker-1.16.2"]
    assert sorted(os.listdir(folder)) == ["firecracker", "jailer"]
    for path in (folder, folder / "firecracker", folder / "jailer"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755
        assert path.stat().st_uid == os.geteuid()
    assert (folder / "jailer").read_bytes() == programs(GOOD)["jailer"]
    assert steps == ["fetch firecracker.tgz", "unpack and check", "install 1.16.2"]


async def test_once_more_changes_nothing_and_another_version_takes_over(
    state: Path, archive: Path, tmp_path: Path
) -> None:
    tgz(archive, release())
    first = await install(state, str(archive), digest(archive))
    inode = first.firecracker.stat().st_ino
    assert await install(state, str(archive), digest(archive)) == first
    assert first.firecracker.stat().st_ino == inode
    newer = tgz(tmp_path / "newer.tgz", release("1.17.0"))
    second = await install(state, str(newer), digest(newer))
    assert str(second.version) == "1.17.0" and await find(state) == second
    assert first.firecracker.exists(), "a daemon that runs may still start it"


async def test_a_broken_installation_is_replaced(state: Path, archive: Path) -> None:
    tgz(archive, release())
    made = await install(state, str(archive), digest(archive))
    made.jailer.write_bytes(b"garbage")
    assert await install(state, str(archive), digest(archive)) == made
    assert made.jailer.read_bytes() == programs(GOOD)["jailer"]
    assert left(state) == ["firecracker", "firecracker-1.16.2"]


@pytest.mark.parametrize("name", ["release.zip", "some-1.0-py3-none-any.whl"])
async def test_a_zip_or_a_wheel_does_as_well(state: Path, tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("some/bin/", "")
        for which, data in programs(GOOD).items():
            zipped.writestr(f"some/bin/{which}", data)
        zipped.writestr("some/firecracker.py", "print()")
    made = await install(state, str(tmp_path / name), digest(tmp_path / name))
    assert str(made.version) == GOOD


async def test_another_sum_is_refused_before_anything_is_unpacked(
    state: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tgz(archive, release())
    monkeypatch.setattr(firecracker_install, "unpack", None)
    message = await refused(state, archive, "0" * 64)
    assert digest(archive) in message and "not what was asked for" in message


@pytest.mark.parametrize("sum_", ["", "abc", "g" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n"])
async def test_what_is_no_sum_is_said_so(state: Path, archive: Path, sum_: str) -> None:
    with pytest.raises(ToolError, match="not a SHA-256"):
        await install(state, str(archive), sum_)
    assert not state.exists()


async def test_a_missing_file(state: Path, tmp_path: Path) -> None:
    message = await refused(state, tmp_path / "none.tgz", "0" * 64)
    assert "No such file" in message


@pytest.mark.parametrize("keep", [0, 10, 200, -20])
async def test_an_archive_that_is_cut_off(state: Path, archive: Path, keep: int) -> None:
    """Its sum is right: it was cut before it was published."""
    tgz(archive, release(padding=4096))
    archive.write_bytes(archive.read_bytes()[:keep])
    assert "damaged" in await refused(state, archive)


async def test_an_archive_of_no_kind(state: Path, archive: Path) -> None:
    archive.write_bytes(b"#!/bin/sh\nexit 0\n" * 100)
    assert "of no kind that is known" in await refused(state, archive)


Change = Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]
BAD: dict[str, tuple[Change, str]] = {}


def bad(says: str) -> Callable[[Change], Change]:
    def keep(change: Change) -> Change:
        BAD[change.__name__] = (change, says)
        return change

    return keep


def drop(members: list[tuple[tarfile.TarInfo, bytes]], name: str) -> None:
    members[:] = [one for one in members if not one[0].name.endswith(f"/{name}-v{GOOD}-x86_64")]


@bad("no jailer")
def no_jailer(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    drop(members, "jailer")


@bad("not what a release has there")
def a_way_out(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    drop(members, "jailer")
    members.append(member("x/../../../jailer", programs(GOOD)["jailer"]))


@bad("not what a release has there")
def an_absolute_path(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    drop(members, "jailer")
    members.append(member("/usr/local/bin/jailer", programs(GOOD)["jailer"]))


@bad("not what a release has there")
def a_symbolic_link(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    drop(members, "jailer")
    members.append(member("r/jailer", type=tarfile.SYMTYPE, linkname="/bin/true"))


@bad("not what a release has there")
def a_hard_link(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    drop(members, "jailer")
    members.append(member("r/jailer", type=tarfile.LNKTYPE, linkname=members[1][0].name))


@bad("not what a release has there")
def a_device(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    drop(members, "firecracker")
    members.append(member("r/firecracker", type=tarfile.CHRTYPE, devmajor=1, devminor=5))


@bad("more than one firecracker")
def two_of_one(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members.append(member("another/firecracker", program("Firecracker v9.9.9\n")))


@bad("no program for x86_64")
def of_another_machine(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    drop(members, "jailer")
    members.append(member("r/jailer", program(f"Jailer v{GOOD}", machine=183)))


@bad("no program for x86_64")
def a_script(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    drop(members, "jailer")
    members.append(member("r/jailer", b"#!/bin/sh\necho Jailer v1.16.2\n"))


@bad("its jailer 1.16.3")
def of_two_releases(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    drop(members, "jailer")
    members.append(member("r/jailer", program("Jailer v1.16.3")))


@bad("does not tell its version")
def that_says_nothing(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    drop(members, "jailer")
    members.append(member("r/jailer", program("")))


@pytest.mark.parametrize("name", BAD)
async def test_what_is_no_release(state: Path, archive: Path, tmp_path: Path, name: str) -> None:
    change, says = BAD[name]
    members = release()
    change(members)
    before = sorted(tmp_path.parent.rglob("jailer"))
    assert says in await refused(state, tgz(archive, members))
    assert sorted(tmp_path.parent.rglob("jailer")) == before


async def test_a_symbolic_link_in_a_zip(state: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "r.zip", "w") as zipped:
        zipped.writestr("r/firecracker", programs(GOOD)["firecracker"])
        link = zipfile.ZipInfo("r/jailer")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        zipped.writestr(link, "/bin/true")
    assert "not what a release has there" in await refused(state, tmp_path / "r.zip")


async def test_links_in_other_places_are_passed_over(state: Path, archive: Path) -> None:
    members = [
        member("release", type=tarfile.SYMTYPE, linkname="/"),
        member("../../evil", b"x"),
        *release(),
    ]
    made = await install(state, str(tgz(archive, members)), digest(archive))
    assert str(made.version) == GOOD and not (state.parent / "evil").exists()


async def test_a_bomb_is_not_unpacked(
    state: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firecracker_install, "MAX_UNPACKED", 1 << 20)
    tgz(archive, [member("zeros", bytes(2 << 20)), *release()])
    assert "more than a release has" in await refused(state, archive)
    monkeypatch.setattr(firecracker_install, "MAX_PROGRAM", 4096)
    assert "not what a release has" in await refused(state, tgz(archive, release(padding=8192)))
    monkeypatch.setattr(firecracker_install, "MAX_ARCHIVE", 100)
    assert "is larger than" in await refused(state, archive)


@pytest.mark.parametrize("version", ["1.12.1", "1.16.1", "1.17.0-dev"])
async def test_a_version_with_known_flaws(state: Path, archive: Path, version: str) -> None:
    tgz(archive, release(version))
    message = await refused(state, archive)
    assert version in message and "known flaws" in message
    made = await install(state, str(archive), digest(archive), allow_vulnerable=True)
    assert str(made.version) == version


@contextlib.contextmanager
def mounted(folder: Path, size: str, options: str = "") -> Iterator[None]:
    folder.mkdir()
    wanted = f"size={size},mode=755{options}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", wanted, "t", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@root_only
@pytest.mark.parametrize("packed", [True, False])
async def test_a_full_disk(state: Path, archive: Path, packed: bool) -> None:
    """Packed, the archive fits and what is in it does not."""
    members = release(padding=1 << 20)
    tgz(archive, members if packed else [*members, member("x", os.urandom(1 << 20))])
    with mounted(state, "256k"):
        assert "No space left on device" in await refused(state, archive)


@root_only
async def test_a_disk_that_runs_nothing(state: Path, archive: Path) -> None:
    with mounted(state, "4m", ",noexec"):
        assert "Permission denied" in await refused(state, tgz(archive, release()))


async def test_a_folder_that_others_can_change(state: Path, archive: Path) -> None:
    tgz(archive, release())
    (state / "tools").mkdir(parents=True)
    (state / "tools").chmod(0o777)
    with pytest.raises(CantelopError, match="can be changed by others"):
        await install(state, str(archive), digest(archive))
    assert left(state) == []


class _Server(BaseHTTPRequestHandler):
    served: bytes = b""
    answer: threading.Event

    def do_GET(self) -> None:
        if self.path == "/stalls":
            self.send_response(200)
            self.end_headers()
            self.wfile.flush()
            self.answer.wait(30)
            return
        where = {"/moved": "/release.tgz", "/file": "file:///etc/passwd", "/ftp": "ftp://x/y"}
        if self.path in where:
            self.send_response(302)
            self.send_header("Location", where[self.path])
            self.end_headers()
            return
        self.send_response(200 if self.path in ("/release.tgz", "/short") else 404)
        extra = 1000 if self.path == "/short" else 0
        self.send_header("Content-Length", str(len(self.served) + extra))
        self.end_headers()
        self.wfile.write(self.served)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(archive: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    _Server.served = tgz(archive, release()).read_bytes()
    _Server.answer = threading.Event()
    with HTTPServer(("127.0.0.1", 0), _Server) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        _Server.answer.set()
        http.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["/release.tgz", "/moved"])
async def test_from_a_url(state: Path, archive: Path, server: str, path: str) -> None:
    made = await install(state, server + path, digest(archive))
    assert str(made.version) == GOOD


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/none", "Not Found"),
        ("/short", "SHA-256 is"),
        ("/file", "not allowed"),
        ("/ftp", "unknown url type"),
    ],
)
async def test_a_server_that_does_not_give_it(
    state: Path, server: str, path: str, says: str
) -> None:
    sum_ = "0" * 64
    assert says in await refused(state, server + path, sum_)


async def test_nobody_listens(state: Path) -> None:
    assert "Connection refused" in await refused(state, "http://127.0.0.1:9/r.tgz", "0" * 64)


async def test_a_set_up_that_is_given_up_leaves_nothing(state: Path, server: str) -> None:
    task = asyncio.ensure_future(install(state, f"{server}/stalls", "0" * 64))
    while not (state / "tools").exists() or not left(state):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left(state) == []
    _Server.answer.set()


async def test_the_command(
    state: Path, archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CANTELOP_STATE", str(state))
    tgz(archive, release("1.16.1"))
    argv = ["setup-firecracker", str(archive), "--sha256", digest(archive), "--allow-vulnerable"]
    assert await setup_firecracker.command(entry.build_parser(argv).parse_args(argv)) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"Firecracker 1.16.1 {state / 'tools' / 'firecracker-1.16.1'}"
    assert out[1].startswith("known flaws: CVE-2026-122192")


def test_the_command_says_why_it_fails(
    state: Path, archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CANTELOP_STATE", str(state))
    archive.write_bytes(gzip.compress(b"nothing"))
    assert entry.main(["setup-firecracker", str(archive), "--sha256", digest(archive)]) == 1
    said = capsys.readouterr().err
    assert "cantelop: the archive is damaged" in said and "Traceback" not in said
