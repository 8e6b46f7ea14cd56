"""Installs Firecracker and its jailer from a release: checked first, whole or not at all.

Layer 3, behind `cantelop setup-firecracker`. Nothing of the archive is used but the contents of the
two programs: no path from it is followed, no mode, owner or link of it taken over. They come to lie
in `<state>/tools/firecracker-<version>/`, root's, and the link `firecracker` beside it names the
release in use. Daemons that run keep theirs until they start again.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO

from cantelop_kernels import download, tools, trust
from cantelop_kernels.errors import ToolError
from cantelop_kernels.image_cache import sync
from cantelop_kernels.image_model import sha256 as digest_of
from cantelop_kernels.vmm import firecracker_release
from cantelop_kernels.vmm.firecracker_release import (
    NAMES,
    RECOMMENDED,
    Release,
    examine,
    flaws,
    told,
)

MAX_ARCHIVE = 512 << 20
MAX_PROGRAM = 64 << 20
MAX_UNPACKED = 2 << 30
"""Bytes. A release's archive has 20 to 60 MB, either program a few."""

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_PROGRAM = re.compile(r"(firecracker|jailer)(-v[0-9][0-9A-Za-z.+-]*-x86_64)?")
_ELF_X86_64 = (b"\x7fELF\x02", b"\x3e\x00")
"""Class at the start, machine at byte 18 (elf(5))."""

_BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, LZMAError, EOFError),
    *(RuntimeError, NotImplementedError, ValueError),  # zipfile: encrypted, unknown compression
)


async def install(
    state: Path,
    source: str,
    sha256: str,
    *,
    allow_vulnerable: bool = False,
    begin: Callable[[str], None] = lambda _: None,
) -> Release:
    """Fetch, check, unpack, look at the version, publish. Called as root; `begin` names each step.

    Raises ToolError with the one reason, ConfigError where others could change what is installed;
    then nothing has changed.
    """
    if not _SHA256.fullmatch(sha256):
        raise ToolError(
            f"not a SHA-256: {sha256[:80]!r}",
            hint="64 hexadecimal digits, from the release's own .sha256.txt",
        )
    try:
        async with tools.workshop(state, lambda: begin("wait for another")) as (folder, work):
            trust.require(folder)
            begin(f"fetch {PurePosixPath(source).name}")
            archive = await _fetched(source, sha256.lower(), work / "archive")
            begin("unpack and check")
            ready = work / "ready"
            await asyncio.to_thread(unpack, archive, ready)
            version = await _acceptable(ready, allow_vulnerable)
            begin(f"install {version}")
            await asyncio.to_thread(_publish, ready, folder, version, work)
    except OSError as error:
        why = error.strerror or str(error)
        raise ToolError(
            f"cannot install to {firecracker_release.link(state).parent}: {why}",
            hint="run this as root, with 100 MB free there",
        ) from error
    found = await firecracker_release.find(state)
    assert found is not None
    return found


async def _fetched(source: str, wanted: str, into: Path) -> Path:
    with into.open("xb") as file:
        found = await download.fetch(source, file, limit=MAX_ARCHIVE)
    if found != wanted:
        raise ToolError(
            f"{source} is not what was asked for: its SHA-256 is {found}",
            hint="compare with the sum that the release names, and fetch it again",
        )
    return into


async def _acceptable(ready: Path, allow_vulnerable: bool) -> str:
    release = await examine(ready / "firecracker", ready / "jailer")
    found = flaws(release.version)
    if found and not allow_vulnerable:
        raise ToolError(
            f"Firecracker {release.version} has known flaws: {told(found)}",
            hint=f"take {RECOMMENDED} or later; --allow-vulnerable installs it all the same",
        )
    return str(release.version)


def unpack(archive: Path, into: Path) -> None:
    """Both programs of an archive, in a new folder. Raises ToolError, and OSError of the disk."""
    into.mkdir(mode=0o755)
    into.chmod(0o755)
    size, seen = 0, set[str]()
    try:
        with _members(archive) as members:
            for member in members:
                size += member.size
                if size > MAX_UNPACKED:
                    raise ToolError("the archive unpacks to more than a release has")
                name = _program(member)
                if name in seen:
                    raise ToolError(f"the archive has more than one {name}")
                if name is not None:
                    seen.add(name)
                    _copy(member, into / name)
    except _BROKEN as error:
        why = str(error).partition("\n")[0]
        raise ToolError(
            f"the archive is damaged, or of no kind that is known: {why}",
            hint="it takes a .tgz, .zip or .whl",
        ) from error
    except OSError as error:
        if error.errno is None:  # gzip's own
            raise ToolError(f"the archive is damaged: {error}") from error
        raise
    if missing := sorted(set(NAMES) - seen):
        raise ToolError(
            f"no {' and no '.join(missing)} for x86_64 in the archive",
            hint="it takes a release of Firecracker, as its project publishes them",
        )


@dataclass(frozen=True, slots=True)
class _Member:
    path: str
    plain: bool
    size: int
    open: Callable[[], IO[bytes] | None]


@contextmanager
def _members(archive: Path) -> Iterator[Iterator[_Member]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            yield (_of_zip(zipped, info) for info in zipped.infolist() if not info.is_dir())
    else:
        with tarfile.open(archive) as tar:
            yield (_of_tar(tar, info) for info in tar if not info.isdir())


def _of_zip(zipped: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    kind = stat.S_IFMT(info.external_attr >> 16)
    plain = kind in (0, stat.S_IFREG)
    return _Member(info.filename, plain, info.file_size, lambda: zipped.open(info))


def _of_tar(tar: tarfile.TarFile, info: tarfile.TarInfo) -> _Member:
    return _Member(info.name, info.isreg(), info.size, lambda: tar.extractfile(info))


def _program(member: _Member) -> str | None:
    """Which of the two it is; None for anything else. One that hides what it is ends it all."""
    path = PurePosixPath(member.path)
    found = _PROGRAM.fullmatch(path.name)
    if found is None:
        return None
    if not member.plain or path.is_absolute() or ".." in path.parts or member.size > MAX_PROGRAM:
        raise ToolError(f"{member.path[:200]!r} in the archive is not what a release has there")
    return found[1]


def _copy(member: _Member, target: Path) -> None:
    """Exactly as many bytes as it says, as a new file of our own mode."""
    stream = member.open()
    assert stream is not None
    with stream, target.open("xb") as out:
        head = stream.read(20)
        if not head.startswith(_ELF_X86_64[0]) or head[18:20] != _ELF_X86_64[1]:
            raise ToolError(f"{member.path[:200]!r} in the archive is no program for x86_64")
        out.write(head)
        shutil.copyfileobj(stream, out)
        if out.tell() != member.size:
            raise ToolError(f"{member.path[:200]!r} in the archive is cut off")
        os.fchmod(out.fileno(), 0o755)


def _publish(ready: Path, folder: Path, version: str, work: Path) -> None:
    """By renaming; what is there already and is the same stays."""
    target = folder / f"firecracker-{version}"
    if not _same(ready, target):
        sync(ready)
        if target.exists():
            target.rename(work / "replaced")
        ready.rename(target)
    tools.point(firecracker_release.link(folder.parent), Path(target.name))


def _same(ready: Path, target: Path) -> bool:
    try:
        return all(digest_of(target / name) == digest_of(ready / name) for name in NAMES)
    except OSError:
        return False
