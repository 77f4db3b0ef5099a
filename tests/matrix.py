"""A model with every point on the axes to run on it, and what must hold of each. Knows no test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tests.planning import plan_settings
from tidekv_cli.assembly import engine_settings
from tidekv_cli.axes import POLICIES, SCHEDULES, SELECTORS, STORES
from tidekv_cli.engine import adapter
from tidekv_cli.engine.backends import attention_backend
from tidekv_cli.engine.prefill import Prefilled
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.engine.selectors import LayerView, Ranking, Selector
from tidekv_cli.engine.session import Session
from tidekv_cli.engine.stores import Store
from tidekv_cli.engine.stores.dense import DenseStore
from tidekv_cli.engine.stores.flat import FlatStore
from tidekv_cli.engine.stores.quantized import QuantizedStore
from tidekv_cli.engine.stores.rolling import RollingStore
from tidekv_cli.methods import Method, conflict

NEW = 4
ALL = [Method(" × ".join(axes), *axes, "") for axes in product(SCHEDULES, SELECTORS, POLICIES, STORES)]
LEGAL = [method for method in ALL if conflict(method) is None]
Rows = list[tuple[Tensor, Tensor]]  # of each layer keys and values [Hkv, S, D]


class Watched(Selector):
    """A selector whose rows have scores: those of each layer [H, n], and how many rows before them have none."""

    def __init__(self, selector: Selector) -> None:
        self._selector = selector
        self.scores: list[tuple[int, Tensor]] = []

    def __getattribute__(self, name: str) -> Any:
        own = ("_selector", "scores", "rank", "select")
        return object.__getattribute__(self, name) if name in own else getattr(self._selector, name)

    def rank(self, view: LayerView, budget: int) -> Ranking:
        """What the selector says, written down."""
        ranking = self._selector.rank(view, budget)
        scores = torch.cat(list(ranking.blocks), 1)
        self.scores.append((ranking.first, scores))
        return replace(ranking, blocks=iter(scores.clone().split(view.score_block, 1)))


@dataclass(frozen=True)
class Scored:
    """A prompt that was prefilled, and what its layers' rows were worth, where selectors say so."""

    prompt: Prefilled
    scores: Sequence[tuple[int, Tensor]]

    def assert_keeps_as(self, other: Scored) -> int:
        """Heads whose sets differ, of which there is one in a hundred at most.

        What one lacks and the other has instead may be apart by four times the noise of the scores, and no more; and
        that noise is rounding. Where layers are chosen from more than once, no set may differ.
        """
        layers = len(self.prompt.kept)

        differing = total = 0
        for layer, kept in enumerate(zip(self.prompt.kept, other.prompt.kept, strict=True)):
            pairs = list(zip(*map(by_head, kept), strict=True))
            sets = [(set(mine.tolist()), set(theirs.tolist())) for mine, theirs in pairs]
            unlike = [head for head, (mine, theirs) in enumerate(sets) if mine != theirs]
            differing, total = differing + len(unlike), total + len(sets)
            if unlike:
                assert len(self.scores) == len(other.scores) == layers
                first, scores = self.scores[layer]
                noise = float((scores - other.scores[layer][1]).abs().max())
                worth = scores.expand(len(sets), -1)
                lost = [float(worth[head, at - first]) for head in unlike for at in sets[head][0] - sets[head][1]]
                won = [float(worth[head, at - first]) for head in unlike for at in sets[head][1] - sets[head][0]]
                print(f"layer {layer}, heads {unlike}: {lost} for {won}, noise {noise}")
                assert noise <= 1e-5 * float(scores[scores.isfinite()].abs().max())
                assert max(lost + won) - min(lost + won) <= 4 * noise
        assert differing <= max(total // 100, 1)
        return differing


@dataclass(frozen=True)
class Subject:
    """A model; `windows` are how many keys the queries of each layer see: None for all, 0 for those of other rules."""

    model: Any
    config: Mapping[str, Any]
    windows: Sequence[int | None]
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "session", Session(self.model, frozenset()))

    def prefilled(
        self,
        method: Method,
        ids: Sequence[int],
        budget: int,
        chunk: int = 32,
        block: int = 64,
        attention: str = "sdpa",
        **values: int,
    ) -> Scored:
        """A prompt under `method`, with those of `values` that are parameters of it."""
        names = {parameter.name for parameter in method.parameters}
        case = plan_settings(
            self.config,
            method=method,
            axis_settings=method.settings({name: value for name, value in values.items() if name in names}),
            dtype="float32",
            chunk_size=chunk,
            score_block=block,
            budget_tokens=budget if method.selector_info.budgeted else None,
            max_new_tokens=NEW,
            record_kept=True,
            attention=attention,
        )
        settings = engine_settings(case, len(ids), attention_backend(attention, "cpu"))
        watched = Watched(settings.selector)
        if method.selector_info.scores != "none":
            settings = replace(settings, selector=watched)
        return Scored(self.session.prefill(ids, settings)[0], watched.scores)

    def answer(self, prompt: Prefilled) -> list[int]:
        """NEW greedy tokens."""
        return list(self.session.generate(prompt, SamplingSettings(), NEW))

    def assert_exact(self, prompt: Prefilled, method: Method, length: int, budget: int) -> None:
        """The budget to the row over the layers that see everything, in positions that ascend and exist."""
        stay = min(budget, length) if method.selector_info.budgeted else length
        by_layer = [by_head(layer) for layer in prompt.kept]
        total = 0
        for window, store, heads in zip(self.windows, prompt.cache, by_layer, strict=True):
            assert sum(map(len, heads)) == store.length * len(heads) == store.prompt_length * len(heads)
            for head in heads:
                assert head.dtype == torch.int64 and (head.diff() > 0).all()
                assert len(head) == 0 or int(head[-1]) < length
            if window is None or window >= length + NEW:
                total += store.length
                assert method.budget_policy != "uniform" or {len(head) for head in heads} == {stay}
            else:
                whole = window == 0 or method.schedule == "chunked"
                own = length if whole else min(window - 1, length)
                assert {len(head) for head in heads} == {own}
        whole = sum(window is None or window >= length + NEW for window in self.windows)
        assert total == whole * stay

    def assert_computed(self, prompt: Prefilled, computed: Rows) -> None:
        """Kept rows are bit for bit those that the layers gave; quantised ones as near as their steps."""
        for store, (keys, values), kept in zip(prompt.cache, computed, prompt.kept, strict=True):
            held = rows_of(store)
            for (own_keys, own_values), full_keys, full_values, at in zip(
                held, keys, values, by_head(kept), strict=True
            ):
                for own, full in ((own_keys, full_keys[at]), (own_values, full_values[at])):
                    if isinstance(store, QuantizedStore):
                        assert (own - full).abs().max() <= 0.52 * (full.max() - full.min()) / 15
                    else:
                        assert torch.equal(own, full)


def by_head(kept: Tensor | list[Tensor]) -> list[Tensor]:
    """Positions of each head."""
    return kept if isinstance(kept, list) else list(kept.unbind())


def rows_of(store: Store) -> Rows:
    """Of each head its keys and values [L, D], as they are held."""
    if isinstance(store, FlatStore):
        held = store._old
        spans = [torch.cat([torch.arange(part.start, part.stop) for part in own]) for own in held._spans()]
        return [(held._keys[own], held._values[own]) for own in spans]
    if isinstance(store, QuantizedStore):
        keys, values = store.rows(0, store.length)
    elif isinstance(store, RollingStore):
        sunk = store._sunk
        keys, values = (
            torch.cat((first[:, :, :sunk], recent), 2)
            for first, recent in zip(store._sinks, (store.keys, store.values), strict=True)
        )
    else:
        assert isinstance(store, DenseStore)
        keys, values = store.keys, store.values
    return list(zip(keys[0], values[0], strict=True))


@contextmanager
def layers_watched() -> Iterator[Rows]:
    """The rows that layers gave within it, filled in at its end; of one prompt, in chunks as they come."""
    given: dict[int, list[tuple[Tensor, Tensor]]] = {}
    taken: Rows = []
    update = adapter._ReplayCache.update

    def watching(cache: Any, keys: Tensor, values: Tensor, layer: int, *more: Any, **named: Any) -> Any:
        given.setdefault(layer, []).append((keys[0].clone(), values[0].clone()))
        return update(cache, keys, values, layer, *more, **named)

    adapter._ReplayCache.update = watching
    try:
        yield taken
    finally:
        adapter._ReplayCache.update = update
    for layer in sorted(given):
        keys, values = zip(*given[layer], strict=True)
        taken.append((torch.cat(keys, 1), torch.cat(values, 1)))
