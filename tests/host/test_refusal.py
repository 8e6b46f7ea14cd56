"""The daemon does not start where a boundary would be hollow, and has done nothing by then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cantelop_kernels import config, daemon
from cantelop_kernels.errors import ConfigError, EmulationRefused
from cantelop_kernels.preflight import files, users
from cantelop_kernels.vmm import Vmm
from tests.fakes.fake_vmm import FakeVmm

BASE = 950_000


class Emulated(FakeVmm):
    emulated = True


async def made(_: Path) -> Vmm:
    return Emulated()


async def refused(place: Path, idle_seconds: float | None = None, **settings: object) -> str:
    """Why it does not start; nothing that clients would see is left."""
    loaded = config.load(place / "none.toml", uid_base=BASE, **settings)
    options = daemon.Options(place / "c.sock", place / "state", idle_seconds)
    with pytest.raises((ConfigError, EmulationRefused)) as caught:
        await daemon.serve(loaded, options, lambda: None, made)
    assert caught.value.hint
    assert not options.socket.exists()
    return caught.value.message


async def test_uids_of_a_user_are_not_taken_and_his_processes_live(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first deed would be to kill whatever runs under these uids."""
    monkeypatch.setattr(users, "host_users", lambda: [("root", 0), ("eve", BASE + 7)])
    process = await asyncio.create_subprocess_exec(
        "setpriv", f"--reuid={BASE + 7}", "--clear-groups", "sleep", "60"
    )
    try:
        message = await refused(place)
        assert "user eve (950007)" in message
        assert process.returncode is None
    finally:
        process.kill()
        await process.wait()


async def test_an_image_that_others_can_change(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = place / "root.erofs"
    image.touch()
    image.chmod(0o666)
    monkeypatch.setattr(files, "trusted_files", lambda state, settings: [image])
    assert str(image) in await refused(place)


async def test_emulation_that_nobody_has_allowed(place: Path) -> None:
    assert "no hardware virtualization" in await refused(place)


async def test_emulation_that_was_allowed_is_told_of(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for idle_seconds, allowed in ((0.2, True), (0.2, False)):
        caplog.clear()
        loaded = config.load(place / "none.toml", uid_base=BASE, allow_emulation=allowed)
        options = daemon.Options(place / "c.sock", place / "state", idle_seconds)
        await daemon.serve(loaded, options, lambda: None, made)
        assert "no security boundary" in caplog.text
