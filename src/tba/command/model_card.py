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
from tba.recipe_names import VARIANT_MARK
from tba.record.evaluations import figure
from tba.record.run_record import RunRecord
from tba.record.text import duration, percent, printable, short_number
from tba.types import Json, Version

LICENCE_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")  # as the Hub names licences
MAX_PROBLEMS = 4  # problems that are shown, each with the answer before and after
_MAX_CHARS = 400  # characters of a prompt or an answer
# Signs that Markdown or HTML could read as markup: all but some harmless ones and the point of a number.
_SIGNS = re.escape("".join(sorted(set(string.punctuation) - set(",'?%=+-"))))
_SIGN = re.compile(rf"(?!(?<=\d)\.\d)[{_SIGNS}]")
_METHOD = "[Trajectory Balance with Asynchrony](https://arxiv.org/abs/2503.18929)"
_REPO_NAME = re.compile(r"\w([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)
_FRONT_MATTER_LICENCE = re.compile(r"---\n(?:.*\n)*?license: *([a-z0-9.-]+) *\n")
# The settings on the card. Of texts these groups have only the names of choices, so no path, address or key.
_ON_CARD = re.compile(
    r"(steps|seed|searchers|sync-every|groups-per-step|group-size|samples-per-prompt|prompts-per-round|reference-reset"
    r"|policy-temperature|(objective|optimizer|exploration|replay\.(selection|pacing|buffer)|model\.lora)(\..*)?"
    r"|model\.generation\.max-completion-tokens)"
)


@dataclass(frozen=True)
class Base:
    """Describes the model that a run began with, as far as this machine's files say."""

    hub: str | None  # its name on the Hub
    licence: str | None
    description: str  # stands for the name where the model has none
    folder: Path | None = None  # where it is on this machine


def base_of(model: Mapping[str, Json], hub: str | None = None, licence: str | None = None) -> Base:
    """Returns the base of a run whose resolved model is `model`; `hub` and `licence` replace what its files say."""
    path = model.get("path")
    if not isinstance(path, str) or not path:
        is_shipped = isinstance(warm_start := model.get("warm_start"), dict) and bool(warm_start.get("shipped"))
        description = "a small model" + (" that comes with tba" if is_shipped else ", by the recipe's own warm start")
        return Base(hub, licence or ("apache-2.0" if is_shipped else None), description)
    adapter_note = ""
    if (config := Path(path) / CONFIG).is_file():  # an adapter: its configuration names the model it belongs to
        adapter_config = read_json(config, "give the run's own model back", base_model_name_or_path=str)
        base_path, adapter_note = adapter_config["base_model_name_or_path"], ", with an adapter merged into it"
        licence, inner_path = licence or _licence(config.parent), config.parent / base_path
        path = str(inner_path) if inner_path.exists() and not Path(base_path).exists() else base_path
    if not Path(path).is_dir():
        name = hub or (path if _is_cached(path) else None)
        return Base(name, licence, f"a model that the run has read from elsewhere{adapter_note}")
    folder = Path(path)
    return Base(hub or _origin(folder), licence or _licence(folder), f"a model in a folder{adapter_note}", folder)


def card_text(
    repo: str,
    record: RunRecord,
    version: Version,
    facts: Mapping[str, Any],
    base: Base,
    hides_text: bool,
    files: set[str],
) -> str:
    """Returns the card of a run's checkpoint of this version, for the repository `repo`.

    `hides_text`: the run hides its texts. `files`: the names in the model's folder, before the card is written.
    """
    record, resolved = record.until(version), facts["resolved"]
    parts = [
        _metadata(base, files),
        f"# {repo.partition('/')[2]}",
        _opening(facts, version, base),
        "## Held-out accuracy",
        accuracy_table(record, version),
        *([] if hides_text else _examples(record)),
        "## How it was trained",
        _training(record, resolved),
        "## Use",
        _usage_example(repo),
        "## Licence",
        _licence_sentence(base, files),
    ]
    return "\n\n".join(parts) + "\n"


def escape(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Returns the text on one line, signs for its line ends, escaped so that Markdown and HTML show it as it is."""
    line = printable(text.strip().replace("\n", "⏎"), max_chars, newlines=False)
    return _SIGN.sub(lambda sign: f"&#{ord(sign[0])};", line)


def accuracy_table(record: RunRecord, version: Version) -> str:
    """Returns the table of held-out figures of the run's first version and of its last one up to `version`."""
    figures = record.figures()
    rows = [
        [
            escape(name),
            figure(start),
            figure(end),
            f"{start.n:,}" + (f", then {end.n:,}" if end and end.n != start.n else ""),
        ]
        for name, (start, end) in figures.items()
    ]
    if not rows:
        return "It was not evaluated."
    text = _table(("metric", "before", "after", "problems"), rows)
    text += (
        "\n\nWith 95 % intervals, on problems that were held out of training. *pass@1/greedy*: the most likely answer; "
        "*sampled*: at the training temperature; *pass@K*: one of K samples is right."
    )
    newest_version = max((end.version for _, end in figures.values() if end is not None), default=None)
    if newest_version is None:
        return f"{text} Of the weights here nothing was measured."
    if newest_version < version:
        steps = f"step {newest_version.step}, the last evaluated; the weights here are of step {version.step}"
        text += f" *After* is of {steps}."
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
    source, mark, variant = facts["recipe"].partition(VARIANT_MARK)
    recipe = f"a recipe of its own, {escape(Path(source).name)}" if source.endswith(".py") else escape(source)
    name = f"[{base.hub}](https://huggingface.co/{base.hub})" if base.hub else base.description
    task = facts["resolved"].get("task")
    task = task.get("name") or str(task.get("class", "")).rpartition(".")[2] if isinstance(task, dict) else "its own"
    return (
        f"The base, {name}, was trained for {version.step:,} steps by reinforcement learning ({_METHOD}), with `tba`."
        f"\n\n- Recipe: {recipe}{mark}{escape(variant)}\n- Task: {escape(str(task))}"
    )


def _training(record: RunRecord, resolved: Mapping[str, Json]) -> str:
    lines = []
    if (summary := record.summary) is not None:
        ledger = summary.trajectories
        lines += [
            f"- {summary.steps:,} steps in {duration(summary.wall_seconds.total)} of wall-clock",
            f"- {ledger.generated:,} answers sampled ({short_number(summary.tokens.generated)} tokens), of which "
            f"{percent(ledger.trained_share)} were trained on, {ledger.mean_uses:.1f} times each",
            f"- {summary.lag.mean:.1f} updates on average between the weights that sampled an answer and its use",
            f"- with {escape(', '.join(f'{k} {v}' for k, v in summary.versions.items()))}",
        ]
    else:
        lines.append("- The run had not ended when this was written.")
    rows = [
        (f"`{name}`", escape(str(value))) for name, value in settings_of(resolved).items() if _ON_CARD.fullmatch(name)
    ]
    table = _table(("setting", "value"), rows)
    return "\n".join(lines) + f"\n\n<details><summary>Settings</summary>\n\n{table}\n\n</details>"


def _examples(record: RunRecord) -> list[str]:
    """Returns a few held-out problems with the answers of the first version evaluated and of the last."""
    pairs = record.answers_before_after()
    if not pairs:
        return []
    rows = [
        [escape(answers[0].prompt), *(_graded_answer(answer.completion, answer.correct) for answer in answers)]
        for answers in pairs[:MAX_PROBLEMS]
    ]
    return ["## The same held-out problems, before and after", _table(("problem", "before", "after"), rows)]


def _usage_example(repo: str) -> str:
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


def _licence_sentence(base: Base, files: set[str]) -> str:
    file_note = " Its text is in the file LICENSE." if "LICENSE" in files else ""
    if base.licence is None:
        return f"Not stated: the base's own licence applies.{file_note}"
    return f"{base.licence}.{file_note}"


def _graded_answer(answer: str, is_correct: bool) -> str:
    return f"{'right' if is_correct else 'wrong'}: {escape(answer) or '(nothing)'}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def _is_cached(path: str) -> bool:
    """Returns whether the path names a model of the Hub that this machine has in its cache."""
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
    """Returns the licence of the model in a folder, from the file of `tba model` or from the folder's own card."""
    with suppress(OSError, ValueError):
        spdx = parse_json((folder / "origin.json").read_bytes(), spdx=str | None).get("spdx")
        if isinstance(spdx, str) and LICENCE_NAME.fullmatch(spdx):
            return spdx
    try:
        front_matter = _FRONT_MATTER_LICENCE.match((folder / "README.md").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return front_matter[1] if front_matter is not None and LICENCE_NAME.fullmatch(front_matter[1]) else None


def require_repo(name: str, label: str) -> str:
    """Returns a name of the form OWNER/NAME. Raises `UserError` for any that the Hub does not take."""
    if not _REPO_NAME.fullmatch(name) or "--" in name or ".." in name or len(name) > 96 or name.endswith(".git"):
        raise UserError(
            f"{label} is {name!r}: give OWNER/NAME of letters, digits, '-', '_' and '.', such as me/my-model (96 at "
            "most, no '--' or '..', and '-', '.' and '.git' not at the end)"
        )
    return name
