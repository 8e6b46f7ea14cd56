"""`ps` and `kill` on real sessions."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from tests.fakes.host_stack import Stack


async def cantelop(stack: Stack, *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cantelop_kernels", *argv),
        env={**os.environ, "CANTELOP_SOCKET": str(stack.socket)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await child.communicate()
    return child.returncode or 0, out.decode(), err.decode()


async def test_a_session_is_killed_once(stack: Stack) -> None:
    one, two = await stack.create(), await stack.create()
    assert await cantelop(stack, "kill", one.id) == (0, f"{one.id}\n", "")
    code, out, err = await cantelop(stack, "kill", one.id, "s-unknown", two.id)
    assert (code, out) == (1, f"{two.id}\n")
    assert f"session {one.id} has ended already: ended by its owner" in err
    assert "no session s-unknown" in err and len(err.splitlines()) == 2


async def test_ps_says_why_and_when(stack: Stack) -> None:
    view = await stack.create()
    await stack.client.end(view.id)
    code, out, _ = await cantelop(stack, "ps")
    assert code == 0 and "exited (ended by its owner)" in out and "s ago" in out


async def test_a_table_that_cannot_be_written_is_an_error(stack: Stack) -> None:
    command = f"{sys.executable} -m cantelop_kernels ps"
    for where in (">&-", ">/dev/full"):
        child = await asyncio.create_subprocess_exec(
            *("bash", "-c", f"{command} {where}"),
            env={**os.environ, "CANTELOP_SOCKET": str(stack.socket)},
            stderr=subprocess.PIPE,
        )
        _, err = await child.communicate()
        assert child.returncode == 1
        assert err.decode().startswith("cantelop: cannot write to stdout: ")
