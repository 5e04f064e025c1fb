"""Count the functions and classes whose names say too little, and hold the count to the one that is committed.

    python tools/names.py              # compare with tools/names.json; `make check` does so
    python tools/names.py --write      # commit to a count that has fallen

A bare participle or pronoun (WORDS) leaves the reader to ask of what. A function counts once if it has an argument or a
local variable of such a name, a class counts once if it declares such a field or if its methods store such an attribute
on `self` or `cls`. What is defined inside a function or a class is counted by itself.

Invariant: `src/tba` never gets more of them. The counts are kept by file, so that a rise names its files; the
laboratory's are printed, without a limit.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[1]
PACKAGE, LAB = ROOT / "src" / "tba", ROOT / "lab"
COUNTS = Path(__file__).with_suffix(".json")
WORDS = frozenset(
    (
        *("found", "given", "own", "told", "asked", "said", "kept", "taken", "made", "left", "begun", "held", "wanted"),
        *("known", "shown", "looked", "one", "those", "what", "other", "others", "there", "ends", "theirs", "mine"),
        *("ours", "rest", "first", "some", "more", "such", "near"),
    )
)
OWNERS = ("self", "cls")  # whose attributes are a class's

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def units(source: str) -> Iterator[tuple[int, str, frozenset[str]]]:
    """Yields line, name and the words among its names of each function and class that has some, by line."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, SCOPES)]
    for node in sorted(nodes, key=lambda node: node.lineno):
        if isinstance(node, Function):
            names = {argument.arg for argument in _arguments(node)} | set(_variables(node))
        else:
            names = set(_attributes(node))
        if words := names & WORDS:
            yield node.lineno, node.name, frozenset(words)


def _arguments(function: Function) -> Iterator[ast.arg]:
    inner = [node for node in _inside(function) if isinstance(node, ast.Lambda)]
    for arguments in (function.args, *(node.args for node in inner)):
        yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        yield from (argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None)


def _variables(function: Function) -> Iterator[str]:
    """Yields the names that a function binds: by assignment, in loops and patterns, as errors and by import."""
    for node in _inside(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def _attributes(kind: ast.ClassDef) -> Iterator[str]:
    """Yields the names that a class declares in its body, and those that its methods store."""
    for node in _inside(kind):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, Function):
            yield from _stored(node)


def _stored(function: Function) -> Iterator[str]:
    """Yields the attributes that a method, or a function inside it, stores on its object."""
    for node in _inside(function):
        if isinstance(node, Function):
            yield from _stored(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_owner(node.value):
            yield node.attr


def _is_owner(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in OWNERS


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a scope, with the functions and classes that it defines but not what is in them."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, SCOPES):
            yield from _inside(node)


def counted(folder: Path) -> dict[str, int]:
    """Returns the count of each file below a folder that has any, by its path in the repository."""
    counts = {path: len(list(units(path.read_text(encoding="utf-8")))) for path in sorted(folder.rglob("*.py"))}
    return {path.relative_to(ROOT).as_posix(): count for path, count in counts.items() if count}


def verdict(counts: Mapping[str, int], committed: Mapping[str, int]) -> str:
    """Returns a sentence about a total that is not the committed one; an empty text for one that is."""
    total, limit = sum(counts.values()), sum(committed.values())
    if total > limit:
        rises = {path: (committed.get(path, 0), count) for path, count in counts.items()}
        where = ", ".join(f"{path} ({old} to {new})" for path, (old, new) in rises.items() if new > old)
        return (
            f"{total} functions and classes of src/tba have names that say too little, {total - limit} more than "
            f"before, in {where}: rename them after what they hold (`python tools/names.py --list` says which)"
        )
    if total < limit:
        return (
            f"{total} functions and classes of src/tba have names that say too little, {limit - total} fewer than "
            f"before: commit to that with `python tools/names.py --write`"
        )
    return ""


def main() -> int:
    """Compare, list or write the counts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the counts to {COUNTS.name}; refused for a rise")
    parser.add_argument("--list", action="store_true", help="list all that count")
    options = parser.parse_args()
    counts, lab = counted(PACKAGE), counted(LAB)
    if options.list:
        for path in counts:
            for line, name, words in units((ROOT / path).read_text(encoding="utf-8")):
                print(f"{path}:{line}: {name}: {', '.join(sorted(words))}")
    committed = json.loads(COUNTS.read_text(encoding="utf-8"))
    sentence = verdict(counts, committed)
    if options.write and sum(counts.values()) <= sum(committed.values()):
        COUNTS.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
        sentence = ""
    print(f"names: src/tba {sum(counts.values())}, lab {sum(lab.values())} (no limit)")
    if sentence:
        print(sentence, file=sys.stderr)
    return int(bool(sentence))


if __name__ == "__main__":
    sys.exit(main())
