"""The lab's host image: Debian's kernel, and a root with all that tests need; kept between runs.

Called by `python -m tests.lab image` (`make lab-image`). Made as guest images are; the root also
holds the real `firecracker` and `jailer`. What belongs to the project is not in it: that is packed
for every run (`project`), so a change of the project rebuilds nothing here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cantelop_kernels import image_recipe
from cantelop_kernels.errors import ImageError
from cantelop_kernels.image_apt import Mirror, host_mirror
from cantelop_kernels.image_build import KERNEL_FIELDS, ROOT_FIELDS, Progress, check_host
from cantelop_kernels.image_cache import Cache
from cantelop_kernels.image_initramfs import write_cpio
from cantelop_kernels.image_kernel import build_kernel
from cantelop_kernels.image_lock import locked
from cantelop_kernels.image_pyc import copy_interpreter
from cantelop_kernels.image_recipe import Recipe
from cantelop_kernels.image_root import RootBuilder, mkfs_argv
from cantelop_kernels.process import run
from tests.lab import firecracker

FOLDER = Path(__file__).parent
NAME = "lab-host"
KERNEL_VERSION, ROOT_VERSION = 1, 1
"""Raised when this module makes something else of the same recipe."""

_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


@dataclass(frozen=True, slots=True)
class LabImage:
    """Two entries of the cache, whole."""

    kernel: Path
    """vmlinux, busybox, mod/, kernel.json as `image_kernel` makes them; modules.erofs."""
    root: Path
    """root.erofs; interpreter/, a copy of its Python."""
    recipe: Recipe


def recipe() -> Recipe:
    return image_recipe.load(NAME, [FOLDER])


def find(state: Path) -> LabImage:
    """The image that `build` has made. Raises ImageError, with what to type, where it has not."""
    content = recipe()
    cache = Cache(state / "cache", NAME)
    kernel = cache.get("kernel", _kernel_key(content))
    root = cache.get("root", _root_key(content))
    if kernel is None or root is None:
        raise ImageError("the lab's image is not built", hint="make lab-image")
    return LabImage(kernel, root, content)


async def build(state: Path, progress: Progress) -> LabImage:
    """Build what is missing; idempotent. Needs root, apt and pip. Raises ImageError and others of
    `errors`, from the step that failed."""
    check_host()
    content = recipe()
    cache = Cache(state / "cache", NAME)
    async with locked(state / "cache" / f"{NAME}.lock", lambda: progress.line("waiting")):
        cache.sweep()
        builder = _Builder(content, cache, progress)
        await builder.kernel()
        await builder.root()
    return find(state)


class _Builder:
    def __init__(self, content: Recipe, cache: Cache, progress: Progress) -> None:
        self._recipe = content
        self._cache = cache
        self._progress = progress

    async def kernel(self) -> None:
        key = _kernel_key(self._recipe)
        if self._cache.get("kernel", key):
            return
        with (
            self._step("kernel"),
            self._cache.scratch() as work,
            self._cache.building("kernel", key) as into,
        ):
            mirror = await self._mirror()
            await build_kernel(self._recipe, mirror, work, into, self._progress.line)
            modules = work / "tree" / "usr" / "lib" / "modules"
            await run(mkfs_argv(into / "modules.erofs", modules), env=_ENV, deadline=300)

    async def root(self) -> None:
        key = _root_key(self._recipe)
        if self._cache.get("root", key):
            return
        with self._cache.scratch() as work, self._cache.building("root", key) as into:
            root = RootBuilder(self._recipe, work, self._progress.line)
            with self._step("root: Debian packages"):
                await root.debian(await self._mirror())
            with self._step("root: Python packages"):
                await root.python()
            with self._step("root: firecracker"):
                await firecracker.install(root.root / "usr" / "local" / "bin", work)
            with self._step("root: byte code and file system"):
                await root.settle()
                await root.compile()
                copy_interpreter(root.root, self._recipe.python, into / "interpreter")
                await root.pack(into)

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        self._progress.started(name)
        yield
        self._progress.finished(name, cached=False)

    async def _mirror(self) -> Mirror:
        return await host_mirror()


def _kernel_key(content: Recipe) -> str:
    return content.key(KERNEL_VERSION, *KERNEL_FIELDS)


def _root_key(content: Recipe) -> str:
    body = content.key(ROOT_VERSION, *ROOT_FIELDS) + firecracker.VERSION
    return hashlib.sha256(body.encode()).hexdigest()[:32]


async def build_initramfs(image: LabImage, work: Path, into: Path) -> None:
    """Made for every run, in a moment. `work` is for what is not kept."""
    tree = work / "initramfs"
    await asyncio.to_thread(_stage, image, tree)
    archive = work / "initramfs.cpio"
    with archive.open("wb") as stream:
        write_cpio(tree, stream)
    await run(["lz4", "-q", "-l", "-f", str(archive), str(into)], env=_ENV, deadline=60)


def _stage(image: LabImage, tree: Path) -> None:
    for name in ("bin", "dev", "proc"):
        (tree / name).mkdir(parents=True)
    shutil.copyfile(image.kernel / "busybox", tree / "bin" / "busybox")
    shutil.copytree(image.kernel / "mod", tree / "mod")
    boot = json.loads((image.kernel / "kernel.json").read_text())["boot"]
    (tree / "modules.list").write_text("".join(f"{module}\n" for module in boot))
    shutil.copyfile(FOLDER / NAME / "init.sh", tree / "init")
    for program in (tree / "bin" / "busybox", tree / "init"):
        program.chmod(0o755)
