"""A kernel that was exercised before it was asked for is bound late, and does not show it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.guest_process import Guest, in_guest, run
from tests.fakes.introspection import IDENTITY, MODULES, SURVEY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jupyter_client.blocking.client import BlockingKernelClient

OUR_CHOICE = "--HistoryManager.hist_file=:memory:"
ENV = {"GREETING": "hallo", "TZ": "Asia/Tokyo", "JPY_SESSION_NAME": "a.ipynb", "TERM": "dumb"}


@pytest.fixture
def guest() -> Iterator[Guest]:
    with in_guest() as made:
        yield made


def survey(guest: Guest, *, warm: bool, **fields: Any) -> dict[str, Any]:
    """What a first cell sees, and the modules a second one does."""
    guest.host.scheme = fields.get("signature_scheme", guest.host.scheme)
    if warm:
        guest.warm_up()
    client = guest.start(**fields)
    text, reply = run(client, SURVEY)
    assert (reply["status"], reply["execution_count"]) == ("ok", 1), reply
    seen: dict[str, Any] = json.loads(text)
    seen["modules"] = json.loads(run(client, MODULES)[0])
    # an argument that says what is so anyway: one of them is of a class of its own
    seen["config"] = seen["config"].replace("DeferredConfigString(':memory:')", "':memory:'")
    seen["log"] = guest.host.log.decode().replace(str(guest.folder), "")
    return seen


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"env": ENV, "cwd": "/usr", "signature_scheme": "hmac-sha512"},
        {"env": {"MPLBACKEND": "agg", "TMPDIR": "."}, "extra": [OUR_CHOICE]},
    ],
)
def test_nothing_of_the_exercise_shows(fields: dict[str, Any]) -> None:
    with in_guest() as guest:
        cold = survey(guest, warm=False, **fields)
    with in_guest() as guest:
        warm = survey(guest, warm=True, **fields)
    for more in ("modules", "loggers"):  # what the first answers would have imported is there
        assert set(cold.pop(more)) <= set(warm.pop(more))
    differing = {name for name in cold if cold[name] != warm[name]}
    assert {name: (cold[name], warm[name]) for name in differing} == {}
    assert warm["ours"] == []


def test_two_warm_kernels_have_nothing_in_common() -> None:
    seen = []
    for _ in range(2):
        with in_guest() as guest:
            guest.warm_up()
            seen.append(json.loads(run(guest.start(), IDENTITY)[0]))
    assert not set(seen[0].values()) & set(seen[1].values())


def test_a_bind_during_the_warm_up(guest: Guest) -> None:
    """The exercise is given up; nothing of it is left, and the host hears nothing of it."""
    guest.host.request("warm_up")
    guest.host.expect("done")
    time.sleep(0.4)  # into its midst, or so: any moment has to do
    client = guest.start(extra=[OUR_CHOICE])
    text, reply = run(client, SURVEY)
    seen = json.loads(text)
    assert reply["execution_count"] == 1 and seen["children"] == []
    assert not [path for path, _ in seen["run"] if "exercise" in path]
    assert [message["type"] for message in guest.host.messages if message["type"] == "warm"] == []


def test_a_bind_at_any_moment_of_the_warm_up() -> None:
    for delay in (0.0, 0.2, 0.6, 0.8, 1.0):
        with in_guest() as guest:
            guest.host.request("warm_up")
            time.sleep(delay)
            assert run(guest.start(), "print(6 * 7)")[0] == "42\n"


def test_a_command_of_ones_own_after_the_warm_up(guest: Guest) -> None:
    guest.warm_up()
    guest.host.bind(argv=["sh", "-c", "ls -A $HOME/../kernel; echo; sleep 1; exit 7"])
    guest.host.expect("done")
    assert guest.host.expect("exited")["exit_code"] == 7
    assert guest.host.log.decode().splitlines()[-2:] == ["connection.json", ""]


@pytest.mark.parametrize(
    "fields",
    [
        {"extra": ["--IPKernelApp.quiet=False"]},
        {"env": {"PYTHONHASHSEED": "0"}},
        {"env": {"HOME": "/var/tmp"}},
    ],
)
def test_what_a_kernel_reads_when_it_starts_makes_a_new_one(
    guest: Guest, fields: dict[str, Any]
) -> None:
    guest.warm_up()
    client = guest.start(**fields)
    code = """
import os, sys
print(get_ipython().kernel.parent.quiet, sys.flags.hash_randomization,
      get_ipython().ipython_dir.startswith("/var/tmp"), os.environ["HOME"] == "/var/tmp")"""
    seen = run(client, code)[0].split()
    home = str("HOME" in fields.get("env", {}))
    quiet = str("extra" not in fields)
    seed = "0" if "PYTHONHASHSEED" in fields.get("env", {}) else "1"
    assert seen == [quiet, seed, home, home]


def test_a_key_that_it_was_not_bound_with_is_refused(guest: Guest) -> None:
    guest.warm_up()
    path = guest.folder / "g" / "kernel" / "connection.json"
    old = json.loads(path.read_text())["key"]
    client = guest.start()
    assert json.loads(path.read_text())["key"] == guest.host.key != old
    stranger = guest.client()
    stranger.session.key = old.encode()
    stranger.execute("print('broken in')")
    client.execute("print('mine')")
    said = set()
    for _ in range(20):
        try:
            said.add(client.get_iopub_msg(timeout=1)["content"].get("text"))
        except Exception:  # noqa: BLE001 - queue.Empty: all has been said
            break
    assert "mine\n" in said and "broken in\n" not in said


def status(guest: Guest) -> dict[str, Any]:
    guest.host.request("status_request")
    return guest.host.expect("status")


def until(guest: Guest, *, busy: bool) -> dict[str, Any]:
    """Wait for a state that the kernel's messages come a moment before."""
    deadline = time.monotonic() + 5
    while (seen := status(guest))["busy"] is not busy:
        assert time.monotonic() < deadline, seen
        time.sleep(0.01)
    return seen


@pytest.mark.parametrize("warm", [False, True])
def test_busy_and_idle(guest: Guest, warm: bool) -> None:
    if warm:
        guest.warm_up()
    before = status(guest)
    assert (before["state"], before["busy"], before["idle_seconds"]) == ("waiting", False, 0)
    client = guest.start()
    fresh = status(guest)
    assert fresh["busy"] is False and 0 < fresh["idle_seconds"] < 30
    cell = client.execute("print('on')\ninput()", allow_stdin=True)
    client.get_stdin_msg(timeout=10)
    seen = until(guest, busy=True)
    assert (seen["idle_seconds"], seen["cell"]) == (0, cell)
    client.kernel_info()
    assert status(guest)["busy"] is True
    client.input("")
    assert until(guest, busy=False)["cell"] == ""
    time.sleep(0.3)
    client.kernel_info()  # is nothing that a user runs
    run(client, "1/0")
    run(client, "import os\nif os.fork() == 0: os._exit(0)\nos.wait();")
    time.sleep(0.3)
    idle = until(guest, busy=False)
    assert 0.3 <= idle["idle_seconds"] < 5


def test_busy_where_two_cells_run_side_by_side(guest: Guest) -> None:
    guest.warm_up()
    client = guest.start()
    subshell = control(client, "create_subshell_request", {})["subshell_id"]
    code = "import time\nwhile not globals().get('{}'): time.sleep(0.01)"
    execute(client, code.format("first"), subshell)
    run(client, "1")
    assert until(guest, busy=True)["idle_seconds"] == 0
    client.execute("first = True")
    until(guest, busy=False)
    control(client, "delete_subshell_request", {"subshell_id": subshell})


def execute(client: BlockingKernelClient, code: str, subshell: str) -> None:
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}}
    content |= {"allow_stdin": False, "stop_on_error": True}
    message = client.session.msg("execute_request", content)
    message["header"]["subshell_id"] = subshell
    client.shell_channel.send(message)


def control(client: BlockingKernelClient, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    message = client.session.msg(kind, content)
    client.control_channel.send(message)
    while True:
        reply = client.get_control_msg(timeout=10)
        if reply["parent_header"]["msg_id"] == message["header"]["msg_id"]:
            answer: dict[str, Any] = reply["content"]
            assert answer.get("status", "ok") == "ok", answer
            return answer


def test_busy_is_not_known_of_a_command_of_ones_own(guest: Guest) -> None:
    guest.host.bind(argv=["sleep", "60"])
    guest.host.expect("done")
    seen = status(guest)
    assert seen["busy"] is None and seen["idle_seconds"] >= 0


def test_what_a_user_tells_the_agent_does_no_harm(guest: Guest) -> None:
    guest.warm_up()
    client = guest.start()
    run(client, "import os\nfor word in (b'W', b'R', b'x', b'R'): os.write(3, word)")
    until(guest, busy=False)
    run(client, "os.close(3)")
    assert run(client, "print(1)")[0] == "1\n"
    assert status(guest)["busy"] is None


def test_a_warm_kernel_that_dies_is_reported_once(guest: Guest) -> None:
    guest.warm_up()
    guest.host.request("signal", signum=signal.SIGKILL)
    guest.host.expect("done")
    assert guest.host.expect("exited")["signal"] == signal.SIGKILL
    guest.host.bind()
    assert "ended" in guest.host.expect("failed")["reason"]
    assert status(guest)["state"] == "exited"


def test_one_warm_up_is_enough(guest: Guest) -> None:
    guest.warm_up()
    guest.host.request("warm_up")
    assert "already" in guest.host.expect("failed")["reason"]
    guest.start()
    guest.host.request("warm_up")
    assert "already" in guest.host.expect("failed")["reason"]


def test_the_debugger_stops_in_a_cell(guest: Guest) -> None:
    guest.warm_up()
    client = guest.start()
    debug = Debugger(client)
    debug.ask("initialize", clientID="test", adapterID="x", pathFormat="path")
    debug.ask("attach", justMyCode=True)
    code = "def f(n):\n    m = n + 1\n    return m\nprint(f(41))"
    path = debug.ask("dumpCell", code=code)["sourcePath"]
    stops = debug.ask("setBreakpoints", source={"path": path}, breakpoints=[{"line": 3}])
    assert stops["breakpoints"][0]["verified"]
    debug.ask("configurationDone")
    client.execute(code)
    while (event := client.get_iopub_msg(timeout=20))["content"].get("event") != "stopped":
        pass
    thread = event["content"]["body"]["threadId"]
    frames = debug.ask("stackTrace", threadId=thread)["stackFrames"]
    assert [frame["name"] for frame in frames[:2]] == ["f", "<module>"]
    debug.ask("continue", threadId=thread)
    assert client.get_shell_msg(timeout=20)["content"]["status"] == "ok"
    debug.ask("disconnect")


class Debugger:
    """Requests of the debug adapter protocol over a kernel's control channel."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self._client = client
        self._seq = 0

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self._seq += 1
        content = {"type": "request", "seq": self._seq, "command": command}
        answer = control(self._client, "debug_request", content | {"arguments": arguments})
        assert answer.get("success", True), answer
        body: dict[str, Any] = answer.get("body") or {}
        return body


def test_an_abandoned_exercise_leaves_no_process(guest: Guest) -> None:
    guest.host.request("warm_up")
    eventually(lambda: any("exercise" in folder for folder in folders(guest)))
    guest.process.kill()
    guest.process.wait()
    eventually(lambda: folders(guest) == [])


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def folders(guest: Guest) -> list[str]:
    """Those of this guest in which processes work."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append(str((process / "cwd").readlink()))
    return [folder for folder in found if folder.startswith(str(guest.folder))]


@pytest.mark.parametrize("warm", [False, True])
def test_a_kernel_that_cannot_be_what_is_asked_for_ends(guest: Guest, warm: bool) -> None:
    if warm:
        guest.warm_up()
    guest.host.bind(signature_scheme="hmac-nonsense")
    assert guest.host.expect("exited")["exit_code"] == 1
    assert b"nonsense" in guest.host.log


def test_an_exercise_that_fails_is_told_and_does_no_harm(guest: Guest) -> None:
    guest.host.request("warm_up")
    eventually(lambda: any("exercise" in folder for folder in folders(guest)))
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str((process / "cwd").readlink()).endswith("/exercise"):
                os.kill(int(process.name), signal.SIGKILL)
    guest.host.expect("warm")
    assert run(guest.start(), "print(1)")[0] == "1\n"
