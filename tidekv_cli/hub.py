"""Repositories on the Hugging Face hub: their files in the hub's own cache, each fetched when it is needed.

A model is judged by its config before its tokenizer is fetched, and planned before its weights are. Knows no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tidekv_cli.checkpoint_files import INDEX, SINGLE, has_tokenizer, missing_weights, without_weights
from tidekv_cli.errors import ModelError
from tidekv_cli.hub_errors import named_failure
from tidekv_cli.hub_listing import Listing, listing_file, read_listing, write_listing
from tidekv_cli.units import format_bytes

Note = Callable[[str], None]

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(\w[\w.-]*(?:/\w[\w.-]*)*))?", re.ASCII)
_CONFIG = "config.json"
_SMALL = (".json", ".jinja", ".model", "merges.txt")
_ANSWER_S = 5.0  # for a first answer; the library's own limit is 10 and again 60 for each further try


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
    """One commit of a repository, in `directory`, which holds at least its config.json; `listing` keeps its file list.

    The methods ask the network only for what is not there, or for all of it where `again`. They raise `ModelError`
    where it cannot be fetched.
    """

    hub_id: HubId
    directory: Path
    listing: Path
    offline: bool
    note: Note
    again: bool = False

    @property
    def has_tokenizer(self) -> bool:
        """Whether all of the small files are there; where no list of them was kept, whether any tokenizer is."""
        sizes = read_listing(self.listing)
        return has_tokenizer(self.directory) if sizes is None else not self._missing(sizes)

    def fetch_tokenizer(self) -> None:
        """Have the tokenizer and the other small files. Refuses a repository without weights that can be loaded.

        What another program fetched is compared with the hub's list of files once, and used as it is where the list
        cannot be had.
        """
        from huggingface_hub import is_offline_mode

        known = self.offline or is_offline_mode() or read_listing(self.listing) is not None
        if known and self.has_tokenizer and not self.again:
            return
        self._forbid_offline("tokenizer")
        try:
            sizes = self._sizes()
        except ModelError:
            if self.again or not has_tokenizer(self.directory):
                raise
            self.note(f"the hub gives no list of the files of {self.hub_id}: using the tokenizer that is on disk")
            return
        if SINGLE not in sizes and INDEX not in sizes:
            raise without_weights(f"{self.hub_id} on the hub", sizes)
        missing = self._missing(sizes)
        if missing:
            self.note(f"fetching the tokenizer of {self.hub_id} from the hub")
            self._fetch(missing)

    def fetch_weights(self) -> None:
        """Have all of the weights."""
        if has_weights(self.directory) and not self.again:
            return
        self._forbid_offline("weights")
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

    def _forbid_offline(self, what: str) -> None:
        if self.offline:
            raise ModelError(
                f"the {what} of {self.hub_id} is not on disk, or not all of it, and --offline forbids fetching it",
                "leave out --offline, or fetch it where there is a network",
            )

    def _missing(self, sizes: Listing) -> list[str]:
        """The small files of the list that are not there; with `again` all of them."""
        small = sorted(name for name in sizes if name.endswith(_SMALL) and name != _CONFIG)
        return [name for name in small if self.again or not (self.directory / name).is_file()]

    def _sizes(self) -> Listing:
        """The files of the repository that are in no folder, in bytes: as they were kept, or asked for."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        kept = None if self.again else read_listing(self.listing)
        if kept is not None:
            return kept
        commit = self.directory.name
        with _failures_named(self.hub_id, self.offline):
            _reach(HubId(self.hub_id.repository, commit))
            listed = HfApi().list_repo_tree(self.hub_id.repository, revision=commit)
            sizes = {entry.path: entry.size for entry in listed if isinstance(entry, RepoFile)}
        write_listing(self.listing, sizes)
        return sizes

    def _fetch(self, names: Iterable[str]) -> None:
        from huggingface_hub import hf_hub_download

        commit = self.directory.name
        for name in names:
            with _failures_named(self.hub_id, self.offline, name):
                hf_hub_download(self.hub_id.repository, name, revision=commit, force_download=self.again)


def has_weights(directory: Path) -> bool:
    """Whether every file of weights is there."""
    try:
        return not missing_weights(directory)
    except ModelError:
        return False


def open_snapshot(hub_id: HubId, listings: Path, offline: bool, note: Note, again: bool = False) -> HubSnapshot:
    """The commit that `hub_id` means, with its config.json, which alone is fetched, and only if it is not there.

    `listings` is where lists of files are kept. Raises `ModelError` where the config cannot be fetched.
    """
    from huggingface_hub import hf_hub_download, is_offline_mode
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _failures_named(hub_id, offline, _CONFIG):
        config = None
        if offline or not again:
            try:
                config = hf_hub_download(hub_id.repository, _CONFIG, revision=hub_id.revision, local_files_only=True)
            except LocalEntryNotFoundError:
                if offline:
                    raise
        if config is None:
            if not is_offline_mode():  # else what follows says that nothing is fetched
                note(f"fetching the config of {hub_id} from the hub")
            _reach(hub_id)
            config = hf_hub_download(hub_id.repository, _CONFIG, revision=hub_id.revision, force_download=again)
    directory = Path(config).parent
    listing = listing_file(listings, hub_id.repository, directory.name)
    return HubSnapshot(hub_id, directory, listing, offline, note, again)


def _reach(hub_id: HubId) -> None:
    """Ask the hub once: where nobody answers, the library would try for half a minute before it says so."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    chosen = "HF_HUB_ETAG_TIMEOUT" in os.environ
    with suppress(HfHubHTTPError):  # an answer: what is busy now is worth the tries that follow
        get_hf_file_metadata(
            hf_hub_url(hub_id.repository, _CONFIG, revision=hub_id.revision),
            timeout=constants.HF_HUB_ETAG_TIMEOUT if chosen else _ANSWER_S,
        )


@contextmanager
def _failures_named(hub_id: HubId, offline: bool, file: str | None = None) -> Iterator[None]:
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # its tries and retries, which would stand between this program's own lines
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # the HTTP library's own kinds depend on its version
        raise named_failure(hub_id.repository, hub_id.revision, file, error, offline) from error
