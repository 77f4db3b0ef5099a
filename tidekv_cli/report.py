"""Everything a person reads on stderr, and the tables of the list commands. The only user of rich."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tidekv_cli.capacity import Capacity, Row
from tidekv_cli.device import Device
from tidekv_cli.environment import Environment
from tidekv_cli.errors import TideError
from tidekv_cli.fitting import raising_flags
from tidekv_cli.outcome import Outcome
from tidekv_cli.plan import Plan, PlannedBytes
from tidekv_cli.plan_settings import PlanSettings
from tidekv_cli.units import format_bytes

_PLAIN_WIDTH = 100


class Reporter:
    """Writes to stderr: colours and bars on a terminal only, nothing but errors when `quiet`."""

    def __init__(self, environment: Environment, quiet: bool = False, verbose: bool = False) -> None:
        self._environment, self._quiet, self._verbose = environment, quiet, verbose
        terminal = environment.stderr.isatty()
        self._console = Console(
            file=environment.stderr,
            force_terminal=terminal,
            no_color=bool(environment.environ.get("NO_COLOR")) or not terminal,
            width=None if terminal else _PLAIN_WIDTH,
            highlight=False,
            soft_wrap=not terminal,
        )

    def note(self, text: str) -> None:
        """One line that helps but is not needed."""
        if not self._quiet:
            self._console.print(text, style="dim", markup=False)

    def warning(self, text: str) -> None:
        """`warning: ...`."""
        if not self._quiet:
            self._console.print(Text("warning: ", style="yellow") + Text(text))

    def error(self, error: TideError) -> None:
        """`error: ...`, then `hint: ...`, each one line."""
        self._console.print(Text("error: ", style="bold red") + Text(error.message), soft_wrap=True)
        self._console.print(Text("hint: ", style="cyan") + Text(error.hint), soft_wrap=True)

    def plan(self, outcome: Outcome) -> None:
        """The memory report, before the first token."""
        if self._quiet:
            return
        plan, settings = outcome.plan, outcome.plan.settings
        self._setting(outcome.model_name, outcome.device, outcome.profile_name, settings)
        for change in plan.changes:
            self._line(f"lowered   {change}")
        cut = f", {outcome.truncated_tokens} dropped" if outcome.truncated_tokens else ""
        self._line(f"prompt    {outcome.prompt_tokens} tokens{cut}, up to {settings.max_new_tokens} new ones")
        self._console.print(_bytes_table(plan.bytes, settings))
        self._line(_headroom(plan, outcome.device))
        if plan.full_cache_peak is not None:
            about = format_bytes(plan.full_cache_peak)
            self._line(f"nothing need be evicted: --budget full would fit, with about {about}")
        self._line(_estimate(plan))

    def capacity(
        self,
        model: str,
        device: Device,
        profile_name: str,
        capacity: Capacity,
        gains: Mapping[str, int],
        lowered_context: int | None,
    ) -> None:
        """The answer of a probe, on stdout; `gains` are flags that raise it and what they raise it to, in tokens.

        `lowered_context` is what `run` comes to by lowering things itself.
        """
        plan = capacity.plan
        self._setting(model, device, profile_name, plan.settings)
        rows = [
            (
                str(row.context_tokens),
                ("yes" if row.fits else "no") + ("" if row.within_window else ", beyond the window"),
                *(format_bytes(count) for count in (row.bytes.weights, row.bytes.cache)),
                format_bytes(row.bytes.bridge + row.bytes.active_kv),
                format_bytes(row.bytes.workspace + row.bytes.scoring),
                format_bytes(row.bytes.peak),
                "unknown" if row.headroom_bytes is None else format_bytes(row.headroom_bytes),
                format_bytes(row.bytes.live),
                *_measured(row),
            )
            for row in capacity.rows
        ]
        planned = ("context", "fits", "weights", "cache", "bridge and KV", "workspace", "peak", "headroom")
        headers = (*planned, "live peak", "measured", "process peak")
        measured = any(row.measured_peak_bytes is not None for row in capacity.rows)
        columns = len(headers) if measured else len(planned)
        text = plain_table(headers[:columns], [row[:columns] for row in rows])
        text += f"\n{_largest(plan)}\n"
        if gains:
            raised = ", ".join(f"{flag} to {tokens}" for flag, tokens in gains.items())
            text += f"by memory, {raised}\n"
        if lowered_context is not None:
            text += f"`tidekv run` lowers chunk, score block and budget by itself: up to {lowered_context} tokens\n"
        self._environment.write(text)

    def _setting(self, model: str, device: Device, profile_name: str, settings: PlanSettings) -> None:
        """Model, device and method, three lines."""
        method, sources = settings.method, device.sources
        kept_whole = "full" if settings.method.selector_info.budgeted else "all"
        budget = kept_whole if settings.budget_tokens is None else settings.budget_tokens
        self._line(f"model     {model}  {settings.spec.architecture}, {settings.dtype}")
        self._line(
            f"device    {device.name} ({device.kind}, profile {profile_name}):"
            f" {format_bytes(device.free_bytes)} free of {format_bytes(device.total_bytes)}"
            f" ({sources.get('free', '?')}; {sources.get('total', '?')})"
        )
        self._line(
            f"method    {method.name}: {method.schedule}, {method.selector}, {method.budget_policy}, {method.kv_store};"
            f" chunk {settings.chunk_size}, score block {settings.score_block}, budget {budget}"
        )

    def _line(self, text: str) -> None:
        if text and not self._quiet:
            self._console.print(text, markup=False)

    def finish(self, outcome: Outcome) -> None:
        """What was measured, after the answer."""
        if self._quiet or outcome.prefill_s is None:
            return
        rate, plan = outcome.decode_tokens_per_s, outcome.plan
        parts = [
            f"prefill {outcome.prefill_s:.2f} s",
            f"first token {outcome.first_token_s or 0.0:.2f} s",
            f"decode {rate:.1f} tokens/s" if rate else "",
            f"live peak {format_bytes(outcome.live_peak_bytes)} ({format_bytes(plan.bytes.live)} planned)",
            *_peaks(outcome),
            f"cache {format_bytes(outcome.cache_bytes)}",
        ]
        self.note(", ".join(part for part in parts if part))
        if self._verbose and outcome.scoring_s is not None:
            self.note(f"load {outcome.load_s or 0:.2f} s, scoring {1000 * outcome.scoring_s:.0f} ms of the prefill")

    @contextmanager
    def prefill_progress(self, prompt_tokens: int) -> Iterator[Callable[[int, int], None]]:
        """A bar over layers × chunks with tokens per second and time left, on a terminal only."""
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        with self._bar("prefill", _TokenRate(prompt_tokens), *times) as update:
            yield update

    @contextmanager
    def tokenize_progress(self) -> Iterator[Callable[[int, int], None]]:
        """A bar over the prompt's characters, on a terminal only."""
        with self._bar("tokenize", TimeElapsedColumn()) as update:
            yield update

    @contextmanager
    def _bar(self, name: str, *columns: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
        if self._quiet or not self._console.is_terminal:
            yield lambda done, total: None
            return
        shown = (TextColumn(name), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), *columns)
        with Progress(*shown, console=self._console, transient=True) as bar:
            task = bar.add_task(name, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _peaks(outcome: Outcome) -> list[str]:
    """What was taken in all: on a card torch's figures, which its context comes on top of, and the host's apart."""
    planned = f"({format_bytes(outcome.plan.bytes.peak)} planned)"
    process = f"process peak {format_bytes(outcome.process_peak_bytes)}"
    if outcome.reserved_peak_bytes is None:
        return [f"{process} {planned}"]
    reserved = f"reserved peak {format_bytes(outcome.reserved_peak_bytes)}"
    allocated = f"allocated peak {format_bytes(outcome.allocated_peak_bytes)}"
    if outcome.device.unified:
        return [allocated, f"{reserved} and {process} {planned}"]
    return [allocated, f"{reserved} {planned}", f"{process} on the host"]


def _measured(row: Row) -> tuple[str, str]:
    """Live and process peak of a real run; nothing where there was none."""
    if row.failure is not None:
        return "memory ran out", ""
    peaks = (row.measured_peak_bytes, row.process_peak_bytes)
    live, process = ("" if peak is None else format_bytes(peak) for peak in peaks)
    return live, process


def _bytes_table(planned: PlannedBytes, settings: PlanSettings) -> Table:
    """Items and their sum; of a reserve its parts, where it has several."""
    parts = settings.reserve_items if len(settings.reserve_items) > 1 else {}
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("item")
    table.add_column("bytes", justify="right")
    for name, count in (
        ("weights", planned.weights),
        ("cache at the peak", planned.cache),
        ("hidden bridge", planned.bridge),
        ("active-layer KV", planned.active_kv),
        ("chunk workspace", planned.workspace),
        ("scoring workspace", planned.scoring),
        ("reserve", planned.reserve),
        *((f"  {name}", size) for name, size in parts.items()),
        ("predicted peak", planned.peak),
    ):
        table.add_row(f"  {name}", format_bytes(count))
    return table


def _headroom(plan: Plan, device: Device) -> str:
    free, headroom = plan.settings.free_bytes, plan.headroom_bytes
    if free is None or headroom is None:
        return "headroom  unknown: free memory cannot be read"
    limited = "" if free == device.free_bytes else f", limited to {format_bytes(free)} by --memory-limit"
    percent = f" ({100 * headroom / free:.1f} % of what is free{limited})" if headroom >= 0 and free else limited
    return (
        f"final cache  {format_bytes(plan.cache_bytes)}\nheadroom  {format_bytes(headroom)}{percent}\n{_largest(plan)}"
    )


def _largest(plan: Plan) -> str:
    window, limit, new = plan.settings.context_limit, plan.max_context_tokens, plan.settings.max_new_tokens
    if not limit:
        return "maximum feasible context  none fits at this setting"
    by_window = window is not None and limit == window
    more = "a model with a longer window" if by_window else " or ".join(raising_flags(plan.settings))
    raised = f"; {more} would raise it" if more else ""
    return (
        f"maximum feasible context  {limit} tokens (prompt {max(limit - new, 0)} and {new} new),"
        f" limited by {'the window' if by_window else 'memory'}"
        f" (by memory alone {'at least ' if plan.memory_prompt_tokens == window else ''}{plan.memory_context_tokens})"
        f"{raised}"
    )


def _estimate(plan: Plan) -> str:
    guess = plan.estimate
    if guess.ttft_s is None or guess.decode_tokens_per_s is None:
        return ""
    return (
        f"estimate  at best {guess.ttft_s:.3g} s to the first token, then {guess.decode_tokens_per_s:.3g} tokens/s"
        " (from the profile's rates, not measured)"
    )


class _TokenRate(ProgressColumn):
    """Prompt tokens per second, counted as if every layer × chunk step took its share of the prompt."""

    def __init__(self, prompt_tokens: int) -> None:
        super().__init__()
        self._tokens = prompt_tokens

    def render(self, task: Task) -> Text:
        """See rich."""
        if not task.total or not task.elapsed:
            return Text("")
        return Text(f"{task.completed / task.total * self._tokens / task.elapsed:.0f} tokens/s")


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without lines, for stdout."""
    table = Table(box=None, pad_edge=False, header_style="")
    for header in headers:
        table.add_column(header, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out = io.StringIO()
    Console(file=out, width=400, no_color=True, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
