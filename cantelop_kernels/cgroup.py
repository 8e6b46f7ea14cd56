"""Hard limits on what a sandbox takes of the host: one cgroup leaf per sandbox.

Layer 2. Version 2 is what hosts have; on hybrid ones, where the controllers are still version 1,
a leaf of the same name is made in each hierarchy. Everything of a sandbox (VMM with its threads,
helpers, attendant) is in it from its first instruction, so a leaf's figures are the sandbox's.
(Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/*.rst; cgroups(7).)
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cantelop_kernels.errors import CantelopError, ConfigError, DeadlineExceeded, LaunchError

MOUNT = Path("/sys/fs/cgroup")
NEEDED = ("cpu", "memory", "pids")
_PERIOD = 100_000
"""Microseconds over which the CPU quota counts."""

_V1 = (*NEEDED, "cpuacct", "freezer")
_PAUSES = (0.0, 0.002, 0.01, 0.05, 0.2, 1.0, 3.0, 5.0)
"""Seconds between tries to remove a cgroup: nothing says when what died in it is gone."""


@dataclass(frozen=True, slots=True)
class Caps:
    """The most that a sandbox may take: `cpus` in whole CPUs' time, `memory` in bytes, no swap."""

    cpus: float
    memory: int
    pids: int


@dataclass(frozen=True, slots=True)
class Taken:
    """`cpu` and `throttled` in seconds so far; `memory` and `peak` in bytes."""

    cpu: float
    memory: int
    peak: int
    throttled: float
    oom_kills: int


class Leaf(Protocol):
    """One sandbox's cgroup. Blocking, quick."""

    @property
    def procs(self) -> list[str]:
        """Files that take a pid."""
        ...

    def taken(self) -> Taken: ...

    async def remove(self) -> None:
        """Kill what is in it, and take it away; nothing where it is gone. Raises CantelopError."""
        ...


class Hierarchy(Protocol):
    """Where the leaves of one daemon are made."""

    @property
    def version(self) -> int: ...

    def make(self, name: str, caps: Caps) -> Leaf:
        """Raises LaunchError where the kernel does not take a limit; nothing is left then."""
        ...

    def find(self, name: str) -> Leaf:
        """The leaf of that name, whether or not it is there."""
        ...

    def names(self, prefix: str) -> set[str]:
        """Of the leaves that are there."""
        ...

    def release(self) -> None:
        """Take the parent away where it is empty; called when the daemon ends."""
        ...


def hierarchy(parent: str, mount: Path = MOUNT) -> Hierarchy:
    """The one that this host has, ready for leaves. `parent` is a folder below its root.

    Called once by the daemon, as root. Raises ConfigError with what is missing.
    """
    unified = mount / "cgroup.controllers"
    if unified.exists() and set(NEEDED) <= set(unified.read_text().split()):
        return _UnifiedHierarchy(mount, parent)
    if all((mount / name).is_dir() for name in _V1):
        return _SplitHierarchy(mount, parent)
    raise ConfigError(
        f"no cgroup controllers for {', '.join(NEEDED)} at {mount}",
        hint="mount cgroup2 there, or boot with systemd.unified_cgroup_hierarchy=1",
    )


class _UnifiedHierarchy:
    """cgroup version 2."""

    version = 2

    def __init__(self, mount: Path, parent: str) -> None:
        self._mount, self._home = mount, mount / parent
        self._prepare()

    def _prepare(self) -> None:
        try:
            self._home.mkdir(exist_ok=True, parents=True)
            for folder in reversed([self._home, *self._home.parents]):
                if folder == self._mount or self._mount in folder.parents:
                    _enable(folder)
        except OSError as error:
            raise _refused(self._home, error) from error

    def make(self, name: str, caps: Caps) -> Leaf:
        if not self._home.exists():  # another daemon below the same parent has ended
            self._prepare()
        leaf = _UnifiedLeaf(self._home / name)
        return _made(
            [leaf.folder],
            leaf,
            [
                (leaf.folder / "cpu.max", f"{int(caps.cpus * _PERIOD)} {_PERIOD}"),
                (leaf.folder / "memory.max", str(caps.memory)),
                (leaf.folder / "memory.swap.max", "0"),
                (leaf.folder / "memory.oom.group", "1"),
                (leaf.folder / "pids.max", str(caps.pids)),
            ],
        )

    def find(self, name: str) -> Leaf:
        return _UnifiedLeaf(self._home / name)

    def names(self, prefix: str) -> set[str]:
        return {path.name for path in self._home.glob(f"{prefix}*") if path.is_dir()}

    def release(self) -> None:
        _release(self._home)


def _enable(folder: Path) -> None:
    """A parent passes its controllers on; io only where the kernel has it."""
    there = set((folder / "cgroup.controllers").read_text().split())
    for name in (*NEEDED, "io"):
        if name in there:
            (folder / "cgroup.subtree_control").write_text(f"+{name}")


class _UnifiedLeaf:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def procs(self) -> list[str]:
        return [str(self.folder / "cgroup.procs")]

    def taken(self) -> Taken:
        cpu = _table(self.folder / "cpu.stat")
        return Taken(
            cpu=cpu.get("usage_usec", 0) / 1e6,
            memory=_number(self.folder / "memory.current"),
            peak=_number(self.folder / "memory.peak"),
            throttled=cpu.get("throttled_usec", 0) / 1e6,
            oom_kills=_table(self.folder / "memory.events").get("oom_kill", 0),
        )

    async def remove(self) -> None:
        with suppress(FileNotFoundError):
            (self.folder / "cgroup.kill").write_text("1")
            await _take_away([self.folder])


class _SplitHierarchy:
    """cgroup version 1: a folder for each controller."""

    version = 1

    def __init__(self, mount: Path, parent: str) -> None:
        self._homes = {name: (mount / name).resolve() / parent for name in _V1}
        self._prepare()

    def _prepare(self) -> None:
        for home in self._homes.values():
            try:
                home.mkdir(exist_ok=True, parents=True)
            except OSError as error:
                raise _refused(home, error) from error

    def make(self, name: str, caps: Caps) -> Leaf:
        self._prepare()  # another daemon below the same parent may have ended
        leaf = self._leaf(name)
        at = leaf.folders
        values = [
            (at["cpu"] / "cpu.cfs_period_us", str(_PERIOD)),
            (at["cpu"] / "cpu.cfs_quota_us", str(int(caps.cpus * _PERIOD))),
            (at["memory"] / "memory.limit_in_bytes", str(caps.memory)),
            (at["pids"] / "pids.max", str(caps.pids)),
        ]
        swap = at["memory"].parent / "memory.memsw.limit_in_bytes"
        if swap.exists():
            values.append((at["memory"] / swap.name, str(caps.memory)))
        else:
            values.append((at["memory"] / "memory.swappiness", "0"))
        return _made(leaf.distinct, leaf, values)

    def find(self, name: str) -> Leaf:
        return self._leaf(name)

    def _leaf(self, name: str) -> _SplitLeaf:
        return _SplitLeaf({controller: home / name for controller, home in self._homes.items()})

    def names(self, prefix: str) -> set[str]:
        return {
            path.name
            for home in self._homes.values()
            for path in home.glob(f"{prefix}*")
            if path.is_dir()
        }

    def release(self) -> None:
        for home in self._homes.values():
            _release(home)


class _SplitLeaf:
    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders

    @property
    def distinct(self) -> list[Path]:
        """Controllers that are mounted together share one."""
        return list(dict.fromkeys(self.folders.values()))

    @property
    def procs(self) -> list[str]:
        return [str(one / "cgroup.procs") for one in self.distinct]

    def taken(self) -> Taken:
        memory = self.folders["memory"]
        return Taken(
            cpu=_number(self.folders["cpuacct"] / "cpuacct.usage") / 1e9,
            memory=_number(memory / "memory.usage_in_bytes"),
            peak=_number(memory / "memory.max_usage_in_bytes"),
            throttled=_table(self.folders["cpu"] / "cpu.stat").get("throttled_time", 0) / 1e9,
            oom_kills=_table(memory / "memory.oom_control").get("oom_kill", 0),
        )

    async def remove(self) -> None:
        """Frozen first, so that nothing can fork away from the killing."""
        freezer = self.folders["freezer"]
        with suppress(FileNotFoundError):
            (freezer / "freezer.state").write_text("FROZEN")
            for pid in _pids(freezer):
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            (freezer / "freezer.state").write_text("THAWED")
        await _take_away(self.distinct)


def _made(folders: list[Path], leaf: Leaf, values: list[tuple[Path, str]]) -> Leaf:
    """Make the folders and write the limits, or leave nothing."""
    made: list[Path] = []
    try:
        for folder in folders:
            folder.mkdir()
            made.append(folder)
        for path, value in values:
            path.write_text(value)
    except OSError as error:
        for folder in reversed(made):
            folder.rmdir()
        if error.errno == errno.EEXIST:
            raise LaunchError(
                f"the cgroup {folders[0].name} exists already",
                hint="restart the daemon to have it removed",
            ) from error
        raise LaunchError(
            f"a limit could not be set: {error}", hint="see what cantelop doctor says of cgroups"
        ) from error
    return leaf


async def _take_away(folders: list[Path]) -> None:
    """Once what was killed in them is gone; the kernel says EBUSY until then."""
    for pause in _PAUSES:
        await asyncio.sleep(pause)
        folders = [folder for folder in folders if not _removed(folder)]
        if not folders:
            return
    raise DeadlineExceeded(
        f"the cgroup {folders[0]} does not become empty", hint="look at the processes in it"
    )


def _release(home: Path) -> None:
    """One that has leaves, of another daemon perhaps, stays."""
    with suppress(OSError):
        home.rmdir()


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise CantelopError(f"{folder} could not be removed: {error.strerror}") from error
    return True


def _pids(folder: Path) -> Iterator[int]:
    yield from map(int, (folder / "cgroup.procs").read_text().split())


def _number(path: Path) -> int:
    """0 where this kernel has no such figure."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _table(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _refused(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot make the cgroup {folder}: {error.strerror}",
        hint="run the daemon as root, with /sys/fs/cgroup mounted writable",
    )
