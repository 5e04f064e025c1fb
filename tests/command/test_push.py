"""A run's model is shared whole, with a card that says what the run says, and nothing that it hides."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from torch.nn import Parameter
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.__main__ import main
from tba.command.model_card import base_of, escape
from tba.errors import UserError
from tba.recipes.quickstart import BASE
from tba.record.text import printable
from tba.training.checkpoint import save_checkpoint
from tba.training.optimizer import OptimizerSettings
from tba.types import Version
from written_run import HOSTILE, STEPS, write


def with_model(run: Path, base: Path = BASE, **resolved: object) -> Path:
    """Give a written run a checkpoint with a real model, and settings that say where its base is."""
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS}")
    optimizer = OptimizerSettings().start([Parameter(torch.zeros(2))], [])

    def save(folder: Path) -> None:
        shutil.copytree(BASE, folder, dirs_exist_ok=True)

    save_checkpoint(run / "checkpoints", Version(0, STEPS), save, optimizer)
    facts = json.loads((run / "recipe.json").read_text())
    facts["resolved"] |= {"model": {"path": str(base)}, **resolved}
    (run / "recipe.json").write_text(json.dumps(facts))
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_model(write(tmp_path_factory.mktemp("runs") / "first"))


@pytest.fixture(scope="module")
def shared(run: Path) -> Path:
    out = run.parent / "shared"
    assert main(["push", str(run), "me/sums", "--out", str(out), "--base", "them/base", "--licence", "mit"]) == 0
    return out


def test_the_folder_opens_in_transformers_and_has_no_state_of_the_optimizer(shared: Path) -> None:
    files = {file.name for file in shared.iterdir()}
    assert files == {file.name for file in BASE.iterdir()} | {"model.safetensors.index.json", "README.md"}
    model, base = (AutoModelForCausalLM.from_pretrained(folder) for folder in (shared, BASE))
    asked = AutoTokenizer.from_pretrained(shared)("123+456=", return_tensors="pt").input_ids
    assert torch.equal(model(asked).logits, base(asked).logits)


def test_the_cards_metadata_are_those_the_hub_reads(shared: Path) -> None:
    data = ModelCard.load(shared / "README.md").data.to_dict()
    assert data == {
        "base_model": "them/base", "library_name": "transformers", "license": "mit", "pipeline_tag": "text-generation",
        "tags": ["tba", "reinforcement-learning", "trajectory-balance"],
    }  # fmt: skip


def test_the_card_has_the_figures_of_the_run_and_its_settings(shared: Path) -> None:
    seen = Seen.of(shared / "README.md")
    assert "pass@1/greedy|25.0 % [19.5, 31.4]|75.0 % [68.6, 80.5]|200" in seen.rows
    assert {"objective|TrajectoryBalance", "objective.beta|0.5", "policy-temperature|1.0"} <= set(seen.rows)
    assert f"trained for {STEPS} steps" in seen.text


def test_whatever_was_asked_and_answered_is_text_on_the_card_and_nothing_else(shared: Path) -> None:
    seen = Seen.of(shared / "README.md")
    for text in HOSTILE[:2]:
        assert f"{text}|wrong: held out: {text}|right: held out: {text}" in seen.rows
    allowed = {"h1", "h2", "p", "ul", "li", "a", "em", "img", "table", "thead", "tbody", "tr", "th", "td", "details"}
    assert seen.tags <= allowed | {"summary", "code", "pre"}
    assert seen.links == {"https://arxiv.org/abs/2503.18929", "https://huggingface.co/them/base"}


@pytest.mark.parametrize(
    "text", [*HOSTILE, "a\n\n# b", "a | b", "[a](javascript:b)", "![a](b)", "`a`", "~~a~~ **b** _c_"]
)
def test_markdown_makes_nothing_of_an_escaped_text(text: str) -> None:
    seen = Seen.in_markdown(f"| |\n|---|\n| {escape(text)} |")
    assert seen.rows[1:] == [printable(text.replace("\n", "⏎"), newlines=False)]
    assert seen.tags == {"table", "thead", "tbody", "tr", "th", "td"}


def test_the_base_of_a_run_from_an_adapter_is_what_the_adapter_is_of(tmp_path: Path) -> None:
    for folder in ("base", "adapter"):
        (tmp_path / folder).mkdir()
    (tmp_path / "base" / "origin.json").write_text('{"hub": "them/base", "spdx": "mit"}')
    config = tmp_path / "adapter" / "adapter_config.json"
    for named in (str(tmp_path / "base"), "../base"):
        config.write_text(json.dumps({"base_model_name_or_path": named}))
        found = base_of({"path": str(config.parent)})
        assert (found.hub, found.licence) == ("them/base", "mit")
        assert found.description == "a model in a folder, with an adapter merged into it"
    (config.parent / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    assert base_of({"path": str(config.parent)}).licence == "apache-2.0"
    config.write_text(json.dumps({"base_model_name_or_path": str(config.parent)}))
    assert base_of({"path": str(config.parent)}).hub is None
    config.write_text("[]")
    with pytest.raises(UserError, match=r"adapter_config\.json has unexpected contents"):
        base_of({"path": str(config.parent)})


def test_a_run_that_hides_its_texts_shows_none_even_if_its_files_have_them(tmp_path: Path) -> None:
    hidden = with_model(write(tmp_path / "hidden"), record={"hide_text": True})
    assert main(["push", str(hidden), "me/sums", "--out", str(tmp_path / "out")]) == 0
    text = Seen.of(tmp_path / "out" / "README.md").text
    assert "pass@1/greedy" in text
    assert "held out:" not in text
    for hostile in HOSTILE:
        assert printable(hostile, newlines=False) not in text


def test_what_a_folder_knows_of_its_model_is_on_the_card_and_where_it_lies_is_not(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(BASE, base)
    (base / "origin.json").write_text(json.dumps({"hub": "them/known", "spdx": "apache-2.0"}))
    (base / "LICENSE").write_text("the licence")
    made = with_model(write(tmp_path / "made"), base)
    assert main(["push", str(made), "me/sums", "--out", str(tmp_path / "out")]) == 0
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (data.base_model, data.license) == ("them/known", "apache-2.0")
    assert (tmp_path / "out" / "LICENSE").read_text() == "the licence"
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()
    (base / "origin.json").unlink()
    (base / "README.md").write_text("---\ntags:\n- a\nlicense: mit\n---\n# Base\nlicense: none\n")
    assert main(["push", str(made), "me/sums", "--out", str(tmp_path / "again")]) == 0
    data = ModelCard.load(tmp_path / "again" / "README.md").data
    assert (data.base_model, data.license) == (None, "mit")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["me", "--out", "x"], "give OWNER/NAME"),
        (["me/a/b", "--out", "x"], "give OWNER/NAME"),
        (["me/a--b", "--out", "x"], "give OWNER/NAME"),
        (["me/.a", "--out", "x"], "give OWNER/NAME"),
        (["me/ä", "--out", "x"], "give OWNER/NAME"),
        (["--out", "x"], "needs the run, then the name on the Hub"),
        (["me/a", "--base", "b", "--out", "x"], "--base is 'b': give OWNER/NAME"),
        (["me/a", "--licence", "MIT License", "--out", "x"], "the Hub's name of one"),
        (["me/a", "--best", "--out", "x"], "has no best checkpoint"),
        (["me/a", "--out", "/dev/null"], "is there already"),
        (["me/a", "--out", "/dev/null/x"], "cannot be written"),
        (["me/a"], "HF_HUB_OFFLINE is set"),
    ],
)
def test_what_cannot_be_shared_is_said_in_one_sentence(
    run: Path, arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["push", str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_whole_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = with_model(write(tmp_path / "made"))
    weights = made / "checkpoints" / f"step-{STEPS}" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert main(["push", str(made), "me/sums", "--out", str(tmp_path / "out")]) == 2
    assert "model.safetensors: its checksum differs" in capsys.readouterr().err
    shutil.rmtree(made / "checkpoints")
    assert main(["push", str(made), "me/sums", "--out", str(tmp_path / "out")]) == 2
    assert "has no checkpoint to share (it wrote none)" in capsys.readouterr().err


# The Hub


class Hub(ThreadingHTTPServer):
    """What of the Hub an upload needs: it keeps the files of each commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, object]] = []
        self.taken = True


class Asked(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "Bearer hf_right"
        self.reply({"name": "me"}, 401 if not known else 200 if self.path == "/api/whoami-v2" else 404)

    def do_POST(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        lines = [json.loads(line) for line in body.splitlines()]
        if self.path == "/api/repos/create":
            self.server.created.append(lines[0])
            self.reply({"url": "http://127.0.0.1/me/sums"}, 200 if self.server.taken else 403)
        elif "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in lines[0]["files"]]
            self.reply({"files": files})
        elif "/commit/" in self.path:
            for line in lines:
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.reply({"commitUrl": "http://127.0.0.1/me/sums/commit/1", "commitOid": "1", "success": True})
        else:
            self.reply({})

    def reply(self, value: object, code: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)


@pytest.fixture
def hub(online: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()
        serving.join()


def test_what_is_uploaded_is_what_a_dry_run_writes(
    run: Path, shared: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    given = ["--base", "them/base", "--licence", "mit"]
    assert main(["push", str(run), "me/sums", "--private", *given]) == 0
    assert hub.files == {file.name: file.read_bytes() for file in shared.iterdir()}
    assert [(c["name"], c["organization"], c["visibility"]) for c in hub.created] == [("sums", "me", "private")]
    assert f"/me/sums: step {STEPS}" in capsys.readouterr().out
    assert not list(run.glob(".push-*"))


def test_a_hub_that_refuses_or_cannot_be_reached_is_one_sentence(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*why: str) -> None:
        assert main(["push", str(run), "me/sums"]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert all(w in error for w in why), error
        assert not list(run.glob(".push-*"))
        assert hub.files == {}

    said("there is no token for the Hub", "hf auth login", "--out DIR")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    said("the Hub did not answer", "Invalid user token")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    hub.taken = False
    said("the Hub did not take the upload", "4")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    said("the Hub did not answer", "refused")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("tba.command.push._ANSWER_S", 0.1)
        said("the Hub did not answer", "no answer within 0 s")


# A card as a reader sees it


class Seen(HTMLParser):
    """Tags, rows of tables and text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: set[str] = set()
        self.images: list[str] = []
        self.rows: list[str] = []
        self.text = ""
        self._in_cell = False

    @classmethod
    def of(cls, file: Path) -> Seen:
        return cls.in_markdown(ModelCard.load(file).text)

    @classmethod
    def in_markdown(cls, text: str) -> Seen:
        seen = cls()
        seen.feed(MarkdownIt("commonmark", {"html": True}).enable("table").enable("strikethrough").render(text))
        return seen

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        given = dict(attributes)
        if tag == "a":
            self.links.add(str(given.get("href")))
        if tag == "img":
            self.images.append(str(given.get("src")))
        if tag == "tr":
            self.rows.append("")
        if tag in ("td", "th"):
            self.rows[-1] += "|" if self.rows[-1] else ""
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            self.rows[-1] += data
