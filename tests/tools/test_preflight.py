"""What is said before anything is installed about the driver and the build of torch."""

from types import ModuleType

import pytest


@pytest.mark.parametrize(
    ("driver", "torch", "said"),
    [
        ((12, 4), "default", "TORCH=cu126 for its GPUs, or TORCH=cpu"),
        ((12, 8), "cu130", "TORCH=cu126"),
        ((11, 8), "default", "Say TORCH=cpu"),
        ((11, 8), "cu126", "CUDA 11.8, which is too old for this build of torch (CUDA 12.6)"),
        ((13, 0), "default", None),
        ((13, 2), "cu126", None),  # a driver runs what is older
        ((12, 0), "cu126", None),  # and any release of its own major one
        ((12, 4), "cpu", None),
        (None, "default", None),  # no driver: no GPU that could be used
    ],
)
def test_a_driver_that_is_too_old_for_the_build_is_named_with_the_build_that_suits(
    tool: ModuleType, driver: tuple[int, int] | None, torch: str, said: str | None
) -> None:
    lines = " ".join(tool.driver_lines(driver, tool.wheel_cuda(torch)))
    assert (said in lines) if said else not lines


def test_a_release_of_cuda_is_read_from_the_name_of_a_build(tool: ModuleType) -> None:
    assert [tool.wheel_cuda(name) for name in ("cu128", "cu92", "cpu", "cu", "rocm6.4")] == [
        *((12, 8), (9, 2)),
        *(None, None, None),
    ]
    assert tool.OLDER.keys() == set(range(12, tool.DEFAULT_CUDA[0]))
