"""Gives a KernelManager the endpoints that the daemon made."""

from __future__ import annotations

from typing import Any, cast

from jupyter_client.connect import KernelConnectionInfo, port_names

from cantelop_kernels.schema import SessionRequest, SessionView

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
"""In the order of their endpoints' numbers, 1 to 5 (cantelop_kernels.wire has the same)."""


def connection_info(view: SessionView, request: SessionRequest) -> KernelConnectionInfo:
    """What launch_kernel returns. The key must be bytes, whatever its annotation says."""
    ports = {f"{channel}_port": number for number, channel in enumerate(CHANNELS, start=1)}
    info: dict[str, Any] = {
        "transport": "ipc",
        "ip": view.endpoints.ip,
        **ports,
        "key": request.key.encode(),
        "signature_scheme": request.signature_scheme,
        "kernel_name": request.kernel_name,
    }
    return cast(KernelConnectionInfo, info)


def adopt(manager: Any, info: KernelConnectionInfo, session_name: str) -> None:
    """Load `info` into the manager and write its connection file (0600, Jupyter's own folder).

    jupyter_client does this itself right after launch_kernel, where a failure, such as a full
    disk, would leave a sandbox that nobody ends; done here it can be undone. A manager that is
    being restarted has its file already, and the file says the same.
    """
    for name in port_names:
        setattr(manager, name, 0)
    manager.load_connection_info(info)
    manager.write_connection_file(jupyter_session=session_name)
    manager._reconcile_connection_info(info)
