"""The command line on real microVMs: notebooks, code, signals, and what is left afterwards."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import nbformat
import psutil
import pytest

from cantelop_kernels.bench import report
from cantelop_kernels.slot import uid_range
from tests.fakes.figures import results

pytestmark = pytest.mark.vm

REPO = Path(__file__).parents[2]
UID_BASE = 740_000
COMMAND = [sys.executable, "-m", "cantelop_kernels"]

Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A daemon of this module's own, on the image that `make image` has built."""
    folder = tmp_path_factory.mktemp("cli")
    config = folder / "cantelop.toml"
    config.write_text(f"uid_base = {UID_BASE}\n[apps.default]\nmemory_mib = 512\n")
    state = os.environ.get("CANTELOP_TEST_STATE") or str(REPO / ".cache" / "state")
    names = {
        "CANTELOP_STATE": state,
        "CANTELOP_SOCKET": str(folder / "d.sock"),
        "CANTELOP_CONFIG": str(config),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
    }
    env = {**os.environ, **names}
    read, write = os.pipe()
    with (folder / "daemon.log").open("w") as log, os.fdopen(read) as ready:
        serve = [*COMMAND, "serve", "--allow-emulation", "--ready-fd", str(write)]
        daemon = subprocess.Popen(serve, env=env, stdout=log, stderr=log, pass_fds=[write])
        os.close(write)
        try:
            assert ready.read() == "ready\n", (folder / "daemon.log").read_text()
            yield env
        finally:
            daemon.terminate()
            assert daemon.wait(60) == 0
    assert not list((Path(state) / "sandboxes").glob(f"cantelop-{UID_BASE}-*"))
    assert not list((folder / "runtime").glob("kernel-*"))


@pytest.fixture
def cantelop(
    environment: dict[str, str],
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs `cantelop ARGS…` to its end; afterwards no session is alive."""

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*COMMAND, *argv],
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert "Traceback (most recent call last):\n  File" not in done.stderr, done.stderr
        return done

    yield run
    assert live(environment) == []


@pytest.fixture
def spawn(environment: dict[str, str]) -> Iterator[Spawn]:
    """Starts `cantelop ARGS…`; it and its session are over when the test is."""
    children: list[subprocess.Popen[str]] = []

    def start(*argv: str, **options: Any) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        argv = (*argv, "--allow-emulation")
        children.append(subprocess.Popen([*COMMAND, *argv], env=environment, text=True, **pipes))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
    assert live(environment) == []


def live(environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [*COMMAND, "ps", "--json"], check=True, env=environment, capture_output=True, text=True
    )
    return [one["id"] for one in json.loads(done.stdout) if one["state"] != "exited"]


def pipes(child: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert child.stdout is not None and child.stderr is not None
    return child.stdout, child.stderr


def save(path: Path, *cells: str) -> Path:
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(nb, path)
    return path


def outputs(path: Path) -> list[Any]:
    nb = nbformat.read(path, as_version=4)
    nbformat.validate(nb)
    return [output for cell in nb.cells if cell.cell_type == "code" for output in cell.outputs]


Run = Callable[..., subprocess.CompletedProcess[str]]


def test_the_quickstart_has_its_picture_and_its_tables(cantelop: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.ipynb"
    argv = [
        "run",
        str(REPO / "notebooks/quickstart.ipynb"),
        "-o",
        str(out),
        "-p",
        "counties",
        "300",
    ]
    done = cantelop(*argv, "--show", "--allow-emulation")
    assert done.returncode == 0, done.stderr
    kinds = {kind for one in outputs(out) for kind in one.get("data", {})}
    assert {"image/png", "text/html"} <= kinds
    assert "[image/png" in done.stdout and "Debian" in done.stdout
    assert "no security boundary" in done.stderr and "microVM ready" in done.stderr


def test_the_boundary_from_within(cantelop: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.ipynb"
    notebook = str(REPO / "notebooks/inside-the-sandbox.ipynb")
    done = cantelop("run", notebook, "-o", str(out), "--show", "--allow-emulation")
    assert done.returncode == 0, done.stderr
    assert os.uname().release not in done.stdout and "interfaces: ['lo']" in done.stdout


def test_the_figures_of_a_bench_are_shown_in_a_sandbox(cantelop: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.ipynb"
    notebook = str(REPO / "notebooks/benchmarks.ipynb")
    figures = ("-p", "bench", report.as_json(results()))
    done = cantelop("run", notebook, "-o", str(out), *figures, "--allow-emulation")
    assert done.returncode == 0, done.stderr
    shown = [one for one in outputs(out) if "data" in one]
    assert ["image/png" in one["data"] for one in shown] == [False, True, True]
    assert "iopub, 50 MB" in shown[0]["data"]["text/html"]


def test_a_failing_cell_and_what_ran_before_it(cantelop: Run, tmp_path: Path) -> None:
    source = save(tmp_path / "n.ipynb", "print('before')", "1 / 0", "print('after')")
    done = cantelop("run", str(source), "--allow-emulation")
    assert done.returncode == 1
    assert "cantelop: cell 2 of 3 failed: ZeroDivisionError: division by zero" in done.stderr
    assert "Traceback (most recent call last)" in done.stderr
    kinds = [one.output_type for one in outputs(tmp_path / "n.out.ipynb")]
    assert kinds == ["stream", "error"]


def test_a_memory_hungry_cell_is_named_with_limit_and_peak(cantelop: Run, tmp_path: Path) -> None:
    hungry = "y = []\nwhile True: y.append(bytes(b'x') * (1 << 24))"
    source = save(tmp_path / "n.ipynb", "print('before')", hungry)
    done = cantelop("run", str(source), "--allow-emulation")
    assert done.returncode == 1
    assert "the kernel died in cell 2 of 2: out of memory (limit" in done.stderr
    assert "peak" in done.stderr and "--memory" in done.stderr
    assert outputs(tmp_path / "n.out.ipynb")[0].text == "before\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--app", "nobody-knows"], "no App named 'nobody-knows'"),
        (["--image", "nobody-knows"], "no image 'nobody-knows'"),
        (["--memory", "999999"], "memory"),
    ],
)
def test_what_is_unknown_or_too_much_is_told_at_once(
    cantelop: Run, tmp_path: Path, argv: list[str], said: str
) -> None:
    source = save(tmp_path / "n.ipynb", "1")
    began = time.monotonic()
    done = cantelop("run", str(source), *argv, "--allow-emulation")
    assert done.returncode == 1 and time.monotonic() - began < 20
    first, *rest = (line for line in done.stderr.splitlines() if line)
    assert said in first, done.stderr
    assert rest and rest[0].startswith("  hint: ")
    assert not (tmp_path / "n.out.ipynb").exists()


def test_code_is_seen_killed_and_missed(spawn: Spawn, environment: dict[str, str]) -> None:
    child = spawn("exec", "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.1)")
    out, err = pipes(child)
    assert out.readline() == "up\n"
    [session] = live(environment)

    def ask(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *argv]
        return subprocess.run(command, check=False, env=environment, capture_output=True, text=True)

    assert session in ask("ps").stdout
    logs = ask("logs", session)
    assert logs.returncode == 0 and "==> console" in logs.stdout
    assert ask("kill", session).stdout == f"{session}\n"
    assert child.wait(15) == 1
    assert "the kernel died while it ran the code" in err.read()
    unknown = ask("kill", "s-unknown")
    assert unknown.returncode == 1 and "no session s-unknown" in unknown.stderr


def test_a_guest_that_powers_itself_off(
    cantelop: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Also: an import that asks the CPU for its caches has nothing to complain of."""
    off = f"sudo python3 -c 'import ctypes; ctypes.CDLL(None).reboot({0x4321FEDC})'"
    code = f"import numpy, os\nprint('up', flush=True)\nos.system({off!r})"
    done = cantelop("exec", code, "--allow-emulation")
    assert done.returncode == 1 and done.stdout == "up\n"
    assert "the guest powered off, rebooted or panicked" in done.stderr
    assert "OpenBLAS" not in done.stderr


def test_a_vsock_helper_that_dies(spawn: Spawn) -> None:
    child = spawn("exec", "import time\nprint('up', flush=True)\ntime.sleep(100)")
    out, err = pipes(child)
    assert out.readline() == "up\n"
    uids = uid_range(UID_BASE)
    (helper,) = [
        one
        for one in psutil.process_iter(["name", "uids"])
        if one.info["name"].startswith("vhost-device") and one.info["uids"].real in uids
    ]
    helper.kill()
    assert child.wait(10) == 1
    assert "the vsock helper ended (signal 9)" in err.read()


def test_ctrl_c_interrupts_and_the_traceback_is_shown(spawn: Spawn) -> None:
    # not one long sleep: a signal that comes just before Python enters it goes unseen until its end
    child = spawn("exec", "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.1)")
    out, err = pipes(child)
    assert out.readline() == "up\n"
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 130
    assert "KeyboardInterrupt" in err.read()


def test_sigterm_saves_the_notebook_and_leaves_nothing(spawn: Spawn, tmp_path: Path) -> None:
    source = save(tmp_path / "n.ipynb", "print(1)", "print('up', flush=True)\nwhile True: pass")
    child = spawn("run", str(source), "--show")
    out, _ = pipes(child)
    assert [out.readline(), out.readline()] == ["1\n", "up\n"]
    child.terminate()
    assert child.wait(20) == 143
    assert [one.text for one in outputs(tmp_path / "n.out.ipynb")] == ["1\n", "up\n"]


def test_input_is_answered_from_the_terminal(spawn: Spawn) -> None:
    ours, theirs = pty.openpty()
    try:
        child = spawn("exec", "print('hello', input('name? '))", stdin=theirs)
        os.write(ours, b"ann\n")
        out, err = pipes(child)
        assert child.wait(60) == 0, err.read()
        assert out.read() == "name? hello ann\n"
    finally:
        os.close(ours)
        os.close(theirs)
