"""Memory that was freed in small pieces goes back to the system."""

from __future__ import annotations

import platform

import pytest

from tba.record.memory import FreedMemory, resident_memory_bytes


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked to")
def test_what_was_freed_between_pieces_that_are_used_is_given_back() -> None:
    pieces = [bytes([i % 7 + 1]) * 60_000 for i in range(4000)]
    kept = pieces[::500] + pieces[-1:]  # the last too: what lies at the end of the heap would go back by itself
    del pieces
    before = resident_memory_bytes()
    memory = FreedMemory()
    memory.give_back()
    after = resident_memory_bytes()
    assert before is not None
    assert after is not None
    assert before - after > 200e6
    assert all(len(set(piece)) == 1 for piece in kept)
