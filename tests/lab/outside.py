"""The tests marked `lab`, seen from outside: one boot runs them all, each reports as a test here.

`conftest` makes one `Lab` per pytest session and asks it for the reports of each test in turn. What
the lab leaves is in `out/lab`: junit.xml, pytest.log, console.log, and whatever tests put there.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cantelop_kernels import vsock
from cantelop_kernels.errors import CantelopError
from tests.lab import machine

REPOSITORY = Path(__file__).parents[2]
OUT = REPOSITORY / "out" / "lab"
BUDGET = 900.0
"""Seconds from power-on to the last test's end."""

BOOT = 240.0
"""Seconds from power-on to the beginning of the tests; it takes a tenth of it."""

OFF = 30.0
"""Seconds from the last test to the machine's own end."""

TAIL = 30
"""Lines of the console, or of pytest's output, in an error message."""

INNER_TIMEOUT = 300
"""Seconds for one test, where it does not say itself."""


def state() -> Path:
    """The state folder that `make` builds in."""
    given = os.environ.get("CANTELOP_TEST_STATE") or os.environ.get("CANTELOP_STATE")
    return Path(given or REPOSITORY / ".cache" / "state")


def pytest_script(*arguments: str) -> str:
    """The shell script that runs pytest in the lab. Plugins are named: to look for them, and to
    rewrite those that nobody uses there, costs the emulated machine 20 s."""
    plugins = ("pytest_asyncio.plugin", "pytest_timeout")
    argv = [
        *("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", "python3", "-m", "pytest"),
        *(part for plugin in plugins for part in ("-p", plugin)),
        *("-p", "no:cacheprovider", "-o", f"timeout={INNER_TIMEOUT}"),
        *("--junitxml=/lab/out/junit.xml", *arguments),
    ]
    return f"exec {shlex.join(argv)}"


class Lab:
    """`say` gets progress, a line at a time. `failure` says why no more reports will come."""

    def __init__(self, nodeids: Sequence[str], say: Callable[[str], None], out: Path = OUT) -> None:
        self.failure = ""
        self.marks: dict[str, float] = {}
        """Seconds from power-on."""
        self._nodeids = list(nodeids)
        self._say = say
        self.out = out
        self._held = ExitStack()
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._console: deque[str] = deque(maxlen=TAIL)
        self._reports: dict[str, list[dict[str, Any]]] = {}
        self._broken: list[str] = []
        self._watcher: threading.Thread | None = None
        self._began = 0.0
        self._deadline = 0.0

    def start(self) -> None:
        """Power on. Whatever goes wrong is told by `failure`."""
        self._say("preparing")
        try:
            setup = self._held.enter_context(
                machine.prepared(state(), self.out, self._script(), self._waiting)
            )
            listener = self._held.enter_context(socket.socket(socket.AF_UNIX))
            vsock.bind(listener, setup.work, machine.REPORTS)
            listener.listen(1)
            listener.settimeout(OFF)  # QEMU connects before anything else
            self._held.callback(self._joined)
            self._began = time.monotonic()
            self._deadline = self._began + BOOT
            on = machine.started(setup, terminal="null", reports=True)
            process = self._held.enter_context(on)
        except (CantelopError, OSError) as error:
            self._fail(f"the lab did not start: {error}")
            return
        self._say("power on")
        self._watcher = threading.Thread(target=self._watch, args=(process, listener), daemon=True)
        self._watcher.start()

    def reports(self, nodeid: str) -> list[dict[str, Any]]:
        """Wait for a test to end; its serialized reports. Empty where `failure` came before."""
        while not self._complete(nodeid) and not self.failure:
            self._take()
        if not self._complete(nodeid):
            return []
        return [one["report"] for one in self._reports[nodeid]]

    def close(self) -> None:
        """After the last test: let the machine end by itself, or else end it. Idempotent."""
        self._deadline = time.monotonic() + OFF
        while "off" not in self.marks and not self.failure:
            self._take()
        self._held.close()

    def kill(self) -> None:
        """End the machine, wherever it is. Idempotent."""
        self._held.close()

    def _waiting(self) -> None:
        self._say("waiting for another run of it")

    def _script(self) -> str:
        tests = pytest_script("-p", "tests.lab.reporter", "-v", *self._nodeids)
        return f"{tests} >/lab/out/pytest.log 2>&1"

    def _complete(self, nodeid: str) -> bool:
        return any(one["when"] == "teardown" for one in self._reports.get(nodeid, []))

    def _take(self) -> None:
        """Wait for the next event and note what it says."""
        try:
            event = self._events.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            what = (
                "the lab's tests did not end"
                if "tests" in self.marks
                else "the lab did not come up"
            )
            self._fail(f"{what} within {self._deadline - self._began:.0f} s", self._last_lines())
            return
        match event["event"]:
            case "console":
                self._say(event["line"].removeprefix("lab: "))
            case "begin":
                self._mark("tests")
                self._deadline = self._began + BUDGET
            case "collect":
                self._broken.append(f"{event['nodeid']}:\n{event['text']}")
            case "report":
                self._reports.setdefault(event["nodeid"], []).append(event)
            case "finish":
                self._mark("end")
                self._finish(event["status"])
            case "off":
                self._mark("off")
                if "end" not in self.marks:
                    self._fail("the lab ended before its tests did", self._last_lines())

    def _finish(self, status: int) -> None:
        if missing := [one for one in self._nodeids if not self._complete(one)]:
            why = "\n".join(self._broken or self._pytest_lines())
            self._fail(f"the lab's pytest ended with status {status} without {missing[0]}", why)

    def _mark(self, name: str) -> None:
        self.marks[name] = time.monotonic() - self._began
        self._say(f"{name} at {self.marks[name]:.1f} s")

    def _fail(self, why: str, details: str = "") -> None:
        self.failure = f"{why}\n{details}".rstrip()
        self._say(why)
        self._held.close()

    def _last_lines(self) -> str:
        said = ["the console's last lines:", *self._console]
        return "\n".join([*said, "pytest's last lines:", *self._pytest_lines()])

    def _pytest_lines(self) -> list[str]:
        log = self.out / "pytest.log"
        return log.read_text(errors="replace").splitlines()[-TAIL:] if log.exists() else []

    def _joined(self) -> None:
        if self._watcher is not None:
            self._watcher.join(OFF)

    def _watch(self, process: subprocess.Popen[bytes], listener: socket.socket) -> None:
        """In a thread: everything the machine says, until its end."""
        reports = threading.Thread(target=self._read_reports, args=(listener,), daemon=True)
        reports.start()
        assert process.stdout is not None
        with process.stdout, (self.out / "console.log").open("wb") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                text = line.decode(errors="replace").rstrip()
                self._console.append(text)
                if text.startswith("lab: "):
                    self._events.put({"event": "console", "line": text})
        reports.join()
        self._events.put({"event": "off"})

    def _read_reports(self, listener: socket.socket) -> None:
        try:
            port, _ = listener.accept()
        except OSError:
            return  # QEMU did not start; its console tells
        with port, port.makefile("rb") as lines:
            for line in lines:
                self._events.put(json.loads(line))
