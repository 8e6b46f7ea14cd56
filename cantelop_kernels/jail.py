"""Where a sandbox's processes run: a folder, a uid, a cgroup and namespaces of their own.

Layer 2. `make` builds the folder; `Jail.start` is the one place that says with which rights a
VMM, helper or attendant is started:

- its own uid and gid, no other group, no capability now or ever, no new privileges;
- its own mount, pid, net, ipc, uts and cgroup namespaces, in which there is nothing to reach;
- a root folder in memory, read-only, with exactly what it needs bound into it (`runtime`);
- a system call filter (`seccomp`), a limit of descriptors, no core files, an environment of ours;
- the sandbox's cgroup, from its first instruction.

Layout of `<state>/sandboxes/<slot.name>/` (0750, root and the slot's group):

- `run/`  (0770, the VMM's uid) working folder of the VMM and its vsock helper, with their sockets;
  a VMM that needs it elsewhere below this folder says so (`Vmm.run_at`). The one place in which
  anything of the jail may write besides the disk
- `root/`  empty; where each process builds its own root, which nobody else sees
- `scratch.img`  the writable disk (`scratch` makes it)
- `attendant.sock`  where the attendant listens for the daemon (0600, root)
- `session.json`  what a later daemon needs to adopt the sandbox (0600, root; `record`)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cantelop_kernels import trees
from cantelop_kernels.errors import LaunchError
from cantelop_kernels.process import DEVNULL, Process
from cantelop_kernels.runtime import Runtime
from cantelop_kernels.slot import Slot

MAX_FILES = 1024
RUN = "run"
"""Where `Jail.run` lies in the folder, unless the VMM needs it elsewhere."""

INSIDE = "/run"
"""Where a jailed process finds `Jail.run`, its working folder."""

_UMASK = 0o007  # the attendant reaches the vsock socket through the slot's group
_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


@dataclass(frozen=True, slots=True)
class Rights:
    """What one program gets: `mounts` as in `confine`, besides its `runtime` and the run folder."""

    runtime: Runtime
    filter: bytes
    mounts: Sequence[tuple[str, str, str]] = ()


@dataclass(frozen=True, slots=True)
class Jail:
    """The place of one sandbox on the host. `cgroups` are the files that take a pid."""

    slot: Slot
    folder: Path
    cgroups: tuple[str, ...] = ()
    run_at: str = RUN

    @property
    def run(self) -> Path:
        """Working folder of the VMM and its helper; everything in it is theirs to change."""
        return self.folder / self.run_at

    async def start(
        self, argv: Sequence[str], rights: Rights, *, stdout: int = DEVNULL, log: int = DEVNULL
    ) -> Process:
        """Run `argv` as the VMM's uid in this jail. It outlives the daemon, whose successor adopts
        it or ends it. Raises CommandFailed where the kernel refuses any of it; then it never ran.
        """
        mounts = [*rights.runtime.mounts, *rights.mounts]
        confinement = self._confinement(self.slot.vmm_uid, mounts, rights.filter)
        confinement |= {"links": rights.runtime.links, "umask": _UMASK}
        return await Process.confined(confinement, argv, env=_ENV, stdout=stdout, stderr=log)

    async def start_with_rights(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: int,
        stdout: int = DEVNULL,
        pass_fds: Sequence[int] = (),
        umask: int = 0o077,
    ) -> Process:
        """Run a program that gives up its rights itself, in namespaces of its own and as root.

        Two are trusted to: the attendant, by `confine.enter` with `late_confinement` before it
        reads the first byte of a guest, and Firecracker's jailer.
        """
        everything = self._confinement(0, [], b"") | {"root": "", "umask": umask}
        return await Process.confined(
            everything, argv, env=env, stdout=stdout, stderr=log, pass_fds=pass_fds
        )

    def late_confinement(self, filter: bytes) -> dict[str, Any]:
        """For the attendant, with the run folder and nothing else in its root."""
        return self._confinement(self.slot.attendant_uid, [], filter)

    def _confinement(
        self, uid: int, mounts: Sequence[tuple[str, str, str]], filter: bytes
    ) -> dict[str, Any]:
        return {
            "root": str(self.folder / "root"),
            "mounts": [*mounts, (str(self.run), INSIDE, "w")],
            "links": [],
            "cwd": INSIDE,
            "uid": uid,
            "gid": self.slot.gid if uid else 0,
            "files": MAX_FILES,
            "cgroups": list(self.cgroups),
            "filter": filter.hex(),
            "umask": 0o077,
        }


def sandboxes(state: Path) -> Path:
    """Where all jails of a state folder lie."""
    return state / "sandboxes"


def make(state: Path, slot: Slot, cgroups: Sequence[str] = (), run_at: str = RUN) -> Jail:
    """Build the folder of `slot`; `remove` takes it away. What lies above `run` is root's.

    Raises LaunchError where something is at that place already: what lies there was not made by
    this daemon and is not trusted (THREATS.md 9). Raises OSError where the disk is full, and then
    leaves nothing.
    """
    jail = Jail(slot, sandboxes(state) / slot.name, tuple(cgroups), run_at)
    try:
        jail.folder.mkdir(mode=0o750)
    except FileExistsError:
        raise LaunchError(
            f"{jail.folder} exists already",
            hint="nothing uses it: remove it, or restart the daemon to have it removed",
        ) from None
    try:
        os.chown(jail.folder, 0, slot.gid)
        (jail.folder / "root").mkdir(mode=0o700)
        jail.run.mkdir(parents=True)
        jail.run.chmod(0o770)
        os.chown(jail.run, slot.vmm_uid, slot.gid)
    except OSError:
        shutil.rmtree(jail.folder)  # nobody else has been let in yet
        raise
    return jail


async def remove(jail: Jail) -> None:
    """Take the folder away, once no process of the slot's uids is left. Raises CantelopError."""
    await trees.remove(jail.folder)
