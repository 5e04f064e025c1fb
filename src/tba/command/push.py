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

from tba.command.model_card import LICENCE, base_of, card, require_repo
from tba.command.options import PushOptions
from tba.errors import UserError
from tba.grading import in_thread
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
_ENDINGS = {".json", ".safetensors", ".jinja", ".txt", ".model"}
_LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md")


def push_run(path: Path, repo: str, options: PushOptions) -> int:
    """Upload a run's model, or write the folder that would be uploaded; prints where it is."""
    require_repo(repo, "the name")
    if options.base is not None:
        require_repo(options.base, "--base")
    if options.licence is not None and not LICENCE.fullmatch(options.licence):
        raise UserError(
            f"--licence is {options.licence!r}: give the Hub's name of one, such as apache-2.0, mit or other"
        )
    view = View(terminal())
    run, chosen = RunDirectory.open(path), _chosen(path, options.best)
    if options.out is not None:
        if options.out.exists() and not (options.out.is_dir() and not any(options.out.iterdir())):
            raise UserError(f"{options.out} is there already: choose another --out, or remove it")
        try:
            with atomic_folder(options.out) as folder:
                _fill(folder, run, chosen, repo, options, view)
        except OSError as error:
            raise UserError(f"{options.out} cannot be written ({error.strerror}): choose another --out") from error
        found = [file.stat().st_size for file in options.out.iterdir()]
        view.say(f"{options.out}: {len(found)} files, {size(sum(found))}; nothing was uploaded")
        return 0
    token = _token()
    _within(_ANSWER_S, "answer", lambda: _hub(token).whoami())
    with tempfile.TemporaryDirectory(prefix=".push-", dir=path) as place:
        _fill(Path(place), run, chosen, repo, options, view)
        said = f"Step {chosen.version.step} of a run by tba"
        _within(_UPLOAD_S, "take the upload", lambda: _upload(token, repo, Path(place), options.private, said))
    view.say(f"{_hub(token).endpoint}/{repo}: step {chosen.version.step} of {path}")
    return 0


def _chosen(path: Path, best: bool) -> Checkpoint:
    """Returns a checkpoint that is whole. Raises `UserError` when there is none."""
    folder = path / "checkpoints"
    if best:
        link = path / "best"
        name = link.readlink().name if link.is_symlink() else ""
        if not checkpoint.STEP.fullmatch(name):
            raise UserError(f"{path} has no best checkpoint, because none was evaluated: leave --best out")
        found = Checkpoint.load(folder / name)
        found.verify()
        return found
    newest, damaged = newest_sound_checkpoint(folder)
    if newest is None:
        why = damaged[0] if damaged else "it wrote none"
        raise UserError(f"{path} has no checkpoint to share ({why}): let the run make one (--run.checkpoint-every)")
    return newest


def _fill(folder: Path, run: RunDirectory, chosen: Checkpoint, repo: str, options: PushOptions, view: View) -> None:
    """Write the model, its base's licence and its card into `folder`."""
    for file in sorted(chosen.path.iterdir()):
        if file.name not in _NOT_MODEL and file.suffix in _ENDINGS and file.is_file() and not file.is_symlink():
            shutil.copyfile(file, folder / file.name)
    facts, record = run.facts, RunRecord.read(run.path)
    resolved = facts["resolved"]
    model = setting(resolved, "model") or {}
    base = base_of(model, options.base, options.licence)
    licences = [base.folder / name for name in _LICENCES] if base.folder is not None else []
    for file in [file for file in licences if file.is_file()][:1]:
        shutil.copyfile(file, folder / "LICENSE")
    hidden = setting(resolved, "record", "hide_text") is True
    files = {file.name for file in folder.iterdir()}
    text = card(repo, record, chosen.version, facts, base, hidden, files)
    (folder / "README.md").write_text(text, encoding="utf-8", errors="replace")
    if base.hub is None and model.get("path"):
        view.say(
            "note: the base's name on the Hub is not known, so the card does not link it: give --base OWNER/NAME",
        )
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


def _hub(token: str) -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(token=token)


def _upload(token: str, repo: str, folder: Path, private: bool, said: str) -> None:
    hub = _hub(token)
    hub.create_repo(repo, private=private or None, exist_ok=True)
    hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=said)


def _within(seconds: float, what: str, ask: Callable[[], T]) -> T:
    """Returns what the Hub answers. Raises `UserError` when it refuses, cannot be reached or takes longer.

    It is asked in a thread, because looking up an address and connecting to it know no deadline.
    """
    answer = in_thread("hub", ask)
    try:
        return answer.result(seconds)
    except Exception as error:  # of whichever library it speaks HTTP by
        why = next(iter(str(error).split("\n")), "") or type(error).__name__
        if not answer.done():
            why = f"no answer within {seconds:.0f} s"
        raise UserError(
            f"the Hub did not {what} ({why[:200]}): check network, token and name, or give --out DIR, which "
            "needs none of them"
        ) from error
