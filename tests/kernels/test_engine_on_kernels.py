"""The whole engine on Triton's kernels: pages, chunks, a window, sampling and packing give the plain path's tokens.

In the interpreter this is the road a GPU takes, step for step; on a GPU it is that road.
"""

import pytest
import torch
from kernel_checks import DEVICE, needs_kernel

from minserve.config import ModelConfig, RopeConfig
from minserve.engine import LLM
from minserve.model import Model
from minserve.prefill_decode import generate
from minserve.request import SamplingParams, seed_of


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("window, sinks", [(None, 0), (6, 0)])
def test_the_engine_gives_the_plain_paths_tokens(window, sinks):
    torch.manual_seed(0)
    config = ModelConfig(
        family="llama", vocab_size=101, hidden_size=48, intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=2,
        head_dim=16, norm_eps=1e-5, rope=RopeConfig(1e4), context=128, tied=True, windows=(window,) * 2,
    )  # fmt: skip
    model = Model.random(config, torch.float32, DEVICE)
    system = [5, 17, 9, 60, 2, 2, 33, 8, 71]
    prompts = [[*system, 4], [*system, 90, 12, 7, 55, 1, 3], [44], [*system, 4, 4, 4]]
    params = [
        SamplingParams(max_tokens=5, ignore_eos=True),
        SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.9, top_k=20, seed=3, n=2),
        SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.1, top_p=0.8, seed=4),
        SamplingParams(max_tokens=3, ignore_eos=True, presence_penalty=1.0),
    ]
    llm = LLM(model, num_pages=24, page_size=4, token_budget=9, chunk=6, max_running=4, sinks=sinks)
    for prompt, its, outputs in zip(prompts, params, llm.generate(prompts, params)):
        for output in outputs:
            one = SamplingParams(**{**its.__dict__, "n": 1, "seed": seed_of(its.seed or 0, output.index)})
            assert output.error is None and output.tokens == list(generate(model, prompt, one))
    assert llm.scheduler.hit_tokens > 0
    llm.pages.check([])
