"""Where a prompt is cut into chunks, and how these become smaller. Knows no model and no cache."""

from __future__ import annotations

_LEAST = 256
Chunk = tuple[int, int]  # start, stop


class ChunkSize:
    """The most `tokens` of a chunk of one prompt; `lowered` says when and why they became fewer."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.lowered: list[str] = []
        self._tried: Chunk | None = None  # one that can only be tried again

    def passed(self) -> None:
        """The first of those pending went well."""
        self._tried = None

    def smaller(self, pending: list[Chunk], shortage: str) -> list[Chunk]:
        """`pending` in pieces shorter than its first, as are all chunks from now on; one too short as it is, once.

        Half as long, and 256 tokens at least. Raises `MemoryError` with `shortage` for one that was tried again.
        """
        size = pending[0][1] - pending[0][0]
        if size <= _LEAST:
            if self._tried == pending[0]:
                raise MemoryError(shortage)
            self._tried = pending[0]
            return pending
        before = self.tokens
        while self.tokens >= size:
            self.tokens = max(self.tokens // 2, _LEAST)
        self.lowered.append(f"chunk_size {before} -> {self.tokens}: {shortage}")
        return split(pending, self.tokens)


def split(chunks: list[Chunk], size: int) -> list[Chunk]:
    """The same tokens in pieces of at most `size`; every border stays."""
    return [(at, min(at + size, stop)) for start, stop in chunks for at in range(start, stop, size)]


def chunk_borders(length: int, chunk_size: int, tail: int) -> list[Chunk]:
    """Chunks of at most `chunk_size` that cover 0 .. length-1, with a border at `tail`, where observation starts."""
    return split([part for part in ((0, tail), (tail, length)) if part[0] < part[1]], chunk_size)
