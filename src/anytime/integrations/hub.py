"""Saved models on the Hugging Face hub: folders of `anytime.save` are uploaded and downloaded as they are.

What is downloaded is compared with the manifest of the folder, and no code of a repository is read or run. A folder with parts
of your own needs the same `build` as from a disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anytime.artifacts import bundle_kind, bundle_names, verify_bundle
from anytime.errors import FileError, FormatError, MissingExtraError, MissingFileError, OptionError
from anytime.models.attach.exits import Head
from anytime.models.stored.networks import Build
from anytime.outputs import exists
from anytime.run import load, save

_FILES = ("*.json", "*.safetensors", "*.txt", "*.onnx", "README.md")
"""What is downloaded: none of these can run code."""
_KINDS = ("model", "export")
_MANIFEST, _CARD = "manifest.json", "README.md"


def from_pretrained(
    folder_or_repo_id: str | Path,
    *,
    build: Build | Sequence[Build] | None = None,
    head: Head | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache: str | Path | None = None,
) -> Any:
    """Load a model from a folder of `anytime.save`, or from a repository of the hub.

    Args:
        folder_or_repo_id: A folder, or a name such as `me/my-model`.
        build: As for `anytime.load`, as the next one.
        head: The same.
        revision: As for `download`, as the next two.
        token: The same.
        cache: The same.

    Example:
        >>> import anytime
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = anytime.save(anytime.create_model("mlp-toy", classes=3), folder)
        ...     from_pretrained(folder).num_exits
        5
    """
    local = exists(folder_or_repo_id, Path.is_dir)
    folder = folder_or_repo_id if local else download(str(folder_or_repo_id), revision=revision, token=token, cache=cache)
    return load(folder, build=build, head=head)


def download(repo_id: str, *, revision: str | None = None, token: str | None = None, cache: str | Path | None = None) -> Path:
    """Download a repository of the hub; the folder works everywhere that one of `anytime.save` does, such as `Runner.load`.

    Args:
        repo_id: A name such as `me/my-model`.
        revision: A branch, tag or commit; the newest by default.
        token: For a private repository; by default that of `hf auth login`.
        cache: Where to keep it; by default a folder `anytime` in that of the hub's library. Files that are there are not
            downloaded again.
    """
    hub = _hub()
    place = Path(hub.constants.HF_HOME) / "anytime" if cache is None else Path(cache)
    name = repo_id.replace("/", "--") + ("" if revision is None else f"@{revision.replace('/', '--')}")
    try:
        found = Path(
            hub.snapshot_download(repo_id, revision=revision, token=token, local_dir=place / name, allow_patterns=list(_FILES))
        )
    except Exception as error:  # the hub's library and its HTTP client have no common type of error
        raise _failed("downloaded", repo_id, error) from error
    if bundle_kind(found) not in _KINDS:
        raise FormatError(
            f"the repository {repo_id} is not a model that anytime.save wrote",
            expected=f"a {_MANIFEST} of a model",
            fix="check the name; a Hugging Face model is loaded with transformers, and gets exits by anytime.attach_exits",
            path=found,
        )
    verify_bundle(found)
    return found


def push_to_hub(
    model_or_folder: Any,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    message: str = "Upload model",
    **options: Any,
) -> str:
    """Upload a model, or a folder of `anytime.save`, to the hub; the repository is created if there is none.

    Args:
        model_or_folder: A model, which is saved first, or a folder.
        repo_id: A name such as `me/my-model`.
        private: Whether a new repository is private.
        token: With permission to write; by default that of `hf auth login`.
        revision: The branch; by default `main`.
        message: Of the commit.
        options: For a model, arguments of `anytime.save`.

    Returns:
        The address of the repository.
    """
    hub = _hub()
    if not isinstance(model_or_folder, str | Path):
        with tempfile.TemporaryDirectory() as place:
            folder = save(model_or_folder, Path(place) / repo_id.rpartition("/")[2], **options)
            return push_to_hub(folder, repo_id, private=private, token=token, revision=revision, message=message)
    if options:
        raise OptionError(
            f"{', '.join(options)} were given with a folder",
            expected="options of anytime.save with a model",
            fix="save the model with these options, then push its folder",
        )
    folder = Path(model_or_folder)
    if not exists(folder, Path.is_dir):
        raise MissingFileError(
            f"there is no folder {folder}", expected="a folder of anytime.save", fix="check the path", path=folder
        )
    if bundle_kind(folder) not in _KINDS:
        raise FormatError(
            f"{folder} is not a folder of anytime.save",
            expected=f"a {_MANIFEST} of a model",
            fix="anytime.save(model, folder) writes one",
            path=folder,
        )
    verify_bundle(folder)
    names = [*bundle_names(folder), _MANIFEST, _CARD]
    api = hub.HfApi(token=token)
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            folder_path=folder,
            repo_id=address.repo_id,
            revision=revision,
            commit_message=message,
            allow_patterns=names,
        )
    except Exception as error:
        raise _failed("uploaded", repo_id, error) from error
    return str(address)


def _hub() -> Any:
    try:
        import huggingface_hub.constants  # which the package alone does not load
    except ImportError as error:
        raise MissingExtraError(
            "huggingface_hub is not installed", expected="the extra hub", fix="pip install 'anytime-nn[hub]'"
        ) from error
    return huggingface_hub


def _failed(what: str, repo_id: str, error: Exception) -> FileError:
    why = " ".join(str(error).split())[:300] or type(error).__name__
    return FileError(
        f"{repo_id!r} could not be {what}: {why}",
        expected="a repository of the hub, such as 'me/my-model', and a token that may use it",
        fix="check the name and the connection; log in with `hf auth login`, or pass token=",
        path=repo_id,
    )
