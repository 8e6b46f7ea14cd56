"""Which VMM it is: as configured, as this host can, and never one that makes a boundary hollow."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cantelop_kernels import host
from cantelop_kernels.config import Config, load
from cantelop_kernels.errors import ConfigError
from cantelop_kernels.preflight import programs
from cantelop_kernels.vmm import choice
from cantelop_kernels.vmm.choice import default_vmm, firecracker_found
from cantelop_kernels.vmm.firecracker import Firecracker
from cantelop_kernels.vmm.firecracker_release import Release, Version
from cantelop_kernels.vmm.qemu import Qemu


@dataclass(frozen=True)
class Here:
    """What is configured, and what the host has."""

    vmm: str
    hardware: bool
    version: str | None


class Has:
    """Makes this host one of those."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

        async def qemu(state: Path, *, emulated: bool) -> Qemu:
            return Qemu(Path("/q"), Path("/v"), emulated, 1)

        patch.setattr(choice, "_qemu", qemu)

    def __call__(self, here: Here) -> None:
        async def found(state: Path) -> Release | None:
            folder, version = state / "tools", here.version
            if version is None:
                return None
            return Release(folder / "firecracker", folder / "jailer", Version.parse(version))

        self._patch.setattr(host, "hardware_kvm", lambda: here.hardware)
        self._patch.setattr(choice, "find", found)


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Has:
    return Has(monkeypatch)


def config(**settings: object) -> Config:
    return load(Path("/nonexistent"), **settings)


@pytest.mark.parametrize(
    ("here", "chosen"),
    [
        (Here("auto", True, "1.16.2"), "firecracker"),
        (Here("auto", True, None), "qemu"),
        (Here("auto", False, "1.16.2"), "emulated"),
        (Here("auto", False, "1.12.1"), "emulated"),
        (Here("auto", False, None), "emulated"),
        (Here("qemu", True, "1.16.2"), "qemu"),
        (Here("qemu", False, None), "emulated"),
        (Here("firecracker", True, "1.16.2"), "firecracker"),
    ],
)
async def test_the_choice(has: Has, tmp_path: Path, here: Here, chosen: str) -> None:
    has(here)
    made = await default_vmm(config(vmm=here.vmm), tmp_path)
    assert ("emulated" if made.emulated else made.name) == chosen


@pytest.mark.parametrize(
    ("here", "says"),
    [
        (Here("firecracker", False, "1.16.2"), "needs hardware virtualization"),
        (Here("firecracker", True, None), "not installed"),
        (Here("firecracker", True, "1.12.1"), "known flaws: CVE-2026-122192"),
        (Here("auto", True, "1.12.1"), "known flaws"),
        (Here("auto", True, "1.17.0-dev"), "no release"),
    ],
)
async def test_what_cannot_be_is_an_error_with_a_way_out(
    has: Has, tmp_path: Path, here: Here, says: str
) -> None:
    has(here)
    with pytest.raises(ConfigError, match=says) as caught:
        await default_vmm(config(vmm=here.vmm), tmp_path)
    assert caught.value.hint


async def test_flaws_can_be_allowed(has: Has, tmp_path: Path) -> None:
    has(Here("firecracker", True, "1.12.1"))
    allowed = config(vmm="firecracker", allow_vulnerable_firecracker=True)
    assert (await default_vmm(allowed, tmp_path)).name == "firecracker"


async def test_the_limits_of_disks_come_from_the_settings(has: Has, tmp_path: Path) -> None:
    has(Here("auto", True, "1.16.2"))
    made = await default_vmm(config(disk_mib_per_second=3, disk_operations_per_second=7), tmp_path)
    assert isinstance(made, Firecracker)
    assert (made.disk_bytes, made.disk_operations) == (3 << 20, 7)
    made = await default_vmm(config(), tmp_path)
    assert isinstance(made, Firecracker)
    assert made.disk_bytes and made.disk_operations, "limits are on unless turned off"


def test_another_vmm_is_an_error() -> None:
    with pytest.raises(ConfigError, match="vmm"):
        config(vmm="xen")


@pytest.fixture(params=["nodev", "noexec"])
def lacking(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    option = str(request.param)
    subprocess.run(["mount", "-t", "tmpfs", "-o", option, "t", str(tmp_path)], check=True)
    yield option
    subprocess.run(["umount", str(tmp_path)], check=True)


async def test_a_state_folder_where_a_jail_cannot_work(
    has: Has, tmp_path: Path, lacking: str
) -> None:
    has(Here("auto", True, "1.16.2"))
    with pytest.raises(ConfigError, match=f"mounted {lacking}"):
        await default_vmm(config(), tmp_path / "state")


@pytest.mark.parametrize(
    ("here", "status", "used"),
    [
        (Here("auto", True, "1.16.2"), "ok", True),
        (Here("auto", True, None), "warn", False),
        (Here("auto", True, "1.12.1"), "fail", True),
        (Here("auto", False, None), "ok", False),
        (Here("auto", False, "1.12.1"), "warn", False),
        (Here("qemu", True, None), "ok", False),
        (Here("qemu", True, "1.12.1"), "warn", False),
        (Here("firecracker", True, None), "fail", True),
        (Here("firecracker", True, "1.15.0"), "fail", True),
        (Here("firecracker", False, "1.16.2"), "fail", True),
    ],
)
async def test_what_doctor_says(
    has: Has, tmp_path: Path, here: Here, status: str, used: bool
) -> None:
    has(here)
    settings = config(vmm=here.vmm)
    found = await firecracker_found(settings, tmp_path, hardware=here.hardware)
    assert (found.status, found.used) == (status, used)
    assert bool(found.fix) is (status != "ok")


async def test_doctor_looks_for_qemu_only_where_that_would_run(has: Has, tmp_path: Path) -> None:
    for here, names in (
        (Here("auto", True, "1.16.2"), ["firecracker"]),
        (Here("auto", True, None), ["firecracker", "qemu", "vsock"]),
    ):
        has(here)
        checks = await programs.vmms(config(vmm=here.vmm), tmp_path)
        assert [check.name for check in checks] == names


async def test_doctor_names_flaws_that_do_no_harm_as_such(has: Has, tmp_path: Path) -> None:
    has(Here("firecracker", True, "1.15.0"))
    settings = config(vmm="firecracker", allow_vulnerable_firecracker=True)
    found = await firecracker_found(settings, tmp_path, hardware=True)
    assert found.status == "warn" and found.fix and "which are allowed" in found.text
    assert "CVE-2026-122192" in found.text
    assert "CVE-2026-5747 does no harm: --enable-pci is never used" in found.text
