"""The lab from outside: its lock, its command line, and what it says when it does not work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.lab import image, lock, machine, outside
from tests.lab.outside import Lab

FIRST, SECOND = "tests/lab/inside/test_a.py::test_1", "tests/lab/inside/test_a.py::test_2"

TALK = """
import json, socket, sys
port = socket.socket(socket.AF_UNIX)
port.connect(sys.argv[1])
for event in json.loads(sys.argv[2]):
    port.sendall(json.dumps(event).encode() + b"\\n")
print("lab: FATAL: no root", flush=True)
if "hang" in sys.argv:
    sys.stdin.read()
"""

Faker = Callable[..., Lab]


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faker:
    """`Lab` before a process that says what it is told, in QEMU's place."""

    def make(events: list[dict[str, object]], *more: str) -> Lab:
        @contextmanager
        def prepared(_state: Path, out: Path, *_: object) -> Iterator[machine.Setup]:
            out.mkdir()
            yield machine.Setup(tmp_path, out, tmp_path, tmp_path, ())

        @contextmanager
        def started(setup: machine.Setup, **_: object) -> Iterator[subprocess.Popen[bytes]]:
            argv = [sys.executable, "-c", TALK, machine.REPORTS, json.dumps(events), *more]
            with subprocess.Popen(argv, cwd=setup.work, stdin=PIPE, stdout=PIPE) as process:
                yield process
                process.kill()

        monkeypatch.setattr(machine, "prepared", prepared)
        monkeypatch.setattr(machine, "started", started)
        lab = Lab([FIRST, SECOND], lambda _: None, tmp_path / "out")
        lab.start()
        return lab

    return make


def report(nodeid: str, when: str) -> dict[str, object]:
    return {"event": "report", "nodeid": nodeid, "when": when, "report": {"of": nodeid}}


def ran(nodeid: str) -> list[dict[str, object]]:
    return [report(nodeid, when) for when in ("setup", "call", "teardown")]


def test_reports_are_told_by_test_whatever_their_order(faked: Faker) -> None:
    finish = {"event": "finish", "status": 0}
    lab = faked([{"event": "begin"}, *ran(SECOND), *ran(FIRST), finish])
    assert lab.reports(FIRST) == [{"of": FIRST}] * 3
    assert lab.reports(SECOND) == [{"of": SECOND}] * 3
    lab.close()
    assert lab.failure == "" and set(lab.marks) == {"tests", "end", "off"}


def test_a_lab_that_does_not_come_up_shows_its_console(faked: Faker) -> None:
    lab = faked([])
    assert lab.reports(FIRST) == []
    assert lab.failure.startswith("the lab ended before its tests did")
    assert "lab: FATAL: no root" in lab.failure


def test_a_lab_that_ends_between_two_tests(faked: Faker) -> None:
    lab = faked([{"event": "begin"}, *ran(FIRST), report(SECOND, "setup")])
    assert len(lab.reports(FIRST)) == 3
    assert lab.reports(SECOND) == []
    assert "ended before its tests did" in lab.failure


def test_tests_that_cannot_be_collected_inside(faked: Faker) -> None:
    broken = {"event": "collect", "nodeid": "test_a.py", "text": "ImportError: no x"}
    lab = faked([{"event": "begin"}, broken, {"event": "finish", "status": 2}])
    assert lab.reports(FIRST) == []
    assert "ended with status 2" in lab.failure and "ImportError: no x" in lab.failure


def test_time_is_kept(faked: Faker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "BUDGET", 0.0)
    lab = faked([{"event": "begin"}], "hang")
    assert lab.reports(FIRST) == []
    assert lab.failure.startswith("the lab's tests did not end within 0 s")


def test_a_boot_that_hangs(faked: Faker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "BOOT", 1.0)
    lab = faked([], "hang")
    assert lab.reports(FIRST) == []
    assert lab.failure.startswith("the lab did not come up within 1 s")
    assert "lab: FATAL: no root" in lab.failure


def test_the_lock_meets_what_the_project_asks_for() -> None:
    pinned = dict(
        line.removesuffix(" \\").split("==")
        for line in lock.REQUIREMENTS.read_text().splitlines()
        if "==" in line
    )
    for line in lock.wanted(lock.PYPROJECT.read_text()):
        asked = Requirement(line)
        have = pinned.get(canonicalize_name(asked.name))
        assert have and have in asked.specifier, f"{line}: run `python -m tests.lab lock`"


def test_the_recipe_is_one() -> None:
    recipe = image.recipe()
    assert recipe.python == "3.13" and "kvm_amd" in recipe.boot_modules


def test_the_machine_emulates_virtualization_and_has_no_network(tmp_path: Path) -> None:
    disks = tuple(tmp_path / name for name in ("root", "modules", "project", "scratch"))
    setup = machine.Setup(tmp_path, tmp_path / "out", tmp_path / "k", tmp_path / "i", disks)
    argv = machine.command(setup, 2_000_000, "stdio", "null", reports=True)
    assert "max,+svm,+npt" in argv
    assert not [one for one in argv if "net" in one.split(",")[0]]
    drives = [one for one in argv if one.startswith("id=disk")]
    assert ["readonly=on" in one for one in drives] == [True, True, True, False]
