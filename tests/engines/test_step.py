"""A step that is replayed gives what it gives eagerly; one that cannot be, or that does not, is not replayed.

On a CPU a tape stands for a CUDA graph: the operations that a step consisted of, over the tensors that it used, with
every number that was computed on the host burnt in. `tests/test_gpu.py` has the real ones.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from engine_families import EOS, FAMILIES, VOCABULARY, WINDOW, Letters, build, ragged_prompts
from talker import Talker
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tba.engines.decoding import DecodingRows
from tba.engines.slots import AttentionKind, PackedPrompts, SlotCache, slot_attention
from tba.engines.step import Graph, Step
from tba.engines.transformers import EngineSettings, TransformersEngine
from tba.generation import generate, stream
from tba.policy.lora import LoraSettings, add_adapters, is_adapter
from tba.types import Completion, Sampling, Version

SETTINGS = EngineSettings(slots=12, max_completion_tokens=14)
LENGTHS = (3, 9, 5, 12, 4)
SAMPLINGS = [
    *(Sampling(), Sampling(0.7), Sampling(0.0), Sampling(0.9, 0.8), Sampling(1.0, top_k=3)),
    *(Sampling(0.0, repetition_penalty=1.3), Sampling(0.8, 0.9, 5, 0.05, 1.2)),
]


@dataclass
class Tape(TorchDispatchMode):
    """While it is entered: the operations that are computed, and what of. `replay` computes them again."""

    operations: list[tuple[Any, list[Any], dict[str, Any], list[tuple[Any, Any, int]], Any]] = field(
        default_factory=list
    )
    made: dict[int, Tensor] = field(default_factory=dict)
    out: Tensor | None = None

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        with self:
            out = func.decompose(*args, **kwargs)
        if out is NotImplemented:
            given = [list(x) if isinstance(x, list | tuple) else x for x in args]
            items = [(holder, i, x) for holder in (given, *given) if type(holder) is list for i, x in enumerate(holder)]
            items += [(kwargs, name, x) for name, x in kwargs.items()]
            computed = [(holder, at, id(x)) for holder, at, x in items if id(x) in self.made]
            out = func(*args, **kwargs)
            self.made.update((id(x), x) for x in tree_leaves(out))
            self.operations.append((func, given, kwargs, computed, out))
        return out

    def replay(self) -> None:
        now: dict[int, Tensor] = {}
        for func, given, kwargs, computed, out in self.operations:
            for holder, at, known in computed:
                holder[at] = now[known]
            new = func(*given, **kwargs)
            if isinstance(out, Tensor):
                now[id(out)] = new
            else:
                now.update((id(x), y) for x, y in zip(tree_leaves(out), tree_leaves(new), strict=True))
        if self.out is not None:
            self.out.copy_(now[id(self.out)])


@dataclass
class Recorder:
    """Stands for `CudaGraphs`. Recording computes, where capturing does not: so rows are put back as they were."""

    rows: DecodingRows
    graphs: list[Tape] = field(default_factory=list)
    forgotten: int = 0

    def __call__(self, run: Callable[[], Any], warm_up: bool) -> tuple[Graph, Any]:
        before = [state.clone() for state in self.rows._states]
        self.rows.count_R1.zero_()  # where there is room to append
        with Tape() as tape:
            tape.out = run()
        for state, value in zip(self.rows._states, before, strict=True):
            state.copy_(value)
        self.graphs.append(tape)
        return tape, tape.out

    def forget(self) -> None:
        self.forgotten += 1


def engine_of(model: PreTrainedModel, recorded: bool, settings: EngineSettings = SETTINGS) -> TransformersEngine:
    engine = TransformersEngine(model, Letters(), settings, Version(0, 3))
    if recorded:
        engine.step._capture = Recorder(engine._rows)
    return engine


def answers(engine: TransformersEngine, sampling: Sampling = Sampling(), seed: int = 0) -> list[Completion]:  # noqa: B008
    return list(chain(*generate(engine, ragged_prompts(*LENGTHS), 6, sampling, np.random.default_rng(seed))))


def require_equal(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        # rows that are computed beside others are summed in another order: some roundings of logits of about 10
        np.testing.assert_allclose(one.log_behavior, other.log_behavior, atol=3e-5)


@pytest.mark.parametrize(
    ("family", "sampling"),
    [
        *(("llama", sampling) for sampling in SAMPLINGS),
        *((family, sampling) for family in FAMILIES if family != "llama" for sampling in (SAMPLINGS[0], SAMPLINGS[-1])),
    ],
)
def test_replayed_steps_draw_what_eager_ones_do(family: str, sampling: Sampling) -> None:
    model = build(family)
    engine = engine_of(model, recorded=True)
    require_equal(answers(engine, sampling), answers(engine_of(model, recorded=False), sampling))
    assert engine.step.is_capturing
    # 12 rows and 8, of one width; a draw of each, unless it looks at what it draws from or at what has been read
    assert len(engine.step._capture.graphs) == (2 if sampling.cuts or sampling.repetition_penalty != 1 else 4)


@dataclass
class Launched(TorchDispatchMode):
    """While it is entered: how many operations launch a kernel, views and allocations left out."""

    kernels: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        name = func._schema.name.split("::")[1]
        view = func.is_view and not func._schema.is_mutable
        self.kernels += not view and name not in ("empty", "empty_like", "new_empty", "empty_strided", "detach")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("sampling", "most"), [(Sampling(), 2), (Sampling(0.7), 2), (Sampling(0.0), 2), (Sampling(0.9, 0.8), 60)], ids=str
)
def test_a_token_step_is_two_launches_and_with_top_p_at_most_60(
    sampling: Sampling, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(build("llama"), recorded=True)
    flow = engine.flow(6, sampling, np.random.default_rng(0))
    flow.submit(ragged_prompts(*LENGTHS))
    replayed: list[Tape] = []
    monkeypatch.setattr(Tape, "replay", lambda tape: replayed.append(tape))  # a launch, whatever it consists of
    with torch.inference_mode(), slot_attention(engine.model):
        flow._fill_free_rows()
        for _ in range(3):
            replayed.clear()
            with Launched() as launched:
                engine.step(flow.cache, flow.extent, 12, sampling)
    assert 0 < len(replayed) + launched.kernels <= most


def test_a_temperature_that_no_graph_was_made_with_is_drawn_with() -> None:
    model = build("llama")
    engine, eager = engine_of(model, recorded=True), engine_of(model, recorded=False)
    for temperature in (0.7, 1.3, 0.7, 1.0):
        require_equal(answers(engine, Sampling(temperature)), answers(eager, Sampling(temperature)))
    assert len(engine.step._capture.graphs) == 2 + 2 + 2  # of the model, drawing at any temperature, and at 1


def test_conversations_are_those_of_eager_steps() -> None:
    """Rows that are set aside, taken back and told something, between steps that are replayed."""
    found = []
    for recorded in (False, True):
        engine = engine_of(build("llama"), recorded, EngineSettings(slots=5, max_completion_tokens=40))
        rng, talker = np.random.default_rng(0), Talker(late=True)
        found.append(dict(stream(engine, ragged_prompts(3, 9, 1, 9, 12, 3), 4, Sampling(0.9), rng, partner=talker)))
    for i, expected in found[0].items():
        require_equal(found[1][i], expected)


def test_a_cache_that_grows_has_other_graphs() -> None:
    engine, eager = (engine_of(build("llama"), recorded) for recorded in (True, False))
    flows = [e.flow(3, Sampling(), np.random.default_rng(0)) for e in (engine, eager)]
    found: list[dict[int, list[Completion]]] = []
    for flow in flows:
        flow.submit(ragged_prompts(3, 2, 4))
        of_flow = dict(flow.next(until_needed=False))
        flow.submit(ragged_prompts(40, 3, seed=1))  # while rows are growing
        while flow.queue.prompts:
            of_flow |= dict(flow.next(until_needed=False))
        found.append(of_flow)
    for i in range(5):
        require_equal(found[0][i], found[1][i])
    assert engine.step._capture.forgotten >= 2
    assert {width for _, width in engine.step._captured_steps} == {engine._cache.length}


def test_rows_that_hold_nothing_stay_at_their_first_position_however_long_the_others_grow() -> None:
    settings = EngineSettings(slots=8, max_completion_tokens=50)
    engine = engine_of(build("llama"), True, settings)
    generate(engine, ragged_prompts(9, 3), 4, Sampling(), np.random.default_rng(0))  # leaves rows at many positions
    rows = engine._rows
    for _ in range(3):
        generate(engine, ragged_prompts(2), 3, Sampling(0.0), np.random.default_rng(0))
        assert rows.count_R1[3:].tolist() == [[0]] * 5
        assert rows.position_R[3:].tolist() == [0] * 5


def test_loaded_weights_are_replayed_and_compared_again() -> None:
    model, other = build("llama"), build("llama", seed=1)
    engine = engine_of(model, recorded=True)
    answers(engine)
    engine.load(dict(other.state_dict()), Version(0, 4))
    assert not engine.step._is_compared
    require_equal(answers(engine), answers(engine_of(other, recorded=False)))
    assert engine.step._is_compared
    assert len(engine.step._capture.graphs) == 4  # no new ones


def test_graphs_that_give_something_else_than_the_model_are_dropped_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build("llama")
    engine = engine_of(model, recorded=True)
    answers(engine)
    with torch.no_grad():  # other weights at another place, of which graphs know nothing
        model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())
    engine.step.require_comparison()
    with caplog.at_level(logging.WARNING, logger="tba"):
        found = answers(engine)
    require_equal(found, answers(engine_of(model, recorded=False)))
    assert not engine.step.is_capturing
    (said,) = caplog.messages
    assert said.startswith("decode steps of LlamaForCausalLM are not captured as CUDA graphs: total variation 0.")
    assert engine.fault == said


def test_a_capture_that_fails_leaves_eager_steps(caplog: pytest.LogCaptureFixture) -> None:
    """At the first graph, and at the first one of a draw."""
    model = build("llama")
    expected = answers(engine_of(model, recorded=False))
    for fails in (0, 1):
        engine = engine_of(model, recorded=True)
        record = engine.step._capture

        class Failing(Recorder):
            def __call__(self, run: Callable[[], Any], warm_up: bool) -> tuple[Graph, Any]:
                if len(self.graphs) == fails:  # noqa: B023
                    raise RuntimeError("operation not permitted when stream is capturing")
                return super().__call__(run, warm_up)

        engine.step._capture = Failing(record.rows)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="tba"):
            require_equal(answers(engine), expected)
        assert not engine.step.is_capturing
        assert [m.split(": ")[1] for m in caplog.messages] == ["operation not permitted when stream is capturing"]
        require_equal(answers(engine), expected)


def positions_that_depend_on_the_longest(kind: str) -> PreTrainedModel:
    grouped = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 48}
    torch.manual_seed(0)
    scaled: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0}
    scaled["original_max_position_embeddings"] = 64
    if kind == "longrope":
        scaled |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    return LlamaForCausalLM(
        LlamaConfig(
            **grouped, num_hidden_layers=2, vocab_size=VOCABULARY, max_position_embeddings=128, eos_token_id=EOS,
            bos_token_id=0, rope_parameters=scaled,
        )
    ).eval()  # fmt: skip


def experts(implementation: str) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": implementation}
    config = Qwen3MoeConfig(**sizes, **heads, **moe, vocab_size=VOCABULARY, eos_token_id=EOS, bos_token_id=0)
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: positions_that_depend_on_the_longest("dynamic"), "_local_scalar_dense"),
        (lambda: positions_that_depend_on_the_longest("longrope"), "_local_scalar_dense"),
        (lambda: experts("eager"), "nonzero"),
    ],
    ids=["dynamic", "longrope", "experts one by one"],
)
def test_a_model_that_asks_the_device_is_never_captured(
    make: Callable[[], PreTrainedModel], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(make(), recorded=True)
    record = engine.step._capture
    with caplog.at_level(logging.WARNING, logger="tba"):
        found = answers(engine)
    require_equal(found, answers(engine_of(make(), recorded=False)))
    assert not record.graphs
    said = [record.getMessage() for record in caplog.records if record.name.startswith("tba")]
    assert [m.split(": ")[1] for m in said] == [f"its {what} makes the host wait for the device"]


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_experts_that_are_computed_together_are_captured(implementation: str) -> None:
    model = experts(implementation)
    engine = engine_of(model, recorded=True)
    require_equal(answers(engine), answers(engine_of(model, recorded=False)))
    assert engine.step.is_capturing


def test_adapters_are_captured_with_the_values_that_are_loaded_into_them() -> None:
    pytest.importorskip("peft")
    model, other = (add_adapters(build("llama"), LoraSettings(rank=2)) for _ in range(2))
    engine = engine_of(model, recorded=True)
    answers(engine)
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters() if is_adapter(n)}
    for loaded in (engine, eager := engine_of(other, recorded=False)):
        loaded.load(weights, Version(0, 4))
    require_equal(answers(engine), answers(eager))
    assert engine.step.is_capturing
    assert len(engine.step._capture.graphs) == 4


def defined(
    query_NHD: Tensor, key_KJD: Tensor, value_KJD: Tensor, query_start: Tensor, key_start: Tensor, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What torch documents of its flash kernel for sequences of one query, in float32, one after the other."""
    assert {x.dtype for x in (query_start, key_start, seqused_k)} == {torch.int32}
    assert (query_start.diff() == 1).all()
    assert int(seqused_k.max()) <= max_k
    assert (max_q, dropout_p, is_causal, return_debug_mask) == (1, 0.0, False, False)
    out = torch.empty_like(query_NHD)
    for i, (start, n) in enumerate(zip(key_start.tolist(), seqused_k.tolist(), strict=False)):
        first = 0 if window_size_left is None else max(0, n - 1 - window_size_left)
        assert window_size_right in (None, 0)
        keys, values = (x[start + first : start + n, 0].float() for x in (key_KJD, value_KJD))
        weight = (query_NHD[i].float() @ keys.T * (keys.shape[1] ** -0.5 if scale is None else scale)).softmax(-1)
        out[i] = (weight @ values).to(out.dtype)
    nothing = query_NHD.new_empty(0)
    return out, nothing, nothing, nothing, nothing


@pytest.fixture
def kernel() -> Iterator[None]:
    """The definition in the kernel's place, which is for GPUs alone."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", defined, "CPU")
    yield
    library._destroy()


def rounded(family: str) -> PreTrainedModel:
    return build(family).to(torch.bfloat16)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
def test_the_kernel_is_asked_for_what_the_bias_says(family: str) -> None:
    """Layer by layer, also with a window, grouped heads and NaN wherever a row has no key of its own."""
    model, positions = rounded(family), torch.tensor([0, 30, WINDOW - 1, 7, WINDOW, 22])
    packed = PackedPrompts([torch.arange(4)], torch.device("cpu"))
    heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
    packed.keys_LHND = packed.values_LHND = torch.zeros(2, heads, 4, 16, dtype=torch.bfloat16)
    torch.manual_seed(0)
    for window in (None, WINDOW, 31, 32, 64):
        query, key, value = (torch.randn(6, n, 1, 16).to(torch.bfloat16) for n in (4, heads, heads))
        kept = torch.randn(2, 2, 6, heads, 32, 16).to(torch.bfloat16)
        outs = []
        for flash in (False, True):
            cache = SlotCache(packed, 8, 32, flash)
            assert cache.uses_flash == flash
            if flash:
                cache.keys[:], cache.values[:] = torch.nan, torch.nan
                for row, position in enumerate(positions.tolist()):
                    cache.keys[:, row, :, :position] = kept[0, :, row, :, :position]
                    cache.values[:, row, :, :position] = kept[1, :, row, :, :position]
            else:
                cache.keys[:, :6], cache.values[:, :6] = kept
            kind = AttentionKind(0.2, window, None)
            outs.append(cache.at_positions(positions, 31).attend(1, query, key, value, kind))
        # averages of normal numbers, rounded to 8 bits on the way
        torch.testing.assert_close(outs[1], outs[0], atol=0.02, rtol=0.02)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_replayed_steps_through_the_kernel_are_eager_ones_through_it(family: str) -> None:
    model = rounded(family)
    found = []
    for recorded in (True, False):
        engine = engine_of(model, recorded)
        engine._uses_flash = True
        found.append(answers(engine))
        assert engine._cache is not None
        assert engine._cache.uses_flash
    assert [c.tokens.tolist() for c in found[0]] == [c.tokens.tolist() for c in found[1]]
    assert {width for _, width in engine.step._captured_steps} <= {engine._cache.length}


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
def test_compiled_layers_give_the_same_in_fewer_kernels_for_any_number_of_rows() -> None:
    model = build("llama")
    engine = engine_of(model, recorded=False)
    step = Step(model, engine._rows, None, compiled=True)

    def compare() -> None:
        packed = engine.prefill(ragged_prompts(9))
        cache = engine.cache(packed, 30, 0)
        cache.fill(range(12), packed, 0)
        engine._rows.position_R[:] = 9
        engine._rows.newest_R1[:, 0] = torch.arange(12)
        for n in (12, 8, 5):
            plain = step._logits(cache, n, 10)
            with step._layers_compiled():
                compiled_logits = step._logits(cache, n, 10)
            torch.testing.assert_close(compiled_logits, plain, atol=3e-5, rtol=0)
        assert "forward" not in vars(model.model.layers[0])

    torch._dynamo.utils.counters.clear()
    with (
        torch.inference_mode(),
        slot_attention(model),
        fresh_cache(),
    ):  # what was compiled before has no code to look at
        _, codes = run_and_get_code(compare)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4  # of a layer, and no new ones for other layers
    calls = "".join(code[code.index("def call(") :] for code in codes)
    assert len(re.findall(r"^\s+extern_kernels\.\w+\(", calls, re.MULTILINE)) == 7  # products
    assert len(re.findall(r"^\s+cpp_fused_\w+\(", calls, re.MULTILINE)) <= 6  # beside attention's
