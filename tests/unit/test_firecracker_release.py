"""Versions of Firecracker: read from anything, compared with the flaws that are known."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cantelop_kernels.errors import ConfigError, ToolError
from cantelop_kernels.vmm import firecracker_release
from cantelop_kernels.vmm.firecracker_release import (
    FLAWS,
    RECOMMENDED,
    Version,
    examine,
    find,
    flaws,
    moot,
)

numbers = st.integers(min_value=0, max_value=999_999)
suffixes = st.from_regex(r"(-[0-9A-Za-z.+-]{1,64})?", fullmatch=True)
versions = st.builds(Version, numbers, numbers, numbers, suffixes)


@given(versions)
def test_a_version_is_read_as_it_is_written(version: Version) -> None:
    assert Version.parse(str(version)) == Version.parse(f"v{version}") == version


@given(st.text())
def test_anything_is_a_version_or_a_value_error(text: str) -> None:
    try:
        version = Version.parse(text)
    except ValueError:
        return
    assert str(version) == text.removeprefix("v") or any(part.startswith("0") for part in text)


@given(versions, versions)
def test_numbers_decide_the_order(one: Version, other: Version) -> None:
    if one.numbers < other.numbers:
        assert one < other


@given(versions)
def test_nothing_after_the_recommended_version_is_known_to_be_flawed(version: Version) -> None:
    if version.numbers >= RECOMMENDED.numbers and not version.suffix:
        assert not flaws(version)
    if version.suffix:
        assert "no release" in {one.name for one in flaws(version)}


@given(versions)
def test_nothing_before_the_recommended_version_is_without_a_flaw(version: Version) -> None:
    if version.numbers < RECOMMENDED.numbers and version.numbers >= (0, 23, 0):
        assert "CVE-2026-122192" in {one.name for one in flaws(version)}


@pytest.mark.parametrize(
    ("name", "has", "has_not"),
    [
        ("CVE-2026-122192", ["0.23.0", "1.12.1", "1.16.1", "1.16.2-rc1"], ["1.16.2", "2.0.0"]),
        ("CVE-2026-1386", ["0.10.0", "1.12.1", "1.13.1", "1.14.0"], ["1.13.2", "1.14.1", "1.16.0"]),
        ("CVE-2026-5747", ["1.13.0", "1.14.3", "1.15.0"], ["1.12.1", "1.14.4", "1.15.1"]),
        ("vsock after a restore", ["1.16.0"], ["1.15.1", "1.16.1"]),
        ("older than 1.12", ["1.11.9"], ["1.12.0"]),
    ],
)
def test_each_flaw_begins_and_ends_where_it_is_said_to(
    name: str, has: list[str], has_not: list[str]
) -> None:
    (flaw,) = [one for one in FLAWS if one.name == name]
    assert [text for text in has if not flaw.of(Version.parse(text))] == []
    assert [text for text in has_not if flaw.of(Version.parse(text))] == []


def test_what_is_never_used_keeps_nothing_from_running() -> None:
    version = Version(1, 15, 0)
    assert "CVE-2026-5747" not in {one.name for one in flaws(version)}
    assert [one.name for one in moot(version)] == ["CVE-2026-5747"]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Without what this host may have on its PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def program(folder: Path, name: str, says: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def pair(folder: Path, version: str) -> None:
    program(folder, "firecracker", f"Firecracker v{version}\n")
    program(folder, "jailer", f"Jailer v{version}")


async def test_nothing_installed(state: Path) -> None:
    assert await find(state) is None
    program(state / "bin", "firecracker", "Firecracker v1.16.2")
    assert await find(state) is None, "without a jailer it is of no use"


async def test_what_was_set_up_comes_before_what_is_on_the_path(state: Path) -> None:
    pair(state / "bin", "1.12.1")
    found = await find(state)
    assert found is not None and found.version == Version(1, 12, 1)
    pair(state / "tools" / "firecracker-1.16.2", "1.16.2")
    firecracker_release.link(state).symlink_to("firecracker-1.16.2")
    found = await find(state)
    assert found is not None and found.version == Version(1, 16, 2)
    assert found.firecracker == state / "tools" / "firecracker-1.16.2" / "firecracker"


async def test_programs_of_two_releases_are_refused(state: Path) -> None:
    pair(state / "bin", "1.16.2")
    program(state / "bin", "jailer", "Jailer v1.15.0")
    with pytest.raises(ToolError, match=r"version 1\.16\.2, but its jailer 1\.15\.0"):
        await find(state)


@pytest.mark.parametrize("says", ["", "hello", "Firecracker", "Firecracker vNext"])
async def test_a_program_that_tells_no_version_is_named(state: Path, says: str) -> None:
    pair(state / "bin", "1.16.2")
    program(state / "bin", "firecracker", says)
    with pytest.raises(ToolError, match="does not tell its version"):
        await find(state)


async def test_a_program_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="does not tell its version"):
        await examine(tmp_path / "firecracker", tmp_path / "jailer")


async def test_what_others_could_change_is_not_even_asked(state: Path) -> None:
    pair(state / "bin", "1.16.2")
    proof = state / "ran"
    program(state / "bin", "jailer", "Jailer v1.16.2").chmod(0o757)
    (state / "bin" / "firecracker").write_text(f"#!/bin/sh\ntouch {proof}\n")
    with pytest.raises(ConfigError, match="can be changed by others"):
        await find(state)
    assert not proof.exists()
