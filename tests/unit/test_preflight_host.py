"""What `doctor` makes of a host's CPU, memory and users; the hosts are made up in folders."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cantelop_kernels import config, preflight
from cantelop_kernels.preflight import Check, cpu, linux, memory, model, programs, users

OURS = range(600_000, 604_096)


@pytest.mark.parametrize(
    ("state", "open_"),
    [
        ("Not affected", False),
        ("Mitigation: PTI", False),
        ("Mitigation: Clear CPU buffers; SMT vulnerable", True),
        ("Mitigation: Clear CPU buffers; SMT disabled", False),
        ("Vulnerable", True),
        ("Vulnerable: Safe RET, no microcode", True),
        ("KVM: Vulnerable", True),
        ("Processor vulnerable", True),
        ("Unknown: No mitigations", True),
        ("Mitigation: Retpolines; BHI: Not affected", False),
        ("", False),
    ],
)
def test_what_linux_says_of_a_flaw(state: str, open_: bool) -> None:
    assert (cpu.vulnerable({"flaw": state}) == ["flaw"]) is open_


def test_open_flaws_are_named_and_worth_a_warning_on_hardware_only(tmp_path: Path) -> None:
    (tmp_path / "mds").write_text("Vulnerable: Clear CPU buffers attempted, no microcode\n")
    (tmp_path / "meltdown").write_text("Mitigation: PTI\n")
    found = cpu.mitigations(emulated=False, folder=tmp_path)
    assert found.status == "warn" and "mds" in found.found and "meltdown" not in found.found
    assert found.fix
    assert cpu.mitigations(emulated=True, folder=tmp_path).status == "ok"
    assert cpu.mitigations(emulated=False, folder=tmp_path / "none").status == "ok"


@pytest.mark.parametrize(
    ("state", "status"),
    [("on", "warn"), ("off", "ok"), ("forceoff", "ok"), ("notsupported", "ok"), (None, "ok")],
)
def test_smt(tmp_path: Path, state: str | None, status: str) -> None:
    if state is not None:
        (tmp_path / "control").write_text(f"{state}\n")
    found = cpu.smt(emulated=False, control=tmp_path / "control")
    assert found.status == status
    assert bool(found.fix) == (status == "warn")
    assert cpu.smt(emulated=True, control=tmp_path / "control").status == "ok"


def test_nested_paging(tmp_path: Path) -> None:
    info, modules = tmp_path / "cpuinfo", tmp_path / "module"
    info.write_text("flags\t\t: fpu vmx\nvmx flags\t: vnmi ept vpid\n")
    assert cpu.nested_paging(True, info, modules).found == "the CPU has ept"
    info.write_text("flags\t\t: fpu vmx except\n")  # no flag, only letters of one
    assert cpu.nested_paging(True, info, modules).status == "warn"
    assert cpu.nested_paging(False, info, modules).status == "ok"
    info.write_text("flags\t\t: fpu svm npt\n")
    parameters = modules / "kvm_amd/parameters"
    parameters.mkdir(parents=True)
    (parameters / "npt").write_text("0\n")
    found = cpu.nested_paging(True, info, modules)
    assert found.status == "warn" and "npt=0" in found.found and "npt=0" in found.fix
    (parameters / "npt").write_text("Y\n")
    assert cpu.nested_paging(True, info, modules).status == "ok"


def test_ksm(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert memory.ksm(emulated=False, run=run).status == "ok"
    for state, status in (("0", "ok"), ("2", "ok"), ("1", "warn")):
        run.write_text(f"{state}\n")
        assert memory.ksm(emulated=False, run=run).status == status
    assert memory.ksm(emulated=True, run=run).status == "ok"


SWAPS = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"


def test_swap(tmp_path: Path) -> None:
    swaps = tmp_path / "swaps"
    for text, status in (
        ("", "ok"),
        (SWAPS, "ok"),
        (SWAPS + "/dev/zram0  partition  8388604  0  100\n", "ok"),
        (SWAPS + "/dev/zram0 partition 8 0 100\n/swap\\040file  file  1  0  -2\n", "warn"),
    ):
        swaps.write_text(text)
        found = memory.swap(emulated=False, swaps=swaps)
        assert found.status == status, text
        assert "/dev/zram0" not in found.found
    assert memory.swap(emulated=True, swaps=swaps).status == "ok"


@given(st.lists(st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1), max_size=5))
def test_every_area_of_swap_is_found(names: list[str]) -> None:
    lines = [f"{name} \t partition\t1024\t0\t-2" for name in names]
    assert memory.swap_areas("\n".join(["Filename Type", *lines])) == names


def test_uids_that_somebody_has(tmp_path: Path) -> None:
    nobody = [("root", 0), ("ann", 599_999), ("ben", 604_096)]
    assert users.uids(OURS, nobody, nobody, tmp_path).status == "ok"
    found = users.uids(OURS, [*nobody, ("eve", 600_000)], nobody, tmp_path)
    assert found.status == "fail" and "user eve (600000)" in found.found and found.fix
    found = users.uids(OURS, nobody, [("staff", 604_095)], tmp_path)
    assert found.status == "fail" and "group staff (604095)" in found.found
    many = [(f"u{n}", 600_000 + n) for n in range(9)]
    assert "and 6 more" in users.uids(OURS, many, [], tmp_path).found


def test_uids_that_somebody_may_map(tmp_path: Path) -> None:
    (tmp_path / "subuid").write_text("ann:100000:65536\nben:558752:65536\n")
    found = users.uids(OURS, [], [], tmp_path)
    assert found.status == "warn" and "ben (subuid)" in found.found and "ann" not in found.found
    (tmp_path / "subuid").write_text("ann:604096:65536\n")
    (tmp_path / "subgid").write_text("ann:603000:65536\n")
    assert "ann (subgid)" in users.uids(OURS, [], [], tmp_path).found


def test_lines_that_are_none_of_subuid_are_passed_over() -> None:
    text = "\n# text\nann:1\nann:x:5\nann:1:2:3\nann:-1:5\nann:²:5\n ben:10:5 \n"
    assert users.subordinate(text) == [("ben", range(10, 15))]


@given(st.text(alphabet="a:0123456789\n#-², "))
def test_no_text_of_subuid_is_an_error(text: str) -> None:
    assert all(len(numbers) >= 0 for _, numbers in users.subordinate(text))


ranges = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda r: range(r[0], r[0] + r[1]))


@given(ranges, ranges)
def test_overlap_is_what_sets_say(one: range, other: range) -> None:
    assert users.overlap(one, other) is bool(set(one) & set(other))
    assert users.overlap(one, other) is users.overlap(other, one)


def test_the_real_user_database_is_read() -> None:
    assert ("root", 0) in users.host_users() and ("root", 0) in users.host_groups()


async def test_the_packet_filter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    assert "not installed" in (await linux.nftables()).found
    nft = tmp_path / "nft"
    nft.write_text("#!/bin/sh\necho 'Protocol not supported' >&2\nexit 1\n")
    nft.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name, path: str(nft))
    found = await linux.nftables()
    if os.geteuid() == 0:
        assert found.status == "warn" and "Protocol not supported" in found.found
        ours = Path("/proc/self/ns/net").readlink()
        nft.write_text(f'#!/bin/sh\ntest "$(readlink /proc/self/ns/net)" != "{ours}"\n')
        assert (await linux.nftables()).status == "ok"  # the host's own rules are not touched


async def test_the_vsock_helper(tmp_path: Path) -> None:
    assert (await programs.vsock(None)).status == "warn"
    helper = tmp_path / "helper"
    helper.write_text("#!/bin/sh\necho helper 0.3.0\n")
    helper.chmod(0o755)
    assert (await programs.vsock(helper)).found.startswith("helper 0.3.0 (")
    helper.write_text("#!/bin/sh\necho 'GLIBC_2.34 not found' >&2\nexit 1\n")
    found = await programs.vsock(helper)
    assert found.status == "fail" and "GLIBC_2.34 not found" in found.found


def test_small_files(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b" \xff1 \n")
    assert model.text_of(tmp_path / "x") == "\ufffd1"
    assert model.text_of(tmp_path) == "" == model.text_of(tmp_path / "none")


def test_only_a_failure_keeps_the_daemon_from_starting() -> None:
    fine = [Check("a", "ok", "good"), Check("b", "warn", "meh", "do this")]
    assert preflight.refusal(fine) is None
    refused = preflight.refusal([*fine, Check("uids", "fail", "taken", "take others")])
    assert refused is not None
    assert (refused.message, refused.hint) == ("not safe to start (uids): taken", "take others")


def test_the_boundary_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config.load(tmp_path / "none.toml", uid_base=950_000)
    names = {one.name for one in preflight.boundary(settings, tmp_path)}
    assert names == {"uids", "ownership", "namespaces", "cgroups"}
    monkeypatch.setattr(users, "host_users", lambda: [("eve", 954_095)])
    assert "eve" in {one.name: one.found for one in preflight.boundary(settings, tmp_path)}["uids"]
