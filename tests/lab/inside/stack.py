"""The product's daemon on real Firecracker, for the tests inside the lab (`conftest`)."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cantelop_kernels import cgroup, client, jail, schema
from tests.fakes.host_stack import KEY
from tests.lab.inside.raw_firecracker import FIRECRACKER, JAILER

STATE = Path("/var/lib/cantelop")
UID_BASE = 600_000
OTHER = 610_000
"""Of a second daemon, which some tests start and kill."""
READY = 240.0
CONFIG = """
uid_base = {uid_base}
vmm = "firecracker"
allow_vulnerable_firecracker = true
boot_deadline = 240.0
silence_seconds = 120.0
grace_seconds = 0.0
drain_seconds = 0.0
queue_seconds = 200.0

[apps.default]
memory_mib = 384
"""


def release_archive(folder: Path) -> Path:
    """As Firecracker's project publishes one."""
    path = folder / "firecracker-v1.12.1-x86_64.tgz"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for program in (FIRECRACKER, JAILER):
            name = f"release-v1.12.1-x86_64/{program.name}-v1.12.1-x86_64"
            archive.add(program, name)
    return path


@dataclass
class Daemon:
    client: client.Client
    pid: int

    async def create(self, **fields: Any) -> schema.SessionView:
        return await self.client.create(schema.SessionRequest(key=KEY, **fields))


def serve(
    folder: Path, uid_base: int, more: str = ""
) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    folder.mkdir(exist_ok=True)
    config = folder / "cantelop.toml"
    config.write_text(CONFIG.format(uid_base=uid_base) + more)
    ours = {"CANTELOP_CONFIG": str(config), "CANTELOP_SOCKET": f"/run/cantelop/{uid_base}.sock"}
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "cantelop_kernels", "serve", "--ready-fd", str(writing)],
        env=os.environ | ours,
        pass_fds=[writing],
    )
    os.close(writing)
    assert os.read(reading, 4096) == b"ready\n"
    os.close(reading)
    return process, ours


def stop(process: subprocess.Popen[bytes], uid_base: int) -> None:
    process.terminate()
    assert process.wait(120) == 0
    uids = range(uid_base, uid_base + 4096)
    assert [one for one in psutil.process_iter() if one.uids().real in uids] == []
    assert list(jail.sandboxes(STATE).glob(f"cantelop-{uid_base}-*")) == []
    assert cgroup.hierarchy("cantelop").names(f"cantelop-{uid_base}-") == set()
