"""Profiles on the Hugging Face Hub: addresses, downloads through the local cache, uploads.

An address is `hf://owner/name/file.safetensors`; `hf://owner/name` is enough where a repository has one profile. A
branch, tag or commit follows the name: `hf://owner/name@v2/file.safetensors`. The address of a file that was downloaded
or uploaded has the commit, so it stands for the same profile from then on. Endpoint, token, cache and offline mode are
those of huggingface_hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote

from ..errors import ProfileError, did_you_mean
from .files import SUFFIX

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")

_SCHEME = "hf:"
_ADDRESS = re.compile(r"hf://([^/@\s]+/[^/@\s]+)(?:@(refs/pr/\d+|[^/@\s]+))?(?:/([^@]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LIKE = "An address looks like hf://owner/name, hf://owner/name/file.safetensors or hf://owner/name@revision/file."


@dataclass(frozen=True)
class HubAddress:
    """A repository of the kind "model" on the Hub, with a revision and a file if they are named."""

    repo: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubAddress:
        """The parts of an address; a ProfileError if it is malformed."""
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise ProfileError(f"{text!r} is not an address on the Hub. {_LIKE}")
        repo, revision, file = match.groups()
        if repo.split("/")[0] in ("datasets", "spaces", "models", "buckets"):
            raise ProfileError(f"{text!r} names no model repository: profiles are kept in those only. {_LIKE}")
        is_safe = file is None or not ({"", ".", ".."} & set(file.split("/")) or "\\" in file)
        if file is not None and not (is_safe and file.endswith((SUFFIX, ".json"))):
            raise ProfileError(f"{file!r} cannot be a profile on the Hub: profiles are {SUFFIX} or .json files.")
        return cls(repo, None if revision is None else unquote(revision), file)

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{quote(self.revision, safe='')}"
        return f"hf://{self.repo}{revision}{'' if self.file is None else f'/{self.file}'}"


def suffix_of(source: str) -> str:
    """The suffix of the file that a path or an address names; an address without a file stands for a .safetensors."""
    if source.startswith(_SCHEME):
        return PurePosixPath(HubAddress.parse(source).file or f"profile{SUFFIX}").suffix
    return PurePosixPath(source).suffix


def locate(source: str | PathLike[str]) -> tuple[str, str]:
    """The local file of a path or an address, and its origin: the address with the commit, or "" for a path."""
    text = fspath(source)
    if not text.startswith(_SCHEME):
        return text, ""
    address = HubAddress.parse(text)
    with _errors_in_words(address):
        path, file = _download(address)
    commit = Path(path).parents[file.count("/")].name  # files are in snapshots/COMMIT
    return path, str(replace(address, revision=commit, file=file))


def pin(source: T) -> T | str:
    """An address with its commit, so that every use of it has the same profile; any other source as it is."""
    return locate(source)[1] if isinstance(source, str) and source.startswith(_SCHEME) else source


def upload(
    content: bytes, repo: str, file: str, message: str, private: bool | None, token: str | None, create_pr: bool
) -> str:
    """Commit a file to a repository, which is created if it does not exist; the address with the commit."""
    address = HubAddress.parse(f"hf://{repo}/{file}")
    if (address.repo, address.file) != (repo, file):
        raise ProfileError(f"A repository on the Hub is named 'owner/name', not {repo!r}.")
    with _errors_in_words(address):
        api = _api(token)
        api.create_repo(repo, private=private, exist_ok=True)
        added: dict[str, Any] = {"path_or_fileobj": content, "path_in_repo": file}
        commit = api.upload_file(repo_id=repo, commit_message=message, create_pr=create_pr, **added)
    return str(replace(address, revision=commit.oid))


def _api(token: str | None = None) -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(token=token, library_name="holdover")


def _download(address: HubAddress) -> tuple[str, str]:
    """The path of a file in the local cache, downloaded if it is not there or has changed, and its name.

    While the Hub is not reached, what is in the cache is used.
    """
    from huggingface_hub import constants, errors, snapshot_download, try_to_load_from_cache

    if address.file is not None and _COMMIT.fullmatch(address.revision or ""):
        cached = try_to_load_from_cache(address.repo, address.file, revision=address.revision)
        if isinstance(cached, str):
            return cached, address.file
    api = _api()
    try:
        info = api.model_info(address.repo, revision=address.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        file = _choose_file(address, [one.rfilename for one in info.siblings or ()])
        return str(api.hf_hub_download(address.repo, file, revision=address.revision)), file
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500:
            raise
        reason = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else str(error).splitlines()[0]
    try:
        folder = snapshot_download(
            address.repo,
            revision=address.revision,
            local_files_only=True,
            allow_patterns=[address.file or f"*{SUFFIX}"],
        )
        names = [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*")]
    except errors.LocalEntryNotFoundError:
        folder, names = "", []
    if not names or (address.file is not None and address.file not in names):
        raise ProfileError(f"{address} is not in the local cache, and the Hub was not reached: {reason}.")
    file = _choose_file(address, names)
    return str(Path(folder, file)), file


def _choose_file(address: HubAddress, names: Sequence[str]) -> str:
    """The file that an address names, or the only profile there is."""
    if address.file is not None and address.file in names:
        return address.file
    profiles = sorted(name for name in names if name.endswith(SUFFIX))
    listed = ", ".join(profiles[:10]) + (", ..." if len(profiles) > 10 else "")
    if address.file is not None:
        hint = did_you_mean(address.file, names) or (f" It has {listed}." if profiles else "")
        raise ProfileError(f"{address.repo} has no file {address.file!r}.{hint}")
    if not profiles:
        raise ProfileError(f"{address.repo} has no {SUFFIX} file, so no profile.")
    if len(profiles) > 1:
        example = replace(address, file=profiles[0])
        raise ProfileError(f"{address.repo} has {len(profiles)} {SUFFIX} files: {listed}. Name one, as in {example}.")
    return profiles[0]


@contextmanager
def _errors_in_words(address: HubAddress) -> Iterator[None]:
    """Errors of huggingface_hub as a ProfileError that says what to do."""
    from huggingface_hub import errors

    login = "log in with `hf auth login`, or set HF_TOKEN"
    try:
        yield
    except errors.HFValidationError as error:
        raise ProfileError(f"{address} is not an address on the Hub: {error}") from None
    except errors.GatedRepoError:
        message = f"{address.repo} is gated: ask for access on its page on the Hub, and {login}."
        raise ProfileError(message) from None
    except errors.RepositoryNotFoundError:
        message = f"There is no repository {address.repo} on the Hub, or it is private. If it is, {login}."
        raise ProfileError(message) from None
    except errors.RevisionNotFoundError:
        raise ProfileError(f"{address.repo} has no revision {address.revision!r} on the Hub.") from None
    except errors.HfHubHTTPError as error:
        reason = error.server_message or str(error).splitlines()[0]
        hint = f" For more rights, {login}." if error.response.status_code in (401, 403) else ""
        raise ProfileError(f"The Hub refused {address}: {reason}.{hint}") from None
    except errors.OfflineModeIsEnabled:
        raise ProfileError(f"{address} cannot be uploaded: HF_HUB_OFFLINE is set.") from None
    except errors.HTTPError as error:  # type: ignore[attr-defined]
        raise ProfileError(f"The Hub was not reached for {address}: {type(error).__name__}: {error}.") from None
