"""`tba push RUN OWNER/NAME`: a run's model on the Hugging Face Hub, with a model card.

Invariant: what is uploaded is the model of one checkpoint, whole (its checksums are read first), without the
optimizer's state; nothing is uploaded before the folder is complete. With --out no network is used.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tba.command.model_card import LICENCE_NAME, base_of, card_text, require_repo
from tba.command.options import PushOptions
from tba.errors import UserError
from tba.grading import call_in_thread
from tba.record.live import View
from tba.record.run_record import RunRecord
from tba.record.terminal import terminal
from tba.record.text import size
from tba.runtime.run_directory import RunDirectory, setting
from tba.training import checkpoint, optimizer
from tba.training.checkpoint import Checkpoint, newest_sound_checkpoint
from tba.weights.atomic_dir import atomic_folder

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")
_ANSWER_S = 10.0  # that the Hub has to answer the first request
_UPLOAD_S = 12 * 3600.0  # for an upload: 140 GB at 3 MB/s
_NOT_MODEL = {optimizer.STATE_FILE, optimizer.FACTS_FILE, checkpoint.RUN, checkpoint.HEADS, "adapters.safetensors"}
_MODEL_SUFFIXES = {".json", ".safetensors", ".jinja", ".txt", ".model"}
_LICENCE_NAMES = ("LICENSE", "LICENSE.txt", "LICENSE.md")


def push_run(path: Path, repo: str, options: PushOptions) -> int:
    """Uploads a run's model, or writes the folder that would be uploaded, and prints its place."""
    require_repo(repo, "the name")
    if options.base is not None:
        require_repo(options.base, "--base")
    if options.licence is not None and not LICENCE_NAME.fullmatch(options.licence):
        raise UserError(f"--licence is {options.licence!r}: give the Hub's name of one, like apache-2.0, mit or other")
    view = View(terminal())
    run, source = RunDirectory.open(path), _choose_checkpoint(path, options.best)
    if options.out is not None:
        if options.out.exists() and not (options.out.is_dir() and not any(options.out.iterdir())):
            raise UserError(f"{options.out} is there already: choose another --out, or remove it")
        try:
            with atomic_folder(options.out) as folder:
                _fill(folder, run, source, repo, options, view)
        except OSError as error:
            raise UserError(f"{options.out} cannot be written ({error.strerror}): choose another --out") from error
        sizes = [file.stat().st_size for file in options.out.iterdir()]
        view.say(f"{options.out}: {len(sizes)} files, {size(sum(sizes))}; nothing was uploaded")
        return 0
    token = _token()
    _call_hub(_ANSWER_S, "answer", lambda: _hub_client(token).whoami())
    with tempfile.TemporaryDirectory(prefix=".push-", dir=path) as folder:
        _fill(Path(folder), run, source, repo, options, view)
        message = f"Step {source.version.step} of a run by tba"
        _call_hub(_UPLOAD_S, "take the upload", lambda: _upload(token, repo, Path(folder), options.private, message))
    view.say(f"{_hub_client(token).endpoint}/{repo}: step {source.version.step} of {path}")
    return 0


def _choose_checkpoint(path: Path, use_best: bool) -> Checkpoint:
    """Returns the best or the newest checkpoint whose files are intact. Raises `UserError` when there is none."""
    folder = path / "checkpoints"
    if use_best:
        link = path / "best"
        name = link.readlink().name if link.is_symlink() else ""
        if not checkpoint.STEP.fullmatch(name):
            raise UserError(f"{path} has no best checkpoint, because none was evaluated: leave --best out")
        best_checkpoint = Checkpoint.load(folder / name)
        best_checkpoint.verify()
        return best_checkpoint
    newest_checkpoint, damage_notes = newest_sound_checkpoint(folder)
    if newest_checkpoint is None:
        reason = damage_notes[0] if damage_notes else "it wrote none"
        raise UserError(f"{path} has no checkpoint to share ({reason}): let the run make one (--run.checkpoint-every)")
    return newest_checkpoint


def _fill(folder: Path, run: RunDirectory, source: Checkpoint, repo: str, options: PushOptions, view: View) -> None:
    """Write the model, its base's licence and its card into `folder`."""
    for file in sorted(source.path.iterdir()):
        if file.name not in _NOT_MODEL and file.suffix in _MODEL_SUFFIXES and file.is_file() and not file.is_symlink():
            shutil.copyfile(file, folder / file.name)
    facts, record = run.facts, RunRecord.read(run.path)
    resolved = facts["resolved"]
    model = setting(resolved, "model") or {}
    base = base_of(model, options.base, options.licence)
    licences = [base.folder / name for name in _LICENCE_NAMES] if base.folder is not None else []
    for file in [file for file in licences if file.is_file()][:1]:
        shutil.copyfile(file, folder / "LICENSE")
    hides_text = setting(resolved, "record", "hide_text") is True
    text = card_text(repo, record, source.version, facts, base, hides_text, {file.name for file in folder.iterdir()})
    (folder / "README.md").write_text(text, encoding="utf-8", errors="replace")
    if base.hub is None and model.get("path"):
        view.say("note: the base's name on the Hub is not known, so the card does not link it: give --base OWNER/NAME")
    if base.licence is None:
        view.say("note: the base's licence is not known, so the card states none: give --licence")


def _token() -> str:
    """Returns the Hub's token. Raises `UserError` when there is none, or the Hub is not to be used."""
    from huggingface_hub import get_token
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be uploaded: unset it, or give --out DIR")
    token = get_token()
    if token is None:
        raise UserError("there is no token for the Hub: run `hf auth login` or set HF_TOKEN, or give --out DIR")
    return token


def _hub_client(token: str) -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(token=token)


def _upload(token: str, repo: str, folder: Path, is_private: bool, message: str) -> None:
    hub = _hub_client(token)
    hub.create_repo(repo, private=is_private or None, exist_ok=True)
    hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)


def _call_hub(seconds: float, action: str, request: Callable[[], T]) -> T:
    """Returns the Hub's answer to a request. Raises `UserError` when it refuses, is out of reach or takes longer.

    The request is made in a thread, because looking up an address and connecting to it have no deadline.
    """
    future = call_in_thread("hub", request)
    try:
        return future.result(seconds)
    except Exception as error:  # the libraries that speak HTTP raise errors of many classes
        reason = next(iter(str(error).split("\n")), "") or type(error).__name__
        if not future.done():
            reason = f"no answer within {seconds:.0f} s"
        raise UserError(
            f"the Hub did not {action} ({reason[:200]}): check network, token and name, or give --out DIR, which "
            "needs none of them"
        ) from error
