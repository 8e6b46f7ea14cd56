"""What of a host's launch reaches the guest: command, environment, folder. Pure functions.

jupyter_client prepares a launch for a process on this host. A guest has other paths and must not
see the host's environment, so each part is rewritten or left out here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath, PurePosixPath

from cantelop_kernels.errors import BadRequest

CONNECTION_FILE = "/run/cantelop/kernel/connection.json"
"""Where the guest's agent puts the connection file of a kernel that it starts."""

GUEST_PYTHON = "python3"
GUEST_PREFIX = "/usr"
WORKSPACE = PurePosixPath("/workspace")

IMAGE_KERNEL = [GUEST_PYTHON, "-m", "ipykernel_launcher", "-f", CONNECTION_FILE]
"""Stands for the image's own kernel, which the guest has loaded before it is asked for."""

DEFAULT_ENV = ("TZ", "COLUMNS", "LINES", "NO_COLOR", "CLICOLOR", "MPLBACKEND")
"""Names sent without being asked for; an App allows the same ones unless it says otherwise."""

SESSION_NAME = "JPY_SESSION_NAME"

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_FIELD = re.compile(r"\{([A-Za-z0-9_]+)\}")
_LAUNCHER = (["-m", "ipykernel_launcher"], ["-m", "ipykernel"])
_SERVERS_OWN = re.compile(
    r"JPY_PARENT_PID|JPY_INTERRUPT_EVENT|(JPY|JUPYTER|JUPYTERHUB|KG|EG)_(.*_)?(TOKEN|SECRET|KEY)"
)
"""Belongs to the server that starts kernels. JPY_PARENT_PID would make ipykernel end at once in
a guest; the others let whoever knows them act as the user."""


def guest_command(argv: Sequence[str], extra: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """The command inside the guest for a kernelspec's `argv` and a launch's extra arguments.

    `names` are further placeholders that argv may use, as jupyter_client allows. Raises BadRequest
    where argv asks for something that a guest cannot have.
    """
    own = _image_kernel_arguments(argv)
    if own is not None:
        return [*IMAGE_KERNEL, *own, *extra]
    if any("{resource_dir}" in part for part in argv):
        raise BadRequest(
            "the kernelspec's argv uses {resource_dir}, a folder of this host",
            hint="a kernel in a microVM sees its image only; name a path inside the image",
        )
    fields = {**names, "connection_file": CONNECTION_FILE, "prefix": GUEST_PREFIX}
    command = [_FIELD.sub(lambda m: fields.get(m[1], m[0]), part) for part in [*argv, *extra]]
    if command and (_PYTHON.fullmatch(command[0]) or command[0] == sys.executable):
        command[0] = GUEST_PYTHON
    return command


def split_command(command: Sequence[str]) -> tuple[list[str] | None, list[str]]:
    """(argv, extra) as a SessionRequest wants them; argv None is the image's own kernel."""
    size = len(IMAGE_KERNEL)
    if list(command[:size]) == IMAGE_KERNEL:
        return None, list(command[size:])
    return list(command), []


def guest_env(
    env: Mapping[str, str], allowed: Collection[str], named: Mapping[str, str]
) -> dict[str, str]:
    """What may pass of a launch's environment: `allowed` names, and those the kernelspec names."""
    wanted = {*allowed, *named, SESSION_NAME}
    return {
        name: str(value)
        for name, value in env.items()
        if name in wanted and not _SERVERS_OWN.fullmatch(name)
    }


def guest_folder(cwd: str | None) -> str | None:
    """A folder that means the same on both sides: below /workspace. Others mean nothing there."""
    path = PurePosixPath(cwd or ".")
    inside = path == WORKSPACE or WORKSPACE in path.parents
    return str(path) if inside and ".." not in path.parts else None


def _image_kernel_arguments(argv: Sequence[str]) -> list[str] | None:
    """The arguments after the usual start of ipykernel, or None where argv is something else.

    ipykernel's own kernelspec may carry `-Xfrozen_modules=off`, which only its debugger wants and
    the image sees to itself.
    """
    if not argv or not _PYTHON.fullmatch(PurePath(argv[0]).name):
        return None
    rest = [part for part in argv[1:] if part != "-Xfrozen_modules=off"]
    if rest[:2] in _LAUNCHER and rest[2:4] == ["-f", "{connection_file}"]:
        return rest[4:]
    return None
