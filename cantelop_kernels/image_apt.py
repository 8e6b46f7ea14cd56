"""Debian packages without touching the host's apt: a private state folder, any suite.

Layer 2, used by the image builder and by `tools`. The host's own apt settings (proxy,
certificates) stay in force; its sources, lists and installed packages do not matter.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import ImageError
from .process import CommandFailed, run

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

_FORMAT = "$(SITE)|$(RELEASE)|$(LABEL)"
_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}


@dataclass(frozen=True, slots=True)
class Mirror:
    """Where this host gets Debian from: the archive, and the security archive if it has one."""

    main: str
    security: str | None

    def sources(self, suite: str) -> list[str]:
        """The lines of a sources.list for a suite, its updates and its security updates."""
        signed = f"[signed-by={KEYRING}]"
        lines = [f"deb {signed} {self.main} {suite} main"]
        if suite != "sid":
            lines.append(f"deb {signed} {self.main} {suite}-updates main")
            if self.security is not None:
                lines.append(f"deb {signed} {self.security} {suite}-security main")
        return lines


def parse_mirror(targets: str, codename: str) -> Mirror | None:
    """The Debian archive among what `apt-get indextargets` prints in the format used here.

    Labels are known only once the host's lists were fetched; before, the host's own `codename`
    tells the archive from other sources.
    """
    main = security = None
    for line in targets.splitlines():
        site, release, label = line.split("|")
        if label == "Debian-Security" or (not label and release == f"{codename}-security"):
            security = security or site
        elif label == "Debian" or (not label and release == codename):
            main = main or site
    return None if main is None else Mirror(main, security)


def parse_codename(os_release: str) -> str:
    """VERSION_CODENAME of an os-release file, or nothing (sid has none)."""
    found = re.search(r'^VERSION_CODENAME="?([\w-]+)"?$', os_release, re.MULTILINE)
    return found[1] if found else ""


async def host_mirror() -> Mirror:
    """The Debian archive the host's apt is set up for. Raises ImageError where there is none."""
    done = await run(
        ["apt-get", "indextargets", "--format", _FORMAT, "Created-By: Packages"],
        env=_ENV,
        deadline=30,
    )
    os_release = Path("/etc/os-release")
    codename = parse_codename(os_release.read_text() if os_release.exists() else "")
    mirror = parse_mirror(done.stdout, codename)
    if mirror is None:
        raise ImageError(
            "the host's apt knows no Debian archive to build from",
            hint="add a Debian source to /etc/apt/sources.list.d and run `apt-get update`",
        )
    if not KEYRING.exists():
        raise ImageError(
            f"the Debian archive's keys are missing ({KEYRING})",
            hint="apt-get install debian-archive-keyring",
        )
    return mirror


class PrivateApt:
    """apt with a state of its own under `root` (a folder of the caller's, who deletes it).

    Call `update` first. `on_line` gets what apt prints.
    """

    def __init__(
        self, root: Path, sources: list[str], on_line: Callable[[str], None] | None = None
    ) -> None:
        self._root = root
        self._on_line = on_line
        for folder in ("lists/partial", "cache/archives/partial"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / "status").touch()
        (root / "sources.list").write_text("\n".join(sources) + "\n")

    def options(self) -> list[str]:
        """The settings that keep apt inside `root`."""
        settings = {
            "Dir::Etc::SourceList": self._root / "sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::Etc::Preferences": "/dev/null",
            "Dir::Etc::PreferencesParts": "/dev/null",
            "Dir::State": self._root,
            "Dir::State::Status": self._root / "status",
            "Dir::Cache": self._root / "cache",
            "APT::Sandbox::User": "root",
            "APT::Architecture": "amd64",
            "APT::Default-Release": "",
            "Acquire::Languages": "none",
        }
        return [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]

    async def update(self) -> None:
        """Fetch the package lists; a list that cannot be fetched is an error."""
        await self._apt(["apt-get", *self.options(), "-qq", "--error-on=any", "update"])

    async def depends(self, package: str, pattern: str) -> str:
        """The first dependency of a package whose name matches; ImageError where none does."""
        try:
            out = await self._apt(["apt-cache", *self.options(), "depends", package])
        except CommandFailed as error:
            raise ImageError(f"package {package}: {error.message}") from error
        for name in re.findall(r"^\s*\|?Depends: (\S+)$", out, re.MULTILINE):
            if re.fullmatch(pattern, name):
                return str(name)
        raise ImageError(f"{package} depends on no package like {pattern}")

    async def fetch(self, package: str, into: Path) -> Path:
        """Download one package's .deb, checked by apt against the archive's signature."""
        folder = into / f"deb-{package}"
        folder.mkdir()
        await self._apt(["apt-get", *self.options(), "-q", "download", package], cwd=folder)
        (deb,) = folder.glob("*.deb")
        return deb

    async def _apt(self, argv: list[str], cwd: Path | None = None) -> str:
        done = await run(argv, env=_ENV, cwd=cwd, deadline=900, on_line=self._on_line)
        return done.stdout


async def unpack(deb: Path, into: Path) -> dict[str, str]:
    """Unpack a .deb without installing it; its name and version."""
    await run(["dpkg", "-x", str(deb), str(into)], env=_ENV, deadline=300)
    fields = "${Package}\n${Version}\n"
    done = await run(["dpkg-deb", "-W", f"--showformat={fields}", str(deb)], env=_ENV, deadline=60)
    await asyncio.to_thread(deb.unlink)
    name, version = done.stdout.split()
    return {"name": name, "version": version}
