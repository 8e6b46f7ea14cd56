"""Parts of images kept between builds, keyed by what they are made from.

Layer 2, used by the image builder under its lock. An entry is a folder with a sidecar that lists
every file's size and SHA-256; it appears complete or not at all, and one that does not match its
sidecar is deleted and built again, never used.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .image_model import sha256

SIDECAR = "entry.json"


def describe(folder: Path) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of every file below a folder, by relative path, sorted."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": sha256(path)}
        for path in paths
    }


def sync(folder: Path) -> None:
    """Bring a folder and the files in it to the disk, so that a rename can publish them."""
    for path in [*(p for p in folder.rglob("*") if p.is_file()), folder]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class Cache:
    """Entries `<part>-<name>-<key>` below one folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, part: str, key: str) -> Path | None:
        """The entry, verified whole; None where it is missing or was broken (then it is gone)."""
        entry = self._entry(part, key)
        if not entry.is_dir():
            return None
        if self._is_whole(entry):
            return entry
        shutil.rmtree(entry)
        return None

    @contextmanager
    def building(self, part: str, key: str) -> Iterator[Path]:
        """A folder to build an entry in: published on success, with older ones of the same part
        deleted; deleted itself on any failure."""
        with self.scratch() as scratch:
            work = scratch / "entry"
            work.mkdir()
            yield work
            files = describe(work)
            (work / SIDECAR).write_text(json.dumps({"files": files}, indent=1))
            sync(work)
            if self._entry(part, key).exists():
                shutil.rmtree(self._entry(part, key))
            work.rename(self._entry(part, key))
        for old in self._folder.glob(f"{part}-{self._name}-{'?' * len(key)}"):
            if old.name != self._entry(part, key).name:
                shutil.rmtree(old)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A temporary folder on the cache's file system, deleted at the end whatever happens."""
        folder = Path(tempfile.mkdtemp(prefix=f"tmp-{self._name}-", dir=self._folder))
        try:
            folder.chmod(0o755)  # a user inside a new root must be able to walk to it
            yield folder
        finally:
            shutil.rmtree(folder)

    def sweep(self) -> None:
        """Delete what a build that was killed left. Only under the builder's lock."""
        for path in self._folder.glob(f"tmp-{self._name}-{'?' * 8}"):  # as mkdtemp names them
            shutil.rmtree(path)

    def _entry(self, part: str, key: str) -> Path:
        return self._folder / f"{part}-{self._name}-{key}"

    @staticmethod
    def _is_whole(entry: Path) -> bool:
        try:
            noted = json.loads((entry / SIDECAR).read_text())["files"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        found = describe(entry)
        found.pop(SIDECAR, None)
        return bool(noted == found)
