"""Folders of others: nothing in them is executed, and whatever their files hold ends in one sentence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import tba
from tba import foreign, templates
from tba.__main__ import main
from tba.errors import UserError
from tba.foreign import check, is_name, parsed, print_error, problems_of, prompt_tokens, templated, with_arguments
from tba.models.warm_start import demonstration_pairs
from tba.policy.loading import load_model
from tba.record.jsonl import write_json
from tba.record.metrics import read_metrics
from tba.record.summary import Summary
from tba.rollout.prompts import PromptSettings, encode
from tba.runtime.run_directory import RunDirectory, new_path
from tba.training.checkpoint import Checkpoint, newest_checkpoint
from tba.training.tiny_models import ScratchModel, character_tokenizer
from tba.types import Problem, Version
from tba_lab.study import Study

TOY = Path(__file__).with_name("toy") / "recipe.py"
DEEP = 200_000
HOSTILE = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe\xfd",
    b"[" * DEEP,
    b'{"a":' * DEEP,
    b'{"recipe": "quickstart", "version": [], "state": 1, "files": [], "kind": 5, "resolved": "x"}',
    b"[" * 500 + b"]" * 500,
]


def said(capsys: Any, *arguments: object) -> tuple[int, str]:
    """The exit code, and what was said on standard error."""
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr().err


def refused(capsys: Any, *arguments: object) -> str:
    """The one sentence with which a command ends."""
    code, error = said(capsys, *arguments)
    assert (code, error.count("\n"), error[:5]) == (2, 1, "tba: "), error
    return error


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Is there when the recipe's file has been executed."""
    return tmp_path_factory.mktemp("marker") / "executed"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, marker: Path) -> Path:
    """A run of a recipe's file that has made its 4 steps."""
    folder = tmp_path_factory.mktemp("foreign")
    source = folder / "theirs.py"
    source.write_text(f"{TOY.read_text()}\n__import__('pathlib').Path({str(marker)!r}).touch()\n")
    small = [
        "--steps",
        "4",
        "--evaluation.problems",
        "1",
        "--replay.pacing.warm-up",
        "16",
        "--run.checkpoint-every",
        "2",
    ]
    assert main(["train", str(source), "--runs", str(folder), "--run-name", "r", "--runtime", "inline", *small]) == 0
    return folder / "r"


@pytest.fixture
def run(whole: Path, tmp_path: Path, marker: Path) -> Path:
    marker.unlink(missing_ok=True)
    return Path(shutil.copytree(whole, tmp_path / "r"))


def test_who_reads_a_run_executes_nothing_of_it(run: Path, marker: Path, tmp_path: Path, capsys: Any) -> None:
    lines = tmp_path / "answers.jsonl"
    lines.write_text("{}\n")
    assert said(capsys, "show", run) == (0, "")
    assert said(capsys, "replay", run) == (0, "")
    for reader in (["import", run, lines], ["sft", run, "--min-reward", "0", "--out", tmp_path / "model"]):
        assert "theirs.py, which would be executed: look at it, then give --trust too" in refused(capsys, *reader)
        assert not marker.exists()
    elsewhere = tmp_path / "journals"
    facts = json.loads((run / "recipe.json").read_text())
    facts["resolved"]["run"]["journal_dir"] = str(elsewhere)
    RunDirectory(run).write_facts(facts)
    elsewhere.mkdir()
    (run / "journal.sqlite").rename(tmp_path / "moved")
    (tmp_path / "moved").rename(RunDirectory.open(run).journal_to_read())
    assert [path.parent for path in elsewhere.iterdir()] == [elsewhere]
    assert said(capsys, "replay", run) == (0, "")
    assert not marker.exists()
    # its recipe, which is executed now, has the journal in its own folder
    assert "journal.sqlite is gone" in refused(capsys, "import", run, lines, "--trust")
    assert marker.exists()


@pytest.mark.parametrize(
    "name", ["os", "tba.__main__", "..quickstart", "toy_study", "quickstart.recipe", "_base", "a::b"]
)
def test_a_run_cannot_name_a_module_that_is_no_recipe(run: Path, capsys: Any, name: str) -> None:
    facts = json.loads((run / "recipe.json").read_text())
    RunDirectory(run).write_facts({**facts, "recipe": name, "digest": None})
    assert "there is no " in refused(capsys, "resume", run)


def test_a_run_cannot_ask_for_help_in_the_place_of_its_user(run: Path, capsys: Any) -> None:
    facts = json.loads((run / "recipe.json").read_text())
    RunDirectory(run).write_facts({**facts, "overrides": [*facts["overrides"], "--help"]})
    assert "has an override that no run has (--help)" in refused(capsys, "resume", run)


READERS: dict[str, list[Callable[[Path], list[object]]]] = {
    "recipe.json": [
        lambda run: ["resume", run],
        lambda run: ["search", "--run", run],
        lambda run: ["import", run, run / "metrics.jsonl"],
        lambda run: ["sft", run, "--min-reward", "0", "--out", run / "model"],
        lambda run: ["train", "quickstart", "--data", run, "--runs", run.parent, "--run-name", "r"],
    ],
    "summary.json": [lambda run: ["show", run]],
    "failure.json": [lambda run: ["show", run]],
    "checkpoints/step-*/run.json": [lambda run: ["resume", run, "--steps", "6"]],
    "checkpoints/step-*/optimizer.json": [lambda run: ["resume", run, "--steps", "6", "--runtime", "inline"]],
}


@pytest.mark.parametrize("file", list(READERS))
def test_whatever_a_file_of_a_run_holds_ends_in_one_sentence(file: str, run: Path, capsys: Any) -> None:
    for content in HOSTILE if file != "checkpoints/step-*/optimizer.json" else HOSTILE[:2]:
        for place in [*run.glob(file)] or [run / file]:
            place.write_bytes(content)
        for command in READERS[file]:
            assert file.rpartition("/")[2] in refused(capsys, *command(run))


@pytest.mark.parametrize("file", ["summary.json", "failure.json"])
def test_a_run_goes_on_without_what_is_only_for_reading(file: str, run: Path, capsys: Any) -> None:
    (run / file).write_bytes(HOSTILE[0])
    assert main(["resume", str(run), "--steps", "6", "--runtime", "inline"]) == 0
    assert file in capsys.readouterr().out.replace("\n", "")  # said once, however long the path is
    assert read_metrics(run)[-1]["step"] == 6


@pytest.mark.parametrize("file", ["weights/*.json", "weights/*.pins", "weights/*.safetensors"])
def test_a_run_goes_on_when_published_weights_are_damaged(file: str, run: Path) -> None:
    """They are published again from the checkpoint; one whose tensors are gone is removed with the rest of it."""
    (run / "weights" / f"{newest_version(run)}.pins").write_text("[")
    for damaged in run.glob(file):
        damaged.unlink() if file.endswith("tensors") else damaged.write_bytes(HOSTILE[1])
    assert main(["resume", str(run), "--steps", "6", "--runtime", "inline"]) == 0
    assert read_metrics(run)[-1]["step"] == 6


def newest_version(run: Path) -> str:
    return max((run / "weights").glob("*.json"), key=lambda path: Version.parse(path.stem)).stem


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("evaluations.jsonl", {"metric": "pass@1/greedy", "value": 0.5, "n": 0}),
        ("evaluations.jsonl", {"metric": "pass@1/greedy", "value": 0.5, "n": 10**30}),
        ("evaluations.jsonl", {"metric": "pass@1/greedy", "value": 7, "n": 5}),
        ("faults.jsonl", {"kind": "held_out_falls", "what": [1]}),
        (
            "answers.jsonl",
            {"prompt": ["a"], "completion": 3, "reward": 0.0, "correct": True, "metric": "pass@1/greedy"},
        ),
    ],
)
def test_a_line_with_a_value_that_cannot_be_is_passed_over_and_told(
    file: str, line: dict[str, Any], run: Path, capsys: Any
) -> None:
    of_a_version = {} if file == "faults.jsonl" else {"version": "0.4", "wall_seconds": 1.0}
    with (run / file).open("a") as lines:
        lines.write(json.dumps(line | of_a_version) + "\n")
    assert main(["show", str(run)]) == 0
    assert f"{file}: line " in capsys.readouterr().out


def test_every_field_of_a_summary_has_its_type(run: Path, capsys: Any) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert len(summary) > 15
    for name, value in summary.items():
        if name not in (
            "slow_side",
            "samples_per_insert",
            "trained_share",
        ):  # which follow from others and are not read
            wrong = 3 if isinstance(value, str) else "\x1b[31mtext"
            write_json(run / "summary.json", {**summary, name: wrong})
            assert f"{name} is {wrong!r}, it must be " in refused(capsys, "show", run)


def test_of_one_that_shows_a_run_nothing_is_a_style_or_a_command_to_the_terminal(run: Path, capsys: Any) -> None:
    summary = json.loads((run / "summary.json").read_text())
    hostile = "[/][bold]$x_{$\x1b[31m:smile:\n"
    summary["recipe"] = summary["machine"]["cpu"] = summary["evaluations"][0]["metric"] = hostile
    summary["faults"][hostile] = hostile
    write_json(run / "summary.json", summary)
    (run / "evaluations.jsonl").unlink()
    assert main(["show", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[/][bold]$x_{$\\x1b[31m:smile:\\n" in shown
    (run / "summary.json").unlink()
    write_json(run / "failure.json", {"kind": hostile, "message": hostile, "step": 1})
    assert main(["show", str(run)]) == 0
    assert "[/][bold]$x_{$\\x1b[31m:smile:\\n" in capsys.readouterr().out


def test_a_manifest_is_covered_by_its_digest_and_names_every_file(run: Path) -> None:
    checkpoint = newest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    path = checkpoint.path / "run.json"
    manifest = json.loads(path.read_text())
    checkpoint.verify()
    for changed in (
        {**manifest, "version": "0.3"},
        {**manifest, "state": {**manifest["state"], "skipped": 1}},
        {**manifest, "files": {}},
        {**{k: v for k, v in manifest.items() if k != "digest"}, "digesu": manifest["digest"]},
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(UserError, match=r"run.json: its digest (differs|is missing)"):
            Checkpoint.load(checkpoint.path)
    path.write_text(json.dumps({k: v for k, v in manifest.items() if k != "digest"}))  # of an earlier version
    assert Checkpoint.load(checkpoint.path).version == Version(0, 4)
    outside = {
        **{k: v for k, v in manifest.items() if k != "digest"},
        "files": {**manifest["files"], "/dev/zero": [0, 0]},
    }
    path.write_text(json.dumps(outside))
    with pytest.raises(UserError, match="/dev/zero: No such file"):
        Checkpoint.load(checkpoint.path).verify()
    path.write_text(json.dumps(manifest))
    (checkpoint.path / "pytorch_model.bin").write_bytes(b"planted")
    with pytest.raises(UserError, match=r"was not made with \(pytorch_model.bin\): remove it"):
        newest_checkpoint(run / "checkpoints")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    folder = tmp_path_factory.mktemp("model") / "m"
    tokenizer = character_tokenizer("ab")
    ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=24, max_positions=16).start(tokenizer).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    load_model(folder, "cpu", torch.float32)
    return folder


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_model_whose_files_are_something_else_is_refused_in_one_sentence(
    file: str, model: Path, tmp_path: Path, capsys: Any
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "m"))
    for content in (*HOSTILE, b'{"model_type": "llama", "hidden_size": "x", "architectures": 5}'):
        if file == "tokenizer_config.json" and content[-1:] == b"}":
            continue  # an object is a configuration, whatever unknown fields it has
        (copy / file).write_bytes(content)
        with pytest.raises(UserError, match="cannot load a causal language model and its tokenizer"):
            load_model(copy, "cpu", torch.float32)


def test_no_model_brings_code_or_a_pickle(model: Path, tmp_path: Path, marker: Path) -> None:
    marker.unlink(missing_ok=True)
    copy = Path(shutil.copytree(model, tmp_path / "m"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "theirs.py").write_text(f"__import__('pathlib').Path({str(marker)!r}).touch()\n")
    auto = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model", "AutoTokenizer": ["theirs.T", None]}
    for changes in ({"model_type": "theirs"}, {}):
        (copy / "config.json").write_text(json.dumps({**config, **changes, "auto_map": auto}))
        if changes:
            with pytest.raises(UserError, match="cannot load a causal language model"):
                load_model(copy, "cpu", torch.float32)
        else:
            load_model(copy, "cpu", torch.float32)  # of a known kind: its code is the library's
        assert not marker.exists()
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot load a causal language model"):
        load_model(copy, "cpu", torch.float32)


def test_what_a_chat_template_raises_is_one_sentence() -> None:
    tokenizer: PreTrainedTokenizerBase = character_tokenizer("ab")
    for template in ("{{ 1 // 0 }}", "{% for", "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}{{ x.y.z }}"):
        tokenizer.chat_template = template
        with pytest.raises(UserError, match="the tokenizer's chat template cannot write a prompt"):
            templated(tokenizer, [{"role": "user", "content": "a"}])


GEMMA_2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + message['role'] + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
FORGETFUL = "{% for m in messages if m['role'] != 'system' %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Why?"}


def with_template(template: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = character_tokenizer("ab")
    tokenizer.chat_template, tokenizer.bos_token = template, "<bos>"
    return tokenizer


def test_a_system_message_that_a_template_does_not_take_begins_the_first_of_the_user_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    foreign._say_folded.cache_clear()
    gemma, turn = with_template(GEMMA_2), "<start_of_turn>{}\n{}<end_of_turn>\n".format
    answered = {"role": "assistant", "content": "So."}
    begun = "<bos>" + turn("user", "Be brief.\n\nWhy?")
    assert templated(gemma, [SYSTEM, USER]) == begun + "<start_of_turn>model\n"
    assert templated(gemma, [SYSTEM, USER, answered, USER]).startswith(
        begun + turn("assistant", "So.") + turn("user", "Why?")
    )
    assert templated(gemma, [SYSTEM]) == "<bos>" + turn("user", "Be brief.") + "<start_of_turn>model\n"
    assert templated(gemma, [USER]) == gemma.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert templated(gemma, [{**SYSTEM, "content": " "}, USER]) == templated(gemma, [USER])
    assert templated(with_template(FORGETFUL), [SYSTEM, USER]) == "<user>Be brief.\n\nWhy?"
    assert "Be brief.\n\n" in templated(gemma, [SYSTEM, USER], [{"name": "look_up"}])
    assert "look_up" in templated(gemma, [SYSTEM, USER], [{"name": "look_up"}])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "takes no system message" in caplog.text
    with pytest.raises(UserError, match="Conversation roles must alternate"):
        templated(gemma, [SYSTEM, USER, USER])


def test_a_template_that_takes_a_system_message_is_given_it_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    chatml = with_template(CHATML)
    for messages in ([SYSTEM, USER], [{"role": "system", "content": ""}, USER], [USER]):
        assert templated(chatml, messages) == chatml.apply_chat_template(messages, tokenize=False)
    assert not caplog.records


QWEN_3 = (
    "\n{% macro begin() %}{% if enable_thinking is defined and enable_thinking is false %}<think></think>"
    "{% endif %}{% endmacro %}{{ note }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{{ begin() }}"
    "{% if enable_thinking is defined and enable_thinking is false %}<no>{% endif %}{% endif %}"
)


def test_template_arguments_are_what_transformers_is_given_by_name_and_are_saved_with_the_tokenizer(
    tmp_path: Path,
) -> None:
    plain, words = with_template(QWEN_3), 'it\'s "so"\n\u00df'
    given = [f"note={json.dumps(words)}", "enable_thinking=false"]
    right = plain.apply_chat_template(
        [USER], tokenize=False, add_generation_prompt=True, enable_thinking=False, note=words
    )
    own = with_arguments(with_template(QWEN_3), given)
    assert templated(own, [USER]) == right == f"\n{words}Why?[a]<think></think><no>"
    own.save_pretrained(tmp_path)
    again = with_arguments(AutoTokenizer.from_pretrained(tmp_path), given)
    assert templated(again, [USER]) == right
    assert again.chat_template == own.chat_template
    assert templated(with_arguments(again, ["enable_thinking=true"]), [USER]) == f"\n{words}Why?[a]"
    for value, written in (("null", "None"), ("2", "2"), ("[1,true]", "[1, True]"), ("free text", "free text")):
        assert templated(with_arguments(with_template(QWEN_3), [f"note={value}"]), [USER]) == f"\n{written}Why?[a]"


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("enable_thinking", "give name=value"),
        ("a b=1", "give name=value"),
        ("thinking=false", "the model's chat template does not read thinking"),
    ],
)
def test_an_argument_that_would_change_nothing_is_refused(argument: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        with_arguments(with_template(QWEN_3), [argument])
    with pytest.raises(UserError, match="a tokenizer with one chat template"):
        with_arguments(character_tokenizer("ab"), [argument])


@pytest.mark.parametrize("after", [False, True], ids=["begins", "begins and ends"])
def test_a_prompt_begins_as_the_tokenizer_begins_texts_and_does_not_end_as_they_do(after: bool) -> None:
    """Llama's tokenizers put a token before a text, some one after it; a chat's template has its own."""
    tokenizer: Any = character_tokenizer("ab")
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin, end = ("<s>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)
    single = "<s> $A <eos>" if after else "<s> $A"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[begin, end])
    a = tokenizer.convert_tokens_to_ids("a")
    assert tokenizer("aa")["input_ids"] == [begin[1], a, a, *([end[1]] if after else [])]
    assert prompt_tokens(tokenizer, ["aa", "<s>aa"]) == [[begin[1], a, a]] * 2
    assert prompt_tokens(tokenizer, ["aa", "<s>aa"], chat=True) == [[a, a], [begin[1], a, a]]
    chat = ({"role": "user", "content": "a"},)
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    problems = [Problem("ab", demonstration="a"), Problem(chat, demonstration="a"), Problem("a", demonstration="b")]
    cut = encode([Problem("aab")], "t", tokenizer, PromptSettings(max_tokens=3, overlong="truncate_left"))
    assert [prompt.tokens.tolist() for prompt in cut.prompts] == [[begin[1], a, a + 1]]
    with pytest.raises(UserError, match="is empty"):
        encode([Problem("")], "t", tokenizer, PromptSettings())
    asked = [prompt.tokens.tolist() for prompt in encode(problems, "t", tokenizer, PromptSettings()).prompts]
    assert asked == [[begin[1], a, a + 1], [begin[1], a], [begin[1], a]]
    assert [(list(pair.prompt), pair.response) for pair in demonstration_pairs(problems, tokenizer)] == [
        (prompt, [answer]) for prompt, answer in zip(asked, (a, a, a + 1), strict=True)
    ]


@pytest.mark.parametrize("name", ["..", ".", "-rf", ".hidden", "a/b", "a b", "", "x" * 300, "a\n", "$(x)"])
def test_a_name_is_no_path_no_option_and_not_hidden(name: str, tmp_path: Path, capsys: Any) -> None:
    assert not is_name(name)
    assert "--run-name is" in refused(capsys, "train", TOY, "--runs", tmp_path, f"--run-name={name}")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="a study is named"):
        Study(name=name, recipe=None, variants={"a": ()})
    with pytest.raises(UserError, match="the recipe is named"):
        new_path(tmp_path, name, None)


def test_names_that_are_used_are_names() -> None:
    assert all(map(is_name, ["quickstart", "tb-k4", "a.b_c-1", "run-20260101-000000", "x=1+2", "großes"]))


@dataclass
class Shape:
    """Two fields, one of them with a default."""

    n: int
    kind: Literal["a", "b"] = "a"


def test_kinds_are_annotations() -> None:
    assert parsed('{"a": 1, "b": [0.5, 2]}', a=int, b=list[float], c=str | None) == {"a": 1, "b": [0.5, 2]}
    assert parsed(b'{"n": 3}', Shape) == {"n": 3}
    for value, kind, sentence in (
        (True, int, "it is True, it must be a whole number"),
        (2**70, int, "must be a whole number"),
        (float("inf"), float, "it is inf, it must be a number"),
        ("x.y", Version, "it is 'x.y', it must be a version such as '0.12'"),
        ([1, "2"], list[int], "number 1 of it is '2', it must be a whole number"),
        ([1], tuple[int, int], "it is a list of 1, it must be one of 2"),
        ({"a": {"b": None}}, dict[str, dict[str, int]], "'b' of 'a' of it is missing or null"),
        ({"n": 1, "kind": "c"}, Shape, "kind is 'c', it must be 'a' or 'b'"),
        ({"n": 1, "m": 2}, Shape, "it has a field 'm' that is unknown"),
        ({}, Shape, "n is missing or null, it must be a whole number"),
        (3, str | None, "it is 3, it must be a text or null"),
    ):
        with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
            check(value, kind, "it")
    with pytest.raises(ValueError, match="not JSON"):
        parsed("[" * DEEP, list[Any])
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        parsed("[" * 65 + "]" * 65, list[Any])
    assert parsed("[" * 64 + "]" * 64, list[Any])


def test_a_summary_that_a_run_writes_is_of_its_own_kind(run: Path) -> None:
    assert Summary.read(run) is not None


def test_a_field_that_cannot_be_written_as_json_is_named_with_what_it_may_be() -> None:
    class Mine:
        name = "mine"

        def problems(self, split: str) -> list[Problem]:
            return [Problem("1?", {"n": np.int64(1)}), Problem("2?", {"n": 1, "of": {1, 2}})]

    with pytest.raises(
        UserError, match=r"^problem 1 of .* has the field 'of' with \{1, 2\}: make it of texts, numbers"
    ):
        problems_of(Mine(), "train")


def test_the_error_that_ends_a_process_is_printed_without_what_a_terminal_obeys(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With its traceback, but for bad input; an output that is closed keeps no process alive."""
    try:
        raise KeyError("\x1b]0;owned\x07\u202e")
    except KeyError as raised:
        error = raised
    print_error(error)
    said = capfd.readouterr().err
    assert said.startswith("Traceback (most recent call last):\n")
    assert "raise KeyError(" in said
    assert all(line.isprintable() for line in said.splitlines())
    print_error(UserError("the text \x1b[2J is none:\ngive another"))
    assert capfd.readouterr().err == "tba: the text \\x1b[2J is none:\ngive another\n"
    ended = os.dup(2)
    os.close(2)
    try:
        print_error(error)
    finally:
        os.dup2(ended, 2)
        os.close(ended)


def test_no_process_prints_a_traceback_as_it_is() -> None:
    package = Path(tba.__file__).parent
    assert [str(path) for path in package.rglob("*.py") if "print_exc" in path.read_text()] == []


def test_a_template_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "TEMPLATE_SECONDS", 0.2)
    tokenizer, chat = character_tokenizer("ab"), [{"role": "user", "content": "a"}]
    loops = "".join(f"{{% for {name} in range(99999) %}}" for name in "xyz")
    tokenizer.chat_template = loops + "{% endfor %}" * 3
    with pytest.raises(UserError, match=r"template cannot write a prompt \(no end after 0.2 s\): give another"):
        templated(tokenizer, chat)
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert [templated(tokenizer, chat) for _ in range(3)] == ["a"] * 3
