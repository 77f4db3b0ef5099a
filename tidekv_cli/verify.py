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
from itertools import islice

from tidekv_cli.errors import MemoryExhaustedError, TideError, error_of
from tidekv_cli.model import Model
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
    model = Model(request, environ)
    vocabulary = model.files.spec.vocab_size
    run = model.plan_tokens([number % vocabulary for number in range(prompt_tokens)])
    run.prefill(checked=False)
    for _ in islice(run.tokens(), _NEW_TOKENS):
        pass
    if run.outcome.lowered:
        return Measured(None, None, f"only with {'; '.join(run.outcome.lowered)}")
    return Measured(run.outcome.live_peak_bytes, run.outcome.process_peak_bytes)


if __name__ == "__main__":
    main()
