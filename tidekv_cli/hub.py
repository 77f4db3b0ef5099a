"""Repositories on the Hugging Face hub: their files in the hub's own cache, each fetched when it is needed.

A model is judged by its config before its tokenizer is fetched, and planned before its weights are. Knows no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidekv_cli.checkpoint_files import (
    INDEX,
    SINGLE,
    TOKENIZER_FILES,
    has_tokenizer,
    missing_weights,
    without_weights,
)
from tidekv_cli.errors import ModelError
from tidekv_cli.hub_errors import named_failure
from tidekv_cli.units import format_bytes

Note = Callable[[str], None]

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(\w[\w.-]*(?:/\w[\w.-]*)*))?", re.ASCII)
_CONFIG = "config.json"
_SMALL = (".json", ".jinja", ".model", "merges.txt")


@dataclass(frozen=True, slots=True)
class HubId:
    """`org/name`, and the branch, tag or commit if one was named."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def parse_hub_id(text: str) -> HubId | None:
    """`org/name` or `org/name@revision`; None for anything else."""
    match = _HUB_ID.fullmatch(text)
    return None if match is None else HubId(match[1], match[2])


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """One commit of a repository, in `directory`, which holds at least its config.json.

    The methods ask the network only for what is not there, or for all of it where `again`. They raise `ModelError`
    where it cannot be fetched.
    """

    hub_id: HubId
    directory: Path
    offline: bool
    note: Note
    again: bool = False

    @property
    def _commit(self) -> str:
        return self.directory.name

    def fetch_tokenizer(self) -> None:
        """Have the tokenizer and the other small files. Refuses a repository without weights that can be loaded."""
        if has_tokenizer(self.directory) and not self.again:
            return
        with self._fetching("tokenizer"):
            sizes = self._sizes()
            if SINGLE not in sizes and INDEX not in sizes:
                raise without_weights(f"{self.hub_id} on the hub", sizes)
            small = [name for name in sizes if name.endswith(_SMALL) and name != _CONFIG]
            self.note(f"fetching the tokenizer of {self.hub_id} from the hub")
            self._fetch(sorted(small, key=lambda name: (name in TOKENIZER_FILES and TOKENIZER_FILES.index(name), name)))

    def fetch_weights(self) -> None:
        """Have all of the weights."""
        if has_weights(self.directory) and not self.again:
            return
        with self._fetching("weights"):
            sizes = self._sizes()
            if SINGLE in sizes:
                wanted = [SINGLE]
            elif INDEX in sizes:
                self._fetch([INDEX])
                wanted = missing_weights(self.directory)
            else:
                raise without_weights(f"{self.hub_id} on the hub", sizes)
            nbytes = sum(sizes.get(name, 0) for name in wanted)
            self.note(f"fetching the weights of {self.hub_id} from the hub: {format_bytes(nbytes)}")
            self._fetch(wanted)

    @contextmanager
    def _fetching(self, what: str) -> Iterator[None]:
        if self.offline:
            raise ModelError(
                f"the {what} of {self.hub_id} is not on disk, or not all of it, and --offline forbids fetching it",
                "leave out --offline, or fetch it where there is a network",
            )
        with _failures_named(self.hub_id, self.offline):
            yield

    def _sizes(self) -> dict[str, int]:
        """The files of the repository that are in no folder, in bytes."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        listed = HfApi().list_repo_tree(self.hub_id.repository, revision=self._commit)
        return {entry.path: entry.size for entry in listed if isinstance(entry, RepoFile)}

    def _fetch(self, names: Iterable[str]) -> None:
        from huggingface_hub import hf_hub_download

        for name in names:
            hf_hub_download(self.hub_id.repository, name, revision=self._commit, force_download=self.again)


def has_weights(directory: Path) -> bool:
    """Whether every file of weights is there."""
    try:
        return not missing_weights(directory)
    except ModelError:
        return False


def open_snapshot(hub_id: HubId, offline: bool, note: Note, again: bool = False) -> HubSnapshot:
    """The commit that `hub_id` means, with its config.json, which alone is fetched, and only if it is not there.

    Raises `ModelError` where it cannot be.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _failures_named(hub_id, offline):
        config = None
        if offline or not again:
            try:
                config = hf_hub_download(hub_id.repository, _CONFIG, revision=hub_id.revision, local_files_only=True)
            except LocalEntryNotFoundError:
                if offline:
                    raise
        if config is None:
            note(f"fetching the config of {hub_id} from the hub")
            config = hf_hub_download(hub_id.repository, _CONFIG, revision=hub_id.revision, force_download=again)
    return HubSnapshot(hub_id, Path(config).parent, offline, note, again)


@contextmanager
def _failures_named(hub_id: HubId, offline: bool) -> Iterator[None]:
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # its tries and retries, which would stand between this program's own lines
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # the HTTP library's own kinds depend on its version
        raise named_failure(hub_id.repository, hub_id.revision, error, offline) from error
