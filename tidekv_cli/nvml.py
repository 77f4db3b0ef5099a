"""NVIDIA cards as the driver's library reports them, by UUID. Knows no CUDA, and NVML's order means nothing here.

Field semantics: https://docs.nvidia.com/deploy/nvml-api, nvmlMemory_v2_t and "Multi Instance GPU Management".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tidekv_cli.machine import reason_of

_NOT_SUPPORTED, _NOT_FOUND, _FUNCTION_NOT_FOUND = 3, 6, 13
_NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE, as an unsigned long long


@dataclass(frozen=True, slots=True)
class NvmlCard:
    """A card, or a MIG slice of one. Bytes are None where NVML does not give them; `source` says which call did.

    `partitioned` cards are in MIG mode: CUDA uses their slices, never the card. `parent` is a slice's card.
    `reserved_bytes` is what driver and firmware keep; only memory v2 tells it apart.
    """

    uuid: str
    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    reserved_bytes: int | None = None
    source: str = "NVML"
    partitioned: bool = False
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class NvmlReading:
    """Cards and slices that answered, the driver's version, and a note for all that did not."""

    cards: tuple[NvmlCard, ...]
    driver: str | None
    notes: tuple[str, ...]

    def find(self, uuid: str) -> NvmlCard | None:
        """The one card or slice whose UUID starts with `uuid`, as CUDA_VISIBLE_DEVICES may shorten it."""
        found = [card for card in self.cards if card.uuid == uuid] or [
            card for card in self.cards if card.uuid.startswith(uuid)
        ]
        return found[0] if len(found) == 1 else None

    def only_slice(self, parent: str) -> NvmlCard | None:
        """The slice of the card `parent`, if it has exactly one."""
        slices = [card for card in self.cards if card.parent == parent]
        return slices[0] if len(slices) == 1 else None


def read_nvml(load: Callable[[], Any]) -> NvmlReading:
    """Everything that the module from `load` tells; raises nothing, whatever fails."""
    try:
        nvml = load()
        nvml.nvmlInit()
    except Exception as error:
        return NvmlReading((), None, (f"NVML cannot be started: {_reason(error)}",))
    try:
        return _Reader(nvml).read()
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()


class _Reader:
    """One session with a started NVML."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._notes: list[str] = []

    def read(self) -> NvmlReading:
        driver = self._try("NVML driver version", lambda: _text(self._nvml.nvmlSystemGetDriverVersion()))
        count = self._try("NVML count of devices", lambda: self._nvml.nvmlDeviceGetCount()) or 0
        cards = tuple(card for index in range(count) for card in self._card_and_slices(index))
        return NvmlReading(cards, driver, tuple(self._notes))

    def _card_and_slices(self, index: int) -> Iterator[NvmlCard]:
        what = f"NVML device {index}"
        handle = self._try(what, lambda: self._nvml.nvmlDeviceGetHandleByIndex(index))
        if handle is None:
            return
        partitioned = self._partitioned(handle, what)
        card = self._card(handle, what, partitioned=partitioned)
        if card is not None:
            yield card
        if not partitioned:
            return
        for slot in range(self._try(f"{what} slices", lambda: self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
            at = f"{what} slice {slot}"
            part = self._try(at, partial(self._slice, handle, slot), (_NOT_FOUND,))
            found = None if part is None else self._card(part, at, parent=card.uuid if card else None)
            if found is not None:
                yield found

    def _slice(self, handle: Any, slot: int) -> Any:
        return self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)

    def _card(self, handle: Any, what: str, partitioned: bool = False, parent: str | None = None) -> NvmlCard | None:
        uuid = self._try(f"{what} UUID", lambda: _text(self._nvml.nvmlDeviceGetUUID(handle)))
        if uuid is None:
            return None
        name = self._try(f"{what} name", lambda: _text(self._nvml.nvmlDeviceGetName(handle))) or ""
        memory, source = self._memory(handle, f"memory of {name or what}")
        return NvmlCard(
            uuid=uuid,
            name=name,
            total_bytes=_known(memory, "total"),
            free_bytes=_known(memory, "free"),
            used_bytes=_known(memory, "used"),
            reserved_bytes=_known(memory, "reserved"),
            source=source,
            partitioned=partitioned,
            parent=parent,
        )

    def _memory(self, handle: Any, what: str) -> tuple[Any, str]:
        """Version 2, else 1, else None; only the last failure is worth a note."""
        with suppress(Exception):
            return self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2), "NVML memory v2"
        return self._try(f"NVML {what}", lambda: self._nvml.nvmlDeviceGetMemoryInfo(handle)), "NVML memory v1"

    def _partitioned(self, handle: Any, what: str) -> bool:
        """MIG mode, which most cards and old drivers do not know."""
        unknown = (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND)
        mode = self._try(f"{what} MIG mode", lambda: self._nvml.nvmlDeviceGetMigMode(handle), unknown)
        return mode is not None and bool(mode[0])

    def _try(self, what: str, call: Callable[[], Any], expected: tuple[int, ...] = ()) -> Any:
        """What `call` returns, or None and a note, without the note for the `expected` codes."""
        try:
            return call()
        except Exception as error:
            if getattr(error, "value", None) not in expected:
                self._notes.append(f"{what}: {_reason(error)}")
            return None


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _known(memory: Any, figure: str) -> int | None:
    value = getattr(memory, figure, None)
    return value if isinstance(value, int) and 0 <= value < _NOT_AVAILABLE else None


def _reason(error: Exception) -> str:
    code = getattr(error, "value", None)
    return reason_of(error) + ("" if code is None else f" (NVML error {code})")
