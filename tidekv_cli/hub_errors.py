"""What went wrong between here and the hub, told apart. Fetches nothing."""

from __future__ import annotations

from collections.abc import Iterator

from tidekv_cli.errors import ModelError

_LOG_IN = "run `hf auth login`, or set HF_TOKEN"


def named_failure(
    repository: str, revision: str | None, file: str | None, error: BaseException, offline: bool
) -> ModelError:
    """The `ModelError` for what `huggingface_hub` raised about a model, while `file` was fetched (None: its list)."""
    from huggingface_hub.errors import HfHubHTTPError

    # What the library says at last is often only that a file is not on disk; why is among the causes.
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, HfHubHTTPError):
            message, hint = _refused(repository, revision, file, cause, cause.response.status_code)
            break
    else:
        message, hint = _unanswered(_name(repository, revision), causes, offline)
    return ModelError(message, hint)


def _name(repository: str, revision: str | None) -> str:
    return repository if revision is None else f"{repository}@{revision}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _refused(repository: str, revision: str | None, file: str | None, error: Exception, status: int) -> tuple[str, str]:
    """Message and hint where the hub answered."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        DisabledRepoError,
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, page = _name(repository, revision), f"{constants.ENDPOINT}/{repository}"
    if isinstance(error, GatedRepoError):  # which is a RepositoryNotFoundError too
        if status == 401:
            return f"{name} is gated, and you are not logged in", f"accept its licence at {page}, then {_LOG_IN}"
        return f"{name} is gated, and your account has no access to it", f"ask for it at {page}, or use another account"
    if isinstance(error, RepositoryNotFoundError):
        if status == 401:
            return (
                f"the hub has no public model {repository}: it is private, or does not exist",
                f"check the spelling; for a private model {_LOG_IN}",
            )
        return f"the hub has no model {repository}", "check the spelling; a private one needs an account that may read"
    if isinstance(error, RevisionNotFoundError):
        return (
            f"{repository} has no revision {revision or 'main'!r} on the hub",
            f"name a branch, tag or commit; {page}/tree/main lists them",
        )
    if isinstance(error, DisabledRepoError):
        return f"{name} is disabled on the hub", f"{page} may say why; give another model"
    if isinstance(error, EntryNotFoundError):
        if file == "config.json":
            hint = "give a model in the transformers format, or download a .gguf file and give its path"
        else:
            hint = f"the repository is not complete; {page}/tree/main lists it, org/name@revision names another commit"
        return f"{name} has no {file or 'list of files'} on the hub", hint
    if status == 401:
        return f"the hub wants a valid login before it gives {name}", _LOG_IN
    if status == 403:
        return f"the hub forbids fetching {name}", "the token may lack the right to read; make one that has it"
    return f"the hub answered {status} when asked for {name}", "try again later"


def _unanswered(name: str, causes: list[BaseException], offline: bool) -> tuple[str, str]:
    """Message and hint where it was not asked, or did not answer."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    error = causes[0]
    if offline:
        return (
            f"{name} is not on disk and --offline forbids fetching it",
            "leave --offline out where there is a network",
        )
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return f"{name} is not on disk and HF_HUB_OFFLINE forbids fetching it", "unset HF_HUB_OFFLINE"
    # What the HTTP library raises, of a kind that depends on its version, comes from the system's error.
    unreached = isinstance(causes[-1], OSError) and not isinstance(error, OSError)
    if unreached or isinstance(error, LocalEntryNotFoundError):
        return (
            f"{name} is not on disk and the hub cannot be reached: {causes[-1]}",
            "check the network and the proxy, or fetch it where there is a network",
        )
    if isinstance(error, OSError) and error.strerror:
        return (
            f"{name} cannot be fetched from the hub: {error.strerror}",
            "check the network, the free disk space and the permissions of the hub's cache (HF_HOME)",
        )
    return f"{name} cannot be fetched from the hub: {causes[-1]}", "check the network and try again"
