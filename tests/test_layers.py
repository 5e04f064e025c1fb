"""Imports point down: the layout of the package, held over its syntax trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import tba

ROOT = Path(__file__).parents[1] / "src" / "tba"
FILES = sorted(ROOT.rglob("*.py"))

GROUND = {"errors", "types", "typed_values", "fields", "json_input", "user_code", "markup", "chat_prompts"}
GROUND |= {"pretrained", "tables", "assistant_turns", "host_memory"}
TENSORS = {"sharding", "streaming", "device_to_host", "gpus"}  # torch alone
SEAMS = GROUND | {"protocols", "generation", "grading", "batch"}
LEAVES = {"engines", "policy", "rewards", "tasks"}
PARTS = {"rollout", "imported_answers", "training", "replay", "weights", "evaluation", "record"}

CORE = SEAMS | LEAVES | PARTS | TENSORS
CORE |= {
    "environments",
    "serving",
    "models",
    "objectives",
    "schedules",
    "clock",
    "recipe",
    "settings",
    "recipe_names",
    "runtime",
}

# What each part of the package may import of the others, below it. The core is all up to `runtime`; on `runs` stand the
# commands, and beside them the functions for scripts and the applications, each a folder of its own, then the recipes.
# The laboratory (lab/) stands above all.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "typed_values": set(),  # of any declared type
    "fields": {"errors", "typed_values"},  # of any settings
    "json_input": {"errors", "types", "typed_values"},
    "user_code": {"errors", "types"},  # what it gives and raises
    "templates": {"errors"},  # of chats
    "markup": {"errors", "types", "templates"},  # control tokens, and text that only spells them
    "field_names": {"recipe_names"},  # of any recipe, by its source
    "config_file": {"errors"},
    "chat_prompts": {"errors", "types", "markup", "templates"},  # as a tokenizer's chat template writes them
    "pretrained": {"errors", "types", "json_input"},  # models of others
    "tables": {"errors", "types", "json_input"},  # rows of files, for tasks and imports
    "assistant_turns": {"errors", "types", "chat_prompts", "markup"},  # what ends a turn in a chat template
    "clock": set(),
    "host_memory": set(),
    "batch": {"types"},
    "protocols": {"errors", "types", "batch", "sharding"},  # the last two for type checkers only
    "generation": {"types", "protocols"},
    "grading": {"errors", "types", "protocols", "signals"},
    "signals": set(),
    "schedules": {"errors", "fields"},
    "sharding": set(),
    "streaming": set(),
    "device_to_host": {"streaming"},
    "gpus": set(),
    "policy": SEAMS | TENSORS,
    "engines": SEAMS | {"policy", "streaming", "device_to_host", "gpus"},
    "environments": SEAMS | {"rewards"},  # of rewards how child processes are kept and limited
    "rewards": SEAMS,
    "tasks": SEAMS | {"rewards"},  # a task names the reward that marks it
    "objectives": SEAMS | {"schedules"},
    "replay": GROUND | {"protocols"},
    "weights": GROUND | {"protocols", "streaming", "device_to_host"},
    "evaluation": GROUND | {"protocols", "generation", "grading"},
    "record": GROUND | {"protocols", "evaluation"},  # of evaluate the estimators, see below
    "rollout": SEAMS | {"clock"},
    "imported_answers": SEAMS,
    "training": SEAMS | TENSORS | {"schedules", "weights"},  # of weights what writes a folder beside its place
    # the same of weights; of environments how demonstrations of episodes become tokens
    "models": SEAMS | LEAVES | TENSORS | {"training", "weights", "environments"},
    "recipe": SEAMS | PARTS | {"models"},  # of models the one that a folder's path stands for
    "recipe_names": {"errors"},
    "settings": GROUND | {"recipe", "recipe_names"},  # recipes and studies by name, when they are asked for
    "serving": SEAMS | {"environments", "rollout", "imported_answers"},  # agents' calls as a searcher's answers
    "runtime": SEAMS | PARTS | {"gpus", "clock", "environments", "serving", "recipe", "settings", "recipe_names"},
    "runs": CORE,
    "command": CORE | {"runs"},
    "apps.preference": CORE | {"runs"},
    "apps.red_team": CORE | {"runs"},
    "apps": set(),
    "recipes": CORE | {"apps.preference", "apps.red_team"},
    "__main__": GROUND | {"command", "config_file", "field_names", "recipe_names", "record", "runtime"},
    "api": CORE | {"runs", "recipe_source"},
    "recipe_source": GROUND | {"recipe", "settings"},
    "__init__": CORE | {"api"},  # names that it loads when they are used
}
ONLY_IN = {
    "vllm": {"engines/vllm_surface.py"},
    "ray": {
        *("runtime/cluster/driver.py", "runtime/cluster/actors.py", "runtime/cluster/client.py"),
        "runtime/cluster/machines.py",
        "runtime/cluster/relocation.py",
    },
    "math_verify": {"rewards/math_answer.py"},
    "starlette": {"serving/app.py", "serving/connections.py", "command/serve.py"},
    "uvicorn": {"serving/connections.py", "command/serve.py"},
    "verifiers": {"environments/verifiers_process.py"},
    "sklearn": {"apps/red_team/word_classifier.py"},
    "torch.distributed": {  # the rooms of the trainer's ranks, and the sum of gradients' norms
        *("sharding.py", "policy/fsdp.py", "training/optimizer.py", "training/ranks/messages.py"),
        *("runtime/ranks/start.py", "runtime/ranks/store.py"),
    },
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(path: Path) -> Iterator[str]:
    """Full names of modules imported anywhere in the file, also within functions, and of public names of `tba`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tba":
            yield f"{tba._MODULE_OF.get(node.attr, 'tba')}.{node.attr}"
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path: Path) -> str:
    return ".".join(["tba", *path.relative_to(ROOT).with_suffix("").parts])


def part_of(path: Path) -> str:
    return part_named(module_of(path))


def part_named(module: str) -> str:
    """The part that a module, or a name in it, is of: its folder or file, and of applications which."""
    _, *names = module.split(".")
    if names == ["apps", "__init__"]:
        return "apps"
    return ".".join(names[: 2 if names[0] == "apps" and len(names) > 1 else 1])


def inside(path: Path) -> Iterator[str]:
    """Full names of this package's modules that the file imports, but for `tba` itself, whose names load theirs."""
    return (name for name in imported(path) if name.startswith("tba."))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_point_down() -> None:
    reached = {path: {part_named(name) for name in inside(path)} - {part_of(path)} for path in FILES}
    wrong = {named(path): sorted(parts - ALLOWED[part_of(path)]) for path, parts in reached.items()}
    assert {path: parts for path, parts in wrong.items() if parts} == {}


def test_the_rule_itself_has_no_cycle() -> None:
    left = dict(ALLOWED)
    while left:
        lowest = {part for part, below in left.items() if not below & left.keys()}
        assert lowest, f"these parts import each other: {sorted(left)}"
        left = {part: below for part, below in left.items() if part not in lowest}


def test_the_core_knows_neither_applications_nor_recipes_nor_the_laboratory() -> None:
    above = {"apps.preference", "apps.red_team", "recipes", "api", "__main__"}
    core = [path for path in FILES if part_of(path) in CORE | {"runs", "command"}]
    assert len(core) > 150
    for path in core:
        assert not {part_named(name) for name in inside(path)} & above, named(path)
    assert [named(path) for path in FILES if any(name.split(".")[0] == "tba_lab" for name in imported(path))] == []


def test_runs_print_nothing_and_the_laboratory_calls_them_and_no_command() -> None:
    for path in FILES:
        if part_of(path) == "runs":
            named_there = {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
            assert not named_there & {"print", "Console", "terminal"}, named(path)
    laboratory = list((ROOT.parents[1] / "lab" / "src").rglob("*.py"))
    assert laboratory
    for path in laboratory:
        assert not any(name.startswith("tba.command") for name in imported(path)), path


def test_no_two_modules_import_each_other_on_any_way_for_type_checkers_and_inside_functions_neither() -> None:
    """Taking away what imports nothing that is left, nothing is left."""
    modules = {module_of(path).removesuffix(".__init__"): path for path in FILES}
    left = {
        module: {n for name in inside(path) if (n := name if name in modules else name.rpartition(".")[0]) in modules}
        for module, path in modules.items()
    }
    while left:
        lowest = {module for module, below in left.items() if not below & left.keys()}
        assert lowest, f"these modules import each other: {sorted(left)}"
        left = {module: below for module, below in left.items() if module not in lowest}


def test_protocols_has_what_parts_ask_of_each_other_and_nothing_else() -> None:
    """Each is asked for by name; each of its members is used by some other module and given by one of its classes."""
    own = list(ast.walk(tree(ROOT / "protocols.py")))
    nodes = [node for path in FILES if part_of(path) != "protocols" for node in ast.walk(tree(path))]
    names = {name.rpartition(".")[2] for path in FILES for name in inside(path) if name.startswith("tba.protocols.")}
    names |= {node.id for node in own if isinstance(node, ast.Name)}
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {"__call__"}
    given = [members(node) for node in nodes if isinstance(node, ast.ClassDef) and not is_protocol(node)]
    protocols = [node for node in own if isinstance(node, ast.ClassDef) and is_protocol(node)]
    assert len(protocols) > 20
    for protocol in protocols:
        has = members(protocol)
        assert protocol.name in names, f"nobody asks for a {protocol.name}"
        assert has <= used, f"{protocol.name}: nobody uses {sorted(has - used)}"
        if protocol.name != "Tokenizer":  # which transformers gives
            assert any(has <= offered for offered in given), f"nothing is a {protocol.name}"


def is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).startswith("Protocol") for base in node.bases)


def members(node: ast.ClassDef) -> set[str]:
    """Methods, fields, and what the methods set."""
    defined = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
    fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    made = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return defined | fields | made


def test_record_takes_nothing_but_estimators_from_evaluation_and_training_nothing_but_renames_from_weights() -> None:
    for path in FILES:
        for name in inside(path):
            if part_of(path) == "record" and name.startswith("tba.evaluation"):
                assert name.startswith("tba.evaluation.estimators.")
            if part_of(path) in ("training", "models") and name.startswith("tba.weights"):
                assert name.startswith("tba.weights.atomic_dir.")


def test_replay_search_and_all_below_them_name_no_model_library_anywhere() -> None:
    light = ("types", "errors", "schedules", "replay", "rollout", "imported_answers", "rewards")
    for path in FILES:
        if part_of(path) in light:
            assert not {n.split(".")[0] for n in imported(path)} & {"torch", "transformers"}, named(path)


def test_vllm_ray_math_verify_verifiers_sklearn_and_torch_distributed_each_have_one_home() -> None:
    for package, allowed in ONLY_IN.items():
        homes = {named(path) for path in FILES if any(f"{name}.".startswith(f"{package}.") for name in imported(path))}
        assert homes <= allowed, package


UNLOADED = """
import importlib, pkgutil, sys
import tba.types, tba.replay
for module in pkgutil.iter_modules(tba.replay.__path__, "tba.replay."):
    importlib.import_module(module.name)
print("tba.replay.replay" in sys.modules, sorted({"torch", "transformers"} & sys.modules.keys()))
"""


def test_importing_types_and_all_of_replay_leaves_torch_unloaded() -> None:
    ended = subprocess.run([sys.executable, "-c", UNLOADED], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split("\n")[0] == "True []"


SANDBOXED = "rewards/sandbox_worker.py"  # runs programs, in processes that are confined before


def test_nothing_is_unpickled_or_evaluated_but_programs_in_the_sandbox() -> None:
    pickles = {"pickle", "cloudpickle", "dill", "joblib", "shelve"}
    calls = {"eval", "exec", "compile", "torch.load", "torch.save", "__import__"}
    wrong = [f"{named(path)}: {name}" for path in FILES for name in imported(path) if name.split(".")[0] in pickles]
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call):
                said = f"{named(path)}, line {node.lineno}: {ast.unparse(node.func)}"
                wrong += [said] * (ast.unparse(node.func) in calls and named(path) != SANDBOXED)
                wrong += [f"{said}({k.arg}=...)" for k in node.keywords if k.arg == "allow_pickle"]
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    silent = [named(path) for path in FILES if path.name != "__init__.py" and not ast.get_docstring(tree(path))]
    assert not silent, "\n".join(silent)


ENTRY_POINTS = {"main", "run", "serve"}  # of programs and of their parts


def test_no_two_classes_and_no_two_public_functions_of_modules_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in FILES:
        classes = [node.name for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
        functions = [node.name for node in tree(path).body if isinstance(node, ast.FunctionDef)]
        for name in [*(name.lstrip("_") for name in classes), *(name for name in functions if name[0] != "_")]:
            homes.setdefault(name, []).append(named(path))
    assert len(homes) > 1000
    twice = {name: paths for name, paths in homes.items() if len(paths) > 1 and name not in ENTRY_POINTS}
    assert twice == {}
