"""docs/hardware.md says what the formulas give."""

from types import ModuleType


def rows_of(page: str, mark: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if mark in line]


def test_the_committed_page_is_the_one_the_code_gives(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run `python tools/hardware_page.py`"


def test_what_fits_a_smaller_gpu_fits_a_larger_one(tool: ModuleType) -> None:
    rows = rows_of(tool.PAGE.read_text(encoding="utf-8"), " B | ")
    assert len(rows) == len(tool.MODELS) * len(tool.KINDS)
    fits = {(model, trained): [cell != "no" for cell in cells] for model, trained, *cells in rows}
    assert all(cells == sorted(cells) for cells in fits.values())
    smallest = {which: tool.GPUS[cells.index(True)] for which, cells in fits.items() if any(cells)}
    assert smallest["0.5 B", "all weights"] == 24
    assert smallest["3 B", "all weights"] == 80  # which half of a GPU did not hold
    assert ("7 B", "all weights") not in smallest  # 16 B for each of 7.6 B parameters
    assert smallest["7 B", "LoRA, rank 16"] > 24  # 2 B each, twice
    assert smallest["7 B", "LoRA, 4-bit"] == 24
    assert smallest["3 B", "moments on host"] == 80
    assert smallest["7 B", "moments on host"] == 141


def test_more_gpus_never_run_less(tool: ModuleType) -> None:
    page = tool.PAGE.read_text(encoding="utf-8").partition("## What fits on one to eight GPUs")[2]
    section = page.partition("## What one card does")[0]
    rows = rows_of(section, " GB | ")
    runs = {(recipe, gpus): [not cell.startswith("no") for cell in cells] for recipe, gpus, *cells in rows}
    assert {recipe for recipe, _ in runs} == set(tool.RECIPES)
    assert all(cells == sorted(cells) for cells in runs.values())
    assert runs["gsm8k", "24 GB"] == [False, False, True, True]
    assert runs["math", "80, 141 GB"] == [False, False, True, True]
