"""YAML files whose every value knows its line, and the checkers that turn values into Python. Knows no keys.

Aliases, duplicate keys and keys that are no text are refused; a value counts to the line of its key.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tidekv_cli.errors import UsageError
from tidekv_cli.units import parse_bytes

_MOST_FILE_BYTES = 64 * 1024
_MOST_BYTES = 1 << 50
_MOST = 10**9  # of anything that is counted
_HINT = "correct that line"


@dataclass(frozen=True, slots=True)
class Value:
    """One value: `key` is its dotted name, `tag` YAML's type of it, `content` the text as written, or what is in it."""

    path: Path
    line: int
    key: str
    tag: str
    content: str | list[Value] | dict[str, Value]

    @property
    def shown(self) -> str:
        """The value as an error message names it."""
        if self.tag == "null":
            return "nothing"
        if isinstance(self.content, str):
            return reprlib.repr(self.content) if self.tag == "str" else _short(self.content)
        kind = {"seq": "list", "map": "mapping"}.get(self.tag, _short(self.tag))
        return f"a {kind} of {len(self.content)}" if self.content else f"an empty {kind}"

    def wrong(self, allowed: str) -> UsageError:
        """The error for a value that is not `allowed`."""
        return self.error(f"{self.key or 'the file'} is {self.shown}; it must be {allowed}")

    def error(self, problem: str, hint: str = _HINT) -> UsageError:
        """The error for `problem` in this value's line."""
        return _error(self.path, self.line, problem, hint)


Checker = Callable[[Value], Any]


def read_yaml(path: Path, what: str) -> Value:
    """The document in the YAML file `path`, `what` it is. Raises `UsageError` naming the file and, if known, the line.

    A file that holds nothing is an empty mapping.
    """
    import yaml

    try:
        if path.exists() and not path.is_file():  # a pipe may never be written to
            raise UsageError(f"{what} {path} is no file", "check the path")
        with path.open("rb") as file:
            content = file.read(_MOST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{what} {path} cannot be read: {reason}", "check the path") from error
    if len(content) > _MOST_FILE_BYTES:
        raise UsageError(f"{what} {path} is longer than {_MOST_FILE_BYTES} bytes", "give a smaller file")
    try:
        node = yaml.compose(content.decode("utf-8"), yaml.SafeLoader)
        if node is None or node.tag == "tag:yaml.org,2002:null":
            return Value(path, 1, "", "map", {})
        return _value(path, node, 1, "", set())
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise _error(path, line, "no valid YAML: it is not UTF-8", "save it as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _error(path, mark.line + 1 if mark else 1, f"no valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise _error(path, 1, f"no valid YAML: {error}") from error
    except RecursionError as error:
        raise _error(path, 1, "no valid YAML: it is nested too deeply") from error


def _value(path: Path, node: Any, line: int, key: str, seen: set[int]) -> Value:
    """A node of YAML's tree and all below it. An alias is the same node again: refused, so nothing multiplies."""
    if id(node) in seen:
        raise _error(path, line, f"{key} is an alias (*name), which is not allowed", "write the value out")
    seen.add(id(node))
    tag = node.tag.removeprefix("tag:yaml.org,2002:")
    if node.id == "scalar":
        return Value(path, line, key, tag, node.value)
    if node.id == "sequence":
        items = []
        for place, item in enumerate(node.value):
            own = line if id(item) in seen else _line(item)  # an alias has the line of what it stands for
            items.append(_value(path, item, own, f"{key}[{place}]", seen))
        return Value(path, line, key, tag, items)
    found: dict[str, Value] = {}
    for name, inner in node.value:
        if name.id != "scalar":
            raise _error(path, _line(name), "a key is a list or a mapping; it must be a word")
        whole = f"{key}.{_short(name.value)}" if key else _short(name.value)
        if name.value in found:
            lines = f"lines {found[name.value].line} and {_line(name)}"
            raise _error(path, _line(name), f"the key {whole} is there twice, in {lines}")
        found[name.value] = _value(path, inner, _line(name), whole, seen)
    return Value(path, line, key, tag, found)


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _error(path: Path, line: int, problem: str, hint: str = _HINT) -> UsageError:
    return UsageError(f"{path}:{line}: {problem}", hint)


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:28]}...{text[-9:]}"


# Checkers: each takes a value and returns what it means, or raises `UsageError` with its line.


def text(value: Value) -> str:
    """One line of text."""
    if value.tag != "str" or not isinstance(value.content, str) or not value.content.isprintable():
        raise value.wrong("a line of text")
    if not value.content.strip():
        raise value.wrong("a line of text, not an empty one")
    return value.content


def one_of(names: Sequence[str]) -> Checker:
    """One of `names`."""

    def check(value: Value) -> str:
        if value.tag != "str" or value.content not in names:
            raise value.wrong(f"one of {', '.join(names)}")
        return str(value.content)

    return check


def whole(unit: str, least: int = 1, most: int = _MOST) -> Checker:
    """A decimal number of `unit`, from `least` to `most`."""

    def check(value: Value) -> int:
        content = value.content if value.tag == "int" and isinstance(value.content, str) else ""
        # A leading zero would be octal and a colon sexagesimal in YAML: nobody means that.
        if not re.fullmatch(r"0|[1-9][0-9]*", content) or (len(content) < 12 and int(content) < least):
            raise value.wrong(f"a number of {unit}, at least {least}")
        if len(content) >= 12 or int(content) > most:
            raise value.wrong(f"a number of {unit}, at most {most}")
        return int(content)

    return check


def number(value: Value) -> float:
    """A number above 0, to a thousand million."""
    found = math.nan
    if value.tag in ("int", "float") and isinstance(value.content, str):
        try:
            found = float(value.content)
        except ValueError:  # .inf, .nan, 0x10, 1:30
            found = math.nan
    if not 0 < found <= _MOST:
        raise value.wrong(f"a number above 0, at most {_MOST}")
    return found


def amount(least: int) -> Checker:
    """An amount of memory like 24564MiB, in bytes."""

    def check(value: Value) -> int:
        found = -1
        if value.tag in ("str", "int") and isinstance(value.content, str):
            try:
                found = parse_bytes(value.content, value.key)
            except UsageError:
                found = -1
        if not least <= found <= _MOST_BYTES:
            raise value.wrong(f"an amount of memory like 24564MiB, from {least} bytes to 1024 TiB")
        return found

    return check


def optional(checker: Checker) -> Checker:
    """What `checker` takes, or null."""
    return lambda value: None if value.tag == "null" else checker(value)


def list_of(checker: Checker, what: str, length: int | None = None) -> Checker:
    """A list of `what`, at least one, or exactly `length`."""

    def check(value: Value) -> tuple[Any, ...]:
        items = value.content
        if value.tag != "seq" or not isinstance(items, list) or not items or len(items) != (length or len(items)):
            raise value.wrong(f"a list of {what}" + ("" if length else ", at least one"))
        return tuple(checker(item) for item in items)

    return check


def entries(value: Value) -> Mapping[str, Value]:
    """A mapping's values by key."""
    if value.tag != "map" or not isinstance(value.content, dict):
        raise value.wrong("a mapping, `key: value` on each line")
    return value.content


def mapping(checkers: Mapping[str, Checker], required: bool = False) -> Checker:
    """A mapping whose keys are among those of `checkers`, or with `required` all of them."""

    def check(value: Value) -> dict[str, Any]:
        found = entries(value)
        check_keys(value, checkers, checkers if required else ())
        return {key: checkers[key](inner) for key, inner in found.items()}

    return check


def check_keys(value: Value, known: Mapping[str, Any], required: Sequence[str] | Mapping[str, Any]) -> None:
    """Raise `UsageError` for a key that is not `known`, naming the nearest, and for one that is missing."""
    place = f" in {value.key}" if value.key else ""
    for key, inner in entries(value).items():
        if key not in known:
            near = get_close_matches(key[:40], known, n=1, cutoff=0.6)
            guess = f"; did you mean {near[0]!r}?" if near else ""
            raise inner.error(f"unknown key {_short(key)!r}{place}{guess}", f"the keys{place} are {', '.join(known)}")
    for key in required:
        if key not in entries(value):
            raise value.error(f"the key {key!r}{place} is missing", f"the keys{place} are {', '.join(required)}")
