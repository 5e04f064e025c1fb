"""The documents say what is there: their commands parse, their links lead somewhere, their names are the run's own."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import yaml

from tba.apps.preference.options import RewardModelOptions
from tba.apps.red_team.endpoint import EndpointVictim
from tba.apps.red_team.options import ClassifierOptions
from tba.apps.red_team.world import WorldOptions
from tba.command.collecting import SmoothingOptions
from tba.command.sft import SftOptions
from tba.command.table import COMMANDS
from tba.errors import UserError
from tba.fields import fields_of, split_options
from tba.recipe_names import recipe_names
from tba.record import metrics
from tba.record.ledger import TERMS
from tba.record.summary import Summary, WallSeconds
from tba.replay.selection import RecencyReward
from tba.settings import find, override
from tba_lab.command import StudyOptions
from tba_lab.study import find_study

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
EXAMPLES = sorted(set((ROOT / "examples").glob("my_*.py")) - {ROOT / "examples" / "my_agent.py"})  # recipes
OPTIONS = {name: [options() for options in command.option_classes()] for name, command in COMMANDS.items()}
OPTIONS["study"] = [StudyOptions()]  # of tba-lab
# what the fields of a command set, where that is no recipe
FIELDS = {"reward-model": RewardModelOptions(), "red-team world": WorldOptions()}
FIELDS |= {"red-team classifier": ClassifierOptions()}


def blocks(document: Path) -> list[str]:
    """The text of fenced and indented blocks, with continued lines joined."""
    text = re.sub(r"\\\n *", "", document.read_text(encoding="utf-8"))
    fenced = re.findall(r"^```\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [*fenced, *re.findall(r"^ {4}(\S.*)$", text, flags=re.MULTILINE)]


def commands() -> list[list[str]]:
    """Every `tba` command in a block that takes fields."""
    lines = [line for document in DOCUMENTS for block in blocks(document) for line in block.splitlines()]
    said = [re.sub(r" {3,}\S.*", "", line.strip().removeprefix(".venv/bin/")) for line in lines]
    verbs = r"(tba (train|eval|sft|sample|check|reward-model|red-team)|tba-lab study) [a-z]"
    words = [shlex.split(line, comments=True) for line in said if re.match(verbs, line)]
    return [w[1:] for w in words]


def test_a_command_in_the_documents_sets_fields_that_exist() -> None:
    wrong = {}
    for words in commands():
        try:
            sets_fields_that_exist(words)
        except (UserError, KeyError, AssertionError) as error:
            wrong[" ".join(words)] = repr(error)
    assert not wrong, "\n".join(f"tba {words}: {error}" for words, error in wrong.items())


def sets_fields_that_exist(words: list[str]) -> None:
    verb = next(verb for verb in (" ".join(words[:2]), words[0]) if verb in OPTIONS)
    words = words[len(verb.split()) :]
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    name, rest = words[0], words[first:]
    options = None
    if OPTIONS[verb]:
        options, rest = split_options(OPTIONS[verb][0], rest, f"tba {verb}")
    if verb == "study":
        assert set(find_study(name).matching(options.only.split(",") if options.only else ["*"]))
        override(find_study(name).recipe, rest, f"tba-lab study {name}")
    elif not COMMANDS[verb].sets_fields:
        assert rest == []
    elif verb in FIELDS:
        override(FIELDS[verb], rest, f"tba {verb}")
    else:
        kinds = {".jsonl": SftOptions(), "": SmoothingOptions()} if verb == "sft" else {}
        named = kinds.get(Path(name).suffix) if "/" in name or "." in name else None
        override(named or find(str(ROOT / name) if ".py" in name else name), rest, f"tba {verb} {name}")


def test_the_documents_have_commands() -> None:
    assert len(commands()) >= 12
    assert ["train", "quickstart", "--runtime", "inline"] in commands()


def test_a_flag_named_in_passing_exists() -> None:
    known = {field.flag for recipe in recipe_names() for field in fields_of(find(recipe))}
    known |= {field.flag for field in fields_of(EndpointVictim(), "--task.victim.")}  # of no recipe that comes along
    known |= {field.flag for file in EXAMPLES for field in fields_of(find(str(file)))}
    others = [*(own for options in OPTIONS.values() for own in options), SmoothingOptions(), SftOptions()]
    known |= {field.flag for own in others for field in fields_of(own)} | {"--config"}
    prose = [d for d in DOCUMENTS if d.name != "reference.md"]  # that page has those of every task
    said = {flag for d in prose for flag in re.findall(r"`(--[a-z][\w.-]*)", d.read_text(encoding="utf-8"))}
    assert {flag for flag in said if flag not in known and flag.replace(".no-", ".") not in known} == set()
    assert "--objective.form" in said


def test_every_link_leads_to_a_file_or_a_heading() -> None:
    pages = [*DOCUMENTS, *(ROOT / "lab").glob("*.md")]
    links = ((d, link) for d in pages for link in re.findall(r"\]\(([^)\s]+)\)", d.read_text(encoding="utf-8")))
    wrong = [f"{document.name}: {link}" for document, link in links if not leads_somewhere(document, link)]
    assert not wrong, "\n".join(wrong)


def leads_somewhere(document: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    file = (document.parent / path).resolve() if path else document
    if path.startswith("https://") or not file.is_file() or not anchor:
        return path.startswith("https://") or file.is_file()
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_every_page_of_the_docs_is_in_the_sites_navigation_once() -> None:
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = [
        page for section in sections for entries in section.values() for entry in entries for page in entry.values()
    ]
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_a_list_or_a_table_is_one_on_the_site_too() -> None:
    """The site's Markdown wants an empty line before each, and four spaces before what is inside a list."""
    wrong = []
    for document in DOCUMENTS:
        before, fenced = "", False
        for line in document.read_text(encoding="utf-8").splitlines():
            fenced ^= line.startswith("```")
            begins = not fenced and before and re.match(r"(- |\d+\. |\|)", line)
            joined = begins and not re.match(r"(- |\d+\. |\||  )", before)
            if joined or (not fenced and re.match(r" {1,3}(- |\d+\. |\||```)", line)):
                wrong.append(f"{document.name}: {line}")
            before = line
    assert not wrong, "\n".join(wrong)


def test_every_module_that_is_named_exists() -> None:
    missing = []
    for document in DOCUMENTS:
        for path in set(re.findall(r"`([a-z_\d/]+\.py)[`:]", document.read_text(encoding="utf-8"))):
            found = any((base / path).is_file() for base in (ROOT, ROOT / "src/tba", ROOT / "docs"))
            anywhere = "/" not in path and [
                p for room in ("src", "tests", "lab") for p in ROOT.glob(f"{room}/**/{path}")
            ]
            if not found and not anywhere:
                missing.append(f"{document.name}: {path}")
    assert not missing, "\n".join(missing)


def test_every_module_is_in_the_table_of_where_things_are_by_itself_or_with_its_package() -> None:
    table = (ROOT / "AGENTS.md").read_text(encoding="utf-8").partition("## Where things are")[2].partition("\n## ")[0]
    entries = set(re.findall(r"`([\w/.]+)`", table))
    modules = [path.relative_to(ROOT / "src/tba") for path in (ROOT / "src/tba").rglob("*.py")]
    assert len(modules) > 250
    covered = {m for m in modules if {str(m), *(f"{folder}/" for folder in m.parents)} & entries}
    empty = {m for m in modules if m.name == "__init__.py" and len(m.parts) > 1}
    assert sorted(map(str, {*modules} - covered - empty)) == []


def test_what_the_design_says_of_a_function_is_where_it_says() -> None:
    """In its table of a trajectory's way: each `Class.method` and `function` is defined in one of its row's files."""
    rows = re.findall(r"^\| [^|]+ \| ([^|]*`[\w/]+\.py`[^|]*) \|$", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    checked = 0
    for row in rows:
        files = [ROOT / "src/tba" / path for path in re.findall(r"`([\w/]+\.py)`", row)]
        source = "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        for name in re.findall(r"`([A-Z]\w+(?:\.\w+)?)` in `", row):
            kind, _, method = name.partition(".")
            assert f"class {kind}" in source, name
            assert not method or re.search(rf"def {method}\(", source), name
            checked += 1
    assert checked >= 8


def test_every_key_of_a_summary_and_every_known_metric_is_explained() -> None:
    page = (ROOT / "docs" / "run.md").read_text(encoding="utf-8")
    said = {name for code in re.findall(r"`([^`]+)`", page) for name in re.split(r"[\s,.]+", code)}
    keys = set(Summary("", 0, 0, WallSeconds(0.0)).to_json()) | {f.name for f in fields(WallSeconds)} | set(TERMS)
    known = {
        value
        for name, value in vars(metrics).items()
        if name.isupper() and name not in ("FILE", "PART") and isinstance(value, str)
    }
    assert keys | known <= said


def test_nothing_in_the_documents_is_of_one_machine() -> None:
    for document in DOCUMENTS:
        assert not re.search(r"(?<![\w.])/(home|root|work|tmp|Users)/", document.read_text(encoding="utf-8")), document


def test_the_hyperparameters_of_the_page_are_those_of_the_recipes() -> None:
    page = (ROOT / "docs" / "hyperparameters.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if re.search(r"\d x \d", line)
    ]
    rows = [row for row in rows if len(row) == 9]
    assert len(rows) == 8
    for name, _, _, rate, _, batch, sync_every, recent_share, uses in rows:
        recipe = find(name.split("`")[1])
        assert float(rate.strip("`")) == recipe.optimizer.lr
        assert batch == f"{recipe.groups_per_step} x {recipe.group_size}"
        assert int(sync_every) == recipe.sync_every
        assert isinstance(recipe.replay.selection, RecencyReward)
        assert float(recent_share) == recipe.replay.selection.m
        assert float(uses) == recipe.replay.pacing.max_mean_uses
