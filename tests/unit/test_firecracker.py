"""What Firecracker is told, how its jailer is started, and what lies in the jail before that."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from cantelop_kernels import jail
from cantelop_kernels.errors import LaunchError
from cantelop_kernels.jail import Jail
from cantelop_kernels.slot import Slot
from cantelop_kernels.vmm import Drive, VmSpec
from cantelop_kernels.vmm.firecracker import Firecracker
from cantelop_kernels.vmm.firecracker_config import CpuConfig, RateLimiter, TokenBucket
from cantelop_kernels.vmm.firecracker_release import Release, Version

SLOT = Slot(3, 600_000)
BOOT_ARGS = (
    "console=ttyS0 quiet panic=-1 reboot=k random.trust_cpu=on ipv6.disable=1 "
    "pci=off i8042.noaux i8042.nomux i8042.dumbkbd"
)


def firecracker(
    version: str = "1.16.2", cgroups: int = 2, disk_bytes: int = 0, disk_operations: int = 0
) -> Firecracker:
    folder = Path("/state/tools/firecracker-x")
    release = Release(folder / "firecracker", folder / "jailer", Version.parse(version))
    return Firecracker(release, cgroups, disk_bytes, disk_operations)


def spec(folder: Path = Path("/i"), vcpus: int = 2) -> VmSpec:
    drives = (Drive(folder / "root.erofs", True), Drive(folder / "scratch.img", False))
    return VmSpec(vcpus, 512, folder / "vmlinux", folder / "initramfs", drives)


def files(folder: Path) -> VmSpec:
    for name in ("root.erofs", "scratch.img", "vmlinux", "initramfs"):
        (folder / name).write_text(name)
    return spec(folder)


def place(folder: Path) -> Jail:
    """As `jail.make` leaves it, but for the owners, which only root can give."""
    made = Jail(SLOT, folder / SLOT.name, run_at=firecracker().run_at(SLOT))
    made.run.mkdir(parents=True)
    return made


def test_the_document_is_the_whole_machine() -> None:
    made = firecracker(disk_bytes=10_000_000, disk_operations=2_000)
    limit = {
        "bandwidth": {"size": 1_000_000, "refill_time": 100, "one_time_burst": 20_000_000},
        "ops": {"size": 200, "refill_time": 100, "one_time_burst": 4_000},
    }
    drive = {"is_root_device": False, "cache_type": "Unsafe", "io_engine": "Sync"}
    drive |= {"rate_limiter": limit}
    assert json.loads(made.document(spec()).encode()) == {
        "machine-config": {
            "vcpu_count": 2,
            "mem_size_mib": 512,
            "smt": False,
            "track_dirty_pages": False,
            "huge_pages": "None",
        },
        "cpu-config": "/vm/cpu.json",
        "boot-source": {
            "kernel_image_path": "/vm/kernel",
            "initrd_path": "/vm/initramfs",
            "boot_args": BOOT_ARGS,
        },
        "drives": [
            {"drive_id": "disk0", "path_on_host": "/vm/disk0", "is_read_only": True, **drive},
            {"drive_id": "disk1", "path_on_host": "/vm/disk1", "is_read_only": False, **drive},
        ],
        "vsock": {"guest_cid": 3, "uds_path": "/io/v.sock"},
        "entropy": {
            "rate_limiter": {
                "bandwidth": {"size": 6553, "refill_time": 100, "one_time_burst": 131_072}
            }
        },
        "balloon": {
            "amount_mib": 0,
            "deflate_on_oom": True,
            "stats_polling_interval_s": 0,
            "free_page_reporting": True,
        },
        "logger": {"level": "Warning", "show_level": True, "show_log_origin": False},
    }


def test_a_guest_gets_no_virtualization_of_its_own() -> None:
    """THREATS 1; the lab tries it on the real one."""
    clear = "0b" + "x" * 26 + "0" + "x" * 5, "0b" + "x" * 29 + "0" + "x" * 2
    assert json.loads(CpuConfig().encode()) == {
        "cpuid_modifiers": [
            {
                "leaf": leaf,
                "subleaf": "0x0",
                "flags": 0,
                "modifiers": [{"register": "ecx", "bitmap": bitmap}],
            }
            for leaf, bitmap in zip(("0x1", "0x80000001"), clear, strict=True)
        ]
    }


def test_mitigations_stay_on() -> None:
    assert "mitigations" not in BOOT_ARGS and "nokaslr" not in BOOT_ARGS


@pytest.mark.parametrize(
    ("version", "there"),
    [
        ("1.12.1", False),
        ("1.16.1", False),
        ("1.16.2-dev", False),
        ("1.16.2", True),
        ("1.17.0", True),
    ],
)
def test_no_balloon_where_a_discard_of_memory_is_unsafe(version: str, there: bool) -> None:
    assert ("balloon" in firecracker(version).document(spec()).to_json()) is there


def test_no_limit_is_no_rate_limiter() -> None:
    drives = firecracker().document(spec()).to_json()["drives"]
    assert not any("rate_limiter" in drive for drive in drives)
    assert RateLimiter.of(bytes_per_second=0, operations_per_second=0) is None
    assert TokenBucket.per_second(1) == TokenBucket(1, 100, 2)


def test_more_vcpus_than_it_can_are_said_so() -> None:
    with pytest.raises(LaunchError, match="32 vCPUs at most, not 33"):
        firecracker().document(spec(vcpus=33))


def test_the_jailer_is_told_all_of_it(tmp_path: Path) -> None:
    machine = files(tmp_path)
    os.truncate(tmp_path / "scratch.img", 4096 << 20)
    where = place(tmp_path)
    assert firecracker(cgroups=1).command(machine, where) == [
        "/state/tools/firecracker-x/jailer",
        *("--id", "cantelop-600000-3"),
        *("--exec-file", "/state/tools/firecracker-x/firecracker"),
        *("--uid", "600012", "--gid", "600012"),
        *("--chroot-base-dir", str(where.folder)),
        *("--cgroup-version", "1", "--parent-cgroup", "cantelop/cantelop-600000-3"),
        *("--resource-limit", "no-file=2048"),
        *("--resource-limit", "fsize=4294967296"),
        *("--", "--config-file", "/vm/config.json", "--no-api"),
    ]


def test_a_machine_without_a_writable_disk_may_write_no_file(tmp_path: Path) -> None:
    machine = VmSpec(1, 256, Path("/i/vmlinux"), Path("/i/initramfs"), ())
    assert "fsize=0" in firecracker().command(machine, place(tmp_path))


def test_the_name_of_the_program_is_part_of_its_root() -> None:
    """The jailer's rule: `<chroot-base-dir>/<program's name>/<id>/root`."""
    release = Release(Path("/b/firecracker-v1.16.2-x86_64"), Path("/b/jailer"), Version(1, 16, 2))
    made = Firecracker(release, 2)
    assert made.run_at(SLOT) == "firecracker-v1.16.2-x86_64/cantelop-600000-3/root/io"


def test_the_jail_holds_the_very_files_and_no_more(tmp_path: Path) -> None:
    machine, where = files(tmp_path), place(tmp_path)
    before = os.umask(0o077)
    try:
        firecracker().furnish(machine, where)
    finally:
        os.umask(before)
    vm = where.run.parent / "vm"
    assert sorted(os.listdir(where.run.parent)) == ["io", "vm"]
    expected = ["config.json", "cpu.json", "disk0", "disk1", "initramfs", "kernel"]
    assert sorted(os.listdir(vm)) == expected
    for name, source in (("kernel", "vmlinux"), ("disk0", "root.erofs"), ("disk1", "scratch.img")):
        assert (vm / name).samefile(tmp_path / source)
    assert stat.S_IMODE((vm / "config.json").stat().st_mode) == 0o644
    assert stat.S_IMODE(vm.stat().st_mode) == 0o755
    assert json.loads((vm / "config.json").read_text())["vsock"]["uds_path"] == "/io/v.sock"


def test_no_link_is_followed_into_the_jail(tmp_path: Path) -> None:
    machine, where = files(tmp_path), place(tmp_path)
    (tmp_path / "vmlinux").rename(tmp_path / "elsewhere")
    (tmp_path / "vmlinux").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match="no regular file"):
        firecracker().furnish(machine, where)


@pytest.mark.parametrize("name", ["vm", "vm/config.json", "vm/kernel"])
def test_nothing_that_is_there_already_is_used(tmp_path: Path, name: str) -> None:
    """THREATS.md 9: a name that was taken before is an attack, whatever lies there."""
    machine, where = files(tmp_path), place(tmp_path)
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    there = where.run.parent / name
    there.parent.mkdir(exist_ok=True)
    there.symlink_to(canary)
    with pytest.raises(FileExistsError):
        firecracker().furnish(machine, where)
    assert canary.read_text() == "untouched"


def test_files_of_another_file_system_are_said_so(tmp_path: Path) -> None:
    other = Path("/proc/version")
    machine, where = files(tmp_path), place(tmp_path)
    foreign = VmSpec(1, 512, other, machine.initramfs, machine.drives)
    with pytest.raises(LaunchError, match="another file system"):
        firecracker().furnish(foreign, where)


def test_the_run_folder_of_a_jail_is_where_the_vmm_wants_it() -> None:
    plain = Jail(SLOT, Path("/s") / SLOT.name)
    assert plain.run == Path("/s/cantelop-600000-3/run") and plain.run_at == jail.RUN
    inside = Jail(SLOT, plain.folder, run_at=firecracker().run_at(SLOT))
    assert inside.run == plain.folder / "firecracker" / SLOT.name / "root" / "io"
