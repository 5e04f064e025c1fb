"""Finds what a model's path stands for: a folder, a name on the Hub, a GGUF file, or an adapter as PEFT saves it.

Invariant: what is loaded is a folder (or a name) of whole weights. A GGUF file and an adapter become one, once, in the
cache: an adapter is merged into its base, in float32, so that engine, policy and reference begin with base + adapter
like with any other model, whatever adapters they get. Nothing that comes with an adapter is executed or unpickled.
"""

from __future__ import annotations

import hashlib
import socket
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import safetensors
import torch
from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tba.errors import UserError
from tba.json_input import read_json
from tba.models.gguf import SUFFIX, as_plain_model, convert_once, save_once
from tba.policy.loading import make_writable, no_bars, pretrained, readable, refuse_countless
from tba.policy.lora import CONFIG, WEIGHTS
from tba.pretrained import SAFE
from tba.weights.atomic_dir import cache_folder

_FORMAT = b"merged 1"  # raised when the same adapter and base are to give another folder
_OF_ADAPTER = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
_CONNECT_SECONDS = 5.0  # seconds to reach the Hub


def refuse_missing_model(path: str) -> None:
    """Raises `UserError` for a folder that is not there (it would be looked for on the Hub as OWNER/NAME), and for a
    name on a Hub that cannot be reached.
    """
    if "@" in path and not Path(path).exists():  # a password in a URL is not to be repeated
        raise UserError(
            "the model's path has an @, but no folder here nor a name on the Hub has it, nor is a URL taken: give the "
            "folder of a model or of a run, or a name on the Hub"
        )
    parts = Path(path).parts
    has_parent = len(parts) > 2 or (len(parts) == 2 and Path(parts[0]).is_dir())
    if (has_parent or path.startswith((".", "/", "~"))) and not Path(path).exists():
        raise UserError(f"there is no folder {path}: give the folder of a model or of a run, or a name on the Hub")
    if not Path(path).exists():
        _require_hub(path)
    if not path.endswith(SUFFIX):
        refuse_countless(path)


def _require_hub(name: str) -> None:
    """Raises `UserError` when a model is not in the Hub's cache here and the Hub cannot be reached.

    The library itself would try for most of a minute. Behind a proxy nothing can be known beforehand.
    """
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", CONFIG)) or getproxies():
        return
    host = urlsplit(constants.ENDPOINT)
    try:
        address = (str(host.hostname), host.port or (80 if host.scheme == "http" else 443))
        socket.create_connection(address, _CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"{name!r} is no folder here and not in the cache of the Hub, and {host.hostname} cannot be reached "
            f"({error}): give the folder of a model, or connect to a network"
        ) from error


def resolve_model_path(path: str, log: Callable[[str], None]) -> str:
    """Returns the folder or the Hub's name of the whole weights that `path` stands for, made now if need be.

    It is absolute: the model is read again later, from whatever directory a user's code has changed to. Raises
    `UserError` for what is not there or cannot be read.
    """
    refuse_missing_model(path)
    if path.endswith(SUFFIX):
        return str(convert_once(Path(path), log))
    folder = adapter_at(path)
    if folder is None:
        return str(Path(path).absolute()) if Path(path).exists() else path
    return str(_merge_once(folder, log))


def merged_if_adapter(path: str, log: Callable[[str], None]) -> str:
    """Returns the path itself; of an adapter's folder the path of the whole weights."""
    return resolve_model_path(path, log) if (Path(path) / CONFIG).is_file() else path


def adapter_at(path: str) -> Path | None:
    """Returns the folder of the adapter that a path or a Hub's name stands for; None for anything else."""
    if Path(path).exists():
        return Path(path) if (Path(path) / CONFIG).is_file() else None
    cached_config = try_to_load_from_cache(path, CONFIG)
    is_cached = cached_config is not None or isinstance(try_to_load_from_cache(path, "config.json"), str)
    if is_cached and not isinstance(cached_config, str):
        return None
    try:  # of what else there is, nothing is fetched
        if not (Path(snapshot_download(path, allow_patterns=[CONFIG])) / CONFIG).is_file():
            return None
        return Path(snapshot_download(path, allow_patterns=list(_OF_ADAPTER)))
    except (OSError, ValueError):
        return None if cached_config is None else Path(str(cached_config)).parent


def _merge_once(folder: Path, log: Callable[[str], None]) -> Path:
    optional = str | None
    fields = {"peft_type": str, "base_model_name_or_path": optional, "task_type": optional, "revision": optional}
    config = read_json(folder / CONFIG, "give another model", fields)
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise UserError(f"the adapter {folder} is for {config['task_type']}, no language model: give another one")
    if not (folder / WEIGHTS).is_file():
        raise UserError(
            f"the adapter {folder} has no {WEIGHTS}: save it by a newer peft, whose `save_pretrained` writes that file"
        )
    base = _base(folder, config.get("base_model_name_or_path"), log)
    revision = config.get("revision") if not Path(base).exists() else None
    key, cache = _key(folder, base, revision), cache_folder("merged")
    if not (cache / key).is_dir():
        log(f"the adapter {folder} is merged into its base, {base}, once, in float32: {cache / key}")
    with no_bars() if Path(base).is_dir() else nullcontext():  # a download shows its progress
        return save_once(cache, key, lambda out: _merge(folder, base, revision, out))


def _base(folder: Path, name: str | None, log: Callable[[str], None]) -> str:
    """Returns where the whole weights of an adapter's base are: as the adapter names it, or beside the adapter."""
    remedy = f"put the base there, or write its folder into base_model_name_or_path of {folder / CONFIG}"
    if not name:
        raise UserError(f"the adapter {folder} does not name its base: {remedy}")
    sibling = folder / name
    base = str(sibling) if not Path(name).exists() and sibling.exists() else name
    if Path(base).exists() and Path(base).resolve() == folder.resolve():
        raise UserError(f"the adapter {folder} names itself as its base: {remedy}")
    try:
        return resolve_model_path(base, log)
    except UserError as error:
        raise UserError(f"the base {name} of the adapter {folder} cannot be had ({error}): {remedy}") from error


def _key(folder: Path, base: str, revision: str | None) -> str:
    """Returns 32 hex digits of the adapter's files, and of which files its base has (not of their contents)."""
    digest = hashlib.blake2b(_FORMAT, digest_size=16)
    for file in sorted(f for pattern in _OF_ADAPTER for f in folder.glob(pattern)):
        with file.open("rb") as stream:
            digest.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    digest.update(f"{base if not Path(base).exists() else Path(base).resolve()} {revision}".encode())
    config = try_to_load_from_cache(base, "config.json", revision=revision) if not Path(base).is_dir() else None
    files = Path(base) if Path(base).is_dir() else Path(config).parent if isinstance(config, str) else None
    for file in sorted(files.glob("*.*")) if files is not None else ():
        if file.suffix in (".json", ".safetensors", ".jinja", ".txt", ".model"):
            stat = file.stat()
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _merge(folder: Path, base: str, revision: str | None, out: Path) -> None:
    """Writes the base with the adapter merged into it, in float32, and the adapter's tokenizer, else its base's."""
    try:
        from peft import PeftConfig, PeftModel
    except ModuleNotFoundError as error:
        raise UserError("to read an adapter, install the library peft: pip install 'tba-rl[lora]'") from error
    remedy = "give another adapter, or its own base, not quantized"
    with readable(f"the adapter {folder} cannot be put on its base {base}", remedy):
        options: dict[str, Any] = {"revision": revision} if revision else {}
        model = pretrained(AutoModelForCausalLM, base, torch.float32, **options)
        if is_quantized := getattr(model.config, "quantization_config", None) is not None:
            model = model.dequantize().float()
        has_tokenizer = any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json"))
        source, source_options = (folder, {}) if has_tokenizer else (base, options)
        tokenizer = AutoTokenizer.from_pretrained(source, **SAFE, **source_options)
        _resize(model, folder / WEIGHTS)
        with warnings.catch_warnings(action="ignore"):  # what they say of keys is an error below
            config = PeftConfig.from_pretrained(folder)
            config.inference_mode = True
            if config.is_prompt_learning or config.is_adaption_prompt:
                raise ValueError(f"the kind {config.peft_type.value} cannot be merged; LoRA can")
            adapter_model = PeftModel(model, config)
            report = adapter_model.load_adapter(folder, "default", torch_device="cpu")
    copies = [name for name in report.unexpected_keys if ".modules_to_save." in name]  # with save_embedding_layers
    if names := [*report.missing_keys, *{*report.unexpected_keys}.difference(copies)]:
        raise UserError(
            f"the adapter {folder} does not fit its base {base}: {len(names)} weights have no counterpart, such as "
            f"{names[0]}; give the base that it was trained on"
        )
    problem = f"the adapter {folder} cannot be merged into its base"
    with readable(problem, "give another one"), warnings.catch_warnings(action="ignore"):
        _untie(adapter_model.base_model.model)
        merged_model = adapter_model.merge_and_unload().eval()
        _record_whether_tied(merged_model)
        merged_model = as_plain_model(merged_model) if is_quantized else merged_model
    make_writable(merged_model)
    try:
        merged_model.save_pretrained(out)
    except RuntimeError as error:  # such as layers that are copies of others
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{problem} ({reason}): give another one") from error
    tokenizer.save_pretrained(out)


def _resize(model: PreTrainedModel, weights: Path) -> None:
    """Give the model as many rows of embeddings as the adapter's file has, if it has any."""
    with safetensors.safe_open(weights, framework="pt") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in set(tensors.keys())}
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        name = next((name for name, module in model.named_modules() if module is layer), "")
        for saved_name in (f"base_model.model.{name}.weight", f"base_model.model.{name}.base_layer.weight"):
            if saved_name in shapes and shapes[saved_name][0] != len(layer.weight):
                model.resize_token_embeddings(shapes[saved_name][0], mean_resizing=False)


def _untie(model: Any) -> None:
    """Give the head a copy of a matrix that it shares with the embeddings, where the adapter is of one of the two:
    otherwise merging into one would change both.
    """
    wrapped_layers = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings, head = map(_base_layer, wrapped_layers)
    if head is not None and head.weight is embeddings.weight and wrapped_layers != (embeddings, head):
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _record_whether_tied(model: PreTrainedModel) -> None:
    """Record in the configuration when head and embeddings do not share a matrix."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight.data_ptr() != embeddings.weight.data_ptr():
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def _base_layer(layer: Any) -> Any:
    """Returns the layer of the base that PEFT has wrapped."""
    while (inner := getattr(layer, "base_layer", getattr(layer, "original_module", None))) is not None:
        layer = inner
    return layer
