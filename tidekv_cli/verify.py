"""A real prefill of a planned length in a fresh process: what `probe-capacity --verify` reports beside the plan.

Run as a module, it is that process: the question comes as JSON on stdin, the answer goes to stdout as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from tidekv_cli.errors import MemoryExhaustedError, TideError, error_of
from tidekv_cli.request import RunRequest

_NEW_TOKENS = 2  # room for all new ones is taken before the first
_CHILD = "import sys; sys.path[:] = {path!r}; from tidekv_cli.verify import main; main()"  # not the user's directory
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run took: peaks in bytes, None where memory ran out, and then what was said."""

    live_peak_bytes: int | None
    process_peak_bytes: int | None
    failure: str | None = None


def measure(request: RunRequest, prompt_tokens: int, environ: Mapping[str, str]) -> Measured:
    """Prefill `prompt_tokens` tokens in a process of its own, under the limit of `request`.

    Raises the `TideError` that kept it from running for another reason than memory.
    """
    values = {field.name: getattr(request, field.name) for field in fields(request)}
    question = json.dumps({"request": values, "prompt_tokens": prompt_tokens}, default=dict)
    child = _CHILD.format(path=[place for place in sys.path if place])
    done = subprocess.run(
        [sys.executable, "-c", child], input=question, capture_output=True, text=True, env=dict(environ)
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        return Measured(None, None, f"the run did not come to its end: {said}")
    if "code" in answer:
        raise error_of(**answer)
    return Measured(**answer)


def main() -> None:
    """Answer the question on stdin."""
    _end_with_the_parent()
    question = json.load(sys.stdin)
    values = {**question["request"], "documents": (), "stop": ()}
    answer: dict[str, object]
    try:
        answer = asdict(_run(RunRequest(**values), question["prompt_tokens"], os.environ))
    except MemoryExhaustedError as error:
        answer = asdict(Measured(None, None, error.message))
    except TideError as error:
        answer = {"code": int(error.code), "message": error.message, "hint": error.hint}
    print(json.dumps(answer))


def _end_with_the_parent() -> None:
    """However the parent ends, on Linux this process does too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(request: RunRequest, prompt_tokens: int, environ: Mapping[str, str]) -> Measured:
    import torch

    from tidekv_cli.assembly import engine_settings, torch_dtype
    from tidekv_cli.catalog import DEFAULT_MODEL
    from tidekv_cli.engine.attention import choose_attention
    from tidekv_cli.engine.meter import process_peak_bytes
    from tidekv_cli.engine.sampling import SamplingSettings
    from tidekv_cli.engine.session import Session
    from tidekv_cli.loading import load_model
    from tidekv_cli.model_spec import inspect_model
    from tidekv_cli.request import first_given
    from tidekv_cli.settings import load_settings
    from tidekv_cli.setup import set_up
    from tidekv_cli.sources import resolve_model

    try:
        config = load_settings(environ)
        setup = set_up(request, config, environ)
        name = first_given(request.model, config.get("model"), DEFAULT_MODEL)
        source = resolve_model(name, environ, request.offline)
        files = inspect_model(source.path, name)
        planned = setup.fitter().starting_point(setup.plan_settings(files.spec, files.config))
        attention = choose_attention(planned.attention, torch.device(setup.device.address))
        settings = engine_settings(planned, prompt_tokens, attention)
        source.fetch_weights()
        session = Session(load_model(files, torch_dtype(planned)).model, frozenset())
        ids = [number % files.spec.vocab_size for number in range(prompt_tokens)]
        prompt, live = session.prefill(ids, settings, ceiling_bytes=setup.ceiling_bytes)
        for _ in session.generate(prompt, SamplingSettings(), min(_NEW_TOKENS, planned.max_new_tokens)):
            pass
    except MemoryError as error:
        return Measured(None, None, str(error) or "memory ran out")
    if prompt.lowered:
        return Measured(None, None, f"only with {'; '.join(prompt.lowered)}")
    return Measured(live, process_peak_bytes())


if __name__ == "__main__":
    main()
