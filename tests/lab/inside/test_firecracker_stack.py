"""A whole session on real Firecracker under its real jailer: command line, daemon, guest.

Runs in the lab, where `firecracker` and `jailer` are on the PATH in a version with known flaws.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cantelop_kernels import config

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif("CANTELOP_LAB" not in os.environ, reason="needs the lab's hardware"),
]

UID_BASE = 946_000
SETTINGS = f"""
vmm = "firecracker"
allow_vulnerable_firecracker = true
uid_base = {UID_BASE}
boot_deadline = 240.0
silence_seconds = 120.0
"""
PATIENCE = 280.0
"""Seconds: twice emulated, a guest needs a minute or two to a kernel that answers."""


@pytest.fixture(autouse=True)
def _settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "cantelop.toml").write_text(SETTINGS)
    monkeypatch.setenv("CANTELOP_CONFIG", str(tmp_path / "cantelop.toml"))
    yield
    places = config.state_path() / "sandboxes"
    until(lambda: machines() == [] and not list(places.glob(f"cantelop-{UID_BASE}-*")), 20)


def machines() -> list[Path]:
    """The /proc folders of every VMM of these tests' sandboxes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, owner = (folder / "comm").read_text().strip(), folder.stat().st_uid
        except OSError:
            continue
        if name == "firecracker" and owner >= UID_BASE:
            found.append(folder)
    return found


def started(code: str) -> subprocess.Popen[str]:
    """`cantelop exec`; the first starts the daemon."""
    argv = ["cantelop", "exec", code]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_doctor_knows_the_version_and_its_flaws() -> None:
    argv = ["cantelop", "doctor", "--json"]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["firecracker"]["status"] == "warn"
    assert "CVE-2026-1386" in checks["firecracker"]["found"]
    assert "qemu" not in checks and done.returncode == 0


def test_a_session_that_nobody_can_look_into_from_its_vmm() -> None:
    """THREATS.md 1, 6, 7."""
    code = "import os, time; print(os.path.exists('/dev/kvm'), os.cpu_count())"
    code += "; time.sleep(5); print('done')"
    with started(code) as client:
        until(lambda: bool(machines()) or client.poll() is not None, 120)
        (machine,) = machines()
        until(lambda: "Seccomp:\t2" in (machine / "status").read_text(), 60)
        lines = (machine / "status").read_text().splitlines()
        status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
        assert status["Uid"] == status["Gid"] == [str(UID_BASE)] * 4 and status["Groups"] == []
        for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(status[name][0], 16) == 0, name
        assert status["NoNewPrivs"] == ["1"]
        out, _ = client.communicate(timeout=PATIENCE)
    assert client.returncode == 0, out
    assert out.splitlines()[-2:] == ["False 1", "done"]


def test_a_vmm_that_is_killed_ends_its_session_and_leaves_nothing() -> None:
    with started("import time; print('runs', flush=True); time.sleep(300)") as client:
        assert client.stdout is not None
        assert any("runs" in line for line in client.stdout)
        (machine,) = machines()
        os.kill(int(machine.name), signal.SIGKILL)
        out, _ = client.communicate(timeout=60)
    assert client.returncode != 0
    assert "the virtual machine ended (signal 9)" in out
