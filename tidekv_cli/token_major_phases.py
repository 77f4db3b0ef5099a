"""Peaks of a token-major prefill that is simulated with few layers and few chunks. Knows no prompt and no weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import Tensor

from tidekv_cli.engine.adapter import ModelAdapter
from tidekv_cli.engine.chunks import Chunk
from tidekv_cli.engine.ledger import CACHE
from tidekv_cli.engine.masks import Visible
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.prefill import Prefilled, PrefillSettings
from tidekv_cli.engine.token_major import TokenMajorPrefill
from tidekv_cli.few_layers import FewLayers


@dataclass(frozen=True, slots=True)
class _Peak:
    """Live bytes by item in the layer that is run as the `place`th, in a chunk from token `start` to before `stop`."""

    place: int
    start: int
    stop: int
    items: dict[str, int]


class PhasedTokenMajor(TokenMajorPrefill):
    """Notes the peak of each phase: phase p is the `p`th layer that is run, in all chunks; the last is their end.

    What comes before the first layer is of its phase, and what comes after the last layer of that one's. The cache has
    what the layers that are left out would hold by then, so it grows from one layer to the next in the first chunk.
    """

    def __init__(
        self, adapter: ModelAdapter, ids: Tensor, settings: PrefillSettings, meter: LiveMeter, few: FewLayers
    ) -> None:
        self._few, self._meter = few, meter
        super().__init__(adapter, ids, settings)
        self.chunks = _representative(self.chunks)
        self._peaks: list[_Peak] = []

    def run(self) -> Prefilled:
        """See `TokenMajorPrefill.run`."""
        prompt = super().run()
        self._take(len(self._few.kept), 0, self._length)
        return prompt

    def finish(self) -> tuple[list[dict[str, int]], int]:
        """Live bytes by item at the peak of each phase, and what the layers left out hold in the end."""
        measured = cache(self._measured)  # layers of one kind and one budget hold as much
        end = len(self._few.kept)
        phases: list[dict[str, int]] = [{} for _ in range(end + 1)]
        for peak in self._peaks:
            left_out = self._left_out(peak, measured)
            items = {**peak.items, CACHE: peak.items[CACHE] + left_out}
            if sum(items.values()) > sum(phases[peak.place].values()):
                phases[peak.place] = items
        return phases, self._left_out(_Peak(end, 0, self._length, {}), measured)

    def _visibles(self) -> list[Visible]:
        kept = super()._visibles()
        return [kept[stand_in] for stand_in in self._few.stand_ins]

    def _number(self, layer: int) -> int:
        return self._few.kept[layer]

    def _chunk(self, start: int, stop: int) -> Tensor:
        if start:
            for layer in self._layers:
                layer.pretend(start)
        with ExitStack() as hooks:
            for place, module in enumerate(self.adapter.layers):
                hook = module.register_forward_pre_hook(partial(self._entered, place, start, stop))
                hooks.callback(hook.remove)
            logits = super()._chunk(start, stop)
        self._take(len(self._few.kept) - 1, start, stop)
        return logits

    def _entered(self, place: int, start: int, stop: int, *_: Any) -> None:
        if place:
            self._take(place - 1, start, stop)

    def _take(self, place: int, start: int, stop: int) -> None:
        self._peaks.append(_Peak(place, start, stop, dict(self._meter.peak)))
        self._meter.restart_peak()

    def _left_out(self, peak: _Peak, measured: Any) -> int:
        """Held at that time by layers that are not run: those before have seen the chunk, the others have not."""
        few = self._few
        at_end = peak.place == len(few.kept)
        reached = len(few.stand_ins) if at_end else few.kept[peak.place]
        total = 0
        for layer, stand_in in enumerate(few.stand_ins):
            tokens = peak.stop if layer < reached else peak.start
            if layer not in few.kept and tokens:
                budget, chosen = self._budgets[layer]
                total += measured(stand_in, budget, chosen, tokens > budget, at_end)
        return total

    def _measured(self, stand_in: int, budget: int, chosen: bool, evicted: bool, at_end: bool) -> int:
        """Bytes of a layer's rows and positions, made on fake tensors."""
        like = self._layers[stand_in].store
        with LiveMeter(self._meter.granularity) as meter:
            layer = self._made(budget, chosen)
            layer.allocate(like.keys, like.values)
            layer.pretend(self._length if evicted else min(budget, self._length))
            if at_end and self._settings.record_kept:
                layer.positions(self._length)
            return meter.live[CACHE]


def _representative(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The first, which makes room, and the last three: one makes the shared buffer, one is whole, one is shorter."""
    return [*chunks[:1], *chunks[1:][-3:]]
