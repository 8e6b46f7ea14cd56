"""Where a sandbox's processes run: a folder, a uid and namespaces of their own.

Layer 2. `make` builds the folder; `Jail.confined` is the one place that says with which rights a
helper or VMM is started. Today that is: own uid and gid, no groups, no capabilities, no new
privileges, and empty network, ipc and uts namespaces. The private root folder, pid namespace and
seccomp filters come here too, and nowhere else.

Layout of `<state>/sandboxes/<slot.name>/` (0750, root and the slot's group):

- `run/`  (0770, the VMM's uid) working folder of the VMM and its vsock helper, with their sockets
- `scratch.img`  the writable disk (`scratch` makes it)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cantelop_kernels.errors import LaunchError
from cantelop_kernels.slot import Slot


@dataclass(frozen=True, slots=True)
class Jail:
    """The place of one sandbox on the host."""

    slot: Slot
    folder: Path

    @property
    def run(self) -> Path:
        """Working folder of the VMM and its helper; everything in it is theirs to change."""
        return self.folder / "run"

    def confined(self, argv: Sequence[str], *, uid: int | None = None) -> list[str]:
        """The command line that runs `argv` with the rights of this jail (and none else).

        It dies with the daemon that started it: until sessions can be adopted by another daemon, a
        sandbox without one would serve nobody.
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
            "--pdeathsig=KILL",
            "--",
            *argv,
        ]


ISOLATE = ("unshare", "--net", "--ipc", "--uts", "--")
"""util-linux unshare(1): namespaces in which there is nothing to reach."""


def sandboxes(state: Path) -> Path:
    """Where all jails of a state folder lie."""
    return state / "sandboxes"


@contextmanager
def make(state: Path, slot: Slot) -> Iterator[Jail]:
    """Build the folder of `slot`, and take all of it away at the end.

    Raises LaunchError where something is at that place already: what lies there was not made by
    this daemon and is not trusted (THREATS.md 9).
    """
    folder = sandboxes(state) / slot.name
    try:
        folder.mkdir(mode=0o750)
    except FileExistsError:
        raise LaunchError(
            f"{folder} exists already",
            hint="nothing uses it: remove it, or restart the daemon to have it removed",
        ) from None
    try:
        os.chown(folder, 0, slot.gid)
        jail = Jail(slot, folder)
        jail.run.mkdir()
        jail.run.chmod(0o770)
        os.chown(jail.run, slot.vmm_uid, slot.gid)
        yield jail
    finally:
        shutil.rmtree(folder)
