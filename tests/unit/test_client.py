"""The client says in one line what is wrong with the daemon's socket, and what to do."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cantelop_kernels import client
from cantelop_kernels.client import Client
from cantelop_kernels.errors import DaemonUnavailable, NotFound, OutcomeUnknown


async def test_no_socket_and_no_listener(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnavailable, match="cantelop serve"):
        await Client(tmp_path / "none.sock").info()
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(stale))
    with pytest.raises(DaemonUnavailable):
        await Client(stale).info()


async def answering(path: Path, answer: bytes) -> asyncio.Server:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    return await asyncio.start_unix_server(serve, path)


def response(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


async def test_an_error_of_the_daemon_is_raised_as_its_class(tmp_path: Path) -> None:
    body = json.dumps({"error": NotFound("no session 's-1'", hint="ps").to_json()}).encode()
    async with await answering(tmp_path / "s", response(body, "404 Not Found")):
        with pytest.raises(NotFound, match="no session 's-1'"):
            await Client(tmp_path / "s").get("s-1")


@pytest.mark.parametrize("answer", [b"", b"garbage\r\n\r\n", response(b"not json")])
async def test_something_else_on_the_socket(tmp_path: Path, answer: bytes) -> None:
    async with await answering(tmp_path / "s", answer):
        with pytest.raises(OutcomeUnknown):
            await Client(tmp_path / "s").info()


async def test_an_answer_of_the_wrong_form(tmp_path: Path) -> None:
    async with await answering(tmp_path / "s", response(b'{"version": 1}')):
        with pytest.raises(Exception, match="version"):
            await Client(tmp_path / "s").info()


AS_NOBODY = """
import asyncio, os, sys
from pathlib import Path
from cantelop_kernels import client
import cantelop_kernels.cli.report as report
async def main():
    one = client.Client(Path(sys.argv[1]))
    "x".encode("idna"); "x".encode("latin-1")
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
    await one.info()
try:
    asyncio.run(main())
except Exception as error:
    sys.exit(report.exit_code(error, debug=False))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_no_permission_on_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "closed.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(1)
        ended = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(path)],
            check=False,
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert ended.returncode == 1
    assert f"no permission to use {path}" in ended.stderr
    assert "hint:" in ended.stderr and "Traceback" not in ended.stderr


async def test_a_daemon_that_is_started_takes_nothing_from_where_root_happened_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No module from the current folder, no variable of root's session."""
    found: dict[str, Any] = {}

    def spawn(_path: str, argv: list[str], env: dict[str, str], **_: Any) -> int:
        found.update(argv=argv, env=env)
        return os.posix_spawn("/bin/true", ["true"], {})

    monkeypatch.setattr(os, "posix_spawnp", spawn)
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONPATH", "AWS_SECRET_ACCESS_KEY", "JUPYTER_TOKEN", "NOTIFY_SOCKET"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("CANTELOP_CONFIG", "here.toml")
    with pytest.raises(DaemonUnavailable):
        await client._autostart(Path("d.sock"), allow_emulation=False)
    assert "-P" in found["argv"] and "--chdir=/" in found["argv"]
    assert str(tmp_path / "d.sock") in found["argv"]
    assert found["env"].keys() <= {"PATH", "HOME", "TZ", "LANG", "TMPDIR"} | {
        name for name in found["env"] if name.startswith(("CANTELOP_", "LC_"))
    } | {name for name in found["env"] if name.lower().endswith("_proxy")}
    assert found["env"]["CANTELOP_CONFIG"] == str(tmp_path / "here.toml")
