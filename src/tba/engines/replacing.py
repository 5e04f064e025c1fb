"""Whether weights are those of a model: told before any of them is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn


def matched(
    model: nn.Module, weights: Mapping[str, Tensor], replaced: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """What `weights` (by Hugging Face name) are to be copied into, by the names that they have there.

    A tied weight may be given under any of its names; `replaced` says which parameters have to be given. Raises
    `KeyError` for an unknown or a missing name and `ValueError` for a wrong shape.
    """
    own = model.state_dict(keep_vars=True)
    for name, value in weights.items():
        if name not in own:
            raise KeyError(f"the model has no weight named {name}")
        if own[name].shape != value.shape:
            raise ValueError(f"weight {name} has shape {tuple(value.shape)}, the model's {tuple(own[name].shape)}")
    given = {id(own[name]) for name in weights}
    missing = [name for name, p in model.named_parameters() if replaced(name) and id(p) not in given]
    if missing:
        raise KeyError(f"{len(missing)} of the model's weights are missing, the first is {missing[0]}")
    return {name: own[name] for name in weights}
