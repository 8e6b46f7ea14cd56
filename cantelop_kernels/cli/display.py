"""A kernel's output messages, shown as text: used by `exec`, and by `run --show`."""

from __future__ import annotations

import base64
import binascii
import struct
from pathlib import Path
from typing import IO, Any

from cantelop_kernels.cli import terminal
from cantelop_kernels.errors import BadRequest, SandboxGone

MALFORMED = (AttributeError, KeyError, TypeError, ValueError)
"""What comes of a message whose fields are not there, or are of another kind."""

_SUFFIX = {"image/png": "png", "image/jpeg": "jpg", "image/gif": "gif", "image/svg+xml": "svg"}


def malformed() -> SandboxGone:
    return SandboxGone(
        "the kernel sent a message that is not formed as Jupyter's are",
        hint="the code in it may have forged it; look at the code",
    )


class Display:
    """Writes streams as they come, results as text, images as `[image/png 640x480]`.

    `save` is a folder that images are written to as well; it is made if need be. Raises BadRequest
    where that cannot be.
    """

    def __init__(self, out: IO[str], err: IO[str], save: Path | None = None) -> None:
        self._out, self._err, self._save = out, err, save
        self._images = 0
        self._line_open = False
        if save is not None:
            try:
                save.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadRequest(
                    f"cannot make the folder {save}: {error.strerror}", hint="name another --save"
                ) from error

    def message(self, message: dict[str, Any]) -> None:
        """Show one iopub message; those that are no output are passed over.

        Raises SandboxGone for one that is not formed as Jupyter's are: code in the kernel can send
        what it likes.
        """
        try:
            self._message(message)
        except MALFORMED as error:
            raise malformed() from error

    def _message(self, message: dict[str, Any]) -> None:
        content = message["content"]
        match message["header"]["msg_type"]:
            case "stream":
                self._stream(str(content["name"]), str(content["text"]))
            case "execute_result" | "display_data" | "update_display_data":
                self._data(content["data"])
            case "error":
                self._end_line()
                terminal.traceback(content["traceback"], self._err)

    def _stream(self, name: str, text: str) -> None:
        if name == "stderr":
            terminal.write(self._err, text)
        elif text:
            terminal.write(self._out, text)
            self._line_open = not text.endswith("\n")

    def _end_line(self) -> None:
        if self._line_open:
            terminal.write(self._out, "\n")
            self._line_open = False

    def _data(self, data: dict[str, Any]) -> None:
        self._end_line()
        images = [mime for mime in sorted(data) if mime.startswith("image/")]
        if images:
            lines = [self._image(mime, data[mime]) for mime in images]
        else:
            lines = [str(data.get("text/plain") or f"[{', '.join(sorted(data))}]")]
        terminal.write(self._out, "\n".join(lines) + "\n")

    def _image(self, mime: str, payload: Any) -> str:
        raw = image_bytes(mime, payload)
        what = f"[{mime} {image_size(mime, raw)}]"
        if self._save is not None:
            self._images += 1
            path = self._save / f"image-{self._images}.{_SUFFIX.get(mime, 'bin')}"
            path.write_bytes(raw)
            what += f" saved as {path}"
        return what


def image_bytes(mime: str, payload: Any) -> bytes:
    """The file's content; what is no valid base64 comes back as its text."""
    text = "".join(payload) if isinstance(payload, list) else str(payload)
    if mime != "image/svg+xml":
        try:
            return base64.b64decode(text)
        except (binascii.Error, ValueError):
            pass
    return text.encode()


def image_size(mime: str, raw: bytes) -> str:
    """Pixels where the format tells them in a fixed place, else the length of the data."""
    if mime == "image/png" and len(raw) >= 24:
        return "{}x{}".format(*struct.unpack(">II", raw[16:24]))
    if mime == "image/gif" and len(raw) >= 10:
        return "{}x{}".format(*struct.unpack("<HH", raw[6:10]))
    return f"{-(-len(raw) // 1024)} KiB"
