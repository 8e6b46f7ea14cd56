"""The whole bench in the smallest sizes, against the fake VMM and a local kernel."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from cantelop_kernels import config
from cantelop_kernels.bench import machine, measures, report, service, suite
from cantelop_kernels.bench.figures import BASE
from cantelop_kernels.bench.targets import Target
from cantelop_kernels.errors import ConfigError, DaemonUnavailable, SandboxGone
from cantelop_kernels.slot import MAX_SLOTS, STRIDE, uid_range
from tests.bench import stack

UID_BASE = 930_000
TINY = suite.Sizes(2, 3, 2, 50, 0.1, 2, 2, 1, 1, 1, 0.2)
ONLY_SANDBOXED = {"growth", "cpu_daemon"}
ONLY_GUESTS = {"memory_guest"}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> config.Config:
    """An operator's, from whom the bench keeps its distance."""
    monkeypatch.setenv("CANTELOP_CONFIG", str(tmp_path / "none.toml"))
    return config.load(uid_base=UID_BASE)


@pytest.fixture
async def targets(settings: config.Config) -> AsyncIterator[list[Target]]:
    """Checks that nothing is left of them."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    async with AsyncExitStack() as held:
        yield [
            await held.enter_async_context(stack.local()),
            await held.enter_async_context(stack.fake_vmm(settings, TINY.sandboxes)),
        ]
    after = {process.pid for process in psutil.Process().children(recursive=True)}
    assert after <= before
    uids = uid_range(UID_BASE, 3 * MAX_SLOTS)
    assert not [p for p in psutil.process_iter(["uids"]) if p.info["uids"].real in uids]


async def test_every_figure_is_measured(targets: list[Target], tmp_path: Path) -> None:
    told: list[str] = []
    results = await suite.measure(targets, TINY, await machine.facts(), told.append)
    for row in results.rows:
        wanted = {BASE, "fake"} - ({BASE} if row.name in ONLY_SANDBOXED else set())
        assert set(row.values) == (set() if row.name in ONLY_GUESTS else wanted), row.name
    for name in (BASE, "fake"):
        assert len(results.samples["start_execute"][name]) == TINY.starts
        assert len(results.samples["round_trip"][name]) == TINY.round_trips
        assert len(results.samples["burst"][name]) == TINY.sandboxes
        assert (
            results.row("start_execute").values[name]
            >= results.row("start_kernel_info").values[name]
        )
        assert results.row("prints_lost").values[name] == 0
        assert results.row("memory_host").values[name] > 5
    assert told[0] == "first start" and f"start 2 of {TINY.starts}" in told
    report.write(results, tmp_path)
    assert json.loads((tmp_path / "bench.json").read_text())["figures"]


async def test_lost_output_is_noticed(targets: list[Target]) -> None:
    """A print that never arrives is a loss; so is the message that ends the output."""
    async with measures.opened(targets[0].manager()) as kc:
        await measures.run(kc, "import builtins\n_real = print")
        skip = "def print(n, **k):\n    if n % 10: _real(n, **k)"
        await measures.run(kc, skip)
        assert (await measures.prints(kc, 100)).lost == 10


@pytest.mark.parametrize("number", [0, 1])
async def test_a_kernel_that_dies_is_told_at_once(targets: list[Target], number: int) -> None:
    async with measures.opened(targets[number].manager()) as kc:
        with pytest.raises(SandboxGone, match="the kernel died while it was measured"):
            await measures.run(kc, "import os; os._exit(3)")


async def test_the_daemon_keeps_its_distance(settings: config.Config) -> None:
    async with stack.fake_vmm(settings, 1) as target:
        daemon = target.daemon
        assert daemon is not None
        arguments = daemon.cmdline()
        written = Path(arguments[arguments.index("--config") + 1]).read_text()
        assert f"uid_base = {UID_BASE + 2 * STRIDE * MAX_SLOTS}" in written
        assert ("warm = 1" in written) == service.has_pool()
        async with AsyncExitStack() as held:
            idle = await target.idle(1, held)
            assert daemon not in idle.processes()
            assert any(
                p.uids().real in uid_range(UID_BASE, 3 * MAX_SLOTS) for p in idle.processes()
            )
            assert await idle.guest_memory() == []
    assert not daemon.is_running()


async def test_a_daemon_that_does_not_start_says_why(
    settings: config.Config, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="closed to other users"):
        async with service.serving(settings, tmp_path, 1):
            raise AssertionError("it serves from a folder that no VMM can enter")
    with pytest.raises(DaemonUnavailable):
        async with service.serving(settings, tmp_path, 1, program=("true",)):
            raise AssertionError("nobody serves")
