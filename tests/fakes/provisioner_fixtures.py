"""Fixtures for tests of the provisioner: a fake daemon, and kernelspecs that lead to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from tests.fakes.clients import Start, WriteSpec
from tests.fakes.fake_daemon import FakeDaemon

USUAL = ["python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"]


@pytest.fixture
def fake_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path_factory.mktemp("d")).running() as daemon:
        yield daemon


@pytest.fixture
def write_spec(
    fake_daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> WriteSpec:
    """Writes a kernelspec and returns its name; `sandboxed` is there from the start."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("CANTELOP_SOCKET", str(fake_daemon.path))

    def write(name: str = "sandboxed", *, config: dict[str, Any] | None = None, **spec: Any) -> str:
        folder = tmp_path / "jupyter" / "kernels" / name
        folder.mkdir(parents=True, exist_ok=True)
        stanza = {"provisioner_name": "cantelop", "config": config or {}}
        metadata = spec.pop("metadata", {}) | {"kernel_provisioner": stanza}
        usual = {"argv": USUAL, "display_name": name, "language": "python", "metadata": metadata}
        (folder / "kernel.json").write_text(json.dumps(usual | spec))
        return name

    write()
    return write


@pytest.fixture
async def start(write_spec: WriteSpec) -> AsyncIterator[Start]:
    """Starts a kernel and a client that is ready; both are ended after the test."""
    made: list[tuple[AsyncKernelManager, AsyncKernelClient]] = []

    async def begin(
        name: str = "sandboxed", **kwargs: Any
    ) -> tuple[AsyncKernelManager, AsyncKernelClient]:
        manager = AsyncKernelManager(kernel_name=name)
        await manager.start_kernel(**kwargs)
        client = manager.client()
        client.start_channels()
        made.append((manager, client))
        await client.wait_for_ready(timeout=30)
        return manager, client

    yield begin
    for manager, client in made:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
