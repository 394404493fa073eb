"""The roofline's arithmetic on values known by hand, its limits, and that measuring measures."""

import math
from dataclasses import replace

import pytest
import torch

from minserve.config import SHAPES
from minserve.lab import roofline
from minserve.lab.roofline import GPUS, Machine

SMOL, LLAMA_8B, LLAMA_70B = (SHAPES[name] for name in ("smollm2-135m", "llama-3.1-8b", "llama-2-70b"))
LAPTOP = Machine("a two-core laptop", read_bandwidth=34e9, flops=418e9)


def test_smollm2_decodes_by_reading_every_weight():
    assert SMOL.num_params_read == 134_515_008
    assert roofline.weight_bytes(SMOL) == 269_030_016
    assert roofline.decode_seconds(SMOL, LAPTOP) == pytest.approx(7.9e-3, rel=0.01)
    assert roofline.decode_seconds(SMOL, LAPTOP, itemsize=1) == pytest.approx(4.0e-3, rel=0.02)


def test_smollm2_prefill_by_hand():
    assert roofline.flops_per_token(SMOL) == pytest.approx(269e6, rel=1e-3)
    # without attention: 512 tokens at 269 MFLOP each; attention adds 30 layers x 4 x 576 x (512 x 513 / 2)
    attention = 30 * 4 * 9 * 64 * 512 * 513 // 2
    assert roofline.prefill_flops(SMOL, 512) == 512 * 2 * 134_515_008 + attention
    head = 49_152 * 576
    assert roofline.prefill_flops(SMOL, 512, rows=1) == roofline.prefill_flops(SMOL, 512) - 511 * 2 * head
    assert roofline.prefill_seconds(SMOL, LAPTOP, 512) == pytest.approx(0.351, rel=0.01)


def test_one_token_of_prefill_is_one_decode_step():
    for config in (SMOL, LLAMA_8B):
        assert roofline.prefill_flops(config, 1) == roofline.decode_flops(config, 1, 1)
        assert roofline.prefill_bytes(config, 1) == roofline.decode_bytes(config, 1, 1)


def test_ridges():
    assert GPUS["H100 SXM"].ridge == pytest.approx(295, abs=1)
    assert GPUS["A100-80GB"].ridge == pytest.approx(153, abs=1)
    assert LAPTOP.ridge == pytest.approx(12.3, abs=0.1)
    assert all(gpu.source and gpu.memory > 1e9 and 100 < gpu.ridge < 450 for gpu in GPUS.values())


def test_llama_8b_on_an_h100():
    assert roofline.weight_bytes(LLAMA_8B) == pytest.approx(
        15.0e9, rel=0.01
    )  # its embedding table is not read
    assert roofline.decode_seconds(LLAMA_8B, GPUS["H100 SXM"]) == pytest.approx(4.48e-3, rel=0.01)
    assert roofline.kv_bytes(LLAMA_8B, 1000) == 131_072_000
    # bandwidth until the batch, then arithmetic
    h100 = GPUS["H100 SXM"]
    # 2 flops and 2 bytes per weight
    assert roofline.batch_at_ridge(LLAMA_8B, h100) == pytest.approx(h100.ridge)
    assert roofline.batch_at_ridge(LLAMA_8B, h100, itemsize=1) == pytest.approx(h100.ridge / 2)


def test_the_batch_at_the_ridge_is_where_the_two_roofs_meet():
    for config, machine, context in [(SMOL, LAPTOP, 100), (LLAMA_8B, GPUS["A100-80GB"], 50)]:
        batch = roofline.batch_at_ridge(config, machine, context)
        nbytes = roofline.weight_bytes(config) + batch * roofline.kv_bytes(config, context)
        assert nbytes / machine.read_bandwidth == pytest.approx(
            batch * roofline.decode_flops(config, 1, context) / machine.flops
        )


def test_a_long_context_never_leaves_the_bandwidth_roof():
    """Each sequence brings its own KV cache: at 8 flops per byte no batch size amortises that."""
    assert roofline.batch_at_ridge(LLAMA_8B, GPUS["H100 SXM"], context=8192) == math.inf
    more = [roofline.decode_seconds(LLAMA_8B, GPUS["H100 SXM"], b, 8192) / b for b in (1, 64, 1024)]
    per_sequence = roofline.kv_bytes(LLAMA_8B, 8192) / 3350e9
    assert more[0] > more[1] > more[2] > per_sequence


def test_attention_intensity_is_the_size_of_the_group():
    """4 x H x D flops per key over 2 x G x D x 2 bytes: H / G, whatever the length."""
    for config in (SMOL, LLAMA_8B, LLAMA_70B):
        value = roofline.intensity(roofline.attention_flops(config, 777), roofline.kv_bytes(config, 777))
        assert value == config.num_heads / config.num_kv_heads


def test_windows_bound_what_is_read():
    half = replace(SMOL, windows=(None,) * 15 + (100,) * 15)
    assert roofline.kv_bytes(half, 100) == roofline.kv_bytes(SMOL, 100)
    assert roofline.kv_bytes(half, 300) == roofline.kv_bytes(SMOL, 200)  # (300 + 100) / 2
    brute = sum(roofline.attention_flops(half, n) for n in range(1, 301))
    assert roofline.prefill_flops(half, 300) == 300 * roofline.flops_per_token(half) + brute


def test_machine_takes_the_later_of_the_two_roofs():
    assert LAPTOP.seconds(34e9, 1) == 1 and LAPTOP.seconds(1, 418e9) == 1 and LAPTOP.seconds(34e9, 836e9) == 2


def test_ceilings_are_measured_and_a_bound_is_the_best_sample():
    found = roofline.ceilings(dtypes=(torch.float32,), quick=True)
    assert {"copy"} < set(found.read) and all(len(s) >= 3 for s in found.read.values())
    assert found.read_bandwidth == max(x for samples in found.read.values() for x in samples) > 1e8
    machine = found.machine(torch.float32)
    assert machine.flops == max(found.matmul["float32"]) > 1e8 and machine.name == found.where
    with pytest.raises(KeyError, match="bfloat16"):
        found.machine(torch.bfloat16)


def test_buffers_are_larger_than_the_caches():
    cache, memory = roofline.last_level_cache_bytes(), roofline.memory_bytes()
    assert roofline.beyond_cache_bytes() >= min(2 * cache, memory // 4) and cache >= 1 << 18
    assert [roofline._size(text) for text in ("32K\n", "480M", "7")] == [32 << 10, 480 << 20, 7]
