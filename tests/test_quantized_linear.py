"""The fast road's quantized linears say what the definition says, whichever matmul multiplies them."""

import pytest
import torch
from torch import nn

from minserve.engine import LLM
from minserve.fused import Apart, FusedModel
from minserve.kernels import native
from minserve.prefill_decode import generate
from minserve.quantization import QuantLinear, Scheme, from_float, quantize
from minserve.quantized_linear import QuantizedLinear, alike, joined, torch_kernel
from minserve.request import SamplingParams
from minserve.weights import load

BF16 = torch.bfloat16
needs_native = pytest.mark.skipif(native.usable() is not None, reason=str(native.usable()))
SCHEMES = [Scheme(8), Scheme(8, 32, False), Scheme(4, 32), Scheme(4, 64, False), Scheme(4)]


def linear_of(N, K, scheme, dtype=BF16, bias=True, seed=0, order=False):
    torch.manual_seed(seed)
    layer = nn.Linear(K, N, bias=bias, dtype=dtype)
    made = from_float(layer, scheme)
    made.order = torch.randperm(K) if order else None
    return made


def close(got, expected):
    """Twice the rounding of 16 bits apart, of a sum of this size."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    error = (got.float() - expected.float()).abs().max()
    assert error <= (2**-7 if got.dtype == BF16 else 2**-17) * expected.float().abs().max()


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 40, 129, 200])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("there", [pytest.param(True, marks=needs_native), False])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_every_road_is_the_definition(dtype, there, scheme, rows, order):
    part = linear_of(48, 128, scheme, dtype, order=order)
    fast = QuantizedLinear(native.Native() if there else None, part)
    x = torch.randn(rows, 128, dtype=dtype)
    close(fast(x), part(x))


@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(4, 32), Scheme(4, 64, False)], ids=str)
def test_pytorchs_kernels_are_used_where_nothing_is_compiled(scheme):
    part = linear_of(48, 128, scheme)
    packed, multiply = torch_kernel(part)
    assert (packed is None) == (scheme.bits == 8)
    x = torch.randn(3, 128, dtype=BF16)
    close(multiply(x), part(x))
    assert QuantizedLinear(None, part).by_torch is not None
    assert torch_kernel(linear_of(48, 128, scheme, torch.float32)) == (None, None)
    assert torch_kernel(linear_of(48, 128, scheme, order=True)) == (None, None)
    assert torch_kernel(linear_of(48, 128, Scheme(8, 32))) == (None, None)
    assert torch_kernel(linear_of(48, 96, Scheme(4, 64))) == (None, None)  # its groups are all whole


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_joined_ones_live_on_one_copy(scheme):
    parts = [linear_of(N, 64, scheme, seed=N) for N in (16, 8, 24)]
    before = [part.dequantize() for part in parts]
    one = joined(parts)
    assert torch.equal(one.dequantize(), torch.cat(before))
    assert torch.equal(one.bias, torch.cat([part.bias for part in parts]))
    assert all(torch.equal(part.dequantize(), old) for part, old in zip(parts, before))
    for name in ("qweight", "scales", "bias"):
        storages = {getattr(part, name).untyped_storage().data_ptr() for part in (one, *parts)}
        assert len(storages) == 1


def test_only_alike_ones_are_joined():
    same = [linear_of(16, 64, Scheme(4, 32), seed=i) for i in (1, 2)]
    assert alike(same)
    assert not alike([same[0], linear_of(16, 64, Scheme(4, 64))])
    assert not alike([same[0], linear_of(16, 64, Scheme(4, 32, False))])
    assert not alike([same[0], linear_of(16, 64, Scheme(4, 32), bias=False)])
    assert not alike([same[0], linear_of(16, 64, Scheme(4, 32), order=True)])
    one, other = (linear_of(16, 64, Scheme(4, 32), order=True, seed=i) for i in (1, 2))
    assert not alike([one, other])
    other.order = one.order.clone()
    assert alike([one, other]) and torch.equal(joined([one, other]).order, one.order)


FREE = SamplingParams(max_tokens=8, ignore_eos=True)


def tokens_of(model, **options):
    prompts = [[7, 3, 250, 11], [5], list(range(150))]
    llm = LLM(model, num_pages=60, page_size=8, **options)
    return llm, [o.tokens for (o,) in llm.generate(prompts, FREE)] == [
        list(generate(model, p, FREE)) for p in prompts
    ]


@pytest.mark.parametrize("there", [pytest.param(True, marks=needs_native), False])
@pytest.mark.parametrize("case", ["one of three", "two schemes", "two orders"])
def test_linears_that_cannot_be_one_stay_apart(checkpoints, monkeypatch, case, there):
    """Such as a checkpoint that leaves some projections unquantized, or GPTQ's act-order from several runs."""
    if not there:
        monkeypatch.setattr(native, "usable", lambda: "switched off by a test")
    model = load(checkpoints("llama-biases"))
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        attention = model.layers[1].self_attn
        if case == "one of three" and i:
            continue
        scheme = Scheme(8) if case == "two schemes" and i else Scheme(4, 32)
        old = getattr(attention, name)
        order = torch.randperm(96) if case == "two orders" else None
        weight = old.weight if order is None else old.weight[:, order]
        setattr(attention, name, QuantLinear.of(*quantize(weight.detach(), scheme), scheme, old.bias, order))
    llm, equal = tokens_of(model)
    assert isinstance(llm.compute.model.layers[1][0], Apart) and not llm.compute.steps and equal


def test_act_order_keeps_a_model_whole(checkpoints):
    """One order for q, k and v: still one matmul, but its input is permuted, and no step is recorded."""
    model, scheme = load(checkpoints("llama-3")), Scheme(4, 32)
    order = torch.randperm(96)
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(model.layers[0].self_attn, name)
        made = QuantLinear.of(*quantize(old.weight.detach()[:, order], scheme), scheme, None, order)
        setattr(model.layers[0].self_attn, name, made)
    llm, equal = tokens_of(model)
    assert (
        isinstance(FusedModel.of(model, 8).layers[0][0], QuantizedLinear) and not llm.compute.steps and equal
    )
