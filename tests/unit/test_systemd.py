"""Readiness and inherited sockets, as systemd's man pages have them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from cantelop_kernels import systemd

UNITS = Path(__file__).parents[2] / "share" / "systemd"


def test_readiness_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "n.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        systemd.notify("READY=1")
        assert manager.recv(100) == b"READY=1"
    monkeypatch.delenv("NOTIFY_SOCKET")
    systemd.notify("READY=1")


def test_no_socket_is_taken_that_was_not_meant_for_us(monkeypatch: pytest.MonkeyPatch) -> None:
    assert systemd.listening_socket() is None
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("LISTEN_FDS", "1")
    assert systemd.listening_socket() is None
    assert "LISTEN_PID" not in os.environ


CHILD = """
import os, socket, sys
os.environ["LISTEN_PID"] = str(os.getpid()); os.environ["LISTEN_FDS"] = "1"
os.dup2(int(sys.argv[1]), 3)
from cantelop_kernels import systemd
sock = systemd.listening_socket()
assert sock is not None and not os.get_inheritable(3)
sock.setblocking(True)
connection, _ = sock.accept()
connection.send(b"served")
"""


def test_an_inherited_socket_serves(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        argv = [sys.executable, "-c", CHILD, str(listener.fileno())]
        child = subprocess.Popen(argv, pass_fds=[listener.fileno()])
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(str(tmp_path / "s"))
            assert client.recv(10) == b"served"
        assert child.wait(10) == 0


def test_the_units_name_what_the_daemon_does() -> None:
    service, unit = ConfigParser(strict=False), ConfigParser(strict=False)
    service.read(UNITS / "cantelop.service")
    unit.read(UNITS / "cantelop.socket")
    assert service["Service"]["Type"] == "notify"
    assert service["Service"]["KillMode"] == "process"  # sandboxes outlive the daemon
    assert service["Service"]["ExecStart"].endswith("cantelop serve")
    assert unit["Socket"]["ListenStream"] == "/run/cantelop/cantelop.sock"
