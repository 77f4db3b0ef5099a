"""Slow, obvious references of selectors, written from their formulas, the layers they are tried on, and whole runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.planning import uniform
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.observation import Observation
from tidekv_cli.engine.prefill import Prefilled, PrefillSettings
from tidekv_cli.engine.selectors import LayerView, Selector
from tidekv_cli.engine.session import Session

KINDS = ("plain", "bfloat16", "equal keys", "repeated keys", "zero keys", "huge")
BLOCKS = (1, 64, 100, 2048)
SHAPES = ((1, 1), (4, 1), (2, 4), (3, 3))  # KV heads, query heads of each


def layer(seed: int, length: int, shape: tuple[int, int], window: int, kind: str, size: int = 16) -> LayerView:
    """A random layer seen by its last `window` queries, with ties or trouble in it by `kind`."""
    draw = torch.Generator().manual_seed(seed)
    (heads, group), scale = shape, size**-0.5
    keys = torch.randn(heads, length, size, generator=draw)
    queries = 2 * torch.randn(heads * group, window, size, generator=draw)
    if kind == "equal keys":
        keys = keys[:, :1].expand_as(keys).contiguous()
    elif kind == "repeated keys":
        keys = keys[:, torch.randint(0, 5, (length,), generator=draw) % length].contiguous()
    elif kind == "zero keys":
        keys[:, torch.rand(length, generator=draw) < 0.5] = 0.0
    elif kind == "huge":
        keys, queries = keys * 1e4, queries * 1e4
    elif kind == "bfloat16":
        keys, queries = keys.bfloat16(), queries.bfloat16()
    logits = attention_logits(queries, keys, scale)
    return LayerView(keys, Observation(queries, logits.logsumexp(-1).float(), scale), 2048)


def attention_logits(queries: Tensor, keys: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """Causal logits [Hq, n, L] in float64 of the last n positions' queries [Hq, n, D] over keys [Hkv, L, D]."""
    heads, rows, _ = queries.shape
    length = keys.shape[1]
    logits = queries.double() @ keys.double().repeat_interleave(heads // len(keys), 0).transpose(1, 2) * scale
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    unseen = torch.arange(length)[None, :] > torch.arange(length - rows, length)[:, None]
    return logits.masked_fill(unseen, float("-inf"))


def window_weights(view: LayerView) -> Tensor:
    """What the window's queries give to each key before them, divided by G W: [Hkv, S - W, G, W] float32.

    From the LSE as it is, and divided in the exponent, so that equal scores are equal here too.
    """
    seen, keys = view.observation, view.keys.float()
    assert seen is not None and seen.lse is not None
    heads, window, size = seen.queries.shape
    group, prefix = heads // len(keys), keys.shape[1] - window
    padded = F.pad(keys, (0, 0, 0, -keys.shape[1] % 64))  # matrix kernels round a ragged last row differently
    rows = []
    for head in range(len(keys)):
        own = slice(head * group, (head + 1) * group)
        logits = padded[head] @ (seen.queries[own].float() * seen.scale).reshape(-1, size).T  # [S, G W]
        weights = (logits - (seen.lse[own].reshape(-1) + log(group * window))).exp()
        rows.append(weights[:prefix].reshape(prefix, group, window))
    return torch.stack(rows)


def dense_chunkkv(view: LayerView, budget: int, window: int, run: int) -> Tensor:
    """Kept positions [Hkv, budget]: whole runs by their mean, the best first, of the last one as much as fits."""
    weights, heads = window_weights(view), len(view.keys)
    prefix = weights.shape[1]
    scores = weights.flatten(2).sum(2).double().sum(0)  # mean of the group and window, sum of KV heads
    runs = [range(start, min(start + run, prefix)) for start in range(0, prefix, run)]
    means = torch.tensor([sum(scores[place].item() for place in own) / len(own) for own in runs]).float()
    order = means.nan_to_num(float("-inf")).argsort(descending=True, stable=True).tolist()
    chosen = [place for number in order for place in runs[number]][: budget - window]
    kept = [*sorted(chosen), *range(prefix, view.keys.shape[1])]
    return torch.tensor([kept] * heads)


def dense_keydiff(view: LayerView, budget: int) -> Tensor:
    """Kept positions [Hkv, budget]: the lowest cosines to the mean of the keys of length 1."""
    kept = []
    for keys in view.keys.double():
        length = keys.norm(dim=1, keepdim=True)
        unit = torch.where(length > 0, keys / length, 0.0)
        anchor = unit.mean(0)
        cosine = unit @ anchor / anchor.norm() if anchor.norm() > 0 else torch.zeros(len(unit))
        kept.append(best_rows(-cosine.float(), budget))
    return torch.tensor(kept)


def dense_column_sums(queries: Tensor, keys: Tensor, lse: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """[Hkv, S] float64: the weights of all queries [Hq, S, D] of a prompt, summed over them and over a group."""
    weights = (attention_logits(queries, keys, scale, softcap) - lse.double()[..., None]).exp()
    return weights.sum(1).unflatten(0, (len(keys), -1)).sum(1)


def dense_h2o(sums: Tensor, budget: int, recent: float) -> Tensor:
    """Kept positions [Hkv, budget]: the newest ones, and of the others those with the highest sums."""
    length = sums.shape[1]
    newest = max(int(recent * budget), 1)
    kept = [[*best_rows(head[: length - newest], budget - newest), *range(length - newest, length)] for head in sums]
    return torch.tensor(kept)


def dense_cake(view: LayerView, budget: int, window: int, gamma: float, kernel: int) -> Tensor:
    """Kept positions [Hkv, budget]: mean + gamma variance over the window, the group's mean, pooled."""
    weights = window_weights(view)
    _, prefix, group, _ = weights.shape
    scores = weights.flatten(2).sum(2)
    if window > 1:
        scores = scores + gamma * (weights * (group * window)).var(3, unbiased=True).mean(2)
    pooled = F.avg_pool1d(scores, kernel, stride=1, padding=kernel // 2, count_include_pad=True)
    return torch.tensor([[*best_rows(head, budget - window), *range(prefix, prefix + window)] for head in pooled])


def best_rows(scores: Tensor, count: int) -> list[int]:
    """Rows of the `count` highest of scores [n], ascending; of equal ones the earlier, NaN last."""
    order = scores.nan_to_num(float("-inf"), float("inf"), float("-inf")).argsort(descending=True, stable=True)
    return sorted(order.tolist()[:count])


def prefilled(
    model: Any, ids: Sequence[int], selector: Selector, budget: int, chunk: int = 32, schedule: str = "tide"
) -> Prefilled:
    """A prompt read with a uniform budget."""
    settings = PrefillSettings(schedule, selector, uniform(budget), FlashCPU(), chunk, 64, 4)
    return Session(model, frozenset()).prefill(ids, settings)[0]


def random_ids(length: int, seed: int = 0) -> list[int]:
    """Of a tiny model's vocabulary."""
    return torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_whole_runs(tiny_model: Callable[..., Any], selector: Selector, window: int) -> None:
    """Schedules and chunk sizes keep the same rows, exactly the budget, as they were; prompts may be short."""
    model, ids, budget = tiny_model(), random_ids(200), window + 40
    full = prefilled(model, ids, selector, 200)
    runs = [prefilled(model, ids, selector, budget, chunk) for chunk in (32, 5, 77, 200)]
    runs.append(prefilled(model, ids, selector, budget, schedule="oneshot"))
    for run in runs:
        for whole, store, kept, first in zip(full.cache, run.cache, run.kept, runs[0].kept, strict=True):
            assert torch.equal(kept, first)
            assert kept.shape == (2, budget) and store.length == budget and (kept.diff() > 0).all()
            assert (kept[:, budget - window :] == torch.arange(200 - window, 200)).all()
            for head in range(2):
                near = whole.keys[0, head, kept[head]]
                assert torch.allclose(store.keys[0, head], near, rtol=1e-4, atol=1e-5)
        assert torch.allclose(run.logits, full.logits, rtol=1e-4, atol=1e-4)
    room = 14
    for length in range(1, window + room + 3):
        for schedule in ("tide", "oneshot"):
            short = prefilled(model, ids[:length], selector, window + room, 3, schedule)
            assert [store.length for store in short.cache] == [min(length, window + room)] * 2
