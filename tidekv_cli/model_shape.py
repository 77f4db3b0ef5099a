"""The shapes of a model by name, for planning: as little as possible is fetched, and weights never are. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidekv_cli.catalog import shape_of
from tidekv_cli.hub import Note
from tidekv_cli.model_spec import ModelSpec, inspect_model, spec_from_config
from tidekv_cli.sources import resolve_model


def model_shape(name: str, environ: Mapping[str, str], offline: bool, note: Note) -> tuple[ModelSpec, dict[str, Any]]:
    """Shapes and Hugging Face config of the model called `name`, of architectures that are supported.

    An alias answers from the shape that is shipped with it, a directory or file from its header, a hub id from its
    config.json, which is fetched if it is not on disk. Raises `ModelError` as `resolve_model` and `inspect_model` do.
    """
    shape = shape_of(name)
    if shape is not None:
        return spec_from_config(shape, name), shape
    files = inspect_model(resolve_model(name, environ, offline, note).path, name)
    return files.spec, dict(files.config)
