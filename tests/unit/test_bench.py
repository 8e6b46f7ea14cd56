"""The bench's arithmetic, its report, and what it looks at on the host; no kernel is started."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import os
import statistics
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cantelop_kernels import __main__ as entry
from cantelop_kernels.bench import chart, host, machine, report, service, suite
from cantelop_kernels.bench.figures import BASE, About, Results, Row, percentile, ratio
from cantelop_kernels.cli import bench
from cantelop_kernels.errors import BadRequest, DeadlineExceeded, LaunchError
from cantelop_kernels.process import Process
from tests.fakes.figures import MACHINE, results

Capture = pytest.CaptureFixture[str]

positive = st.floats(min_value=1e-6, max_value=1e6)
samples = st.lists(positive, min_size=1, max_size=50)


@given(samples, st.floats(min_value=0, max_value=100))
def test_a_percentile_is_the_least_sample_that_so_many_are_not_above(
    values: list[float], percent: float
) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent * len(values) / 100
    below = sum(value < found for value in values)
    assert below < max(percent * len(values) / 100, 1)


@given(samples, st.randoms())
def test_percentiles_rise_and_do_not_mind_the_order(values: list[float], random: Any) -> None:
    shuffled = random.sample(values, len(values))
    steps = [percentile(shuffled, percent) for percent in (0, 25, 50, 75, 99, 100)]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (min(values), max(values))
    assert percentile(values, 50) <= statistics.median_high(values)
    if len(values) < 100:
        assert percentile(values, 99) == max(values)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_there_is_no_percentile_of_nothing(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


@given(positive, positive)
def test_ratio_and_cost(value: float, base: float) -> None:
    lower = Row("a", "a", "s", values={BASE: base, "x": value})
    higher = Row("a", "a", "MB/s", "higher", values={BASE: base, "x": value})
    assert lower.ratio("x") == lower.cost("x") == higher.ratio("x") == ratio(value, base)
    found = (lower.cost("x"), higher.cost("x"))
    assert found[0] is not None and found[1] is not None
    assert math.isclose(found[0] * found[1], 1)
    assert (found[0] > 1) == (value > base)


def test_no_ratio_without_something_to_compare_with() -> None:
    assert ratio(None, 1.0) is None and ratio(1.0, None) is None and ratio(1.0, 0.0) is None
    assert ratio(0.0, 2.0) == 0.0
    assert Row("a", "a", "", "higher", {BASE: 2.0, "x": 0.0}).cost("x") is None


def test_samples_become_a_median_and_a_p99() -> None:
    made = results()
    assert made.row("start_execute").values == {BASE: 0.5, "microvm": 9.0}
    assert made.row("start_execute_p99").values == {BASE: 0.6, "microvm": 30.0}
    with pytest.raises(KeyError):
        made.put("unknown", BASE, 1.0)


def test_the_json_is_whole() -> None:
    made = json.loads(report.as_json(results()))
    assert made["schema"] == 1 and made["base"] == BASE and made["machine"] == MACHINE
    assert [target["name"] for target in made["targets"]] == [BASE, "microvm"]
    assert made["targets"][1]["emulated"] is True and made["targets"][1]["warm"] == 4
    figures = {figure["name"]: figure for figure in made["figures"]}
    assert figures["start_execute"]["ratios"] == {"microvm": 18.0}
    assert figures["iopub"]["ratios"] == {"microvm": 0.25}
    assert figures["memory"]["ratios"] == {} and figures["lost"]["ratios"] == {}
    assert made["samples"]["start_execute"]["local"] == [0.4, 0.6, 0.5]


def test_the_table_has_values_with_units_and_ratios() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report.table(results()))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["start", "0.5", "s", "9", "s", "18"] in lines
    assert ["iopub,", "50", "MB", "100", "MB/s", "25", "MB/s", "0.25"] in lines
    assert ["memory", "in", "the", "guest", "–", "79.5", "MiB", "–"] in lines
    assert ["lost", "0", "0", "–"] in lines
    text = " ".join(word for line in lines for word in line)
    assert "microVM (emulated, 4 warm)" in text and str(MACHINE["cpu"]) in text
    assert "never measured" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (1234.5, "1,234"), (0.01234, "0.0123"), (12.0, "12"), (1.256, "1.26")],
)
def test_numbers(value: float | None, text: str) -> None:
    assert report.number(value) == text


def test_the_chart_is_svg_with_a_bar_for_each_cost() -> None:
    root = ET.fromstring(chart.svg(results()))
    space = "{http://www.w3.org/2000/svg}"
    words = [text.text or "" for text in root.iter(f"{space}text")]
    assert "iopub, 50 MB" in words and "4×" in words and "18×" in words
    assert "microVM (emulated)" in words and "lost" not in words
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for rect in root.iter(f"{space}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert x >= 0 and x + float(rect.attrib["width"]) <= width
        assert y >= 0 and y + float(rect.attrib["height"]) <= height


@given(st.lists(st.tuples(positive, positive), min_size=0, max_size=4))
def test_a_chart_can_be_drawn_of_anything(pairs: list[tuple[float, float]]) -> None:
    rows = [Row(f"{n}", "<&>", "s", values={BASE: a, "x": b}) for n, (a, b) in enumerate(pairs)]
    ET.fromstring(chart.svg(Results(MACHINE, {}, [About(BASE, "l"), About("x", '"')], rows)))


def test_every_row_of_a_run_has_a_name_of_its_own() -> None:
    for sizes in (suite.FULL, suite.QUICK):
        rows = suite.rows(sizes)
        assert len({row.name for row in rows}) == len({row.label for row in rows}) == len(rows)


def test_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    report.prepare(folder)
    assert list(folder.iterdir()) == []
    report.write(results(), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["bench.json", "bench.svg"]
    (tmp_path / "file").touch()
    with pytest.raises(BadRequest, match="cannot write to"):
        report.prepare(tmp_path / "file")


async def test_the_machine_is_described_without_naming_it() -> None:
    found = await machine.facts()
    assert found["cores"] and found["cpu"] and found["versions"]["cantelop"]
    said = json.dumps(found)
    assert os.uname().nodename not in said and str(Path.cwd()) not in said
    assert machine.cpu_model("model name\t: Some CPU @ 2 GHz\nmodel name : x") == "Some CPU @ 2 GHz"
    assert machine.cpu_model("") == os.uname().machine


@pytest.fixture
async def busy() -> Any:
    """A process that has a child; both hold memory and burn CPU."""
    child = "x = bytearray(30_000_000)\nprint('on', flush=True)\nwhile True: pass"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    read, write = os.pipe()
    process = Process.spawn([sys.executable, "-c", code], env=dict(os.environ), stdout=write)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert await asyncio.to_thread(pipe.readline) == "on\n"
        children = psutil.Process(process.pid).children()
        yield process
        await process.stop(0.0)
        process.close()
        for one in children:
            with suppress(psutil.NoSuchProcess):
                one.kill()


async def test_a_family_is_weighed_and_its_cpu_is_seen(busy: Process) -> None:
    found = host.family([busy.pid])
    assert len(found) == 2
    assert host.pss(found) > 30_000_000
    assert host.rss(psutil.Process(busy.pid)) > 0
    assert await host.cpu_share(lambda: host.family([busy.pid]), 0.5) > 0.05
    assert host.family([busy.pid]) <= host.of_uids(range(os.geteuid(), os.geteuid() + 1))


async def test_what_has_ended_counts_as_nothing(busy: Process) -> None:
    found = host.family([busy.pid])
    for process in found:
        process.kill()
    await busy.wait()
    for process in found:
        with pytest.raises(psutil.Error):
            process.wait(10)
            process.status()
    assert host.family([busy.pid]) == set()
    assert host.pss(found) == 0 and host.rss(next(iter(found))) == 0
    assert set(host.cpu_seconds(found).values()) == {0.0}


class View(argparse.Namespace):
    """In the shape of a pool's view."""


class Pool:
    """A client whose pool fills up by one at each look, or fails."""

    def __init__(self, error: str = "") -> None:
        self.looks = 0
        self._error = error

    async def pool(self) -> list[View]:
        self.looks += 1
        shared: dict[str, Any] = {"failures": int(bool(self._error)), "last_error": self._error}
        mine = View(apps=["default"], ready=self.looks - 1, memory_used=[7] * self.looks, **shared)
        return [View(apps=["other"], ready=9, memory_used=[1], **shared), mine]


async def test_a_warm_pool_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_LOOK", 0.0)
    filling: Any = Pool()
    assert await service.warm(filling, "default", 2)
    assert filling.looks == 3
    assert await service.warm_memory(filling, "default") == [7] * 4
    without: Any = object()
    assert not await service.warm(without, "default", 2)
    assert await service.warm_memory(without, "default") == []


async def test_a_pool_that_does_not_fill_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failing: Any = Pool("no image")
    with pytest.raises(LaunchError, match="no image"):
        await service.warm(failing, "default", 2)
    monkeypatch.setattr(service, "_FILLED", 0.01)
    slow: Any = Pool()
    with pytest.raises(DeadlineExceeded):
        await service.warm(slow, "default", 99)


def parse(*argv: str) -> argparse.Namespace:
    return entry.build_parser(["bench"]).parse_args(["bench", *argv])


def test_sizes_from_the_command_line() -> None:
    assert bench.sizes(parse()) == suite.FULL
    assert bench.sizes(parse("--quick")) == suite.QUICK
    chosen = bench.sizes(parse("--quick", "--starts", "7", "--sandboxes", "1"))
    assert (chosen.starts, chosen.sandboxes, chosen.prints) == (7, 1, suite.QUICK.prints)


@pytest.mark.parametrize("argv", [["--starts", "0"], ["--sandboxes", "x"], ["more"]])
def test_bad_usage(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 2


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CANTELOP_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("CANTELOP_CONFIG", str(tmp_path / "c.toml"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("uid", "kvm", "said"),
    [
        (1000, True, "must run as root"),
        (0, False, "no hardware virtualization"),
        (0, True, "no image 'python3'"),
    ],
)
@pytest.mark.usefixtures("place")
def test_where_it_cannot_run_it_says_so_at_once(
    uid: int, kvm: bool, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr("cantelop_kernels.host.hardware_kvm", lambda: kvm)
    assert entry.main(["bench"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert said in lines[0] and lines[1].startswith("  hint: ") and len(lines) == 2


def test_bad_settings_are_told(place: Path, capsys: Capture) -> None:
    (place / "c.toml").write_text("no_such_key = 1\n")
    assert entry.main(["bench", "--allow-emulation"]) == 1
    assert "no_such_key" in capsys.readouterr().err


def test_without_a_local_kernel_there_is_nothing_to_compare_with(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert entry.main(["bench", "--allow-emulation"]) == 1
    assert "pip install ipykernel" in capsys.readouterr().err
