"""Fetching vhost-device-vsock for real, and not trusting what was fetched before."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from cantelop_kernels.process import run
from cantelop_kernels.tools import ensure_vhost_device_vsock, find_vhost_device_vsock

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="apt with a state of its own needs root")


async def test_it_is_fetched_once_and_again_when_broken(tmp_path: Path) -> None:
    first, second = await asyncio.gather(*(ensure_vhost_device_vsock(tmp_path) for _ in range(2)))
    assert first == second == find_vhost_device_vsock(tmp_path)
    await run([str(first), "--version"], deadline=30)
    assert first.stat().st_mode & 0o777 == 0o755
    with first.open("ab") as stream:
        stream.write(b"x")
    assert find_vhost_device_vsock(tmp_path) != first
    assert await ensure_vhost_device_vsock(tmp_path) == first
    left = {path.name for path in (tmp_path / "tools").iterdir()}
    assert left == {".lock", "vhost-device-vsock", first.parent.name}
