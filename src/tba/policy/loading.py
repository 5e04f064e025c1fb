"""A causal language model from its files: whole, or the rows of it that one rank of a trainer holds.

Invariant: a model has the weights of its files and no others. transformers draws one that is missing at random; here
every model of every part is loaded by `pretrained`, or by `load_unfilled`, and both refuse it, as they do tensors
without a place and those of another shape.

Invariant: what a rank holds has the bits of the same rows of the whole model. It is made without memory (its parameters
on torch's meta device) and sharded; then each rank reads its own rows from the safetensors files, one parameter after
the other. So beyond its share a rank needs room for its rows of one parameter. A model whose files name or shape their
tensors otherwise (transformers converts them as it loads) is read whole by each rank.
"""

from __future__ import annotations

import importlib.util
import logging
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils import logging as transformers_logging
from transformers.utils.loading_report import LoadStateDictInfo

from tba.errors import UserError
from tba.json_input import read_json
from tba.policy.lora import is_adapter, plain_name, untied_weights
from tba.pretrained import SAFE, SAFE_MODEL, UNREADABLE, refuse_impossible_counts
from tba.sharding import is_sharded, local_part, row_range
from tba.types import is_name

log = logging.getLogger(__name__)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TRANSFORMERS_LOADS = threading.RLock()  # transformers patches its classes while it loads, for all threads


def load_model(
    path: str | Path, device: torch.device | str, dtype: torch.dtype, seed: int | None = None, four_bit: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal language model and its tokenizer from a local folder or a Hub name, in evaluation mode.

    With a `seed` the weights are drawn at random from the configuration, whatever weights are there. With `four_bit`
    the matrices of its layers are held in NF4.
    A download from the Hub shows its progress. Raises `UserError` when the model or its tokenizer is missing or
    unreadable.
    """
    with no_bars() if Path(path).is_dir() else nullcontext(), _readable_model(path):
        if four_bit:
            options = {"quantization_config": _nf4(torch.device(device), dtype), "device_map": {"": device}}
            model = pretrained(AutoModelForCausalLM, path, dtype, **options)
        elif seed is None:
            model = pretrained(AutoModelForCausalLM, path, dtype)
        else:
            with _TRANSFORMERS_LOADS, torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(read_config(path), dtype=dtype)
                keep_softcap(model)
                make_writable(model)
        tokenizer = AutoTokenizer.from_pretrained(path, **SAFE)
    return (model if four_bit else model.to(device)).eval(), tokenizer


def pretrained(kind: Any, path: str | Path, dtype: torch.dtype, headless: bool = False, **options: Any) -> Any:
    """Returns a model of an auto class with the weights of its files, and what transformers raises for files that it
    cannot read. headless: its head is about to be trained, or it has none; options: others of `from_pretrained`.

    Raises `UserError` where the files' tensors are not those of the model, or are no numbers.
    """
    file_options = {name: options.pop(name) for name in ("revision", "gguf_file") if name in options}
    config_options = {name: options.pop(name) for name in ("num_labels",) if name in options}
    config = read_config(path, **file_options, **config_options)
    with _TRANSFORMERS_LOADS, _without_report():
        model, report = kind.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **SAFE_MODEL,
            **file_options,
            **options,
        )
    _refuse_other_tensors(path, config, model, report, headless)
    _refuse_no_numbers(path, model)
    if getattr(model, "generation_config", None) is not None:
        _drop_false_ids(path, model.generation_config, config)
    keep_softcap(model)
    make_writable(model)
    return model


def refuse_other_files(path: str | Path, model: PreTrainedModel) -> None:
    """Raises `UserError` where the files' tensors are not those of the model, which may have no memory: for a program
    that loads them by itself. What is quantized or converted is left to it.
    """
    if _conversion_fault(model) is None:
        with _readable_model(path):
            _refuse_other_tensors(path, read_config(path), model, WeightFiles.of(path, model).report(model))


def _refuse_other_tensors(
    path: str | Path,
    config: PretrainedConfig,
    model: PreTrainedModel,
    report: Mapping[str, Any],
    headless: bool = False,
) -> None:
    """Raises `UserError` for tensors that are missing, have no place, or another shape by transformers' report, unless
    nothing that is used depends on them.
    """
    missing_names, unexpected_names = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    shapes = sorted((name, tuple(size), tuple(shape)) for name, size, shape in report["mismatched_keys"])
    body = getattr(model, model.base_model_prefix, model)
    if headless:  # a pooler of the body is a part of the head: nothing else reads it
        missing_names = [n for n in missing_names if _is_part(n, model, body) and "pooler" not in n.split(".")]
        unexpected_names = [name for name in unexpected_names if _is_part(name, model, body)]
        shapes = [(name, *sizes) for name, *sizes in shapes if _is_part(name, model, body)]
    text = config.get_text_config()
    if text is not config and isinstance(model.config, type(text)):  # what is beside the text model sees or hears
        unexpected_names = [name for name in unexpected_names if _is_part(name, model, body, model)]
    clauses = [
        f"{len(names)} tensor{'s are' if len(names) > 1 else ' is'} {fault} (such as {names[0]})"
        for fault, names in (("missing", missing_names), ("unknown to it", unexpected_names))
        if names
    ]
    clauses += [f"{name} is {list(size)}, not {list(shape)}" for name, size, shape in shapes[:1]]
    if clauses:
        raise UserError(
            f"the files of the model '{path}' do not hold the weights of a {type(model).__name__}: "
            f"{', '.join(clauses)}; give the whole model, as it was saved, with the config.json that belongs to it"
        )


def _refuse_no_numbers(path: str | Path, model: PreTrainedModel) -> None:
    """Raises `UserError` for a weight that holds NaN or an infinity: whatever is computed with it would, too."""
    for name, p in model.named_parameters():
        if p.dtype in _FLOATS and not p.sum(dtype=torch.float64).isfinite():  # no memory of its size is needed
            raise UserError(
                f"the weight {name} of the model '{path}' has values that are not finite (NaN or infinite): its "
                "training has diverged, or the file is damaged; give another copy or an earlier checkpoint of it"
            )


def _is_part(name: str, model: PreTrainedModel, *modules: Module) -> bool:
    """Returns whether a tensor of this name, with or without the prefix of the model's body, belongs to a module."""
    prefix = f"{model.base_model_prefix}."
    children = {child for module in modules for child, _ in module.named_children()}
    return name.startswith(prefix) or name.partition(".")[0] in children


def read_config(path: str | Path, **options: Any) -> PretrainedConfig:
    """Returns a model's configuration, without ids of special tokens that are no tokens of it; options: others of
    `from_pretrained`. What that raises is raised.
    """
    config = plain_config(path, **options)
    for part in (config, config.get_text_config()):
        _drop_false_ids(path, part, config)
    return config


def plain_config(path: str | Path, **options: Any) -> PretrainedConfig:
    """Returns a model's configuration as its file has it. What transformers raises is raised, and `UserError` for
    counts of a file that would have no end.
    """
    refuse_countless(path, options.get("revision"))
    return AutoConfig.from_pretrained(path, **SAFE, **options)


def refuse_countless(path: str | Path, revision: str | None = None) -> None:
    """Raises `UserError` where the config.json of a folder, or of a Hub's name, has more layers, heads or experts than
    any model: to make the configuration of it may not end. Of a name it is fetched; what is not there is passed over.
    """
    causes = ("missing_entries", "connection_errors", "gated_repo")
    options: dict[str, Any] = {f"_raise_exceptions_for_{cause}": False for cause in causes}
    with suppress(OSError, ValueError):  # whoever loads it says why
        if (file := cached_file(path, CONFIG_NAME, revision=revision, **options)) is not None:
            refuse_impossible_counts(Path(file).parent)


def _drop_false_ids(path: str | Path, part: PretrainedConfig | GenerationConfig, config: PretrainedConfig) -> None:
    """Drops ids of special tokens that are no tokens of the model. Some files have -1 for no token, which as an
    index would be the last token of the vocabulary.
    """
    vocabulary = getattr(config.get_text_config(), "vocab_size", sys.maxsize)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value: Any = getattr(part, name, None)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        tokens = [i for i in ids if type(i) is int and 0 <= i < vocabulary]
        if tokens != ids:
            setattr(part, name, tokens if isinstance(value, list) and tokens else next(iter(tokens), None))
            log.warning("%s of %s is %r: what is no token of 0 to %d is left out", name, path, value, vocabulary - 1)


def keep_softcap(model: PreTrainedModel) -> None:
    """Sets a model that caps its attention's scores (Gemma 2) to eager attention, also in the configuration that is
    saved: transformers' usual attention, sdpa, leaves the cap out silently.
    """
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
        model.config.attn_implementation = "eager"  # in config.json, where `from_pretrained` looks


def make_writable(model: PreTrainedModel) -> None:
    """Corrects a model's generation config where transformers would refuse to write it (a temperature without
    `do_sample`), which it would do only when the model is saved, after the training.
    """
    config = getattr(model, "generation_config", None)  # a model that generates has one
    if config is None or _is_valid(config):
        return
    config.do_sample = True
    if not _is_valid(config):
        ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = GenerationConfig(**ids)


def _is_valid(config: GenerationConfig) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def _nf4(device: torch.device, dtype: torch.dtype) -> Any:
    """Returns how bitsandbytes holds matrices in 4 bits, and computes with them in `dtype`."""
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--model.dtype 4-bit is for CPUs and CUDA, but the model's device is {device.type}")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("--model.dtype 4-bit needs the library bitsandbytes: pip install -e '.[four-bit]'")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a model: where the weights of each name are."""

    places: Mapping[str, tuple[Path, str]]  # by the model's own name: a file, and the name there

    @classmethod
    def of(cls, path: str | Path, model: PreTrainedModel) -> WeightFiles:
        """Finds the files in a folder, or under a Hub name, with the names that transformers gives their tensors."""
        renamings = get_model_conversion_mapping(model)
        state, places = model.state_dict(), {}
        for file in _files(path):
            with safetensors.safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    name, _ = rename_source_key(key, renamings, [], model.base_model_prefix, state)
                    places[name] = file, key
        return cls(places)

    def report(self, model: PreTrainedModel) -> dict[str, Any]:
        """Returns what transformers would report of loading them: which parameters are missing or have another shape
        (there, in the model), and which names the model does not have, without those that it passes over.
        """
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        info = LoadStateDictInfo(
            shapes.keys() - self.places.keys(),
            self.places.keys() - model.state_dict().keys(),
            {(n, size, shape) for n, shape in shapes.items() if n in self.places and (size := self._shape(n)) != shape},
            *([], {}, set()),
        )
        model._adjust_missing_and_unexpected_keys(info)
        return dict(info.to_dict())

    def _shape(self, name: str) -> tuple[int, ...]:
        file, key = self.places[name]
        with safetensors.safe_open(file, framework="pt") as tensors:
            return tuple(tensors.get_slice(key).get_shape())

    def copy_rows(self, name: str, begin: int, end: int, target: Tensor) -> None:
        """Copies rows `begin` to `end` of a tensor (a scalar: all of it). The file is open meanwhile, and no longer:
        the pages of it that were read count as memory of this process while it is.
        """
        file, key = self.places[name]
        with safetensors.safe_open(file, framework="pt") as tensors, torch.no_grad():
            target.copy_(tensors.get_slice(key)[begin:end] if target.ndim else tensors.get_tensor(key))


def _files(path: str | Path) -> list[Path]:
    """Returns the safetensors files of a model. Raises what transformers does where there are none."""
    single_file = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if single_file is not None:
        return [Path(single_file)]
    index = Path(str(cached_file(path, SAFE_WEIGHTS_INDEX_NAME)))
    names = set(read_json(index, "give another model", weight_map=dict[str, str])["weight_map"].values())
    return [Path(str(cached_file(path, name))) for name in sorted(names) if is_name(name)]


def load_unfilled(path: str | Path, dtype: torch.dtype) -> tuple[PreTrainedModel, WeightFiles | None]:
    """Returns a model whose parameters are on the meta device, and the files from which `fill` gives it its weights.

    None in the place of the files: they do not hold the parameters as they are, and the model is loaded, whole.
    """
    with _readable_model(path):
        with _TRANSFORMERS_LOADS, _parameters_without_memory():
            config = read_config(path)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        keep_softcap(model)
        make_writable(model)
        if (fault := _conversion_fault(model)) is None:
            files = WeightFiles.of(path, model)
            report = files.report(model)
            names = [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]
            if not names:
                _refuse_other_tensors(path, config, model, report)
                return model, files
            fault = f"its files do not hold {min(names)} as it is in the model"
        model = pretrained(AutoModelForCausalLM, path, dtype).eval()
        log.warning("each rank reads all of %s: %s", path, fault)
        return model, None


def fill_weights(model: PreTrainedModel, wrapper: Module, files: WeightFiles, device: torch.device | str) -> None:
    """Gives the model the memory of its parameters on `device`, and its weights from the files: this rank's rows of
    those that are sharded. Adapters stay as they are; `wrapper` is the module that was sharded, which has the model in
    it.
    """
    wrapper._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for name, tensor in untied_weights(model).items():
        if is_adapter(name) or plain_name(name) not in files.places:
            continue  # or a buffer that the files do not have: it is what the model's own code made it
        begin, end = 0, len(tensor) if tensor.ndim else 0
        if is_sharded(tensor):
            begin, end = row_range(end, tensor.device_mesh.get_local_rank(), tensor.device_mesh.size())
        files.copy_rows(plain_name(name), begin, end, local_part(tensor))


def _conversion_fault(model: PreTrainedModel) -> str | None:
    """Returns why a model's weights are not in its files as they are, as far as its kind tells; None: they may be."""
    if getattr(model.config, "quantization_config", None) is not None:
        return "its files are quantized"
    if any(isinstance(transform, WeightConverter) for transform in get_model_conversion_mapping(model)):
        return "transformers converts the weights of its kind as it loads them"
    return None


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Moves parameters of modules that are made within the block to the meta device; buffers, which no file has, are
    computed as ever.
    """
    register: Callable[..., None] = Module.register_parameter

    def without_memory(module: Module, name: str, parameter: Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one that is there already may be tied
            parameter = Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    Module.register_parameter = without_memory  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def _without_report() -> Iterator[None]:
    """Keeps transformers from logging within the block which tensors do not fit: our own error says it."""
    logger = logging.getLogger("transformers.modeling_utils")

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_error)  # its level would change what it checks
    try:
        yield
    finally:
        logger.removeFilter(is_error)


@contextmanager
def no_bars() -> Iterator[None]:
    """Keeps transformers from drawing progress bars within the block: reading and writing a folder takes a moment."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


@contextmanager
def readable(problem: str, remedy: str) -> Iterator[None]:
    """Turns what transformers raises within the block for bad files into a `UserError`: problem (reason): remedy."""
    try:
        yield
    except (*UNREADABLE, NotImplementedError, struct.error) as error:  # the last two of GGUF files
        if isinstance(error, ImportError):  # of a package that unpacks quantized weights
            remedy = "install what is missing, or give a model whose weights are not quantized"
        reason, _, details = str(error).strip().partition("\n")
        if reason.endswith(":"):  # of a field, with all that was tried of it
            reason += f" {details.strip().partition(chr(10))[0].partition('. Errors: ')[0]}"
        raise UserError(f"{problem} ({reason}): {remedy}") from error


def _readable_model(path: str | Path) -> AbstractContextManager[None]:
    return readable(
        f"cannot load a causal language model and its tokenizer from '{path}'",
        "give a folder that holds config.json, *.safetensors and tokenizer files, or a name on the Hugging Face Hub",
    )
