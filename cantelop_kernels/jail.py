"""Where a sandbox's processes run: a folder, a uid and namespaces of their own.

Layer 2. `make` builds the folder; `Jail.confined` is the one place that says with which rights a
helper or VMM is started. Today that is: own uid and gid, no groups, no capabilities, no new
privileges, and empty network, ipc and uts namespaces. The private root folder, pid namespace and
seccomp filters come here too, and nowhere else.

Layout of `<state>/sandboxes/<slot.name>/` (0750, root and the slot's group):

- `run/`  (0770, the VMM's uid) working folder of the VMM and its vsock helper, with their sockets;
  a VMM that needs it elsewhere below this folder says so (`Vmm.run_at`)
- `scratch.img`  the writable disk (`scratch` makes it)
- `attendant.sock`  where the attendant listens for the daemon (0600, root)
- `session.json`  what a later daemon needs to adopt the sandbox (0600, root; `record`)
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cantelop_kernels import trees
from cantelop_kernels.errors import LaunchError
from cantelop_kernels.slot import Slot

RUN = "run"
"""Where `Jail.run` lies in the folder, unless the VMM needs it elsewhere."""


@dataclass(frozen=True, slots=True)
class Jail:
    """The place of one sandbox on the host."""

    slot: Slot
    folder: Path
    run_at: str = RUN

    @property
    def run(self) -> Path:
        """Working folder of the VMM and its helper; everything in it is theirs to change."""
        return self.folder / self.run_at

    def confined(self, argv: Sequence[str], *, uid: int | None = None) -> list[str]:
        """The command line that runs `argv` with the rights of this jail (and none else).

        It outlives the daemon, whose successor adopts it or ends it.
        """
        uid = self.slot.vmm_uid if uid is None else uid
        return [
            *ISOLATE,
            "setpriv",
            f"--reuid={uid}",
            f"--regid={self.slot.gid}",
            "--clear-groups",
            "--no-new-privs",
            "--bounding-set=-all",
            "--inh-caps=-all",
            "--",
            *("prlimit", "--core=0", f"--nofile={_MAX_FILES}", "--"),
            *argv,
        ]


ISOLATE = ("unshare", "--net", "--ipc", "--uts", "--")
"""util-linux unshare(1): namespaces in which there is nothing to reach."""


_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES = range(64)
_MAX_FILES = 1024


def drop_privileges(uid: int, gid: int) -> None:
    """Give up every right of this process for good; it was started as root, by us.

    For helpers that are Python themselves, whose interpreter the new uid may not be able to read:
    they import what they need first. Called once, before anything from a guest is read. Raises
    OSError where the kernel refuses, and then nothing may go on. (prctl(2), capabilities(7))
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in _CAPABILITIES:  # past the last one the kernel answers EINVAL
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FILES, _MAX_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if os.getuid() != uid or os.geteuid() != uid:
        raise OSError("still the old user after setresuid")


def sandboxes(state: Path) -> Path:
    """Where all jails of a state folder lie."""
    return state / "sandboxes"


def make(state: Path, slot: Slot, run_at: str = RUN) -> Jail:
    """Build the folder of `slot`; `remove` takes it away. What lies above `run` is root's.

    Raises LaunchError where something is at that place already: what lies there was not made by
    this daemon and is not trusted (THREATS.md 9). Raises OSError where the disk is full, and then
    leaves nothing.
    """
    jail = Jail(slot, sandboxes(state) / slot.name, run_at)
    try:
        jail.folder.mkdir(mode=0o750)
    except FileExistsError:
        raise LaunchError(
            f"{jail.folder} exists already",
            hint="nothing uses it: remove it, or restart the daemon to have it removed",
        ) from None
    try:
        os.chown(jail.folder, 0, slot.gid)
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
