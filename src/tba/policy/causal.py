"""A Hugging Face causal language model as the policy: load, log-probabilities, weights, save.

Invariant: `log_policy_BT` is log-softmax(logits / temperature) in float32 of the model *without dropout*, at the
completion's positions only. So the log-ratio of the policy to its own copy is 0.

Shape legend: B rows, T completion positions, M trained tokens, N flat tokens, P prompt positions, G groups, W width.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from tba.assistant_turns import add_end_tokens
from tba.batch import Batch, pass_tokens, to_device
from tba.errors import UserError
from tba.policy.head import (
    Head,
    ProbabilityBuffer,
    apply_head,
    bucket_log_probabilities,
    linear_heads,
    split_buckets,
    token_log_probabilities,
    top_of,
    top_tokens,
    write_entropy,
)
from tba.policy.loading import WeightFiles
from tba.policy.lora import FOLDER as ADAPTER
from tba.policy.lora import has_adapters, is_adapter, merge_adapters, save_adapters, untied_weights
from tba.policy.low_precision import LowPrecision
from tba.policy.norms import fuse_norms
from tba.policy.packed import (
    ATTENTION,
    exclude_packed_attention_from_compile,
    pack,
    packed_hidden,
    use_packed_attention,
)
from tba.protocols import PolicyOutput
from tba.sharding import Sharding, is_sharded, local_part, row_range
from tba.streaming import shapes_of, write_tensors

if TYPE_CHECKING:
    from tba.policy.fsdp import ShardedModel

log = logging.getLogger(__name__)

# Logits of the head at a time. On a CPU 16 MiB of float32, which stay in its cache. Elsewhere the head's weights are
# read, and its gradient read and written, once per chunk: 512 MiB make this little.
_LOGITS_ON_CPU, _LOGITS_ELSEWHERE = 2**22, 2**27
KEPT_BYTES = 3 * 2**27  # of probabilities that the head keeps for its backward pass, at least


@dataclass(frozen=True)
class _Forward:
    """The hidden states of a batch's trained tokens from one forward, and of its prompts if a head reads them."""

    hidden_MW: Tensor  # before each token
    target_M: Tensor  # int64, the tokens
    place_M: Tensor  # int64 into B * T
    prompt_GW: Tensor | None  # mean over the prompt's tokens
    logits_MV: Tensor | None = None  # of a model whose head is more than a linear layer


class CausalPolicy:
    """The model being trained. It owns `model`: its attention and mode are set here, and dropout is never used.

    With `share_prompt` each prompt is run once per group (`policy.packed`); a model that cannot (its own masks,
    recurrence, ...) is detected by comparing both forwards once, and takes the plain padded forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float = 1.0,
        share_prompt: bool = True,
        vocab_chunk: int | None = None,  # tokens whose logits are computed at once; None: as many as suit the device
        kept_bytes: int = KEPT_BYTES,  # vocabulary-wide rows kept for the backward pass; others are computed again (a
        # GPU keeps what else is free)
        gradient_checkpointing: bool | Callable[[int], bool] = False,  # or in which passes, by their tokens
        compiled: bool = False,
        heads: Iterable[str] = (),  # value, log_z: linear, on the hidden states before tokens and of prompts
        compute: torch.dtype | None = None,  # in which trained weights are computed with; None: as they are
    ) -> None:
        if temperature <= 0:
            raise UserError(f"the policy's temperature is {temperature}, but it must be above 0; 1.0 is the usual one")
        config, is_unfilled = model.config.get_text_config(), model.device.type == "meta"
        if getattr(config, "attn_logit_softcapping", None) is not None:  # transformers' sdpa leaves it out
            model.set_attn_implementation("eager")
        elif model.config._attn_implementation == ATTENTION:  # it belonged to another policy
            model.set_attn_implementation("sdpa")
        self.model = model.eval()
        fuse_norms(model)
        self._low_precision = None if compute is None else LowPrecision(model, compute)
        self.temperature = temperature
        self._buffer = ProbabilityBuffer(kept_bytes)
        self._vocab_chunk = vocab_chunk
        self._checkpointing = gradient_checkpointing
        if gradient_checkpointing is not False:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            _disable_dropout(model)
        self._body = model.get_decoder()
        width = model.get_output_embeddings().weight.shape[-1]
        self.heads = linear_heads(heads, width, torch.device("cpu") if is_unfilled else model.device)
        self.share_prompt = share_prompt
        self.padding_reason = ""  # why each row takes a forward of its own, padded, although prompts were to be shared
        if not is_unfilled:
            self._probe()
        self._compiled = compiled
        if compiled and not is_unfilled:  # after the probe, whose few tokens need no code of their own
            _compile_layers(model)
        self._sharded_model: ShardedModel | None = None
        self.has_adapters = has_adapters(model)

    @torch.no_grad()
    def _probe(self) -> None:
        """Find out by running the model on a few tokens which forward it can take."""
        head, fault = Head.of(self.model), None
        self._has_linear_head = head is not None
        self._softcap = None if head is None else head.softcap  # its weight stays the model's: shards may replace that
        if self.share_prompt:
            fault = use_packed_attention(self.model) if head is not None else "its head is more than a linear layer"
        if fault is not None:
            self.padding_reason = f"prompts are not shared within groups by {type(self.model).__name__}: {fault}"
            log.warning("%s", self.padding_reason)
            self.share_prompt = False

    def shard(self, sharding: Sharding, files: WeightFiles | None = None) -> None:
        """Keep only this rank's rows of each of the model's parameters, for good (the few of the heads stay whole).

        Every rank calls this, with the same model, and from then on each `evaluate` together with all others. Of a
        model without memory yet (`load_unfilled`) the rows are read from its `files`.
        """
        from tba.policy.fsdp import ShardedModel  # which loads a good part of torch.distributed

        self._sharded_model = ShardedModel(self.model, sharding)
        self.heads.to(sharding.mesh.device_type)
        if files is not None:
            self._sharded_model.fill(files, sharding.mesh.device_type)
            sharding.wait_for_ranks()
            self._sharded_model.run(self._probe)
            if self._compiled:
                _compile_layers(self.model)
            self._sharded_model.reshard()  # or `parameters` would be those that were gathered for it

    def evaluate(self, batch: Batch) -> PolicyOutput:
        """Returns log_policy_BT (float32, 0 where the mask is False), log_top_BTC where the batch names top tokens, and
        heads, with gradients unless they are switched off.
        """
        return PolicyOutput(
            *(self._evaluate(batch) if self._sharded_model is None else self._sharded_model.run(self._evaluate, batch))
        )

    def top_tokens(self, batch: Batch, count: int, below: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns, without a gradient, log_policy_BT as `evaluate` does; the `count` most probable tokens at each
        place, int64 [B, T, K], of those with numbers `below` a bound; and their log-probabilities with that of all
        others, float32 [B, T, K + 1].
        """
        with torch.no_grad():
            forward = self._forward(batch)
            if forward.logits_MV is None:
                head, chunk = self._head(forward.hidden_MW.device)
                top = top_tokens(forward.hidden_MW, head, forward.target_M, count, self.temperature, chunk, below)
            else:
                top = top_of(forward.logits_MV / self.temperature, forward.target_M, count, below)
        top_MK, log_MJ = top
        spread = partial(self._spread, place_M=forward.place_M, batch=batch)
        return spread(log_MJ[:, 0]), spread(top_MK), spread(log_MJ[:, 1:])

    def _evaluate(
        self, batch: Batch
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Callable[[], Tensor] | None, Tensor | None]:
        forward = self._forward(batch)
        place_M, value_BT, log_z_G, log_top_BTC, entropy_B = forward.place_M, None, None, None, None
        entropy_M = _entropy_buffer(forward.target_M)
        log_M, log_top_MC = self._log_probabilities(forward, batch.top_id_BTK, entropy_M)
        if log_top_MC is not None:
            log_top_BTC = self._spread(log_top_MC, place_M, batch)
        if "value" in self.heads:
            value_BT = self._spread(apply_head(self.heads["value"], forward.hidden_MW), place_M, batch)
        if forward.prompt_GW is not None:
            log_z_G = apply_head(self.heads["log_z"], forward.prompt_GW)
        if entropy_M is not None:
            entropy_B = partial(self._sum_rows, entropy_M, place_M, batch)
        return self._spread(log_M, place_M, batch), value_BT, log_z_G, entropy_B, log_top_BTC

    def _forward(self, batch: Batch) -> _Forward:
        if self._low_precision is not None:
            self._low_precision.refresh()
        with _layers_checkpointed(self.model, self._is_checkpointed(batch)):
            return self._forward_packed(batch) if self.share_prompt else self._forward_plain(batch)

    def _is_checkpointed(self, batch: Batch) -> bool:
        if isinstance(self._checkpointing, bool):
            return self._checkpointing
        if not torch.is_grad_enabled():
            return False
        return self._checkpointing(pass_tokens(batch, self.share_prompt))

    @staticmethod
    def _spread(x_M: Tensor, place_M: Tensor, batch: Batch) -> Tensor:
        """Returns [B, T] (and what else x has): each token's value where the token is, 0 elsewhere."""
        flat_BT = x_M.new_zeros(batch.completion_BT.numel(), *x_M.shape[1:])
        return flat_BT.index_copy(0, place_M, x_M).view(*batch.completion_BT.shape, *x_M.shape[1:])

    @classmethod
    def _sum_rows(cls, x_M: Tensor, place_M: Tensor, batch: Batch) -> Tensor:
        """Returns [B]: the sum over each row's tokens."""
        return cls._spread(x_M, place_M, batch).sum(1)

    def _forward_packed(self, batch: Batch) -> _Forward:
        """Runs the model with each prompt once."""
        packed = pack(batch, self._body.device)
        hidden_NW = packed_hidden(self._body, packed)
        hidden_MW = hidden_NW.index_select(0, packed.predictor_M)
        prompt_GW = None
        if "log_z" in self.heads:
            lengths = packed.layout.prompts[: batch.groups]
            prompt_GW = torch.stack([x.mean(0) for x in hidden_NW[: sum(lengths)].float().split(lengths)])
        return _Forward(hidden_MW, packed.target_M, packed.place_M, prompt_GW)

    def _forward_plain(self, batch: Batch) -> _Forward:
        """Runs the model on prompt + first segment of each row, padded: padding comes last, so causality hides it. Each
        later segment is run by itself, so that a row of several takes no more memory than one segment of their length.
        """
        host, device = batch.to("cpu"), self._body.device  # where these are known, nothing has to be waited for
        prompt_GW, states, logits, targets, places = None, [], [], [], []
        for input_RX, indices in _plain_passes(host):
            input_RX = to_device(input_RX, device)
            row_M, predictor_M, target_M, place_M = to_device(indices, device)
            if self._has_linear_head:
                hidden_RXW = self._body(input_ids=input_RX, use_cache=False).last_hidden_state
            else:
                output = self.model(input_ids=input_RX, use_cache=False, output_hidden_states=len(self.heads) > 0)
                logits.append(output.logits[row_M, predictor_M].float())
                hidden_RXW = output.hidden_states[-1] if self.heads else logits[-1].new_zeros(*input_RX.shape, 0)
            states.append(hidden_RXW[row_M, predictor_M])
            targets.append(target_M)
            places.append(place_M)
            if prompt_GW is None and "log_z" in self.heads:  # the first pass has the prompts
                prompt_GW = _mean_prompt_state(hidden_RXW, batch.to(device))
        logits_MV = None if self._has_linear_head else _concatenate(logits)
        return _Forward(_concatenate(states), _concatenate(targets), _concatenate(places), prompt_GW, logits_MV)

    def _log_probabilities(
        self, forward: _Forward, top_id_BTK: Tensor | None, entropy_M: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns those of the trained tokens [M], and where top tokens are named theirs and that of all others
        [M, K + 1]. Writes the entropies of what tokens were drawn from, at the latest when the gradient is taken.
        """
        hidden_MW, target_M = forward.hidden_MW, forward.target_M
        bucket_MJ = target_M[:, None]
        if top_id_BTK is not None:
            top_MK = to_device(top_id_BTK, target_M.device).flatten(0, 1)[forward.place_M].to(torch.int64)
            bucket_MJ = torch.cat([bucket_MJ, top_MK], 1)
        if forward.logits_MV is None:
            head, chunk = self._head(hidden_MW.device)
            if top_id_BTK is None:
                row = hidden_MW, head, target_M, self.temperature, chunk, self._buffer, entropy_M
                return token_log_probabilities(*row), None
            row = hidden_MW, head, bucket_MJ, self.temperature, chunk, self._buffer, entropy_M
            log_MJ = bucket_log_probabilities(*row)
        else:
            log_MV = torch.log_softmax(forward.logits_MV / self.temperature, dim=-1)
            if entropy_M is not None:
                write_entropy(log_MV, entropy_M)
            log_MJ = log_MV.gather(1, bucket_MJ) if top_id_BTK is None else split_buckets(log_MV, bucket_MJ)
        return log_MJ[:, 0], None if top_id_BTK is None else log_MJ[:, 1:]

    def _head(self, device: torch.device) -> tuple[Head, int]:
        """Returns the linear head, and how many tokens' logits are computed at once."""
        layer = self.model.get_output_embeddings()  # a sharded one has another weight while it computes
        chunk = self._vocab_chunk or chunk_of(len(layer.weight), device)
        return Head(layer.weight, layer.bias, self._softcap, self._compiled), chunk

    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """Returns the trained parameters, each once, those of the heads last."""
        parameters = [p for p in (*self.model.parameters(), *self.heads.parameters()) if p.requires_grad]
        return parameters if self._low_precision is None else [self._low_precision.weight(p) for p in parameters]

    def weights(self) -> Mapping[str, Tensor]:
        """Returns detached views by the names `save_pretrained` uses; tied weights once, heads not at all.

        For a model with adapters (`policy.lora`) these are the adapters alone. For a sharded policy they are shards, in
        the same order on every rank.
        """
        weights = self.everything()
        return {name: tensor for name, tensor in weights.items() if not self.has_adapters or is_adapter(name)}

    def everything(self) -> Mapping[str, Tensor]:
        """Returns all weights by name, under adapters those of their base too."""
        if self._sharded_model is not None:
            self._sharded_model.reshard()
        weights = untied_weights(self.model)
        return weights if self._low_precision is None else self._low_precision.replace_copies(weights)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights` in, in place. Raises `KeyError` on other names and `ValueError` on another shape."""
        tensors, shapes = self.weights(), shapes_of(weights)
        if tensors.keys() != weights.keys():
            names = sorted(tensors.keys() ^ weights.keys())
            raise KeyError(f"the weights do not have this model's names: {len(names)} differ, the first is {names[0]}")
        for name, tensor in tensors.items():
            if tensor.shape != shapes[name].shape:
                raise ValueError(f"{name} has shape {tuple(shapes[name].shape)}, this model's is {tuple(tensor.shape)}")
        with torch.no_grad():
            for name, tensor in tensors.items():
                rows: Any = ...
                if is_sharded(tensor):
                    mesh = tensor.device_mesh
                    rows = slice(*row_range(len(tensor), mesh.get_local_rank(), mesh.size()))
                local_part(tensor).copy_(weights[name][rows])  # kept by no name while the next one is made

    def save(
        self, path: Path, tokenizer: PreTrainedTokenizerBase | None = None, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write the Hugging Face layout: configuration, safetensors and the tokenizer, under a temporary name that is
        then replaced.

        Adapters are merged into the model, and also saved by themselves, as peft reads them. `weights` are `everything`
        of a sharded policy, as it comes from its ranks.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if tokenizer is not None and self.model.can_generate():
            add_end_tokens(self.model.generation_config, tokenizer)
        # A kill leaves a folder of such a name behind, which the next checkpoint deletes (`weights.atomic_dir`).
        new_folder, old_folder = (path.with_name(f".{p}-{path.name}-{os.getpid()}") for p in ("writing", "removed"))
        try:
            self._write_model(new_folder, weights)
            if tokenizer is not None:
                tokenizer.save_pretrained(new_folder)
        except BaseException:  # otherwise part of the model would keep a full disk full
            shutil.rmtree(new_folder, ignore_errors=True)
            raise
        if path.exists():
            path.replace(old_folder)
        new_folder.replace(path)
        shutil.rmtree(old_folder, ignore_errors=True)

    def _write_model(self, folder: Path, weights: Mapping[str, Tensor] | None) -> None:
        """Write the configuration and the weights: all but the tokenizer."""
        if self.has_adapters:
            adapters: dict[str, Tensor] = {}
            self._write_weights(folder, merge_adapters(self.model, weights or self.everything(), adapters))
            save_adapters(folder / ADAPTER, self.model, adapters)
        elif weights is None and self._low_precision is None:
            self.model.save_pretrained(folder)
        else:
            self._write_weights(folder, weights or self.everything())

    def _write_weights(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write what `save_pretrained` writes, with the tensors one after the other."""
        folder.mkdir()
        config = copy(self.model.config)
        vars(config).pop("quantization_config", None)  # what is written is whole
        config.architectures = [type(self.model).__name__.removeprefix("FSDP")]
        config.dtype = str(next(iter(shapes_of(weights).values())).dtype).removeprefix("torch.")
        config.save_pretrained(folder)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(folder)
        write_tensors(folder / "model.safetensors", weights)


def _entropy_buffer(target_M: Tensor) -> Tensor | None:
    """Returns where the entropies of a forward pass are to be written, if a gradient will be taken; NaN until then."""
    return torch.full_like(target_M, torch.nan, dtype=torch.float32) if torch.is_grad_enabled() else None


def chunk_of(vocabulary: int, device: torch.device) -> int:
    """Returns how many tokens' logits are computed at once."""
    return max(16, (_LOGITS_ON_CPU if device.type == "cpu" else _LOGITS_ELSEWHERE) // vocabulary)


def _plain_passes(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (the input of a forward, int64 [R, X]; of each trained token its row there, the position that predicts it,
    the token, and its place in B * T, int64 [4, M]): of all rows' prompts and first segments, then of later segments.
    """
    width, prompt_B = batch.mask_BT.shape[1], batch.prompt_length_G[batch.group_B]
    in_first_BT = torch.arange(width) < batch.first_length_B[:, None]
    row_M, step_M = (batch.mask_BT & in_first_BT).nonzero(as_tuple=True)
    target_M, predictor_M = batch.completion_BT[row_M, step_M], prompt_B[row_M] + step_M - 1
    yield _join(batch), torch.stack([row_M, predictor_M, target_M, row_M * width + step_M])
    for row, begin, end in batch.later_segments():
        input_1X = batch.completion_BT[row, None, begin:end]
        step_M = batch.mask_BT[row, begin:end].nonzero()[:, 0]
        place_M = row * width + begin + step_M
        yield input_1X, torch.stack([torch.zeros_like(step_M), step_M - 1, input_1X[0, step_M], place_M])


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Returns tensors of several passes as one, without a copy where there is one pass."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _join(batch: Batch) -> Tensor:
    """Returns prompt and first segment of each row, one after the other: int64 [B, longest]. What follows a shorter row
    means nothing.
    """
    prompt_B = batch.prompt_length_G[batch.group_B]
    position_T = torch.arange(int((prompt_B + batch.first_length_B).max()), device=prompt_B.device)
    step_BT = position_T - prompt_B[:, None]
    prompt_BT = batch.prompt_GP[batch.group_B].gather(
        1, position_T.clamp(max=batch.prompt_GP.shape[1] - 1).expand_as(step_BT)
    )
    completion_BT = batch.completion_BT.gather(1, step_BT.clamp(0, batch.completion_BT.shape[1] - 1))
    return torch.where(step_BT < 0, prompt_BT, completion_BT)


def _mean_prompt_state(hidden_BTW: Tensor, batch: Batch) -> Tensor:
    """Returns [G, W] float32: the mean hidden state of each prompt, from the first row that has it."""
    row_B = torch.arange(batch.rows, device=batch.group_B.device)
    first_row_G = row_B.new_full((batch.groups,), batch.rows).scatter_reduce(0, batch.group_B, row_B, "amin")
    in_prompt_GP = torch.arange(batch.prompt_GP.shape[1], device=row_B.device) < batch.prompt_length_G[:, None]
    hidden_GPW = hidden_BTW[first_row_G, : batch.prompt_GP.shape[1]].float()
    return (hidden_GPW * in_prompt_GP[:, :, None]).sum(1) / batch.prompt_length_G[:, None]


def _compile_layers(model: PreTrainedModel) -> None:
    """Compile each layer for any number of tokens: all but packed attention. What surrounds a layer (checkpointing, the
    gathering of shards) stays outside.
    """
    exclude_packed_attention_from_compile()
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            # a method, so that a copy of the model computes with its own weights
            layer.forward = MethodType(torch.compile(type(layer).forward, dynamic=True), layer)


def _disable_dropout(model: PreTrainedModel) -> None:
    """Set to 0 the dropout that layers which can be checkpointed do by themselves (OPT), not by a module in them."""
    for layer in (m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)):
        for name in [n for n, value in vars(layer).items() if "dropout" in n and isinstance(value, float)]:
            setattr(layer, name, 0.0)


@contextmanager
def _layers_checkpointed(model: PreTrainedModel, is_enabled: bool) -> Iterator[None]:
    """Have layers checkpointed within the block, if that `is_enabled`.

    Transformers checkpoints layers in training mode only; that mode is given to the layers themselves and not to
    what is in them, so that dropout stays off (`_drop_nothing`).
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] if is_enabled else []
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
