"""The whole engine on Triton's kernels: pages, chunks, a window, sampling and packing give the plain path's tokens.

In the interpreter this is the road a GPU takes, step for step; on a GPU it is that road. Only a CUDA graph needs the
GPU: in the interpreter its stand-in does the recorded step again, on the graph's own memory.
"""

from types import SimpleNamespace

import pytest
import torch
from kernel_checks import DEVICE, needs_kernel

import minserve.graphs
from minserve.config import ModelConfig, RopeConfig
from minserve.engine import LLM
from minserve.fused import FusedModel
from minserve.kernels import native
from minserve.model import Model
from minserve.prefill_decode import generate
from minserve.request import SamplingParams, seed_of


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


def graphs_in_the_interpreter(llm, monkeypatch) -> None:
    monkeypatch.setattr(minserve.graphs, "CudaGraph", Again)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    model = OnGpu(llm.model, FusedModel.of(llm.model, 0))
    llm.compute = minserve.graphs.Graphs(model, llm.cache, llm.packer, llm.sampler)
    Again.replays = 0


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
    torch.manual_seed(0)
    config = ModelConfig(**dict(
        family="llama", vocab_size=101, hidden_size=48, intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=2,
        head_dim=16, norm_eps=1e-5, rope=RopeConfig(1e4), context=128, tied=True, windows=(window,) * 2,
    ) | changes)  # fmt: skip
    model = Model.random(config, torch.float32, DEVICE)
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
