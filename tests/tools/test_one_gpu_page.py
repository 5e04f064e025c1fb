"""`docs/one_gpu.md` says what the formulas give."""

from types import ModuleType


def test_the_committed_page_is_the_one_the_code_gives(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run `python tools/one_gpu_page.py`"


def test_what_fits_a_smaller_gpu_fits_a_larger_one(tool: ModuleType) -> None:
    rows = [line.split("|")[1:-1] for line in tool.page().splitlines() if " B | " in line]
    assert len(rows) == len(tool.GPUS) * len(tool.MODELS) * len(tool.KINDS)
    fitting = {(row[1], row[2], int(row[0].split()[0])) for row in rows if "no" not in row[3] and "no" not in row[6]}
    for model, trained, gpu in fitting:
        assert all((model, trained, larger) in fitting for larger in tool.GPUS if larger > gpu)
    assert (" 0.5 B ", " all weights ", 24) in fitting
    assert (" 7 B ", " all weights ", 80) not in fitting  # 16 B for each of 7.6 B parameters
    assert (" 7 B ", " LoRA, rank 16 ", 24) not in fitting  # 2 B each, in half of a GPU
    assert (" 7 B ", " the same, 4-bit ", 24) in fitting
