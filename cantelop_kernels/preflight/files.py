"""Files that root runs and guests boot from: whole, reachable, and nobody else's to change.

Layer 6, part of `preflight`.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import cantelop_kernels
from cantelop_kernels import tools
from cantelop_kernels.config import Config
from cantelop_kernels.errors import ImageError
from cantelop_kernels.image import ImageStore
from cantelop_kernels.preflight.model import Check
from cantelop_kernels.trust import changeable_by_others
from cantelop_kernels.vmm.firecracker_release import binaries

FREE_FAIL = 1 << 30
FREE_WARN = 4 << 30
"""Bytes of free space in the state folder: an image takes about half a GiB to build."""

PROGRAMS = ("qemu-system-x86_64", "mkfs.ext4", "prlimit", "setpriv", "unshare", "nft")
"""What root runs, where it is found by name."""


def state_folder(state: Path, free_fail: int = FREE_FAIL, free_warn: int = FREE_WARN) -> Check:
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
    if free < free_fail:
        return Check(name, "fail", room, "free at least 4 GiB, or set CANTELOP_STATE")
    if os.geteuid() == 0 and not os.access(there, os.W_OK):
        return Check(name, "fail", f"{there} cannot be written", "put it on a writable disk")
    if free < free_warn:
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


def trusted_files(state: Path, settings: Config) -> list[Path]:
    """What root runs, or boots guests from."""
    package = Path(cantelop_kernels.__file__).parent
    files = [Path(sys.executable), package, Path(sysconfig.get_path("purelib")), state]
    files += [Path(found) for name in PROGRAMS if (found := shutil.which(name))]
    helper = tools.find_vhost_device_vsock(state)
    files += [helper] if helper else []
    files += binaries(state) or ()
    for name in images_of(settings):
        try:
            one = ImageStore(state).resolve(name)
        except (ImageError, OSError):
            continue  # the image's own check says so
        files += [one.path, one.vmlinux, one.initramfs, one.root]
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
