"""The model card of a checkpoint: what the Hugging Face Hub shows of it, as Markdown with metadata.

Invariant: it is made from what the run left on disk. Foreign text (prompts, answers, names) is only ever text on it;
of a run that was recorded with `record.hide_text` it has no prompt and no answer. No path of this machine is on it.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.command.report_data import settings_of
from tba.errors import UserError
from tba.json_input import parse_json, read_json
from tba.policy.lora import CONFIG
from tba.record.evaluations import figure
from tba.record.run_record import RunRecord
from tba.record.text import count, duration, percent, printable
from tba.shipped import MARK
from tba.types import Json, Version

LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")  # as the Hub names licences
ANSWERS = 4  # problems that are shown, each with the answer before and after
_LONGEST = 400  # characters of a prompt or an answer
# What Markdown or HTML could take for more than text: signs, but for harmless ones and the point of a number.
_SIGNS = re.escape("".join(sorted(set(string.punctuation) - set(",'?%=+-"))))
_SIGN = re.compile(rf"(?!(?<=\d)\.\d)[{_SIGNS}]")
_METHOD = "[Trajectory Balance with Asynchrony](https://arxiv.org/abs/2503.18929)"
_REPO = re.compile(r"\w([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)
_FRONT = re.compile(r"---\n(?:.*\n)*?license: *([a-z0-9.-]+) *\n")
# The settings on the card. Of texts these groups have only the names of choices, so no path, address or key.
_SHOWN = re.compile(
    r"(steps|seed|searchers|sync-every|groups-per-step|group-size|samples-per-prompt|prompts-per-round|reference-reset"
    r"|policy-temperature|(objective|optimizer|exploration|replay\.(selection|pacing|buffer)|model\.lora)(\..*)?"
    r"|model\.generation\.max-completion-tokens)"
)


@dataclass(frozen=True)
class Base:
    """Describes the model that a run began with, as far as it can be known without a network."""

    hub: str | None  # its name on the Hub
    licence: str | None
    said: str  # in words, where it has no name
    folder: Path | None = None  # where it is on this machine


def base_of(model: Mapping[str, Json], hub: str | None = None, licence: str | None = None) -> Base:
    """Returns the base of a run whose resolved model is `model`; what is given goes before what is found."""
    path = model.get("path")
    if not isinstance(path, str) or not path:
        shipped = isinstance(made := model.get("warm_start"), dict) and bool(made.get("shipped"))
        said = "a small model that comes with tba" if shipped else "a small model, by the recipe's own warm start"
        return Base(hub, licence or ("apache-2.0" if shipped else None), said)
    adapted = ""
    if (config := Path(path) / CONFIG).is_file():  # what the adapter is of
        named = read_json(config, "give the run's own model back", base_model_name_or_path=str)
        of, adapted = named["base_model_name_or_path"], ", with an adapter merged into it"
        licence, path = licence or _licence(config.parent), str(config.parent / of) if not Path(of).exists() else of
        path = path if Path(path).exists() else of
    if not Path(path).is_dir():
        name = hub or (path if _is_cached(path) else None)
        return Base(name, licence, f"a model that the run has read from elsewhere{adapted}")
    folder = Path(path)
    return Base(hub or _origin(folder), licence or _licence(folder), f"a model in a folder{adapted}", folder)


def card(
    repo: str, record: RunRecord, version: Version, facts: Mapping[str, Any], base: Base, hidden: bool, files: set[str]
) -> str:
    """Returns the card of a run's checkpoint of this version, which is to be called `repo`.

    `hidden`: the run hides its texts. `files`: what is in the folder of the model besides it.
    """
    record, resolved = record.until(version), facts["resolved"]
    parts = [
        _metadata(base, files),
        f"# {repo.partition('/')[2]}",
        _opening(facts, version, base),
        "## Held-out accuracy",
        accuracy(record, version),
        *([] if hidden else _examples(record)),
        "## How it was trained",
        _training(record, resolved),
        "## Use",
        _use(repo),
        "## Licence",
        _licence_said(base, files),
    ]
    return "\n\n".join(parts) + "\n"


def escaped(text: str, longest: int = _LONGEST) -> str:
    """Returns text of which Markdown and HTML make nothing, on one line; line ends are shown as a sign."""
    shown = printable(text.strip().replace("\n", "⏎"), longest, newlines=False)
    return _SIGN.sub(lambda sign: f"&#{ord(sign[0])};", shown)


def accuracy(record: RunRecord, version: Version) -> str:
    """Returns the table of held-out figures, of the first version and of the last one until `version`, the weights'."""
    figures = record.figures()
    rows = [
        [
            escaped(name),
            figure(e),
            figure(after),
            f"{e.n:,}" + (f", then {after.n:,}" if after and after.n != e.n else ""),
        ]
        for name, (e, after) in figures.items()
    ]
    if not rows:
        return "It was not evaluated."
    text = _table(("metric", "before", "after", "problems"), rows)
    text += (
        "\n\nWith 95 % intervals, on problems that were held out of training. *pass@1/greedy*: the most likely answer; "
        "*sampled*: at the training temperature; *pass@K*: one of K samples is right."
    )
    measured = max((after.version for _, after in figures.values() if after is not None), default=None)
    if measured is None:
        return f"{text} Of the weights here nothing was measured."
    if measured < version:
        text += f" *After* is of step {measured.step}, the last evaluated; the weights here are of step {version.step}."
    return text


def _metadata(base: Base, files: set[str]) -> str:
    """Returns the block of YAML that the Hub reads."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=base.hub,
        library_name="transformers",
        license=base.licence,
        license_link="LICENSE" if "LICENSE" in files and base.licence == "other" else None,
        pipeline_tag="text-generation",
        tags=["tba", "reinforcement-learning", "trajectory-balance"],
    )
    return f"---\n{data.to_yaml()}\n---"


def _opening(facts: Mapping[str, Any], version: Version, base: Base) -> str:
    source, mark, variant = facts["recipe"].partition(MARK)
    recipe = f"a recipe of its own, {escaped(Path(source).name)}" if source.endswith(".py") else escaped(source)
    name = f"[{base.hub}](https://huggingface.co/{base.hub})" if base.hub else base.said
    task = facts["resolved"].get("task")
    kind = task.get("name") or str(task.get("class", "")).rpartition(".")[2] if isinstance(task, dict) else "its own"
    return (
        f"The base, {name}, was trained for {version.step:,} steps by reinforcement learning ({_METHOD}), with `tba`."
        f"\n\n- Recipe: {recipe}{mark}{escaped(variant)}\n- Task: {escaped(str(kind))}"
    )


def _training(record: RunRecord, resolved: Mapping[str, Json]) -> str:
    said = []
    if (summary := record.summary) is not None:
        made, given = summary.trajectories, f"{count(summary.tokens.generated)} tokens"
        said += [
            f"- {summary.steps:,} steps in {duration(summary.wall_seconds.total)} of wall-clock",
            f"- {made.generated:,} answers sampled ({given}), of which {percent(made.trained_share)} were trained on, "
            f"{made.mean_uses:.1f} times each",
            f"- {summary.lag.mean:.1f} updates on average between the weights that sampled an answer and its use",
            f"- with {escaped(', '.join(f'{k} {v}' for k, v in summary.versions.items()))}",
        ]
    else:
        said.append("- The run had not ended when this was written.")
    rows = [
        (f"`{name}`", escaped(str(value))) for name, value in settings_of(resolved).items() if _SHOWN.fullmatch(name)
    ]
    table = _table(("setting", "value"), rows)
    return "\n".join(said) + f"\n\n<details><summary>Settings</summary>\n\n{table}\n\n</details>"


def _examples(record: RunRecord) -> list[str]:
    """Returns a few held-out problems with the answers of the first version evaluated and of the last."""
    pairs = record.answers_before_after()
    if not pairs:
        return []
    rows = [
        [escaped(before.prompt), _marked(before.completion, before.correct), _marked(after.completion, after.correct)]
        for before, after in pairs[:ANSWERS]
    ]
    return ["## The same held-out problems, before and after", _table(("problem", "before", "after"), rows)]


def _use(repo: str) -> str:
    return f"""\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo}")
model = AutoModelForCausalLM.from_pretrained("{repo}")
```

The files are in the ordinary Hugging Face layout. Not tried with these weights, for vLLM and lm-eval:

```
vllm serve {repo}
lm_eval --model hf --model_args pretrained={repo} --tasks gsm8k
```"""


def _licence_said(base: Base, files: set[str]) -> str:
    beside = " Its text is in the file LICENSE." if "LICENSE" in files else ""
    if base.licence is None:
        return f"Not stated: the base's own licence applies.{beside}"
    return f"{base.licence}.{beside}"


def _marked(answer: str, correct: bool) -> str:
    return f"{'right' if correct else 'wrong'}: {escaped(answer) or '(nothing)'}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _is_cached(path: str) -> bool:
    """Returns whether it is a model of the Hub that this machine has fetched."""
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(path, "config.json"), str)
    except ValueError:  # no name that the Hub could have
        return False


def _origin(folder: Path) -> str | None:
    """Returns the name on the Hub of a model that `tba model` has written."""
    with suppress(OSError, ValueError):
        return str(parse_json((folder / "origin.json").read_bytes(), hub=str)["hub"])
    return None


def _licence(folder: Path) -> str | None:
    """Returns the licence that a folder says its model has: in its own card, or where `tba model` noted it."""
    with suppress(OSError, ValueError):
        noted = parse_json((folder / "origin.json").read_bytes(), spdx=str | None).get("spdx")
        if isinstance(noted, str) and LICENCE.fullmatch(noted):
            return noted
    try:
        found = _FRONT.match((folder / "README.md").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found is not None and LICENCE.fullmatch(found[1]) else None


def require_repo(name: str, what: str) -> str:
    """Returns a name of the form OWNER/NAME. Raises `UserError` for any that the Hub does not take."""
    if not _REPO.fullmatch(name) or "--" in name or ".." in name or len(name) > 96 or name.endswith(".git"):
        raise UserError(
            f"{what} is {name!r}: give OWNER/NAME of letters, digits, '-', '_' and '.', such as me/my-model (96 at "
            "most, no '--' or '..', and '-', '.' and '.git' not at the end)"
        )
    return name
