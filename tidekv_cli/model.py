"""A model that was opened: its files, its device and settings, and from there plans. Prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tidekv_cli.catalog import DEFAULT_MODEL
from tidekv_cli.documents import Document, as_documents, check_text
from tidekv_cli.errors import InputError, ModelError, TideError, UsageError, WindowError
from tidekv_cli.model_shape import model_shape
from tidekv_cli.model_spec import ModelFiles, ModelSpec, inspect_model
from tidekv_cli.outcome import Outcome
from tidekv_cli.plan import Plan
from tidekv_cli.plan_settings import PlanSettings
from tidekv_cli.request import TRUNCATIONS, RunRequest, first_given
from tidekv_cli.run import Run
from tidekv_cli.settings import load_settings
from tidekv_cli.setup import Setup, set_up
from tidekv_cli.sources import resolve_model

Tell = Callable[[str], None]


class Model:
    """Prompts are planned here, one after another; each is a `Run`."""

    def __init__(
        self,
        request: RunRequest,
        environ: Mapping[str, str],
        note: Tell | None = None,
        warn: Tell | None = None,
        compute: bool = True,
    ) -> None:
        """Settle device, profile and settings. Raises `UsageError` and `DeviceError`.

        Without `compute` only figures are wanted, so a profile may stand for a device that is not here.
        """
        self._request, self._environ = request, environ
        self._note, self._tell = note or _silent, warn or _silent
        self.warnings: list[str] = []
        config = load_settings(environ)
        self.name = str(first_given(request.model, config.get("model"), DEFAULT_MODEL))
        self.setup: Setup = set_up(request, config, environ, compute)
        self.fitter = self.setup.fitter()
        self._session: Any = None
        self._files: ModelFiles | None = None
        self._attention: str | None = None
        for warning in self.setup.warnings:
            self._warn(warning)

    def open(self) -> None:
        """Find the model's config, fetching it if need be, and try the attention. Raises `ModelError`."""
        if self._files is None:
            self._source = resolve_model(self.name, self._environ, self._request.offline, self._note)
            self._files = inspect_model(self._source.path, self.name)
            self.shape = self._files.spec, self._files.config
            self._try_attention()

    @property
    def files(self) -> ModelFiles:
        """The model on disk; of one on the hub perhaps only its config. Raises `ModelError` where it is not found."""
        self.open()
        assert self._files is not None
        return self._files

    @cached_property
    def shape(self) -> tuple[ModelSpec, Mapping[str, Any]]:
        """Shapes and config, for which a known alias needs no file. Raises `ModelError`."""
        return model_shape(self.name, self._environ, self._request.offline, self._note)

    def _try_attention(self) -> str:
        """The attention's name, found out once."""
        if self._attention is None:
            chosen = self.setup.attention(self.shape[0])
            self._attention = chosen.name
            for warning in chosen.warnings:
                self._warn(warning)
        return self._attention

    @cached_property
    def tokenizer(self) -> Any:
        """The model's own. Raises `ModelError`."""
        from tidekv_cli.loading import load_tokenizer

        files = self.files
        self._source.fetch_tokenizer()
        return load_tokenizer(files)

    def settings(self, record_kept: bool = False) -> PlanSettings:
        """What a plan starts from."""
        return self.setup.plan_settings(*self.shape, self._try_attention(), record_kept)

    def plan(
        self,
        documents: str | Sequence[Document | str],
        question: str | None = None,
        system: str | None = None,
        *,
        raw: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        truncate: str = "error",
        allow_beyond_window: bool = False,
        record_kept: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Run:
        """Tokenize the documents with the question after them, drop what `truncate` allows, and plan the prompt.

        Whether it fits is in `Run.plan`; `Run.check` raises where it does not. `record_kept` keeps the positions that
        stay for `Run.kept`; `progress` is told the characters tokenized and their number. Raises `UsageError` where
        the chat template refuses or what is given is no text, and `InputError` for a document without any.
        """
        from tidekv_cli.prompt import build_prompt, unknown_arguments
        from tidekv_cli.prompt import truncate as shortened

        if truncate not in TRUNCATIONS:
            raise UsageError(f"truncate {truncate} is not known", f"use one of {', '.join(TRUNCATIONS)}")
        texts = as_documents(documents)
        check_text("the question", question)
        check_text("the system message", system)
        warnings: list[str] = []
        if not raw and not getattr(self.tokenizer, "chat_template", None):
            warnings.append("the model has no chat template; the prompt is given to it as it is")
        arguments = template_arguments or {}
        warnings += [
            f"--template-arg {argument} changes nothing: no chat template in use has such a variable"
            for argument in (arguments if raw else unknown_arguments(self.tokenizer, arguments))
        ]
        prompt = build_prompt(self.tokenizer, texts, question, system, raw, arguments, progress)
        self._check_tokens(prompt.token_ids)
        self._read_memory()
        settings = self.settings(record_kept)
        window = None if allow_beyond_window else settings.context_limit
        window_left = max(_or_no_limit(window) - settings.max_new_tokens, 0)
        plan = self.fitter.plan(settings, len(prompt.token_ids))
        allowed = min(window_left, _or_no_limit(plan.memory_prompt_tokens))
        if truncate != "error" and len(prompt.token_ids) > allowed:
            try:
                prompt = shortened(prompt, allowed, truncate)
            except WindowError:  # nothing of the documents would be left
                if allowed == window_left:
                    raise
            else:
                warnings.append(f"{prompt.truncated_tokens} document tokens were dropped ({truncate})")
                plan = self.fitter.plan(settings, len(prompt.token_ids))
        run = self._run(prompt.token_ids, plan, allow_beyond_window)
        run.outcome.document_tokens = [(d.path, n) for d, n in zip(texts, prompt.document_tokens, strict=True)]
        run.outcome.truncated_tokens = prompt.truncated_tokens
        for warning in warnings:
            run.warn(warning)
        return run

    def plan_tokens(
        self, token_ids: Sequence[int], allow_beyond_window: bool = False, record_kept: bool = False
    ) -> Run:
        """Plan a prompt that is token ids already. Raises `InputError` for none and `UsageError` for unknown ones."""
        try:
            ids = [int(token) for token in token_ids]
        except (TypeError, ValueError) as error:
            raise UsageError(f"token ids are one row of whole numbers: {error}", "give a list of int") from error
        known = self.files.spec.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < known:
            wrong = next(token for token in ids if not 0 <= token < known)
            raise UsageError(f"token {wrong} is not known to the model", f"give ids from 0 to {known - 1}")
        self._check_tokens(ids)
        self._read_memory()
        plan = self.fitter.plan(self.settings(record_kept), len(ids))
        return self._run(ids, plan, allow_beyond_window)

    def _read_memory(self) -> None:
        """Free memory is what is free now, with what this model holds of it already."""
        held = 0 if self._session is None else self._session.held_bytes
        self.setup = self.setup.at_present(held)

    def _run(self, token_ids: Sequence[int], plan: Plan, allow_beyond_window: bool) -> Run:
        outcome = Outcome(
            model_name=self.name,
            model_source=str(self.files.path),
            device=self.setup.device,
            profile_name=self.setup.profile.name,
            plan=plan,
            document_tokens=(),
            prompt_tokens=len(token_ids),
            truncated_tokens=0,
            warnings=list(self.warnings),
        )
        return Run(self, token_ids, outcome, allow_beyond_window, self._tell)

    @property
    def ceiling_bytes(self) -> int | None:
        """What live tensors may take at most where `memory_limit` was given."""
        return self.setup.ceiling_bytes

    def refusal(self, plan: Plan) -> TideError:
        """Why a plan that does not fit does not, and what would help."""
        return self.fitter.refusal(plan)

    def session(self) -> tuple[Any, float]:
        """The engine with the weights loaded, and the seconds that loading took now. Raises `ModelError`."""
        if self._session is not None:
            return self._session, 0.0
        import torch

        from tidekv_cli.assembly import torch_dtype
        from tidekv_cli.engine.session import Session
        from tidekv_cli.loading import end_tokens, load_model

        files, tokenizer = self.files, self.tokenizer
        self._source.fetch_weights()
        began = time.perf_counter()
        device = torch.device(self.setup.device.address)
        loaded = load_model(files, torch_dtype(self.settings()), device)
        self._session = Session(loaded.model, loaded.end_token_ids | end_tokens(tokenizer))
        return self._session, time.perf_counter() - began

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self._tell(text)

    def _check_tokens(self, ids: Sequence[int]) -> None:
        if not ids:
            raise InputError("the prompt has not one token", "give a document or a question")
        highest, known = max(ids), self.files.spec.vocab_size
        if highest >= known:
            raise ModelError(
                f"the tokenizer of {self.files.path} gives token {highest}, and the model knows {known}",
                "fetch or copy the model again; tokenizer and weights are of different models",
            )


def _silent(text: str) -> None:
    pass


def _or_no_limit(tokens: int | None) -> int:
    return 1 << 62 if tokens is None else tokens
