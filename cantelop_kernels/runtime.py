"""What a jailed program needs to run, gathered once: itself, its libraries, its data; nothing else.

Layer 2. The root folder of a jail is made of this tree, read-only. It is a copy, kept under the
state folder by what it was made from, so that a system upgrade makes a new one and machines that
run keep theirs. Files keep the place they have on the host; who can change them is checked before.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cantelop_kernels import trees
from cantelop_kernels.errors import ConfigError
from cantelop_kernels.process import CommandFailed, run

_LDD = re.compile(r"(?:=> )?(/\S+) \(0x[0-9a-f]+\)$")
_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
_DEADLINE = 30.0
_TOP_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


@dataclass(frozen=True, slots=True)
class Runtime:
    """`mounts` and `links` as in a confinement (`confine`)."""

    folder: Path

    @property
    def mounts(self) -> list[tuple[str, str, str]]:
        return [(str(one), f"/{one.name}", "x") for one in sorted(self.folder.iterdir())]

    @property
    def links(self) -> list[tuple[str, str]]:
        """Those at the top of the host's tree, where they lead into this one."""
        return [
            (target, f"/{name}")
            for name in _TOP_LINKS
            if (target := _top_link(name)) and (self.folder / target.lstrip("/")).is_dir()
        ]


def _top_link(name: str) -> str:
    path = Path("/", name)
    return str(path.readlink()) if path.is_symlink() else ""


async def ensure(
    home: Path,
    programs: Sequence[Path],
    data: Iterable[Path] = (),
    places: Mapping[Path, str] | None = None,
) -> Runtime:
    """Gather it in the folder `home`, or find it gathered. `programs` are executables and what they
    load themselves; `data` are files that they read; `places` says where those of them lie in the
    jail that have no usual place on the host. Called by the daemon when it starts.

    Raises ConfigError where a program's libraries cannot be told, OSError where the disk is full.
    """
    files = sorted(
        {*programs, *data, *[one for path in programs for one in await _libraries(path)]}
    )
    placed = {path: (places or {}).get(path) or _place(path) for path in files}
    wanted = home / await asyncio.to_thread(_digest, placed)
    if not wanted.exists():
        home.mkdir(mode=0o755, parents=True, exist_ok=True)
        await _gather(placed, wanted)
    for other in home.iterdir():
        if other != wanted:
            await trees.remove(other)
    return Runtime(wanted)


async def _libraries(program: Path) -> list[Path]:
    """As the system's loader says. A static program has none."""
    try:
        done = await run(["ldd", str(program)], env=_ENV, deadline=_DEADLINE)
    except CommandFailed as error:
        if "not a dynamic executable" in error.stderr_tail:
            return []
        raise ConfigError(f"the libraries of {program} cannot be told: {error.message}") from error
    if "statically linked" in done.stdout:
        return []
    missing = re.findall(r"(\S+) => not found", done.stdout)
    if missing:
        raise ConfigError(
            f"{program} lacks {', '.join(missing)}", hint="install the packages they are from"
        )
    return [Path(found[1]) for line in done.stdout.splitlines() if (found := _LDD.search(line))]


def _digest(files: Mapping[Path, str]) -> str:
    """By names, sizes and times: the contents are trusted with their folders (`trust`)."""
    known = hashlib.sha256()
    for path, place in files.items():
        found = path.stat()
        known.update(
            f"{path}\0{place}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ino}\0".encode()
        )
    return known.hexdigest()[:16]


async def _gather(files: Mapping[Path, str], into: Path) -> None:
    aside = into.with_name(f".{into.name}.new")
    await trees.remove(aside)
    try:
        await asyncio.to_thread(_copy, files, aside)
        aside.rename(into)
    except BaseException:
        await trees.remove(aside)
        raise


def _copy(files: Mapping[Path, str], into: Path) -> None:
    """Each at the name it is asked for by, without the links on the way."""
    into.mkdir(mode=0o755)
    for path, place in files.items():
        target = into / place.lstrip("/")
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        target.chmod(0o755)


def _place(path: Path) -> str:
    """/lib/x.so lies in usr/lib where /lib is a link to it."""
    top, *rest = path.parts[1:]
    return "/".join([_top_link(top).strip("/") or top, *rest])
