"""The operator's settings: read once, checked whole, frozen afterwards.

Layer 0. The file is TOML (`/etc/cantelop/cantelop.toml`, or `$CANTELOP_CONFIG`); a missing file
means the defaults. A key that is not known is an error, since a misspelt limit is a limit that does
not hold. Nothing here reads the environment at import; `load` is called once, by the composition
root.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traitlets import Bool, Dict, Enum, Float, HasTraits, Int, List, TraitError, Unicode

from cantelop_kernels.errors import ConfigError, NotFound
from cantelop_kernels.slot import MAX_SLOTS, STRIDE

DEFAULT_CONFIG = Path("/etc/cantelop/cantelop.toml")
DEFAULT_SOCKET = Path("/run/cantelop/cantelop.sock")
DEFAULT_STATE = Path("/var/lib/cantelop")

VMMS = ("auto", "firecracker", "qemu")

DEFAULT_ENV = ("TZ", "COLUMNS", "LINES", "NO_COLOR", "CLICOLOR", "MPLBACKEND")
"""Environment variables that may pass into a guest unless an App says otherwise: none is secret.

Not LANG or LC_*: the image has one locale, and a variable that an interpreter reads when it starts
costs the guest the one it has already started.
"""


def socket_path() -> Path:
    """`$CANTELOP_SOCKET`, or the default."""
    return Path(os.environ.get("CANTELOP_SOCKET") or DEFAULT_SOCKET)


def state_path() -> Path:
    """`$CANTELOP_STATE`, or the default."""
    return Path(os.environ.get("CANTELOP_STATE") or DEFAULT_STATE)


class _Frozen(HasTraits):
    """Traits that are checked when made and cannot be set afterwards."""

    _sealed = False

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        unknown = sorted(values.keys() - set(self.trait_names()))
        if unknown:
            raise ConfigError(
                f"{where}: unknown setting {', '.join(unknown)}",
                hint=f"known are: {', '.join(sorted(self.trait_names()))}",
            )
        try:
            super().__init__(**values)
        except TraitError as error:
            raise ConfigError(f"{where}: {error}", hint="correct the value") from error
        self._sealed = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self._sealed and name in self.trait_names():
            raise AttributeError(f"{name} is frozen after loading")
        super().__setattr__(name, value)


class App(_Frozen):
    """A named policy: what a session gets, and how far a request may go beyond it."""

    image = Unicode("python3", help="image name or digest")
    vcpus = Int(1, min=1, max=64)
    memory_mib = Int(512, min=192, max=1 << 20)
    max_vcpus = Int(4, min=1, max=64, help="the most a request may ask for")
    max_memory_mib = Int(4096, min=192, max=1 << 20, help="the most a request may ask for")
    scratch_mib = Int(4096, min=64, max=1 << 20, help="size of the writable disk, sparse")
    env = List(Unicode(), list(DEFAULT_ENV), help="names that may pass from client to guest")
    users = List(Unicode(), ["*"], help="who may use it, among those the daemon serves")
    warm = Int(0, min=0, max=MAX_SLOTS, help="sandboxes kept ready, at least")
    warm_max = Int(0, min=0, max=MAX_SLOTS, help="and at most, where more were asked for at once")
    idle_seconds = Float(0, min=0, help="end a session whose kernel did nothing for so long; 0: no")
    lifetime_seconds = Float(0, min=0, help="end a session after so long, busy or not; 0: no")


class Config(_Frozen):
    """Everything the daemon is told by its operator."""

    allow_emulation = Bool(False, help="run without hardware virtualization: no security boundary")
    vmm = Enum(VMMS, "auto", help="auto: Firecracker on hardware where it is installed, else QEMU")
    allow_vulnerable_firecracker = Bool(False, help="run a version in spite of its known flaws")
    disk_mib_per_second = Int(256, min=0, max=1 << 20, help="of each disk, on Firecracker; 0: any")
    disk_operations_per_second = Int(
        20_000, min=0, max=1 << 24, help="of each disk, on Firecracker; 0: any number"
    )
    uid_base = Int(600_000, min=1000, max=(1 << 31) - STRIDE * MAX_SLOTS)
    cgroup_parent = Unicode("cantelop", help="cgroup below which every sandbox has one of its own")
    max_sessions = Int(64, min=1, max=MAX_SLOTS)
    boot_deadline = Float(90.0, min=1, help="seconds from VMM start to a kernel that answers")
    max_memory_mib = Int(0, min=0, help="of the host, for all sandboxes; 0: four fifths of it")
    vcpus_per_core = Float(8.0, min=0.1, help="virtual CPUs of all sandboxes, per core of the host")
    queue_seconds = Float(30.0, min=0, help="how long a session waits for room on a full host")
    grace_seconds = Float(30.0, min=0, help="how long a session outlives its client's process")
    silence_seconds = Float(
        20.0, min=0.5, help="a sandbox that does not answer for so long is ended"
    )
    drain_seconds = Float(30.0, min=0, help="how long a daemon that is stopped waits for sessions")
    warm_total = Int(8, min=0, max=MAX_SLOTS, help="sandboxes kept ready for all Apps together")
    warm_max_age = Float(3600.0, min=1, help="seconds; an older one is replaced")
    users = List(Unicode(), ["root"], help='names, uids, "@group" or "*"; root is always served')
    apps = Dict(key_trait=Unicode(), default_value={})

    def app(self, name: str) -> App:
        """Raises NotFound for a name that is not configured."""
        try:
            return self.apps[name]  # type: ignore[no-any-return]
        except KeyError:
            known = ", ".join(sorted(self.apps))
            raise NotFound(f"no App named {name!r}", hint=f"Apps here: {known}") from None


def load(path: Path | None = None, **overrides: Any) -> Config:
    """Read the settings; `overrides` (from the command line) win over the file.

    Raises ConfigError with the file and key at fault. Called once per process.
    """
    path = path or Path(os.environ.get("CANTELOP_CONFIG") or DEFAULT_CONFIG)
    values = _read(path) | overrides
    apps = values.pop("apps", {})
    if not isinstance(apps, dict) or not all(isinstance(one, dict) for one in apps.values()):
        raise ConfigError(f"{path}: apps must be tables", hint="write [apps.NAME] and its settings")
    made = {name: App(f"{path}: [apps.{name}]", one) for name, one in apps.items()}
    made.setdefault("default", App("default", {}))
    return Config(str(path), values | {"apps": made})


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", hint="correct the file") from error
