"""What sandboxes want of this host's Linux: namespaces, control groups, a packet filter.

Layer 6, part of `preflight`.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from cantelop_kernels.errors import CantelopError
from cantelop_kernels.preflight.model import Check, text_of
from cantelop_kernels.process import run

WANTED = {"cpu": "CPU quotas", "memory": "memory limits", "pids": "limits of processes"}
"""Controllers that limits hang on, and what is lost without."""

WELCOME = {"io": "limits of disk traffic", "freezer": "stopping a sandbox whole"}
"""Not on every host; without it the rest holds."""

_V1_NAMES = {"io": "blkio"}
_PROBE_DEADLINE = 10.0


def namespaces(proc: Path = Path("/proc")) -> Check:
    """The VMM gets a network namespace of its own."""
    missing = [kind for kind in ("net", "mnt", "user") if not (proc / f"self/ns/{kind}").exists()]
    for kind in ("net", "mnt"):
        if text_of(proc / f"sys/user/max_{kind}_namespaces") == "0":
            missing.append(kind)
    if missing:
        return Check(
            "namespaces",
            "fail",
            f"not available: {', '.join(sorted(set(missing)))}",
            "raise user.max_net_namespaces and user.max_mnt_namespaces with sysctl",
        )
    return Check("namespaces", "ok", "network, mount and user namespaces are available")


@dataclass(frozen=True, slots=True)
class Controllers:
    """Of the control groups at one place. Names are those of version 2 (cgroup-v2.rst)."""

    version: str
    """2, 1, "hybrid" (1, and a version 2 tree beside it), or "none"."""
    there: frozenset[str]
    writable: frozenset[str]


def controllers(root: Path) -> Controllers:
    """What is mounted at `root`, and what of it this process may change."""
    unified = root / "cgroup.controllers"
    if unified.exists():
        there = frozenset(text_of(unified).split()) | {"freezer"}  # part of the core there
        writable = os.access(root / "cgroup.subtree_control", os.W_OK)
        return Controllers("2", there, there if writable else frozenset())
    folders = {name: root / _V1_NAMES.get(name, name) for name in (*WANTED, *WELCOME)}
    there = frozenset(name for name, folder in folders.items() if folder.is_dir())
    writable_v1 = frozenset(name for name in there if os.access(folders[name], os.W_OK))
    hybrid = (root / "unified" / "cgroup.controllers").exists()
    version = ("hybrid" if hybrid else "1") if there else "none"
    return Controllers(version, there, writable_v1)


def cgroups(root: Path = Path("/sys/fs/cgroup"), *, required: bool = False) -> Check:
    """Host-side limits. `required`: the daemon is not to start where one that is wanted lacks."""
    found = controllers(root)
    usable = found.there & (found.writable if os.geteuid() == 0 else found.there)
    says = {"none": "no control groups", "hybrid": "version 1, beside an empty version 2"}
    text = says.get(found.version, f"version {found.version}")
    text += f" ({', '.join(sorted(found.there))})" if found.there else ""
    lost = {name: what for name, what in WANTED.items() if name not in usable}
    if lost:
        closed = "cannot be changed" if lost.keys() <= found.there else "not there"
        return Check(
            "cgroups",
            "fail" if required else "warn",
            f"{text}; {', '.join(lost)} {closed}: no {', '.join(lost.values())} on the host",
            f"mount cgroup2 on {root} with these controllers, writable (with systemd they are; a"
            " container wants its own)",
        )
    lost = {name: what for name, what in WELCOME.items() if name not in usable}
    if lost:
        return Check(
            "cgroups",
            "warn",
            f"{text}; without {', '.join(lost)}: no {', '.join(lost.values())}",
            "boot with the controller (cgroup_disable= must not name it)",
        )
    return Check("cgroups", "ok", text)


async def nftables() -> Check:
    """Tried in a network namespace that ends with the try, so nothing of the host changes."""
    name = "nftables"
    nft = shutil.which("nft", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if nft is None:
        return Check(
            name,
            "warn",
            "nft is not installed: guests get no network (they have none today)",
            "apt-get install nftables",
        )
    if os.geteuid() != 0:
        return Check(name, "ok", f"{nft}; whether Linux has it only root can tell")
    argv = ["unshare", "--net", "--", nft, "add", "table", "inet", "cantelop-probe"]
    try:
        await run(argv, deadline=_PROBE_DEADLINE)
    except CantelopError as error:
        return Check(
            name,
            "warn",
            f"{nft} does not work here: {error.message}",
            "modprobe nf_tables, or boot a kernel that has it",
        )
    return Check(name, "ok", f"works in a network namespace ({nft})")
