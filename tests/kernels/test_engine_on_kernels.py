"""The whole engine on Triton's kernels: pages, chunks, a window, sampling and packing give the plain path's tokens.

With quantized weights and a quantized cache: the tokens of weights written out as numbers, and of rounded keys.

In the interpreter this is the road a GPU takes, step for step; on a GPU it is that road. Only a CUDA graph needs the
GPU: in the interpreter its stand-in does the recorded step again, on the graph's own memory.
"""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from kernel_checks import DEVICE, needs_kernel
from quantized_oracle import alone
from torch import nn

import minserve.graphs
from minserve.calibration import quantize_model
from minserve.config import ModelConfig, RopeConfig
from minserve.engine import LLM
from minserve.fused import FusedModel
from minserve.kernels import native, packed_matmul
from minserve.model import Model
from minserve.prefill_decode import generate
from minserve.quantization import QuantLinear, Scheme
from minserve.request import Draft, SamplingParams, seed_of
from minserve.speculation import Drafter


class Again:
    """The step once more, on the memory it was recorded with."""

    replays = 0

    def __init__(self, pool, run, ops):
        self.run, self.results = run, run()

    def __call__(self):
        Again.replays += 1
        with torch.inference_mode():
            for mine, new in zip(self.results, self.run(), strict=True):
                mine.copy_(new)
        return self.results


class OnGpu:
    """A model that Graphs takes for one on a GPU."""

    def __init__(self, model, fused):
        self.real, self._fused, self.device = model, fused, SimpleNamespace(type="cuda")

    def __getattr__(self, name):
        return getattr(self.real, name)


def graphs_in_the_interpreter(llm, monkeypatch, *drafts) -> None:
    monkeypatch.setattr(minserve.graphs, "CudaGraph", Again)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    model = OnGpu(llm.model, FusedModel.of(llm.model, 0))
    llm.compute = minserve.graphs.Graphs(model, llm.cache, llm.packer, llm.sampler, False, *drafts)
    Again.replays = 0


def tiny(**changes) -> Model:
    torch.manual_seed(0)
    config = ModelConfig(**dict(
        family="llama", vocab_size=101, hidden_size=48, intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=2,
        head_dim=16, norm_eps=1e-5, rope=RopeConfig(1e4), context=128, tied=True,
    ) | changes)  # fmt: skip
    return Model.random(config, torch.float32, DEVICE)


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize(
    "step, window, changes",
    [
        ("plain", 6, {}),
        ("fused", None, dict(qk_norm=True, qkv_bias=True, tied=False)),
        ("graph", 6, dict(qk_norm=True)),
    ],
    ids=["plain", "fused", "graph"],
)
def test_the_engine_gives_the_plain_paths_tokens(monkeypatch, step, window, changes):
    monkeypatch.setattr(native, "usable", lambda: "this is about Triton's kernels")
    model = tiny(windows=(window,) * 2, **changes)
    system = [5, 17, 9, 60, 2, 2, 33, 8, 71]
    prompts = [[*system, 4], [*system, 90, 12, 7, 55, 1, 3], [44], [*system, 4, 4, 4]]
    params = [
        SamplingParams(max_tokens=5, ignore_eos=True),
        SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.9, top_k=20, seed=3, n=2),
        SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.1, top_p=0.8, seed=4),
        SamplingParams(max_tokens=3, ignore_eos=True, presence_penalty=1.0),
    ]
    limits = dict(num_pages=24, page_size=4, token_budget=9, chunk=6, max_running=4)
    llm = LLM(
        model,
        step="fused" if step == "graph" and DEVICE == "cpu" else step,
        overlap=step != "plain",
        **limits,
    )
    if step == "graph" and DEVICE == "cpu":
        graphs_in_the_interpreter(llm, monkeypatch)
    for prompt, its, outputs in zip(prompts, params, llm.generate(prompts, params)):
        for output in outputs:
            one = SamplingParams(**{**its.__dict__, "n": 1, "seed": seed_of(its.seed or 0, output.index)})
            assert output.error is None and output.tokens == list(generate(model, prompt, one))
    assert llm.scheduler.hit_tokens > 0
    assert step != "graph" or DEVICE != "cpu" or Again.replays > 2
    llm.pages.check([])


class Guesser(Drafter):
    """Proposes what a book of answers says, spoilt here and there: chains, or trees with a wrong sibling."""

    name, k = "guesser", 5

    def __init__(self, answers: dict[tuple, list[int]], branches: bool):
        self.answers, self.branches = answers, branches

    def propose(self, plan):
        return [self.guess(r).cut(r.granted) if r.granted else None for r, _ in plan]

    def guess(self, r) -> Draft:
        answer, made = self.answers[tuple(r.prompt), r.seed], len(r.tokens) - len(r.prompt)
        tokens = [*answer[made:], 0, 0, 0, 0, 0][:4]
        if made % 3 == 1:
            tokens[1] = (tokens[1] + 1) % 101
        if self.branches:
            return Draft([(tokens[0] + 1) % 101, *tokens], [-1, -1, 1, 2, 3])
        return Draft(tokens)


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize(
    "step, branches, kind", [("graph", True, None), ("fused", True, "int8"), ("plain", False, "int4")]
)
def test_with_drafts_it_gives_the_plain_paths_tokens(monkeypatch, step, branches, kind):
    monkeypatch.setattr(native, "usable", lambda: "this is about Triton's kernels")
    model = tiny()
    prompts = [[5, 17, 9, 60, 2, 2, 33, 8, 71, 4], [44], [5, 17, 9, 60, 2, 2, 33, 8, 71, 90, 12]]
    params = [
        SamplingParams(max_tokens=7, ignore_eos=True, seed=1),
        SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.9, top_k=20, seed=3),
        SamplingParams(
            max_tokens=6, ignore_eos=True, temperature=1.1, top_p=0.8, seed=4, presence_penalty=1.0
        ),
    ]
    expected = [
        alone(model, prompt, its, kind, 8) if kind else list(generate(model, prompt, its))
        for prompt, its in zip(prompts, params)
    ]
    book = {(tuple(p), its.seed): answer for p, its, answer in zip(prompts, params, expected)}
    limits = dict(num_pages=24, page_size=8, token_budget=24, chunk=6, max_running=3)
    in_turn = "fused" if step == "graph" and DEVICE == "cpu" else step
    llm = LLM(
        model, step=in_turn, drafter=Guesser(book, branches), adaptive=False, kv_cache_dtype=kind, **limits
    )
    if step == "graph" and DEVICE == "cpu":
        graphs_in_the_interpreter(llm, monkeypatch, 5, branches)
    for answer, (output,) in zip(expected, llm.generate(prompts, params)):
        assert output.error is None and output.tokens == answer
    rows = [row for record in llm.log for row in record.rows]
    assert llm.speculation.on and sum(row.kept for row in rows) > 4
    assert any(row.kept < row.drafted for row in rows)
    assert step != "graph" or DEVICE != "cpu" or Again.replays > 2
    llm.pages.check([])


def written_out(model: Model) -> Model:
    """A copy on a CPU whose linears hold their weights as numbers."""
    model = deepcopy(model).cpu()
    for name, part in list(model.named_modules()):
        if isinstance(part, QuantLinear):
            linear = nn.Linear(part.in_features, part.out_features, bias=part.bias is not None)
            linear.weight, linear.bias = nn.Parameter(part.dequantize(), requires_grad=False), part.bias
            model.set_submodule(name, linear)
    return model


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, scheme, step, changes",
    [
        ("int4", Scheme(4, 16, symmetric=False), "graph", dict(windows=(6, None), qkv_bias=True)),
        ("int8", Scheme(8), "plain", dict(windows=(6,), num_layers=1, qk_norm=True, tied=False)),
    ],
    ids=["int4", "int8"],
)
def test_quantized_it_gives_the_tokens_of_the_definitions(monkeypatch, kind, scheme, step, changes):
    monkeypatch.setattr(native, "usable", lambda: "this is about Triton's kernels")
    if DEVICE == "cpu":  # an interpreter takes its time per program, not per row
        tiles = packed_matmul.gemv_tiles
        monkeypatch.setattr(packed_matmul, "gemv_tiles", lambda *a: tiles(*a) | dict(ROWS=32))
    model = tiny(**dict(hidden_size=32, num_heads=4, vocab_size=93) | changes)
    for layer in model.layers:  # else tokens would hardly depend on what is attended to
        layer.self_attn.v_proj.weight.mul_(8)
        layer.self_attn.o_proj.weight.mul_(8)
        layer.self_attn.q_proj.weight.mul_(30)
    quantize_model(model, "rtn", scheme, progress=False)
    prompts = [[5, 17, 9, 60, 2, 2, 33, 8, 71, 4], [44], [5, 17, 9, 60, 2, 2, 33, 8, 71, 90, 12]]
    params = [SamplingParams(max_tokens=n, temperature=0.05, seed=n, ignore_eos=True) for n in (2, 6, 2)]
    limits = dict(num_pages=24, page_size=4, token_budget=9, chunk=6, max_running=2)
    in_turn = "fused" if step == "graph" and DEVICE == "cpu" else step
    llm = LLM(model, step=in_turn, overlap=step != "plain", kv_cache_dtype=kind, **limits)
    if step == "graph" and DEVICE == "cpu":
        graphs_in_the_interpreter(llm, monkeypatch)
    definitions = written_out(model)
    for prompt, its, (output,) in zip(prompts, params, llm.generate(prompts, params)):
        assert output.error is None and output.tokens == alone(definitions, prompt, its, kind, 4)
    assert step != "graph" or DEVICE != "cpu" or Again.replays > 1
    assert llm.scheduler.hit_tokens > 0
    llm.pages.check([])
