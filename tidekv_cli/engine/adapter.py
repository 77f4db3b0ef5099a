"""Drives Hugging Face decoder layers one at a time by record and replay. The only engine file that knows transformers.

The model's own forward is run on one chunk with taps in place of its layers; what each layer would have been
given is kept and replayed on the real hidden states. Embedding scale, rotary tables, norm and head come for free.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from tidekv_cli.engine.attention import Rule
from tidekv_cli.engine.masks import CAUSAL, MaskFunction, Visible, visible
from tidekv_cli.engine.rotary import MovingRotary
from tidekv_cli.errors import ModelError

_names = itertools.count()
# By an adapter's name, the attention its model came with: a second adapter on one model must not restore the first's.
_originals: dict[str, str] = {}


class LayerCache(Protocol):
    """Where one layer's keys and values go, and what answers its queries."""

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take keys and values [B, Hkv, n, D] of new tokens; return all [B, Hkv, L, D]."""

    def attend(self, queries: Tensor, scale: float, rule: Rule) -> Tensor:
        """Attention output [B, Hq, n, Dv] of the newest n tokens' queries."""


class KeysOnlyError(Exception):
    """Raised by `LayerCache.append` when nothing after the keys and values of this call is wanted."""


class _StopForwardError(Exception):
    """Ends a recorded forward at its last tap."""


@dataclass(slots=True)
class LayerCall:
    """One recorded call of a layer: its hidden states [B, n, d] and everything else it was given."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _ReplayCache(Cache):
    """The cache object that layers see: it routes to `LayerCache`s and states the logical length."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.targets: Sequence[LayerCache] = ()
        self.logical_length = 0
        self.active: LayerCache | None = None
        self.keys: Tensor | None = None  # that attention must be given next
        self.updates = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self.updates += 1
        self.active = self.targets[layer_idx]
        self.keys, values = self.active.append(key_states, value_states)
        return self.keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.logical_length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.logical_length

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else len(query_length)
        return self.logical_length + length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1


def find_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers: the one list of as many modules as the config says, of the class that is not split."""
    count = model.config.num_hidden_layers
    kinds = set(model._no_split_modules or ())
    found = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and type(module[0]).__name__ in kinds
    ]
    if len(found) != 1:
        raise ModelError(
            f"{type(model).__name__} has {len(found)} lists of {count} decoder layers, one is needed",
            "use a supported architecture",
        )
    return found[0]


def _mask(*_: Any, mask_function: MaskFunction, attention_mask: Tensor | None = None, **__: Any) -> Visible:
    """Stands for a mask tensor on its way through the model to the attention of a layer."""
    if attention_mask is not None:
        raise ModelError("the model makes a padding mask of its own, which is not supported", "use another model")
    return visible(mask_function)


class ModelAdapter:
    """A loaded causal model, driven layer by layer. Batch size is one throughout."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers = find_layers(model)
        parameters = inspect.signature(model.forward).parameters
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        self._cache = _ReplayCache()
        self._rotary = MovingRotary(model)
        self._longest: int | None = None
        self._visibles: list[Visible] | None = None
        self.name = name = f"tidekv_{next(_names)}"  # of the attention that the model was given
        AttentionInterface.register(name, _attention_of(weakref.ref(self)))
        AttentionMaskInterface.register(name, _mask)
        found = model.config._attn_implementation
        _originals[name] = _originals.get(found, found)
        weakref.finalize(self, _unregister, name, weakref.ref(model))
        model.set_attn_implementation(name)
        model.config.return_dict = True

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def rotation_moves(self) -> bool:
        """Whether rotations depend on the longest position that is seen."""
        return self._rotary.moves

    def bind(self, targets: Sequence[LayerCache], prompt_length: int | None = None) -> None:
        """Let layer i store into and attend over `targets[i]` from now on; `()` lets go of what was bound.

        With `prompt_length` a prompt of that many tokens begins.
        """
        self._cache.targets = targets
        self._cache.active = self._cache.keys = None
        self._longest = None if prompt_length is None else prompt_length - 1
        if targets:  # another prompt may have moved it meanwhile
            self._rotary.reset()

    def _whole_prompt_seen(self) -> AbstractContextManager[None]:
        return nullcontext() if self._longest is None else self._rotary.seeing(self._longest)

    def visibles(self) -> list[Visible]:
        """Which keys the queries of each layer see, as the model tells its layers."""
        if self._visibles is None:
            ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
            self._visibles = [_visible_in(self.record(ids, 0, layer)) for layer in range(len(self.layers))]
        return self._visibles

    def record(self, ids: Tensor, start: int, layer: int) -> LayerCall:
        """What `layer` would be given for tokens `ids` [1, n] at positions start..start+n.

        `hidden` is the embedding, whatever the layer.
        """
        calls: list[LayerCall] = []

        def tap(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            hidden, *rest = args
            if index == layer:
                calls.append(LayerCall(hidden, tuple(rest), kwargs))
                raise _StopForwardError
            return hidden

        with self._tapped(layer + 1, tap):
            try:
                self._forward(ids, start)
            except _StopForwardError:
                return calls[0]
        raise ModelError("the model's forward did not reach its layers", "use a supported architecture")

    def replay(self, layer: int, hidden: Tensor, call: LayerCall) -> Tensor | None:
        """Run `layer` on `hidden` [B, n, d]; None if its cache wanted the keys and values only.

        Raises `ModelError` for a layer that does anything but one update of its cache and one attention over it.
        """
        self._cache.updates = 0
        try:
            with self._whole_prompt_seen():
                out = self.layers[layer](hidden, *call.args, **call.kwargs)
        except KeysOnlyError:
            return None
        if self._cache.updates != 1 or self._cache.keys is not None:
            raise _unlike_others(self.model, f"updates its cache {self._cache.updates} times, or attends elsewhere")
        if not isinstance(out, Tensor) or out.shape != hidden.shape:
            raise _unlike_others(self.model, f"gives something else than hidden states of {list(hidden.shape)}")
        return out

    def finish(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Logits [V] in float32 after prompt `ids` [1, S], from the last row of `hidden` that left the last layer."""
        last = len(self.layers) - 1
        with self._tapped(last + 1, lambda index, args, _: hidden[:, -1:] if index == last else args[0]):
            return self._forward(ids[:, -1:], ids.shape[1] - 1).logits[0, -1].float()

    def step(self, ids: Tensor, start: int) -> Tensor:
        """Logits [V] in float32 after tokens `ids` [1, n] at positions start.., through the bound caches."""
        return self._forward(ids, start, logits_to_keep=1).logits[0, -1].float()

    def _forward(self, ids: Tensor, start: int, **extra: Any) -> Any:
        self._cache.logical_length = start
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        keywords = {self._cache_keyword: self._cache, **extra}
        with self._whole_prompt_seen():
            return self.model(input_ids=ids, position_ids=positions, use_cache=True, **keywords)

    @contextmanager
    def _tapped(self, count: int, tap: Callable[[int, tuple[Any, ...], dict[str, Any]], Tensor]) -> Iterator[None]:
        tapped = [vars(layer) for layer in itertools.islice(self.layers, count)]  # a module's own attributes come first
        try:
            for index, attributes in enumerate(tapped):
                attributes["forward"] = _bound_tap(tap, index)
            yield
        finally:
            for attributes in tapped:
                attributes.pop("forward", None)


def _visible_in(call: LayerCall) -> Visible:
    given = (*call.args, *call.kwargs.values())
    return next((value for value in given if isinstance(value, Visible)), CAUSAL)


def _unlike_others(model: PreTrainedModel, what: str) -> ModelError:
    return ModelError(
        f"a layer of {type(model).__name__} {what}, so it cannot be run chunk by chunk", "use a supported architecture"
    )


def _bound_tap(tap: Callable[..., Tensor], index: int) -> Callable[..., Tensor]:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        if not args:
            args = (kwargs.pop("hidden_states"),)
        return tap(index, args, kwargs)

    return forward


def _attention_of(adapter: weakref.ref[ModelAdapter]) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        owner = adapter()
        assert owner is not None and owner._cache.active is not None
        mask = CAUSAL if attention_mask is None else attention_mask
        if not isinstance(mask, Visible):
            raise ModelError("a layer changes its attention mask, which is not supported", "use another model")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if key is not owner._cache.keys:
            raise _unlike_others(owner.model, "attends to other keys than those of its cache")
        owner._cache.keys = None
        out = owner._cache.active.attend(query, scale, Rule(mask, softcap, s_aux))
        return out.transpose(1, 2).contiguous(), None

    return attention


def _unregister(name: str, model: weakref.ref[PreTrainedModel]) -> None:
    """Leave no entry behind, and the model with the attention that it came with."""
    original, alive = _originals.pop(name), model()
    if alive is not None and alive.config._attn_implementation == name:
        alive.set_attn_implementation(original)
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)
