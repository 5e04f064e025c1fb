"""A recipe from the command line: what can be set, what is refused and in which words."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tba.__main__ import main
from tba.apps.red_team.endpoint import EndpointVictim
from tba.apps.red_team.near import NearDuplicates
from tba.command.table import COMMANDS
from tba.config_file import with_config
from tba.errors import UserError
from tba.fields import FLAGS_ELSEWHERE, comments, fields_of, flags, help_of, with_new_names, without_effect
from tba.objectives.grpo import Grpo
from tba.recipe import Recipe, settings_json
from tba.recipe_names import description_of, recipe_names
from tba.recipe_source import write_recipe
from tba.replay.buffer import BufferSettings
from tba.runtime.run_directory import RunDirectory, new_path
from tba.schedules import WarmupCosine, WarmupStableDecay
from tba.settings import LEADING_FLAGS, find, keep_last_values, override

TOY = str(Path(__file__).parent / "toy" / "recipe.py")
QUICKSTART, GSM8K = find("quickstart"), find("gsm8k")


def overridden(recipe: Recipe, *arguments: str) -> Recipe:
    return override(recipe, arguments, "tba train it")


def test_nothing_given_changes_nothing() -> None:
    for name in recipe_names():
        assert overridden(find(name)) == find(name)


def test_fields_are_set_by_dotted_name_at_any_depth_and_the_rest_stays() -> None:
    recipe = overridden(
        QUICKSTART,
        *("--steps", "7", "--task.digits", "2", "--replay.pacing.max-mean-uses", "3.5", "--record.no-tensorboard"),
        *("--model.generation.stop-strings", "a", "b", "--optimizer.betas", "0.5", "0.6", "--model.dtype", "float32"),
        "--model.warm-start.scratch.hidden-size=64",
    )
    warm_start = QUICKSTART.model.warm_start
    assert warm_start is not None
    expected = replace(
        QUICKSTART,
        steps=7,
        task=replace(QUICKSTART.task, digits=2),
        replay=replace(QUICKSTART.replay, pacing=replace(QUICKSTART.replay.pacing, max_mean_uses=3.5)),
        record=replace(QUICKSTART.record, tensorboard=False),
        optimizer=replace(QUICKSTART.optimizer, betas=(0.5, 0.6)),
        model=replace(
            QUICKSTART.model,
            dtype="float32",
            generation=replace(QUICKSTART.model.generation, stop_strings=("a", "b")),
            warm_start=replace(warm_start, scratch=replace(warm_start.scratch, hidden_size=64)),
        ),
    )
    assert recipe == expected


def test_a_schedule_has_the_fields_of_the_class_that_the_recipe_chose() -> None:
    assert isinstance(QUICKSTART.optimizer.schedule, WarmupStableDecay)
    changed = overridden(QUICKSTART, "--optimizer.schedule.stable", "411").optimizer.schedule
    assert changed == replace(QUICKSTART.optimizer.schedule, stable=411)
    toy = overridden(find(TOY), "--optimizer.schedule.steps", "1200", "--objective.beta.value", "0.3")
    assert toy.optimizer.schedule == WarmupCosine(1200)
    assert settings_json(toy.objective)["beta"] == {"class": "tba.schedules.Constant", "value": 0.3}
    with pytest.raises(UserError, match=r"has no field --optimizer\.schedule\.stable"):
        overridden(find(TOY), "--optimizer.schedule.stable", "11")


def test_what_may_be_none_can_be_set_to_none_and_back() -> None:
    assert overridden(QUICKSTART, "--optimizer.clip-norm", "None").optimizer.clip_norm is None
    assert overridden(QUICKSTART, "--prompts.limit", "9").prompts.limit == 9
    assert overridden(QUICKSTART, "--run.journal-dir", "/j").run.journal_dir == Path("/j")


def test_what_only_code_can_choose_is_no_field() -> None:
    """Parts that are None, functions and tuples of settings cannot be spelt on a command line."""
    known = flags(replace(QUICKSTART, model=replace(QUICKSTART.model, warm_start=None)))
    assert not [flag for flag in known if "warm-start" in flag]
    assert "--model.warm-start.before" not in flags(QUICKSTART)
    assert "--model.warm-start.scratch.hidden-size" in flags(QUICKSTART)


def test_every_flag_of_a_recipe_takes_the_value_it_has() -> None:
    for name in recipe_names():
        recipe, spelt = find(name), list[str]()
        for flag in flags(recipe):
            value: Any = recipe
            for part in flag.removeprefix("--").split("."):
                value = getattr(value, part.replace("-", "_"))
            if isinstance(value, bool):
                before, dot, last = flag.removeprefix("--").rpartition(".")
                spelt.append(flag if value else f"--{before}{dot}no-{last}")
            else:
                spelt += [flag, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
        assert overridden(recipe, *spelt) == recipe, name


WRONG = [
    (["train", "quickstart", "--stepz", "3"], "has no field --stepz; did you mean --steps?"),
    (["train", "quickstart", "--task.digit", "3"], "did you mean --task.digits?"),
    (["train", "quickstart", "--steps", "many"], "--steps takes a whole number, not 'many'"),
    (["train", "quickstart", "--optimizer.lr", "low"], "--optimizer.lr takes a number, not 'low'"),
    (["train", "quickstart", "--lr", "1e-4"], "did you mean --optimizer.lr?"),
    (["train", "quickstart", "--batch-size", "8"], "did you mean --groups-per-step?"),
    (["train", "quickstart", "--temperature", "1"], "both --exploration.temperature and --policy-temperature?"),
    (["train", "quickstart", "--resume-from-checkpoint", "1"], "did you mean `tba resume RUN`?"),
    (["train", "quickstart", "--objective.policy", "none"], "did you mean --objective.off-policy?"),
    (["train", "quickstart", "--objective.gamma", "0.9"], "there is --objective.form, "),
    (["train", "quickstart", "--record.tensorboard", "false"], "--record.no-tensorboard to switch it off"),
    (["train", "quickstart", "--model.path", "./none"], "there is no folder ./none"),
    (["train", "quickstart", "--steps"], "--steps"),
    (["train", "quickstart", "--steps", "0"], "--steps is 0, it must be at least 1"),
    (["train", "quickstart", "--seed", "-1"], "--seed is -1, it must not be negative"),
    (["train", "quickstart", "--group-size", "1"], "log Z needs at least 2 responses"),
    (["train", "quickstart", "--policy-temperature", "nan"], "takes a number, not 'nan'"),
    (
        ["train", "quickstart", "--runtime", "threads"],
        "takes one of processes, inline, cluster, not 'threads'",
    ),
    (["train", "quickstart", "--runtime", "inline", "--searchers", "2"], "takes turns with exactly 1"),
    (["train", "quickstart", "--model.device", "tpu"], "'tpu'"),
    (["train", "quickstart", "--replay.selection.m", "2"], "it is a probability: give 0 to 1"),
    (["train", "quickstart", "--run.checkpoints", "0"], "--run.checkpoints is 0, it must be at least 1"),
    (["train", "quickstart", "--run-name", "a/b"], "--run-name is 'a/b'"),
    (["train", "quickstart", "--runs", "/proc/none"], "cannot make the folder /proc/none"),
    (["train", "quickstart", "extra"], "extra"),
    (["train", "quickstart", "--run-name"], "--run-name needs a value"),
    (["train", "quikstart"], "did you mean 'quickstart'?"),
    (["train", "nowhere.py"], "there is no recipe file nowhere.py"),
    (["train"], "needs a recipe's name or a path"),
    (["trian", "quickstart"], "there is no command 'trian'"),
    (["eval", "quickstart", "--split", "test"], "--split is 'test': give train or eval"),
    (["eval", "quickstart", "--checkpoint", "no/such/model"], "no/such/model"),
    (["sft", "quickstart"], "tba sft needs --out DIR"),
    (["sft", "a.jsonl", "--out", "model", "--held-out", "1"], "--held-out is 1.0"),
    (["red-team"], "`tba red-team` needs to know what to do"),
    (["recipes", "--two"], "does not take '--two'"),
    (["sft", "nowhere.jsonl", "--out", "model"], "nowhere.jsonl"),
    (["show", "no/such/run"], "there is no such run"),
    (["check", "quickstart", "--steps", "0"], "--steps is 0"),
]


def test_what_is_wrong_is_said_in_one_sentence_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, words in WRONG:
        assert main(arguments) == 2, arguments
        said = capsys.readouterr().err
        assert re.fullmatch(r"tba: [^\n]+\n", said)
        assert words in said
    assert not any(tmp_path.rglob("recipe.json"))


BAD_FILES = {
    "x = 1\n": "defines no `recipe = Recipe(...)`",
    "recipe = 5\n": "defines no `recipe = Recipe(...)`",
    "recipe = (\n": "line 1: SyntaxError",
    "\n\nimport no_such_package\n": "line 3: ModuleNotFoundError: No module named 'no_such_package'",
    "from tba.recipe import Recipe\nrecipe = Recipe(stepz=3)\n": "line 2: TypeError",
    "from tba.schedules import Constant\n\nConstant(float('nan'))\n": "nan",
    "from tba.recipe import RuntimeSettings\nRuntimeSettings(prefetch=True)\n": "argument 'prefetch'; fix the recipe",
}


def test_a_recipe_file_with_a_mistake_is_named_with_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    for text, words in BAD_FILES.items():
        file.write_text(text)
        assert main(["train", str(file)]) == 2, text
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1


def test_in_a_process_of_its_own_a_wrong_value_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tba", "train", TOY, "--group-size", "1"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "tba: --group-size is 1, log Z needs at least 2 responses of a prompt\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert all(f"tba {command}" in said for command in ("train", "check", "sft", "eval", "recipes", "show"))


def test_help_of_a_command_says_how_it_is_called_and_has_all_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (*COMMANDS, "red-team"):
        assert main([*command.split(), "--help"]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"  tba {command} ")
        for options in COMMANDS[command].option_classes() if command in COMMANDS else ():
            assert set(flags(options())) <= set(said.split()), command


@pytest.mark.parametrize("name", [TOY, "gsm8k"])
def test_help_of_a_recipe_explains_every_field_with_its_value(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", name, "--help"])
    assert end.value.code == 0
    page = capsys.readouterr().out
    assert all(len(line) <= 80 for line in page.partition("what is set most:")[2].splitlines())
    said = " ".join(page.split())
    for flag in flags(find(name)):
        assert f" {flag} " in said
    assert "B, prompts in a batch (default: " in said
    assert "bound on the mean uses of what was received; beyond it the trainer is `paced` (default: 8.0)" in said


@dataclass(frozen=True)
class Example:
    """For the next test."""

    first: int = 1  # what it is
    second: int = 2
    third: int = 3  # begins here
    # and goes on here


def test_the_comment_behind_a_field_is_its_help() -> None:
    assert comments(Example) == {"first": "what it is", "second": "", "third": "begins here and goes on here"}
    assert comments(EndpointVictim)["token_variable"].startswith("the environment variable")  # what linters read is not


def test_a_class_made_in_a_console_has_no_comments() -> None:
    assert comments(make_dataclass("Made", [("x", int)])) == {}


def test_a_run_rebuilds_its_recipe_from_recipe_json_alone(tmp_path: Path) -> None:
    for source, arguments in (("quickstart", ["--steps", "9", "--task.digits", "2"]), (TOY, ["--seed=4"])):
        recipe = override(find(source), arguments, "tba train")
        made = RunDirectory.create(tmp_path / Path(source).stem, source, arguments, recipe)
        assert RunDirectory.open(made.path).recipe() == recipe
        facts = json.loads((made.path / "recipe.json").read_text())
        assert facts["resolved"]["steps"] == recipe.steps
        assert facts["resolved"] == json.loads(json.dumps(settings_json(recipe)))


def test_a_changed_recipe_file_and_a_second_run_of_one_name_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text(Path(TOY).read_text())
    run = RunDirectory.create(tmp_path / "run", str(source), [], find(str(source)))
    with pytest.raises(UserError, match="holds a run already"):
        RunDirectory.create(tmp_path / "run", str(source), [], find(str(source)))
    source.write_text(Path(TOY).read_text() + "\n")
    with pytest.raises(UserError, match=r"mine.py has changed since the run at .* began"):
        run.recipe()
    with pytest.raises(UserError, match="there is no run at"):
        RunDirectory.open(tmp_path)


def test_a_run_without_a_name_has_the_recipes_and_the_time(tmp_path: Path) -> None:
    assert new_path(tmp_path, "toy", None).name.startswith("toy-20")
    assert new_path(tmp_path, "toy", "mine") == tmp_path / "mine"


def test_two_runs_of_one_name_do_not_share_a_journal_in_a_folder_for_journals(tmp_path: Path) -> None:
    recipe = override(find(TOY), ["--run.journal-dir", str(tmp_path / "local")], "tba train")
    runs = [RunDirectory.create(tmp_path / place / "run", TOY, [], recipe) for place in ("a", "b")]
    assert len({run.journal(recipe) for run in runs}) == 2
    assert {run.journal(recipe).parent for run in runs} == {tmp_path / "local"}


PIECES = st.sampled_from(
    [
        *("--steps", "--replay.pacing.warm-up", "--record.no-tensorboard", "--optimizer.betas", "--model.path"),
        *("--prompts.selection", "--replay.keep-gb", "--run.journal-dir", "--searchers", "--objective.beta.value"),
        *(
            "--no-steps",
            "--steps=3",
            "--=",
            "--",
            "-",
            "3",
            "-3",
            "1e9",
            "nan",
            "inf",
            "None",
            "True",
            "posterior",
            "'",
        ),
    ]
)
FUZZ = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(st.lists(PIECES | st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=5))
def test_any_arguments_make_a_recipe_or_a_sentence(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        return
    with contextlib.suppress(UserError):
        assert isinstance(overridden(QUICKSTART, *arguments), Recipe)


@FUZZ
@given(
    st.binary(max_size=60)
    | st.lists(
        st.sampled_from(
            [
                "recipe = ",
                "Recipe",
                "(",
                ")",
                "1/0",
                "assert 0",
                "raise SystemExit",
                "[",
                "{",
                "import nothing",
                "\n",
                " ",
                "x",
                "'",
            ]
        ),
        max_size=12,
    ).map(lambda words: "".join(words).encode())
)
@example(b"(" * 5000)
@example(b"recipe = " + b"-" * 20_000 + b"1")
@example(b"raise SystemExit(0)")
@example(b"def f(): f()\nf()")
def test_any_file_is_a_recipe_or_a_sentence_that_names_it(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "mine.py"
    file.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a file that says odd things
        with pytest.raises(UserError, match=r"mine\.py"):
            find(str(file))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(["quickstart", "--steps", "3"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["recipe", "overrides", "digest", "x"]), inner)
    ),
    max_leaves=8,
)


@FUZZ
@given(JSON.map(json.dumps).map(str.encode) | st.binary(max_size=40))
@example(b'{"recipe": "quickstart", "overrides": ["--steps", "3"]}')
@example(b'{"recipe": "quickstart", "overrides": [], "digest": "0"}')
@example(b"[" * 100_000)
def test_whatever_recipe_json_holds_it_is_a_recipe_or_a_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "recipe.json").write_bytes(content)
    with contextlib.suppress(UserError):
        assert isinstance(RunDirectory.open(tmp_path).recipe(), Recipe)
    assert (tmp_path / "recipe.json").read_bytes() == content


def test_gsm8k_has_at_most_a_hundred_settings_and_a_help_that_begins_with_those_set_most() -> None:
    assert len(flags(GSM8K)) <= 100
    assert set(LEADING_FLAGS) & set(flags(GSM8K)) >= {
        "--steps",
        "--seed",
        "--model.path",
        "--optimizer.lr",
        "--runtime",
    }


def test_what_is_off_until_it_is_set_is_set_by_its_flag_and_is_none_of_those_that_a_help_lists() -> None:
    off = {"--exploration.top-k": ("50", 50), "--exploration.min-p": ("0.05", 0.05)}
    off |= {"--exploration.repetition-penalty": ("1.1", 1.1)}
    for flag, (word, value) in off.items():
        assert flag not in flags(GSM8K)
        made = overridden(GSM8K, flag, word)
        assert getattr(made.exploration, flag.partition(".")[2].replace("-", "_")) == value
        assert flag in flags(made)
        assert flag in help_of(GSM8K)  # among what there is more
    optional_parts = {"--run.backup": "/shared", "--reference-scorer": "trainer", "--record.prometheus.port": "9400"}
    for flag, word in optional_parts.items():
        assert flag not in flags(GSM8K)
        assert flag in flags(overridden(GSM8K, flag, word))


def test_whatever_has_no_effect_in_a_recipe_is_among_its_fields() -> None:
    for name in recipe_names():
        known = [f.flag for f in fields_of(find(name))]
        for flag, when in without_effect(find(name)).items():
            assert any(k == flag or k.startswith(f"{flag}.") for k in known), (name, flag)
            assert when.split()[0] in known, (name, when)


def test_a_part_that_is_off_takes_no_settings_until_it_is_switched_on() -> None:
    with pytest.raises(UserError, match=r"--control.lower-bound has no effect without --control.signal: give that too"):
        overridden(GSM8K, "--control.lower-bound", "0.3")
    steered = overridden(GSM8K, "--control.lower-bound", "0.3", "--control.signal", "ess")
    assert (steered.control.lower_bound, steered.control.signal) == (0.3, "ess")
    assert {"--control.lower-bound", "--control.upper-bound"} <= set(flags(steered)) - set(flags(GSM8K))


@pytest.mark.parametrize("words", [["--run.no-prefetch"], ["--run.stop-deadline", "5"], ["--optimizer.eps=1e-6"]])
def test_a_field_that_does_not_exist_ends_in_one_sentence_on_the_command_line_and_in_a_run(
    tmp_path: Path, words: list[str]
) -> None:
    with pytest.raises(UserError, match=rf"^tba train it has no field {words[0].partition('=')[0]}; "):
        overridden(GSM8K, *words)
    run = RunDirectory.create(tmp_path / "run", "quickstart", [], QUICKSTART)
    run.write_facts({**run.facts, "overrides": words})
    with pytest.raises(UserError, match=rf"^tba train quickstart has no field {words[0].partition('=')[0]}; "):
        run.recipe()


OLD_FLAGS = {
    "--run.rounds": "--run.synchronous-rounds", "--replay.take-in": "--replay.ingest",
    "--replay.pacing.band": "--replay.pacing.saved-batches", "--evaluation.chunk": "--evaluation.batch-size",
    "--evaluation.shown": "--evaluation.logged-problems", "--prompts.overlong": "--prompts.when-too-long",
    "--publish.full-every": "--publish.full-version-every", "--record.samples": "--record.samples-per-batch",
    "--model.generation.first": "--model.generation.allowed-first-tokens",
    "--model.generation.never-first": "--model.generation.forbidden-first-tokens",
    "--run.no-rounds": "--run.no-synchronous-rounds", "--optimizer.averaged": "--optimizer.weight-average",
    "--replay.buffer.no-distinct": "--replay.buffer.no-deduplicate", "--model.compiled": "--model.torch-compile",
    "--replay.pacing.eases-off": "--replay.pacing.throttled-side", "--control.low": "--control.lower-bound",
    "--control.high": "--control.upper-bound",
}  # fmt: skip


@pytest.mark.parametrize(("old_flag", "new_flag"), OLD_FLAGS.items())
def test_a_flag_of_an_earlier_version_is_refused_by_one_sentence_with_its_new_name(
    old_flag: str, new_flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=f"has no field {old_flag}; it is {new_flag} now"):
        overridden(GSM8K, old_flag, "4")
    assert main(["train", "gsm8k", old_flag, "4"]) == 2
    assert f"has no field {old_flag}; it is {new_flag} now" in " ".join(capsys.readouterr().err.split())


def test_recorded_words_and_fields_of_an_earlier_version_mean_the_settings_of_today() -> None:
    words = ["--run.rounds", "--replay.take-in=sync", "--replay.pacing.band", "3", "--evaluation.shown", "7"]
    recipe = override(GSM8K, [*words, "--model.generation.first", "a", "b"], "tba resume", recorded=True)
    assert recipe.run.synchronous_rounds
    assert (recipe.replay.ingest, recipe.replay.pacing.saved_batches) == ("sync", 3.0)
    assert recipe.evaluation.logged_problems == 7
    grpo = override(replace(GSM8K, objective=Grpo()), ["--objective.per", "row"], "tba resume", recorded=True)
    assert grpo.objective == Grpo(loss_aggregation="row")
    assert override(recipe, ["--run.no-rounds"], "tba resume", recorded=True).run.synchronous_rounds is False
    near = replace(GSM8K, replay=replace(GSM8K.replay, buffer=BufferSettings(near_duplicates=NearDuplicates())))
    near = override(near, ["--replay.buffer.near.by", "cosine"], "tba resume", recorded=True)
    current_fields = settings_json(near)
    recorded_fields = json.loads(json.dumps(current_fields))
    buffer = recorded_fields["replay"]["buffer"]
    buffer["near"] = buffer.pop("near_duplicates")
    buffer["near"]["by"] = buffer["near"].pop("measure")
    recorded_fields["record"]["samples"] = recorded_fields["record"].pop("samples_per_batch")
    assert buffer["near"]["by"] == "cosine"
    assert with_new_names(recorded_fields, current_fields) == current_fields


def test_the_recipe_that_an_earlier_run_has_written_is_loaded(tmp_path: Path) -> None:
    write_recipe(GSM8K, tmp_path / "recipe.py")
    source = (tmp_path / "recipe.py").read_text()
    for old_name, name in (("band", "saved_batches"), ("rounds", "synchronous_rounds"), ("take_in", "ingest")):
        assert f"{name}=" in source
        source = source.replace(f"{name}=", f"{old_name}=")
    (tmp_path / "recipe.py").write_text(source)
    with pytest.raises(UserError, match=r"it is .* now"):
        find(str(tmp_path / "recipe.py"))
    (tmp_path / "recipe.json").write_text("{}")
    assert settings_json(find(str(tmp_path / "recipe.py"))) == settings_json(GSM8K)


def test_a_keyword_of_an_earlier_version_is_refused_with_its_new_name() -> None:
    make: Any = BufferSettings
    with pytest.raises(UserError, match="BufferSettings has no near; it is near_duplicates now"):
        make(near=NearDuplicates())


def test_of_a_field_that_is_set_several_times_the_newest_words_are_kept() -> None:
    words = [
        "recipe",
        "--steps",
        "3",
        "--record.tensorboard",
        "--model.generation.allowed-first-tokens",
        "a",
        "b",
        "--seed=1",
    ]
    again = ["--record.no-tensorboard", "--steps=5", "--model.generation.allowed-first-tokens", "c"]
    assert keep_last_values([*words, *again]) == [
        *("recipe", "--seed=1", "--record.no-tensorboard", "--steps=5", "--model.generation.allowed-first-tokens", "c")
    ]


def test_a_file_sets_fields_as_flags_do(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = 'steps = 3\nruntime = "inline"\n[optimizer]\nlr = 2e-4\n[evaluation]\npass_k = 0\ngreedy = false\n'
    file.write_text(text, encoding="utf-8-sig")  # with a mark of the encoding, as some editors write
    flags = ["--steps", "3", "--runtime", "inline", "--optimizer.lr", "0.0002", "--evaluation.pass-k", "0"]
    assert with_config(["--seed", "1", "--config", str(file), "--steps", "4"]) == [
        *("--seed", "1", *flags, "--evaluation.no-greedy", "--steps", "4")
    ]
    assert override(find("quickstart"), with_config([f"--config={file}"]), "tba train quickstart").optimizer.lr == 2e-4


@pytest.mark.parametrize(
    ("text", "why"),
    [("steps = ", "Invalid value"), ("when = 1979-05-27", "a text, a number"), (None, "No such file")],
)
def test_a_file_of_fields_that_cannot_be_used_is_refused_in_a_sentence(
    tmp_path: Path, text: str | None, why: str
) -> None:
    file = tmp_path / "mine.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=why):
        with_config(["--config", str(file)])


def test_another_part_is_answered_by_how_to_choose_it() -> None:
    with pytest.raises(
        UserError, match=r"Another objective is chosen in code.*dataclasses.replace\(recipe, objective="
    ):
        override(find("quickstart"), ["--objective", "grpo"], "tba train quickstart")
    with pytest.raises(UserError, match=r"objective=dataclasses.replace\(recipe.objective, beta=\.\.\.\)\)`$"):
        override(find("quickstart"), ["--objective.beta", "1"], "tba train quickstart")


def test_descriptions_are_those_of_the_recipes_and_studies_themselves() -> None:
    names = recipe_names()
    assert {name: description_of(name) for name in names} == {name: find(name).description for name in names}


def test_a_list_of_recipes_and_a_misspelt_name_load_nothing_heavy() -> None:
    program = """import sys
from tba.__main__ import main
assert main(["recipes"]) == 0 and main(["train", "quickstrt"]) == main(["eval", "x"]) == 2
assert main(["show", "x"]) == main(["report", "x"]) == main(["replay", "x"]) == main(["push", "x", "a/b"]) == 2
print(sorted({"torch", "numpy", "transformers", "tba.recipe"} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_the_help_of_a_command_loads_nothing_heavy() -> None:
    code = """
import sys
from tba.__main__ import main
for command in ("train", "search", "import", "sample", "eval", "push", "report", "replay", "sft", "model",
                "reward-model"):
    assert main([command, "--help"]) == 0
print(sorted({"torch", "numpy", "transformers", "tba.recipe"} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--out" in done.stdout


def test_what_a_name_from_elsewhere_is_called_here_is_there() -> None:
    fields = {ours for names in FLAGS_ELSEWHERE.values() for ours in names if not ours.startswith("`")}  # or commands
    assert len(fields) > 10
    assert fields <= {field.flag for field in fields_of(QUICKSTART)}
