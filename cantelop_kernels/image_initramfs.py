"""The initramfs: what a guest needs until its root is mounted, and the agent.

Layer 2, used by the image builder. Built anew by every build, in about a second, so that a change
of the agent or of the init rebuilds nothing else. Written here rather than by cpio(1): the same
content gives the same bytes, whoever builds it and when.
"""

from __future__ import annotations

import io
import json
import shutil
import stat
from pathlib import Path
from typing import IO

from .errors import ImageError
from .image_pyc import compile_tree
from .process import run

SHARED = ("__init__.py", "relay.py", "wire.py")
"""Modules of this package that the agent uses too."""

_LINKS = ("cp", "insmod", "mkdir", "mount", "reboot", "sh", "sleep", "switch_root")
_ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}


def agent_folder() -> Path:
    """The guest's agent: in the source tree, or installed beside this package."""
    package = Path(__file__).parent
    places = [package.parent / "guest" / "cantelop_guest", package.parent / "cantelop_guest"]
    for place in places:
        if (place / "init.sh").exists():
            return place
    raise ImageError("the guest's agent is missing", hint="install the project again")


async def build_initramfs(
    kernel: Path, interpreter: Path, python: str, work: Path, into: Path
) -> None:
    """Make the file `into` from a kernel entry and the agent. `work` is for what is not kept."""
    tree = work / "initramfs"
    stage(kernel, tree)
    await compile_tree(interpreter, python, tree / "cantelop", work)
    archive = work / "initramfs.cpio"
    with archive.open("wb") as stream:
        write_cpio(tree, stream)
    await run(["lz4", "-q", "-l", "-9", "-f", str(archive), str(into)], env=_ENV, deadline=120)


def stage(kernel: Path, tree: Path) -> None:
    """Lay the initramfs out below `tree`; which module lists it carries is told by `init.sh`."""
    for name in ("bin", "cantelop", "dev", "mod", "proc", "sys"):
        (tree / name).mkdir(parents=True)
    shutil.copyfile(kernel / "busybox", tree / "bin" / "busybox")
    (tree / "bin" / "busybox").chmod(0o755)
    for link in _LINKS:
        (tree / "bin" / link).symlink_to("busybox")
    for module in (kernel / "mod").iterdir():
        shutil.copyfile(module, tree / "mod" / module.name)
    facts = json.loads((kernel / "kernel.json").read_text())
    for kind, name in (("boot", "modules.list"), ("extra", "modules.extra")):
        (tree / name).write_text("".join(f"{module}\n" for module in facts[kind]))
    agent = agent_folder()
    copy_sources(agent, tree / "cantelop" / "cantelop_guest")
    copy_sources(Path(__file__).parent, tree / "cantelop" / "cantelop_kernels", SHARED)
    shutil.copyfile(agent / "init.sh", tree / "init")
    (tree / "init").chmod(0o755)


def copy_sources(folder: Path, into: Path, names: tuple[str, ...] | None = None) -> None:
    """Copy Python sources, all below `folder` or those named; no byte code of this host."""
    for source in sorted(folder.rglob("*.py")):
        relative = source.relative_to(folder)
        if names is None or str(relative) in names:
            target = into / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def write_cpio(tree: Path, out: IO[bytes]) -> None:
    """An archive of `tree` in the "newc" format, sorted, all of it root's and without times."""
    for number, path in enumerate(sorted(tree.rglob("*")), start=1):
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            data = bytes(path.readlink())
        else:
            data = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
        mode = 0o755 if stat.S_ISDIR(info.st_mode) or info.st_mode & 0o100 else 0o644
        kind = stat.S_IFMT(info.st_mode)
        out.write(cpio_entry(str(path.relative_to(tree)), kind | mode, data, number))
    out.write(cpio_entry("TRAILER!!!", 0, b"", 0))


def cpio_entry(name: str, mode: int, data: bytes, inode: int) -> bytes:
    """One member: a header of thirteen 8-digit hexadecimal fields, the name, the data.

    Format: Documentation/driver-api/early-userspace/buffer-format.rst of the kernel.
    """
    encoded = name.encode() + b"\0"
    links, size = (2 if stat.S_ISDIR(mode) else 1), len(data)
    fields = [inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, len(encoded), 0]
    entry = io.BytesIO()
    entry.write(b"070701" + b"".join(b"%08X" % field for field in fields) + encoded)
    entry.write(b"\0" * (-entry.tell() % 4))
    entry.write(data)
    entry.write(b"\0" * (-entry.tell() % 4))
    return entry.getvalue()
