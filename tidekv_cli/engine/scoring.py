"""Blockwise importance scores of prompt keys from the observation window. Knows no budget and no cache layout.

No W x S matrix is ever made: logits exist for one key block at a time, always in float32 (BF16 logits near 30 are
off by 0.1, which exp() turns into 10 %).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tidekv_cli.engine.attention import capped
from tidekv_cli.engine.observation import Observation

# Matrix kernels round differently in ragged last rows; whole tiles make a score independent of the block size.
_TILE = 64
_PART = 1024  # keys whose logits exist at a time

Pooling = Literal["avg", "max"]
# Of attention weights [Hkv, n, G W], each divided by G W, to scores [Hkv, n], which it fills.
Combine = Callable[[Tensor, Tensor], None]


def mean_weight(weights: Tensor, scores: Tensor) -> None:
    """The mean attention weight over the window's queries and a group's heads. See `Combine`."""
    torch.sum(weights, 2, out=scores)


def window_scores(
    keys: Tensor, observation: Observation, prefix: int, block: int, combine: Combine = mean_weight
) -> Iterator[Tensor]:
    """What `combine` makes of the window's attention to each of the keys 0 .. prefix-1: by default the mean weight.

    keys [Hkv, S, D]; yields [Hkv, n] float32, in order of position, n at most `block`. Every window query sees every
    prefix key, so no mask is needed. Without an LSE it is computed first (the paper's two passes).
    """
    queries = grouped(observation, keys.shape[0]).transpose(1, 2)  # [Hkv, D, G W]
    lse = window_lse(keys, observation, block) if observation.lse is None else observation.lse
    rows = queries.shape[2]
    shift = lse.reshape(keys.shape[0], 1, rows) + math.log(rows)  # the mean's division, done once
    part = -(-min(block, prefix, _PART) // _TILE) * _TILE
    buffer = lse.new_empty(keys.shape[0], part, rows)  # one part's logits, written again for the next
    for start in range(0, prefix, block):
        stop = min(start + block, prefix)
        scores = lse.new_empty(keys.shape[0], stop - start)
        for at, to in _parts(start, stop, part):
            weights = _logits(queries, keys[:, at:to], buffer, observation.softcap).sub_(shift).exp_()
            weights = weights if weights.shape[1] == to - at else weights[:, : to - at]
            combine(weights, scores[:, at - start : to - start])
        yield scores


def _parts(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Whole tiles in parts of `size`, then what is left alone, so that padding copies less than a tile."""
    whole = stop - (stop - start) % _TILE
    yield from ((at, min(at + size, whole)) for at in range(start, whole, size))
    if whole < stop:
        yield whole, stop


def window_lse(keys: Tensor, observation: Observation, block: int) -> Tensor:
    """Pass 1 of the paper: log-sum-exp [Hkv, G W] of each window query over the keys that it sees.

    Running maximum and normaliser over key blocks; keys past a query's own position count as -inf.
    """
    queries = grouped(observation, keys.shape[0]).transpose(1, 2)
    heads, _, rows = queries.shape
    window = observation.queries.shape[1]
    prefix = keys.shape[1] - window  # what all of them see
    last_seen = prefix + torch.arange(window, device=keys.device).repeat(rows // window)  # of row g W + w
    maximum = keys.new_full((heads, rows), float("-inf"), dtype=torch.float32)
    total = torch.zeros_like(maximum)
    buffer = maximum.new_empty(heads, block + _TILE, rows)
    for start in range(0, keys.shape[1], block):
        part = keys[:, start : start + block]
        logits = _logits(queries, part, buffer, observation.softcap)[:, : part.shape[1]].transpose(
            1, 2
        )  # [Hkv, G W, n]
        if start + block > prefix:
            positions = start + torch.arange(part.shape[1], device=keys.device)
            logits.masked_fill_(positions[None, :] > last_seen[:, None], float("-inf"))
        new_maximum = torch.maximum(maximum, logits.amax(-1))
        # Before any visible key the maximum is -inf and there is nothing to rescale.
        rescale = torch.where(maximum.isinf(), 0.0, (maximum - new_maximum).exp())
        shifted = (logits - new_maximum[..., None]).exp_().nan_to_num_(0.0)
        total = total * rescale + shifted.sum(-1)
        maximum = new_maximum
    return maximum + total.log()


def grouped(observation: Observation, kv_heads: int) -> Tensor:
    """The scaled queries [Hkv, G W, D] float32 of each KV head."""
    queries = observation.queries
    return (queries.float() * observation.scale).reshape(kv_heads, -1, queries.shape[-1])


def _logits(queries: Tensor, keys: Tensor, buffer: Tensor, softcap: float | None) -> Tensor:
    """Of queries [Hkv, D, R] and keys [Hkv, n, D]: [Hkv, n rounded up to a tile, R] float32 in `buffer`.

    Rows past n are zeros. Keys first, and a key's logits side by side: a tenth quicker than the other way round.
    """
    keys = keys.float()
    ragged = -keys.shape[1] % _TILE
    if ragged:
        keys = F.pad(keys, (0, 0, 0, ragged))
    shape = keys.shape[0], keys.shape[1], queries.shape[2]
    out = buffer if buffer.shape == shape else buffer.view(-1)[: math.prod(shape)].view(shape)
    torch.bmm(keys, queries, out=out)
    return capped(out, softcap)


def pool_scores(blocks: Iterator[Tensor], kernel: int, pooling: Pooling) -> Iterator[Tensor]:
    """1-d pooling (stride 1, odd `kernel`, same length) over blocks as if they were one row.

    A halo of kernel//2 scores crosses block borders; past both ends lie zeros for avg, -inf for max. Yields
    [Hkv, n] pieces in order; together they are as long as the input.
    """
    halo = kernel // 2
    fill = 0.0 if pooling == "avg" else float("-inf")
    pool = _average if pooling == "avg" else _greatest
    carry: Tensor | None = None
    for block in blocks:
        joined = F.pad(block, (halo, 0), value=fill) if carry is None else torch.cat((carry, block), 1)
        if joined.shape[1] >= kernel:
            yield pool(joined, kernel)
        carry = joined[:, max(joined.shape[1] - (kernel - 1), 0) :]
    if carry is not None and halo:
        joined = F.pad(carry, (0, halo), value=fill)
        if joined.shape[1] >= kernel:
            yield pool(joined, kernel)


def _average(row: Tensor, kernel: int) -> Tensor:
    return F.avg_pool1d(row, kernel, stride=1)


def _greatest(row: Tensor, kernel: int) -> Tensor:
    return row.unfold(1, kernel, 1).amax(-1)  # `max_pool1d` is several times slower under a dispatch mode


class StreamingTopK:
    """The `count` highest scores per head of `total` columns that come in blocks; equal scores go to the lower one.

    Holds scores [H, n], n at most count + room, and chooses when they are full: seldom, since a choice is many small
    operations. NaN ranks below everything.
    """

    def __init__(self, count: int, total: int, room: int, first: int = 0) -> None:
        """`first` is the position of the first column that is pushed; `room` is at least 1."""
        assert 0 < count <= total and room > 0
        self._count, self._capacity = count, min(count + room, total)
        self._scores: Tensor | None = None  # of the best of what came before, then of columns as they came
        self._chosen: Tensor | None = None  # positions [H, count] of the former
        self._held, self._next = 0, first

    def push(self, scores: Tensor) -> None:
        """Offer the scores [H, n] of the next n positions."""
        if self._scores is None:
            self._scores = scores.new_empty(scores.shape[0], self._capacity)
        taken = 0
        while taken < scores.shape[1]:
            if self._held == self._capacity:
                self._choose(self._scores)
            more = min(scores.shape[1] - taken, self._capacity - self._held)
            self._scores[:, self._held : self._held + more] = scores[:, taken : taken + more]
            taken, self._held, self._next = taken + more, self._held + more, self._next + more

    def _choose(self, held: Tensor) -> Tensor:
        """Leave the best `count` columns of each row in front, in the order they came; returns their positions."""
        scores = finite(held[:, : self._held])
        fresh = self._held if self._chosen is None else self._held - self._count
        positions = torch.arange(self._next - fresh, self._next, device=held.device).expand(len(held), -1)
        if self._chosen is not None:
            positions = torch.cat((self._chosen, positions), 1)
        best = ranks(scores).topk(self._count, dim=1, sorted=False).indices.sort(dim=1).values
        held[:, : self._count] = scores.gather(1, best)
        self._chosen, self._held = positions.gather(1, best), self._count
        return self._chosen

    def result(self) -> tuple[Tensor, Tensor]:
        """Positions [H, count] ascending and their scores. At least `count` positions must have been offered."""
        assert self._scores is not None and self._held >= self._count
        return self._choose(self._scores), self._scores[:, : self._count]


def finite(scores: Tensor) -> Tensor:
    """`scores` with NaN below everything, and nothing as high as what always stays; in place."""
    return scores.nan_to_num_(float("-inf"), torch.finfo(scores.dtype).max, float("-inf"))


def ranks(scores: Tensor) -> Tensor:
    """Whole numbers [H, n] in the order of the float32 `scores`, of equal ones the earlier column the greater.

    No two of a row are equal, so what order an algorithm gives to ties does not matter. IEEE 754 numbers order like
    their bits read as a whole number, if those of negative ones are turned round; adding 0 makes -0 a 0.
    """
    bits = scores.add(0.0).view(torch.int32)
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    return bits.long().bitwise_left_shift_(32).sub_(torch.arange(scores.shape[1], device=scores.device))
