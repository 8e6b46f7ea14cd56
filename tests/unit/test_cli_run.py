"""`run` and `exec` against a plain local kernel, and the command line around them.

What needs the real thing is in tests/vm/test_cli_vm.py; here a KernelManager of jupyter_client's
own stands in for ours.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager

from cantelop_kernels import __main__ as entry
from cantelop_kernels.cli import exec as exec_
from cantelop_kernels.cli import kernel, run
from cantelop_kernels.cli.supervisor import Supervisor
from cantelop_kernels.errors import (
    CantelopError,
    DaemonUnavailable,
    DeadlineExceeded,
    NotebookError,
    SandboxGone,
)
from cantelop_kernels.schema import Endpoints, Exit, SessionView

Spawn = Callable[..., subprocess.Popen[str]]

MANAGERS: list[AsyncKernelManager] = []


def local(args: argparse.Namespace) -> AsyncKernelManager:
    ip = f"{os.environ['JUPYTER_RUNTIME_DIR']}/{len(MANAGERS)}"
    km = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=ip)
    MANAGERS.append(km)
    return km


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    MANAGERS.clear()
    with tempfile.TemporaryDirectory(prefix="ck-") as runtime:  # short: it holds sockets
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", runtime)
        yield
        assert not any(km.has_kernel for km in MANAGERS)
        assert not list(Path(runtime).iterdir())


def parse(*argv: str) -> argparse.Namespace:
    args = entry.build_parser(argv).parse_args(list(argv))
    args.supervisor = Supervisor()
    return args


def save(path: Path, *cells: str) -> Path:
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Text")])
    nb.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(nb, path)
    return path


def outputs(path: Path) -> list[Any]:
    nb = nbformat.read(path, as_version=4)
    nbformat.validate(nb)
    return [cell.outputs for cell in nb.cells if cell.cell_type == "code"]


async def test_a_notebook_runs_and_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save(tmp_path / "n.ipynb", "x = 20", "", "print(x)\nx + 1")
    args = parse("run", str(source), "--show", "-p", "y", "1")
    assert await run.command(args, local) == 0
    found = outputs(tmp_path / "n.out.ipynb")
    assert found[3][0].text == "20\n" and found[3][1].data["text/plain"] == "21"
    shown = capsys.readouterr()
    assert shown.out == "20\n21\n"
    assert "[3/3] print(x)" in shown.err and "no cell is tagged `parameters`" in shown.err
    assert outputs(source) == [[], [], []]


async def test_a_failing_cell_ends_the_run_and_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save(tmp_path / "n.ipynb", "print('before')", "1 / 0", "print('after')")
    with pytest.raises(NotebookError, match="cell 2 of 3 failed: ZeroDivisionError"):
        await run.command(parse("run", str(source)), local)
    shown = capsys.readouterr().err
    assert "Traceback" in shown and f"wrote {tmp_path / 'n.out.ipynb'}" in shown
    found = outputs(tmp_path / "n.out.ipynb")
    assert found[0][0].text == "before\n" and found[1][0].ename == "ZeroDivisionError"
    assert found[2] == []


async def test_a_cell_that_may_fail_does_not_end_the_run(tmp_path: Path) -> None:
    source = save(tmp_path / "n.ipynb", "1 / 0", "print('after')")
    nb = nbformat.read(source, as_version=4)
    nb.cells[1].metadata.tags = ["raises-exception"]
    nbformat.write(nb, source)
    assert await run.command(parse("run", str(source)), local) == 0
    assert outputs(tmp_path / "n.out.ipynb")[1][0].text == "after\n"


async def test_a_cell_has_so_much_time_and_no_more(tmp_path: Path) -> None:
    source = save(tmp_path / "n.ipynb", "print('x', flush=True)\nimport time; time.sleep(60)")
    with pytest.raises(NotebookError, match=r"cell 1 of 1 did not end within 1\.5 s"):
        await run.command(parse("run", str(source), "--timeout", "1.5"), local)
    assert outputs(tmp_path / "n.out.ipynb")[0][0].text == "x\n"


async def test_a_kernel_that_dies_is_named_with_its_cell(tmp_path: Path) -> None:
    source = save(tmp_path / "n.ipynb", "1", "import os; os._exit(3)")
    with pytest.raises(SandboxGone, match="the kernel died in cell 2 of 2"):
        await run.command(parse("run", str(source)), local)
    before, died = outputs(tmp_path / "n.out.ipynb")
    assert before[0].data["text/plain"] == "1"
    assert died[-1].output_type == "error"  # the notebook itself says so as well
    assert "the kernel died in cell 2 of 2" in died[-1].evalue


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


async def test_a_cancelled_run_saves_what_there_is(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    endless = f"open({str(mark)!r}, 'w').close()\nwhile True: pass"
    source = save(tmp_path / "n.ipynb", "print(1)", endless)
    task = asyncio.ensure_future(run.command(parse("run", str(source)), local))
    await asyncio.to_thread(wait_for, mark)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert outputs(tmp_path / "n.out.ipynb")[0][0].text == "1\n"


async def test_a_launch_that_fails_saves_nothing(tmp_path: Path) -> None:
    def broken(args: argparse.Namespace) -> AsyncKernelManager:
        km = local(args)

        async def start_kernel(**kwargs: Any) -> None:
            raise CantelopError("no")

        km.start_kernel = start_kernel
        return km

    source = save(tmp_path / "n.ipynb", "1")
    with pytest.raises(CantelopError, match="no"):
        await run.command(parse("run", str(source)), broken)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["n.ipynb"]


async def execute(*argv: str) -> int:
    return await exec_.command(parse("exec", *argv), local)


async def test_exec_streams_and_shows_results(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); 6 * 7"
    assert await execute(code) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("out\n42\n", "err\n")


async def test_exec_of_a_failing_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert await execute("1 / 0") == 1
    shown = capsys.readouterr()
    assert "ZeroDivisionError" in shown.err and "\x1b" not in shown.err


async def test_exec_without_a_terminal_refuses_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert await execute("input('name?')") == 1
    assert "does not support input" in capsys.readouterr().err


async def test_exec_ends_when_its_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DeadlineExceeded, match="did not end within 1 s"):
        await execute("import time; time.sleep(60)", "--timeout", "1")
    assert "KeyboardInterrupt" in capsys.readouterr().err


async def test_exec_says_that_the_kernel_died() -> None:
    with pytest.raises(SandboxGone, match="the kernel died while it ran the code"):
        await execute("import os; os._exit(1)")


async def test_exec_loses_no_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert await execute("for n in range(20000): print(n)") == 0
    assert capsys.readouterr().out == "".join(f"{n}\n" for n in range(20000))


SCRIPT = """
import os, sys
from subprocess import DEVNULL
from jupyter_client.manager import AsyncKernelManager
from cantelop_kernels.cli import kernel
real = kernel.manager
import cantelop_kernels.cli.exec as e, cantelop_kernels.cli.run as r
class Quiet(AsyncKernelManager):  # what a local kernel says itself is not ours to test
    async def start_kernel(self, **kwargs):
        await super().start_kernel(stdout=DEVNULL, stderr=DEVNULL, **kwargs)
ip = os.environ["JUPYTER_RUNTIME_DIR"] + "/k"
local = lambda args: Quiet(kernel_name="python3", transport="ipc", ip=ip)
for command in (e.command, r.command):
    command.__defaults__ = (local,)
from cantelop_kernels.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    """The command line as a process of its own, on a local kernel."""
    path = tmp_path / "cantelop.py"
    path.write_text(SCRIPT)
    return [sys.executable, str(path)]


@pytest.fixture
def spawn(script: list[str]) -> Iterator[Spawn]:
    """Starts `cantelop ARGS…`; whatever the test does, it is over when the test is."""
    children: list[subprocess.Popen[str]] = []

    def start(*argv: str, **options: Any) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        children.append(subprocess.Popen([*script, *argv], text=True, **pipes))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()


def pipes(child: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert child.stdout is not None and child.stderr is not None
    return child.stdout, child.stderr


ENDLESS = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.1)"


def test_ctrl_c_interrupts_the_code_once(spawn: Spawn) -> None:
    child = spawn("exec", ENDLESS)
    out, err = pipes(child)
    assert out.readline() == "up\n"
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130
    assert "KeyboardInterrupt" in err.read()


def test_a_second_ctrl_c_ends_code_that_does_not_listen(spawn: Spawn) -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + ENDLESS
    child = spawn("exec", code)
    out, err = pipes(child)
    assert out.readline() == "up\n"
    child.send_signal(signal.SIGINT)
    assert "Ctrl-C again" in err.readline()
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130
    said = err.read()
    assert said == "cantelop: interrupted (SIGINT): the code was ended, and its sandbox destroyed\n"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted_says_so(spawn: Spawn, tmp_path: Path, signum: int) -> None:
    source = save(tmp_path / "n.ipynb", ENDLESS)
    child = spawn("run", str(source), "--show")
    out, err = pipes(child)
    assert out.readline() == "up\n"
    child.send_signal(signum)
    assert child.wait(30) == 128 + signum
    name = signal.Signals(signum).name
    assert err.read().splitlines()[-1] == (
        f"cantelop: interrupted ({name}): the notebook was ended, and its sandbox destroyed"
    )


def test_sigterm_ends_it_with_143(spawn: Spawn) -> None:
    child = spawn("exec", ENDLESS)
    out, err = pipes(child)
    assert out.readline() == "up\n"
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 143
    assert "interrupted (SIGTERM)" in err.read()


def test_a_reader_that_goes_away_ends_it_quietly(spawn: Spawn) -> None:
    child = spawn("exec", "while True: print('y' * 1000)")
    out, err = pipes(child)
    out.readline()
    out.close()
    assert child.wait(30) == 141
    assert err.read() == ""


def test_a_run_ends_when_nobody_reads_what_it_shows(spawn: Spawn, tmp_path: Path) -> None:
    """Also in the middle of a cell that would go on for ever."""
    source = save(tmp_path / "n.ipynb", "while True: print('y' * 1000, flush=True)")
    child = spawn("run", str(source), "--show")
    out, err = pipes(child)
    out.readline()
    out.close()
    assert child.wait(30) == 141
    assert f"wrote {tmp_path / 'n.out.ipynb'}" in err.read()


@pytest.mark.parametrize("code", ["print('y' * 200_000)", "for n in range(99_999): print(n)"])
def test_output_that_nobody_reads_to_its_end_is_an_error(script: list[str], code: str) -> None:
    """As in `cantelop exec ... | head -1`."""
    shell = 'set -o pipefail; "$@" | head -c 10'
    command = ["bash", "-c", shell, "bash", *script, "exec", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("where", [">&-", ">/dev/full"])
@pytest.mark.parametrize("command", ["exec 'print(1)'", "--help", "logs --help"])
def test_output_that_cannot_be_written_is_one_clear_line(
    script: list[str], where: str, command: str
) -> None:
    argv = ["bash", "-c", f'"$@" {command} {where}', "bash", *script]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    first, second = done.stderr.splitlines()
    assert done.returncode == 1 and first.startswith("cantelop: cannot write to stdout: ")
    assert second.startswith("  hint: ")


@pytest.mark.parametrize("where", ["2>&-", "<&-", "2>&- <&-"])
def test_other_streams_that_are_closed_change_nothing(script: list[str], where: str) -> None:
    argv = ["bash", "-c", f'"$@" exec "print(1)" {where}', "bash", *script]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_code_comes_from_stdin(script: list[str]) -> None:
    done = subprocess.run(
        [*script, "exec", "-"],
        check=False,
        input="print('é')",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "é\n")


def test_input_is_answered_from_the_terminal(spawn: Spawn) -> None:
    ours, theirs = pty.openpty()
    try:
        code = "import getpass; a = input('name? '); b = getpass.getpass('pass? '); print(a + b)"
        child = spawn("exec", code, stdin=theirs)
        fd = pipes(child)[0].fileno()
        assert read_until(fd, b"name? ")
        os.write(ours, b"ann\n")
        assert read_until(fd, b"pass? ")
        os.write(ours, b"secret\n")
        assert read_until(fd, b"annsecret\n")
        assert child.wait(30) == 0
        echoed = os.read(ours, 4096)
        assert b"ann" in echoed and b"secret" not in echoed
    finally:
        os.close(ours)
        os.close(theirs)


def read_until(fd: int, wanted: bytes) -> bool:
    got = b""
    while wanted not in got:
        chunk = os.read(fd, 4096)
        if not chunk:
            return False
        got += chunk
    return True


def cantelop(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cantelop_kernels", *argv],
        check=False,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_names_every_command_and_loads_none() -> None:
    done = cantelop("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in entry.COMMANDS)
    code = "import sys; from cantelop_kernels.__main__ import build_parser as b; b(['--help'])\n"
    loaded = "print([m for m in sys.modules if m.startswith(('jupyter', 'nb', 'rich'))])"
    told = subprocess.run(
        [sys.executable, "-c", code + loaded], check=True, capture_output=True, text=True
    )
    assert told.stdout == "[]\n"


@pytest.mark.parametrize(
    "argv",
    [[], ["nonsense"], ["run"], ["exec", "1", "--timeout", "0"], ["exec", "1", "--vcpus", "0"]],
)
def test_bad_usage_is_2(argv: list[str]) -> None:
    done = cantelop(*argv)
    assert done.returncode == 2
    assert "usage:" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("flag", ["--memory", "--vcpus", "--timeout"])
@pytest.mark.parametrize("value", ["x", "", "0", "-1", "1.5.2", "1e999", "²", "9" * 5000])
def test_a_number_that_is_none_is_told_what_it_must_be(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse("exec", "1", f"{flag}={value}")
    said = capsys.readouterr().err
    assert f"argument {flag}" in said and "must be a" in said and "such as" in said
    assert len(said) < 2000 and "positive" not in said


@pytest.mark.parametrize("argv", [["ps"], ["logs", "x"], ["kill", "x"], ["exec", "1"]])
def test_no_daemon_is_one_clear_line_for_who_cannot_start_one(
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    socket = str(tmp_path / "none.sock")
    monkeypatch.setenv("CANTELOP_SOCKET", socket)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert entry.main(argv) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"cantelop: no cantelop daemon answers on {socket}"
    assert lines[1].startswith("  hint: ") and len(lines) == 2
    assert entry.main(["--debug", *argv]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("CANTELOP_DEBUG", "1")
    assert entry.main(argv) == 1
    assert "Traceback" in capsys.readouterr().err


def test_bad_notebooks_end_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "bad.ipynb").write_text("no json")
    good = save(tmp_path / "good.ipynb", "1")
    for argv in (
        ["run", str(tmp_path / "missing.ipynb")],
        ["run", str(tmp_path)],
        ["run", str(tmp_path / "bad.ipynb")],
        ["run", str(good), "-o", str(tmp_path / "no" / "where.ipynb")],
        ["run", str(good), "-p", "not a name", "1"],
        ["run", str(good), "-o", "-", "--show"],
    ):
        done = cantelop(*argv, CANTELOP_SOCKET=str(tmp_path / "none.sock"))
        assert done.returncode == 1, argv
        assert len(done.stderr.splitlines()) == 2, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.ipynb", "good.ipynb"]


def test_the_provisioner_is_told_only_what_was_asked_for() -> None:
    args = parse("run", "n.ipynb")
    assert kernel.provisioner_config(args) == {"grace_seconds": 0.0, "last_words": False}
    args = parse("exec", "1", "--app", "a", "--image", "i", "--memory", "9", "--allow-emulation")
    assert kernel.provisioner_config(args) == {
        "app": "a",
        "image": "i",
        "memory_mib": 9,
        "allow_emulation": True,
        "grace_seconds": 0.0,
        "last_words": False,
    }
    spec = kernel.manager(args).kernel_spec
    assert spec is not None
    assert spec.metadata["kernel_provisioner"]["provisioner_name"] == "cantelop"


@pytest.mark.parametrize(("stopped", "said"), [(True, "was stopped"), (False, "is gone")])
async def test_a_daemon_that_was_stopped_is_not_one_that_crashed(
    monkeypatch: pytest.MonkeyPatch, stopped: bool, said: str
) -> None:
    async def gone(km: AsyncKernelManager) -> SessionView:
        raise DaemonUnavailable("nobody", stopped=stopped)

    monkeypatch.setattr(kernel, "_view", gone)
    error = await kernel.death(AsyncKernelManager(), "in cell 1 of 1")
    assert f"the daemon {said}" in error.message


async def test_notices_are_shown_as_they_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notices, shown = ["one"], asyncio.Event()
    monkeypatch.setattr(kernel, "_NOTICES", 0.01)

    async def found(km: AsyncKernelManager) -> SessionView:
        if len(notices) > 2:
            shown.set()
            raise DaemonUnavailable("nobody")  # is told elsewhere
        notices.append("two")
        return SessionView(
            "s", "default", 0, "i", "d", 1, 512, "running", "", 0.0, 0.0, Endpoints("t", "x"),
            "qemu", True, notices[:],
        )  # fmt: skip

    monkeypatch.setattr(kernel, "_view", found)
    async with kernel.telling(AsyncKernelManager()):
        await asyncio.wait_for(shown.wait(), 5)
    said = capsys.readouterr().err.splitlines()
    assert said == ["cantelop: one", "cantelop: two", "cantelop: two"]


async def test_a_death_by_memory_names_limit_and_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Exit("killed", signal=9, oom=True, memory_limit=400 << 20, memory_peak=399 << 20)
    view = SessionView(
        "s", "default", 0, "i", "d", 1, 512, "exited", "", 0.0, 0.0, Endpoints("t", "x"), "qemu",
        True, [], ended,
    )  # fmt: skip

    async def found(km: AsyncKernelManager) -> SessionView:
        return view

    monkeypatch.setattr(kernel, "_view", found)
    error = await kernel.death(AsyncKernelManager(), "in cell 3 of 4")
    assert error.message == (
        "the kernel died in cell 3 of 4: out of memory (limit 400 MiB, peak 399 MiB)"
    )
    assert error.details == {"limit": 400 << 20, "peak": 399 << 20}
