"""What an image is: its parts, its digest, its names, and what to say when it is not whole.

Layer 2, used by the store, the caches and the recipes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ImageError

SCHEMA = 1
MANIFEST = "manifest.json"
DIGEST = re.compile(r"[0-9a-f]{8,64}")
"""A digest, or enough of it to be typed."""

NAME = re.compile(r"[a-z0-9][a-z0-9.+-]{0,62}")
PARTS = ("initramfs", "root.erofs", "vmlinux", "vmlinuz")


@dataclass(frozen=True, slots=True)
class Image:
    """One image, found whole. `name` is what it was asked for by."""

    name: str
    digest: str
    path: Path
    manifest: dict[str, Any]

    @property
    def vmlinux(self) -> Path:
        """Uncompressed ELF: QEMU boots it by PVH, Firecracker directly."""
        return self.path / "vmlinux"

    @property
    def vmlinuz(self) -> Path:
        return self.path / "vmlinuz"

    @property
    def initramfs(self) -> Path:
        return self.path / "initramfs"

    @property
    def root(self) -> Path:
        """erofs, to be attached read-only."""
        return self.path / "root.erofs"

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(part["size"] for part in self.manifest["files"].values())


def check_name(name: str) -> str:
    """The name itself, if it may name an image (it becomes a file name); else ImageError."""
    if not NAME.fullmatch(name):
        raise ImageError(
            f"not an image name: {name[:80]!r}",
            hint="lower-case letters, digits, dots, plus and minus signs, at most 63",
        )
    return name


def digest_of(files: Mapping[str, Mapping[str, Any]]) -> str:
    """The digest of an image: of its parts' digests."""
    lines = [f"{files[part]['sha256']} {part}\n" for part in PARTS]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def shown(wanted: str) -> str:
    """The name to put into a command that the user may type: a digest cannot be built."""
    return wanted if NAME.fullmatch(wanted) and not DIGEST.fullmatch(wanted) else "python3"


def rebuild_hint(name: str) -> str:
    """What to type to have that image (again)."""
    return f"cantelop image build {shown(name)}"


def corrupt(name: str, why: str) -> ImageError:
    """The error for an image that is not what its manifest says."""
    return ImageError(
        f"image {name!r} is corrupt: {why}", hint=f"build again: {rebuild_hint(name)}"
    )
