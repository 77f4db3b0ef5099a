"""`tidekv devices`: what there is to compute on, how much memory is free, and how that was read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidekv_cli.environment import Environment
from tidekv_cli.units import format_bytes

if TYPE_CHECKING:
    from tidekv_cli.device import Detection, Device


def devices(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """List the devices with their memory and how each figure was read."""
    from tidekv_cli import machine
    from tidekv_cli.device import detect_devices
    from tidekv_cli.report import Reporter, plain_table

    environment: Environment = context.obj
    found = detect_devices(replace(machine.THIS_MACHINE, environ=environment.environ))
    if as_json:
        environment.write(json.dumps(_document(found), ensure_ascii=False) + "\n")
        return
    headers = ("device", "name", "kind", "total", "free", "how read")
    environment.write(plain_table(headers, [_row(device) for device in found.devices]))
    if found.extras:
        environment.write("\n" + plain_table(("about", ""), list(found.extras.items())))
    reporter = Reporter(environment)
    for note in found.notes:
        reporter.note(f"note: {note}")


def _row(device: Device) -> tuple[str, ...]:
    name = device.name if device.board is None else f"{device.name}, {device.board}"
    read = "; ".join(f"{figure}: {device.sources[figure]}" for figure in ("total", "free") if figure in device.sources)
    return (
        device.address,
        name,
        device.kind,
        format_bytes(device.total_bytes),
        format_bytes(device.free_bytes),
        read or "not at all",
    )


def _document(found: Detection) -> dict[str, Any]:
    return {
        "schema": 1,
        "devices": [
            {
                "name": device.name,
                "kind": device.kind,
                "index": device.index,
                "uuid": device.uuid,
                "capability": device.capability,
                "board": device.board,
                "total_bytes": device.total_bytes,
                "free_bytes": device.free_bytes,
                "reserved_bytes": device.reserved_bytes,
                "unified": device.unified,
                "sources": dict(device.sources),
            }
            for device in found.devices
        ],
        "extras": dict(found.extras),
        "notes": list(found.notes),
    }
