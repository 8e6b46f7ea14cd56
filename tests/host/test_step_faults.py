"""THREATS 13: each step of a launch fails, before and after it took what it takes; the VM never
starts half-protected, and nothing of it is left, cgroups included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cantelop_kernels import cgroup, confine, sandbox
from cantelop_kernels.errors import LaunchError
from tests.fakes.fake_vmm import FakeVmm
from tests.fakes.host_stack import UID_BASE, Running, processes

STEPS = ("slot", "image", "cgroup", "folder", "disk", "attendant", "virtual machine", "guest boot")


class Counting(FakeVmm):
    """Remembers whether a machine was ever started."""

    def __init__(self) -> None:
        super().__init__()
        self.started = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.started += 1
        return super().run(*args, **kwargs)


UID_BASE_NAME = f"cantelop-{UID_BASE}-"


def leaves() -> set[str]:
    return cgroup.hierarchy("cantelop").names(UID_BASE_NAME)


async def fails(stack: Any, step: str) -> None:
    with pytest.raises(LaunchError) as caught:
        await stack.create()
    assert caught.value.details["step"] == step
    assert stack.folders() == []
    assert processes() == []
    assert leaves() == set()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
async def test_a_step_that_fails_leaves_nothing(
    running: Running, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    enter = sandbox._Steps.__call__

    @contextmanager
    def failing(self: Any, name: str) -> Iterator[None]:
        with enter(self, name):
            if name == step and when == "before":
                raise OSError(5, "injected")
            yield
            if name == step:
                raise OSError(5, "injected")

    vmm = Counting()
    async with running(vmm) as stack:
        with monkeypatch.context() as patch:
            patch.setattr(sandbox._Steps, "__call__", failing)
            await fails(stack, step)
            early = STEPS.index(step) < STEPS.index("virtual machine")
            assert (vmm.started == 0) == (early or (step == "virtual machine" and when == "before"))
        view = await stack.create()  # and the next one is as good as any
        await stack.client.end(view.id)


@pytest.mark.parametrize("file", ["cpu.cfs_quota_us", "memory.limit_in_bytes", "pids.max"])
async def test_a_limit_that_cannot_be_set_stops_the_launch(
    running: Running, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """The kernel refuses the value; the version 2 names are tried in the lab."""
    if cgroup.hierarchy("cantelop").version != 1:
        pytest.skip("this host has cgroup version 2")
    write = Path.write_text

    def refusing(self: Path, data: str, *args: Any, **kwargs: Any) -> int:
        if self.name == file and UID_BASE_NAME in str(self):
            raise OSError(22, os.strerror(22), str(self))
        return write(self, data, *args, **kwargs)

    vmm = Counting()
    async with running(vmm) as stack:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", refusing)
            await fails(stack, "cgroup")
        assert vmm.started == 0


async def test_an_attendant_that_cannot_be_confined_never_runs(
    running: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The launcher fails in the real process."""
    broken = tmp_path / "confine.py"
    text = Path(confine.__file__).read_text()
    failing = "def join(*_):\n    raise OSError(1, 'injected')\n\n\nif __name__"
    broken.write_text(text.replace("if __name__", failing))
    vmm = Counting()
    async with running(vmm) as stack:
        with monkeypatch.context() as patch:
            patch.setattr(confine, "__file__", str(broken))
            await fails(stack, "attendant")
        assert vmm.started == 0
