"""Each check of `cantelop doctor`, with what it must notice made in a folder of the test's own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cantelop_kernels import __main__ as entry
from cantelop_kernels.cli import doctor
from cantelop_kernels.preflight import (
    Check,
    cpu,
    files,
    jupyter,
    linux,
    service,
)
from cantelop_kernels.trust import changeable_by_others


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that every user can enter, as a state folder must be; pytest's own are closed."""
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and not path.stat().st_mode & 1:
            path.chmod(path.stat().st_mode | 0o011)
    yield tmp_path


def test_no_hardware_is_a_failure_unless_emulation_is_allowed() -> None:
    assert cpu.virtualization(True, True, allowed=False).status == "ok"
    lying = cpu.virtualization(False, True, allowed=False)
    assert lying.status == "fail" and "neither vmx nor svm" in lying.found and lying.fix
    assert cpu.virtualization(False, False, allowed=False).found == "no /dev/kvm"
    allowed = cpu.virtualization(False, True, allowed=True)
    assert allowed.status == "warn" and "no security boundary" in allowed.found


def test_namespaces_that_are_missing_or_limited_to_none(tmp_path: Path) -> None:
    assert linux.namespaces().status == "ok"
    (tmp_path / "self/ns").mkdir(parents=True)
    for kind in ("net", "mnt"):
        (tmp_path / "self/ns" / kind).touch()
    assert linux.namespaces(tmp_path).found == "not available: user"
    (tmp_path / "self/ns/user").touch()
    (tmp_path / "sys/user").mkdir(parents=True)
    (tmp_path / "sys/user/max_net_namespaces").write_text("0\n")
    assert linux.namespaces(tmp_path).found == "not available: net"


def test_cgroups_of_version_1_and_hybrid(tmp_path: Path) -> None:
    nothing = linux.cgroups(tmp_path)
    assert nothing.status == "warn" and "no control groups" in nothing.found and nothing.fix
    (tmp_path / "memory").mkdir()
    found = linux.cgroups(tmp_path)
    assert found.status == "warn" and found.found.startswith("version 1")
    assert "no CPU quotas, limits of processes" in found.found
    for name in ("cpu", "pids", "blkio"):
        (tmp_path / name).mkdir()
    assert "without freezer" in linux.cgroups(tmp_path).found
    (tmp_path / "freezer").mkdir()
    assert linux.cgroups(tmp_path).status == "ok"
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified/cgroup.controllers").write_text("\n")
    found = linux.cgroups(tmp_path)
    assert found.status == "ok" and "beside an empty version 2" in found.found
    assert "io" in found.found  # blkio, by the name of today


def test_cgroups_of_version_2(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").touch()
    (tmp_path / "cgroup.controllers").write_text("cpu io\n")
    found = linux.cgroups(tmp_path, required=True)
    assert found.status == "fail" and "memory, pids not there" in found.found
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    found = linux.cgroups(tmp_path, required=True)
    assert found.status == "ok" and found.found.startswith("version 2 (cpu")
    (tmp_path / "cgroup.subtree_control").unlink()  # nobody can turn a controller on
    found = linux.cgroups(tmp_path, required=True)
    if os.geteuid() == 0:
        assert found.status == "fail" and "cannot be changed" in found.found


def test_the_state_folder(folder: Path) -> None:
    assert files.state_folder(folder / "not" / "yet").status in ("ok", "warn")
    (folder / "file").touch()
    assert "not a folder" in files.state_folder(folder / "file").found
    assert files.state_folder(folder, free_fail=1 << 62).status == "fail"
    assert files.state_folder(folder, free_fail=0, free_warn=1 << 62).status == "warn"
    (folder / "closed").mkdir(mode=0o700)
    assert "closed to other users" in files.state_folder(folder / "closed").found


def test_an_image_that_is_missing_says_how_to_build_it(tmp_path: Path) -> None:
    found = files.image(tmp_path, "python3")
    assert found.status == "fail" and "cantelop image build" in found.fix


async def test_nobody_on_the_socket(tmp_path: Path) -> None:
    (found,) = await service.daemon(tmp_path / "none.sock")
    assert found.status == ("ok" if os.geteuid() == 0 else "fail")
    assert "none" in found.found


def write_spec(folder: Path, name: str, provisioner: str | None) -> None:
    spec: dict[str, object] = {"argv": ["x"], "display_name": name, "metadata": {}}
    if provisioner:
        spec["metadata"] = {"kernel_provisioner": {"provisioner_name": provisioner}}
    (folder / name).mkdir(parents=True)
    (folder / name / "kernel.json").write_text(json.dumps(spec))


def test_a_kernelspec_that_jupyter_hides_is_named(tmp_path: Path) -> None:
    write_spec(tmp_path, "plain", None)
    write_spec(tmp_path, "other", "gone-provisioner")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/kernel.json").write_text("[")
    found = list(jupyter.kernelspec_checks([tmp_path, tmp_path / "none"], {"cantelop"}))
    assert [check.status for check in found] == ["warn", "warn"]
    assert "gone-provisioner" in found[0].found and "install" in found[1].fix
    write_spec(tmp_path, "cantelop-python3", "cantelop")
    found = list(jupyter.kernelspec_checks([tmp_path], {"cantelop", "gone-provisioner"}))
    assert [(c.status, c.found) for c in found] == [("ok", "installed: cantelop-python3")]
    found = list(jupyter.kernelspec_checks([tmp_path], {"gone-provisioner"}))
    assert found[0].status == "fail" and "hides" in found[0].found


def test_our_provisioner_is_installed_here() -> None:
    assert not [check for check in jupyter.kernelspecs() if check.status == "fail"]


@pytest.fixture
def trusted(folder: Path) -> Path:
    inner = folder / "bin"
    inner.mkdir(mode=0o755)
    program = inner / "program"
    program.touch(mode=0o755)
    return program


def test_files_and_folders_that_others_can_change_are_named(trusted: Path, folder: Path) -> None:
    assert changeable_by_others(trusted) is None
    trusted.chmod(0o757)
    assert changeable_by_others(trusted) == trusted
    trusted.chmod(0o755)
    trusted.parent.chmod(0o777)
    assert changeable_by_others(trusted) == trusted.parent
    trusted.parent.chmod(0o1777)
    assert changeable_by_others(trusted) is None
    trusted.chmod(0o1757)  # the sticky bit means nothing on a file
    assert changeable_by_others(trusted) == trusted
    assert changeable_by_others(folder / "missing") is None


def test_a_link_in_a_folder_of_others_is_named(trusted: Path, folder: Path) -> None:
    links = folder / "links"
    links.mkdir()
    links.chmod(0o777)
    link = links / "program"
    link.symlink_to(trusted)
    assert changeable_by_others(link) == links


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_owner_or_group_is_named(trusted: Path) -> None:
    os.chown(trusted, 4242, 0)
    assert changeable_by_others(trusted) == trusted
    os.chown(trusted, 0, 4242)
    assert changeable_by_others(trusted) is None
    trusted.chmod(0o775)
    assert changeable_by_others(trusted) == trusted
    found = files.ownership([trusted])
    assert found.status == "fail" and str(trusted) in found.fix


def test_a_summary_says_whether_sandboxes_can_run() -> None:
    fine = [Check("a", "ok", "good"), Check("longer", "warn", "meh", "do this")]
    assert doctor.render(fine).splitlines() == [
        "ok    a       good",
        "warn  longer  meh",
        "              fix: do this",
        "",
        "sandboxes can run here (1 warnings)",
    ]
    assert "1 of 1 checks failed" in doctor.render([Check("a", "fail", "bad", "x")])


async def test_doctor_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CANTELOP_STATE", str(tmp_path))
    monkeypatch.setenv("CANTELOP_SOCKET", str(tmp_path / "none.sock"))
    monkeypatch.setenv("CANTELOP_CONFIG", str(tmp_path / "bad.toml"))
    (tmp_path / "bad.toml").write_text("nonsense = 1\n")
    args = entry.build_parser(["doctor"]).parse_args(["doctor", "--json", "--allow-emulation"])
    assert await doctor.command(args) == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert found["configuration"]["status"] == "fail"
    assert "nonsense" in found["configuration"]["found"]
    assert found["image python3"]["status"] == "fail"
    assert found["virtualization"]["status"] in ("ok", "warn")
