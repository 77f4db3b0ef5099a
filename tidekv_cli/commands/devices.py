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
    """List the devices with their memory, how each figure was read, and the matched profile."""
    from tidekv_cli import machine
    from tidekv_cli.device import detect_devices
    from tidekv_cli.profile import list_profiles, match_profile
    from tidekv_cli.report import Reporter, plain_table

    environment: Environment = context.obj
    found = detect_devices(replace(machine.THIS_MACHINE, environ=environment.environ))
    profiles = list_profiles(environment.environ)
    matched = [match_profile(d.name, d.kind, d.board, d.total_bytes, profiles).name for d in found.devices]
    if as_json:
        environment.write(json.dumps(_document(found, matched), ensure_ascii=False) + "\n")
        return
    headers = ("device", "name", "kind", "profile", "total", "free", "how read")
    rows = [_row(device, profile) for device, profile in zip(found.devices, matched, strict=True)]
    environment.write(plain_table(headers, rows))
    if found.extras:
        environment.write("\n" + plain_table(("about", ""), list(found.extras.items())))
    reporter = Reporter(environment)
    for note in found.notes:
        reporter.note(f"note: {note}")


def _row(device: Device, profile: str) -> tuple[str, ...]:
    name = device.name if device.board is None else f"{device.name}, {device.board}"
    read = "; ".join(f"{figure}: {device.sources[figure]}" for figure in ("total", "free") if figure in device.sources)
    return (
        device.address,
        name,
        device.kind,
        profile,
        format_bytes(device.total_bytes),
        format_bytes(device.free_bytes),
        read or "not at all",
    )


def _document(found: Detection, matched: list[str]) -> dict[str, Any]:
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
                "profile": profile,
                "total_bytes": device.total_bytes,
                "free_bytes": device.free_bytes,
                "reserved_bytes": device.reserved_bytes,
                "unified": device.unified,
                "sources": dict(device.sources),
            }
            for device, profile in zip(found.devices, matched, strict=True)
        ],
        "extras": dict(found.extras),
        "notes": list(found.notes),
    }
