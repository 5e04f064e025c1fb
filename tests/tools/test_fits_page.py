"""`docs/fits.md` says what the formulas give."""

from types import ModuleType


def rows_of(page: str, mark: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if mark in line]


def test_the_committed_page_is_the_one_the_code_gives(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run `python tools/fits_page.py`"


def test_what_fits_a_smaller_gpu_fits_a_larger_one(tool: ModuleType) -> None:
    rows = rows_of(tool.PAGE.read_text(encoding="utf-8"), " B | ")
    assert len(rows) == len(tool.GPUS) * len(tool.MODELS) * len(tool.KINDS)
    fitting = {(row[1], row[2], int(row[0].split()[0])) for row in rows if row[3] != "no"}
    for model, trained, gpu in fitting:
        assert all((model, trained, larger) in fitting for larger in tool.GPUS if larger > gpu)
    assert ("0.5 B", "all weights", 24) in fitting
    assert ("3 B", "all weights", 80) in fitting  # which half of a GPU did not hold
    assert ("7 B", "all weights", 80) not in fitting  # 16 B for each of 7.6 B parameters
    assert ("7 B", "LoRA, rank 16", 24) not in fitting  # 2 B each, twice
    assert ("7 B", "LoRA, 4-bit", 24) in fitting
    assert ("3 B", "the same, moments on the host", 80) in fitting
    assert ("7 B", "the same, moments on the host", 141) in fitting


def test_what_ran_before_runs_now_and_no_gpu_is_idle(tool: ModuleType) -> None:
    rows = rows_of(tool.PAGE.read_text(encoding="utf-8"), " x ")
    assert len(rows) == len(tool.RECIPES) * len(tool.GPUS) * len(tool.COUNTS)
    for recipe, gpus, _, fitted, _, _, fits, idle, *_ in rows:
        assert fitted == "no" or fits == "yes", (recipe, gpus)
        assert idle == "0"
    assert sum(row[3] == "yes" for row in rows) < sum(row[6] == "yes" for row in rows)
