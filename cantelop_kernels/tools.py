"""Host programs that the suite of this host may not have: fetched once, kept by digest.

Layer 2. `vhost-device-vsock` gives QEMU the same hybrid vsock that Firecracker has. It is a Debian
package of sid that needs only glibc 2.34 or newer, so its program runs on older releases too; it
is unpacked below `tools/` of the state folder and never installed.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from .errors import CantelopError, ImageError
from .image_apt import PrivateApt, host_mirror, unpack
from .image_lock import locked

VHOST_DEVICE_VSOCK = "vhost-device-vsock"


def find_vhost_device_vsock(state: Path) -> Path | None:
    """The program fetched before, if it is what was fetched; else one installed on the host."""
    link = state / "tools" / VHOST_DEVICE_VSOCK
    if link.is_symlink():
        found = link.resolve()
        if found.is_file() and _digest(found) == found.parent.name:
            return found
    installed = shutil.which(VHOST_DEVICE_VSOCK)
    return Path(installed) if installed else None


async def ensure_vhost_device_vsock(
    state: Path, on_line: Callable[[str], None] | None = None
) -> Path:
    """Find it, or fetch it (as root, with the network; seconds). Idempotent, safe to run at once.

    Raises ImageError where it cannot be had.
    """
    if found := find_vhost_device_vsock(state):
        return found
    try:
        async with workshop(state) as (tools, work):
            found = find_vhost_device_vsock(state)
            return found or await _fetch(tools, work, on_line)
    except (CantelopError, OSError) as error:
        why = error.message if isinstance(error, CantelopError) else str(error)
        hint = f"install Debian's package {VHOST_DEVICE_VSOCK}, or try again as root"
        raise ImageError(f"cannot fetch {VHOST_DEVICE_VSOCK}: {why}", hint=hint) from error


async def _fetch(tools: Path, work: Path, on_line: Callable[[str], None] | None) -> Path:
    apt = PrivateApt(work / "apt", (await host_mirror()).sources("sid"), on_line)
    await apt.update()
    await unpack(await apt.fetch(VHOST_DEVICE_VSOCK, work), work / "tree")
    program = work / "tree" / "usr" / "bin" / VHOST_DEVICE_VSOCK
    folder = tools / _digest(program)
    ready = work / "ready"
    ready.mkdir(mode=0o755)
    shutil.copyfile(program, ready / VHOST_DEVICE_VSOCK)
    (ready / VHOST_DEVICE_VSOCK).chmod(0o755)
    if folder.exists():  # broken, or it would have been found
        shutil.rmtree(folder)
    ready.rename(folder)
    point(tools / VHOST_DEVICE_VSOCK, Path(folder.name) / VHOST_DEVICE_VSOCK)
    return folder / VHOST_DEVICE_VSOCK


@asynccontextmanager
async def workshop(
    state: Path, on_wait: Callable[[], None] = lambda: None
) -> AsyncIterator[tuple[Path, Path]]:
    """The folder of tools, for one process at a time, and a temporary one in it.

    That one goes at the end, and what a process that was killed left goes too. `on_wait` as for
    `locked`. Raises OSError.
    """
    tools = state / "tools"
    tools.mkdir(mode=0o755, parents=True, exist_ok=True)
    async with locked(tools / ".lock", on_wait):
        for old in tools.glob("tmp-*"):
            shutil.rmtree(old)
        work = Path(tempfile.mkdtemp(prefix="tmp-", dir=tools))
        try:
            yield tools, work
        finally:
            await asyncio.to_thread(shutil.rmtree, work)


def point(link: Path, target: Path) -> None:
    """Make a symbolic link, or turn it to something else, in one step."""
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.rename(link)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
