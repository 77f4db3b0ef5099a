"""The Typer app and the error shell around it: the one place where failures become exit codes."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, TextIO

import typer
import typer.main

from tidekv_cli import __version__, interrupts
from tidekv_cli.commands.devices import devices
from tidekv_cli.commands.methods import methods
from tidekv_cli.commands.models import models
from tidekv_cli.commands.probe_capacity import probe_capacity
from tidekv_cli.commands.profiles import profiles
from tidekv_cli.commands.run import run
from tidekv_cli.environment import Environment
from tidekv_cli.errors import ExitCode, Interrupted, MemoryExhaustedError, TideError, UsageError, is_out_of_memory

app = typer.Typer(
    name="tidekv",
    help="Long documents through language models on devices that are too small for them.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(run)
app.command("probe-capacity")(probe_capacity)
app.add_typer(models, name="models")
app.command()(devices)
app.command()(profiles)
app.command()(methods)


def _show_version(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.obj.write(f"tidekv {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str], environment: Environment) -> int:
    """Run the command line; returns the exit code. Raises nothing but what follows from a signal."""
    try:
        return _dispatch(arguments, environment)
    except BrokenPipeError:
        return ExitCode.CLOSED_PIPE
    except KeyboardInterrupt:
        interrupts.settle()
        return _failed(Interrupted("interrupted", "start it again"), arguments, environment)
    except Exception as error:
        if environment.environ.get("TIDEKV_TRACEBACK"):
            traceback.print_exc(file=environment.stderr)
        if interrupts.pending() is not None:
            raise  # a consequence of the signal, which is told of above
        if isinstance(error, TideError):
            return _failed(error, arguments, environment)
        if is_out_of_memory(error):
            exhausted = MemoryExhaustedError(f"memory ran out: {error or 'no message'}", "free memory, or give less")
            return _failed(exhausted, arguments, environment)
        first = (str(error).splitlines() or [""])[0]
        bug = TideError(
            f"unexpected {type(error).__name__}: {first}",
            "this is a bug; run it again with TIDEKV_TRACEBACK=1 for the traceback",
        )
        return _failed(bug, arguments, environment)


def _dispatch(arguments: Sequence[str], environment: Environment) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("tidekv", list(arguments), obj=environment) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except Exception as error:  # click's own errors, whichever copy of click typer brings
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            environment.write(error.format_message() + "\n")
            return ExitCode.USAGE
        raise UsageError(
            error.format_message() or "wrong usage", "see tidekv --help, or tidekv COMMAND --help"
        ) from error
    return ExitCode.DONE


def _failed(error: TideError, arguments: Sequence[str], environment: Environment) -> int:
    from tidekv_cli.outcome import error_document
    from tidekv_cli.report import Reporter

    try:
        Reporter(environment).error(error)
        if _wants_json(arguments) and environment.stdout is not None:
            environment.write(json.dumps(error_document(error), ensure_ascii=False) + "\n")
    except BrokenPipeError:
        return ExitCode.CLOSED_PIPE
    except UsageError:  # stdout is what failed
        return error.code
    return error.code


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether `--json` is a flag among them: not a file name after `--`, nor the text of another flag."""
    flags = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    texts = ("-p", "--prompt", "-s", "--system", "--stop")
    return any(flag == "--json" and before not in texts for before, flag in pairwise(["", *flags]))


def interrupted() -> int:
    """Ctrl-C before the command line was read; returns the exit code."""
    return int(_failed(Interrupted("interrupted", "start it again"), sys.argv[1:], Environment.of_process()))


def entry_point() -> int:
    """The command line of this process; returns the exit code."""
    code = main(sys.argv[1:], Environment.of_process())
    return int(max(code, _flushed(sys.stdout), _flushed(sys.stderr)))


def _flushed(stream: TextIO | None) -> int:
    """Flush for the last time; a closed pipe is told apart and silenced, since Python flushes again at exit."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError) as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno() if stream is not None else 1)
        return ExitCode.CLOSED_PIPE if isinstance(error, (BrokenPipeError, ValueError)) else ExitCode.DONE
    return ExitCode.DONE
