"""The product's agent, launcher and relays with a real ipykernel, as an ordinary process."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cantelop_kernels import wire
from tests.fakes.guest_process import Guest, in_guest, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jupyter_client.blocking.client import BlockingKernelClient

NAMES = ["In", "Out", "exit", "get_ipython", "json", "multiprocessing", "open", "os", "quit", "sys"]
"""What a first cell with these imports finds in its namespace."""

TOY_KERNEL = """
import json, sys, time, zmq
info = json.load(open(sys.argv[1]))
context = zmq.Context()
sockets = []
for name in ("shell", "iopub", "stdin", "control", "hb"):
    sock = context.socket(zmq.REP if name == "hb" else zmq.ROUTER)
    sock.bind(f"ipc://{info['ip']}-{info[name + '_port']}")
    sockets.append(sock)
print("toy", sys.argv[2:], info["key"], flush=True)
sockets[-1].send(sockets[-1].recv())
sys.exit(7)
"""


@pytest.fixture(params=["cold", "warm"])
def guest(request: pytest.FixtureRequest) -> Iterator[Guest]:
    """Whatever a kernel does, it does whether or not it has been warmed up."""
    with in_guest() as made:
        if request.param == "warm":
            made.warm_up()
        yield made


def collect(client: BlockingKernelClient, msg_id: str, each: Callable[[int], None]) -> str:
    """The stream text of one cell, read until it is idle; `each` is told the count so far."""
    texts: list[str] = []
    while True:
        message = client.get_iopub_msg(timeout=30)
        if message["parent_header"].get("msg_id") != msg_id:
            continue
        if message["msg_type"] == "stream":
            texts.append(message["content"]["text"])
            each(len(texts))
        if message["content"].get("execution_state") == "idle":
            return "".join(texts)


def test_hello_says_who_the_guest_is(guest: Guest) -> None:
    assert guest.hello["version"] == wire.VERSION
    assert guest.hello["vcpus"] == 1


def test_user_code_sees_an_ordinary_kernel(guest: Guest) -> None:
    client = guest.start(extra=["--IPKernelApp.quiet=True"], env={"GREETING": "hallo"})
    text, reply = run(
        client,
        """
import json, multiprocessing.process, os, sys
print(json.dumps({
    "argv": sys.argv, "orig": sys.orig_argv[1:3], "path0": sys.path[:4], "main": __name__,
    "names": sorted(k for k in globals() if not k.startswith("_")),
    "ours": [m for m in sys.modules if m.startswith("cantelop")],
    "env": {k: v for k, v in os.environ.items() if "CANTELOP" in k or k == "JPY_PARENT_PID"},
    "greeting": os.environ["GREETING"], "cwd": os.getcwd(),
    "forkdir": multiprocessing.process.ORIGINAL_DIR,
    "leader": os.getsid(0) == os.getpid(),
    "hist": get_ipython().history_manager.hist_file,
    "file": "__file__" in globals(),
    "isolated": sys.flags.isolated + sys.flags.no_site + sys.flags.safe_path,
}))""",
    )
    seen = json.loads(text)
    assert Path(seen["argv"][0]).name == "ipykernel_launcher.py"
    assert seen["argv"][1] == "-f"
    assert seen["orig"] == ["-m", "ipykernel_launcher"]
    assert not [entry for entry in seen["path0"] if entry.endswith("guest")]
    assert seen["main"] == "__main__"
    assert seen["names"] == NAMES
    assert seen["ours"] == []
    assert seen["env"] == {}
    assert seen["greeting"] == "hallo"
    assert seen["cwd"] == seen["forkdir"] == f"{guest.folder}/g/home"
    assert seen["leader"] and reply["execution_count"] == 1 and seen["hist"] == ":memory:"
    assert not seen["file"]
    assert seen["isolated"] == 0


def test_arguments_of_the_client_win(guest: Guest) -> None:
    client = guest.start(extra=[f"--HistoryManager.hist_file={guest.folder}/history"])
    code = "print(get_ipython().history_manager.hist_file)"
    assert run(client, code)[0] == f"{guest.folder}/history\n"


def test_a_variable_that_the_interpreter_reads_at_its_start_counts(guest: Guest) -> None:
    client = guest.start(env={"PYTHONHASHSEED": "0", "PYTHONOPTIMIZE": "1"})
    text, _ = run(client, "import sys; print(sys.flags.hash_randomization, sys.flags.optimize)")
    assert text == "0 1\n"


def test_the_folder_is_the_one_asked_for_or_home(guest: Guest) -> None:
    client = guest.start(cwd="/nowhere/at/all")
    assert run(client, "import os; print(os.getcwd())")[0] == f"{guest.folder}/g/home\n"


@pytest.mark.parametrize("code", ["import time; time.sleep(100)", "while True: pass"])
def test_interrupt(guest: Guest, code: str) -> None:
    client = guest.start()
    client.execute(f"print('on')\n{code}")
    while client.get_iopub_msg(timeout=10)["msg_type"] != "stream":
        pass
    began = time.monotonic()
    guest.host.request("signal", signum=signal.SIGINT)
    guest.host.expect("done")
    reply = client.get_shell_msg(timeout=5)["content"]
    assert reply["ename"] == "KeyboardInterrupt"
    assert time.monotonic() - began < 1


def test_input_and_a_second_client(guest: Guest) -> None:
    client = guest.start()
    client.execute("print(input('name? '))", allow_stdin=True)
    assert client.get_stdin_msg(timeout=10)["content"]["prompt"] == "name? "
    client.input("anna")
    assert client.get_shell_msg(timeout=10)["content"]["status"] == "ok"
    second = guest.client()
    second.wait_for_ready(timeout=10)
    assert run(second, "print(6 * 7)")[0] == "42\n"


def test_no_flushed_print_is_lost_to_a_slow_reader(guest: Guest) -> None:
    client = guest.start()
    msg_id = client.execute("for i in range(10_000): print(i, flush=True)")

    def dawdle(count: int) -> None:
        if count in (1, 4000):
            time.sleep(1.5)  # far more than the 1000 messages ZMQ would hold

    text = collect(client, msg_id, dawdle)
    assert text == "".join(f"{i}\n" for i in range(10_000))


def test_a_reader_that_vanishes_frees_the_kernel_and_an_interrupt_gets_through(
    guest: Guest,
) -> None:
    client = guest.start()
    stuck = guest.client()
    stuck.wait_for_ready(timeout=10)
    msg_id = client.execute("for i in range(20_000): print('y' * 1000, flush=True)")
    seen = 0
    with pytest.raises(Exception, match=r"^$"):  # queue.Empty: it waits for the other reader
        while True:
            client.get_iopub_msg(timeout=2)
            seen += 1
    assert 1000 < seen < 15_000
    guest.host.request("signal", signum=signal.SIGINT)
    guest.host.expect("done")
    stuck.stop_channels()
    collect(client, msg_id, lambda _: None)
    assert client.get_shell_msg(timeout=5)["content"]["ename"] == "KeyboardInterrupt"


def test_50_megabytes_in_one_message(guest: Guest) -> None:
    client = guest.start()
    text, _ = run(client, "print('x' * 50_000_000)", timeout=60)
    assert len(text) == 50_000_001


def test_shutdown_is_reported_and_its_last_words_arrive(guest: Guest) -> None:
    client = guest.start()
    run(
        client, "import os; os.write(2, b'raw to fd 2\\n'); import sys; sys.__stderr__.write('raw')"
    )
    client.shutdown()
    assert client.get_control_msg(timeout=10)["msg_type"] == "shutdown_reply"
    # at times ipykernel waits out its own flush timeout of 10 s: its control thread flushes a
    # stream whose publishing thread has ended already
    exited = guest.host.expect("exited", timeout=30)
    assert (exited["exit_code"], exited["signal"], exited["oom"]) == (0, None, False)
    with pytest.raises(OSError):
        guest.host.dial(2001).recv(1)
    assert b"raw to fd 2" in guest.host.log


def test_exit_code_and_signal_are_told_apart(guest: Guest) -> None:
    client = guest.start()
    cell = client.execute("import os; os._exit(3)")
    exited = guest.host.expect("exited", timeout=10)
    assert (exited["exit_code"], exited["cell"]) == (3, cell)


def test_kill_reaches_the_process_group_and_ends_the_relays(guest: Guest) -> None:
    client = guest.start()
    pid = int(run(client, "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)")[0])
    relay = guest.host.dial(2001)
    assert relay.recv(10)  # ZMQ's greeting
    guest.host.request("signal", signum=signal.SIGKILL)
    guest.host.expect("done")
    exited = guest.host.expect("exited", timeout=10)
    assert (exited["exit_code"], exited["signal"]) == (None, signal.SIGKILL)
    relay.settimeout(5)
    while relay.recv(1000):
        pass
    with pytest.raises(ProcessLookupError):
        _wait_gone(pid)
    guest.host.request("signal", signum=signal.SIGINT)
    assert "ended" in guest.host.expect("failed")["reason"]


def _wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        os.kill(pid, 0)
        time.sleep(0.02)


def test_a_relay_held_by_a_forked_child_ends_with_the_kernel(guest: Guest) -> None:
    client = guest.start()
    relay = guest.host.dial(2001)
    assert relay.recv(10)
    client.execute("import os, time\nif os.fork() == 0:\n    time.sleep(9)\nos._exit(1)")
    guest.host.expect("exited", timeout=10)
    relay.settimeout(4)
    while relay.recv(1000):
        pass


def test_a_kernel_with_its_own_argv(guest: Guest) -> None:
    script = guest.folder / "toy.py"
    script.write_text(TOY_KERNEL)
    connection_file = "/run/cantelop/kernel/connection.json"
    guest.host.bind(argv=["python", str(script), connection_file, "--more"])
    guest.host.expect("done")
    guest.host.expect("ready")
    client = guest.client()
    assert client.hb_channel.is_alive()
    assert guest.host.expect("exited", timeout=20)["exit_code"] == 7
    assert f"toy ['--more'] {guest.host.key}".encode() in guest.host.log


def test_a_kernel_that_cannot_start_says_why(guest: Guest) -> None:
    guest.host.bind(argv=["/no/such/kernel"])
    guest.host.expect("done")
    assert guest.host.expect("exited")["exit_code"] == 1
    assert b"/no/such/kernel" in guest.host.log


def test_only_one_kernel_per_guest(guest: Guest) -> None:
    guest.start()
    guest.host.bind()
    assert "already" in guest.host.expect("failed")["reason"]


def test_status_and_signals_before_the_start(guest: Guest) -> None:
    guest.host.request("signal", signum=signal.SIGINT)
    guest.host.expect("done")
    guest.host.request("status_request")
    assert guest.host.expect("status")["state"] == "waiting"
    client = guest.start()
    assert run(client, "print(1)")[0] == "1\n"
    guest.host.request("status_request")
    assert guest.host.expect("status")["state"] == "running"


def test_a_lost_host_ends_the_guest_and_its_kernel(guest: Guest) -> None:
    client = guest.start()
    pid = int(run(client, "import os; print(os.getpid())")[0])
    guest.host.close()
    assert guest.process.wait(timeout=10) == 0
    with pytest.raises(ProcessLookupError):
        _wait_gone(pid)


def test_poweroff_is_answered_first(guest: Guest) -> None:
    guest.host.request("poweroff")
    guest.host.expect("done")
    assert guest.process.wait(timeout=10) == 0
