"""The guest as a machine: users, clock, host name, entropy, memory, power. Tests replace it."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
import time

from . import spawn
from .cgroup import KernelCgroup, _read, _write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn, Protocol

    class MachineLike(Protocol):
        """What the agent needs of the machine it runs on."""

        kernel_dir: str
        home: str

        def enter_kernel_process(self) -> None: ...
        def execute_launcher(self, env: dict[str, str]) -> NoReturn: ...
        def kernel_env(self) -> dict[str, str]: ...
        def give_to_kernel(self, path: str) -> None: ...
        def identity(self) -> dict[str, Any]: ...
        def personalise(self, hostname: str, time_ns: int, entropy: bytes) -> None: ...
        def memory(self) -> dict[str, int]: ...
        def memory_used(self) -> int: ...
        def cpu_seconds(self) -> float: ...
        def oom_kills(self) -> int: ...
        def uptime(self) -> float: ...
        def power_off(self, reason: str) -> NoReturn: ...


AGENT_PATH = "/run/cantelop/agent"
PYTHON = "/usr/bin/python3"
USER = "sandbox"
UID = GID = 1000

OPEN_FILES = (65536, 524288)
"""Soft and hard limit of the kernel's process; Linux gives its first process 1024 and 4096."""

PAGE_LIST_FRACTION = "100"
"""What share of the memory each CPU may keep to itself of what was freed: Linux would let an eighth
lie there for half a minute, in use for all that anybody can see."""

LARGER_PAGES = "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled"
"""Sixteen pages for one page fault: a third of the faults of a kernel that starts, each of which
costs an emulated CPU 50 us (Documentation/admin-guide/mm/transhuge.rst)."""

_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_RNDADDENTROPY = 0x40085203
_RNDRESEEDCRNG = 0x5207
_RB_AUTOBOOT = 0x01234567
"""A restart, which ends the machine under every VMM. Firecracker cannot be powered off: its guest
would halt, and its process run on (firecracker FAQ.md; reboot(2))."""

_MAX_ENTROPY = 512


class Machine:
    """The product. `prepare` first, before the kernel's process; `network` any time after it."""

    kernel_dir = "/run/cantelop/kernel"
    home = f"/home/{USER}"

    def __init__(self) -> None:
        self.memory_total = _meminfo("MemTotal")
        self._cgroup = KernelCgroup(self.memory_total)
        self._groups = _groups_of(USER)

    def prepare(self) -> None:
        """The least that the kernel's process needs."""
        _write("/proc/self/oom_score_adj", "-1000")
        _write("/proc/sys/vm/percpu_pagelist_high_fraction", PAGE_LIST_FRACTION)
        if os.path.exists(LARGER_PAGES):  # Linux 6.8 and later
            _write(LARGER_PAGES, "always")
        self._cgroup.create()
        os.mkdir(self.kernel_dir, 0o700)
        self.give_to_kernel(self.kernel_dir)

    def network(self) -> None:
        """Bring up lo: ipykernel binds to 127.0.0.1 when it starts."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            request = struct.pack("16sH14x", b"lo", 0)
            _, flags = struct.unpack("16sH14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))
            fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))

    def enter_kernel_process(self) -> None:
        """In the child: own cgroup, no protection from the OOM killer, the sandbox's user."""
        _write("/proc/self/oom_score_adj", "0")
        self._cgroup.enter()
        resource.setrlimit(resource.RLIMIT_NOFILE, OPEN_FILES)
        os.setgroups(self._groups)
        os.setresgid(GID, GID, GID)
        os.setresuid(UID, UID, UID)
        os.umask(0o022)
        os.chdir(self.home if os.path.isdir(self.home) else "/")

    def execute_launcher(self, env: dict[str, str]) -> NoReturn:
        spawn.execute_launcher(PYTHON, AGENT_PATH, env)

    def kernel_env(self) -> dict[str, str]:
        """What every kernel gets, before what the App adds."""
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": self.home,
            "USER": USER,
            "LOGNAME": USER,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
        }

    def give_to_kernel(self, path: str) -> None:
        os.chown(path, UID, GID)

    def identity(self) -> dict[str, Any]:
        return {
            "boot_id": _read("/proc/sys/kernel/random/boot_id").strip(),
            "release": os.uname().release,
            "memory": self.memory_total,
            "vcpus": os.cpu_count() or 1,
        }

    def personalise(self, hostname: str, time_ns: int, entropy: bytes) -> None:
        """Everything that must not be the same in two guests of one image."""
        time.clock_settime_ns(time.CLOCK_REALTIME, time_ns)
        _add_entropy(entropy[:_MAX_ENTROPY])
        socket.sethostname(hostname)
        _replace("/etc/hostname", f"{hostname}\n")
        _replace("/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {hostname}\n::1 localhost\n")
        _replace("/etc/machine-id", os.urandom(16).hex() + "\n")

    def memory(self) -> dict[str, int]:
        """The kernel's limit, what it uses, and the most it has used, in bytes."""
        group = self._cgroup
        return {
            "memory_limit": group.limit,
            "memory_current": group.current,
            "memory_peak": group.peak,
        }

    def memory_used(self) -> int:
        """Bytes in use in the whole guest, not counting what it can take back at once."""
        return self.memory_total - _meminfo("MemAvailable")

    def cpu_seconds(self) -> float:
        """That the kernel and all it has started have used."""
        return self._cgroup.cpu_seconds

    def oom_kills(self) -> int:
        return self._cgroup.oom_kills

    def uptime(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def power_off(self, reason: str) -> NoReturn:
        power_off(reason)


def power_off(reason: str) -> NoReturn:
    """Sync, say why on the console, and end the machine."""
    import ctypes

    os.write(2, f"cantelop: power off: {reason}\n".encode())
    os.sync()
    ctypes.CDLL(None).reboot(_RB_AUTOBOOT)
    os._exit(1)  # the death of the first process ends the machine as well


def _add_entropy(data: bytes) -> None:
    """Credited: the host's randomness is as good as it gets for a guest."""
    descriptor = os.open("/dev/urandom", os.O_WRONLY)
    try:
        pool = struct.pack(f"ii{len(data)}s", len(data) * 8, len(data), data)
        fcntl.ioctl(descriptor, _RNDADDENTROPY, pool)
        fcntl.ioctl(descriptor, _RNDRESEEDCRNG)
    finally:
        os.close(descriptor)


def _meminfo(field: str) -> int:
    """In bytes."""
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/meminfo has no {field}")


def _groups_of(user: str) -> list[int]:
    """Like initgroups(3), without loading the name service."""
    groups = [GID]
    with open("/etc/group") as lines:
        for line in lines:
            _, _, gid, members = line.rstrip("\n").split(":")
            if user in members.split(","):
                groups.append(int(gid))
    return groups


def _replace(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
