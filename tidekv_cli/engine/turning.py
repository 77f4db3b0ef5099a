"""Queries as if they stood at other positions, for models that rotate in halves. Knows no store and no schedule."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tidekv_cli.engine.adapter import KeysOnlyError, ModelAdapter
from tidekv_cli.engine.attention import Rule
from tidekv_cli.engine.readback import numbers
from tidekv_cli.errors import ModelError

_FAR, _BY = 40, 7  # positions that a check is made at
_ALIKE = 1e-2  # of the largest number; what is not alike differs by about 1


class Turning:
    """Turns rotated queries of a model back by whole positions.

    Raises `ModelError` for a model of which a layer rotates in another way, by more than one table, or by one that
    depends on the longest position.
    """

    def __init__(self, adapter: ModelAdapter) -> None:
        found = [
            module for module in adapter.model.modules() if "inv_freq" in dict(module.named_buffers(recurse=False))
        ]
        self._rotary = found[0] if len(found) == 1 else None
        self._turned: list[bool] = []
        simple = self._rotary is not None and not adapter.rotation_moves and _makes_tables(self._rotary)
        if not simple or not self._understands(adapter):
            raise ModelError(
                f"{type(adapter.model).__name__} does not rotate its keys in the one way that positions=slot can turn",
                "use positions=absolute",
            )

    def __call__(self, queries: Tensor, by: Tensor) -> Tensor:
        """Queries [1, H, n, D] as if each were `by` [n] positions earlier."""
        assert self._rotary is not None
        cos, sin = self._tables(self._rotary, queries, by)
        size = cos.shape[-1]
        turned = queries[..., :size].float()
        half = torch.cat((-turned[..., size // 2 :], turned[..., : size // 2]), -1)
        back = (turned * cos - half * sin).to(queries.dtype)
        return torch.cat((back, queries[..., size:]), -1)

    def _tables(self, rotary: nn.Module, like: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, D] in float32, without the factor that some types of rotation put on both."""
        positions = torch.cat((by, by.new_zeros(1)))[None]
        cos, sin = rotary(like.float(), positions)  # see `_makes_tables`
        factor = cos[0, -1:]  # the cosine of 0
        return cos[0, :-1] / factor, sin[0, :-1] / factor

    def of(self, layer: int) -> Turning | None:
        """For the queries of `layer`; None for one that does not rotate."""
        return self if self._turned[layer] else None

    def _understands(self, adapter: ModelAdapter) -> bool:
        """Whether each layer's keys of one token at two positions are equal, or turned into each other."""
        for layer in range(len(adapter.layers)):
            near, far = (_keys(adapter, layer, position) for position in (_FAR, _FAR + _BY))
            if far.shape[-1] % 2:
                return False
            turned = self(far, torch.full((1,), _BY, device=far.device))
            moved, difference = numbers(torch.stack((_difference(far, near), _difference(turned, near))), (1.0, 0.0))
            if not (moved < _ALIKE or difference < _ALIKE):  # as where one is no number
                return False
            self._turned.append(moved >= _ALIKE)
        return True


def _makes_tables(rotary: nn.Module) -> bool:
    """Whether it makes cosines and sines of positions, of the same number each, and of nothing else."""
    positions = torch.zeros(1, 1, dtype=torch.long, device=next(rotary.buffers()).device)
    made = rotary(positions.float()[..., None], positions)
    return isinstance(made, tuple) and len(made) == 2 and all(isinstance(table, Tensor) for table in made)


def _difference(one: Tensor, other: Tensor) -> Tensor:
    """The greatest difference, as a share of the greatest number."""
    return (one.float() - other.float()).abs().max() / other.float().abs().max()


class _Caught:
    """Takes a layer's keys and wants nothing more."""

    keys: Tensor

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = keys
        raise KeysOnlyError

    def attend(self, queries: Tensor, scale: float, rule: Rule) -> Tensor:
        raise AssertionError


@torch.no_grad()
def _keys(adapter: ModelAdapter, layer: int, position: int) -> Tensor:
    """Keys [1, Hkv, 1, D] that `layer` makes of some hidden state, which is not 0, at `position`."""
    caught = _Caught()
    adapter.bind([caught] * len(adapter.layers))
    try:
        call = adapter.record(torch.ones(1, 1, dtype=torch.long, device=adapter.device), position, layer)
        hidden = torch.linspace(-1, 2, call.hidden.shape[-1], device=adapter.device).to(call.hidden.dtype)
        adapter.replay(layer, hidden.expand_as(call.hidden), call)
    finally:
        adapter.bind(())
    return caught.keys
