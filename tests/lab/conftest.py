"""Outside the lab: tests marked `lab` below here run in one boot of it, and report here.

They are collected here as any test, so `-k`, `-x` and node ids mean what they always do; only their
bodies and fixtures run inside. Inside the lab this file marks them, and does no more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.lab.outside import Lab

INSIDE = "CANTELOP_LAB" in os.environ
OUTSIDE = not INSIDE and os.geteuid() == 0

_lab = pytest.StashKey["Lab"]()
_items = pytest.StashKey[Sequence[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in (item for item in items if item.get_closest_marker("lab")):
        if OUTSIDE:  # time is kept inside, and by the lab's budget
            item.add_marker(pytest.mark.timeout(0), append=False)
        elif not INSIDE:
            item.add_marker(pytest.mark.skip("the lab is built and started by root"))


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = [item.nodeid for item in session.items if item.get_closest_marker("lab")]
    session.config.stash[_items] = wanted


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """In place of running the test here."""
    if not OUTSIDE or not item.get_closest_marker("lab"):
        return None
    hook, config = item.ihook, item.config
    lab = _started(config)
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    told = lab.failure
    for data in lab.reports(item.nodeid) or _failed(item, lab.failure, told=bool(told)):
        report = hook.pytest_report_from_serializable(config=config, data=data)
        if isinstance(report.longrepr, list):  # where a test was skipped: JSON knows no tuples
            report.longrepr = tuple(report.longrepr)
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    if item.nodeid == config.stash[_items][-1]:
        lab.close()
    return True


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lab = config.stash.get(_lab, None)
    if lab is not None:
        marks = ", ".join(f"{name} at {at:.1f} s" for name, at in lab.marks.items())
        terminalreporter.write_line(f"lab: {marks or 'did not start'}; see {lab.out}")


def _started(config: pytest.Config) -> Lab:
    """The session's lab; its first test boots it."""
    from tests.lab.outside import Lab  # needs what only this side has

    if _lab not in config.stash:
        reporter = config.pluginmanager.get_plugin("terminalreporter")

        def say(line: str) -> None:
            if reporter is not None:
                reporter.ensure_newline()
                reporter.write_line(f"lab: {line}")

        config.stash[_lab] = Lab(config.stash[_items], say)
        config.add_cleanup(config.stash[_lab].kill)
        config.stash[_lab].start()
    return config.stash[_lab]


def _failed(item: pytest.Item, why: str, *, told: bool) -> Iterator[dict[str, Any]]:
    """The reports of a test that the lab did not run; the whole story is told once."""
    text = f"{why.splitlines()[0]} (see the first failure)" if told else why
    for when in ("setup", "call", "teardown"):
        outcome = "failed" if when == "call" else "passed"
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome=outcome,  # type: ignore[arg-type]
            longrepr=text if when == "call" else None,
            when=when,
        )
        hook = item.ihook
        yield hook.pytest_report_to_serializable(config=item.config, report=report)
