"""A kernel that is warmed up and bound late, in a real VM: as new, and quick."""

from __future__ import annotations

import json
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.introspection import MODULES, SURVEY
from tests.vm.guest_vm import GuestVm, guest_vm
from tests.vm.test_guest_boot import run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_client.blocking.client import BlockingKernelClient

pytestmark = [pytest.mark.vm, pytest.mark.timeout(180)]

FIELDS: dict[str, Any] = {"env": {"TZ": "Asia/Tokyo"}, "hostname": "box-7"}

WRITTEN = """
import subprocess
print(subprocess.run("sudo find / -xdev -newer /run/cantelop/agent -not -type d | sort", shell=True,
                     capture_output=True, text=True).stdout)
"""

TIMES = """
import time
print(abs(time.time() - {now}) < 60, open("/etc/hostname").read(), open("/etc/hosts").read(),
      len(open("/etc/machine-id").read()))
"""


@contextmanager
def bound(*, warm: bool) -> Iterator[tuple[GuestVm, BlockingKernelClient]]:
    """A guest whose kernel has answered its first cell, `SURVEY`, and the times of it all."""
    with guest_vm() as vm:
        vm.host.accept()
        if warm:
            vm.mark("hello")
            vm.host.request("warm_up")
            used = vm.host.expect("warm")["memory_used"]
            vm.mark("warm")
            print(f"memory used: {used / (1 << 20):.1f} MiB")
            time.sleep(1)
        vm.mark("bind")
        vm.host.bind(**FIELDS)
        vm.host.expect("ready")
        vm.mark("ready")
        client = vm.host.client()
        client.execute("1", silent=True)
        client.get_shell_msg(timeout=60)
        vm.mark("first reply")
        client.wait_for_ready(timeout=60)
        yield vm, client
        client.stop_channels()
    print({name: round(at, 3) for name, at in vm.marks.items()})


def seen(client: BlockingKernelClient) -> dict[str, Any]:
    survey: dict[str, Any] = json.loads(run(client, SURVEY))
    survey["modules"] = json.loads(run(client, MODULES))
    survey["times"] = run(client, TIMES.format(now=time.time()))
    survey["written"] = run(client, WRITTEN)
    return survey


def test_a_warm_kernel_is_as_a_new_one() -> None:
    with bound(warm=False) as (_, client):
        cold = seen(client)
    with bound(warm=True) as (vm, client):
        warm = seen(client)
        assert "Traceback" not in vm.host.log.decode()
        client.execute("print('on')\nwhile True: pass")
        while client.get_iopub_msg(timeout=10)["msg_type"] != "stream":
            pass
        vm.host.request("status_request")
        status = vm.host.expect("status")
        assert status["busy"] is True
        assert 0 < status["memory_used"] < status["memory_limit"]
        assert 0 < status["cpu_seconds"] < status["uptime"]
        vm.host.request("signal", signum=signal.SIGINT)
        assert client.get_shell_msg(timeout=5)["content"]["ename"] == "KeyboardInterrupt"
    for more in ("modules", "loggers"):  # what the first answers would have imported is there
        assert set(cold.pop(more)) <= set(warm.pop(more))
    differing = {name for name in cold if cold[name] != warm[name]}
    assert {name: (cold[name], warm[name]) for name in differing} == {}
