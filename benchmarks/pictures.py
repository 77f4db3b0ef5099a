"""The README's pictures and its table of largest contexts, from real runs of the command. `make pictures`.

    .venv/bin/python benchmarks/pictures.py

Writes docs/report.svg (a run on this machine), docs/capacity.svg (a probe for a device that is not here) and, between
its markers in README.md, the largest predicted context of llama-3.1-8b on every profile.
"""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tidekv_cli.profile import list_profiles

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- capacity: made by `make pictures` -->", "<!-- capacity: end -->"
RUN = ("run", "examples/lighthouse.txt", "-p", "Who keeps the light, and why?", "-n", "60")
PROBE = ("probe-capacity", "-m", "llama-3.1-8b", "--profile", "rtx-4090")


def tidekv(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """The command, both streams in one. Raises where it fails, unless told not to `check`."""
    command = [sys.executable, "-m", "tidekv_cli", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, check=check)


def picture(name: str, arguments: tuple[str, ...]) -> None:
    """What a run of the command shows, as docs/NAME.svg."""
    console = Console(record=True, width=118, file=io.StringIO())
    console.print(Text(f"$ tidekv {shlex.join(arguments)}", style="bold"))
    console.print(Text(tidekv(*arguments).stdout.rstrip()))
    console.save_svg(str(ROOT / "docs" / f"{name}.svg"), title="tidekv")


def capacity_rows() -> list[str]:
    """A row of the table for each profile that stands for one device."""
    rows = []
    for profile in list_profiles({}).values():
        if profile.memory is None:
            continue
        done = tidekv("probe-capacity", "-m", "llama-3.1-8b", "--profile", profile.name, "--json", "-q", check=False)
        found = json.loads(done.stdout.splitlines()[-1])
        if "error" in found:
            cells = ("does not fit", "", "")
        else:
            peak = found["rows"][-1]["peak_bytes"] / 2**30
            by_memory = f"{found['memory_context_tokens']:,}"
            cells = (f"{found['max_context_tokens']:,} ({found['limited_by']})", by_memory, f"{peak:.2f}")
        rows.append(f"| `{profile.name}` | {profile.memory / 2**30:.1f} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    """Make them all."""
    picture("report", RUN)
    picture("capacity", PROBE)
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    header = [
        "| profile | memory, GiB | largest context (limited by) | by memory alone | peak there, GiB |",
        "|---|---|---|---|---|",
    ]
    table = "\n".join([BEGIN, "", *header, *capacity_rows(), "", END])
    readme.write_text(before + table + after, encoding="utf-8")


if __name__ == "__main__":
    main()
