"""Token-major prefill: one chunk through all layers, then the next. Schedules `chunked` and `online` are two cases.

chunked  nothing is evicted: every layer has room for the whole prompt from the first chunk on.
online   a layer that has seen a chunk keeps its budget of rows, chosen by that chunk's last queries; what it evicts is
         gone for all that come after. Between chunks no layer has more; one buffer that all share holds a layer's rows
         and the chunk's while it attends to them.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import Tensor

from tidekv_cli.engine.active import ActiveKV
from tidekv_cli.engine.adapter import ModelAdapter
from tidekv_cli.engine.budgets import Layers
from tidekv_cli.engine.chunks import ChunkSize, split
from tidekv_cli.engine.masks import Visible
from tidekv_cli.engine.memory import attempt, lacking, release_unused
from tidekv_cli.engine.prefill import Prefilled, PrefillSettings, Progress, Shortage, longest_of, places_of
from tidekv_cli.engine.reading import ReadingKV, StreamingKV
from tidekv_cli.engine.stores import Store
from tidekv_cli.engine.stores.dense import Dense
from tidekv_cli.engine.stores.rolling import Turn
from tidekv_cli.engine.turning import Turning


class TokenMajorPrefill:
    """Builds the cache of one prompt; one object a prompt, so nothing is left over from the one before.

    Its policy must know every layer's budget beforehand and give all heads of a layer the same; its store is dense.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        ids: Tensor,
        settings: PrefillSettings,
        progress: Progress | None = None,
        shortage: Shortage | None = None,
    ) -> None:
        """`ids` [1, S] is the prompt; `shortage` is asked before every chunk."""
        policy = settings.policy
        assert isinstance(settings.store, Dense) and not policy.layers.revises and not policy.heads.ragged
        self.adapter = adapter
        self._ids, self._settings = ids, settings
        self._progress = progress or (lambda done, total: None)
        self._shortage = shortage or (lambda tokens: None)
        self._length = ids.shape[1]
        self._online = settings.schedule == "online"
        self._chunk_size = ChunkSize(settings.chunk_size)
        self.chunks = split([(0, self._length)], settings.chunk_size)
        self._budgets = self._budgets_of(self._visibles())
        longest = self._length + settings.slack
        most = max([rows for rows, _ in self._budgets if rows < self._length], default=0) + settings.chunk_size
        self._active = ActiveKV(settings.attention, None, min(most, self._length), True, longest)
        rolling = settings.selector.rolling
        self._turn = Turning(adapter) if rolling is not None and rolling.slots else None
        self._layers: list[ReadingKV | StreamingKV] = []
        for layer in range(len(adapter.layers)):
            turn = None if self._turn is None else self._turn.of(layer)
            self._layers.append(self._made(*self._budgets[self._number(layer)], turn))

    @torch.no_grad()
    def run(self) -> Prefilled:
        """Prefill the prompt, leaving nothing alive but the result.

        Where memory runs out, what nothing uses is given back, and in `chunked` the chunk is halved for the rest of the
        prompt, down to 256 tokens. Raises `MemoryError` when that does not help. In `online` it would change what is
        kept, and layers that have evicted cannot go back: there it is raised unless it is noticed before a chunk.
        """
        began = time.perf_counter()
        self.adapter.bind(self._layers, self._length)
        try:
            logits = self._read()
        finally:
            self.adapter.bind(())
        kept = [layer.positions(self._length) for layer in self._layers] if self._settings.record_kept else []
        cache: list[Store] = []
        for layer in self._layers:
            layer.store.prompt_ends()
            cache.append(layer.store)
        seconds, scoring_s = time.perf_counter() - began, sum(layer.scoring_s for layer in self._layers)
        lowered = tuple(self._chunk_size.lowered)
        longest = longest_of(self.adapter.visibles(), self._length + self._settings.slack)
        return Prefilled(cache, list(kept), logits, self._length, seconds, scoring_s, lowered, longest)

    def _visibles(self) -> list[Visible]:
        """Of each layer of the whole model."""
        return self.adapter.visibles()

    def _number(self, layer: int) -> int:
        """Of the `layer`th that is run, in the whole model."""
        return layer

    def _budgets_of(self, visibles: list[Visible]) -> list[tuple[int, bool]]:
        """For each layer the rows that it keeps, and whether a selector chooses them."""
        length, settings = self._length, self._settings
        if not self._online:
            return [(length, False)] * len(visibles)
        places = places_of(visibles, length + settings.slack)
        count = sum(place is not None for place in places)
        shared_out = Layers(count, length, settings.selector.mandatory_tokens, settings.policy.budget)
        rows = settings.policy.layers.begin(shared_out).read(count - 1, None) if count else []
        found = []
        for visible, place in zip(visibles, places, strict=True):
            own = length if visible.window is None else min(visible.window - 1, length)
            found.append((own, False) if place is None else (rows[place], True))
        return found

    def _made(self, budget: int, chosen: bool, turn: Turn | None = None) -> ReadingKV | StreamingKV:
        """The cache of a layer."""
        if chosen and self._settings.selector.rolling is not None:
            return StreamingKV(self._settings, self._active, budget, self._length, turn)
        return ReadingKV(self._settings, self._active, budget, chosen)

    def _read(self) -> Tensor:
        """All chunks; logits [V] after the last."""
        pending, logits = self.chunks, None
        while pending:
            logits = None  # of the chunk before
            shortage = lacking(self._shortage, pending[0][1] - pending[0][0], self._ids.device)
            if shortage is None:
                logits, shortage = attempt(partial(self._chunk, *pending[0]))
            if shortage is None:
                pending = pending[1:]
                self._chunk_size.passed()
                self._progress(len(self.chunks) - len(pending), len(self.chunks))
                continue
            release_unused(self._ids.device)
            if self._online:
                raise MemoryError(shortage)
            pending = self._chunk_size.smaller(pending, shortage)
            self.chunks = split(self.chunks, self._chunk_size.tokens)
        assert logits is not None
        return logits

    def _chunk(self, start: int, stop: int) -> Tensor:
        """Tokens start .. stop-1 through the whole model; logits [V] after the last of them."""
        for layer in self._layers:
            layer.place(start)
        return self.adapter.step(self._ids[:, start:stop], start)
