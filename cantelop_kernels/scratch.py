"""The writable disk of a sandbox: sparse, capped in size, gone with it.

Layer 2. ext4 without journal or checksums: nothing on it outlives the VM, so nothing has to survive
a crash, and the guest saves the work.
"""

from __future__ import annotations

import os
from pathlib import Path

from cantelop_kernels.process import run

_MKFS_DEADLINE = 30.0


def mkfs_command(path: Path) -> list[str]:
    """mke2fs(8): lazy tables and few inodes keep a 4 GiB disk at 2 MB and 10 ms."""
    features = "^has_journal,^metadata_csum,uninit_bg"
    return [
        *("mkfs.ext4", "-q", "-F", "-m", "0", "-i", "32768", "-O", features),
        *("-E", "lazy_itable_init=1,nodiscard", str(path)),
    ]


async def make(path: Path, mib: int, uid: int) -> Path:
    """Make the disk for `uid` alone. The folder it is in takes it away again.

    Raises OSError (disk full) and `process.CommandFailed`.
    """
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.truncate(fd, mib << 20)
        await run(mkfs_command(path), deadline=_MKFS_DEADLINE)
        os.fchown(fd, uid, uid)
    finally:
        os.close(fd)
    return path
