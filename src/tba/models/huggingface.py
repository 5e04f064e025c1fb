"""A Hugging Face causal language model as a recipe's model: engine and reference for searchers, policy for the trainer.

Invariant: all three begin from the same weights in the same precision (`tba.models.precision`), so that at version 0
every log-ratio to the reference is 0. Where there are no weights yet, a supervised warm start makes them, once per
setting (cached).
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast
from weakref import WeakValueDictionary

import safetensors
import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel

from tba.chat_prompts import with_arguments, with_day
from tba.engines.transformers import EngineSettings, TransformersEngine
from tba.engines.vllm import VllmEngine, VllmSettings
from tba.engines.vllm_surface import REFUSALS, TESTED_RELEASES, installed_version, untested_version
from tba.errors import TbaError, UserError
from tba.fields import as_declared
from tba.gpus import GPU_SHARE, visible_gpus
from tba.models import memory
from tba.models.arithmetic import arithmetic_of, positions_of, shape_of
from tba.models.memory import SearcherWorkload, Shape
from tba.models.precision import Precision, PrecisionName, choose_precision
from tba.models.serving import find_mismatch, own_engine_reason
from tba.models.source import merged_if_adapter, resolve_model_path
from tba.models.warm_start import WarmStart, prepare_warm_start, results_folder
from tba.policy.causal import CausalPolicy
from tba.policy.loading import load_model, load_unfilled, no_bars, readable
from tba.policy.lora import LoraSettings, add_adapters, copy_on_same_base, read_adapters, switch_adapters
from tba.policy.reference import BasePolicy, FrozenReference
from tba.pretrained import SAFE
from tba.protocols import HEADS, ComputeCost, Policy, Reference, SavedPolicy, ScoringPolicy, Task, Work
from tba.sharding import Sharding
from tba.types import Version

log = logging.getLogger("tba.searcher")
_BASE_SLOTS = 8  # answers that grow at once of the model as it was before training
_USABLE_SHARE = 0.95  # of what a process may take of its GPU: its allocator loses some
# of engines with adapters, whose bases are shared
_ENGINE_MODELS: WeakValueDictionary[str, PreTrainedModel] = WeakValueDictionary()
# folders that this process knows: to find one, all problems are built and encoded. The task's class is part of the key,
# since a notebook defines it again
_WARM_STARTS: dict[tuple[str, type, str, str], Path] = {}


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@dataclass(frozen=True)
@as_declared
class HuggingFace:
    """A Hugging Face causal language model: which one, on which device, and how each half of a run uses it.

    Raises `UserError`, once it is `prepared`, for a folder that is not there or cannot be read.
    """

    path: str = ""  # a folder, a GGUF file, an adapter of PEFT, or a name on the Hub; empty: the warm start's result
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda, else mps, else cpu
    dtype: PrecisionName = "auto"  # in which trainer, reference and engine compute, and weights are published; auto:
    # bfloat16 on CUDA cards that have it, else float32; 4-bit: likewise, on a base under adapters in NF4. What is
    # trained, its gradients and moments are float32 in any case
    generation: EngineSettings = field(default_factory=EngineSettings)
    vllm: VllmSettings = field(default_factory=VllmSettings)
    template_arguments: tuple[str, ...] = ()  # of the chat template, each name=value, such as enable_thinking=false
    day: str = ""  # what a chat template writes that writes today's date, as 2026-03-31; empty: the day on which the
    # run begins, so that prompts stay the same
    gradient_checkpointing: bool | None = None  # recompute activations: less memory, one more forward pass; None: on
    # one GPU in passes that would not fit otherwise, elsewhere never
    torch_compile: bool = False  # torch.compile of layers except attention, also of a decode step (docs/scaling.md)
    lora: LoraSettings = field(default_factory=LoraSettings)
    warm_start: WarmStart | None = None

    def __post_init__(self) -> None:
        if self.vllm.tensor_parallel > 1 and self.generation.engine != "vllm":
            raise UserError("--model.vllm.tensor-parallel is for --model.generation.engine vllm: choose that engine")
        if self.day and not _is_day(self.day):
            raise UserError(f"--model.day is {self.day!r}: give a day as 2026-03-31, or leave it out")
        if self.dtype == "4-bit" and (not self.lora.rank or self.generation.engine == "vllm"):
            raise UserError(
                "--model.dtype 4-bit is for the frozen base of adapters in the transformers engine: give "
                "--model.lora.rank and --model.generation.engine transformers, or another dtype"
            )

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields without effect: those of an engine that is not chosen, the warm start where there are
        weights, and a day that nobody has named.
        """
        remedies = {} if self.generation.engine != "transformers" else {"vllm": "generation.engine vllm"}
        remedies |= {} if self.day else {"day": "day of a template that writes it"}
        return remedies | ({"warm_start": 'path ""'} if self.path and self.warm_start is not None else {})

    def prepared(self, task: Task, log: Callable[[str], None] = lambda line: None) -> HuggingFace:
        """Returns the model with a path: given, shipped, cached, or trained now.

        Raises `UserError` when there is neither a path nor a warm start, or no demonstrations to start from.
        """
        if self.dtype in ("auto", "4-bit") and self._device.type == "cuda" and (old := visible_gpus().without_bfloat16):
            log(f"{old[0]} does not compute in bfloat16: this run computes in float32, which takes twice the memory")
        if self.path:
            return replace(self, path=resolve_model_path(self.path, log))
        if self.warm_start is None:
            raise UserError("the recipe has no model: give --model.path a folder or a Hugging Face Hub name")
        key = (repr(self.warm_start), type(task), repr(task), str(results_folder()))
        if key not in _WARM_STARTS or not _WARM_STARTS[key].is_dir():
            _WARM_STARTS[key] = prepare_warm_start(self.warm_start, task, log)
        return replace(self, path=str(_WARM_STARTS[key]))

    @property
    def _full_path(self) -> str:
        """Returns the path of the whole weights, also of an adapter's folder that was not `prepared`."""
        return merged_if_adapter(self.path, log.info)

    def tokenizer(self) -> Any:
        """Returns the model's own tokenizer. Raises `UserError` when it cannot be loaded."""
        with readable(f"cannot load a tokenizer from '{self.path}'", "give a folder or a Hub name"):
            tokenizer = with_arguments(AutoTokenizer.from_pretrained(self._full_path, **SAFE), self.template_arguments)
            return with_day(tokenizer, self.day)

    def with_path(self, path: str) -> HuggingFace:
        """Returns another model that only scores, in the same place and precision."""
        dtype: PrecisionName = "bfloat16" if self.dtype == "4-bit" else self.dtype
        settings = replace(self, lora=LoraSettings(), warm_start=None, template_arguments=())  # of its own template
        return replace(settings, path=path, dtype=dtype)

    @property
    def heads(self) -> frozenset[str]:
        return HEADS

    @property
    def max_completion_tokens(self) -> int:
        return self.generation.max_completion_tokens

    @property
    def positions(self) -> int | None:
        return positions_of(self.path)

    @property
    def never_sampled(self) -> tuple[str, ...]:
        return self.generation.never_sampled

    def policy(
        self,
        temperature: float,
        heads: frozenset[str] = frozenset(),
        saved: Path | None = None,
        sharding: Sharding | None = None,
        moments_on_host: bool = False,
        averaged: bool = False,
    ) -> CausalPolicy:
        base, files = str(saved if saved is not None and not self.lora.rank else self._full_path), None
        if sharding is None:
            model, _ = self._load(base, self._device, self.precision.weights)
        else:
            self._allow_tf32()
            model, files = load_unfilled(base, self.precision.weights)
        if self.lora.rank:
            add_adapters(model, self.lora, torch.float32)
        # shards are cast as they are gathered, and adapters on a base in 4 bits as they are used
        is_lowered = sharding is None and not self.precision.four_bit and self.compute != torch.float32
        policy = CausalPolicy(
            model,
            temperature,
            gradient_checkpointing=self._checkpointing(sharding, moments_on_host, averaged),
            compiled=self.torch_compile,
            heads=heads,
            compute=self.compute if is_lowered else None,
        )
        if sharding is not None:
            policy.shard(sharding, files)
        if self.lora.rank and saved is not None:
            policy.load(load_adapters(saved))
        return policy

    def _checkpointing(
        self, sharding: Sharding | None, moments_on_host: bool, averaged: bool
    ) -> bool | Callable[[int], bool]:
        """Returns whether activations are recomputed, or in which passes, by their tokens."""
        if self.gradient_checkpointing is not None:
            return self.gradient_checkpointing
        if self._device.type != "cuda" or sharding is not None:  # all ranks have to do the same
            return False
        shape, gpu_index = shape_of(self), self._device.index or torch.cuda.current_device()
        share = torch.cuda.get_per_process_memory_fraction(gpu_index)
        gpu_bytes = int(_USABLE_SHARE * share * torch.cuda.get_device_properties(gpu_index).total_memory)
        return False if shape is None else self.recomputation_rule(shape, gpu_bytes, moments_on_host, averaged)

    def recomputation_rule(
        self, shape: Shape, gpu_bytes: int, moments_on_host: bool = False, averaged: bool = False
    ) -> Callable[[int], bool]:
        """Returns a function that says whether a pass of so many tokens recomputes its activations, because the trainer
        would need more than `gpu_bytes` of its GPU with them. It logs when that changes.
        """
        decisions: list[bool] = []

        def recomputes(tokens: int) -> bool:
            options = {"moments_on_host": moments_on_host, "averaged": averaged}
            work = memory.TrainerWorkload(tokens, self.precision, "cuda", self.lora.rank, self.lora.targets, **options)
            size = memory.total(memory.trainer_bytes(shape, work))
            decision = size > gpu_bytes
            if decision not in decisions[-1:]:
                decisions.append(decision)
                action = "recomputed" if decision else "kept"
                sizes = f"a pass of {tokens:,} tokens needs {size / 1e9:.1f} GB with them, of {gpu_bytes / 1e9:.1f} GB"
                logging.getLogger("tba.trainer").info("activations are %s: %s", action, sizes)
            return decision

        return recomputes

    @property
    def trainer_device(self) -> torch.device:
        return self._device

    def arithmetic(self) -> ComputeCost | None:
        return arithmetic_of(self._full_path, self.lora.rank, self.compute, self._device)

    @property
    def attention_heads(self) -> int | None:
        shape = shape_of(self)
        return None if shape is None else shape.heads

    @property
    def gpus_per_searcher(self) -> int:
        if self._device.type != "cuda":
            return 0
        return self.vllm.tensor_parallel

    def memory(self, work: Work) -> Mapping[str, memory.Bytes] | None:
        if (shape := shape_of(self)) is None:
            return None
        device, lora, uses_vllm = self._device.type, self.lora, self.generation.engine == "vllm"
        answer = min(self.max_completion_tokens, shape.positions - 1)
        prompt = min(work.prompt_tokens, shape.positions - answer)
        batch = work.groups * (prompt + work.group_size * answer)
        trainer_work = memory.TrainerWorkload(
            tokens=max(min(work.pass_tokens, batch), prompt + answer),  # a row is never split
            precision=self.precision,
            device=device,
            rank=lora.rank,
            targets=lora.targets,
            checkpointed=bool(self.gradient_checkpointing),
            ranks=work.ranks,
            moments_on_host=work.moments_on_host,
            averaged=work.averaged,
        )
        searcher_work = self._searcher_workload(prompt, shape.positions)
        searcher_work = replace(searcher_work, parks=work.parks and not uses_vllm)  # vllm's cache holds what is parked
        checkpoint, weights = memory.disk_bytes(shape, trainer_work)
        return {
            "trainer": memory.trainer_bytes(shape, trainer_work),
            "host": memory.host_bytes(shape, trainer_work),
            "searcher": memory.vllm_bytes(
                shape, searcher_work, self.vllm.tensor_parallel, 0 if device == "cuda" else None
            )
            if uses_vllm
            else memory.engine_bytes(shape, searcher_work),
            "reference": memory.reference_bytes(shape, searcher_work),
            "checkpoint": checkpoint,
            "weights": weights,
        }

    def engine(self, version: Version, longest_prompt: int = 512) -> TransformersEngine | VllmEngine:
        """Returns the engine that the settings name; by `auto` vLLM on CUDA where the model is large, has experts or
        long contexts, once it has shown that it samples from the policy. The log says which it is and why. A searcher
        finds that out before it loads its reference, which is as large as what the test needs.
        """
        if self.generation.engine == "vllm":
            return self._chosen_vllm(version, longest_prompt)
        if self.generation.engine == "auto":
            vllm_engine = self._vllm_obstacle(longest_prompt) or self._try_vllm(version, longest_prompt)
            if not isinstance(vllm_engine, str):
                log.info("answers are sampled by vllm, which has passed its self-test")
                return vllm_engine
            log.info("answers are sampled by transformers: %s", vllm_engine)
        arguments = (self._base(), self.tokenizer(), self.generation, version)
        prefill_tokens = self._prefill_tokens(longest_prompt)
        return TransformersEngine(*arguments, longest_prompt, self.torch_compile, prefill_tokens)

    def may_use_vllm(self, longest_prompt: int) -> bool:
        engine = self.generation.engine
        return engine == "vllm" or (engine == "auto" and not self._vllm_obstacle(longest_prompt))

    def _prefill_tokens(self, longest_prompt: int) -> int | None:
        """Returns the tokens of prompts that the engine reads together on a GPU; None: as many as on a CPU."""
        if (gpu_bytes := self._gpu_bytes) is None or (shape := shape_of(self)) is None:
            return None
        workload = self._searcher_workload(longest_prompt, shape.positions)
        return memory.prefill_tokens_within(shape, workload, int(_USABLE_SHARE * gpu_bytes))

    @property
    def _gpu_bytes(self) -> int | None:
        """Returns the bytes of a searcher's share of its GPU; None where it has none."""
        if self._device.type != "cuda":
            return None
        return int(float(os.environ.get(GPU_SHARE, 0.95)) * torch.cuda.get_device_properties(0).total_memory)

    def _base(self) -> PreTrainedModel:
        """Returns the model that an engine has in this process, with adapters where there are to be some."""
        model, _ = self._load(self._full_path, self._device, self.compute)
        if self.lora.rank:
            add_adapters(model, self.lora, self.compute)
            _ENGINE_MODELS[repr(self)] = model
        return model

    def base_engine(self, longest_prompt: int, reference: Reference | None = None) -> TransformersEngine:
        """Returns an engine of the weights that the run began with, whatever is trained since. reference: keeps these
        weights for good, and gives them; None: they are loaded. Raises `UserError` where the free memory does not hold
        it.
        """
        shared_reference = reference if isinstance(reference, FrozenReference) else None
        settings = replace(self.generation, engine="transformers", slots=min(_BASE_SLOTS, self.generation.slot_count))
        self._require_base_memory(longest_prompt, settings.slot_count, is_loaded=shared_reference is None)
        if shared_reference is None:
            model, _ = self._load(self._full_path, self._device, self.compute)
        else:
            model = shared_reference.model_on_same_weights()
        return TransformersEngine(model, self.tokenizer(), settings, Version(), longest_prompt)

    def _require_base_memory(self, longest_prompt: int, slots: int, is_loaded: bool) -> None:
        """Raises `UserError` where an engine of the base has no room beside all else. is_loaded: with its weights."""
        shape, free_bytes = shape_of(self), memory.free_bytes(self._device)
        if shape is None or free_bytes is None:
            return
        workload = replace(self._searcher_workload(longest_prompt, shape.positions), slots=slots, rank=0)
        parts = memory.engine_bytes(shape, workload)
        needed_bytes = memory.total(parts) - (0 if is_loaded else parts["weights"])
        if needed_bytes > free_bytes:
            raise UserError(
                f"the model as it was before training needs {needed_bytes / 1e9:.1f} GB to answer, and "
                f"{free_bytes / 1e9:.1f} GB are free: serve where there is more memory, or call the policy alone"
            )

    def _chosen_vllm(self, version: Version, longest_prompt: int) -> VllmEngine:
        """Returns vLLM. Raises `UserError` where it fails the self-test: one is made of what tests do not run, releases
        and arguments of vLLM.
        """
        if not (untested_version() or self.vllm.needs_self_test):
            return self._vllm(version, longest_prompt)
        engine = self._try_vllm(version, longest_prompt)
        if isinstance(engine, str):
            raise UserError(
                f"vllm {installed_version()} with these settings is not run by tests, and not taken ({engine}): pip "
                f"install 'vllm=={TESTED_RELEASES[-1]}.*', change --model.vllm, or choose --model.generation.engine "
                "transformers"
            )
        log.info("vllm %s has passed its self-test", installed_version())
        return engine

    def _vllm(self, version: Version, longest_prompt: int) -> VllmEngine:
        """Returns vLLM with its own copy of the weights; with adapters it is given merged weights of a base here."""
        share, limit = self.vllm.gpu_memory_utilization, float(os.environ.get(GPU_SHARE, 1))
        if self._device.type == "cuda" and share is not None and share > limit:
            raise UserError(
                f"--model.vllm.gpu-memory-utilization is {share:g}, but this searcher has {limit:.2g} of its GPU, "
                "which it shares with others: give less, or leave it out"
            )
        base = self._base() if self.lora.rank else None
        settings = (self.generation, self.vllm, self._device, self.compute)
        with no_bars():
            cache_bytes = partial(self._cache_bytes, longest_prompt)
            return VllmEngine(self._full_path, self.tokenizer(), *settings, longest_prompt, cache_bytes, version, base)

    def _vllm_obstacle(self, longest_prompt: int) -> str:
        """Returns why `auto` does not try vLLM at all; empty: it does."""
        if self._device.type != "cuda" or self.dtype == "4-bit":
            return f"vllm is for CUDA and whole weights, not for {self.dtype} on {self._device.type}"
        rules = self.generation.allowed_first_tokens or self.generation.forbidden_first_tokens
        if rules:
            return "vllm has no rule for the first token of an answer"
        positions = longest_prompt + self.max_completion_tokens
        return own_engine_reason(shape_of(self), positions, has_adapters=self.lora.rank > 0)

    def _try_vllm(self, version: Version, longest_prompt: int) -> VllmEngine | str:
        """Returns vLLM if it can be had and passes the self-test, else the reason in words."""
        engine: VllmEngine | None = None
        try:
            engine = self._vllm(version, longest_prompt)
            base = _ENGINE_MODELS.get(repr(self)) if self.lora.rank else None
            probe = self._base() if base is None else copy_on_same_base(base)
            mismatch = find_mismatch(engine, probe, longest_prompt, self.vllm.has_rounding)
        except (TbaError, *REFUSALS) as error:  # those of vLLM in the middle of the test, such as no memory for it
            mismatch = " ".join(str(error).split()) or type(error).__name__
        base = probe = None
        if mismatch is not None:
            engine = None
        gc.collect()  # what is not used any more has to be gone before the reference, or another engine, is loaded
        torch.cuda.empty_cache()
        return engine or str(mismatch)

    def _searcher_workload(self, longest_prompt: int, positions: int) -> SearcherWorkload:
        """Returns what a searcher's memory depends on, with so many tokens in a prompt and positions in the model."""
        parked_gb, limit = self.generation.parked_gb, self.vllm.max_model_len
        if self.generation.engine == "vllm" and limit is not None:
            positions = min(positions, limit)
        return SearcherWorkload(
            precision=self.precision,
            slots=self.generation.slot_count,
            positions=min(longest_prompt + self.max_completion_tokens, positions),
            prompt=longest_prompt,
            device=self._device.type,
            rank=self.lora.rank,
            targets=self.lora.targets,
            parked_bytes=None if parked_gb is None else int(parked_gb * 1e9),
        )

    def _cache_bytes(self, longest_prompt: int, config: PretrainedConfig) -> int:
        """Returns the bytes of keys and values that vLLM is given on each GPU."""
        if self.vllm.cache_gb is not None:
            return int(self.vllm.cache_gb * 1e9)
        shape = Shape.of(config)
        workload = self._searcher_workload(longest_prompt, shape.positions)
        return memory.vllm_bytes(shape, workload, self.vllm.tensor_parallel, self._gpu_bytes)["keys and values"]

    def reference(self, temperature: float, version: Version) -> FrozenReference:
        if not self.lora.rank:
            model, _ = self._load(self._full_path, self._device, self.compute)
            return FrozenReference(model, version, temperature, first_weights=self._first_weights)
        engine_model = _ENGINE_MODELS.get(repr(self))
        if engine_model is None:
            model, _ = self._load(self._full_path, self._device, self.compute)
            add_adapters(model, self.lora, self.compute)
        else:
            model = copy_on_same_base(engine_model)
        switch_adapters(model, enabled=False)
        return FrozenReference(model, version, temperature)

    def _first_weights(self) -> Mapping[str, torch.Tensor]:
        """Returns the weights that the model is trained from, in the precision of computing."""
        model, _ = self._load(self._full_path, torch.device("cpu"), self.compute)
        return CausalPolicy(model).weights()

    def frozen_policy(self, temperature: float, sharding: Sharding | None, policy: Policy) -> ScoringPolicy | None:
        """Returns the policy as it begins, which only scores: the base of `policy` where that has adapters, else a
        rank's rows of a model in the precision of computing. None: neither (`reference` has all of it).
        """
        if self.lora.rank and isinstance(policy, CausalPolicy):
            return BasePolicy(policy)
        if sharding is None:
            return None
        self._allow_tf32()
        model, files = load_unfilled(self._full_path, self.compute)
        reference_policy = CausalPolicy(model.requires_grad_(False), temperature)
        reference_policy.shard(sharding, files)
        return reference_policy

    def save(self, policy: Policy, path: Path) -> None:
        with no_bars():
            cast(SavedPolicy, policy).save(path, self.tokenizer())  # a policy of this model, possibly led over ranks

    @property
    def _device(self) -> torch.device:
        if self.device != "auto":
            return torch.device(self.device)
        if visible_gpus():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")

    def _load(self, path: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
        self._allow_tf32()
        return load_model(path, device, dtype, four_bit=self.precision.four_bit)

    def _allow_tf32(self) -> None:
        if self.precision.tf32:
            torch.set_float32_matmul_precision("high")

    @property
    def compute(self) -> torch.dtype:
        return self.precision.compute

    @property
    def precision(self) -> Precision:
        """Returns the precision in which the model is held and computed with."""
        device = self._device.type
        has_bfloat16 = device != "cuda" or not visible_gpus().without_bfloat16
        return choose_precision(self.dtype, device, adapters=self.lora.rank > 0, has_bfloat16=has_bfloat16)


def load_adapters(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the adapters that `save` left next to the merged model. Raises `UserError` when there are none."""
    try:
        return read_adapters(folder)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(
            f"the checkpoint at {folder} has no adapters ({error}): use the --model.lora.rank it was made with"
        ) from error
