"""What a user sees of limits, from inside a real microVM: sizes, and each limit when it is met."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

pytestmark = pytest.mark.vm

REPO = Path(__file__).parents[2]
UID_BASE = 780_000
COMMAND = [sys.executable, "-m", "cantelop_kernels"]
CONFIG = f"""
uid_base = {UID_BASE}
[apps.small]
memory_mib = 320
scratch_mib = 64
[apps.brief]
lifetime_seconds = 25.0
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A daemon of this module's own, and a kernelspec for the small App."""
    folder = tmp_path_factory.mktemp("limits")
    (folder / "cantelop.toml").write_text(CONFIG)
    spec = json.loads((REPO / "share/jupyter/kernels/cantelop-python3/kernel.json").read_text())
    stanza = {"provisioner_name": "cantelop", "config": {"app": "small"}}
    (folder / "jupyter/kernels/small").mkdir(parents=True)
    text = json.dumps(spec | {"metadata": {"kernel_provisioner": stanza}})
    (folder / "jupyter/kernels/small/kernel.json").write_text(text)
    state = os.environ.get("CANTELOP_TEST_STATE") or str(REPO / ".cache" / "state")
    names = {
        "CANTELOP_STATE": state,
        "CANTELOP_SOCKET": str(folder / "d.sock"),
        "CANTELOP_CONFIG": str(folder / "cantelop.toml"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTER_PATH": str(folder / "jupyter"),
    }
    read, write = os.pipe()
    with (folder / "daemon.log").open("w") as log, os.fdopen(read) as ready:
        serve = [*COMMAND, "serve", "--allow-emulation", "--ready-fd", str(write)]
        env = os.environ | names
        daemon = subprocess.Popen(serve, env=env, stdout=log, stderr=log, pass_fds=[write])
        os.close(write)
        try:
            assert ready.read() == "ready\n", (folder / "daemon.log").read_text()
            yield names
        finally:
            daemon.terminate()
            assert daemon.wait(60) == 0


@pytest.fixture
def cantelop(environment: dict[str, str]) -> Run:
    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *argv],
            check=False,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
        )

    return run


SIZES = """
import json, os, subprocess
total = next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemTotal"))
print(json.dumps({
    "nproc": int(subprocess.check_output(["nproc"])),
    "cpu_count": os.cpu_count(),
    "affinity": len(os.sched_getaffinity(0)),
    "memory": total // 1024,
}))
"""


def test_inside_is_what_was_granted(cantelop: Run) -> None:
    done = cantelop("exec", SIZES, "--vcpus", "2", "--memory", "400")
    assert done.returncode == 0, done.stderr
    inside = json.loads(done.stdout)
    assert (inside["nproc"], inside["cpu_count"], inside["affinity"]) == (2, 2, 2)
    assert 400 * 0.85 <= inside["memory"] <= 400  # its Linux keeps the rest for itself


FULL = """
import errno, time
try:
    with open("filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
except OSError as error:
    print(errno.errorcode[error.errno], error.strerror, flush=True)
time.sleep(8)
print("still here")
"""


def test_a_full_disk_is_an_exception_and_its_size_is_told(cantelop: Run) -> None:
    done = cantelop("exec", FULL, "--app", "small")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ENOSPC No space left on device\nstill here\n"
    assert "of 64 MiB, the scratch_mib of its App 'small'" in done.stderr


def test_a_session_is_warned_of_its_end_and_told_why(cantelop: Run, tmp_path: Path) -> None:
    cell = nbformat.v4.new_code_cell("import time\nwhile True: time.sleep(0.2)")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "n.ipynb")
    done = cantelop("run", str(tmp_path / "n.ipynb"), "--app", "brief")
    assert done.returncode == 1
    assert "this session ends in" in done.stderr
    assert "older than 25 s, the limit of its App" in done.stderr
    (error,) = nbformat.read(tmp_path / "n.out.ipynb", as_version=4).cells[0].outputs
    assert "older than 25 s, the limit of its App" in error.evalue


GREEDY = "print('up', flush=True)\nkept = []\nwhile True: kept.append(b'x' * (8 << 20))"


async def test_out_of_memory_stands_below_the_cell(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plain nbclient, which itself says "Kernel died" and no more."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cell: Any = nbformat.v4.new_code_cell(GREEDY)
    client = NotebookClient(nbformat.v4.new_notebook(cells=[cell]), kernel_name="small")
    with pytest.raises(DeadKernelError):
        await client.async_execute()
    printed, error = cell.outputs
    assert printed.text == "up\n"
    assert error.ename == "KernelDied" and "out of memory" in error.evalue
    assert "limit of" in error.evalue and "peak" in error.evalue
