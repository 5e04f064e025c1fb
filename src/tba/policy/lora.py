"""LoRA (Hu et al. 2021, arXiv 2106.09685) by peft: a frozen base, and small adapters that are trained.

Invariant: adapters begin at zero (B = 0), so a model with new ones equals its base. The base never changes: what is
published and loaded is adapters alone, and a reference is the base with its adapters off, until another one is loaded.
Merged, W + (alpha / rank) B A is a plain model that any program can read.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from tba.errors import UserError
from tba.fields import as_declared
from tba.streaming import TensorStream, shapes_of, write_tensors

log = logging.getLogger(__name__)

FOLDER = "adapter"  # in a checkpoint, beside the merged model: as peft reads it, and where training resumes from
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"  # peft's, of the one adapter of each layer
_PREFIX = "base_model.model."  # of names in peft's files


@dataclass(frozen=True)
@as_declared
class LoraSettings:
    """Sets which layers have adapters, and how large they are. Needs the extra `lora`. Raises `UserError` when a field
    makes no sense.
    """

    rank: int = 0  # rank of each matrix's update; 0: no adapters, all weights are trained
    alpha: float = 32.0  # the change is B A, times alpha over the rank
    targets: tuple[str, ...] = ()  # names of the adapted layers, such as q_proj; none: all linear layers but the head

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields without effect while there are no adapters."""
        return {"alpha": "rank", "targets": "rank"} if not self.rank else {}

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise UserError(f"the adapters' rank is {self.rank}: give a number from 1, or 0 to train all weights")
        if not self.alpha > 0:
            raise UserError(f"the adapters' alpha is {self.alpha}, but it has to be positive; twice the rank is usual")


def add_adapters(model: PreTrainedModel, settings: LoraSettings, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Add adapters to the model's layers, in place; nothing else of it is trained from here on.

    They have the precision of their layers, or `dtype` where one is given: what is trained has to be float32.
    Raises `UserError` without peft, and for targets that the model does not have.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise UserError("adapters (model.lora) need the library peft: pip install -e '.[lora]'") from error
    targets: Any = list(settings.targets) or "all-linear"
    if any(parameter.dim() == 3 for parameter in model.parameters()):
        targets = _targets_without_experts(model, settings.targets)
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, lora_dropout=0.0, target_modules=targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # A is the same in every process
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            raise UserError(f"the model has no layers that --model.lora.targets names ({error})") from error
        _refuse_unfit(model, settings.targets)
        if model.device.type == "meta":  # where peft has moved the adapters, to which no file gives values
            _make_adapters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name) and dtype is not None:
            parameter.data = parameter.data.to(dtype)
    _fuse_adapters(model)
    return model.eval()


def _targets_without_experts(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Returns the targets for a model with experts, whose matrices are one parameter and no layers: none of these.

    Raises `UserError` where the settings name experts.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def is_experts(name: str) -> bool:  # peft takes some names of layers for those of experts, too
        config = LoraConfig(r=1, target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model, conversions=None)
        except ValueError:  # it wants another name of experts with it
            return True
        return bool(getattr(config, "target_parameters", None))

    head = model.get_output_embeddings()
    layers = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
    if experts := [name for name in targets if is_experts(name)]:
        other_names = sorted({name.rpartition(".")[2] for name in layers if not is_experts(name)})
        raise UserError(
            f"--model.lora.targets names {', '.join(experts)}, of which this model makes experts, and experts get no "
            f"adapters: give some of {', '.join(other_names)}, or leave it out"
        )
    if targets:
        return list(targets)
    log.info("the model's experts stay as they are: they are no linear layers, which alone get adapters")
    return [name for name in layers if not is_experts(name)]


def _refuse_unfit(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Raises `UserError` for a target that no layer has, and for adapters of head or embeddings: the policy computes
    with the head's own matrix, which may be that of the embeddings.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted_names = [f".{name}" for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    if unknown_targets := [t for t in targets if not any(name.endswith(f".{t}") for name in adapted_names)]:
        raise UserError(
            f"the model has no layers that --model.lora.targets names ({', '.join(unknown_targets)}): leave them out"
        )
    outer_layers = (model.get_output_embeddings(), model.get_input_embeddings())
    if any(isinstance(layer, BaseTunerLayer) for layer in outer_layers):
        raise UserError("--model.lora.targets names the head or the embeddings, which get no adapters: leave them out")


def _fuse_adapters(model: PreTrainedModel) -> None:
    """Give plain linear layers with an adapter a forward of few kernels, in the precision of what goes in.

    peft's makes three tensors as large as the layer's output (B A x, its multiple, the sum), and all in the adapters'
    float32, whatever the layer computes in (`lab/benchmarks/adapters.py`).
    """
    from peft.tuners.lora import Linear, LoraLayer

    for module in model.modules():
        is_plain = type(module) is Linear and type(module.base_layer) is torch.nn.Linear
        if is_plain or (isinstance(module, LoraLayer) and _four_bit(module.base_layer.weight) is not None):
            module.forward = MethodType(_adapted_linear, module)  # as one function it is compiled once


def _adapted_linear(layer: Any, x: Tensor) -> Tensor:
    """Computes a linear layer and its adapter: [..., in] -> [..., out]."""
    base, four_bit = layer.base_layer, _four_bit(layer.base_layer.weight)
    if layer.disable_adapters:
        out: Tensor = base(x) if four_bit is None else torch.nn.functional.linear(x, dequantize(base.weight), base.bias)
        return out
    a, b = (matrices[_NAME].weight for matrices in (layer.lora_A, layer.lora_B))
    out = _AdaptedLinear.apply(x.flatten(0, -2), base.weight, base.bias, a, b, layer.scaling[_NAME], four_bit)
    return out.view(*x.shape[:-1], -1)


class _AdaptedLinear(torch.autograd.Function):
    """y = W x + bias + scale B A x, and its gradient; products in the precision of x, sums of them in float32.

    Shape legend: N rows, I width in, O width out, R rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight: Tensor,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scale: float,
        four_bit: Any,
    ) -> Tensor:
        """Returns [N, O]. `weight` is [O, I], or in 4 bits, and then dequantized again for the backward."""
        a, b = a_RI.to(x_NI.dtype), b_OR.to(x_NI.dtype)
        inner_NR = x_NI @ a.T
        ctx.save_for_backward(x_NI, weight, a, b, inner_NR)
        ctx.scale, ctx.dtype, ctx.four_bit = scale, a_RI.dtype, four_bit
        return torch.nn.functional.linear(x_NI, dequantize(weight, four_bit), bias_O).addmm_(inner_NR, b.T, alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight, a, b, inner_NR = ctx.saved_tensors
        grad_inner_NR = (grad_NO @ b).mul_(ctx.scale)
        grad_b = (grad_NO.T @ inner_NR).to(ctx.dtype).mul_(ctx.scale)
        grad_a = (grad_inner_NR.T @ x_NI).to(ctx.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_NO @ dequantize(weight, ctx.four_bit)).addmm_(grad_inner_NR, a)
        return grad_x, None, None, grad_a, grad_b, None, None


def _four_bit(weight: Tensor) -> Any:
    """Returns what a matrix in 4 bits (of bitsandbytes) is dequantized with; None for any other matrix."""
    return getattr(weight, "quant_state", None)


def dequantize(weight: Tensor, four_bit: Any = None) -> Tensor:
    """Returns a matrix, which may be held in 4 bits, in the type that is computed with."""
    four_bit = _four_bit(weight) if four_bit is None else four_bit
    if four_bit is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    matrix: Tensor = dequantize_4bit(weight, four_bit)
    return matrix


def _make_adapters(model: PreTrainedModel) -> None:
    """Move adapters from the meta device to the CPU, and give them the values of new ones."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            for matrices in (module.lora_A, module.lora_B):
                matrices.to_empty(device="cpu")
            module.reset_lora_parameters(_NAME, init_lora_weights=True)


def is_adapter(name: str) -> bool:
    """Returns whether a weight of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def has_adapters(model: torch.nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())


def switch_adapters(model: torch.nn.Module, enabled: bool) -> None:
    """Switch adapters on or off: with them the model is the policy, without them the base."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(enabled)


def copy_on_same_base(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the same model with adapters of its own, and a base that shares its memory."""
    base_weights = {id(p): p for name, p in model.named_parameters() if not is_adapter(name)}
    return copy.deepcopy(model, base_weights)


def save_adapters(folder: Path, model: PreTrainedModel, adapters: Mapping[str, Tensor]) -> None:
    """Write adapters and their configuration as peft reads them; their base is where the model was loaded from."""
    config = model.peft_config[_NAME].to_dict()
    base = model.config.name_or_path
    facts = {
        **{name: sorted(value) if isinstance(value, set | list) else value for name, value in config.items()},
        "base_model_name_or_path": str(Path(base).resolve()) if Path(base).exists() else base,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
    }
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
    tensors = {_PREFIX + name.replace(f".{_NAME}.", "."): tensor for name, tensor in adapters.items()}
    write_tensors(folder / WEIGHTS, tensors)


def read_adapters(checkpoint: Path) -> dict[str, Tensor]:
    """Returns the adapters that a checkpoint has beside the merged model, by the names of a model with adapters.

    Raises what safetensors does where there are none.
    """
    tensors = safetensors.torch.load_file(checkpoint / FOLDER / WEIGHTS)
    suffix = f".{_NAME}.weight"
    return {name.removeprefix(_PREFIX).removesuffix(".weight") + suffix: tensor for name, tensor in tensors.items()}


def merge_with_adapters(model: PreTrainedModel, adapters: Mapping[str, Tensor]) -> TensorStream:
    """Gives a model these adapters in place of its own, and yields what `merge_adapters` does."""
    weights = untied_weights(model)
    with torch.no_grad():
        for name, tensor in adapters.items():
            weights[name].copy_(tensor)
    return merge_adapters(model, weights, {})


def untied_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns all weights by name, detached; of tied ones only one. Those in 4 bits are as they are held."""
    tied_names = model.all_tied_weights_keys
    in_4_bits = {name: p for name, p in model.named_parameters() if _four_bit(p) is not None}
    tensors = {name: in_4_bits.get(name, t) for name, t in model.state_dict().items() if name not in tied_names}
    layer_weights = {name: name.partition(".weight.")[0] + ".weight" for name in tensors}
    return {name: t for name, t in tensors.items() if layer_weights[name] not in in_4_bits or name in in_4_bits}


def merge_adapters(model: PreTrainedModel, weights: Mapping[str, Tensor], adapters: dict[str, Tensor]) -> TensorStream:
    """Yields `model` without adapters: plain weights by the names of its base, one after the other.

    `weights` are all of its own, the base's before its adapter's; those of adapters are put into `adapters`. What is
    held in 4 bits is made whole, a matrix at a time.
    """
    shapes = {plain_name(name): _dequantized_like(t) for name, t in shapes_of(weights).items() if not is_adapter(name)}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        base_weights: dict[str, Tensor] = {}  # of the layer that is being read: its base, until its adapter has come
        for name, tensor in weights.items():
            layer = name.partition(".base_layer.")[0].partition(".lora_")[0]
            if name.endswith(".base_layer.weight"):
                base_weights[layer] = tensor
                continue
            if not is_adapter(name):
                yield plain_name(name), dequantize(tensor)
                continue
            adapters[name] = tensor
            if ".lora_B." in name:
                a, b = adapters[f"{layer}.lora_A.{_NAME}.weight"], tensor
                base = dequantize(base_weights.pop(layer))
                yield f"{layer}.weight", _add_change(model.get_submodule(layer), base, a, b)

    return TensorStream(shapes, tensors)


def _dequantized_like(tensor: Tensor) -> Tensor:
    """Returns a tensor of the type and shape that `dequantize` gives."""
    four_bit = _four_bit(tensor)
    return tensor if four_bit is None else torch.empty(four_bit.shape, dtype=four_bit.dtype, device="meta")


def plain_name(name: str) -> str:
    """Returns the name that a weight has in the model without adapters."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def _add_change(layer: Any, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Returns base + (alpha / rank) B A, transposed where the layer's weight is."""
    change = b.float() @ a.float() * layer.scaling[_NAME]
    return base + (change.T if layer.fan_in_fan_out else change).to(base)
