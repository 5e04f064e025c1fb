"""Says which engine `--model.generation.engine auto` takes: by a rule of the model and its contexts, and where that
prefers vLLM by a self-test. The rule is by what the engines do; it was not measured on a GPU.

Invariant of the self-test: what is compared are log-probabilities of tokens that the engine has drawn, as it says them
and as the policy's own forward gives them: with the weights that both began with, after an update of every weight, and
after an update back, which restores them to the bit. The update flips one bit of the mantissa of each number, so that
undoing it needs no second copy.
"""

from __future__ import annotations

import math
from itertools import chain, count
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba.policy.lora import has_adapters, is_adapter, untied_weights
from tba.policy.reference import FrozenReference
from tba.types import Completion, Prompt, Sampling

if TYPE_CHECKING:
    from tba.engines.transformers import TransformersEngine
    from tba.engines.vllm import VllmEngine
    from tba.models.memory import Shape

OWN_ENGINE_PARAMETERS = 2 * 10**9  # of the largest model that `auto` samples from by the transformers engine on a GPU
LONG_CONTEXT = 8192  # tokens, from which on it does not
# of the mean |difference| of a token: float32 sums in another order; in 16 bits engine and trainer differ by 0.01
TOLERANCE = {4: 1e-3, 2: 0.03}
_ROUNDED_TOLERANCE = 0.2  # of an engine that rounds weights, keys or values further than the policy
_MIN_SHIFT = 4.0  # times that tolerance an update has to move log-probabilities: otherwise it would show nothing
_PROMPTS, _ANSWERS, _MAX_PROMPT_TOKENS = 4, 4, 32  # of the self-test; answers are to each prompt
_TOKENS = 32  # of an answer, about
_INTEGERS = {2: torch.int16, 4: torch.int32}


def own_engine_reason(shape: Shape | None, positions: int, has_adapters: bool) -> str:
    """Returns why the transformers engine samples on a GPU, in words; empty: vLLM is preferred.

    shape: the model's; None: unknown. positions: tokens of the longest prompt and answer. has_adapters: those of the
    model are trained.
    """
    if has_adapters:
        return "its adapters share the base with the reference, which vllm would hold once more, merged"
    if shape is None or shape.has_experts or positions >= LONG_CONTEXT or shape.parameters > OWN_ENGINE_PARAMETERS:
        return ""
    size = f"{shape.parameters / 1e9:.1f} billion parameters and contexts of {positions:,} tokens"
    return f"the model is small, with {size}"


def find_mismatch(
    engine: TransformersEngine | VllmEngine, model: PreTrainedModel, longest_prompt: int, has_rounding: bool = False
) -> str | None:
    """Returns why the engine's log-probabilities are not those of `model`, in a sentence; None: they are.

    model: the engine's own weights; with adapters, which are updated alone. It is the test's own, on the device and in
    the precision of the engine. Afterwards the engine has the weights that it had. has_rounding: the engine rounds
    weights, keys or values further, such as to 8 bits.
    """
    policy, version = FrozenReference(model, engine.version), engine.version
    weights = {name: t for name, t in untied_weights(model).items() if is_adapter(name) or not has_adapters(model)}
    masks = {name: _mask(tensor) for name, tensor in weights.items()}
    tolerance = _ROUNDED_TOLERANCE if has_rounding else TOLERANCE[next(iter(weights.values())).element_size()]
    prompts = _prompts(int(model.config.get_text_config().vocab_size), longest_prompt)
    min_tokens = engine.settings.min_completion_tokens  # until then the engine forbids the end of text

    def sample_answers() -> list[list[Completion]]:
        flow, calls = engine.flow(_ANSWERS, Sampling(), np.random.default_rng(0)), count()
        completions: dict[int, list[Completion]] = {}
        flow.submit(prompts)
        while len(completions) < len(prompts):
            completions |= dict(flow.next(lambda: next(calls) * 8 > min_tokens + _TOKENS, until_needed=False))
        return [completions[i] for i in range(len(prompts))]

    def mean_distance(answers: list[list[Completion]]) -> float:
        """Returns the mean |difference| of a token's log-probability; NaN where the engine or the policy has none."""
        scores = policy.log_probabilities_of(list(zip(prompts, answers, strict=True)))
        pairs = zip(chain(*answers), chain(*scores), strict=True)
        distance_N = np.concatenate([np.abs(np.asarray(c.log_behavior) - log_T)[min_tokens:] for c, log_T in pairs])
        return float(distance_N.mean()) if len(distance_N) else math.nan

    def update_weights() -> None:
        with torch.no_grad():
            for name, tensor in weights.items():
                tensor.view(_INTEGERS[tensor.element_size()]).bitwise_xor_(masks[name])
        engine.load(weights, version)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)  # the policy scores in a stream of its own

    distances = {"at the start": mean_distance(sample_answers())}
    update_weights()
    changed_answers = sample_answers()
    distances["after an update"] = mean_distance(changed_answers)
    update_weights()
    distances["after an update back"] = mean_distance(sample_answers())
    for moment, distance in distances.items():
        if not distance <= tolerance:
            difference = f"its log-probabilities are {distance:.2g} from the policy's {moment}"
            return f"{difference}, where {tolerance:g} is allowed"
    shift = mean_distance(changed_answers)
    if not shift >= _MIN_SHIFT * tolerance:
        return f"an update of all weights moved its log-probabilities by {shift:.2g} only, which shows nothing"
    return None


def _prompts(vocabulary: int, longest_prompt: int) -> list[Prompt]:
    """Returns prompts of some tokens, each shorter than the one before: whole blocks of a cache, and parts of one."""
    lengths = [max(1, min(longest_prompt, _MAX_PROMPT_TOKENS) - 5 * i) for i in range(_PROMPTS)]
    return [Prompt("self-test", (np.arange(n) * 31 + 7 * n).astype(np.int32) % vocabulary) for n in lengths]


def _mask(tensor: Tensor) -> int:
    """Returns the bits that an update flips: a quarter of each number's power of two, which is 12 to 25 % of it. Of
    zeros, such as new adapters have, those of 1/64.
    """
    if bool(tensor.any()):
        return 1 << (-2 - round(math.log2(torch.finfo(tensor.dtype).eps)))
    return int(torch.tensor(1 / 64, dtype=tensor.dtype).view(_INTEGERS[tensor.element_size()]))
