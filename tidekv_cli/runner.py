"""`tidekv run` from request to answer: read, plan, report, prefill, stream. Prints through the reporter only."""

from __future__ import annotations

import json
import time
from typing import Any

from tidekv_cli.catalog import DEFAULT_MODEL
from tidekv_cli.device import detect_device
from tidekv_cli.documents import Document, read_documents
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.environment import Environment
from tidekv_cli.errors import (
    ExitCode,
    Interrupted,
    MemoryExhaustedError,
    ModelError,
    TideError,
    UsageError,
    WindowError,
    is_out_of_memory,
)
from tidekv_cli.kept_file import KeptFile
from tidekv_cli.model_spec import ModelFiles, inspect_model
from tidekv_cli.outcome import Outcome, outcome_document
from tidekv_cli.plan import Plan
from tidekv_cli.plan_settings import PlanSettings
from tidekv_cli.report import Reporter
from tidekv_cli.request import RunRequest, first_given
from tidekv_cli.room import Room
from tidekv_cli.settings import load_settings
from tidekv_cli.setup import Setup, set_up
from tidekv_cli.sources import resolve_model
from tidekv_cli.units import format_bytes


class Runner:
    """One run of the command."""

    def __init__(self, request: RunRequest, environment: Environment) -> None:
        self._request = request
        self._environment = environment
        self._reporter = Reporter(environment, request.quiet, request.verbose)
        self._began = time.perf_counter()
        self._warnings: list[str] = []
        self._late: UsageError | None = None  # what failed beside the answer

    def run(self) -> ExitCode:
        """Do it all; the exit code says whether it was interrupted."""
        request, environ = self._request, self._environment.environ
        if self._environment.stdout is None:
            raise UsageError("standard output is closed, so there is no place for the answer", "do not close it")
        config = load_settings(environ)
        setup = set_up(request, config, environ)
        sampling = SamplingSettings(request.temperature, request.top_p, request.seed)
        if request.kept is not None:
            KeptFile(request.kept).check(request.documents)
        documents = read_documents(request.documents, self._environment, request.encoding, request.errors)
        name = first_given(request.model, config.get("model"), DEFAULT_MODEL)
        source = resolve_model(name, environ, request.offline, self._reporter.note)
        if request.kept is not None:
            KeptFile(request.kept).check([source.path])
        files = inspect_model(source.path, name)
        source.fetch_tokenizer()
        outcome, ids, tokenizer = self._prepare(name, files, setup, documents)
        self._reporter.plan(outcome)
        if request.dry_run:
            return self._end(outcome)
        try:
            source.fetch_weights()
            self._generate(outcome, files, tokenizer, ids, sampling, setup.ceiling_bytes)
        except KeyboardInterrupt:
            outcome.finish_reason = "interrupted"
            self._end(outcome)
            self._reporter.error(Interrupted("interrupted", "start it again"))
            return ExitCode.INTERRUPTED
        return self._end(outcome)

    def _prepare(
        self, name: str, files: ModelFiles, setup: Setup, documents: list[Document]
    ) -> tuple[Outcome, list[int], Any]:
        """Tokenize, truncate if allowed, and plan. Raises before any weight is loaded if it cannot work."""
        from tidekv_cli.loading import load_tokenizer
        from tidekv_cli.prompt import build_prompt, truncate

        request = self._request
        fitter = setup.fitter()
        tokenizer = load_tokenizer(files)
        if not request.raw and not getattr(tokenizer, "chat_template", None):
            self._warn("the model has no chat template; the prompt is given to it as it is")
        prompt = build_prompt(
            tokenizer, documents, request.prompt, request.system, request.raw, request.template_arguments
        )
        _check_vocabulary(files, prompt.token_ids)
        settings = setup.plan_settings(files.spec, files.config, record_kept=request.kept is not None)
        plan = fitter.plan(settings, len(prompt.token_ids))
        allowed = min(self._window_left(settings), _or_no_limit(plan.memory_prompt_tokens))
        if request.truncate != "error" and len(prompt.token_ids) > allowed:
            try:
                prompt = truncate(prompt, allowed, request.truncate)
            except WindowError:  # nothing of the documents would be left
                if allowed == self._window_left(settings):
                    raise
            else:
                self._warn(f"{prompt.truncated_tokens} document tokens were dropped ({request.truncate})")
                plan = fitter.plan(settings, len(prompt.token_ids))
        outcome = Outcome(
            model_name=name,
            model_source=str(files.path),
            device=setup.device,
            profile_name=setup.profile.name,
            choice=setup.choice,
            plan=plan,
            document_tokens=[(d.path, n) for d, n in zip(documents, prompt.document_tokens, strict=True)],
            prompt_tokens=len(prompt.token_ids),
            truncated_tokens=prompt.truncated_tokens,
            warnings=self._warnings,
        )
        try:
            if not plan.fits:
                raise fitter.refusal(plan)
            self._check_window(plan)
        except TideError:
            if request.dry_run:
                self._reporter.plan(outcome)
            raise
        return outcome, prompt.token_ids, tokenizer

    def _window_left(self, settings: PlanSettings) -> int:
        """The longest prompt that the model's window takes."""
        window = None if self._request.allow_beyond_window else settings.spec.context_window
        return max(_or_no_limit(window) - settings.max_new_tokens, 0)

    def _check_window(self, plan: Plan) -> None:
        window, new = plan.settings.spec.context_window, plan.settings.max_new_tokens
        total = plan.prompt_tokens + new
        if window is None or total <= window:
            return
        message = (
            f"the prompt's {plan.prompt_tokens} tokens and {new} new ones are {total},"
            f" more than the model's window of {window}"
        )
        if not self._request.allow_beyond_window:
            ways = ["--truncate middle"] if new < window else []
            ways += ["fewer --max-new-tokens"] if plan.prompt_tokens < window else []
            raise WindowError(message, f"use {', '.join(ways)} or --allow-beyond-window to try anyway")
        self._warn(message)

    def _generate(
        self,
        outcome: Outcome,
        files: ModelFiles,
        tokenizer: Any,
        ids: list[int],
        sampling: SamplingSettings,
        ceiling_bytes: int | None,
    ) -> None:
        """Load, prefill and stream; fills `outcome` as it goes. Live tensors stay below the ceiling."""
        import torch

        from tidekv_cli.assembly import engine_settings, torch_dtype
        from tidekv_cli.engine.attention import choose_attention
        from tidekv_cli.engine.meter import process_peak_bytes
        from tidekv_cli.engine.session import Session
        from tidekv_cli.loading import load_model

        request, choice, plan = self._request, outcome.choice, outcome.plan
        began = time.perf_counter()
        attention = choose_attention(choice.attention, torch.device(outcome.device.address))
        settings = engine_settings(plan.settings, len(ids), attention)
        room = Room(
            lambda: detect_device(outcome.device.address).free_bytes,
            _needed_by_a_chunk(plan),
            len(ids) if settings.schedule == "oneshot" else settings.chunk_size,
        )
        try:
            loaded = load_model(files, torch_dtype(plan.settings))
            session = Session(loaded.model, loaded.end_token_ids)
            outcome.load_s = time.perf_counter() - began
            began = time.perf_counter()
            with self._reporter.prefill_progress(len(ids)) as progress:
                prompt, outcome.live_peak_bytes = session.prefill(ids, settings, progress, room.shortage, ceiling_bytes)
            for change in prompt.lowered:
                self._warn(change)
            outcome.prefill_s, outcome.scoring_s = prompt.prefill_s, prompt.scoring_s
            outcome.cache_bytes = sum(store.nbytes for store in prompt.cache)
            outcome.cache_tokens_per_layer = [store.length for store in prompt.cache]
            if request.kept is not None:
                self._write_kept(request.kept, ids, prompt.kept)
            self._stream(outcome, session.generate(prompt, sampling, choice.max_new_tokens), tokenizer, began)
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

    def _stream(self, outcome: Outcome, tokens: Any, tokenizer: Any, began: float) -> None:
        """Show the answer as it comes; `began` is when the prefill did."""
        from tidekv_cli.text_stream import TextStream

        stream = TextStream(tokenizer, self._request.stop)
        first: float | None = None
        outcome.finish_reason = "stop"
        try:
            for token in tokens:
                now = time.perf_counter()
                if first is None:
                    first, outcome.first_token_s = now, now - began
                outcome.answer_tokens += 1
                outcome.decode_s = now - first
                self._show(outcome, stream.push(token))
                if stream.stopped:
                    break
            else:
                if outcome.answer_tokens == outcome.choice.max_new_tokens:
                    outcome.finish_reason = "length"
        except KeyboardInterrupt:
            self._finish_text(outcome, stream.close())
            raise
        self._finish_text(outcome, stream.close())

    def _write_kept(self, name: str, ids: list[int], kept: list[Any]) -> None:
        """A file that cannot be written after all must not cost the answer."""
        try:
            KeptFile(name).write(ids, kept)
        except UsageError as error:
            self._late = error
            self._warnings.append(error.message)

    def _finish_text(self, outcome: Outcome, rest: str) -> None:
        self._show(outcome, rest)
        if self._streaming:
            self._environment.write("\n")
        elif not self._request.json:
            self._environment.write(outcome.text + "\n")

    @property
    def _streaming(self) -> bool:
        return self._request.stream and not self._request.json

    def _show(self, outcome: Outcome, text: str) -> None:
        outcome.text += text
        if text and self._streaming:
            self._environment.write(text)

    def _warn(self, text: str) -> None:
        self._warnings.append(text)
        self._reporter.warning(text)

    def _end(self, outcome: Outcome) -> ExitCode:
        outcome.total_s = time.perf_counter() - self._began
        self._reporter.finish(outcome)
        if self._request.json:
            self._environment.write(json.dumps(outcome_document(outcome), ensure_ascii=False) + "\n")
        if self._late is None:
            return ExitCode.DONE
        self._reporter.error(self._late)
        return self._late.code


def _needed_by_a_chunk(plan: Plan) -> int:
    """Bytes that come on top of what is held while a chunk runs and its layer is evicted."""
    planned = plan.bytes
    needed = planned.workspace + planned.scoring + plan.cache_bytes // plan.settings.spec.layers
    return needed + planned.bridge + planned.active_kv if plan.settings.method.schedule == "oneshot" else needed


def _or_no_limit(tokens: int | None) -> int:
    return 1 << 62 if tokens is None else tokens


def _check_vocabulary(files: ModelFiles, ids: list[int]) -> None:
    highest = max(ids, default=0)
    if highest >= files.spec.vocab_size:
        raise ModelError(
            f"the tokenizer of {files.path} gives token {highest}, and the model knows {files.spec.vocab_size}",
            "fetch or copy the model again; tokenizer and weights are of different models",
        )
