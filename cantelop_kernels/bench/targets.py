"""What is compared: a plain local ipykernel, and kernels in sandboxes of a daemon.

Layer 6. Made by `cli.bench` and `tests/bench`, used by `suite`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import psutil
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from cantelop_kernels.bench import host, measures, service
from cantelop_kernels.bench.figures import BASE, About
from cantelop_kernels.bench.service import Service
from cantelop_kernels.cli import kernel


class Idle(Protocol):
    """Kernels (or warm sandboxes) that do nothing; `count` of them."""

    count: int

    def processes(self) -> set[psutil.Process]:
        """All that they are made of on this host."""
        ...

    async def guest_memory(self) -> list[int]:
        """Bytes in use inside each guest; empty where there is no guest."""
        ...


class Target(Protocol):
    """One kind of kernel."""

    @property
    def about(self) -> About: ...

    @property
    def daemon(self) -> psutil.Process | None:
        """The process behind the kernels that serves them all, where there is one."""
        ...

    def manager(self) -> AsyncKernelManager:
        """Of a new kernel; nothing is started yet."""
        ...

    async def settle(self) -> None:
        """Wait until nothing is being prepared for it: then it, or another, can be measured."""
        ...

    async def idle(self, count: int, stack: AsyncExitStack) -> Idle:
        """So many, held until the end of `stack`."""
        ...


class Local:
    """jupyter_client's own LocalProvisioner with this interpreter's ipykernel."""

    about = About(BASE, "local")
    daemon = None

    def __init__(self, folder: Path) -> None:
        """`folder` is IPython's: the profile of whoever runs this would be measured with it."""
        self._env = {"IPYTHONDIR": str(folder)}

    def manager(self) -> AsyncKernelManager:
        return kernel.provisioned("local-provisioner", {}, sys.executable, env=self._env)

    async def settle(self) -> None:
        pass

    async def idle(self, count: int, stack: AsyncExitStack) -> Idle:
        kernels = _Kernels([self.manager() for _ in range(count)])
        await kernels.start(stack)
        return kernels


class Sandboxed:
    """Kernels of one daemon. `real` is False where there is no guest with a memory of its own."""

    def __init__(self, name: str, label: str, daemon: Service, *, real: bool = True) -> None:
        info = daemon.info
        self.about = About(name, label, info.vmm, info.emulated, daemon.warm)
        self._service = daemon
        self._real = real

    @property
    def daemon(self) -> psutil.Process:
        return self._service.process

    def manager(self) -> AsyncKernelManager:
        stanza = {"app": service.APP, "socket": str(self._service.client.path)}
        return kernel.provisioned("cantelop", stanza)

    async def settle(self) -> None:
        await self._service.settle()

    async def idle(self, count: int, stack: AsyncExitStack) -> Idle:
        if self._service.warm:
            await self._service.settle()
            return _Pool(self._service, real=self._real)
        kernels = _Kernels([self.manager() for _ in range(count)], self._service, real=self._real)
        await kernels.start(stack)
        return kernels


class _Kernels:
    """Kernels that were started and have answered once."""

    def __init__(
        self,
        managers: Sequence[AsyncKernelManager],
        daemon: Service | None = None,
        *,
        real: bool = False,
    ) -> None:
        self.count = len(managers)
        self._managers = managers
        self._clients: list[AsyncKernelClient] = []
        self._service = daemon
        self._real = real

    async def start(self, stack: AsyncExitStack) -> None:
        for km in self._managers:
            self._clients.append(await stack.enter_async_context(measures.opened(km)))

    def processes(self) -> set[psutil.Process]:
        if self._service is not None:
            return self._service.sandboxes()
        pids = [getattr(km.provisioner, "pid", None) for km in self._managers]
        return host.family(pid for pid in pids if pid is not None)

    async def guest_memory(self) -> list[int]:
        if not self._real:
            return []
        return [await measures.guest_memory(kc) for kc in self._clients]


class _Pool:
    """Warm sandboxes, which belong to nobody yet."""

    def __init__(self, daemon: Service, *, real: bool) -> None:
        self.count = daemon.warm
        self._service = daemon
        self._real = real

    def processes(self) -> set[psutil.Process]:
        return self._service.sandboxes()

    async def guest_memory(self) -> list[int]:
        if not self._real:
            return []
        return await service.warm_memory(self._service.client, service.APP)
