"""`cantelop image`: what it prints, for people and for programs."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from cantelop_kernels.__main__ import main
from cantelop_kernels.cli.image import Steps
from cantelop_kernels.image import Image, ImageStore
from cantelop_kernels.image_model import PARTS, SCHEMA, sha256


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    """A published image of tiny files, in the state that `$CANTELOP_STATE` names."""
    monkeypatch.setenv("CANTELOP_STATE", str(tmp_path / "state"))
    folder = tmp_path / "parts"
    folder.mkdir()
    for part in PARTS:
        (folder / part).write_text(part)
    files = {
        part: {"size": (folder / part).stat().st_size, "sha256": sha256(folder / part)}
        for part in PARTS
    }
    facts = {"kernel": {"release": "6.12.1-amd64"}, "python": "3.13"}
    manifest = {"schema": SCHEMA, "files": files, **facts}
    return ImageStore(tmp_path / "state").publish("py", folder, manifest)


def test_ls_prints_a_table(image: Image, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["image", "ls"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "DIGEST", "SIZE", "KERNEL", "PYTHON", "IN", "USE"]
    assert line.split() == ["py", image.digest[:12], "0", "MiB", "6.12.1-amd64", "3.13", "no"]


def test_ls_prints_json(image: Image, capsys: pytest.CaptureFixture[str]) -> None:
    with ImageStore(image.path.parents[2]).hold(image):
        assert main(["image", "ls", "--json"]) == 0
    (view,) = json.loads(capsys.readouterr().out)
    assert (view["name"], view["digest"], view["in_use"]) == ("py", image.digest, True)


def test_ls_of_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CANTELOP_STATE", str(tmp_path / "none"))
    assert main(["image", "ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_rm(image: Image, capsys: pytest.CaptureFixture[str]) -> None:
    store = ImageStore(image.path.parents[2])
    with store.hold(image):
        assert main(["image", "rm", "py"]) == 1
    assert "in use by a sandbox" in capsys.readouterr().err
    assert main(["image", "rm", "py"]) == 0
    assert store.ls() == []
    assert main(["image", "rm", "py"]) == 1
    assert capsys.readouterr().err.splitlines()[0] == "cantelop: no image 'py'"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove anything")
def test_rm_without_permission(image: Image, capsys: pytest.CaptureFixture[str]) -> None:
    (image.path.parents[1] / "names").chmod(0o500)
    assert main(["image", "rm", "py"]) == 1
    assert "cannot remove image 'py'" in capsys.readouterr().err
    (image.path.parents[1] / "names").chmod(0o700)


def test_progress_in_a_log_is_a_line_per_step() -> None:
    out = io.StringIO()
    with Steps(Console(file=out, force_terminal=False)) as steps:
        steps.started("kernel")
        steps.line("Get:1 something")
        steps.finished("kernel", cached=False)
        steps.started("root")
        steps.finished("root", cached=True)
    assert out.getvalue().splitlines() == ["✓ kernel  0.0 s", "✓ root  cached"]


def test_progress_on_a_terminal_shows_the_last_line_made_harmless() -> None:
    out = io.StringIO()
    with Steps(Console(file=out, force_terminal=True, width=80)) as steps:
        steps.started("kernel")
        steps.line("Get:1 \x1b]0;title\x07something")
        steps._live.refresh()
        steps.finished("kernel", cached=False)
    assert "Get:1 something" in out.getvalue()
    assert "title" not in out.getvalue()
