"""Can this machine run sandboxes? Each check says what it found, what it means and how to fix it.

Layer 6, behind `cantelop doctor`. Looks and changes nothing; may be run as any user, and tells
what only root can see as such. A check never raises for what it is there to find.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from cantelop_kernels import config, host, tools
from cantelop_kernels.client import Client
from cantelop_kernels.config import Config
from cantelop_kernels.errors import CantelopError, ConfigError, DaemonUnavailable, ImageError
from cantelop_kernels.image import ImageStore
from cantelop_kernels.process import run
from cantelop_kernels.schema import Info
from cantelop_kernels.trust import changeable_by_others
from cantelop_kernels.vmm.choice import firecracker_found
from cantelop_kernels.vmm.firecracker_release import binaries
from cantelop_kernels.vmm.qemu import find_binary

Status = Literal["ok", "warn", "fail"]

PROVISIONER = "cantelop"
PROVISIONERS = "jupyter_client.kernel_provisioners"

FREE_FAIL = 1 << 30
FREE_WARN = 4 << 30
"""Bytes of free space in the state folder: an image takes about half a GiB to build."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `fix` is what to do about it, empty where there is nothing to do."""

    name: str
    status: Status
    found: str
    fix: str = ""


async def checks(state: Path, socket: Path, *, allow_emulation: bool) -> list[Check]:
    """All of them, in the order in which a launch would stumble over them."""
    settings, first = settings_check()
    allowed = allow_emulation or settings.allow_emulation
    found = [
        first,
        virtualization(host.hardware_kvm(), host.kvm_device(), allowed=allowed),
        *await vmms(settings, state),
        namespaces(),
        cgroups(),
        state_folder(state),
        *[await asyncio.to_thread(image, state, name) for name in images_of(settings)],
        *await daemon(socket),
        *kernelspecs(),
        ownership(trusted_files(state, settings)),
    ]
    return found


def settings_check() -> tuple[Config, Check]:
    """The operator's settings, or the defaults where they cannot be read."""
    try:
        return config.load(), Check("configuration", "ok", "valid")
    except ConfigError as error:
        plain = Config("defaults", {"apps": {"default": config.App("default", {})}})
        return plain, Check("configuration", "fail", error.message, error.hint)


def virtualization(hardware: bool, kvm_device: bool, *, allowed: bool) -> Check:
    """THREATS 5: without hardware, a start is refused unless emulation was allowed."""
    if hardware:
        return Check("virtualization", "ok", "the CPU runs guests in hardware (KVM)")
    lacks = "no /dev/kvm"
    if kvm_device:
        lacks = "/dev/kvm is there, but the CPU has neither vmx nor svm, so it cannot run guests"
    if allowed:
        return Check(
            "virtualization",
            "warn",
            f"{lacks}: sandboxes are emulated, which is slow and no security boundary",
            "run untrusted code only on a machine with hardware virtualization",
        )
    return Check(
        "virtualization",
        "fail",
        lacks,
        "use a machine with (nested) virtualization turned on, or --allow-emulation to try it out",
    )


async def qemu() -> Check:
    try:
        path = find_binary()
        version = (await run([str(path), "--version"], deadline=20)).stdout
    except CantelopError as error:
        return Check("qemu", "fail", error.message, error.hint)
    return Check("qemu", "ok", f"{version.splitlines()[0] if version else 'QEMU'} ({path})")


async def vmms(settings: Config, state: Path) -> list[Check]:
    """The VMM for production, with what is known against it, and QEMU where that is used."""
    found = await firecracker_found(settings, state, hardware=host.hardware_kvm())
    first = Check("firecracker", found.status, found.text, found.fix)
    return [first] if found.used else [first, await qemu(), vsock_helper(state)]


def vsock_helper(state: Path) -> Check:
    path = tools.find_vhost_device_vsock(state)
    if path is None:
        return Check(
            "vsock helper",
            "warn",
            "vhost-device-vsock is not there yet; the daemon fetches it at its first start",
            "start the daemon once while the package mirror can be reached",
        )
    return Check("vsock helper", "ok", str(path))


def namespaces(proc: Path = Path("/proc")) -> Check:
    """The VMM gets a network namespace of its own."""
    missing = [kind for kind in ("net", "mnt", "user") if not (proc / f"self/ns/{kind}").exists()]
    for kind in ("net", "mnt"):
        limit = proc / f"sys/user/max_{kind}_namespaces"
        if limit.exists() and limit.read_text().strip() == "0":
            missing.append(kind)
    if missing:
        return Check(
            "namespaces",
            "fail",
            f"not available: {', '.join(sorted(set(missing)))}",
            "raise user.max_net_namespaces and user.max_mnt_namespaces with sysctl",
        )
    return Check("namespaces", "ok", "network, mount and user namespaces are available")


def cgroups(root: Path = Path("/sys/fs/cgroup")) -> Check:
    unified = root / "cgroup.controllers"
    if unified.exists() and "memory" in unified.read_text().split():
        return Check("cgroups", "ok", "version 2")
    if (root / "memory").is_dir():
        return Check("cgroups", "ok", "version 1, or both (hybrid)")
    return Check(
        "cgroups",
        "warn",
        "no memory controller",
        "mount cgroup2 on /sys/fs/cgroup, or boot with it",
    )


def state_folder(state: Path) -> Check:
    """Where images, tools and sandboxes live: it must be root's, reachable, and have room."""
    name = "state folder"
    there = next(path for path in (state, *state.absolute().parents) if path.exists())
    if not there.is_dir():
        return Check(name, "fail", f"{there} is not a folder", "set CANTELOP_STATE to a folder")
    free = shutil.disk_usage(there).free
    room = f"{state}, {free / 2**30:.1f} GiB free"
    closed = [path for path in (there, *there.resolve().parents) if not path.stat().st_mode & 1]
    if closed:
        return Check(
            name,
            "fail",
            f"{closed[0]} is closed to other users, and a sandbox's VMM runs as one",
            f"chmod o+x {closed[0]}, or set CANTELOP_STATE to another place",
        )
    if free < FREE_FAIL:
        return Check(name, "fail", room, "free at least 4 GiB, or set CANTELOP_STATE")
    if os.geteuid() == 0 and not os.access(there, os.W_OK):
        return Check(name, "fail", f"{there} cannot be written", "put it on a writable disk")
    if free < FREE_WARN:
        return Check(name, "warn", room, "an image build needs about 4 GiB")
    return Check(name, "ok", room)


def images_of(settings: Config) -> list[str]:
    """The images that Apps name, each once."""
    return sorted({app.image for app in settings.apps.values()})


def image(state: Path, name: str) -> Check:
    """Reads and hashes the whole image: a second or so."""
    try:
        found = ImageStore(state).resolve(name, verify=True)
    except ImageError as error:
        return Check(f"image {name}", "fail", error.message, error.hint)
    except OSError as error:
        return Check(f"image {name}", "fail", f"cannot be read: {error}", "run this as root")
    return Check(f"image {name}", "ok", f"intact, {found.digest[:12]}")


async def daemon(socket: Path) -> list[Check]:
    """A root client starts a daemon by itself, so for root none running is in order."""
    try:
        info = await Client(socket).info()
    except DaemonUnavailable:
        if os.geteuid() == 0:
            return [Check("daemon", "ok", f"none on {socket}; one is started when needed")]
        return [Check("daemon", "fail", f"none answers on {socket}", "sudo cantelop serve")]
    except CantelopError as error:
        return [Check("daemon", "fail", error.message, error.hint)]
    found = f"version {info.version} on {socket}, {info.sessions} sessions"
    return [Check("daemon", "ok", found), *pool(info)]


def pool(info: Info) -> list[Check]:
    """The warm sandboxes of a daemon that runs; sessions start without them too, but slower."""
    found = []
    for one in info.pool:
        text = f"{one.ready} of {one.target} warm sandboxes of {one.image}, {one.memory_mib} MiB"
        if one.failures:
            text += f"; {one.failures} boots failed in a row: {one.last_error}"
            found.append(Check("pool", "warn", text, "see why with: cantelop exec 1"))
        else:
            found.append(Check("pool", "ok", text))
    for app, why in info.unresolved.items():
        text = f"no warm sandboxes for the App {app!r}: {why}"
        found.append(Check("pool", "warn", text, "build its image: cantelop image build"))
    return found


def kernelspecs() -> Iterator[Check]:
    """Jupyter hides a kernelspec whose provisioner is not installed, and says so to nobody."""
    from jupyter_core.paths import jupyter_path

    folders = [Path(folder) for folder in jupyter_path("kernels")]
    known = {point.name for point in entry_points(group=PROVISIONERS)}
    yield from kernelspec_checks(folders, known)


def kernelspec_checks(folders: list[Path], known: set[str]) -> Iterator[Check]:
    """`known` are the provisioners that this Python has."""
    ours: list[str] = []
    for path in sorted(file for folder in folders for file in folder.glob("*/kernel.json")):
        provisioner = _provisioner(path)
        if provisioner == PROVISIONER:
            ours.append(path.parent.name)
        if provisioner is not None and provisioner not in known:
            yield Check(
                "kernelspec",
                "fail" if provisioner == PROVISIONER else "warn",
                f"{path.parent.name}: its provisioner {provisioner!r} is not installed for"
                f" {sys.executable}, so Jupyter hides it",
                "install the package that has the provisioner beside Jupyter, or remove "
                f"{path.parent}",
            )
    if ours:
        yield Check("kernelspec", "ok", f"installed: {', '.join(sorted(set(ours)))}")
    else:
        yield Check(
            "kernelspec",
            "warn",
            "none of ours is installed, so Jupyter's menus do not offer one",
            "cantelop kernelspec install",
        )


def _provisioner(path: Path) -> str | None:
    """The name in the file's stanza; None without one, or where Jupyter could not read it."""
    try:
        spec: Any = json.loads(path.read_text(encoding="utf-8"))
        return str(spec["metadata"]["kernel_provisioner"]["provisioner_name"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def trusted_files(state: Path, settings: Config) -> list[Path]:
    """What root runs, or boots guests from."""
    files = [Path(sys.executable), Path(__file__).parent, state]
    found = shutil.which("qemu-system-x86_64")
    helper = tools.find_vhost_device_vsock(state)
    files += [Path(found)] if found else []
    files += [helper] if helper else []
    files += binaries(state) or ()
    for name in images_of(settings):
        try:
            image = ImageStore(state).resolve(name)
        except (ImageError, OSError):
            continue  # the image's own check says so
        files += [image.path, image.vmlinux, image.initramfs, image.root]
    return files


def ownership(paths: list[Path]) -> Check:
    """THREATS 12: whoever can change one of these files rules every sandbox, or root itself."""
    faults = sorted({fault for path in paths if (fault := changeable_by_others(path))})
    if faults:
        return Check(
            "ownership",
            "fail",
            f"others than root can change {', '.join(map(str, faults))}",
            f"chown root and chmod go-w {' '.join(map(str, faults))}",
        )
    return Check("ownership", "ok", "nobody but root can change programs and images")
