"""Upload an exported model to the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from covey.errors import ConfigError, ModelError
from covey.hub_access import offline_if_unreachable

MESSAGE = "Upload a model trained with Covey"


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """An upload to the repository OWNER/NAME, which is private unless `public` is set."""

    repository: str
    public: bool = False

    def check(self) -> None:
        """Raise ConfigError if the repository name is not valid."""
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        try:
            validate_repo_id(self.repository)
        except HFValidationError as error:
            raise ConfigError(f"--push {self.repository}: {error}") from None
        if self.repository.count("/") != 1:
            raise ConfigError(f"--push {self.repository}: write the repository as OWNER/NAME")

    def check_access(self) -> None:
        """Raise ModelError if the Hub cannot be reached or the user is not logged in."""
        from huggingface_hub import get_token

        if offline_if_unreachable():
            raise ModelError(
                "--push: the Hugging Face Hub cannot be reached; use --dry-run to list the files"
            )
        if get_token() is None:
            raise ModelError("--push: you are not logged in to Hugging Face; run `hf auth login`")

    def upload(self, folder: Path) -> str:
        """Create the repository if necessary, upload all files, and return the repository's URL."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        api = HfApi()
        try:
            made = api.create_repo(self.repository, private=not self.public, exist_ok=True)
            api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=MESSAGE)
        except (HfHubHTTPError, OSError) as error:
            raise ModelError(f"cannot push to {self.repository}: {error}") from None
        return str(made)


def files_to_push(folder: Path) -> list[tuple[str, int]]:
    """Return the files of a folder, sorted by name, with their sizes in bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(str(path.relative_to(folder)), path.stat().st_size) for path in files]
