"""Model folders on the Hugging Face Hub: upload one, download one.

Of a repository exactly the files are downloaded that its digests.json lists, and these must be of
kinds that a model folder holds: JSON, text, tokenizer models and safetensors; never code, never a
pickle. What was downloaded lies in the Hub's own cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.ground.plugins import missing_plugins
from fusionzoo.ground.version import __version__

from .card import NAME as README
from .card import is_unedited
from .folder import OPTIONAL, REQUIRED, how_to_import, listed_files, read_config

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
TOP = (*REQUIRED, *OPTIONAL, "digests.json", README)
KINDS = (".json", ".txt", ".model", ".safetensors", ".jinja", ".spm", ".codes")  # of an encoder


def is_repository(name: str | Path) -> bool:
    """Whether a name is that of a repository, `owner/name`, rather than of a folder here.

    A mistyped path asks no hub: neither one below a folder that exists, nor one below `runs`.
    """
    if not isinstance(name, str) or REPOSITORY.fullmatch(name) is None:
        return False
    owner = name.partition("/")[0]
    return owner != "runs" and not Path(owner).exists()


def push(
    folder: Path, name: str, *, private: bool | None, token: str | bool | None, revision: str | None
) -> str:
    """Upload a model folder as one commit, and return the repository's address."""
    from huggingface_hub import HfApi

    if REPOSITORY.fullmatch(name) is None:
        raise FusionZooError(f"{name!r} is no name of a repository: give 'owner/name'")
    files = sorted(x.relative_to(folder).as_posix() for x in folder.rglob("*") if x.is_file())
    for file in files:
        _check_kind(file, str(folder))
    api = HfApi(token=token, library_name="fusionzoo", library_version=__version__)
    with _one_line_errors(name, revision):
        address = api.create_repo(name, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        if _has_readme_of_its_own(api, name, revision):
            files.remove(README)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            allow_patterns=[_exactly(file) for file in files],
            revision=revision,
            commit_message=f"Save the model with fusionzoo {__version__}",
        )
    return str(address)


def _has_readme_of_its_own(api: Any, name: str, revision: str | None) -> bool:
    """Whether the repository has a README that somebody wrote or edited."""
    if not api.file_exists(name, README, revision=revision):
        return False
    path = api.hf_hub_download(name, README, revision=revision)
    return not is_unedited(Path(path).read_bytes().decode("utf-8", "replace"))


def download(name: str, revision: str | None, token: str | bool | None) -> Path:
    """Download a repository's model folder unless the cache has it, and return where it lies.

    Its config.json is checked first: a model whose plugins are not imported costs no download.
    """
    folder = _snapshot(name, revision, token, ["config.json", "digests.json"])
    for file in ("config.json", "digests.json"):
        if not (folder / file).is_file():
            raise FusionZooError(f"{name} is no model of fusionzoo: it holds no {file}")
    config, _ = read_config(folder)
    if missing := missing_plugins(config.plugins):
        raise FusionZooError(f"{name}: {how_to_import(missing)}. Nothing more was downloaded")
    files = listed_files(folder)
    for file in files:
        _check_kind(file, name)
    # The same commit, whatever happens to the branch meanwhile.
    return _snapshot(name, folder.name, token, ["digests.json", README, *files])


def _snapshot(name: str, revision: str | None, token: str | bool | None, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    with _one_line_errors(name, revision):
        folder = snapshot_download(
            name,
            revision=revision,
            token=token,
            allow_patterns=[_exactly(file) for file in files],
            library_name="fusionzoo",
            library_version=__version__,
        )
    return Path(str(folder))


def _check_kind(file: str, where: str) -> None:
    """Refuse a file that no model folder holds."""
    if not (file.endswith(KINDS) if "/" in file else file in TOP):
        raise FusionZooError(
            f"{where}: {file} is of no kind that a model folder holds: {', '.join(KINDS)}"
        )


def _exactly(file: str) -> str:
    """Return the pattern that only this name matches."""
    pattern = re.sub(r"([*?[])", r"[\1]", file)
    assert fnmatchcase(file, pattern)
    return pattern


@contextmanager
def _one_line_errors(name: str, revision: str | None) -> Iterator[None]:
    """Word the errors of huggingface_hub for users."""
    from huggingface_hub import constants, errors

    try:
        yield
    except FusionZooError:
        raise
    except errors.RevisionNotFoundError:
        raise FusionZooError(f"{name} has no branch, tag or commit {revision!r}") from None
    except errors.GatedRepoError as error:
        raise FusionZooError(
            f"{name} asks for its terms to be accepted: {one_line(error)}"
        ) from error
    except errors.RepositoryNotFoundError:
        raise FusionZooError(
            f"there is no folder {name} here, and no model {name} at {constants.ENDPOINT}, or it is"
            " private: token=... or `hf auth login`"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise FusionZooError(
            f"cannot reach {constants.ENDPOINT}, and the cache does not hold {name}:"
            f" {one_line(error)}"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        advice = ": the token may not do this" if status in (401, 403) else ""
        reason = error.server_message or one_line(error)
        raise FusionZooError(f"{constants.ENDPOINT}: {name}{advice}: {reason}") from error
    except Exception as error:
        raise FusionZooError(f"{constants.ENDPOINT}: {name}: {one_line(error)}") from error
