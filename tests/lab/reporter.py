"""A pytest plugin for inside the lab: every report goes out, a line of JSON each, as it is made.

Loaded with `-p tests.lab.reporter`. `outside` reads the other end of the port.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

import pytest

PORTS = Path("/sys/class/virtio-ports")
NAME = "reports"


class Reporter:
    """What it sends leaves the lab before the next test begins."""

    def __init__(self, config: pytest.Config, port: IO[bytes]) -> None:
        self._config = config
        self._port = port

    def pytest_sessionstart(self) -> None:
        self._send("begin")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._send("collect", nodeid=report.nodeid, text=report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send("report", nodeid=report.nodeid, when=report.when, report=data)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._send("finish", status=int(exitstatus))

    def _send(self, event: str, **fields: Any) -> None:
        self._port.write(json.dumps({"event": event, **fields}, default=str).encode() + b"\n")
        self._port.flush()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reporter(config, _port()), "lab-reporter")


def _port() -> IO[bytes]:
    """Ports are numbered by their device; the kernel tells the name that QEMU gave them."""
    for name in PORTS.glob("*/name"):
        if name.read_text().strip() == NAME:
            return os.fdopen(os.open(Path("/dev") / name.parent.name, os.O_WRONLY), "wb")
    raise pytest.UsageError("no port for reports: this plugin is for inside the lab")
