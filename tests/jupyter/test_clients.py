"""Jupyter's own programs, unmodified, as people type them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pexpect
import pytest

from tests.jupyter.conftest import READY, Stack

pytestmark = pytest.mark.vm

BIN = Path(sys.executable).parent


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    cells = [
        nbformat.v4.new_code_cell("who = 'nobody'", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("import platform; print(who, platform.node())"),
        nbformat.v4.new_code_cell("import pandas as pd; pd.DataFrame({'a': [1, 2]})"),
    ]
    path = tmp_path / "in.ipynb"
    python = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": python}), path)
    return path


def output_of(path: Path, cell: int) -> str:
    output = nbformat.read(path, as_version=4).cells[cell].outputs[0]
    return str(output.get("text") or output["data"]["text/html"])


def test_jupyter_execute(stack: Stack, notebook: Path) -> None:
    argv = [str(BIN / "jupyter"), "execute", "--kernel_name=cantelop-python3", "--inplace"]
    done = subprocess.run(
        [*argv, str(notebook)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert output_of(notebook, 1).startswith("nobody ")
    assert os.uname().nodename not in output_of(notebook, 1)
    assert "<table" in output_of(notebook, 2)
    assert stack.live() == []


def test_papermill(stack: Stack, notebook: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.ipynb"
    argv = [str(BIN / "papermill"), "-k", "cantelop-python3", "-p", "who", "Ada"]
    done = subprocess.run(
        [*argv, str(notebook), str(out)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert output_of(out, 2).startswith("Ada ")
    assert stack.live() == []


def test_jupyter_console(stack: Stack) -> None:
    argv = ["console", "--kernel", "cantelop-python3", "--simple-prompt"]
    console = pexpect.spawn(str(BIN / "jupyter"), argv, encoding="utf-8", timeout=READY)
    try:
        console.expect("In .*1.*: ")
        console.sendline("6 * 111")
        console.expect("666")
        console.expect("In .*2.*: ")
        console.sendline(
            "print('he' + 'llo', input('na' + 'me? '))"
        )  # not to be taken for its echo
        console.expect("name. ")
        console.sendline("Ada")
        console.expect("hello Ada")
        console.expect("In .*3.*: ")
        console.sendline("exit")
        console.expect(pexpect.EOF)
    finally:
        console.close(force=True)
    deadline = time.monotonic() + 10  # the console does not wait for its kernel's end
    while stack.live() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert stack.live() == []


@pytest.fixture
def jupyter_kernel(stack: Stack) -> Iterator[str]:
    """`jupyter kernel`: starts a kernel and says where its connection file is."""
    argv = ["kernel", "--kernel=cantelop-python3"]
    process = pexpect.spawn(str(BIN / "jupyter"), argv, encoding="utf-8", timeout=READY)
    try:
        process.expect(r"Connection file: (\S+)")
        assert process.match is not None
        yield str(process.match[1])
        process.kill(signal.SIGTERM)
        process.expect(pexpect.EOF)
    finally:
        process.close(force=True)


def test_console_joins_a_kernel_through_its_connection_file(jupyter_kernel: str) -> None:
    assert json.loads(Path(jupyter_kernel).read_text())["transport"] == "ipc"
    assert Path(jupyter_kernel).stat().st_mode & 0o077 == 0
    argv = ["console", "--existing", jupyter_kernel, "--simple-prompt"]
    console = pexpect.spawn(str(BIN / "jupyter"), argv, encoding="utf-8", timeout=READY)
    try:
        console.expect("In .*: ")
        console.sendline("6 * 111")
        console.expect("666")
    finally:
        console.close(force=True)
