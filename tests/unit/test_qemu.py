"""The VMM's command lines are pure functions of the spec."""

from __future__ import annotations

from pathlib import Path

from cantelop_kernels.vmm import Drive, VmSpec
from cantelop_kernels.vmm.qemu import Qemu

SPEC = VmSpec(
    vcpus=2,
    memory_mib=512,
    kernel=Path("/i/vmlinux"),
    initramfs=Path("/i/initramfs"),
    drives=(Drive(Path("/i/a,b.erofs"), True), Drive(Path("/s/scratch.img"), False)),
)


def qemu(emulated: bool) -> Qemu:
    return Qemu(Path("/usr/bin/qemu"), Path("/t/vhost"), emulated, tsc_khz=2_000_000)


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_hardware_keeps_its_mitigations() -> None:
    command = qemu(emulated=False).command(SPEC)
    assert option(command, "-accel") == "kvm"
    assert "mitigations" not in option(command, "-append")
    assert "tsc=reliable" not in option(command, "-append")


def test_emulation_tells_the_guest_its_clock() -> None:
    append = option(qemu(emulated=True).command(SPEC), "-append").split()
    assert {"tsc=reliable", "tsc_early_khz=2000000", "lpj=8000000"} <= set(append)


def test_the_machine_has_what_the_spec_says_and_no_more() -> None:
    command = qemu(emulated=True).command(SPEC)
    assert option(command, "-smp") == "2"
    assert option(command, "-m") == "512M"
    assert [command[i + 1] for i, word in enumerate(command) if word == "-device"] == [
        "virtio-blk-device,drive=disk0",
        "virtio-blk-device,drive=disk1",
        "virtio-rng-device",
        "vhost-user-vsock-device,chardev=vsock",
    ]
    assert "-nodefaults" in command and "-no-user-config" in command
    assert option(command, "-monitor") == "none"
    assert "spawn=deny" in option(command, "-sandbox")


def test_a_comma_in_a_path_adds_no_option() -> None:
    drive = option(qemu(emulated=True).command(SPEC), "-drive")
    assert "file=/i/a,,b.erofs,readonly=on" in drive


def test_the_base_image_is_read_only_and_the_scratch_disk_is_not() -> None:
    command = qemu(emulated=True).command(SPEC)
    drives = [command[i + 1] for i, word in enumerate(command) if word == "-drive"]
    assert ["readonly=on" in drive for drive in drives] == [True, False]
