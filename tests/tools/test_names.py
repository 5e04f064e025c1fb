"""What `tools/names.py` counts, and when it lets a change pass."""

from types import ModuleType

import pytest


@pytest.mark.parametrize(
    ("source", "counted"),
    [
        ("def f(rows):\n    found = rows\n    rest = found", {"f": {"found", "rest"}}),  # once, whatever it has
        ("def f(count, *, kept=1): ...", {"f": {"kept"}}),
        ("def f(given, /, *others, **rest): ...", {"f": {"given", "others", "rest"}}),
        ("async def f(told): ...", {"f": {"told"}}),
        ("def f(rows):\n    return [one.reward for one in rows]", {"f": {"one"}}),
        ("def f(rows):\n    return sorted(rows, key=lambda made: made.step)", {"f": {"made"}}),
        ("def f():\n    while (left := 1): ...", {"f": {"left"}}),
        ("def f(first_row): return first_row.first", {}),  # read, and as a part of a longer name
        ("found = 1", {}),  # of no function
        ("def outer():\n    def inner():\n        said = 1", {"inner": {"said"}}),
        ("class C:\n    own: int = 0\n    kept = 1", {"C": {"own", "kept"}}),
        ("class C:\n    def __init__(self):\n        self.held, self.rows = 0, 1", {"C": {"held"}}),
        (
            "class C:\n    @classmethod\n    def f(cls, told):\n        cls.known = told",
            {"C": {"known"}, "f": {"told"}},
        ),
        ("class C:\n    def f(self, run):\n        run.made = self.made", {}),  # another's, and only read
    ],
)
def test_a_function_or_class_counts_once_if_a_name_that_it_binds_says_too_little(
    tool: ModuleType, source: str, counted: dict[str, set[str]]
) -> None:
    assert {name: words for _, name, words in tool.units(source)} == counted


def test_the_total_may_neither_rise_nor_stay_unnoticed_when_it_falls(tool: ModuleType) -> None:
    committed = {"a.py": 2, "b.py": 1}
    assert tool.verdict(committed, committed) == ""
    assert tool.verdict({"a.py": 1, "b.py": 1, "c.py": 1}, committed) == ""
    rise = tool.verdict({"a.py": 1, "b.py": 2, "c.py": 1}, committed)
    assert "b.py (1 to 2), c.py (0 to 1)" in rise
    assert "a.py" not in rise
    assert "--write" in tool.verdict({"a.py": 2}, committed)
