"""`tidekv run` from request to answer: read, report, stream. The work is done by `Model` and `Run`; prints only."""

from __future__ import annotations

import json
import time

from tidekv_cli import interrupts
from tidekv_cli.documents import read_documents
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.environment import Environment
from tidekv_cli.errors import ExitCode, Interrupted, TideError, UsageError
from tidekv_cli.kept_file import KeptFile
from tidekv_cli.model import Model
from tidekv_cli.outcome import outcome_document
from tidekv_cli.report import Reporter
from tidekv_cli.request import RunRequest
from tidekv_cli.run import Run


class Runner:
    """One run of the command."""

    def __init__(self, request: RunRequest, environment: Environment) -> None:
        self._request = request
        self._environment = environment
        self._reporter = Reporter(environment, request.quiet, request.verbose)
        self._began = time.perf_counter()
        self._late: UsageError | None = None  # what failed beside the answer

    def run(self) -> ExitCode:
        """Do it all; the exit code says whether it was interrupted."""
        request = self._request
        if self._environment.stdout is None:
            raise UsageError("standard output is closed, so there is no place for the answer", "do not close it")
        model = Model(request, self._environment.environ, self._reporter.note, self._reporter.warning)
        sampling = SamplingSettings(request.temperature, request.top_p, request.seed)  # refused before the work
        for flag in sampling.ignored:
            self._reporter.warning(f"{flag} changes nothing at temperature 0, which is greedy: give --temperature")
        if request.kept is not None:
            KeptFile(request.kept).check(request.documents)
        documents = read_documents(request.documents, self._environment, request.encoding, request.errors)
        model.open()
        if request.kept is not None:
            KeptFile(request.kept).check([model.files.path])
        with self._reporter.tokenize_progress() as progress:
            run = model.plan(
                documents,
                request.prompt,
                request.system,
                raw=request.raw,
                template_arguments=request.template_arguments,
                truncate=request.truncate,
                allow_beyond_window=request.allow_beyond_window,
                record_kept=request.kept is not None,
                progress=progress,
            )
        try:
            run.check()
        except TideError:
            if request.dry_run:
                self._reporter.plan(run.outcome)
            raise
        self._reporter.plan(run.outcome)
        if request.dry_run:
            return self._end(run)
        try:
            self._answer(run)
        except KeyboardInterrupt:
            interrupts.settle()
            run.outcome.finish_reason = "interrupted"
            self._end(run)
            self._reporter.error(Interrupted("interrupted", "start it again"))
            return ExitCode.INTERRUPTED
        return self._end(run)

    def _answer(self, run: Run) -> None:
        """Prefill and stream; an answer that is cut short is shown as far as it came."""
        request, shown = self._request, 0
        with self._reporter.prefill_progress(len(run.token_ids)) as progress:
            run.prefill(progress)
        if request.kept is not None:
            self._write_kept(request.kept, run)
        pieces = run.generate(request.temperature, request.top_p, request.seed, request.stop)
        try:
            for piece in pieces:
                self._show(piece)
                shown += len(piece)
        except KeyboardInterrupt:
            pieces.close()
            self._finish_text(run.outcome.text, shown)
            raise
        self._finish_text(run.outcome.text, shown)

    def _write_kept(self, name: str, run: Run) -> None:
        """A file that cannot be written after all must not cost the answer."""
        try:
            KeptFile(name).write(list(run.token_ids), run.kept)
        except UsageError as error:
            self._late = error
            run.outcome.warnings.append(error.message)

    def _finish_text(self, text: str, shown: int) -> None:
        self._show(text[shown:])
        if self._streaming:
            self._environment.write("\n")
        elif not self._request.json:
            self._environment.write(text + "\n")

    @property
    def _streaming(self) -> bool:
        return self._request.stream and not self._request.json

    def _show(self, text: str) -> None:
        if text and self._streaming:
            self._environment.write(text)

    def _end(self, run: Run) -> ExitCode:
        outcome = run.outcome
        outcome.total_s = time.perf_counter() - self._began
        self._reporter.finish(outcome)
        if self._request.json:
            self._environment.write(json.dumps(outcome_document(outcome), ensure_ascii=False) + "\n")
        if self._late is None:
            return ExitCode.DONE
        self._reporter.error(self._late)
        return self._late.code
