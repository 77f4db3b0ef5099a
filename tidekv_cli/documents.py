"""Documents from files and stdin, decoded strictly. Knows no tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from tidekv_cli.environment import Environment
from tidekv_cli.errors import InputError, UsageError
from tidekv_cli.units import format_bytes

ERRORS = ("strict", "replace", "ignore")
_LONGEST = 1 << 30  # bytes; what goes on without end must not fill the memory


@dataclass(frozen=True, slots=True)
class Document:
    """One document's text; `path` is `-` for stdin."""

    path: str
    text: str


def read_documents(
    paths: Sequence[str], environment: Environment, encoding: str = "utf-8", errors: str = "strict"
) -> list[Document]:
    """Read `paths` in order; with none, stdin if it is not a terminal.

    Raises `InputError` for what cannot be read or decoded, or holds nothing, and `UsageError` if there is nothing
    to read from.
    """
    try:
        codec = codecs.lookup(encoding).name
        "a".encode(codec)  # raises for what is no text encoding, base64 for example
    except (LookupError, UnicodeError) as error:
        raise UsageError(f"--encoding {encoding} is not known", "use for example utf-8, latin-1 or utf-16") from error
    if errors not in ERRORS:
        raise UsageError(f"--errors {errors} is not known", f"use one of {', '.join(ERRORS)}")
    if not paths and environment.stdin_is_terminal:
        raise UsageError("no document was given and stdin is a terminal", "name a file, or pipe text into tidekv run")
    if list(paths).count("-") > 1:
        raise UsageError("stdin (-) is named twice", "name it once")
    return [_document(path, environment, codec, errors) for path in paths or ["-"]]


def as_documents(given: str | Sequence[Document | str]) -> list[Document]:
    """Texts as documents. Raises `UsageError` for what is no text, and `InputError` for a document that holds none."""
    documents = []
    for number, one in enumerate([given] if isinstance(given, str) else given, start=1):
        document = one if isinstance(one, Document) else Document(f"document {number}", one)
        check_text(document.path, document.text)
        if not document.text.strip():
            raise InputError(f"{document.path} holds no text", "give a document with text")
        documents.append(document)
    return documents


def is_torn(text: str) -> bool:
    """Whether there is half a surrogate pair in it, which no UTF-8 can hold."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def check_text(what: str, text: object) -> None:
    """Raise `UsageError` for what is no text; None is left out, which is fine."""
    if not isinstance(text, (str, type(None))):
        raise UsageError(f"{what} is not text but {type(text).__name__}", "read or decode it first")
    if is_torn(text or ""):
        raise UsageError(f"{what} holds half a surrogate pair, which is no text", "decode it with errors='replace'")


def _document(path: str, environment: Environment, codec: str, errors: str) -> Document:
    name = "stdin" if path == "-" else path
    raw = _stdin(environment) if path == "-" else _file(path)
    if len(raw) > _LONGEST:
        raise InputError(f"{name} is longer than {format_bytes(_LONGEST)}", "give a part of it")
    mark = len(codecs.BOM_UTF8) if codec == "utf-8" and raw.startswith(codecs.BOM_UTF8) else 0
    try:
        text = raw[mark:].decode(codec, errors)
        text.encode("utf-8")  # half a surrogate pair, which some encodings let through, is no text
    except UnicodeError as error:
        where = f" at byte {mark + error.start}" if isinstance(error, UnicodeDecodeError) else ""
        raise InputError(
            f"{name} is no valid {codec}{where}",
            "say how it is encoded, for example --encoding latin-1, or use --errors replace",
        ) from error
    if not text.strip():
        what = "is empty" if len(raw) == mark else "holds only white space"
        raise InputError(f"{name} {what}", "give a document with text")
    return Document(path, text)


def _stdin(environment: Environment) -> bytes:
    if environment.stdin is None:
        raise InputError("stdin is closed", "name a file, or pipe text into tidekv run")
    try:
        raw = environment.stdin.read(_LONGEST + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"stdin cannot be read: {error}", "name a file, or pipe text into tidekv run") from error
    return raw


def _file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            raw = file.read(_LONGEST + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"cannot read the document {path}: {reason}", "check the path and its permissions") from error
    return raw
