"""The image store: what a microVM boots from, by name or digest.

Layer 2. `images/store/<digest>/` holds one image, complete from the moment it appears there;
`images/names/<name>` is a link to it. The builder publishes, the daemon resolves and holds, the
command line lists and removes. Files are root's and readable by all: VMMs run without privilege.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from .errors import ImageError
from .image_model import (
    DIGEST,
    MANIFEST,
    NAME,
    PARTS,
    SCHEMA,
    Image,
    check_name,
    corrupt,
    digest_of,
    rebuild_hint,
    sha256,
    shown,
)

__all__ = ["Image", "ImageStore", "VerifiedImages"]


class ImageStore:
    """The images below one state folder. Keeps nothing in memory; many may use one folder."""

    def __init__(self, state: Path) -> None:
        self._store = state / "images" / "store"
        self._names = state / "images" / "names"

    def __repr__(self) -> str:
        return f"<ImageStore {self._store.parent}>"

    def resolve(self, name_or_digest: str, *, verify: bool = False) -> Image:
        """The image of that name, digest, or unique beginning of a digest (8 digits or more).

        Sizes are always checked against the manifest; `verify` reads and hashes every file (about
        a second). Raises ImageError, with what to type, where it is missing or corrupt.
        """
        path = self._find(name_or_digest)
        if path is None:
            raise ImageError(
                f"no image {name_or_digest!r}",
                hint=f"build it: cantelop image build {shown(name_or_digest)}",
            )
        image = self._load(path, name_or_digest)
        self._check(image, verify)
        return image

    @contextmanager
    def hold(self, image: Image) -> Iterator[None]:
        """Keep an image from being removed. Raises ImageError where it is gone already."""
        with self._open_manifest(image) as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # never wait: the daemon's loop would wait with us
                raise ImageError(
                    f"image {image.name!r} is locked by another process", hint="try again"
                ) from None
            if os.fstat(stream.fileno()).st_nlink == 0:
                raise ImageError(f"image {image.name!r} was removed", hint=rebuild_hint(image.name))
            yield

    def in_use(self, image: Image) -> bool:
        """Does anybody hold it?"""
        with self._open_manifest(image) as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    def ls(self) -> list[Image]:
        """All images whose manifest can be read, by name: one with two names is there twice, one
        that lost its name to a newer build has an empty one."""
        names = self._named()
        found = []
        for path in sorted(self._store.glob("[0-9a-f]*")):
            for name in sorted(names.get(path.name, [""])):
                with suppress(ImageError):
                    found.append(self._load(path, name))
        return sorted(found, key=lambda image: (image.name == "", image.name, image.digest))

    def rm(self, name_or_digest: str) -> None:
        """Remove a name and, with its last name, the image. Corrupt ones can be removed too.

        Raises ImageError where there is none, and where a sandbox still uses it.
        """
        path = self._find(name_or_digest)
        if path is None:
            raise ImageError(f"no image {name_or_digest!r}", hint="`cantelop image ls` lists them")
        names = self._named().get(path.name, [])
        gone = [name_or_digest] if name_or_digest in names else names
        if set(names) == set(gone):
            with self._exclusive(path, name_or_digest):
                self._drop(gone, path)
        else:
            self._drop(gone, None)

    def publish(self, name: str, parts: Path, manifest: dict[str, Any]) -> Image:
        """Take over a complete folder on this file system and give it a name, each by one rename.

        `parts` holds `PARTS`; the manifest's `files` must be true of them. Called by the builder
        under its lock. An image that is there already, whole, is only named.
        """
        digest = digest_of(manifest["files"])
        (parts / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        for path in parts.iterdir():
            path.chmod(0o644)
        parts.chmod(0o755)
        self.prepare()
        target = self._store / digest
        if not self._is_whole(target, parts):
            self._replace(parts, target)
        self._link(check_name(name), digest)
        return self.resolve(name)

    def prepare(self) -> None:
        """Make the store's folders, for all to read."""
        for folder in (self._store.parent, self._store, self._names):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)

    def prune(self) -> list[str]:
        """Remove images that have no name any more and that nobody uses; their digests."""
        removed = []
        for image in self.ls():
            if not image.name and not self.in_use(image):
                with suppress(ImageError):
                    self.rm(image.digest)
                    removed.append(image.digest)
        return removed

    def _find(self, wanted: str) -> Path | None:
        if NAME.fullmatch(wanted) and (self._names / wanted).is_symlink():
            target = self._store / (self._names / wanted).readlink().name
            return target if target.is_dir() else None
        if DIGEST.fullmatch(wanted):
            found = list(self._store.glob(f"{wanted}*"))
            return found[0] if len(found) == 1 else None
        return None

    def _named(self) -> dict[str, list[str]]:
        """Names by digest."""
        names: dict[str, list[str]] = {}
        if self._names.is_dir():
            for link in self._names.iterdir():
                if link.is_symlink() and NAME.fullmatch(link.name):
                    names.setdefault(link.readlink().name, []).append(link.name)
        return names

    def _load(self, path: Path, name: str) -> Image:
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            files = manifest["files"]
            if manifest["schema"] != SCHEMA or digest_of(files) != path.name:
                raise ValueError("its manifest is not of this image")
            return Image(name, path.name, path, manifest)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise corrupt(name or path.name, f"{MANIFEST}: {error}") from error

    def _check(self, image: Image, verify: bool) -> None:
        for part in PARTS:
            expected = image.manifest["files"][part]
            try:
                size = (image.path / part).stat().st_size
                digest = sha256(image.path / part) if verify else expected["sha256"]
            except OSError as error:
                raise corrupt(image.name, f"{part}: {error.strerror}") from error
            if size != expected["size"]:
                raise corrupt(image.name, f"{part} has {size} bytes, not {expected['size']}")
            if digest != expected["sha256"]:
                raise corrupt(image.name, f"{part} is not what was built")

    def _is_whole(self, path: Path, parts: Path) -> bool:
        """Is the image there already, each part the very file that is to be published, or equal?"""
        try:
            image = self._load(path, path.name)
            self._check(image, verify=False)
        except ImageError:
            return False
        noted = image.manifest["files"]
        return all(
            (path / part).samefile(parts / part) or sha256(path / part) == noted[part]["sha256"]
            for part in PARTS
        )

    def _replace(self, parts: Path, target: Path) -> None:
        if target.exists():
            broken = Path(tempfile.mkdtemp(prefix=".broken-", dir=self._store))
            target.rename(broken / "image")
            shutil.rmtree(broken)
        parts.rename(target)

    def _link(self, name: str, digest: str) -> None:
        fresh = self._names / f".{name}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(Path("..") / "store" / digest)
        fresh.rename(self._names / name)

    def _drop(self, names: list[str], path: Path | None) -> None:
        """Names first: a name must never point to half an image."""
        for name in names:
            (self._names / name).unlink(missing_ok=True)
        if path is not None:
            going = path.with_name(f".gone-{path.name}")
            path.rename(going)
            shutil.rmtree(going)

    @contextmanager
    def _exclusive(self, path: Path, name: str) -> Iterator[None]:
        try:
            stream = (path / MANIFEST).open("rb")
        except OSError:
            yield  # nobody can hold an image that has no manifest
            return
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ImageError(
                    f"image {name!r} is in use by a sandbox", hint="end it first: cantelop ps"
                ) from None
            yield

    @staticmethod
    def _open_manifest(image: Image) -> IO[bytes]:
        try:
            return (image.path / MANIFEST).open("rb")
        except OSError as error:
            raise ImageError(
                f"image {image.name!r} is gone: {error.strerror}", hint=rebuild_hint(image.name)
            ) from error


class VerifiedImages:
    """Resolves images and hashes each once, and again only when a file of it has changed.

    For the daemon, which starts many sandboxes from one image. May be called from threads.
    """

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._seen: set[tuple[tuple[int, int, int], ...]] = set()

    def resolve(self, name_or_digest: str) -> Image:
        """As `ImageStore.resolve` with `verify`."""
        image = self._store.resolve(name_or_digest)
        try:
            stats = [(image.path / part).stat() for part in PARTS]
        except FileNotFoundError:  # removed just now
            raise corrupt(image.name, "a file of it is missing") from None
        known = tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)
        if known not in self._seen:
            self._store.resolve(name_or_digest, verify=True)
            self._seen.add(known)
        return image
