"""One daemon on real Firecracker for all tests inside the lab."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cantelop_kernels import client
from tests.lab.inside.stack import UID_BASE, Daemon, release_archive, serve, stop


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = release_archive(tmp_path_factory.mktemp("release"))
    known = hashlib.sha256(path.read_bytes()).hexdigest()
    argv = ["cantelop", "setup-firecracker", str(path), "--sha256", known]
    refused = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert refused.returncode == 1 and "CVE-2026-1386" in refused.stderr
    subprocess.run([*argv, "--allow-vulnerable"], check=True, capture_output=True)


@pytest.fixture(scope="session")
def daemon(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    process, ours = serve(tmp_path_factory.mktemp("daemon"), UID_BASE)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ours.items():
            patch.setenv(name, value)
        try:
            yield Daemon(client.Client(Path(ours["CANTELOP_SOCKET"])), process.pid)
        finally:
            stop(process, UID_BASE)
