"""What guests write is bounded and safe to print."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cantelop_kernels.tail import Tail, printable


@given(st.lists(st.binary(max_size=200)), st.integers(1, 50))
def test_a_tail_is_bounded_and_printable(chunks: list[bytes], limit: int) -> None:
    tail = Tail(limit)
    for chunk in chunks:
        tail.feed(chunk)
    text = tail.text()
    assert len(text) <= limit
    assert all(c in "\n\t" or c.isprintable() for c in text)


def test_the_last_characters_stay() -> None:
    tail = Tail(5)
    tail.feed(b"hello ")
    tail.feed(b"world")
    assert tail.text() == "world"


def test_escape_sequences_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\x1b[2Jc\r\nd") == "a]0;titleb[2Jc\nd"
