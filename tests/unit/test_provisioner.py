"""The life of a kernel through jupyter_client, with local kernels behind a fake daemon."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from ipykernel.kernelspec import write_kernel_spec
from jupyter_client.manager import AsyncKernelManager, KernelManager
from jupyter_client.multikernelmanager import AsyncMultiKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory

from cantelop_kernels import errors
from cantelop_provisioner import CantelopProvisioner
from tests.fakes.clients import Start, WriteSpec, run
from tests.fakes.fake_daemon import FakeDaemon

pytest_plugins = ["tests.fakes.provisioner_fixtures"]


def provisioner_of(manager: KernelManager) -> CantelopProvisioner:
    assert isinstance(manager.provisioner, CantelopProvisioner)
    return manager.provisioner


async def test_start_run_and_shut_down(start: Start, fake_daemon: FakeDaemon) -> None:
    manager, client = await start()
    assert await run(client, "print(6 * 7)") == "42"
    client.stop_channels()
    began = time.monotonic()
    await manager.shutdown_kernel()
    assert time.monotonic() - began < 3  # jupyter_client#756: not its whole timeout
    assert not manager.has_kernel
    assert fake_daemon.alive() == []
    assert fake_daemon.released == [fake_daemon.last.view.endpoints.token]


async def test_connection_info(start: Start, fake_daemon: FakeDaemon) -> None:
    manager, _ = await start()
    info = provisioner_of(manager).connection_info
    assert info["key"] == manager.session.key
    assert isinstance(info["key"], bytes)
    assert fake_daemon.requests[0].key == manager.session.key.decode()
    channels = ("shell", "iopub", "stdin", "control", "hb")
    assert [info[f"{name}_port"] for name in channels] == [1, 2, 3, 4, 5]
    assert (manager.transport, manager.ip) == ("ipc", fake_daemon.last.view.endpoints.ip)


async def test_connection_file(write_spec: WriteSpec, tmp_path: Path) -> None:
    manager = AsyncKernelManager(
        kernel_name="sandboxed", connection_file=str(tmp_path / "kernel-1.json")
    )
    await manager.start_kernel(env={"JPY_SESSION_NAME": "a.ipynb"})
    file = Path(manager.connection_file)
    assert stat.S_IMODE(file.stat().st_mode) & 0o777 == 0o600
    written = json.loads(file.read_text())
    assert written["transport"] == "ipc"
    assert written["jupyter_session"] == "a.ipynb"
    await manager.shutdown_kernel(now=True)
    assert not file.exists()


@pytest.mark.parametrize("now", [False, True])
async def test_restart_keeps_endpoints_key_and_clients(
    start: Start, fake_daemon: FakeDaemon, now: bool
) -> None:
    manager, client = await start()
    before = provisioner_of(manager).connection_info.copy()
    file = Path(manager.connection_file).read_text()
    pid = await run(client, "import os; print(os.getpid())")
    await manager.restart_kernel(now=now)
    await client.wait_for_ready(timeout=30)
    assert await run(client, "import os; print(os.getpid())") != pid
    assert provisioner_of(manager).connection_info == before
    assert Path(manager.connection_file).read_text() == file
    assert len(fake_daemon.alive()) == 1
    assert fake_daemon.requests[1].endpoints == fake_daemon.last.view.endpoints.token
    assert fake_daemon.released == []


async def test_newports_changes_nothing_for_clients(start: Start) -> None:
    manager, client = await start()
    ports = manager.ports
    await manager.restart_kernel(now=True, newports=True)
    await client.wait_for_ready(timeout=30)
    assert manager.ports == ports


def test_a_synchronous_manager_runs_no_loop_between_calls(
    write_spec: WriteSpec, fake_daemon: FakeDaemon
) -> None:
    manager = KernelManager(kernel_name="sandboxed")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=30)
        reply = client.execute_interactive("1", timeout=10)
        assert reply["content"]["status"] == "ok"
        manager.restart_kernel()
        client.wait_for_ready(timeout=30)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    assert fake_daemon.alive() == []


async def test_interrupt(start: Start) -> None:
    manager, client = await start()
    task = asyncio.create_task(run(client, "import time; print('go', flush=True); time.sleep(60)"))
    await asyncio.sleep(0.5)
    await manager.interrupt_kernel()
    assert "KeyboardInterrupt" in await asyncio.wait_for(task, 10)


async def test_wait_ends_has_process(start: Start) -> None:
    manager, _ = await start()
    provisioner = provisioner_of(manager)
    assert provisioner.has_process
    await provisioner.send_signal(signal.SIGKILL)
    assert await asyncio.wait_for(provisioner.wait(), 10) == -9
    assert not provisioner.has_process
    assert await provisioner.poll() == -9


async def test_terminate_is_a_signal_that_a_stuck_kernel_gets(
    write_spec: WriteSpec, fake_daemon: FakeDaemon, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "up")
    code = f"import signal, time; signal.signal(2, signal.SIG_IGN); open('{tmp_path}/up', 'w')"
    write_spec("stuck", argv=["python3", "-c", f"{code}; time.sleep(600)"])
    manager = AsyncKernelManager(kernel_name="stuck")
    await manager.start_kernel()
    await asyncio.to_thread((tmp_path / "up").read_bytes)
    provisioner_of(manager).get_shutdown_wait_time = lambda recommended=5.0: 2.0  # type: ignore[method-assign]
    await manager.shutdown_kernel()
    ended = fake_daemon.last.look().exit
    assert ended is not None
    assert ended.signal == signal.SIGTERM


async def test_kill_then_cleanup_for_a_restart_keeps_the_endpoints(
    start: Start, fake_daemon: FakeDaemon
) -> None:
    manager, _ = await start()
    provisioner = provisioner_of(manager)
    await provisioner.kill(restart=False)
    assert await provisioner.poll() == -9
    await provisioner.wait()
    await provisioner.cleanup(restart=True)
    assert fake_daemon.released == []
    await provisioner.cleanup(restart=False)
    assert len(fake_daemon.released) == 1


async def test_cleanup_is_idempotent(start: Start, fake_daemon: FakeDaemon) -> None:
    manager, _ = await start()
    for _ in range(3):
        await provisioner_of(manager).cleanup(restart=False)
    assert len(fake_daemon.ended) == 1
    assert len(fake_daemon.released) == 1
    assert not provisioner_of(manager).has_process


async def test_a_dead_kernel_may_be_signalled_killed_and_terminated(start: Start) -> None:
    manager, _ = await start()
    provisioner = provisioner_of(manager)
    await provisioner.send_signal(signal.SIGKILL)
    await provisioner.wait()
    await provisioner.send_signal(signal.SIGINT)
    await provisioner.terminate()
    await provisioner.kill()


async def test_the_same_manager_may_start_again(
    write_spec: WriteSpec, fake_daemon: FakeDaemon
) -> None:
    with zmq.asyncio.Context() as context:  # a manager destroys a context of its own
        manager = AsyncKernelManager(kernel_name="sandboxed", context=context)
        await manager.start_kernel()
        await manager.shutdown_kernel(now=True)
        await manager.start_kernel()
        client = manager.client()
        client.start_channels()
        await client.wait_for_ready(timeout=30)
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
    assert fake_daemon.requests[1].endpoints is None
    assert len(fake_daemon.released) == 2


async def test_starting_twice_leaves_one_sandbox(start: Start, fake_daemon: FakeDaemon) -> None:
    manager, _ = await start()
    await manager.start_kernel()
    assert len(fake_daemon.alive()) == 1


async def test_nothing_of_the_hosts_environment_passes(
    start: Start, fake_daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("A_SECRET", "JUPYTER_TOKEN", "JPY_PARENT_PID"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("TZ", "UTC")
    await start()  # nbclient starts kernels without env: then it is the whole of os.environ
    assert "secret" not in fake_daemon.requests[0].env.values()
    assert fake_daemon.requests[0].env["TZ"] == "UTC"


async def test_env_of_the_launch_is_filtered_and_left_alone(
    start: Start, fake_daemon: FakeDaemon
) -> None:
    env = {"TZ": "UTC", "OTHER": "1", "JPY_SESSION_NAME": "b.ipynb", "JPY_PARENT_PID": "1"}
    given = env.copy()
    await start(env=given)
    assert fake_daemon.requests[0].env == {"TZ": "UTC", "JPY_SESSION_NAME": "b.ipynb"}
    assert given == env


async def test_env_none_is_no_env(start: Start, fake_daemon: FakeDaemon) -> None:
    await start(env=None)
    assert "PATH" not in fake_daemon.requests[0].env


async def test_env_that_the_kernelspec_names(
    start: Start,
    write_spec: WriteSpec,
    fake_daemon: FakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_TOKEN", "abc")
    monkeypatch.setenv("MINE", "1")
    spec_env = {"TOKEN": "${MY_TOKEN}", "PLAIN": "x y"}
    write_spec("named", env=spec_env, config={"env": ["MINE"]})
    _, client = await start("named")
    wanted = {"TOKEN": "abc", "PLAIN": "x y", "MINE": "1"}
    assert wanted.items() <= fake_daemon.requests[0].env.items()
    assert await run(client, "import os; print(os.environ['TOKEN'])") == "abc"


async def test_extra_arguments_survive_a_restart(start: Start, fake_daemon: FakeDaemon) -> None:
    extra = ["--HistoryManager.hist_file=:memory:"]
    manager, _ = await start(extra_arguments=extra)
    await manager.restart_kernel(now=True)
    assert [one.extra for one in fake_daemon.requests] == [extra, extra]
    assert [one.argv for one in fake_daemon.requests] == [None, None]


async def test_a_command_of_its_own(
    start: Start, write_spec: WriteSpec, fake_daemon: FakeDaemon
) -> None:
    write_spec("own", argv=["python3", "-X", "dev", "-m", "ipykernel", "-f", "{connection_file}"])
    _, client = await start("own")
    assert await run(client, "import sys; print(sys.flags.dev_mode)") == "True"
    argv = fake_daemon.requests[0].argv
    assert argv is not None
    assert argv[-1] == "/run/cantelop/kernel/connection.json"


async def test_a_plain_kernelspec_by_default_provisioner(
    start: Start, fake_daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JUPYTER_DEFAULT_PROVISIONER_NAME=cantelop: how outside suites are pointed at us."""
    write_kernel_spec(tmp_path / "jupyter" / "kernels" / "plain")
    monkeypatch.setattr(KernelProvisionerFactory.instance(), "default_provisioner_name", "cantelop")
    _, client = await start("plain", extra_arguments=["--HistoryManager.hist_file=:memory:"])
    assert await run(client, "print(1)") == "1"
    assert fake_daemon.requests[0].argv is None
    assert fake_daemon.requests[0].extra == ["--HistoryManager.hist_file=:memory:"]


async def test_settings_reach_the_daemon(
    start: Start, write_spec: WriteSpec, fake_daemon: FakeDaemon
) -> None:
    config = {"app": "science", "image": "r", "vcpus": 2, "memory_mib": 1024}
    write_spec("big", config=config | {"allow_emulation": True})
    await start("big", cwd="/home/somebody")
    request = fake_daemon.requests[0].to_json()
    assert config.items() <= request.items()
    assert request["allow_emulation"] is True
    assert request["cwd"] is None
    assert request["kernel_name"] == "big"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"memory": 512}, "unknown setting memory"),
        ({"vcpus": "two"}, "vcpus"),
        ({"app": 3}, "app"),
        ({"app": "not a name"}, "name of an App"),
    ],
)
async def test_wrong_settings_are_errors(
    write_spec: WriteSpec, config: dict[str, Any], text: str
) -> None:
    write_spec("wrong", config=config)
    manager = AsyncKernelManager(kernel_name="wrong")
    with pytest.raises(errors.BadRequest, match=text):
        await manager.start_kernel()
    assert not manager.has_kernel


async def test_the_socket_may_be_named(
    start: Start, write_spec: WriteSpec, fake_daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANTELOP_SOCKET", "/nonexistent/d.sock")
    write_spec("there", config={"socket": str(fake_daemon.path)})
    await start("there")
    assert len(fake_daemon.requests) == 1


async def test_notices_are_shown_at_every_start(
    start: Start, fake_daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    fake_daemon.faults.notices = ["emulated: no security boundary"]
    manager, _ = await start()
    await manager.restart_kernel(now=True)
    shown = [r for r in caplog.records if "no security boundary" in r.getMessage()]
    assert [one.levelname for one in shown] == ["WARNING", "WARNING"]


async def test_encryption_that_is_required_is_refused(
    write_spec: WriteSpec, fake_daemon: FakeDaemon
) -> None:
    write_spec("curve", metadata={"supported_encryption": "curve"})
    manager = AsyncKernelManager(kernel_name="curve", transport_encryption="required")
    with pytest.raises(errors.BadRequest, match="transport_encryption"):
        await manager.start_kernel()
    assert fake_daemon.requests == []


async def test_encryption_that_is_not_required_is_done_without(
    start: Start, write_spec: WriteSpec
) -> None:
    write_spec("curve", metadata={"supported_encryption": "curve"})
    _, client = await start("curve", transport_encryption="auto")
    assert await run(client, "print(1)") == "1"


async def test_provisioner_info_moves_a_kernel_to_another_process(
    start: Start, fake_daemon: FakeDaemon
) -> None:
    manager, _ = await start()
    info = json.loads(json.dumps(await provisioner_of(manager).get_provisioner_info()))
    other = CantelopProvisioner(kernel_spec=manager.kernel_spec, kernel_id="x")
    await other.load_provisioner_info(info)
    assert other.connection_info == provisioner_of(manager).connection_info
    assert other.kernel_id == manager.kernel_id
    assert other.has_process
    assert await other.poll() is None
    await other.cleanup(restart=False)
    assert fake_daemon.alive() == []
    assert not await manager.is_alive()


async def test_a_provisioner_without_a_manager(fake_daemon: FakeDaemon, start: Start) -> None:
    manager, _ = await start()
    alone = CantelopProvisioner(kernel_id="x", kernel_spec=manager.kernel_spec)
    kwargs = await alone.pre_launch()
    info = await alone.launch_kernel(kwargs.pop("cmd"), **kwargs)
    assert isinstance(info["key"], bytes)
    assert len(info["key"]) == 64
    await alone.cleanup()


async def test_paths_inside_are_no_paths_here(start: Start) -> None:
    manager, _ = await start()
    assert manager.resolve_path("a.py") is None


async def test_eight_at_once(write_spec: WriteSpec, fake_daemon: FakeDaemon) -> None:
    kernels = AsyncMultiKernelManager()
    ids = await asyncio.gather(*(kernels.start_kernel(kernel_name="sandboxed") for _ in range(8)))
    assert len({kernels.get_kernel(one).ip for one in ids}) == 8
    assert len(fake_daemon.alive()) == 8
    await kernels.shutdown_all(now=True)
    assert fake_daemon.alive() == []
    assert len(fake_daemon.released) == 8
