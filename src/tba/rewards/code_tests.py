"""Tests of programs as data sets have them, and the code in an answer.

Invariant: of what is read here only inputs ever reach a program: expected outputs and the source of asserts stay with
the judge. Nothing is evaluated but literals, and nothing unpickled.

| data set | where its tests are |
|---|---|
| APPS, TACO | `input_output`: `inputs`, `outputs`, for functions `fn_name` |
| CodeContests | `public_tests`, `private_tests`, `generated_tests`: `input`, `output` |
| LiveCodeBench | `public_test_cases`, `private_test_cases`, for functions `metadata.func_name` |
| MBPP | `test_list`, `test_setup_code`, `test_imports` |
| HumanEval, EvalPlus | `test` with `check(candidate)`, `entry_point` |
| your own | `tests`: any of these, or a list of asserts, of `{"input", "output"}` or of `{"function", "arguments",
"expected"}`, each perhaps with a `weight` |

Columns may be texts of JSON. An assert of the form `f(literals) == literal` is a call whose value is compared; any
other is run in a process of its own, which asks for what the program's functions return. What a test compares with, or
by, must not be the program's: with an entry point a program provides that alone, and the prompt the helpers; elsewhere
a test may take one function from it.
"""

from __future__ import annotations

import ast
import base64
import builtins
import hashlib
import json
import pickletools
import symtable
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tba.errors import UserError
from tba.rewards.sandbox_values import canonical, encode_value
from tba.tables import parse_json_text
from tba.types import Json

_PLACES: tuple[str, ...] = (
    "input_output",
    "tests",
    "test_cases",
    "unit_tests",
    "verification_info",
    "reward_model",
    "ground_truth",
)
_PLACES += ("answer", "extra_info")
_CODE_CONTESTS = ("public_tests", "private_tests", "generated_tests")
_LIVE_CODE_BENCH = ("public_test_cases", "private_test_cases")
_LARGEST_COLUMN = 1 << 28  # bytes of a compressed column
_FENCE = "```"


@dataclass(frozen=True)
class InputOutput:
    """A test of a whole program: what it reads and what it should write."""

    stdin: str
    expected: str
    weight: float = 1.0


@dataclass(frozen=True)
class FunctionCall:
    """A test of a function: its arguments and the value that it should return."""

    function: str
    arguments: tuple[Any, ...]
    expected: Any
    keywords: Mapping[str, Any] = field(default_factory=dict)
    as_json: bool = False  # the value is compared as JSON has it, in which a tuple is a list
    is_wrapped: bool = False  # what is expected may be the only item of `expected`, or this list itself
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Raises `ValueError` for arguments or an expected value that are no data, or too large or deep to be sent."""
        try:
            for value in (list(self.arguments), dict(self.keywords), self.expected):
                canonical(encode_value(value), self.as_json)
        except ValueError as error:
            raise ValueError(f"the arguments of {self.function} or its expected value: {error}") from None

    @cached_property
    def expected_texts(self) -> set[str]:
        """Returns the canonical texts of right values; none for NaN, which equals nothing."""
        values = [self.expected]
        if self.is_wrapped and isinstance(self.expected, list) and len(self.expected) == 1:
            values += self.expected
        return {text for value in values if (text := canonical(encode_value(value), self.as_json)) is not None}


@dataclass(frozen=True)
class Statement:
    """A test that is a piece of code, such as an assert that is no plain comparison."""

    source: str
    weight: float = 1.0


@dataclass(frozen=True)
class CodeTests:
    """The tests of one problem, all of one kind."""

    tests: Sequence[InputOutput | FunctionCall | Statement]  # all of one kind
    setup: str = ""  # code that runs before statements, in their process
    entry_point: str = ""  # the function that an answer defines, or ends, where a data set says so
    program_names: tuple[str, ...] = ()  # what statements may take from the program, where a problem lists it

    @property
    def sources(self) -> list[str]:
        """Returns the code of the setup and of each statement."""
        return [self.setup, *(test.source for test in self.tests if isinstance(test, Statement))]

    @cached_property
    def digest(self) -> str:
        """Returns a digest of all of them."""
        return hashlib.blake2b(repr(self).encode(errors="surrogatepass"), digest_size=16).hexdigest()

    @cached_property
    def names(self) -> tuple[list[str], list[str]]:
        """Returns the names in statements that are the program's, and those that are modules of Python."""
        names, modules = _free_names("\n".join(self.sources))
        if self.entry_point:
            names = {self.entry_point}
        names |= set(self.program_names)
        return sorted(names), sorted(modules - names)


def read_tests(fields: Mapping[str, Json], name: str = "", prompt: str = "") -> CodeTests:
    """Returns the tests of a problem from its fields. Raises `UserError` where there are none that can be read.

    name: of the field that has them, `a.b` for `b` in the object `a`; empty: it is known by its name. prompt: code that
    answers may go on from.
    """
    value: Json = fields
    for part in name.split(".") if name else []:
        value = parse_json_text(value)
        value = value.get(part) if isinstance(value, Mapping) else None
    try:
        tests = _find_tests(value, 0)
        if tests is not None and isinstance(entry_point := fields.get("entry_point"), str):
            tests = replace(tests, entry_point=entry_point)
        if tests is not None and tests.tests and isinstance(tests.tests[0], Statement):
            names = parse_json_text(fields.get("program_names")) or []
            tests = _with_helpers(replace(tests, program_names=tuple(map(str, names))), prompt)
            _refuse_foreign_helpers(tests)
    except (ValueError, SyntaxError, RecursionError, TypeError, KeyError, zlib.error) as error:
        raise UserError(
            f"the tests of a problem cannot be read ({type(error).__name__}: {error}); see docs/code_rewards.md"
        ) from error
    if tests is None or not tests.tests:
        raise UserError(
            f"a problem has no tests {f'in its field {name!r}' if name else 'in a field that is known'}: it has the "
            f"fields {', '.join(sorted(fields)) or 'none'}; name the right one with `tests`, in a form that "
            "docs/code_rewards.md has"
        )
    return tests


def extract_code(text: str) -> tuple[str, bool]:
    """Returns the code of an answer, and whether it stands in a block: the last one between fences, else all of it."""
    block: list[str] = []
    last: list[str] | None = None
    is_open = False
    for line in text.split("\n"):
        if line.lstrip().startswith(_FENCE):
            is_open, last = not is_open, last if not is_open else block
            block = []
        elif is_open:
            block.append(line)
    if is_open and block:
        last = block  # an answer that was cut off
    return (text, False) if last is None else ("\n".join(last) + "\n", True)


def _find_tests(value: Json, depth: int) -> CodeTests | None:
    """Returns the tests that a value holds, in whichever form; None where it holds none."""
    value = parse_json_text(value)
    if depth > 3:
        return None
    if isinstance(value, list | tuple):
        return _from_list(value)
    if isinstance(value, str):
        return _from_statements([value]) if "assert" in value else None
    if not isinstance(value, Mapping):
        return None
    for inputs, outputs in (("inputs", "outputs"), ("input", "output")):
        if isinstance(parse_json_text(value.get(inputs)), list) and outputs in value:
            return _from_columns(value, inputs, outputs)
    if value.get("test_list") is not None:
        setup = [*(value.get("test_imports") or []), value.get("test_setup_code") or ""]
        return _from_statements(list(value["test_list"]), "\n".join(setup).strip())
    if isinstance(value.get("test"), str) and isinstance(value.get("entry_point"), str):
        return _from_check(value["test"], value["entry_point"])
    if any(name in value for name in _CODE_CONTESTS):
        columns = [_from_columns(value[name], "input", "output") for name in _CODE_CONTESTS if value.get(name)]
        return CodeTests([test for tests in columns for test in tests.tests if isinstance(test, InputOutput)])
    if any(name in value for name in _LIVE_CODE_BENCH):
        return _from_live_code_bench(value)
    inner_tests = (_find_tests(value[name], depth + 1) for name in _PLACES if value.get(name) is not None)
    return next((tests for tests in inner_tests if tests is not None), None)


def _from_columns(value: Json, inputs_name: str, outputs_name: str) -> CodeTests:
    """Returns tests from a list of inputs and one of outputs."""
    value = parse_json_text(value)
    inputs, outputs = parse_json_text(value[inputs_name]), parse_json_text(value[outputs_name])
    if not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"{inputs_name} and {outputs_name} are not lists of one length")
    name = value.get("fn_name")
    if not isinstance(name, str) or not name:
        return CodeTests([InputOutput(_as_text(i), _as_text(o)) for i, o in zip(inputs, outputs, strict=True)])
    return CodeTests([_json_call(name, i, o) for i, o in zip(inputs, outputs, strict=True)])


def _json_call(name: str, arguments: Json, expected: Json) -> FunctionCall:
    """Returns a call from APPS or TACO, which put some of the values that are expected into lists of their own."""
    arguments = arguments if isinstance(arguments, list) else [parse_json_text(arguments)]
    return FunctionCall(name, tuple(arguments), expected, as_json=True, is_wrapped=True)


def _from_live_code_bench(value: Mapping[str, Json]) -> CodeTests:
    metadata = parse_json_text(value.get("metadata")) or {}
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    cases = [case for column in _LIVE_CODE_BENCH for case in _cases(value.get(column))]
    if not isinstance(name, str) or not name:
        return CodeTests([InputOutput(case["input"], case["output"]) for case in cases])
    lines = [[json.loads(line) for line in case["input"].split("\n") if line.strip()] for case in cases]
    values = [json.loads(case["output"]) for case in cases]
    return CodeTests([FunctionCall(name, tuple(a), e, as_json=True) for a, e in zip(lines, values, strict=True)])


def _cases(column: Json) -> list[Json]:
    """Returns the cases of a column: JSON, or a text of JSON that was pickled, compressed and written in base 64."""
    value = parse_json_text(column)
    if isinstance(value, str) and value:
        decompressor = zlib.decompressobj()
        data = decompressor.decompress(base64.b64decode(value), _LARGEST_COLUMN)
        texts = [argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)]
        value = json.loads(texts[0])  # the pickle is read as a list of instructions; none is carried out
    return list(value or [])


def _from_list(value: Sequence[Json]) -> CodeTests | None:
    """Returns tests from a list of asserts, or of objects with a test each."""
    rows = [parse_json_text(row) for row in value]
    if rows and all(isinstance(row, str) for row in rows):
        return _from_statements(rows)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        return None
    tests = [_from_row(row) for row in rows]
    kinds = {type(test) for test in tests}
    if len(kinds) > 1:
        raise ValueError("some tests are of whole programs and some of functions")
    return CodeTests(tests)


def _from_row(row: Mapping[str, Json]) -> InputOutput | FunctionCall | Statement:
    weight = float(row.get("weight", 1.0))
    name = row.get("function", row.get("fn_name"))
    expected = row.get("expected", row.get("output"))
    if isinstance(name, str) and name:
        arguments = row.get("arguments", row.get("args", row.get("input", [])))
        if not isinstance(arguments, list):
            raise ValueError(f"the arguments of {name} are no list")
        if "expected" not in row and "output" not in row:
            raise ValueError(f"a test of {name} has the fields {', '.join(sorted(row))}: give `expected`")
        return FunctionCall(name, tuple(arguments), expected, row.get("keywords") or {}, as_json=True, weight=weight)
    if isinstance(row.get("assert"), str):
        return Statement(row["assert"], weight)
    if "input" not in row or expected is None:
        raise ValueError(f"a test has the fields {', '.join(sorted(row))}: give `input` and `output`")
    return InputOutput(_as_text(row["input"]), _as_text(expected), weight)


def _as_text(value: Json) -> str:
    """Returns what a program reads or writes; APPS has some of it as lists of lines."""
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _from_statements(sources: Sequence[str], setup: str = "") -> CodeTests:
    """Returns asserts: as calls where all can be, else as they are."""
    calls = [_plain_call(ast.parse(source).body) for source in sources]
    plain_calls = [call for call in calls if call is not None]
    if len(plain_calls) == len(calls):
        return CodeTests(plain_calls)
    return CodeTests([Statement(source) for source in sources], setup)


def _from_check(source: str, entry_point: str) -> CodeTests:
    """Returns the asserts of HumanEval's `check(candidate)` as calls where all can be, else the function itself."""
    tree = ast.parse(source)
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    needed_nodes = [node for node in tree.body if not isinstance(node, ast.Assign) and node not in checks]
    if len(checks) == 1 and not needed_nodes and len(checks[0].args.args) == 1:
        candidate = checks[0].args.args[0].arg
        calls = [_plain_call([node]) for node in checks[0].body if not _says_nothing(node)]
        plain_calls = [call for call in calls if call is not None and call.function == candidate]
        if calls and len(plain_calls) == len(calls):
            return CodeTests(
                [FunctionCall(entry_point, c.arguments, c.expected, c.keywords) for c in plain_calls], "", entry_point
            )
    return CodeTests([Statement(f"check({entry_point})")], source, entry_point)


def _module_names(source: str) -> tuple[set[str], set[str]]:
    """Returns the names that a module uses as its own, and those that it binds."""
    tables = [symtable.symtable(source, "tests.py", "exec")]
    used, bound = set(), set()
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_global = table.get_type() == "module" or symbol.is_global()
            if is_global and symbol.is_referenced():
                used.add(symbol.get_name())
            if is_global and (symbol.is_assigned() or symbol.is_imported()):
                bound.add(symbol.get_name())
    return used, bound


def _free_names(source: str) -> tuple[set[str], set[str]]:
    """Returns the names that a module uses and does not bind: those of others, and those of modules of Python."""
    used, bound = _module_names(source)
    nodes = list(ast.walk(ast.parse(source)))
    bases = {n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    free = used - bound - set(dir(builtins))
    modules = free & (bases - called) & sys.stdlib_module_names
    return free - modules, modules


def _with_helpers(tests: CodeTests, prompt: str) -> CodeTests:
    """Returns tests whose setup has what the prompt defines beside the entry point, where they use some of it."""
    tree = _parse_beginning(prompt) if tests.entry_point else None
    if tree is None:
        return tests
    needed, _ = _free_names("\n".join(tests.sources))
    tree.body = [node for node in tree.body if not _defines(node, tests.entry_point)]
    helpers = ast.unparse(tree)
    if not (needed - {tests.entry_point, *tests.program_names}) & _module_names(helpers)[1]:
        return tests
    return replace(tests, setup=f"{helpers}\n{tests.setup}")


def _parse_beginning(prompt: str) -> ast.Module | None:
    """Returns the tree of code whose last function may lack its body; None for what is no code."""
    for body in ("", "\n    pass\n", "\n        pass\n"):
        try:
            return ast.parse(prompt + body)
        except (SyntaxError, ValueError):
            continue
    return None


def _defines(node: ast.stmt, name: str) -> bool:
    functions = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return any(function.name == name for function in functions)


def _refuse_foreign_helpers(tests: CodeTests) -> None:
    """Raises `ValueError` where statements use names that are not theirs and may not be the program's.

    A program that provides what a test compares with, as `isclose` in `assert isclose(f(1), 2.5)`, would pass, and see
    what is expected. So a statement may take one function from a program, and classes to make arguments with.
    """
    sources = tests.sources
    nodes = list(ast.walk(ast.parse("\n".join(sources))))
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in nodes):
        return  # what it binds is not known
    listed = {tests.entry_point, *tests.program_names}
    foreign = _free_names("\n".join(sources))[0] - listed
    if tests.entry_point and foreign:
        raise ValueError(
            f"they use {', '.join(sorted(foreign))}, which neither they nor the prompt define; list in "
            "`program_names` what a program defines beside the entry point"
        )
    setup_names = _module_names(tests.setup)[0]
    for source in sources[1:]:
        names = foreign & (setup_names | _module_names(source)[0])
        functions = {n for n in names if not n[:1].isupper() or n in _attribute_bases(f"{tests.setup}\n{source}")}
        if len(functions) > 1:
            raise ValueError(
                f"{source!r:.80} takes {', '.join(sorted(functions))} from the program, which could then decide how it "
                "is compared; bind all but one in the tests' setup, or list in `program_names` what a program defines"
            )


def _attribute_bases(source: str) -> set[str]:
    """Returns the names in `name.attribute` and `name(...).attribute`."""
    values = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    bases = [value.func if isinstance(value, ast.Call) else value for value in values]
    return {base.id for base in bases if isinstance(base, ast.Name)}


def _says_nothing(node: ast.stmt) -> bool:
    """Returns whether a statement is a text, `pass` or `assert True`."""
    value = node.value if isinstance(node, ast.Expr) else node.test if isinstance(node, ast.Assert) else None
    return isinstance(node, ast.Pass) or (isinstance(value, ast.Constant) and bool(value.value))


def _plain_call(body: list[ast.stmt]) -> FunctionCall | None:
    """Returns the call of `assert f(literals) == literal`; None for any other code."""
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        return None
    test = body[0].test
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        return None
    call = test.left
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        return None
    try:
        arguments = tuple(ast.literal_eval(argument) for argument in call.args)
        keywords = {k: ast.literal_eval(v) for k, v in _keywords(call)}
        expected = ast.literal_eval(test.comparators[0])
    except (ValueError, TypeError, MemoryError, RecursionError):
        return None
    return FunctionCall(call.func.id, arguments, expected, keywords)


def _keywords(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("**")
        yield keyword.arg, keyword.value
