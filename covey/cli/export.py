"""`covey export`: write a trained model for transformers and vLLM."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from covey.cli.startup import STARTING, Trust, tell_edited, waiting
from covey.config import Config, load_config
from covey.errors import ConfigError, ModelError
from covey.hub_access import offline_if_unreachable
from covey.models.model_path import check_model_path
from covey.records.files import check_free
from covey.records.folder import RunFolder
from covey.records.model_card import Exported, model_card
from covey.records.resume import check_no_step, run_around, weights_of
from covey.screen import echo

Target = Annotated[
    str,
    typer.Argument(metavar="RUN|CHECKPOINT", help="The run, checkpoint or model to export."),
]
Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="The folder to create for the exported model.")
]
Step = Annotated[
    str | None,
    typer.Option(
        metavar="N|best",
        help="Export the checkpoint of training step N, or the best one by save.best. Default: the "
        "newest.",
    ),
]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float32"],
    typer.Option(help="Dtype of the exported weights; 'auto' means the compute dtype of the run."),
]
Repository = Annotated[
    str | None,
    typer.Option(
        metavar="OWNER/NAME",
        help="Also upload the exported folder to this repository on the Hugging Face Hub.",
    ),
]
Public = Annotated[
    bool,
    typer.Option(
        "--public", help="If --push creates a repository, make the repository public, not private."
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Export the model and list the files that --push would upload, but upload nothing.",
    ),
]


def export_command(
    target: Target,
    folder: Folder,
    step: Step = None,
    dtype: Dtype = "auto",
    push: Repository = None,
    public: Public = False,
    dry_run: DryRun = False,
    trust: Trust = None,
) -> None:
    """Export a model for transformers and vLLM, with a model card and without optimizer state.

    If the model has a LoRA adapter, the command merges the adapter into the weights of the base
    model. With --push, the exported folder is also uploaded to the Hugging Face Hub.
    """
    if push is None and (public or dry_run):
        raise ConfigError("--public and --dry-run need --push; add --push OWNER/NAME")
    upload = None if push is None else Push(repository=push, public=public)
    if upload is not None:
        upload.check()
        if not dry_run:
            upload.check_access()
    found = run_around(Path(target))
    run, source = None if found is None else RunFolder(found), target
    if run is None:
        check_no_step(target, step)
    if run is not None:
        tell_edited(run)
        source = str(weights_of(Path(target), "covey export {} " + shlex.quote(str(folder)), step))
    check_model_path(source)
    check_free(folder)
    config = Config() if run is None else load_config(str(run.config_file))
    chosen = _dtype(dtype, config, run)

    with waiting(STARTING) as say:
        from covey.config.resolve import template_of
        from covey.models.export import export_model  # imports torch, which takes seconds

        say(f"exporting {source}")
        card = partial(_card, run, folder.resolve().name, source, chosen)
        export_model(source, folder, dtype=chosen, template=template_of(config), card=card)
    echo(f"exported {source} to {folder} in {chosen}")
    if upload is not None:
        _push(upload, folder, dry_run)


def _push(push: Push, folder: Path, dry_run: bool) -> None:
    kind = "public" if push.public else "private"
    if not dry_run:
        echo(f"uploading to {push.repository} ({kind}, if it is new)")
        return echo(f"uploaded to {push.upload(folder)}")
    for name, size in files_to_push(folder):
        echo(f"would upload {size:>13,} bytes  {name}")
    echo(f"would upload to {push.repository} ({kind}, if it is new); nothing was sent")


def _card(
    run: RunFolder | None,
    name: str,
    source: str,
    dtype: str,
    stop_ids: Sequence[int],
    merged: bool,
) -> str:
    checkpoint = Path(source).name
    step = int(checkpoint) if run is not None and checkpoint.isdecimal() else None
    exported = Exported(
        name=name, source=source, step=step, dtype=dtype, stop_ids=stop_ids, merged=merged
    )
    return model_card(exported, run)


def _dtype(asked: str, config: Config, run: RunFolder | None) -> str:
    if asked != "auto":
        return asked
    if config.model.dtype != "auto":
        return config.model.dtype
    device = "cpu" if run is None else str(run.environment().get("device") or "cpu")
    return "bfloat16" if device.startswith("cuda") else "float32"


# Upload an exported model to the Hugging Face Hub.


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
