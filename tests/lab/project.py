"""The disks of one run: the project as it is now, installed, with its tests; and the state folder.

Called for every start of the lab, in a folder that goes away with the run. The project is packed
into a wheel and installed from that, so its packaging is tested as well; byte code is made for the
lab's Python, which spares the emulated machine the compiler.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.sources import WheelFile

from cantelop_kernels.image import ImageStore
from cantelop_kernels.image_pyc import compile_tree
from cantelop_kernels.image_root import mkfs_argv
from cantelop_kernels.process import run
from tests.lab.image import FOLDER, NAME, LabImage

REPOSITORY = Path(__file__).parents[2]
CHECKOUT = ("pyproject.toml", "README.md", "guest", "notebooks", "share", "tests")
"""What the tests read of the source tree; the packages they import are the installed ones, except
that the fake VMM has the agent in a folder of its own."""

GUEST_IMAGE = "python3"
SCRATCH_MIB = 16384
"""Sparse: it takes what is written to it."""

_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


async def pack_project(image: LabImage, work: Path, into: Path) -> None:
    """Make the erofs `into`, which is laid over the lab's root. Raises CommandFailed."""
    tree = work / "project"
    lab = tree / "lab"
    lab.mkdir(parents=True)
    await _install(image.recipe.python, work, tree)
    for name in CHECKOUT:
        _copy(REPOSITORY / name, lab / "checkout" / name)
    await compile_tree(image.root / "interpreter", image.recipe.python, tree, work)
    shutil.copyfile(FOLDER / NAME / "start.sh", lab / "start.sh")
    await run(mkfs_argv(into, tree), env=_ENV, deadline=120)


async def _install(python: str, work: Path, tree: Path) -> None:
    """What `pip install` of the wheel would do in the lab, at the speed of this machine."""
    argv = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    await run([*argv, "--directory", str(work)], cwd=REPOSITORY, deadline=120)
    (wheel,) = work.glob("*.whl")
    local = "/usr/local"
    packages = f"{local}/lib/python{python}/dist-packages"
    paths = {"purelib": packages, "platlib": packages, "scripts": f"{local}/bin", "data": local}
    destination = SchemeDictionaryDestination(
        {**paths, "headers": f"{local}/include"},
        interpreter="/usr/bin/python3",
        script_kind="posix",
        destdir=str(tree),
    )
    with WheelFile.open(wheel) as source:
        install(source, destination, additional_metadata={"INSTALLER": b"tests.lab"})


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
    else:
        shutil.copyfile(source, target)


async def make_scratch(state: Path, work: Path, into: Path) -> None:
    """Make the ext4 `into`; below `state/` it holds the guest image. Raises ImageError without one.

    mke2fs fills it, so that nothing has to be copied under emulation, and jails on it can have hard
    links to the image.
    """
    guest = ImageStore(state).resolve(GUEST_IMAGE)
    images = work / "scratch" / "state" / "images"
    shutil.copytree(guest.path, images / "store" / guest.digest, copy_function=_link)
    (images / "names").mkdir()
    (images / "names" / GUEST_IMAGE).symlink_to(Path("..") / "store" / guest.digest)
    for folder in (work / "scratch", *(work / "scratch").rglob("*/")):
        folder.chmod(0o755)
    with into.open("wb") as stream:
        await asyncio.to_thread(stream.truncate, SCRATCH_MIB << 20)
    await run(mkfs_ext4_argv(work / "scratch", into), env=_ENV, deadline=120)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def mkfs_ext4_argv(tree: Path, into: Path) -> list[str]:
    """mke2fs(8): no journal, for a disk that nobody uses twice."""
    return [
        *("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal"),
        *("-E", "lazy_itable_init=1,nodiscard", "-d", str(tree), str(into)),
    ]
