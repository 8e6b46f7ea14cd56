"""Notebook files: bad input is one clear error, parameters are papermill's, writing is atomic."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import nbformat
import pytest

from cantelop_kernels.cli import notebook
from cantelop_kernels.cli.notebook import Output, inject, literal, load, parse_parameters
from cantelop_kernels.errors import BadRequest, NotebookError


def save(path: Path, *cells: Any, minor: int = 5, **metadata: Any) -> Path:
    nb = nbformat.v4.new_notebook(cells=list(cells), metadata=metadata)
    nb.nbformat_minor = minor
    if minor < 5:
        for cell in nb.cells:
            cell.pop("id", None)
    nbformat.write(nb, path)
    return path


def code(source: str, *tags: str) -> Any:
    return nbformat.v4.new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"not json", "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1, 2]", "not a valid notebook"),
        (b'"text"', "not a valid notebook"),
        (b"{}", "not a valid notebook"),
        (b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}}', "not a valid notebook"),
        (b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": 3}', "not a valid"),
        (b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [7]}', "not a valid"),
        (b'{"nbformat": 99, "nbformat_minor": 0, "metadata": {}, "cells": []}', "not a valid"),
    ],
)
def test_what_is_no_notebook_is_named(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "bad.ipynb"
    path.write_bytes(content)
    with pytest.raises(NotebookError, match=match) as caught:
        load(path)
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotebookError, match="No such file"):
        load(tmp_path / "missing.ipynb")
    with pytest.raises(NotebookError, match="Is a directory"):
        load(tmp_path)


def test_outputs_of_an_earlier_run_are_gone(tmp_path: Path) -> None:
    cell = code("1")
    cell.outputs = [nbformat.v4.new_output("stream", text="old")]
    cell.execution_count = 7
    nb = load(save(tmp_path / "n.ipynb", cell))
    assert nb.cells[0].outputs == [] and nb.cells[0].execution_count is None


def test_a_notebook_in_another_language_is_refused(tmp_path: Path) -> None:
    spec = {"name": "ir", "display_name": "R", "language": "R"}
    nb = load(save(tmp_path / "r.ipynb", kernelspec=spec))
    with pytest.raises(NotebookError, match="written in R"):
        notebook.require_python(nb, tmp_path / "r.ipynb")
    notebook.require_python(load(save(tmp_path / "plain.ipynb")), tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-5", -5),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ('{"a": null}', {"a": None}),
        ('"1"', "1"),
        ("[not json", "[not json"),
        ("text with blanks", "text with blanks"),
        ("", ""),
        ("1_000", "1_000"),
        ("2026-11-30", "2026-11-30"),
        ("١", "١"),
    ],
)
def test_values(text: str, value: object) -> None:
    parsed = notebook.parse_value(text)
    assert parsed == value and type(parsed) is type(value)


def test_literals_are_python_source() -> None:
    value = {"a": [1, 1e999, None, True, {"b": 'q"'}]}
    assert eval(literal(value)) == value
    assert math.isnan(eval(literal(notebook.parse_value(".nan"))))
    assert eval(literal(notebook.parse_value("-inf"))) == -math.inf


@pytest.mark.parametrize("name", ["1x", "a b", "class", "a=1;import os", ""])
def test_a_parameter_needs_a_variables_name(name: str) -> None:
    with pytest.raises(BadRequest, match="not a variable's name"):
        parse_parameters([[name, "1"]])


def sources(nb: Any) -> list[str]:
    return [cell.source for cell in nb.cells]


@pytest.mark.parametrize("minor", [4, 5])
def test_parameters_come_after_their_cell_and_replace_an_earlier_injection(
    tmp_path: Path, minor: int
) -> None:
    path = save(
        tmp_path / "n.ipynb", code("0"), code("x = 1", "parameters"), code("x"), minor=minor
    )
    nb = load(path)
    assert inject(nb, {"x": 5, "s": "a'b"})
    assert sources(nb) == ["0", "x = 1", '# Parameters\nx = 5\ns = "a\'b"', "x"]
    assert inject(nb, {"x": 6})
    assert sources(nb) == ["0", "x = 1", "# Parameters\nx = 6", "x"]
    assert nb.cells[2].metadata.tags == ["injected-parameters"]
    nbformat.validate(nb)


def test_without_the_tag_parameters_go_on_top(tmp_path: Path) -> None:
    nb = load(save(tmp_path / "n.ipynb", code("x")))
    assert not inject(nb, {"x": 5})
    assert sources(nb) == ["# Parameters\nx = 5", "x"]


def test_the_default_output_is_beside_the_source(tmp_path: Path) -> None:
    source = save(tmp_path / "n.ipynb")
    output = Output.of(None, source, inplace=False)
    assert output.path == tmp_path.resolve() / "n.out.ipynb"
    assert Output.of(None, source, inplace=True).path == source.resolve()
    assert not (tmp_path / "n.out.ipynb").exists()


def test_writing_replaces_whole_files_and_keeps_mode_and_link(tmp_path: Path) -> None:
    source = save(tmp_path / "n.ipynb", code("1"))
    target, link = tmp_path / "t.ipynb", tmp_path / "link.ipynb"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    Output.of(str(link), source, inplace=False).write(load(source))
    assert json.loads(target.read_text())["cells"][0]["source"] == ["1"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.ipynb", "n.ipynb", "t.ipynb"]


def test_a_new_file_gets_what_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        source = save(tmp_path / "n.ipynb")
        Output.of(None, source, inplace=False).write(load(source))
        assert stat.S_IMODE((tmp_path / "n.out.ipynb").stat().st_mode) == 0o640
    finally:
        os.umask(before)


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    source = save(tmp_path / "n.ipynb")
    Output.of(os.devnull, source, inplace=False).write(load(source))
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


@pytest.mark.parametrize("target", ["missing/out.ipynb", ".", "n.ipynb/out.ipynb"])
def test_an_output_that_cannot_be_is_refused_at_once(tmp_path: Path, target: str) -> None:
    source = save(tmp_path / "n.ipynb")
    with pytest.raises(NotebookError, match="cannot write"):
        Output.of(str(tmp_path / target), source, inplace=False)


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "n.ipynb")
    target = tmp_path / "t.ipynb"
    target.write_text("old")
    output = Output.of(str(target), source, inplace=False)
    nb = load(source)

    def full(fd: int, mode: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", full)
    with pytest.raises(NotebookError, match="No space left"):
        output.write(nb)
    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["n.ipynb", "t.ipynb"]
