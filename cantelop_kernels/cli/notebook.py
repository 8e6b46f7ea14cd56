"""Notebook files: read and checked before anything is started, written whole or not at all.

Used by `run`. Pure where it can be: parameters are parsed and injected without touching a file.
"""

from __future__ import annotations

import json
import keyword
import math
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from cantelop_kernels.cli import terminal
from cantelop_kernels.errors import BadRequest, NotebookError

_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None, "none": None, "~": None}
_NON_FINITE = re.compile(r"[-+]?\.?(inf|nan)", re.IGNORECASE)


def load(path: Path) -> Any:
    """The notebook in the file, with the outputs of its code cells removed.

    Raises NotebookError for a file that is missing, no JSON, or no valid notebook.
    """
    try:
        text = path.read_text(encoding="utf-8")
        notebook = nbformat.reads(text, as_version=4)
    except OSError as error:
        raise NotebookError(
            f"cannot read {path}: {error.strerror}", hint="name a notebook file (.ipynb)"
        ) from error
    except (UnicodeDecodeError, nbformat.reader.NotJSONError) as error:
        raise NotebookError(
            f"{path} is not a notebook: its content is not JSON",
            hint="name a notebook file (.ipynb)",
        ) from error
    except (nbformat.ValidationError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise _invalid(path, str(error)) from error
    _clear(notebook)
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        raise _invalid(path, str(error)) from error
    return notebook


def _invalid(path: Path, why: str) -> NotebookError:
    first = next((line for line in why.splitlines() if line.strip()), "no notebook structure")
    return NotebookError(
        f"{path} is not a valid notebook: {first}", hint="open and save it in Jupyter to repair it"
    )


def _clear(notebook: Any) -> None:
    """What an earlier run left would pass for this one's where this one stops half-way."""
    for cell in notebook.get("cells", []):
        if cell.get("cell_type") == "code":
            cell["outputs"] = []
            cell["execution_count"] = None


def require_python(notebook: Any, path: Path) -> None:
    """Raises NotebookError for a notebook written in another language."""
    spec = notebook.metadata.get("kernelspec", {}).get("language")
    language = spec or notebook.metadata.get("language_info", {}).get("name") or "python"
    if language.lower() not in ("python", "python3", "ipython"):
        raise NotebookError(
            f"{path} is written in {language}, and the default image has a Python kernel",
            hint="name an image with that kernel with --image",
        )


def parse_value(text: str) -> Any:
    """A parameter's value: int, float, true/false, null, JSON list, object or string; else text."""
    value: Any = text
    if text.lower() in _WORDS:
        value = _WORDS[text.lower()]
    elif _INT.fullmatch(text):
        value = int(text)
    elif _FLOAT.fullmatch(text):
        value = float(text)
    elif _NON_FINITE.fullmatch(text):
        value = float(text.replace(".", ""))
    elif text[:1] in ("[", "{", '"'):
        with suppress(ValueError):
            value = json.loads(text)
    return value


def parse_parameters(pairs: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Raises BadRequest for what cannot be a Python variable. The last one of a name wins."""
    for name, _ in pairs:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise BadRequest(
                f"parameter {name!r} is not a variable's name", hint="write -p NAME VALUE"
            )
    return {name: parse_value(value) for name, value in pairs}


def literal(value: Any) -> str:
    """Python source of a parsed value."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {literal(item)}' for key, item in value.items())}}}"
    return repr(value)


def inject(notebook: Any, parameters: dict[str, Any]) -> bool:
    """Put the values in, as papermill does: in place of an earlier injection, else after the cell
    tagged `parameters`, else on top. Returns whether one of the two cells was there.
    """
    source = "\n".join(
        ["# Parameters", *(f"{name} = {literal(value)}" for name, value in parameters.items())]
    )
    cell = nbformat.v4.new_code_cell(source=source, metadata={"tags": ["injected-parameters"]})
    if notebook.nbformat_minor < 5:
        cell.pop("id", None)
    earlier, tagged = (_tagged(notebook, tag) for tag in ("injected-parameters", "parameters"))
    if earlier is not None:
        notebook.cells[earlier] = cell
    else:
        notebook.cells.insert(0 if tagged is None else tagged + 1, cell)
    return earlier is not None or tagged is not None


def _tagged(notebook: Any, tag: str) -> int | None:
    cells = enumerate(notebook.cells)
    return next((at for at, cell in cells if tag in cell.metadata.get("tags", [])), None)


@dataclass(frozen=True)
class Output:
    """Where the executed notebook goes. Made, and so checked, before a sandbox is started."""

    path: Path | None
    """None is stdout."""

    @classmethod
    def of(cls, text: str | None, source: Path, *, inplace: bool) -> Output:
        """The default is `NAME.out.ipynb` beside the source. Raises NotebookError."""
        if text == "-":
            return cls(None)
        if inplace:
            path = source
        else:
            path = Path(text) if text else source.with_name(f"{source.stem}.out.ipynb")
        path = path.resolve()  # a link is written through, not replaced
        _check_writable(path)
        return cls(path)

    def write(self, notebook: Any) -> None:
        """The whole notebook or nothing: a temporary file, then a rename; and say so.

        Raises NotebookError.
        """
        text = nbformat.writes(notebook) + "\n"
        if self.path is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        try:
            if self.path.exists() and not self.path.is_file():
                self.path.write_text(text, encoding="utf-8")  # a device, such as /dev/null
            else:
                _replace(self.path, text)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        terminal.note(f"wrote {self.path}")


def _check_writable(path: Path) -> None:
    try:
        if path.is_dir():
            raise IsADirectoryError(21, os.strerror(21))
        if path.exists():
            with path.open("ab"):
                pass
        if not path.exists() or path.is_file():
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> NotebookError:
    return NotebookError(f"cannot write {path}: {error.strerror}", hint="name another file with -o")


def _replace(path: Path, text: str) -> None:
    """Keeps the mode of a file that is there; a new one gets what the umask allows."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, path.stat().st_mode & 0o7777 if path.exists() else 0o666 & ~_umask())
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
