"""Why a kernel died reaches the cell in which it did, with unmodified clients."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from cantelop_kernels.schema import Exit
from cantelop_provisioner.last_words import LastWords
from tests.fakes.clients import WriteSpec
from tests.fakes.fake_daemon import FakeDaemon

pytest_plugins = ["tests.fakes.provisioner_fixtures"]

OOM = Exit(
    "out of memory: the kernel was killed at its limit of 448 MiB (peak 447 MiB)",
    signal=9, oom=True, memory_limit=448 << 20, memory_peak=447 << 20,
)  # fmt: skip


async def died(daemon: FakeDaemon, **options: Any) -> list[Any]:
    """The outputs of a cell in which its kernel is killed for want of memory."""
    code = "import time; print(get_ipython().kernel.get_parent()['header']['msg_id'], flush=True)"
    cell = nbformat.v4.new_code_cell(f"{code}\ntime.sleep(60)")
    client = NotebookClient(
        nbformat.v4.new_notebook(cells=[cell]), kernel_name="sandboxed", **options
    )
    task = asyncio.ensure_future(client.async_execute())
    async with asyncio.timeout(30):
        while not cell.outputs:
            assert not task.done()
            await asyncio.sleep(0.02)
    daemon.last.exit = replace(OOM, cell=cell.outputs[0].text.strip())
    os.killpg(daemon.last.process.pid, signal.SIGKILL)
    with pytest.raises(DeadKernelError):
        await asyncio.wait_for(task, 15)
    return list(cell.outputs)


async def test_the_cell_shows_why(
    write_spec: WriteSpec, fake_daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    printed, error = await died(fake_daemon)
    assert printed.output_type == "stream"
    assert (error.output_type, error.ename) == ("error", "KernelDied")
    assert "the kernel died: out of memory" in error.evalue and "448 MiB" in error.evalue
    assert "KernelDied" in error.traceback[0]
    assert caplog.text.count("the kernel died: out of memory") == 1


async def test_not_where_somebody_else_tells(
    write_spec: WriteSpec, fake_daemon: FakeDaemon
) -> None:
    write_spec(config={"last_words": False})
    assert [one.output_type for one in await died(fake_daemon)] == ["stream"]


async def test_nobody_comes_or_the_place_is_gone(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("k")
    words = LastWords(str(folder / "k"), b"key", "hmac-sha256")
    async with asyncio.timeout(5):
        await words.say("cell", "why")
        shutil.rmtree(folder)
        await words.say("cell", "why")
