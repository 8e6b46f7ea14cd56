"""`build`: from a recipe to a published image, in named steps, each safe to repeat.

Layer 2, called by the command line as root. The kernel and the root are cached, keyed by what the
recipe says of them; the initramfs is made anew each time, so a changed agent costs seconds. One
build of a recipe runs at a time; a second waits, and then finds everything done. Whatever fails,
nothing is left behind, and the error names the step.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from .errors import CantelopError, ImageError
from .image import Image, ImageStore
from .image_apt import Mirror, host_mirror
from .image_cache import SIDECAR, Cache
from .image_initramfs import build_initramfs
from .image_kernel import build_kernel
from .image_lock import locked
from .image_model import PARTS, SCHEMA, digest_of, sha256
from .image_pyc import copy_interpreter
from .image_recipe import Recipe, load
from .image_root import RootBuilder
from .process import CommandFailed

KERNEL_VERSION, ROOT_VERSION = 2, 5
"""Raised when the builder makes something else of the same recipe: that cache starts anew."""

HOST_TOOLS = {
    "apt-get": "apt",
    "chroot": "coreutils",
    "depmod": "kmod",
    "dpkg": "dpkg",
    "flock": "util-linux",
    "lz4": "lz4",
    "mkfs.erofs": "erofs-utils",
    "mmdebstrap": "mmdebstrap",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "zstd": "zstd",
}
"""What a build calls, and the Debian package it is in."""

KERNEL_FIELDS = ("suite", "architecture", "kernel", "busybox", "boot_modules", "extra_modules")
ROOT_FIELDS = ("suite", "architecture", "python", "user", "packages", "requirements")

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Progress(Protocol):
    """What shows a build to somebody. Calls come in order, from the event loop's thread."""

    def started(self, step: str) -> None: ...
    def finished(self, step: str, *, cached: bool) -> None: ...
    def line(self, text: str) -> None: ...


class Silent:
    """A progress nobody watches."""

    def started(self, step: str) -> None: ...
    def finished(self, step: str, *, cached: bool) -> None: ...
    def line(self, text: str) -> None: ...


async def build(
    state: Path,
    recipe: str = "python3",
    *,
    progress: Progress | None = None,
    refresh: bool = False,
    folders: list[Path] | None = None,
) -> Image:
    """Build an image, or find that it is built, and return it. Idempotent.

    `refresh` builds kernel and root anew even when they are cached, to get newer Debian packages.
    `folders` are where recipes are looked for. Raises ImageError (ConfigError for a bad recipe).
    """
    content = load(recipe, folders)
    check_host()
    builder = _Builder(state, content, progress or Silent())
    try:
        return await builder.run(refresh)
    except OSError as error:
        raise builder.explain(error) from error


def check_host() -> None:
    """Raise ImageError unless this process is root and the host has the tools."""
    if os.geteuid() != 0:
        raise ImageError("building an image needs root", hint="run it with sudo")
    missing = [tool for tool in HOST_TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        hint = f"apt-get install {' '.join(sorted({HOST_TOOLS[tool] for tool in missing}))}"
        raise ImageError(f"tools that a build needs are missing: {', '.join(missing)}", hint=hint)


class _Builder:
    """One build. `_step` is the name of the step that is running, for error messages."""

    def __init__(self, state: Path, recipe: Recipe, progress: Progress) -> None:
        self._recipe = recipe
        self._progress = progress
        self._state = state
        self._store = ImageStore(state)
        self._step = "prepare"
        self._mirror: Mirror | None = None

    async def run(self, refresh: bool) -> Image:
        self._store.prepare()
        self._cache = Cache(self._state / "cache", self._recipe.name)
        async with locked(self._state / "cache" / f"{self._recipe.name}.lock", self._waiting):
            self._cache.sweep()
            kernel = await self._kernel(refresh)
            root = await self._root(refresh)
            with self._cache.scratch() as work:
                initramfs = await self._initramfs(kernel, root, work)
                return await self._publish(kernel, root, initramfs, work)

    def _waiting(self) -> None:
        self._progress.line("another build of this image is running; waiting for it")

    @contextmanager
    def _named(self, step: str, *, cached: bool = False) -> Iterator[None]:
        self._step = step
        self._progress.started(step)
        try:
            yield
        except (CantelopError, OSError) as error:
            raise self.explain(error) from error
        self._progress.finished(step, cached=cached)

    def explain(self, error: CantelopError | OSError) -> ImageError:
        """The same failure, once, as an ImageError that names the step and says what to do."""
        prefix = f"building image {self._recipe.name!r} failed at step {self._step!r}"
        if _is_full(error, self._state):
            hint = f"free some 3 GB on the disk of {self._state}, or set CANTELOP_STATE elsewhere"
            return ImageError(f"{prefix}: the disk is full", hint=hint, step=self._step)
        if isinstance(error, OSError):
            return ImageError(f"{prefix}: {error}", step=self._step)
        hint = error.hint or "try again; if it was the network, what was done before is kept"
        return ImageError(
            f"{prefix}: {error.message}", hint=hint, **error.details | {"step": self._step}
        )

    async def _kernel(self, refresh: bool) -> Path:
        key = self._recipe.key(KERNEL_VERSION, *KERNEL_FIELDS)
        found = None if refresh else await asyncio.to_thread(self._cache.get, "kernel", key)
        with self._named("kernel", cached=found is not None):
            if found is None:
                with self._cache.scratch() as work, self._cache.building("kernel", key) as into:
                    line = self._progress.line
                    await build_kernel(self._recipe, await self._get_mirror(), work, into, line)
                found = self._cache.get("kernel", key)
            return _there(found)

    async def _root(self, refresh: bool) -> Path:
        key = self._recipe.key(ROOT_VERSION, *ROOT_FIELDS)
        found = None if refresh else await asyncio.to_thread(self._cache.get, "root", key)
        if found is not None:
            with self._named("root", cached=True):
                return found
        with self._cache.scratch() as work, self._cache.building("root", key) as into:
            root = RootBuilder(self._recipe, work, self._progress.line)
            with self._named("root: Debian packages"):
                await root.debian(await self._get_mirror())
            with self._named("root: Python packages"):
                await root.python()
            with self._named("root: user and byte code"):
                await root.settle()
                await root.compile()
            with self._named("root: file system"):
                copy_interpreter(root.root, self._recipe.python, into / "interpreter")
                await root.pack(into)
        return _there(self._cache.get("root", key))

    async def _initramfs(self, kernel: Path, root: Path, work: Path) -> Path:
        with self._named("initramfs"):
            target = work / "parts" / "initramfs"
            target.parent.mkdir()
            interpreter = root / "interpreter"
            await build_initramfs(kernel, interpreter, self._recipe.python, work, target)
            return target

    async def _publish(self, kernel: Path, root: Path, initramfs: Path, work: Path) -> Image:
        with self._named("publish"):
            parts = initramfs.parent
            _link(kernel / "vmlinux", parts)
            _link(kernel / "vmlinuz", parts)
            _link(root / "root.erofs", parts)
            manifest = self._manifest(kernel, root, initramfs)
            image = self._store.publish(self._recipe.name, parts, manifest)
            for digest in self._store.prune():
                self._progress.line(f"removed the image it replaces, {digest[:12]}")
            return image

    def _manifest(self, kernel: Path, root: Path, initramfs: Path) -> dict[str, Any]:
        noted = _sidecar(kernel) | _sidecar(root)
        noted["initramfs"] = {"size": initramfs.stat().st_size, "sha256": sha256(initramfs)}
        files = {part: noted[part] for part in PARTS}
        facts = json.loads((kernel / "kernel.json").read_text())
        return {
            "schema": SCHEMA,
            "recipe": self._recipe.name,
            "digest": digest_of(files),
            "files": files,
            "suite": self._recipe.suite,
            "architecture": self._recipe.architecture,
            "python": self._recipe.python,
            "user": self._recipe.user,
            "kernel": facts,
            "packages": json.loads((root / "packages.json").read_text()),
        }

    async def _get_mirror(self) -> Mirror:
        if self._mirror is None:
            self._mirror = await host_mirror()
        return self._mirror


def _sidecar(entry: Path) -> dict[str, Any]:
    files: dict[str, Any] = json.loads((entry / SIDECAR).read_text())["files"]
    return files


def _there(found: Path | None) -> Path:
    if found is None:
        raise ImageError("what was just built cannot be read back", hint="check the disk")
    return found


def _link(source: Path, folder: Path) -> None:
    """One file for the cache and the store, where the file system has hard links."""
    try:
        (folder / source.name).hardlink_to(source)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, folder / source.name)


def _is_full(error: CantelopError | OSError, state: Path) -> bool:
    """Not every program says so, so the disk itself is asked too."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    said = error.stderr_tail if isinstance(error, CommandFailed) else error.message
    if "No space left on device" in said:
        return True
    with suppress(OSError):
        return shutil.disk_usage(state).free < 1 << 20
    return False
