"""What of a host's launch reaches a guest, and what people are told: pure functions."""

from __future__ import annotations

import sys

import pytest

from cantelop_kernels import config, errors, wire
from cantelop_kernels.schema import Exit
from cantelop_provisioner import adopt, command, report

USUAL = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]


@pytest.mark.parametrize(
    "start",
    [
        ["python3"],
        ["python"],
        ["python3.13"],
        ["/usr/bin/python3"],
        [sys.executable],
        [sys.executable, "-Xfrozen_modules=off"],
    ],
)
def test_the_usual_command_is_the_images_own_kernel(start: list[str]) -> None:
    made = command.guest_command([*start, *USUAL], ["--a=b"], {})
    assert command.split_command(made) == (None, ["--a=b"])


def test_arguments_of_the_kernelspec_come_before_those_of_the_launch() -> None:
    made = command.guest_command(["python3", *USUAL, "--matplotlib=agg"], ["--a=b"], {})
    assert command.split_command(made) == (None, ["--matplotlib=agg", "--a=b"])


@pytest.mark.parametrize(
    "argv",
    [
        ["python3", "-m", "my_kernel", "-f", "{connection_file}"],
        ["bash", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        ["python3", "-X", "dev", *USUAL],
    ],
)
def test_another_command_is_started_as_given(argv: list[str]) -> None:
    made = command.guest_command(argv, ["--x"], {})
    wanted = [part.replace("{connection_file}", command.CONNECTION_FILE) for part in argv]
    assert command.split_command(made) == ([*wanted, "--x"], [])


def test_placeholders() -> None:
    argv = ["{prefix}/bin/kernel", "--at={connection_file}", "{other}", "{unknown}"]
    made = command.guest_command(argv, [], {"other": "value"})
    at = f"--at={command.CONNECTION_FILE}"
    assert made == ["/usr/bin/kernel", at, "value", "{unknown}"]


def test_this_hosts_python_is_the_guests() -> None:
    assert command.guest_command([sys.executable, "-c", "1"], [], {}) == ["python3", "-c", "1"]


def test_a_folder_of_this_host_is_refused() -> None:
    with pytest.raises(errors.BadRequest, match="resource_dir"):
        command.guest_command(["python3", "{resource_dir}/kernel.py"], [], {})


def test_only_named_variables_pass() -> None:
    env = {"LANG": "C", "AWS_SECRET": "x", "MINE": "1", "SPEC": "2", "JPY_SESSION_NAME": "n"}
    passed = command.guest_env(env, ["LANG", "MINE"], {"SPEC": "2"})
    assert passed == {"LANG": "C", "MINE": "1", "SPEC": "2", "JPY_SESSION_NAME": "n"}


@pytest.mark.parametrize(
    "name",
    [
        "JPY_PARENT_PID",
        "JPY_API_TOKEN",
        "JUPYTER_TOKEN",
        "JUPYTERHUB_API_TOKEN",
        "KG_AUTH_TOKEN",
        "EG_AUTH_TOKEN",
        "JUPYTERHUB_CRYPT_KEY",
    ],
)
def test_what_is_the_servers_own_never_passes(name: str) -> None:
    assert command.guest_env({name: "x"}, [name], {name: "x"}) == {}


@pytest.mark.parametrize(
    ("cwd", "inside"),
    [
        (None, None),
        ("", None),
        ("/home/me/work", None),
        ("/workspace", "/workspace"),
        ("/workspace/a/b", "/workspace/a/b"),
        ("/workspace/../etc", None),
        ("/workspaces", None),
        ("workspace", None),
    ],
)
def test_only_folders_below_workspace_pass(cwd: str | None, inside: str | None) -> None:
    assert command.guest_folder(cwd) == inside


def test_what_may_not_be_imported_is_the_same_there() -> None:
    assert command.DEFAULT_ENV == config.DEFAULT_ENV
    assert adopt.CHANNELS == wire.CHANNELS


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (None, 1),
        (Exit("x", exit_code=0), 0),
        (Exit("x", exit_code=3), 3),
        (Exit("x", signal=9), -9),
        (Exit("x"), 1),
    ],
)
def test_exit_codes_are_those_of_subprocess(ended: Exit | None, code: int) -> None:
    assert report.exit_code(ended) == code


def test_death_for_want_of_memory_names_limit_and_peak() -> None:
    ended = Exit(
        "killed by signal 9", signal=9, oom=True, memory_limit=1 << 29, memory_peak=1 << 28
    )
    text = report.death(ended)
    assert "out of memory" in text
    assert "limit 512 MiB" in text
    assert "peak 256 MiB" in text


def test_a_launch_error_shows_the_consoles_end() -> None:
    console = "\n".join(f"line {n}" for n in range(50))
    error = errors.LaunchError("no hello", hint="try this", step="hello", console=console)
    made = report.launch_failure(error)
    assert str(made).startswith("no hello (try this)\n")
    assert "line 49" in str(made)
    assert "line 3\n" not in str(made)
    assert made.details["step"] == "hello"


def test_other_errors_stay_what_they_are() -> None:
    error = errors.ImageError("no image", hint="build it")
    assert report.launch_failure(error) is error
