"""The real stack for Jupyter's clients: one daemon for the session, real microVMs, our kernelspec.

A cold boot takes seconds under emulation, so the tests of one module share a kernel where they can.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from cantelop_kernels.schema import SessionView
from tests.fakes.blocking import sessions

REPO = Path(__file__).parents[2]
UID_BASE = 720_000
UIDS = range(UID_BASE, UID_BASE + 4096)
READY = 60.0
"""Seconds until a kernel that was started answers; a cold boot takes about 9 under emulation."""

CONFIG = f"""
uid_base = {UID_BASE}
max_sessions = 8

[apps.default]
env = ["LANG", "TZ", "MPLBACKEND", "FROM_SPEC"]

[apps.small]
memory_mib = 320
"""

SPECS: dict[str, dict[str, Any]] = {
    "cantelop-small": {"config": {"app": "small"}},
    "cantelop-own": {
        "config": {"app": "default"},
        "argv": ["python3", "-X", "dev", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "env": {"FROM_SPEC": "a value", "NOT_ALLOWED": "x"},
    },
    "cantelop-brief": {
        "config": {"app": "default"},
        "argv": ["python3", "-c", "raise SystemExit(3)"],
    },
}


@dataclass(frozen=True)
class Stack:
    """What a test may look at."""

    socket: Path
    state: Path

    def live(self) -> list[SessionView]:
        return [one for one in sessions(self.socket) if one.state != "exited"]

    def last(self) -> SessionView:
        return max(sessions(self.socket), key=lambda one: one.created)

    def vmms(self) -> list[psutil.Process]:
        """Processes of the sandboxes that are QEMU."""
        found = []
        for process in psutil.process_iter(["uids", "name"]):
            uids = process.info["uids"]
            if uids and uids.real in UIDS and process.info["name"].startswith("qemu"):
                found.append(process)
        return found


def _write_specs(folder: Path) -> None:
    template = json.loads((REPO / "share/jupyter/kernels/cantelop-python3/kernel.json").read_text())
    for name, spec in SPECS.items():
        stanza = {"provisioner_name": "cantelop", "config": spec["config"]}
        rest = {key: value for key, value in spec.items() if key != "config"}
        made = template | rest | {"metadata": {"kernel_provisioner": stanza}}
        (folder / "kernels" / name).mkdir(parents=True)
        (folder / "kernels" / name / "kernel.json").write_text(json.dumps(made))


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A daemon of our own, and an environment in which Jupyter finds it and the kernelspecs."""
    folder = tmp_path_factory.mktemp("s")
    state = Path(os.environ.get("CANTELOP_TEST_STATE") or REPO / ".cache" / "state")
    (folder / "cantelop.toml").write_text(CONFIG)
    _write_specs(folder / "jupyter")
    paths = [str(folder / "jupyter"), str(REPO / "share" / "jupyter")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANTELOP_STATE", str(state))
        patch.setenv("CANTELOP_CONFIG", str(folder / "cantelop.toml"))
        patch.setenv("CANTELOP_SOCKET", str(folder / "d.sock"))
        patch.setenv("JUPYTER_PATH", os.pathsep.join(paths))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        patch.setenv("JUPYTER_DATA_DIR", str(folder / "data"))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        with _daemon(folder / "daemon.log"):
            yield Stack(folder / "d.sock", state)
    assert not [p for p in psutil.process_iter(["uids"]) if p.info["uids"].real in UIDS]
    assert not list((state / "sandboxes").glob(f"cantelop-{UID_BASE}-*"))


@contextmanager
def _daemon(log: Path) -> Iterator[None]:
    read, write = os.pipe()
    argv = [sys.executable, "-m", "cantelop_kernels", "serve", "--allow-emulation"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*argv, "--ready-fd", str(write)], stdout=out, stderr=out, pass_fds=[write]
        )
    os.close(write)
    with os.fdopen(read) as ready:
        said = ready.read()
    assert said == "ready\n", said + log.read_text()
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()[-4000:]


@contextmanager
def running(name: str) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """A kernel and a client that is ready; both are ended at the end."""
    manager = KernelManager(kernel_name=name)
    manager.start_kernel()
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=READY)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(stack: Stack) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """One kernel for all tests of a module that do not end it."""
    with running("cantelop-python3") as made:
        yield made


@pytest.fixture
def manager(kernel: tuple[KernelManager, BlockingKernelClient]) -> KernelManager:
    return kernel[0]


@pytest.fixture
def client(kernel: tuple[KernelManager, BlockingKernelClient]) -> BlockingKernelClient:
    return kernel[1]
