"""One prompt on its way: planned, prefilled, generated from. Prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from tidekv_cli.device import detect_device
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.errors import MemoryExhaustedError, TideError, UsageError, WindowError, is_out_of_memory
from tidekv_cli.outcome import Outcome, outcome_document
from tidekv_cli.plan import Plan
from tidekv_cli.request import check_stop
from tidekv_cli.room import Room
from tidekv_cli.units import format_bytes


class Opened(Protocol):
    """The model that a prompt is for."""

    @property
    def tokenizer(self) -> Any:
        """The model's own."""

    @property
    def ceiling_bytes(self) -> int | None:
        """What live tensors may take at most, None for all there is."""

    def refusal(self, plan: Plan) -> TideError:
        """Why a plan that does not fit does not, and what would help."""

    def session(self) -> tuple[Any, float]:
        """The engine with the weights loaded, and the seconds that loading took now."""


class Run:
    """`outcome` is filled on the way, and holds what was reached when something fails."""

    def __init__(
        self,
        model: Opened,
        token_ids: Sequence[int],
        outcome: Outcome,
        allow_beyond_window: bool,
        warn: Callable[[str], None],
    ) -> None:
        self.token_ids, self.outcome = token_ids, outcome
        self._model, self._tell = model, warn
        self._allow_beyond_window = allow_beyond_window
        self._prompt: Any = None
        self._answered = False
        self._made = self._began = time.perf_counter()

    @property
    def plan(self) -> Plan:
        """Settings, bytes by item, headroom, and the longest context that fits."""
        return self.outcome.plan

    @property
    def kept(self) -> list[Any]:
        """Each layer's kept positions, int64, ascending, if they were asked for; after `prefill`.

        [Hkv, K], or a list by head where heads keep different numbers.
        """
        return [] if self._prompt is None else list(self._prompt.kept)

    def check(self) -> None:
        """Raise `DoesNotFitError` or `WindowError` for a prompt that has no place in memory or window."""
        plan = self.plan
        if not plan.fits:
            raise self._model.refusal(self.plan)
        window, new = plan.settings.context_limit, plan.settings.max_new_tokens
        total = plan.prompt_tokens + new
        if window is None or total <= window:
            return
        if plan.settings.slots:  # new tokens take no places
            message = f"the prompt's {plan.prompt_tokens} tokens are more than the model's window of {window - new}"
        else:
            message = (
                f"the prompt's {plan.prompt_tokens} tokens and {new} new ones are {total},"
                f" more than the model's window of {window}"
            )
        if not self._allow_beyond_window:
            ways = ["--truncate middle"] if new < window else []
            ways += ["fewer --max-new-tokens"] if plan.prompt_tokens < window and not plan.settings.slots else []
            ways += ["--allow-beyond-window to try anyway"]
            raise WindowError(message, f"use {', or '.join(ways)}")
        if message not in self.outcome.warnings:
            self.warn(message)

    def prefill(self, progress: Callable[[int, int], None] | None = None, checked: bool = True) -> None:
        """Load the weights if they are not, and build the compact cache; `progress(done, total)` hears of each chunk.

        Raises as `check` does, unless it is to be tried all the same, and `MemoryExhaustedError`, after which it may be
        called again. Raises `UsageError` where the cache is there.
        """
        from tidekv_cli.assembly import engine_settings
        from tidekv_cli.engine.backends import attention_backend
        from tidekv_cli.engine.memory import unused_bytes

        if self._prompt is not None:
            raise UsageError("this run is prefilled already", "plan the prompt again")
        if checked:
            self.check()
        outcome, plan = self.outcome, self.plan
        attention = attention_backend(plan.settings.attention, plan.settings.device_type)
        settings = engine_settings(plan.settings, len(self.token_ids), attention)
        with self._measured(), self._device_measured():
            session, outcome.load_s = self._model.session()
            room = Room(
                lambda: _available(outcome.device.address, unused_bytes(session.device)),
                _needed_by_a_chunk(plan),
                len(self.token_ids) if settings.schedule == "oneshot" else settings.chunk_size,
            )
            self._began = time.perf_counter()
            self._prompt, outcome.live_peak_bytes = session.prefill(
                self.token_ids, settings, progress, room.shortage, self._model.ceiling_bytes
            )
        outcome.lowered = self._prompt.lowered
        for change in outcome.lowered:
            self.warn(change)
        outcome.prefill_s, outcome.scoring_s = self._prompt.prefill_s, self._prompt.scoring_s
        outcome.cache_bytes = sum(store.nbytes for store in self._prompt.cache)
        outcome.cache_tokens_per_layer = [store.length for store in self._prompt.cache]

    def generate(
        self, temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None, stop: str | Sequence[str] = ()
    ) -> Generator[str, None, None]:
        """The answer, piece by piece, as its text becomes certain; prefills first if that was not done. Once only.

        Greedy at temperature 0. It ends at an end token, before a text of `stop`, or after the planned number of
        tokens; `outcome.finish_reason` says which. Raises `UsageError` for impossible sampling and for a second answer,
        and as `prefill`.
        """
        texts = (stop,) if isinstance(stop, str) else tuple(stop)
        check_stop(texts)
        return self._pieces(self.tokens(temperature, top_p, seed), texts)

    def tokens(self, temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None) -> Iterator[int]:
        """The answer's token ids, as they are chosen: `generate` without text."""
        sampling = SamplingSettings(temperature, top_p, seed)
        if self._answered:
            raise UsageError("this run has its answer already, and its cache holds it", "plan the prompt again")
        if self._prompt is None:
            self.prefill()
        self._answered = True
        return self._tokens(sampling)

    def _tokens(self, sampling: SamplingSettings) -> Iterator[int]:
        outcome, limit = self.outcome, self.plan.settings.max_new_tokens
        session, _ = self._model.session()
        first: float | None = None
        outcome.finish_reason = "interrupted"
        with self._measured():
            for token in session.generate(self._prompt, sampling, limit):
                now = time.perf_counter()
                if first is None:
                    first, outcome.first_token_s = now, now - self._began
                outcome.answer_tokens += 1
                outcome.decode_s = now - first
                yield token
        outcome.finish_reason = "length" if outcome.answer_tokens == limit else "stop"

    def _pieces(self, tokens: Iterator[int], stop: Sequence[str]) -> Generator[str, None, None]:
        from tidekv_cli.text_stream import TextStream

        stream, outcome = TextStream(self._model.tokenizer, stop), self.outcome
        try:
            for token in tokens:
                piece = stream.push(token)
                outcome.text += piece
                if piece:
                    yield piece
                if stream.stopped:
                    outcome.finish_reason = "stop"
                    break
        finally:
            rest = stream.close()
            outcome.text += rest
        if rest:
            yield rest

    def report(self) -> dict[str, Any]:
        """What `tidekv run --json` prints: plan, answer, times and peaks, as far as the run has come."""
        return outcome_document(self.outcome)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """What fails for want of memory is told as that; what it took is read however it ends."""
        from tidekv_cli.engine.meter import process_peak_bytes

        outcome, plan = self.outcome, self.plan
        try:
            yield
        except Exception as error:
            if isinstance(error, TideError) or not is_out_of_memory(error):
                raise
            raise MemoryExhaustedError(
                f"memory ran out with a predicted peak of {format_bytes(plan.bytes.peak)}"
                f" and {format_bytes(plan.settings.free_bytes)} free: {str(error)[:200]}",
                "use a smaller --chunk-size or --budget, or --dtype bfloat16",
            ) from error
        finally:
            outcome.process_peak_bytes = process_peak_bytes()
            outcome.total_s = time.perf_counter() - self._made

    @contextmanager
    def _device_measured(self) -> Iterator[None]:
        """The device's peaks are those of the prefill: another run's may begin before this one's answer ends."""
        from tidekv_cli.engine.memory import device_peaks

        outcome = self.outcome
        try:
            yield
        finally:
            outcome.allocated_peak_bytes, outcome.reserved_peak_bytes = device_peaks(outcome.device.address)

    def warn(self, text: str) -> None:
        """Tell of something that may not be expected, and put it into the report."""
        self.outcome.warnings.append(text)
        self._tell(text)


def _available(address: str, unused: int) -> int | None:
    """Bytes free on the device, with those that this process holds there and does not use."""
    free = detect_device(address).free_bytes
    return None if free is None else free + unused


def _needed_by_a_chunk(plan: Plan) -> int:
    """Bytes that come on top of what is held while a chunk runs and its layer is evicted.

    A token-major cache is made in the first chunk; the plan has told whether there is room for it.
    """
    planned = plan.bytes
    if plan.settings.token_major:
        return planned.workspace + planned.scoring + planned.active_kv
    needed = planned.workspace + planned.scoring + plan.cache_bytes // plan.settings.spec.layers
    return needed + planned.bridge + planned.active_kv if plan.settings.method.schedule == "oneshot" else needed
