"""ChunkKV: tokens are kept in runs of neighbours, so that what belongs together stays together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tidekv_cli.engine.scoring import window_scores
from tidekv_cli.engine.selectors import LayerView, Ranking, Selector
from tidekv_cli.engine.selectors.parameters import check_window
from tidekv_cli.errors import UsageError

_LONGEST_RUN = 1024


@dataclass(frozen=True, slots=True)
class ChunkKV(Selector):
    """The window, and the runs of `run` tokens that the window attended to most, the same ones in every head.

    Source: Liu et al., ChunkKV (2025), with runs of 20. Mean attention weight over the window and over a group's heads,
    summed over KV heads; of that the mean over each run, counted from position 0 up to the window. Runs are kept whole
    but for the lowest of them: of that the first tokens, as many as the budget has room for.
    """

    window: int = 32
    run: int = 20

    def __post_init__(self) -> None:
        check_window(self.window)
        if not 1 <= self.run <= _LONGEST_RUN:
            raise UsageError(f"run={self.run} is impossible", f"use a number from 1 to {_LONGEST_RUN}")

    @property
    def mandatory_tokens(self) -> int:
        """The window."""
        return self.window

    def rank(self, view: LayerView, budget: int) -> Ranking:
        """See `Selector.rank`. A token is worth its run's mean."""
        assert view.observation is not None
        prefix = view.keys.shape[1] - self.window
        scores = window_scores(view.keys, view.observation, prefix, view.score_block)
        return Ranking(0, prefix, _run_means(scores, self.run))


def _run_means(blocks: Iterator[Tensor], run: int) -> Iterator[Tensor]:
    """Of scores [Hkv, n] in order each run's mean of the sum over heads, at all of its tokens: [1, n] float32.

    Runs cross block borders; the last one may be shorter.
    """
    waiting = None  # the first tokens of a run
    for block in blocks:
        summed = block.sum(0, dtype=torch.float64)
        joined = summed if waiting is None else torch.cat((waiting, summed))
        whole = len(joined) // run * run
        if whole:
            yield _means(joined[:whole], run)
        waiting = joined[whole:]
    if waiting is not None and len(waiting):
        yield _means(waiting, len(waiting))


def _means(scores: Tensor, run: int) -> Tensor:
    """In float64 up to here: else the mean of equal scores depends on the length of the run."""
    return scores.unflatten(0, (-1, run)).mean(1).float().repeat_interleave(run)[None]
