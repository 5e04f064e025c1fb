"""Sampling by vLLM, in this process, through its public interface alone.

Invariants: a completion's log-probabilities are of the weights that sampled each of its tokens, after temperature and
top-p, renormalised. When weights are replaced no key or value of the old ones is used again: the prefix cache is
emptied, and for completions still being generated they are computed again.

vLLM is imported when an engine is made: it takes seconds, and only this engine needs it.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from tba.engines.rules import Room, matched
from tba.engines.stopping import StopStrings, eos_ids
from tba.engines.transformers import PREFILL_TOKENS, EngineSettings
from tba.errors import TbaError, UserError
from tba.foreign import SAFE
from tba.policy.loading import load_model
from tba.policy.lora import is_adapter, merged_with
from tba.protocols import Partner, Tokenizer, Turn
from tba.streaming import Streamed, shapes_of, write_tensors
from tba.types import Completion, FloatArray, IntArray, Prompt, Sampling, StopReason, Version

SUPPORTED = ("0.32",)
GIVEN = "TBA_GPU_SHARE"  # in the environment: which part of its GPUs' memory is this process's (`runtime.devices`)
_STEPS_BETWEEN_ASKING = 8  # how often `interrupted` is asked
_BLOCK = 128  # positions in a block of keys and values, at most
_ENVIRONMENT = {  # read by vLLM when it is imported or an engine is made
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its scheduler in this process: weights are passed directly, not pickled
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several searchers would bind to the same cores
}


@dataclass(frozen=True)
class VllmSettings:
    """The settings of vLLM alone (`--model.generation.engine vllm`)."""

    tensor_parallel: int = 1  # processes, one for each GPU, that share one engine; the reference stays on the first
    memory_share: float = 0.5  # share of this searcher's part of each GPU's memory; the reference needs some too
    cache_gb: float | None = None  # key-value cache, 10^9 bytes; None: what is left, on a CPU what the slots need
    max_prompt_tokens: int | None = None  # a longer prompt is an error; None: the model's number of positions
    graphs: bool = True  # compile the model and record CUDA graphs when the engine starts; never on a CPU

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise UserError(f"vllm's tensor_parallel is {self.tensor_parallel}, but it must be at least 1")
        if not 0 < self.memory_share <= 1:
            raise UserError(f"vllm's memory_share is {self.memory_share}, give a share above 0 and up to 1")
        if self.cache_gb is not None and not self.cache_gb > 0:
            raise UserError(f"vllm's cache_gb is {self.cache_gb}, give a number above 0")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise UserError(f"vllm's max_prompt_tokens is {self.max_prompt_tokens}, but it must be at least 1")


@dataclass
class _Growing:
    """One completion that is being generated."""

    tokens: list[int] = field(default_factory=list)
    log_behavior: list[float] = field(default_factory=list)
    stopped: bool = False  # vLLM has seen a stop string
    finished: bool = False
    versions: tuple[Version, Version] | None = None  # by vLLM's own record, once it is finished


@dataclass
class _Talk:
    """One completion in turns: what it has said and read before the turn that is growing."""

    prompt: Prompt
    seed: int
    name: str = ""  # of its turn's request
    turns: int = 0
    turn: _Growing | None = None  # that is growing; None: its partner is asked, or it is at its end
    tokens: list[int] = field(default_factory=list)
    log_behavior: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    reason: StopReason = StopReason.INTERRUPTED
    versions: tuple[Version, Version] | None = None

    def append(self, tokens: Sequence[int], log_behavior: Sequence[float], sampled: bool) -> None:
        self.tokens.extend(tokens)
        self.log_behavior.extend(log_behavior)
        self.sampled.extend([sampled] * len(tokens))


class VllmEngine:
    """Samples completions from the model at `path`; weights are replaced in place by `load`.

    One at a time in a process: vLLM keeps its process groups there.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Tokenizer,
        settings: EngineSettings,
        own: VllmSettings,
        device: torch.device,
        dtype: torch.dtype,
        version: Version | None = None,
        adapted: PreTrainedModel | None = None,
    ) -> None:
        """adapted: the same model with adapters; then only adapters are loaded, which vLLM is given merged.

        Raises `UserError` when vLLM is missing, of another version, for another device or cannot serve the model.
        """
        vllm = _imported(device)
        self.settings, self.own, self._adapted = settings, own, adapted
        config = AutoConfig.from_pretrained(path, **SAFE)
        with torch.device("meta"):
            self._shapes = AutoModelForCausalLM.from_config(config)
        untied = device.type == "cpu" and bool(config.get_text_config().tie_word_embeddings)
        if untied and own.tensor_parallel > 1:
            raise UserError(
                "on a CPU vllm cannot share a model with tied embeddings: set --model.vllm.tensor-parallel 1"
            )
        self._names = _names(self._shapes, untied)
        positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.room = Room(settings.max_completion_tokens, own.max_prompt_tokens, positions)
        self._stop = StopStrings(settings.stop_strings, tokenizer)
        self._eos = eos_ids(_generation_config(path), config, tokenizer)
        longest = _longest(settings, own, positions)
        whole = device.type == "cpu"  # prompts in parts and seeds of requests do not work together there
        arguments = vllm.EngineArgs(
            model=path,
            tokenizer=path,
            skip_tokenizer_init=not settings.stop_strings,  # only stop strings need one
            dtype=str(dtype).removeprefix("torch."),
            tensor_parallel_size=own.tensor_parallel,
            max_model_len=longest,
            max_num_seqs=settings.slots,
            max_num_batched_tokens=max(PREFILL_TOKENS, settings.slots, (longest or 0) if whole else 0),
            enable_chunked_prefill=not whole,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # the sampling settings are ours
            gpu_memory_utilization=own.memory_share * float(os.environ.get(GIVEN, 1)),
            kv_cache_memory_bytes=_cache_bytes(settings, own, config, device, dtype),
            enforce_eager=device.type == "cpu" or not own.graphs,
            async_scheduling=False,  # otherwise a token would be attributed to the next weights
            disable_log_stats=True,
            use_tqdm_on_load=False,
            load_format="dummy" if untied else "safetensors",
            hf_overrides={"tie_word_embeddings": False} if untied else {},
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # meant for vLLM's authors
                self._llm: Any = vllm.LLMEngine.from_engine_args(arguments)
        except (ValueError, NotImplementedError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"vllm cannot serve the model at {path} with these settings ({reason})") from error
        self._calls = count()
        self._generating = False
        self._set(Version() if version is None else version)
        if untied:
            self._replace(load_model(path, device, dtype)[0].state_dict())

    @property
    def version(self) -> Version:
        return self._version

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Copy `weights` (by Hugging Face name) into the model in place, and forget what was computed with the old.

        A tied weight may be given under any of its names; a model with adapters is given these alone. Raises
        `KeyError` for an unknown or a missing name and `ValueError` for a wrong shape, in which cases nothing was
        copied.
        """
        if self._adapted is not None:
            matched(self._adapted, shapes_of(weights), is_adapter)
            weights = merged_with(self._adapted, weights)
        self._replace(weights)
        if not self._llm.reset_prefix_cache(reset_running_requests=self._generating):
            raise TbaError(f"vllm kept keys and values of weights older than {version}")
        self._set(version)

    def _replace(self, weights: Mapping[str, Tensor]) -> None:
        """Replace weights by all of the model's own names, one after the other."""
        shapes = shapes_of(weights)
        chosen = {id(place): name for name, place in matched(self._shapes, shapes).items()}  # one of several tied names
        names = {name: self._names[place] for place, name in chosen.items() if place in self._names}
        like = {one: shapes[name] for name, its in names.items() for one in its}
        named = Streamed(like, lambda: ((one, t) for name, t in weights.items() for one in names.get(name, ())))
        if self.own.tensor_parallel == 1:
            self._reload({"weights_iterator": iter(named.items())})
        else:  # its workers are other processes, and nothing is to be pickled: through a file
            with _memory_folder() as folder:
                write_tensors(folder / "model.safetensors", named)
                self._reload({"weights_path": str(folder)})

    def _reload(self, what: dict[str, object]) -> None:
        with torch.no_grad():
            self._llm.collective_rpc("reload_weights", kwargs=what)

    def _set(self, version: Version) -> None:
        self._llm.set_weight_version(str(version))
        self._version = version

    def flow(self, count: int, sampling: Sampling, rng: np.random.Generator, partner: Partner | None = None) -> _Rounds:
        """Returns what answers prompts in rounds. See `protocols.Engine`."""
        return _Rounds(self, count, sampling, rng, partner)

    def stream(
        self,
        prompts: Sequence[Prompt],
        count: int,
        sampling: Sampling,
        rng: np.random.Generator,
        interrupted: Callable[[], bool] | None = None,
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yields `count` completions of each prompt, in the order in which they are finished."""
        for prompt in prompts:
            self.room.check(prompt)
        if not prompts or count < 1:
            yield from ((i, []) for i in range(len(prompts)))
            return
        drawn = count if sampling.temperature > 0 else 1  # it gives no second sample of the greedy answer
        call = next(self._calls)
        growing: dict[str, list[_Growing]] = {}
        first = self._version
        self._generating = True
        try:
            for i, prompt in enumerate(prompts):
                growing[f"{call}.{i}"] = [_Growing() for _ in range(drawn)]
                parameters = self._parameters(prompt, drawn, sampling, int(rng.integers(2**62)))
                self._llm.add_request(f"{call}.{i}", {"prompt_token_ids": prompt.tokens.tolist()}, parameters)
            left = list(growing)
            for name in self._run(growing, interrupted):
                left.remove(name)
                row = [self._completion(g, sampling, first) for g in growing[name]]
                yield int(name.rpartition(".")[2]), row * (count // drawn)
        finally:
            self._llm.abort_request([name for name, row in growing.items() if not all(g.finished for g in row)])
            self._generating = False
        for name in left:
            row = [self._completion(g, sampling, first) for g in growing[name] if g.tokens]
            yield int(name.rpartition(".")[2]), row * (count // drawn)

    def converse(
        self,
        prompts: Sequence[Prompt],
        count: int,
        sampling: Sampling,
        rng: np.random.Generator,
        partner: Partner,
        interrupted: Callable[[], bool] | None = None,
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yields completions in turns, between which `partner` speaks.

        Each turn is a request of its own, behind all that was said before: what vLLM has read of that, in whole blocks,
        it finds in its prefix cache.
        """
        for prompt in prompts:
            self.room.check(prompt)
        first, call = self._version, next(self._calls)
        talks = [_Talk(prompt, int(rng.integers(2**62))) for prompt in prompts for _ in range(count)]
        ended: dict[int, Completion] = {}
        left = dict.fromkeys(range(len(prompts)), count)

        def finished(request: int) -> Iterator[tuple[int, list[Completion]]]:
            ended[request] = partner.ended(request, self._conversation(talks[request], sampling, first))
            i = request // count
            left[i] -= 1
            if not left[i]:
                del left[i]
                yield i, [ended.pop(r) for r in range(i * count, (i + 1) * count)]

        self._generating = True
        try:
            for request in range(len(talks)):
                self._ask(talks[request], call, request, sampling)
            steps = 0
            while left and count:
                if steps % _STEPS_BETWEEN_ASKING == 0 and interrupted is not None and interrupted():
                    break
                steps += 1
                turns: list[Turn] = []
                computes = self._llm.has_unfinished_requests()
                for output in self._llm.step() if computes else ():
                    request = int(output.request_id.rpartition(".")[2])
                    talk = talks[request]
                    assert talk.turn is not None
                    _extend(talk.turn, output.outputs[0])
                    if not talk.turn.finished:
                        continue
                    text = self._said(talk, sampling)
                    if talk.reason is StopReason.LENGTH:
                        yield from finished(request)
                    else:
                        turns.append(Turn(request, text, talk.reason, self.room.of(talk.prompt) - len(talk.tokens)))
                if turns:
                    partner.hear(turns)
                for request, heard in partner.replies(wait=not self._llm.has_unfinished_requests()).items():
                    talk = talks[request]
                    if heard is not None and len(talk.tokens) + len(heard) < self.room.of(talk.prompt):
                        talk.append(heard.tolist(), [0.0] * len(heard), False)
                        self._ask(talk, call, request, sampling)
                        continue
                    if heard is not None:
                        talk.reason = StopReason.LENGTH
                    yield from finished(request)
        finally:
            self._llm.abort_request([talk.name for talk in talks if talk.turn is not None])
            self._generating = False
        for i in left:
            for request in range(i * count, (i + 1) * count):
                talk = talks[request]
                if request in ended:
                    continue
                if talk.turn is not None:
                    self._said(talk, sampling)
                talk.reason = StopReason.INTERRUPTED
                if talk.tokens:
                    ended[request] = partner.ended(request, self._conversation(talk, sampling, first))
            yield i, [ended[r] for r in range(i * count, (i + 1) * count) if r in ended]

    def _ask(self, talk: _Talk, call: int, request: int, sampling: Sampling) -> None:
        """Begin the next turn."""
        before, talk.name = len(talk.tokens), f"{call}.{talk.turns}.{request}"
        parameters = self._parameters(talk.prompt, 1, sampling, talk.seed + talk.turns, before)
        prompt = {"prompt_token_ids": [*talk.prompt.tokens.tolist(), *talk.tokens]}
        self._llm.add_request(talk.name, prompt, parameters)
        talk.turn, talk.turns = _Growing(), talk.turns + 1

    def _said(self, talk: _Talk, sampling: Sampling) -> str:
        """Take the turn that was growing as said; returns its text."""
        assert talk.turn is not None
        log_behavior = self._finite(talk.turn, sampling)
        n, text, reason = self._end(talk.turn)
        if talk.turn.versions is not None:
            begun = talk.turn.versions if talk.versions is None else talk.versions
            talk.versions = begun[0], talk.turn.versions[1]
        talk.append(talk.turn.tokens[:n], log_behavior[:n].tolist(), True)
        talk.reason, talk.turn = reason, None
        return text

    def _conversation(self, talk: _Talk, sampling: Sampling, first: Version) -> Completion:
        return Completion(
            np.array(talk.tokens, dtype=np.int32),
            self._stop.text(talk.tokens),
            talk.reason,
            talk.versions or (first, self._version),
            sampling,
            np.array(talk.log_behavior, dtype=np.float32),
            None if all(talk.sampled) else np.array(talk.sampled),
        )

    def _parameters(self, prompt: Prompt, count: int, sampling: Sampling, seed: int, before: int = 0) -> Any:
        """before: tokens that the completion has already."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=count,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=None if sampling.temperature == 0 else seed,
            stop=list(self.settings.stop_strings),
            detokenize=bool(self.settings.stop_strings),
            ignore_eos=True,  # all tokens that end a completion are listed:
            stop_token_ids=sorted(self._eos),
            max_tokens=self.room.of(prompt) - before,
            min_tokens=max(0, self.settings.min_completion_tokens - before),
            logprobs=0,  # of the token that was sampled
            output_kind=RequestOutputKind.DELTA,
        )

    def _run(self, growing: Mapping[str, list[_Growing]], interrupted: Callable[[], bool] | None) -> Iterator[str]:
        """Runs until all are finished, or `interrupted` says so; yields each request's name when it is finished."""
        steps = 0
        while self._llm.has_unfinished_requests():
            if interrupted is not None and steps % _STEPS_BETWEEN_ASKING == 0 and interrupted():
                return
            for output in self._llm.step():
                row = growing[output.request_id]
                for part in output.outputs:
                    _extend(row[part.index], part)
                if all(g.finished for g in row):
                    yield output.request_id
            steps += 1

    def _completion(self, grown: _Growing, sampling: Sampling, first: Version) -> Completion:
        log_behavior = self._finite(grown, sampling)
        n, text, reason = self._end(grown)
        versions = grown.versions or (first, self._version)
        tokens = np.array(grown.tokens[:n], dtype=np.int32)
        return Completion(tokens, text, reason, versions, sampling, log_behavior[:n].copy())

    def _finite(self, grown: _Growing, sampling: Sampling) -> FloatArray:
        """Returns the log-probabilities of what was sampled. Raises `TbaError` if they are none."""
        log_behavior = np.array(grown.log_behavior, dtype=np.float32)
        if not np.isfinite(log_behavior).all():
            raise TbaError(f"the weights of version {self.version} give probabilities that are not finite")
        if sampling.temperature == 0:
            log_behavior[:] = 0.0  # the log-probability of a draw that could not have been another
        return log_behavior

    def _end(self, grown: _Growing) -> tuple[int, str, StopReason]:
        """Returns where what has grown ends: (its tokens, its text, why)."""
        n, text, reason = self._stop.ended(grown.tokens, self._eos, not grown.finished)
        # its text as it was generated; not that of all tokens together
        if grown.stopped and reason is StopReason.LENGTH:
            reason = StopReason.STOP_STRING
        return n, text, reason


@dataclass
class _Rounds:
    """A flow in rounds: prompts that are submitted are begun when all before them are finished."""

    engine: VllmEngine
    count: int
    sampling: Sampling
    rng: np.random.Generator
    partner: Partner | None
    submitted: int = 0
    first: int = 0  # prompt of the present round
    left: int = 0  # prompts of it that have not been handed out
    waiting: list[Prompt] = field(default_factory=list)
    round: Iterator[tuple[int, list[Completion]]] = field(default_factory=lambda: iter(()))
    interrupted: Callable[[], bool] | None = None

    @property
    def wanted(self) -> int:
        """A round that fills the slots, once there is none."""
        return 0 if self.left or self.waiting else -(-self.engine.settings.slots // max(1, self.count))

    def submit(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            self.engine.room.check(prompt)
        self.waiting += prompts
        self.submitted += len(prompts)

    def next(
        self, interrupted: Callable[[], bool] | None = None, until_wanted: bool = True
    ) -> list[tuple[int, list[Completion]]]:
        """See `protocols.Flow`."""
        self.interrupted = interrupted
        if not self.left and self.waiting:
            self.first, self.left = self.submitted - len(self.waiting), len(self.waiting)
            given = (self.waiting, self.count, self.sampling, self.rng)
            told, self.waiting = lambda: self.interrupted is not None and self.interrupted(), []
            if self.partner is None:
                self.round = self.engine.stream(*given, told)
            else:
                self.round = self.engine.converse(*given, _From(self.partner, self.first * self.count), told)
        found = [(self.first + i, completions) for i, completions in islice(self.round, 1)]
        self.left -= len(found)
        return found


@dataclass
class _From:
    """A partner whose requests are numbered from another one on."""

    partner: Partner
    first: int

    def hear(self, turns: Sequence[Turn]) -> None:
        self.partner.hear([replace(turn, request=turn.request + self.first) for turn in turns])

    def replies(self, wait: bool) -> Mapping[int, IntArray | None]:
        return {request - self.first: heard for request, heard in self.partner.replies(wait).items()}

    def ended(self, request: int, completion: Completion) -> Completion:
        return self.partner.ended(request + self.first, completion)


def _extend(grown: _Growing, part: Any) -> None:
    """Extend a completion by what is new in vLLM's output (a `CompletionOutput`)."""
    grown.tokens.extend(part.token_ids)
    grown.log_behavior.extend(
        found[token].logprob for token, found in zip(part.token_ids, part.logprobs or (), strict=True)
    )
    if part.finish_reason is None:
        return
    grown.finished = True
    grown.stopped = isinstance(part.stop_reason, str)
    if spans := part.weight_versions:
        grown.versions = Version.parse(spans[0].version), Version.parse(spans[-1].version)


def _imported(device: torch.device) -> Any:
    """Returns the package. Raises `UserError` when it is missing, of another version, or built for another device."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "the engine is vllm, which is not installed: pip install -e '.[vllm]' -c constraints-vllm.txt in an "
            "environment of its own (Linux with an NVIDIA GPU), or choose --model.generation.engine transformers"
        )
    found = _installed()
    if ".".join(found.split(".")[:2]) not in SUPPORTED:
        raise UserError(
            f"vllm {found} is installed, but this engine was written for {' and '.join(SUPPORTED)}: "
            "pip install -e '.[vllm]' -c constraints-vllm.txt, or choose --model.generation.engine transformers"
        )
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())  # what it logs while it is imported
    import vllm
    from vllm.platforms import current_platform

    if current_platform.device_type != device.type:
        raise UserError(
            f"this vllm is built for {current_platform.device_type or 'no device'}, but the model is to be on "
            f"{device.type}: set --model.device, or install another build of vllm"
        )
    return vllm


def _installed() -> str:
    """Returns its version, under either of its names: the CPU build is a distribution of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _names(model: PreTrainedModel, untied: bool) -> dict[int, list[str]]:
    """Returns the name under which vLLM is given each parameter; all of its names where tied ones are kept apart.

    On a CPU vLLM keeps the output embedding repacked, and reloading a tied one leaves that as it was.
    """
    if not untied:
        return {id(p): [name] for name, p in model.named_parameters()}
    named: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(p), []).append(name)
    return named


def _generation_config(path: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # a model need not have one
        return None


def _longest(settings: EngineSettings, own: VllmSettings, positions: int | None) -> int | None:
    """Returns the positions of the longest prompt with the longest answer. None: as many as the model has."""
    if own.max_prompt_tokens is None:
        return positions
    wanted = own.max_prompt_tokens + settings.max_completion_tokens
    return wanted if positions is None else min(wanted, positions)


def _cache_bytes(
    settings: EngineSettings, own: VllmSettings, config: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> int | None:
    """Returns the room for keys and values in bytes; None: vLLM takes what is left of its share of the GPU's memory."""
    if own.cache_gb is not None:
        return int(own.cache_gb * 1e9)
    if device.type != "cpu":
        return None
    text: Any = config.get_text_config()
    longest = _longest(settings, own, getattr(text, "max_position_embeddings", None))
    if longest is None:
        raise UserError("this model has no limit on its positions: set --model.vllm.max-prompt-tokens")
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    of_a_position = 2 * text.num_hidden_layers * heads * width * dtype.itemsize
    blocks = settings.slots * math.ceil(longest / _BLOCK) + 2  # one is never used, one to spare
    return blocks * _BLOCK * of_a_position


@contextmanager
def _memory_folder() -> Iterator[Path]:
    """Yields a folder that is deleted afterwards; in memory where the system has such a place."""
    memory = Path("/dev/shm")  # noqa: S108 - where Linux keeps files in memory
    with tempfile.TemporaryDirectory(prefix="tba-weights-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)
