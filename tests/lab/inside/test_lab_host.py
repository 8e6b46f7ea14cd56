"""The lab is the host that it claims to be; tests that need one rely on this."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from jupyter_client.kernelspec import find_kernel_specs

from cantelop_kernels import host
from cantelop_kernels.image import ImageStore

pytestmark = pytest.mark.lab

CGROUP = Path("/sys/fs/cgroup")
KVM_GET_API_VERSION = 0xAE00


def test_hardware_virtualization() -> None:
    assert host.hardware_kvm()
    with Path("/dev/kvm").open("rb+", buffering=0) as kvm:
        assert fcntl.ioctl(kvm, KVM_GET_API_VERSION) == 12


def test_cgroups_are_unified_and_have_every_controller() -> None:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    assert [mount[2] for mount in mounts if mount[2].startswith("cgroup")] == ["cgroup2"]
    assert {"cpu", "cpuset", "io", "memory", "pids"} <= set(
        (CGROUP / "cgroup.subtree_control").read_text().split()
    )
    leaf = CGROUP / "lab-test"
    leaf.mkdir()
    try:
        (leaf / "memory.max").write_text(str(64 << 20))
        (leaf / "cpu.max").write_text("50000 100000")
        assert (leaf / "cgroup.kill").exists()
    finally:
        leaf.rmdir()


def test_no_way_to_any_network() -> None:
    assert os.listdir("/sys/class/net") == ["lo"]


def test_the_project_is_installed_from_its_wheel() -> None:
    assert version("cantelop-kernels")
    assert str(host.__file__).startswith("/usr/local/lib/python3")
    assert "cantelop" in {
        one.name for one in entry_points(group="jupyter_client.kernel_provisioners")
    }
    assert "cantelop-python3" in find_kernel_specs()
    subprocess.run(["cantelop", "--help"], check=True, capture_output=True)


def test_the_guest_image_can_be_linked_into_a_jail(tmp_path: Path) -> None:
    state = Path("/var/lib/cantelop")
    image = ImageStore(state).resolve("python3")
    (state / "link").hardlink_to(image.root)
    (state / "link").unlink()


def test_doctor() -> None:
    """What it says of the host itself."""
    argv = ["cantelop", "doctor", "--json"]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    for name in ("virtualization", "namespaces", "cgroups", "state folder", "image python3"):
        assert checks[name]["status"] == "ok", checks[name]
    assert checks["cgroups"]["found"].startswith("version 2")
    assert checks["ownership"]["status"] == "ok", checks["ownership"]
