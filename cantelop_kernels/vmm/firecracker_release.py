"""Which Firecracker this host has, and what is known against it.

Layer 3. Used by the choice of the VMM, by `setup-firecracker` and by `doctor`. Flaws are data here,
with where they are described; a version that is no release cannot be compared with them.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from cantelop_kernels import trust
from cantelop_kernels.errors import CantelopError, ToolError
from cantelop_kernels.process import run

NAMES = ("firecracker", "jailer")
SETUP = "cantelop setup-firecracker FILE --sha256 HEX"
_LINK = "firecracker"
_SAYS = re.compile(r"(?:Firecracker|Jailer) (v\S+)", re.IGNORECASE)
_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})(-[0-9A-Za-z.+-]{1,64})?")
_DEADLINE = 10.0
_ENV = {"LC_ALL": "C"}


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """`suffix` is empty for a release; `-dev`, or what git describes, for anything else."""

    major: int
    minor: int
    patch: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> Version:
        """Raises ValueError."""
        found = _VERSION.fullmatch(text)
        if found is None:
            raise ValueError(f"not a version: {text[:80]!r}")
        major, minor, patch, suffix = found.groups(default="")
        return cls(int(major), int(minor), int(patch), suffix)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}{self.suffix}"

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.major, self.minor, self.patch


RECOMMENDED = Version(1, 16, 2)
"""The first one without any of `FLAWS`."""

_Range = tuple[tuple[int, int, int], tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Flaw:
    """`affected` are ranges: the first version that has it, and the first that has it no more."""

    name: str
    what: str
    affected: tuple[_Range, ...]
    harmless: str = ""
    """Why it does not matter here; then it is told and keeps nothing from running."""

    def of(self, version: Version) -> bool:
        """Whether that version has it; one that is no release may come from before the fix."""
        return any(
            first <= version.numbers < fixed or (version.suffix and version.numbers == fixed)
            for first, fixed in self.affected
        )


DISCARD = Flaw(
    "CVE-2026-122192",
    "a guest may reach the VMM's own memory after a discard of guest memory has failed",
    (((0, 23, 0), (1, 16, 2)),),
)
"""CVE record of 2026-11-04. Guest memory is discarded for the balloon device and for virtio-mem."""

FLAWS = (
    DISCARD,
    Flaw(
        "CVE-2026-1386",
        "the jailer follows a symbolic link when it copies the program into the jail",
        (((0, 0, 0), (1, 13, 2)), ((1, 14, 0), (1, 14, 1))),
    ),
    Flaw(
        "vsock after a restore",
        "connections of the guest time out once a snapshot was restored (#5958)",
        (((1, 16, 0), (1, 16, 1)),),
    ),
    Flaw(
        "CVE-2026-5747",
        "a guest writes out of bounds by way of virtio-pci",
        (((1, 13, 0), (1, 14, 4)), ((1, 15, 0), (1, 15, 1))),
        harmless="--enable-pci is never used here",
    ),
    Flaw(
        "older than 1.12",
        "which is the oldest version that this was written for",
        (((0, 0, 0), (1, 12, 0)),),
    ),
)
"""AWS bulletin 2026-015, the CVE records, and the notes of Firecracker's releases."""


def flaws(version: Version) -> list[Flaw]:
    """What keeps that version from being used, unless it is allowed all the same."""
    found = [one for one in FLAWS if one.of(version) and not one.harmless]
    if version.suffix:
        found.append(Flaw("no release", f"nothing is known of {version}", ()))
    return found


def moot(version: Version) -> list[Flaw]:
    """What it has and does no harm here."""
    return [one for one in FLAWS if one.of(version) and one.harmless]


def told(found: list[Flaw]) -> str:
    """In one line."""
    return "; ".join(f"{one.name}: {one.what}" for one in found)


@dataclass(frozen=True, slots=True)
class Release:
    """Both programs of one release; nobody but root can change them."""

    firecracker: Path
    jailer: Path
    version: Version


def link(state: Path) -> Path:
    """What `setup-firecracker` turns to the release in use, which lies beside it."""
    return state / "tools" / _LINK


def binaries(state: Path) -> tuple[Path, Path] | None:
    """Firecracker and jailer: what was set up, else what is on the PATH; None without either."""
    if link(state).is_symlink():
        firecracker, jailer = ((link(state) / name).resolve() for name in NAMES)
        return (firecracker, jailer) if firecracker.is_file() and jailer.is_file() else None
    found = [shutil.which(name) for name in NAMES]
    return (Path(found[0]).resolve(), Path(found[1]).resolve()) if found[0] and found[1] else None


async def find(state: Path) -> Release | None:
    """What is installed, in whatever version; None where it is not (or not whole).

    Raises ConfigError where others than root could change it, ToolError where it does not run.
    """
    found = binaries(state)
    if found is None:
        return None
    for program in found:
        trust.require(program)
    return await examine(*found)


async def examine(firecracker: Path, jailer: Path) -> Release:
    """Ask both for their version. Raises ToolError where they are not two of one release."""
    versions = [await _version(program) for program in (firecracker, jailer)]
    if versions[0] != versions[1]:
        raise ToolError(
            f"firecracker is version {versions[0]}, but its jailer {versions[1]}",
            hint=f"install both from one release: {SETUP}",
        )
    return Release(firecracker, jailer, versions[0])


async def _version(program: Path) -> Version:
    try:
        said = (await run([str(program), "--version"], env=_ENV, deadline=_DEADLINE)).stdout
        found = _SAYS.match(said)
        return Version.parse(found[1] if found else said)
    except (CantelopError, ValueError) as error:
        why = error.message if isinstance(error, CantelopError) else str(error)
        raise ToolError(
            f"{program} does not tell its version: {why}",
            hint=f"install a release for x86_64: {SETUP}",
        ) from error
