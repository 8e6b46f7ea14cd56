"""What the command line shows: guests' text made harmless, errors, tables, outputs."""

from __future__ import annotations

import base64
import io
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cantelop_kernels.cli import logs, ps, report, terminal
from cantelop_kernels.cli.display import Display, image_bytes, image_size
from cantelop_kernels.errors import BadRequest, LaunchError, NotFound, SandboxGone
from cantelop_kernels.schema import Endpoints, Exit, Logs, SessionView

RED = "\x1b[31m"


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\r\n\b", "plain\ttext\r\n\b"),
        (f"{RED}red\x1b[0m", f"{RED}red\x1b[0m"),
        ("a\x1b]52;c;ZXZpbA==\x07b", "ab"),  # clipboard
        ("a\x1b]0;title\x1b\\b", "ab"),
        ("a\x1b[2J\x1b[1;1Hb", "ab"),
        ("a\x1bcb", "ab"),  # full reset
        ("a\x1b[6nb", "ab"),  # makes the terminal type an answer
        ("a\x1bP+q544e\x1b\\b", "ab"),
        ("a\x9b31mb", "a31mb"),  # C1
        ("a\x00\x07\x7fb", "ab"),
        ("cut\x1b", "cut"),
        ("cut\x1b[", "cut"),
        ("cut\x1b]52;c", "cut"),
    ],
)
def test_only_formatting_passes(text: str, shown: str) -> None:
    assert terminal.harmless(text, colours=True) == shown


@given(st.text(alphabet="\x1b\x9b\x9c]P[;m0152Hc\\\x07\n aé"))
def test_no_escape_but_colours_ever_passes(text: str) -> None:
    shown = terminal.harmless(text, colours=True)
    rest = terminal._ESCAPES.sub("", shown)
    assert "\x1b" not in rest and "\x9b" not in rest
    assert "\x1b" not in terminal.harmless(text, colours=False)
    halves = terminal.harmless(text[:3], colours=False) + terminal.harmless(text[3:], colours=False)
    assert "\x1b" not in halves


def test_a_file_gets_the_bytes_as_they_are() -> None:
    file, tty = io.StringIO(), Tty()
    terminal.write(file, "\x1b[2Jx")
    terminal.write(tty, "\x1b[2Jx")
    assert (file.getvalue(), tty.getvalue()) == ("\x1b[2Jx", "x")


def test_table_lines_up_and_leaves_no_blanks_at_the_end() -> None:
    assert terminal.table(["ID", "STATE"], [["a", "running"], ["long", ""]]) == (
        "ID    STATE\na     running\nlong"
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (59.9, "59s"), (60, "1m"), (7200, "2h"), (200000, "2d")]
)
def test_age(seconds: float, text: str) -> None:
    assert terminal.age(seconds) == text


def test_an_error_is_what_and_how_to_fix_it() -> None:
    error = NotFound("no App named 'x'\nreally", hint="Apps here: default")
    out = io.StringIO()
    assert report.exit_code(error, debug=False, stream=out) == 1
    assert out.getvalue() == ("cantelop: no App named 'x' really\n  hint: Apps here: default\n")


def test_a_failed_launch_says_where_and_what_the_guest_said() -> None:
    console = "\n".join(f"line {n}" for n in range(50)) + "\n\x1b[2Jpanic\x07\n"
    error = LaunchError("the guest did not boot", hint="rebuild it", step="boot", console=console)
    lines = report.describe(error).splitlines()
    assert lines[2] == "  step: boot"
    assert lines[-1] == "    panic"
    assert len(lines) == 4 + report.CONSOLE_LINES


def test_other_exceptions_show_a_traceback_only_when_asked() -> None:
    out = io.StringIO()
    assert report.exit_code(ValueError("odd\nthing"), debug=False, stream=out) == 70
    assert "unexpected error: ValueError: odd thing" in out.getvalue()
    assert "Traceback" not in out.getvalue()
    try:
        raise ValueError("odd")
    except ValueError as error:
        assert report.exit_code(error, debug=True, stream=out) == 70
    assert "Traceback" in out.getvalue()


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (report.Stopped(15), 143), (BrokenPipeError(), 141)],
)
def test_an_end_from_outside_says_nothing(error: BaseException, code: int) -> None:
    out = io.StringIO()
    assert report.exit_code(error, debug=False, stream=out) == code
    assert out.getvalue() == ""


def message(kind: str, **content: object) -> dict[str, object]:
    return {"header": {"msg_type": kind}, "content": content}


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 640, 480)


def test_outputs_as_text(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    display = Display(out, err, tmp_path / "new" / "folder")
    display.message(message("stream", name="stdout", text="half a line"))
    display.message(message("stream", name="stderr", text="warned\n"))
    display.message(message("execute_result", data={"text/plain": "42", "text/html": "<b>"}))
    png = {"image/png": base64.b64encode(PNG).decode(), "text/plain": "<Figure>"}
    display.message(message("display_data", data=png))
    display.message(message("display_data", data={"application/json": {}}))
    display.message(message("error", traceback=[f"{RED}Boom\x1b[0m", "line"]))
    display.message(message("status", execution_state="busy"))
    saved = tmp_path / "new" / "folder" / "image-1.png"
    assert out.getvalue() == (
        f"half a line\n42\n[image/png 640x480] saved as {saved}\n[application/json]\n"
    )
    assert err.getvalue() == "warned\nBoom\nline\n"
    assert saved.read_bytes() == PNG


def test_a_save_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match="cannot make the folder"):
        Display(io.StringIO(), io.StringIO(), tmp_path / "file" / "sub")


def test_image_payloads() -> None:
    assert image_bytes("image/svg+xml", ["<svg", "/>"]) == b"<svg/>"
    assert image_bytes("image/png", "no base64 é") == "no base64 é".encode()
    assert image_size("image/gif", b"GIF89a" + struct.pack("<HH", 3, 4)) == "3x4"
    assert image_size("image/jpeg", bytes(2049)) == "3 KiB"
    assert image_size("image/png", b"short") == "1 KiB"


def view(**changes: object) -> SessionView:
    values: dict[str, object] = {
        "id": "s1", "app": "default", "user": 0, "image": "python3", "digest": "d", "vcpus": 1,
        "memory_mib": 512, "state": "running", "step": "", "created": 1000.0, "boot_seconds": 5.0,
        "endpoints": Endpoints("t", "/x"), "vmm": "qemu", "emulated": True, "notices": [],
    }  # fmt: skip
    return SessionView(**(values | changes))  # type: ignore[arg-type]


def test_ps_table() -> None:
    starting = view(id="s2", user=4_000_000_000, state="starting", step="boot", emulated=False)
    oom = view(id="s3", state="exited", exit=Exit("oom", signal=9, oom=True))
    killed = view(id="s4", state="exited", exit=Exit("killed", signal=15))
    ended = view(id="s5", state="exited", exit=Exit("ended", exit_code=0), ended=1060.0)
    taken = view(id="s6", state="exited", exit=Exit("ended by\n\x1b[2Jits owner"), ended=1004.0)
    views = [view(), starting, oom, killed, ended, taken]
    lines = ps.render(views, now=1065.0).splitlines()
    assert lines[0].split() == ps.HEADERS
    assert " ".join(lines[1].split()) == "s1 default root python3 running - 1m - 512 MiB 1 cold yes"
    assert lines[2].split()[2:6] == ["4000000000", "python3", "starting", "boot"]
    assert "exited (out of memory)" in lines[3]
    assert "exited (signal 15)" in lines[4]
    assert "exited (0)" in lines[5] and " 5s ago " in lines[5]
    assert "exited (ended by its owner)" in lines[6] and " 1m ago " in lines[6]


def test_a_long_reason_is_cut_to_a_column() -> None:
    assert ps.shortened("a b") == "a b"
    assert len(ps.shortened("word " * 50)) == 40


def test_logs_are_text_only() -> None:
    texts = Logs(console="\x1b[31mboot\x1b[0m\n", kernel="\x07k\n", vmm="")
    assert logs.render(texts, ["console"]) == "boot"
    both = logs.render(texts, ["console", "kernel"]).splitlines()
    assert both[0].startswith("==> console") and both[1] == "boot" and both[3] == "k"
    assert logs.render(texts, []).count("==>") == 3


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("stream", {"name": "stdout"}),
        ("stream", 7),
        ("display_data", {"data": 5, "metadata": []}),
        ("execute_result", {}),
        ("error", {"traceback": [1, 2]}),
    ],
)
def test_a_forged_message_is_told_as_such(kind: str, content: object) -> None:
    """Code in the kernel can send what it likes; that is no fault of this program."""
    display = Display(io.StringIO(), io.StringIO())
    with pytest.raises(SandboxGone, match="not formed as Jupyter's are"):
        display.message({"header": {"msg_type": kind}, "content": content})
