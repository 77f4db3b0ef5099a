"""What the layers that a simulation leaves out hold in the cache. Knows no phase and runs no layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidekv_cli.engine.active import ActiveKV
from tidekv_cli.engine.budgets import Layers
from tidekv_cli.engine.ledger import CACHE, SCORING, births_booked, book
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.prefill import PrefillSettings
from tidekv_cli.engine.selectors import Selection
from tidekv_cli.engine.stores import Store
from tidekv_cli.few_layers import FewLayers


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a stand-in's keys and values [1, Hkv, S, D]; `rows` a head it kept, in `nbytes`."""

    keys: torch.Size
    values: torch.Size
    dtype: torch.dtype
    rows: int
    nbytes: int


class LeftOut:
    """Filled in by the layers that are run, in their order."""

    def __init__(
        self, few: FewLayers, settings: PrefillSettings, layers: Layers, places: list[int | None], granularity: int
    ) -> None:
        self._few, self._settings, self._layers, self._places = few, settings, layers, places
        self._granularity = granularity
        self._shapes: list[_Shape] = []
        self._known: dict[tuple[int, int, bool], int] = {}

    def ran(self, active: ActiveKV, rows: int, nbytes: int) -> None:
        """The next of the layers that are run kept `rows` a head of `active`, in `nbytes` of cache."""
        self._shapes.append(_Shape(active.keys.shape, active.values.shape, active.keys.dtype, rows, nbytes))

    def bytes_before(self, place: int, over: bool = False) -> int:
        """Held by the layers left out before the `place`th that is run, once the layer before that is done.

        When the prefill is `over`, what layers were trimmed by is let go of.
        """
        few = self._few
        stop = few.kept[place] if place < len(few.kept) else len(few.stand_ins)
        shared = [number for number in self._places[:stop] if number is not None]
        budgets = self._settings.policy.layers.begin(self._layers).read(shared[-1], None) if shared else []
        total = 0
        for layer in range(stop):
            if layer not in few.kept:
                stand_in, number = few.stand_ins[layer], self._places[layer]
                rows = self._shapes[stand_in].rows if number is None else budgets[number]
                total += self._bytes(stand_in, rows, over and number is not None)
        return total

    def trimming(self) -> dict[str, int]:
        """Bytes by item that trimming a layer takes for a moment, where that layer holds as much as any ever may."""
        layers = self._layers
        rows = min(layers.mandatory, layers.length) + min(layers.free_most, layers.free_total)
        found = [self._trimmed(shape, rows) for shape in self._shapes]
        return max(found, key=lambda items: sum(items.values()))

    def _trimmed(self, shape: _Shape, rows: int) -> dict[str, int]:
        heads = self._settings.policy.heads
        with LiveMeter(self._granularity) as meter:
            store, kept = self._stored(shape, rows, scored=True)
            before = dict(meter.live)
            meter.restart_peak()
            with births_booked(SCORING):
                stay = heads.trim(kept, rows, min(self._layers.mandatory, rows))
            store.trim(stay)
            picked = kept.picked(stay)
            found = {item: max(meter.peak[item] - before[item], 0) for item in before}
            del picked, store
        return found

    def _stored(self, shape: _Shape, rows: int, scored: bool) -> tuple[Store, Selection]:
        """A store of `rows` a head on fake tensors, and what it was selected by."""
        settings = self._settings
        heads, ragged = shape.keys[1], settings.policy.heads.ragged
        keys, values = torch.empty(shape.keys, dtype=shape.dtype), torch.empty(shape.values, dtype=shape.dtype)
        size = (heads * rows,) if ragged else (heads, rows)
        scores = torch.empty(size) if scored else None
        kept = Selection(torch.empty(size, dtype=torch.long), scores, (rows,) * heads if ragged else None)
        if settings.record_kept or scored:
            book(CACHE, kept.indices, *([] if scores is None else [scores]))
        return settings.store(keys, values, kept, settings.slack, settings.attention), kept

    def _bytes(self, stand_in: int, rows: int, over: bool) -> int:
        shape, revised = self._shapes[stand_in], self._settings.policy.layers.revises
        if rows == shape.rows and not (over and revised):
            return shape.nbytes
        key = stand_in, rows, revised and not over
        if key not in self._known:
            self._known[key] = self._measured(shape, rows, revised and not over)
        return self._known[key]

    def _measured(self, shape: _Shape, rows: int, revised: bool) -> int:
        """Of a store of `rows` a head, made on fake tensors."""
        with LiveMeter(self._granularity) as meter:
            held = self._stored(shape, rows, scored=revised)
            found = meter.live[CACHE]
            del held
        return found
