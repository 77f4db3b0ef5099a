"""What the user asked `tidekv run` for, and the settings that follow from flag, config file and profile."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidekv_cli.attention_choice import wished_attention
from tidekv_cli.axes import Value
from tidekv_cli.documents import is_torn
from tidekv_cli.errors import UsageError
from tidekv_cli.methods import DEFAULT_METHOD, Method, choose
from tidekv_cli.profile import DTYPES, MOST_TOKENS, Profile

TRUNCATIONS = ("error", "head", "tail", "middle")


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The flags of `tidekv run` as given; None where the user gave none."""

    documents: tuple[str, ...] = ()
    model: str | None = None
    prompt: str | None = None
    system: str | None = None
    max_new_tokens: int | None = None
    method: str | None = None
    selector: str | None = None
    schedule: str | None = None
    budget_policy: str | None = None
    kv_store: str | None = None
    budget: str | None = None
    chunk_size: int | None = None
    score_block: int | None = None
    attention: str | None = None
    dtype: str | None = None
    device: str | None = None
    profile: str | None = None
    memory_limit: str | None = None
    truncate: str = "error"
    allow_beyond_window: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    raw: bool = False
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    offline: bool = False
    encoding: str = "utf-8"
    errors: str = "strict"
    json: bool = False
    stream: bool = True
    quiet: bool = False
    verbose: bool = False
    dry_run: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)
    kept: str | None = None


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """What the user, the config and the profile say, in tokens. `budget` is a number, `full`, `auto`, or None.

    `attention` holds the backends to try in their order, `wanted_attention` what was asked for. `fixed` names what
    the user or the config said: `chunk_size`, `score_block`, `budget`.
    """

    method: Method
    axis_settings: Mapping[str, Value]
    budget: int | str | None
    chunk_size: int
    score_block: int
    attention: tuple[str, ...]
    wanted_attention: str
    dtype: str
    max_new_tokens: int
    fixed: frozenset[str] = frozenset()


def choose_settings(request: RunRequest, config: Mapping[str, Any], profile: Profile, device_kind: str) -> EngineChoice:
    """Settle every value: flag, then config file, then profile. Raises `UsageError` for impossible ones.

    The budget is settled by `check_budget`, once the selector is there to say what it always keeps.
    """
    _check_text(request)
    method = choose(
        first_given(request.method, config.get("method"), DEFAULT_METHOD),
        request.schedule,
        request.selector,
        request.budget_policy,
        request.kv_store,
    )
    attention = first_given(request.attention, config.get("attention"), "auto")
    choice = EngineChoice(
        method=method,
        axis_settings=method.settings(request.parameters),
        budget=_budget(request, config, profile, method),
        chunk_size=_tokens(
            "--chunk-size", first_given(request.chunk_size, config.get("chunk_size"), profile.chunk_size)
        ),
        score_block=_tokens(
            "--score-block", first_given(request.score_block, config.get("score_block"), profile.score_block)
        ),
        attention=wished_attention(attention, profile, device_kind),
        wanted_attention=attention,
        dtype=_dtype(first_given(request.dtype, config.get("dtype"), "auto"), profile, device_kind),
        max_new_tokens=_tokens(
            "--max-new-tokens",
            first_given(request.max_new_tokens, config.get("max_new_tokens"), profile.max_new_tokens),
        ),
        fixed=frozenset(
            name
            for name in ("chunk_size", "score_block", "budget")
            if getattr(request, name) is not None or name in config
        ),
    )
    if request.truncate not in TRUNCATIONS:
        raise UsageError(f"--truncate {request.truncate} is not known", f"use one of {', '.join(TRUNCATIONS)}")
    return choice


def check_budget(choice: EngineChoice, mandatory_tokens: int) -> None:
    """Raise `UsageError` for a budget that does not cover what the selector always keeps."""
    if isinstance(choice.budget, int) and choice.budget < mandatory_tokens:
        own = [parameter.name for parameter in choice.method.selector_info.parameters]
        settings = ", ".join(f"{name} {choice.axis_settings[name]}" for name in own) or "no parameters"
        raise UsageError(
            f"--budget {choice.budget} is below the {mandatory_tokens} tokens"
            f" that selector {choice.method.selector} always keeps ({settings})",
            f"use --budget {mandatory_tokens} or more, or let it keep less with --set",
        )


def _check_text(request: RunRequest) -> None:
    """A byte of the command line that is no UTF-8 reaches Python as half a surrogate pair."""
    for flag, texts in (
        ("--prompt", [request.prompt]),
        ("--system", [request.system]),
        ("--stop", request.stop),
        ("--template-arg", [str(value) for value in request.template_arguments.values()]),
    ):
        if any(is_torn(text or "") for text in texts):
            raise UsageError(f"{flag} holds bytes that are no UTF-8", "check the terminal's encoding")
    check_stop(request.stop)


def check_stop(texts: Iterable[str]) -> None:
    """Raise `UsageError` for an empty text to stop at, which is everywhere."""
    if "" in texts:
        raise UsageError("--stop is empty", "give the text to stop at, or drop --stop")


def first_given(*values: Any) -> Any:
    """The first that is not None: an empty text was given, and is judged like any other."""
    return next(value for value in values if value is not None)


def _tokens(flag: str, value: int) -> int:
    if type(value) is not int or not 1 <= value <= MOST_TOKENS:
        raise UsageError(f"{flag} {value} is impossible", f"give a number of tokens from 1 to {MOST_TOKENS}")
    return value


def _budget(request: RunRequest, config: Mapping[str, Any], profile: Profile, method: Method) -> int | str | None:
    if not method.selector_info.budgeted:
        if request.budget is not None:
            raise UsageError(
                f"--budget {request.budget} means nothing with selector {method.selector}, which keeps everything",
                "drop --budget, or choose another --selector",
            )
        return None
    value = str(first_given(request.budget, config.get("budget"), profile.budget))
    if value in ("full", "auto"):
        return value
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise UsageError(f"--budget {value} is no number of tokens", "give a whole number, full or auto")
    if int(value) > MOST_TOKENS:
        raise UsageError(f"--budget {value} is more than {MOST_TOKENS}", "give fewer tokens, or full")
    return int(value)


def _dtype(value: str, profile: Profile, device_kind: str) -> str:
    chosen = profile.dtype if value == "auto" else value
    if chosen not in DTYPES:
        raise UsageError(f"--dtype {value} is not known", f"use auto, {', '.join(DTYPES)}")
    if chosen == "float16" and device_kind == "cpu":
        raise UsageError("--dtype float16 is not supported on the CPU", "use bfloat16 or float32")
    return chosen
