"""One kernel in a microVM, through every kind of message that a client may send."""

from __future__ import annotations

import re
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.fakes.blocking import PATIENCE, messages, on_control, run, wait_for

pytestmark = pytest.mark.vm


def test_rich_output(client: BlockingKernelClient) -> None:
    code = "import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()"
    shown = [m for m in messages(client, code) if m["msg_type"] == "display_data"]
    assert shown[0]["content"]["data"]["image/png"].startswith("iVBORw0KGgo")
    table = messages(client, "import pandas as pd; pd.DataFrame({'a': [1]})")
    result = next(m for m in table if m["msg_type"] == "execute_result")
    assert "<table" in result["content"]["data"]["text/html"]


def test_it_is_another_machine(client: BlockingKernelClient) -> None:
    boot_id = run(client, "print(open('/proc/sys/kernel/random/boot_id').read())")
    assert boot_id != Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_input(client: BlockingKernelClient) -> None:
    asked: list[str] = []

    def answer(message: dict[str, Any]) -> None:
        asked.append(message["content"]["prompt"])
        client.input("Ada")

    said = run(client, "print('hello', input('name? '))", allow_stdin=True, stdin_hook=answer)
    assert asked == ["name? "]
    assert said.endswith("hello Ada")


def test_input_can_be_interrupted(manager: KernelManager, client: BlockingKernelClient) -> None:
    client.execute("input('? ')", allow_stdin=True)
    client.get_stdin_msg(timeout=PATIENCE)
    manager.interrupt_kernel()
    assert client.get_shell_msg(timeout=PATIENCE)["content"]["ename"] == "KeyboardInterrupt"
    assert run(client, "print(1)") == "1"


def test_comm_with_binary_buffers_both_ways(client: BlockingKernelClient) -> None:
    blob = bytes(range(256)) * 400
    code = "import ipywidgets; w = ipywidgets.Image(value=bytes(range(256)) * 400)"
    opened = [m for m in messages(client, code) if m["msg_type"] == "comm_open"]
    image = next(m for m in opened if m["buffers"])
    assert bytes(image["buffers"][0]) == blob
    data = {"method": "update", "state": {}, "buffer_paths": [["value"]]}
    content = {"comm_id": image["content"]["comm_id"], "data": data}
    message = client.session.msg("comm_msg", content)
    client.session.send(client.shell_channel.socket, message, buffers=[blob[::-1]])
    assert run(client, "print(w.value == (bytes(range(256)) * 400)[::-1])") == "True"


def test_completion_inspection_and_history(client: BlockingKernelClient) -> None:
    run(client, "apple_pie = 'of apples'")
    content = client.complete("apple_", reply=True, timeout=PATIENCE)["content"]
    assert content["matches"] == ["apple_pie"]
    content = client.inspect("apple_pie", reply=True, timeout=PATIENCE)["content"]
    assert content["found"]
    assert "of apples" in content["data"]["text/plain"]
    history = client.history(hist_access_type="tail", n=1, reply=True, timeout=PATIENCE)
    assert history["content"]["history"][0][2] == "apple_pie = 'of apples'"


@pytest.mark.parametrize("code", ["import time; time.sleep(100)", "while True: pass"])
def test_interrupt(manager: KernelManager, client: BlockingKernelClient, code: str) -> None:
    request = client.execute(f"print('go', flush=True)\n{code}")
    wait_for(client, lambda m: m["msg_type"] == "stream")
    manager.interrupt_kernel()
    reply = client.get_shell_msg(timeout=PATIENCE)
    assert reply["parent_header"]["msg_id"] == request
    assert reply["content"]["ename"] == "KeyboardInterrupt"


def test_a_debugger_stops_at_a_breakpoint(client: BlockingKernelClient) -> None:
    def ask(command: str, **arguments: Any) -> dict[str, Any]:
        ask.seq += 1  # type: ignore[attr-defined]
        content = {"type": "request", "seq": ask.seq, "command": command, "arguments": arguments}  # type: ignore[attr-defined]
        answer = on_control(client, "debug_request", content)
        assert answer["success"], answer
        return answer.get("body") or {}

    ask.seq = 0  # type: ignore[attr-defined]
    names = {"clientID": "t", "clientName": "t", "adapterID": "", "pathFormat": "path"}
    ask("initialize", **names, linesStartAt1=True, columnsStartAt1=True)
    ask("attach")
    code = "x = 20\ny = x + 1\nz = y * 2\nprint(z)"
    path = ask("dumpCell", code=code)["sourcePath"]
    ask("setBreakpoints", breakpoints=[{"line": 3}], source={"path": path}, sourceModified=False)
    ask("configurationDone")
    client.execute(code)
    stopped = wait_for(client, lambda m: is_event(m, "stopped"))["content"]["body"]
    assert stopped["reason"] == "breakpoint"
    frame = ask("stackTrace", threadId=stopped["threadId"])["stackFrames"][0]
    assert frame["line"] == 3
    ask("continue", threadId=stopped["threadId"])
    printed = wait_for(client, lambda m: m["msg_type"] == "stream")
    assert printed["content"]["text"].strip() == "42"
    assert client.get_shell_msg(timeout=PATIENCE)["content"]["status"] == "ok"
    ask("disconnect", restart=False, terminateDebuggee=False)


def is_event(message: dict[str, Any], name: str) -> bool:
    return bool(message["msg_type"] == "debug_event" and message["content"]["event"] == name)


def test_subshells(client: BlockingKernelClient) -> None:
    made = on_control(client, "create_subshell_request", {})
    assert made["status"] == "ok"
    subshell = made["subshell_id"]
    assert subshell in on_control(client, "list_subshell_request", {})["subshell_id"]
    run(client, "import threading; gate = threading.Event()")
    busy = client.execute("print(gate.wait(60))")
    wait_for(client, lambda m: m["msg_type"] == "execute_input")
    request = client.session.msg("execute_request", execute_content("gate.set()"))
    request["header"]["subshell_id"] = subshell
    client.shell_channel.send(request)
    replies = [client.get_shell_msg(timeout=PATIENCE) for _ in range(2)]
    answered = {reply["parent_header"]["msg_id"] for reply in replies}
    assert answered == {busy, request["header"]["msg_id"]}
    printed = wait_for(client, lambda m: m["msg_type"] == "stream")
    assert printed["content"]["text"].strip() == "True"  # the gate was opened meanwhile
    deleted = on_control(client, "delete_subshell_request", {"subshell_id": subshell})
    assert deleted["status"] == "ok"


def execute_content(code: str) -> dict[str, Any]:
    asked = {"code": code, "silent": False, "store_history": False, "user_expressions": {}}
    return asked | {"allow_stdin": False, "stop_on_error": True}


def test_a_second_client_sees_the_same_kernel(
    manager: KernelManager, client: BlockingKernelClient
) -> None:
    run(client, "shared = 7")
    other = BlockingKernelClient()  # manager.client() would have the same ZMQ identity
    other.load_connection_file(manager.connection_file)
    other.start_channels()
    try:
        other.wait_for_ready(timeout=PATIENCE)
        assert run(other, "print(shared)") == "7"
    finally:
        other.stop_channels()
    assert run(client, "print(shared)") == "7"


@pytest.mark.parametrize("now", [False, True])
def test_restart(manager: KernelManager, client: BlockingKernelClient, now: bool) -> None:
    """Another machine answers at the same place, and the same client goes on with it."""
    boot_id = "print(open('/proc/sys/kernel/random/boot_id').read())"
    before = run(client, f"left = 1\n{boot_id}")
    assert re.fullmatch(r"[0-9a-f-]{36}", before)
    info = manager.get_connection_info()
    manager.restart_kernel(now=now)
    client.wait_for_ready(timeout=PATIENCE)
    assert run(client, boot_id) != before
    assert "NameError" in run(client, "left")
    assert manager.get_connection_info() == info
    with pytest.raises(Empty):
        client.get_control_msg(timeout=0.1)
