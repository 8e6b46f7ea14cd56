"""The guest's read-only root: Debian, the pinned Python packages, one user, as one erofs file.

Layer 2, used by the image builder. Every program that works on the new root runs in a pid and mount
namespace that ends with this process, so that neither a crash nor a SIGKILL leaves a mount or a
process behind; those that run inside it have no network either.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import image_packages
from .image_apt import Mirror
from .image_recipe import Recipe
from .process import CommandFailed, run

UID = 1000
EPOCH = "1767225600"
"""Seconds: the time stamp of every file of a root, so that equal content gives equal images."""

UUID = "63616e74-656c-6f70-8000-000000000001"
_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # else matplotlib's font list comes in another order each time
    "SOURCE_DATE_EPOCH": EPOCH,
}
_DEADLINE = 1800.0
"""Seconds for one program; the slowest is mmdebstrap on a slow network."""

_ALONE = ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child", "--pid"]
_ALONE += ["--mount-proc"]

_DPKG_OPTIONS = [
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/lintian/*",
]
_WARM = (
    "import matplotlib.font_manager",
    f"import os, time; time.time = lambda: {EPOCH}.0; os.path.getmtime = lambda _: {EPOCH}.0",
    "import jedi; jedi.Interpreter('zi', [{}]).complete(1, 2)",
)
"""What matplotlib and jedi (completion) would otherwise work out in every new sandbox. jedi notes
times in its cache: those that all files of the image get, so that equal inputs give equal roots."""

_REMOVED = ["var/lib/apt/lists", "var/cache/apt", "var/cache/debconf", "var/log", "tmp", "wheels"]


class RootBuilder:
    """Builds one root in `work`; call the methods in the order they are written in."""

    def __init__(self, recipe: Recipe, work: Path, on_line: Callable[[str], None]) -> None:
        self._recipe = recipe
        self._work = work
        self._on_line = on_line
        self.root = work / "root"

    async def debian(self, mirror: Mirror) -> None:
        """The minimal system and the recipe's packages."""
        argv = mmdebstrap_argv(self._recipe, mirror, self.root)
        await self._alone([], argv)
        for marker in self.root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()  # plain `pip install` is what this machine is for

    async def python(self) -> None:
        """The pinned packages, downloaded by the host's pip, installed by the guest's."""
        wheels = self.root / "wheels"
        wheels.mkdir()
        requirements = wheels / "requirements.txt"
        requirements.write_text(self._recipe.requirements)
        argv = pip_download_argv(self._recipe, requirements, wheels)
        await run(argv, env=None, deadline=1200, on_line=self._on_line)
        await self._inside(pip_install_argv())
        await self._inside(["python3", "-m", "pip", "check"])

    async def settle(self) -> None:
        """The user, the names, and what a first use would otherwise have to make."""
        user = self._recipe.user
        await self._inside(
            ["useradd", "--uid", str(UID), "--create-home", "--shell", "/bin/bash", user]
        )
        write_files(self.root, user)
        await self._inside(["chown", f"{user}:{user}", "/workspace"])

    async def compile(self) -> None:
        """Byte code that Python uses without a look at its source, and matplotlib's font list."""
        version = self._recipe.python
        folders = [f"/usr/lib/python{version}", "/usr/lib/python3", "/usr/local/lib"]
        mode = ["-q", "-f", "--invalidation-mode", "unchecked-hash"]
        await self._inside(["python3", "-m", "compileall", *mode, *folders])
        home = f"/home/{self._recipe.user}"
        await self._inside(self._warm_argv(), env={"HOME": home, "PYTHONHASHSEED": "0"})

    async def pack(self, into: Path) -> None:
        """Note down what is in the root, clean it, and make `root.erofs` and `packages.json`."""
        packages = await image_packages.collect(self.root, self._recipe.python)
        (into / "packages.json").write_text(json.dumps(packages, indent=1))
        await asyncio.to_thread(clean, self.root)
        argv = mkfs_argv(into / "root.erofs", self.root)
        await run(argv, env=_ENV, deadline=600)

    def _warm_argv(self) -> list[str]:
        """Fill the user's caches: the first plot and the first completion cost seconds less."""
        code = "".join(f"try: {line}\nexcept ModuleNotFoundError: pass\n" for line in _WARM)
        become = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        return [*become, "python3", "-c", code]

    async def _inside(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        """Run a program of the new root, in it, without a network."""
        within = ["--net", "chroot", str(self.root)]
        await self._alone(within, argv, env={"HOME": "/root", **(env or {})})

    async def _alone(
        self, within: Sequence[str], argv: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> None:
        done = await run(
            [*_ALONE, *within, *argv],
            env={**_ENV, **(env or {})},
            deadline=_DEADLINE,
            check=False,
            on_line=self._on_line,
        )
        if done.returncode != 0:
            raise CommandFailed(argv[0], done.returncode, done.stderr_tail)


def mmdebstrap_argv(recipe: Recipe, mirror: Mirror, root: Path) -> list[str]:
    """The command that makes the minimal system, as root, below `root`."""
    return [
        "mmdebstrap",
        "--mode=root",
        "--variant=minbase",
        "--format=directory",
        f"--architectures={recipe.architecture}",
        f"--include={','.join(recipe.packages)}",
        '--aptopt=Acquire::Languages "none"',
        '--aptopt=APT::Install-Recommends "false"',
        *(f"--dpkgopt={option}" for option in _DPKG_OPTIONS),
        recipe.suite,
        str(root),
        *mirror.sources(recipe.suite),
    ]


def pip_download_argv(recipe: Recipe, requirements: Path, into: Path) -> list[str]:
    """The host's pip, asked for wheels of the guest's Python: glibc 2.41 is Debian 13's.

    No dependencies are resolved: that would be done with the markers of the host's Python. The
    requirements list everything, and `pip check` in the guest proves it.
    """
    platforms = ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
    platforms += [f"manylinux_2_{minor}_x86_64" for minor in range(5, 42)]
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--require-hashes", "--only-binary=:all:"),
        *("--python-version", recipe.python),
        *(part for platform in platforms for part in ("--platform", platform)),
        *("--requirement", str(requirements), "--dest", str(into)),
    ]


def pip_install_argv() -> list[str]:
    """The guest's pip: right paths in scripts, data files and RECORDs, from the wheels alone."""
    return [
        *("python3", "-m", "pip", "install", "--quiet", "--root-user-action=ignore"),
        *("--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--ignore-installed"),
        *("--find-links", "/wheels"),
        *("--requirement", "/wheels/requirements.txt"),
    ]


def mkfs_argv(into: Path, root: Path) -> list[str]:
    """Uncompressed: the guest boots faster, and the host's page cache is shared by all guests."""
    return ["mkfs.erofs", "--quiet", "-T", EPOCH, "-U", UUID, str(into), str(root)]


def write_files(root: Path, user: str) -> None:
    """Host name, hosts, sudo and /workspace of a new root."""
    (root / "etc/hostname").write_text("sandbox\n")
    (root / "etc/hosts").write_text(
        "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n"
    )
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    (root / "etc/resolv.conf").write_text("")
    (root / "etc/machine-id").write_text("")
    sudo = root / "etc/sudoers.d" / user
    sudo.write_text(f"{user} ALL=(ALL:ALL) NOPASSWD: ALL\n")
    sudo.chmod(0o440)
    (root / "workspace").mkdir()


def clean(root: Path) -> None:
    """Empty what a running system fills by itself. Idempotent."""
    for name in _REMOVED:
        shutil.rmtree(root / name, ignore_errors=True)
    shutil.rmtree(root / "dev")
    for name, mode in (("dev", 0o755), ("tmp", 0o1777), ("var/log", 0o755)):
        (root / name).mkdir()
        (root / name).chmod(mode)
    for name in ("var/lib/apt/lists/partial", "var/cache/apt/archives/partial"):
        (root / name).mkdir(parents=True)
    for backup in [*root.glob("etc/*-"), root / "var/cache/ldconfig/aux-cache"]:
        backup.unlink(missing_ok=True)
