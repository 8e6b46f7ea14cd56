"""A program for x86_64 in two hundred bytes, which prints one text: no compiler needed.

Stands in for `firecracker` and `jailer` where only their answer to `--version` matters.
"""

from __future__ import annotations

import struct

_BASE = 0x400000
_HEADERS = 64 + 56
_CODE = 33


def program(text: str, *, machine: int = 62, padding: int = 0) -> bytes:
    """An ELF file (elf(5)) that writes `text` to stdout and exits; `padding` zeros follow it."""
    said = text.encode()
    code = b"".join(
        (
            b"\xb8\x01\x00\x00\x00\xbf\x01\x00\x00\x00",  # mov eax, write; mov edi, stdout
            b"\x48\x8d\x35" + struct.pack("<i", _CODE - 17),  # lea rsi, [rip + to the text]
            b"\xba" + struct.pack("<I", len(said)) + b"\x0f\x05",  # mov edx, length; syscall
            b"\xb8\x3c\x00\x00\x00\x31\xff\x0f\x05",  # mov eax, exit; xor edi, edi; syscall
        )
    )
    assert len(code) == _CODE
    body = code + said
    entry = _BASE + _HEADERS
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = ident + struct.pack(
        "<HHIQQQIHHHHHH", 2, machine, 1, entry, 64, 0, 0, 64, 56, 1, 64, 0, 0
    )
    size = _HEADERS + len(body)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    return header + load + body + bytes(padding)
