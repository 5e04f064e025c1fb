"""Linear heads on hidden states: a value before each token, log Z of a prompt.

Invariant: they begin at zero, are float32 whatever the model is, and belong to the policy that trains them: saved
beside its model, never published.

Shape legend: N any number of hidden states, W their width.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tba.protocols import HEADS


def linear_heads(names: Iterable[str], width: int, device: torch.device) -> torch.nn.ModuleDict:
    """A head for each name, weight and bias zero. Raises `ValueError` for a name that is none of `HEADS`."""
    return torch.nn.ModuleDict({name: zeroed(torch.nn.Linear(width, 1, device=device)) for name in known(names)})


def read(head: torch.nn.Module, hidden_NW: Tensor) -> Tensor:
    """[N] float32: what a head says of hidden states."""
    said_N: Tensor = head(hidden_NW.float())[:, 0]
    return said_N


def known(names: Iterable[str]) -> list[str]:
    """The names in order. Raises `ValueError` for one that is none of `HEADS`."""
    wanted = sorted(names)
    if not HEADS.issuperset(wanted):
        raise ValueError(f"a policy's heads are {sorted(HEADS)}, but got {wanted}")
    return wanted


def zeroed(module: torch.nn.Module) -> torch.nn.Module:
    """The module, its parameters set to zero."""
    for parameter in module.parameters():
        torch.nn.init.zeros_(parameter)
    return module
