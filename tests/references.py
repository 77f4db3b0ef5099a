"""Slow, obvious references: dense SnapKV, eviction in the plain model, and the rule for sets that may differ."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from tidekv_cli.engine.observation import Observation
from tidekv_cli.engine.selectors import LayerView, Selection, Selector


def dense_scores(keys: Tensor, seen: Observation, prefix: int, kernel: int, pooling: str) -> Tensor:
    """Pooled scores [Hkv, prefix] through the whole W x S matrix of weights, one head group at a time."""
    heads = keys.shape[0]
    queries, lse = seen.queries.float(), seen.lse
    assert lse is not None
    group = queries.shape[0] // heads
    rows = []
    for head in range(heads):
        own = slice(head * group, (head + 1) * group)
        scaled = (queries[own] * seen.scale).reshape(-1, queries.shape[2])
        # Whole tiles of columns: matrix kernels round a ragged last column differently.
        padded = F.pad(keys[head].float(), (0, 0, 0, -len(keys[head]) % 64))
        logits = scaled @ padded.T
        weights = (logits - lse[own].reshape(-1, 1)).exp()
        rows.append((weights.sum(0) / len(scaled))[:prefix])
    raw = torch.stack(rows)
    if pooling == "avg":
        return F.avg_pool1d(raw, kernel, stride=1, padding=kernel // 2, count_include_pad=True)
    return F.max_pool1d(raw, kernel, stride=1, padding=kernel // 2)


def dense_snapkv(
    view: LayerView, budget: int, window: int = 32, kernel: int = 7, pooling: str = "max", sinks: int = 0
) -> Tensor:
    """Kept positions [Hkv, budget]: sinks, the best by a stable sort, the window."""
    heads, length, _ = view.keys.shape
    prefix = length - window
    assert view.observation is not None
    scores = dense_scores(view.keys, view.observation, prefix, kernel, pooling)
    kept = []
    for head in range(heads):
        order = [p for p in scores[head].argsort(descending=True, stable=True).tolist() if p >= sinks]
        best = order[: budget - window - sinks]
        kept.append(sorted([*range(sinks), *best, *range(prefix, length)]))
    return torch.tensor(kept)


@dataclass
class Recorder(Selector):
    """A selector that passes on to another and keeps what it was shown; keys are copied."""

    inner: Any
    views: list[LayerView] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)

    @property
    def window(self) -> int:
        """As the inner one."""
        return self.inner.window

    @property
    def mandatory_tokens(self) -> int:
        """As the inner one."""
        return self.inner.mandatory_tokens

    def select(self, view: LayerView, budget: int) -> Selection:
        """As the inner one."""
        self.views.append(LayerView(view.keys.clone(), view.observation, view.score_block))
        self.selections.append(self.inner.select(view, budget))
        return self.selections[-1]


def heads_that_differ(first: Recorder, second: Recorder, kernel: int = 7, pooling: str = "max") -> tuple[int, int]:
    """(heads whose kept sets differ, heads in all) of two runs over one prompt.

    Asserts for every swapped element that the gap between the swapped scores is at most 4 times the score noise
    between the two runs.
    """
    differing = total = 0
    for one, two, kept_one, kept_two in zip(
        first.views, second.views, first.selections, second.selections, strict=True
    ):
        prefix = one.keys.shape[1] - first.window
        scores = [dense_scores(v.keys, v.observation, prefix, kernel, pooling) for v in (one, two)]
        for head in range(one.keys.shape[0]):
            total += 1
            sets = [set(k.indices[head].tolist()) for k in (kept_one, kept_two)]
            if sets[0] == sets[1]:
                continue
            differing += 1
            noise = (scores[0][head] - scores[1][head]).abs().max().item()
            lost, won = sorted(sets[0] - sets[1]), sorted(sets[1] - sets[0])
            gaps = [abs(scores[0][head, a] - scores[0][head, b]).item() for a in lost for b in won]
            assert max(gaps) <= 4 * noise, (head, lost, won, max(gaps), noise)
    return differing, total


@torch.no_grad()
def plain_logits(model: Any, ids: Sequence[int], attention: str = "sdpa") -> Tensor:
    """Next-token logits [V] of the plain model, by default with torch's sdpa."""
    own = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        return model(input_ids=torch.tensor([list(ids)]), logits_to_keep=1).logits[0, -1]
    finally:
        model.set_attn_implementation(own)


@torch.no_grad()
def plain_scores(model: Any, ids: Sequence[int], window: int, kernel: int, pooling: str) -> list[Tensor]:
    """Pooled scores [Hkv, S - window] of every layer from the plain model's own attention weights."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        weights = model(input_ids=torch.tensor([list(ids)]), output_attentions=True).attentions
    finally:
        model.set_attn_implementation(own)
    heads, prefix = model.config.num_key_value_heads, len(ids) - window
    raw = [w[0, :, -window:, :prefix].reshape(heads, -1, prefix).mean(1) for w in weights]
    if pooling == "avg":
        return [F.avg_pool1d(r, kernel, stride=1, padding=kernel // 2, count_include_pad=True) for r in raw]
    return [F.max_pool1d(r, kernel, stride=1, padding=kernel // 2) for r in raw]


@torch.no_grad()
def plain_greedy(model: Any, ids: Sequence[int], count: int, attention: str = "sdpa") -> list[int]:
    """Greedy tokens of the plain model, with its own growing cache."""
    own = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        cache = DynamicCache(config=model.config)
        keyword = cache_keyword(model)
        fed, tokens = torch.tensor([list(ids)]), []
        for _ in range(count):
            logits = model(input_ids=fed, use_cache=True, logits_to_keep=1, **{keyword: cache}).logits
            tokens.append(int(logits[0, -1].argmax()))
            fed = torch.tensor([[tokens[-1]]])
        return tokens
    finally:
        model.set_attn_implementation(own)


@torch.no_grad()
def plain_steps_with_kept_rows(
    model: Any, ids: Sequence[int], kept: Sequence[Tensor], tokens: Sequence[int]
) -> list[Tensor]:
    """Logits [V] after each of `tokens` when the plain model's full cache is cut to the kept rows.

    Positions are stated, S and on.
    """
    own = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        cache = CutCache(config=model.config)
        logits_after(model, cache, ids, 0)
        for layer, rows in zip(cache.layers, kept, strict=True):
            picked = rows[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[-1])
            layer.keys, layer.values = layer.keys.gather(2, picked), layer.values.gather(2, picked)
        return [logits_after(model, cache, [token], position) for position, token in enumerate(tokens, len(ids))]
    finally:
        model.set_attn_implementation(own)


class CutCache(DynamicCache):
    """The plain model's cache whose rows were cut: it still counts the tokens that it was given."""

    seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Where the next token goes; some versions put the queries of masks there."""
        return self.seen


def logits_after(model: Any, cache: CutCache, tokens: Sequence[int], position: int) -> Tensor:
    """Logits [V] of the plain model after `tokens`, the first of which is at `position`."""
    cache.seen = position
    places = torch.arange(position, position + len(tokens))[None]
    given = {"input_ids": torch.tensor([list(tokens)]), "position_ids": places, cache_keyword(model): cache}
    return model(**given, use_cache=True).logits[0, -1]


def cache_keyword(model: Any) -> str:
    """What this version of transformers calls the cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages under `tensors`."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
