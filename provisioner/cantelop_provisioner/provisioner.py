"""CantelopProvisioner: jupyter_client's contract on one side, the daemon's socket on the other.

The order of calls, and which of them come when a kernel dies or a launch fails, is jupyter_client
8.10's and was traced; docstrings name the caller where it matters.
"""

from __future__ import annotations

import secrets
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
from traitlets import Bool, Float, Int, List, TraitError, Unicode

from cantelop_kernels.client import Client, ensure_daemon
from cantelop_kernels.errors import BadRequest, CantelopError, ConfigError, NotFound
from cantelop_kernels.schema import SessionRequest, SessionView
from cantelop_provisioner.adopt import adopt, connection_info
from cantelop_provisioner.command import (
    DEFAULT_ENV,
    SESSION_NAME,
    guest_command,
    guest_env,
    guest_folder,
    split_command,
)
from cantelop_provisioner.kernel import Kernel
from cantelop_provisioner.last_words import LastWords
from cantelop_provisioner.report import launch_failure

SETTINGS = (
    *("allow_emulation", "app", "env", "grace_seconds", "image", "last_words", "memory_mib"),
    *("socket", "vcpus"),
)

SHUTDOWN_SECONDS = 10.0
"""A kernel that was asked to end gets TERM after half of this; an emulated one is slow to go."""


class CantelopProvisioner(KernelProvisionerBase):
    """One kernel in a microVM. Settings come from the kernelspec's stanza, or from traitlets.

    The same instance serves every restart: the endpoints' token and the key are kept, so that
    clients that are connected go on working with the new kernel.
    """

    app = Unicode("default", help="the App whose policy applies").tag(config=True)
    image = Unicode(None, allow_none=True, help="image, if not the App's").tag(config=True)
    vcpus = Int(None, min=1, allow_none=True, help="if not the App's").tag(config=True)
    memory_mib = Int(None, min=1, allow_none=True, help="if not the App's").tag(config=True)
    env = List(
        Unicode(), help="names of variables to send besides the usual; the App must allow them"
    ).tag(config=True)
    allow_emulation = Bool(
        False, help="run without hardware virtualization, which is no security boundary"
    ).tag(config=True)
    grace_seconds = Float(
        None,
        min=0,
        allow_none=True,
        help="how long a kernel outlives this process, if shorter than the daemon's own",
    ).tag(config=True)
    last_words = Bool(
        True, help="have clients show, below the cell in which it died, why a kernel did"
    ).tag(config=True)
    socket = Unicode("", help="the daemon's socket; $CANTELOP_SOCKET otherwise").tag(config=True)

    def __init__(self, **kwargs: Any) -> None:
        """Raises ConfigError for a setting that is unknown or of the wrong type."""
        ours = {"kernel_id", "kernel_spec", "parent", "config", "log", *SETTINGS}
        unknown = sorted(kwargs.keys() - ours)
        hint = f"correct metadata.kernel_provisioner.config; known are: {', '.join(SETTINGS)}"
        if unknown:
            raise ConfigError(f"kernelspec: unknown setting {', '.join(unknown)}", hint=hint)
        try:
            super().__init__(**kwargs)
        except TraitError as error:
            raise ConfigError(f"kernelspec: {error}", hint=hint) from error
        self._kernel: Kernel | None = None
        self._client: Client | None = None
        self._token: str | None = None
        self._key = b""
        self._launch_seconds = 0.0

    # ---- state

    @property
    def has_process(self) -> bool:
        """From launch_kernel until wait has returned, or cleanup."""
        return self._kernel is not None and not self._kernel.reaped

    async def poll(self) -> int | None:
        """Every 0.1 to 3 s, from is_alive. Never raises; a silent daemon is no dead kernel."""
        return await self._kernel.poll() if self._kernel else 0

    async def wait(self) -> int | None:
        """From finish_shutdown and kill_kernel, when poll has said that it is dead."""
        return await self._kernel.wait() if self._kernel else 0

    async def send_signal(self, signum: int) -> None:
        """Every shutdown begins with SIGINT, even to a dead kernel: never raises."""
        if self._kernel and signum:
            await self._kernel.signal(signum)

    async def kill(self, restart: bool = False) -> None:
        """Destroy the sandbox at once. `restart` is never set by jupyter_client 8.10."""
        if self._kernel:
            await self._kernel.end()

    async def terminate(self, restart: bool = False) -> None:
        """At half the shutdown time, when the kernel has not ended by itself."""
        if self._kernel:
            self._kernel.expected = True
            await self._kernel.signal(signal.SIGTERM)

    async def shutdown_requested(self, restart: bool = False) -> None:
        """After the shutdown_request went out on the control channel."""
        if self._kernel:
            self._kernel.expected = True

    async def cleanup(self, restart: bool = False) -> None:
        """End the sandbox; without a restart also give the endpoints back. Idempotent.

        nbclient calls this twice after success, and alone after a kernel's death.
        """
        kernel, self._kernel = self._kernel, None
        if kernel:
            await kernel.end()
        if not restart and self._token and self._client:
            token, self._token = self._token, None
            try:
                await self._client.release(token)
            except CantelopError as error:
                self.log.warning("endpoints could not be released: %s", error)

    # ---- launch

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Turn a launch on this host into one inside a guest. Raises BadRequest.

        `env` and `cwd` may be missing, or None; then nothing of the host's is taken for granted.
        """
        self._refuse_encryption()
        if kwargs.get("env") is None:
            kwargs.pop("env", None)
        extra = kwargs.pop("extra_arguments", None) or []
        names = {name: value for name, value in kwargs.items() if isinstance(value, str)}
        command = guest_command(self.kernel_spec.argv, extra, names)
        kwargs = await super().pre_launch(cmd=command, **kwargs)
        kwargs["env"] = guest_env(kwargs["env"], [*DEFAULT_ENV, *self.env], self.kernel_spec.env)
        return kwargs

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start a session; returns when its kernel listens. Other keywords are Popen's: ignored.

        If this raises, nobody calls cleanup: the daemon undoes a session that fails or whose
        request is cancelled, and what comes after is undone here. The endpoints of an earlier
        kernel stay held, so that another try answers its clients.
        """
        await self._end_earlier()
        request = self._request(cmd, kwargs.get("env") or {}, kwargs.get("cwd"))
        began = time.monotonic()
        try:
            request.check()
            view = await self._create(request)
        except CantelopError as error:
            failure = launch_failure(error)
            self.log.error("the kernel did not start: %s", failure)
            raise failure from error
        self._launch_seconds = time.monotonic() - began
        await self._settle(view, request)
        return self.connection_info

    async def _create(self, request: SessionRequest) -> SessionView:
        path = Path(self.socket).expanduser() if self.socket else None
        self._client = await ensure_daemon(path, allow_emulation=self.allow_emulation)
        try:
            return await self._client.create(request)
        except NotFound:
            if request.endpoints is None:
                raise
        self.log.warning("the endpoints are gone: clients of the earlier kernel must connect anew")
        return await self._client.create(replace(request, endpoints=None))

    async def _settle(self, view: SessionView, request: SessionRequest) -> None:
        """Take the session over, or end it where the KernelManager cannot have it."""
        assert self._client is not None
        first, self._token = self._token is None, view.endpoints.token
        self.connection_info = connection_info(view, request)
        self._kernel = self._kernel_of(self._client, view.id, view.endpoints.ip)
        try:
            if self.parent is not None:
                adopt(self.parent, self.connection_info, request.env.get(SESSION_NAME, ""))
        except BaseException:
            await self.cleanup(restart=not first)
            raise
        self._kernel.tell(view.notices)

    def _kernel_of(self, client: Client, session: str, ip: str) -> Kernel:
        scheme = str(self.connection_info.get("signature_scheme", "hmac-sha256"))
        words = LastWords(ip, self._key, scheme) if self.last_words else None
        return Kernel(client, session, ip, self.log, words)

    async def _end_earlier(self) -> None:
        """A KernelManager may be started again without a shutdown in between."""
        if self._kernel:
            await self.cleanup(restart=True)

    def _request(self, cmd: list[str], env: dict[str, str], cwd: Any) -> SessionRequest:
        argv, extra = split_command(cmd)
        session = getattr(self.parent, "session", None)
        self._key = session.key if session else self._key or secrets.token_hex(32).encode()
        return SessionRequest(
            key=self._key.decode(),
            app=self.app,
            image=self.image,
            vcpus=self.vcpus,
            memory_mib=self.memory_mib,
            argv=argv,
            extra=extra,
            env=env,
            cwd=guest_folder(str(cwd) if cwd else None),
            signature_scheme=session.signature_scheme if session else "hmac-sha256",
            kernel_name=getattr(self.parent, "kernel_name", "") or "",
            endpoints=self._token,
            allow_emulation=self.allow_emulation,
            grace_seconds=self.grace_seconds,
        )

    def _refuse_encryption(self) -> None:
        """CURVE keys come from jupyter_client's own provisioner only (8.9 and later)."""
        if getattr(self.parent, "transport_encryption", "disabled") == "required":
            raise BadRequest(
                "transport_encryption='required' cannot be had from a kernel in a microVM",
                hint="its channels are sockets in a folder that only you can enter and never "
                "cross a network; set it to 'auto' or 'disabled'",
            )

    # ---- the rest of the contract

    def get_shutdown_wait_time(self, recommended: float = 5.0) -> float:
        return max(recommended, SHUTDOWN_SECONDS)

    def get_stable_start_time(self, recommended: float = 10.0) -> float:
        """The restarter counts from the death it saw, so the launch itself must be on top.

        Otherwise a kernel that always dies a few seconds after a slow start is restarted for ever.
        """
        return recommended + self._launch_seconds

    def resolve_path(self, path: str) -> str | None:
        """None: a path inside the guest is no path on this host."""
        return None

    async def get_provisioner_info(self) -> dict[str, Any]:
        """JSON-serialisable, key included; the session stays what it is."""
        info = await super().get_provisioner_info()
        info["connection_info"] = {
            name: value.decode() if isinstance(value, bytes) else value
            for name, value in self.connection_info.items()
        }
        info["session"] = self._kernel.session if self._kernel else None
        info["endpoints"] = self._token
        info["socket"] = str(self._client.path) if self._client else self.socket
        return info

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Take over a kernel that another process launched: it is this process's from now on.

        One that is gone by now is found dead by the first poll.
        """
        await super().load_provisioner_info(provisioner_info)
        info = dict(self.connection_info)
        self._key = str(info.get("key", "")).encode()
        self.connection_info = {**info, "key": self._key}  # type: ignore[typeddict-item]
        self.socket = provisioner_info.get("socket") or ""
        self._client = Client(Path(self.socket) if self.socket else None)
        self._token = provisioner_info.get("endpoints")
        session = provisioner_info.get("session")
        ip = str(info.get("ip", ""))
        self._kernel = self._kernel_of(self._client, session, ip) if session else None
        if self._kernel:
            await self._kernel.attach()
