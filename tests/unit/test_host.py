"""The machine's facts, from texts of real /proc files."""

from __future__ import annotations

import pytest

from cantelop_kernels import host

INTEL = """processor	: 0
vendor_id	: GenuineIntel
model name	: Intel(R) Xeon(R) CPU E5-2670 v3 @ 2.30GHz
cpu MHz		: 1199.998
flags		: fpu vme de pse tsc msr pae sse2 ht vmx smx est ept
vmx flags	: vnmi preemption_timer
"""
AMD = """processor	: 0
model name	: AMD EPYC 7B13
cpu MHz		: 2449.998
flags		: fpu vme de pse tsc msr npt svm nrip_save
"""
CLOUD = """processor	: 0
model name	: AMD EPYC
cpu MHz		: 2595.124
flags		: fpu vme de pse tsc msr hypervisor svmx xvmx
"""


@pytest.mark.parametrize(
    ("cpuinfo", "kvm", "expected"),
    [
        (INTEL, True, True),
        (AMD, True, True),
        (INTEL, False, False),
        (CLOUD, True, False),  # the device is there and lies
        (CLOUD, False, False),
        ("", True, False),
    ],
)
def test_hardware_needs_the_flag_and_the_device(cpuinfo: str, kvm: bool, expected: bool) -> None:
    assert host.hardware_virtualization(cpuinfo, kvm) is expected


@pytest.mark.parametrize(
    ("cpuinfo", "khz"),
    [(INTEL, 2_300_000), (AMD, 2_449_998), (CLOUD, 2_595_124), ("", host.FALLBACK_KHZ)],
)
def test_clock_prefers_the_nominal_rate(cpuinfo: str, khz: int) -> None:
    assert host.khz_from_cpuinfo(cpuinfo) == khz


def test_available_memory_is_in_bytes() -> None:
    assert host.available_from_meminfo("MemTotal: 9 kB\nMemAvailable:   2048 kB\n") == 2 << 20
    assert host.available_from_meminfo("MemTotal: 9 kB\n") == 0


def test_this_machine_answers() -> None:
    assert host.tsc_khz() > 500_000
    assert host.memory_available() > 1 << 20
    assert host.hardware_kvm() in (True, False)


def test_oom_kills_are_counted() -> None:
    assert host.oom_kills_from_vmstat("nr_free_pages 1\noom_kill 12\nmy_oom_kill 9\n") == 12
    assert host.oom_kills_from_vmstat("nr_free_pages 1\n") == 0
    assert host.oom_kills() >= 0
