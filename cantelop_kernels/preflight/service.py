"""The daemon that runs here, if one does, and its warm sandboxes.

Layer 6, part of `preflight`.
"""

from __future__ import annotations

import os
from pathlib import Path

from cantelop_kernels.client import Client
from cantelop_kernels.errors import CantelopError, DaemonUnavailable
from cantelop_kernels.preflight.model import Check
from cantelop_kernels.schema import Info


async def daemon(socket: Path) -> list[Check]:
    """A root client starts a daemon by itself, so for root none running is in order."""
    try:
        info = await Client(socket).info()
    except DaemonUnavailable:
        if os.geteuid() == 0:
            return [Check("daemon", "ok", f"none on {socket}; one is started when needed")]
        return [Check("daemon", "fail", f"none answers on {socket}", "sudo cantelop serve")]
    except CantelopError as error:
        return [Check("daemon", "fail", error.message, error.hint)]
    found = f"version {info.version} on {socket}, {info.sessions} sessions"
    return [Check("daemon", "ok", found), *pool(info)]


def pool(info: Info) -> list[Check]:
    """The warm sandboxes of a daemon that runs; sessions start without them too, but slower."""
    found = []
    for one in info.pool:
        text = f"{one.ready} of {one.target} warm sandboxes of {one.image}, {one.memory_mib} MiB"
        if one.failures:
            text += f"; {one.failures} boots failed in a row: {one.last_error}"
            found.append(Check("pool", "warn", text, "see why with: cantelop exec 1"))
        else:
            found.append(Check("pool", "ok", text))
    for app, why in info.unresolved.items():
        text = f"no warm sandboxes for the App {app!r}: {why}"
        found.append(Check("pool", "warn", text, "build its image: cantelop image build"))
    return found
