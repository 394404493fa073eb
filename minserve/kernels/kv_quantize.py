"""Keys and values in 8 or 4 bits: how they are rounded, where they are put, how they are read back.

8 bits   int8, fp8 (e4m3): every token and head has a scale of its own, so a token is written as it comes.
             scale = max |x| / 127 (fp8: / 448),  q = x / scale rounded to the nearest, ties to even;  x ~ q * scale
4 bits   16 levels between the least and the largest:  x ~ minimum + n * scale,  n = 0..15. Some channels of keys are
         large in every token, so keys share their range per channel, over the tokens of a page; values per
         token and head. A page is therefore sealed when it is full; until then it stays as it is (`fresh`).

Rows that are constant lose nothing, rows of zeros become zeros. A row with a NaN has a scale that is NaN: what went
wrong stays visible.

Shapes
    k, v                    [T, G, D]      T tokens, G key/value heads, D channels; tokens may be strided
    k_cache, v_cache        [N, G, D]      N slots of int8 or float8_e4m3fn, contiguous, written in place
    k_scales, v_scales      [N, G] fp32
    slots                   [T] int64      where each token goes, no slot twice; -1 is nowhere (padding)
    fresh_k, fresh_v        [Z, G, D]      contiguous; page i of a call is tokens starts[i] : starts[i] + S
    starts, pages           [n] int64, [n] int32 or int64       pages[i] is where it goes, no page twice; -1: skip
    k4, v4                  [P, S, G, D/2] uint8    channel d in the low nibble, channel d + D/2 in the high one
    k_affine                [P, 2, G, D] fp16       scale, minimum of each channel
    v_affine                [P, S, G, 2] fp16       scale, minimum of each token and head

Cost     no flops to speak of. 8 bits: 2 * T * G * D * (itemsize + 1) bytes, and 8 * T * G of scales.
         Memory per token, in numbers: 2 G D at 16 bits are 2 G (D + 4) bytes at 8; 2 G (D/2 + 2 D / S + 2) at 4.
Trap     4 bits: n is computed from scale and minimum as fp16 holds them, or the ends of the range miss their levels.
Sources  KIVI, Liu et al. 2024 (arXiv:2402.02750): keys per channel, values per token, a recent part in full.
Story    notebooks/10_smaller_kv_cache.ipynb
"""

import torch

from minserve.kernels import on_triton, tl, triton
from minserve.kernels.quantized_check import LARGEST, check_seal, check_write

HALF_MAX = 65504.0  # the largest fp16


# ---------------------------------------------------------------- the definitions: 8 bits
def quantize_rows(x, dtype=torch.int8):
    """(q [.., D] of dtype, scale [..] fp32) of rows x [.., D]."""
    x = x.float()
    scale = x.abs().amax(-1) / LARGEST[dtype]  # NaN if the row has one
    sound = ((scale > 0) & scale.isfinite())[..., None]
    q = torch.where(sound, x / torch.where(sound, scale[..., None], 1.0), 0.0)
    q = q.clamp(-LARGEST[dtype], LARGEST[dtype])  # a scale that underflows is rounded, too
    return (q.round() if dtype is torch.int8 else q).to(dtype), scale


def dequantize_rows(q, scale):
    return q.float() * scale[..., None]


def kv_write_scaled_reference(k, v, k_cache, v_cache, k_scales, v_scales, slots) -> None:
    live = slots >= 0  # [T]
    for x, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        q, scales[slots[live]] = quantize_rows(x[live], cache.dtype)
        cache.view(torch.uint8)[slots[live]] = q.view(torch.uint8)


def read_scaled(cache, scales, slots):
    """[.., G, D] fp32: what lies in the given slots [..] of a cache [N, G, D]."""
    return dequantize_rows(cache.view(torch.uint8)[slots].view(cache.dtype), scales[slots])


# ---------------------------------------------------------------- the definitions: 4 bits
def quantize_range(x, dim: int):
    """(n uint8 like x, scale fp16, minimum fp16): 16 levels from the least to the largest along dim."""
    x = x.float()
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale, minimum = (y.clamp(-HALF_MAX, HALF_MAX).half() for y in ((high - low) / 15, low))
    sound = scale > 0
    n = (x - minimum.float()) / torch.where(sound, scale, 1).float()
    return torch.where(sound, n.clamp(0, 15).round(), 0).byte(), scale, minimum


def pack_halves(n):
    low, high = n.chunk(2, -1)
    return low | high << 4


def unpack_halves(packed):
    return torch.cat((packed & 15, packed >> 4), -1)


def seal_reference(fresh_k, fresh_v, starts, pages, k4, v4, k_affine, v_affine) -> None:
    live = pages >= 0
    page, S = pages[live].long(), k4.shape[1]
    tokens = starts[live][:, None] + torch.arange(S, device=starts.device)  # [n, S]
    n, *affine = quantize_range(fresh_k[tokens], 1)
    k4[page], k_affine[page] = pack_halves(n), torch.cat(affine, 1)
    n, *affine = quantize_range(fresh_v[tokens], -1)
    v4[page], v_affine[page] = pack_halves(n), torch.cat(affine, -1)


def read_keys(k4, k_affine, slots):
    """[.., G, D] fp32: the sealed keys in the given slots [..], counted through pages."""
    page, offset = slots // k4.shape[1], slots % k4.shape[1]
    scale, minimum = k_affine[page].float().unbind(-3)  # [.., G, D]
    return minimum + unpack_halves(k4[page, offset]) * scale


def read_values(v4, v_affine, slots):
    page, offset = slots // v4.shape[1], slots % v4.shape[1]
    scale, minimum = v_affine[page, offset].float().split(1, -1)  # [.., G, 1]
    return minimum + unpack_halves(v4[page, offset]) * scale


# ---------------------------------------------------------------- the kernels
# fmt: off
@triton.jit
def _nearest(x):
    """Rounded to the nearest integer, ties to even, as torch.round does: at 1.5 * 2**23 a fp32 has no fraction left."""
    return x + 12582912.0 - 12582912.0


@triton.jit
def _nearest_e4m3(x):
    """The nearest e4m3, ties to even, of |x| <= 448: 3 bits behind the first, but steps of 2**-9 below 2**-6."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + (bits >> 20 & 1)) & -0x100000
    return tl.where(tl.abs(x) < 0.015625, x + 24576.0 - 24576.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def _write_rows(
    x_ptr, cache_ptr, scales_ptr, slot, mask, LARGEST: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Quantise one token's rows [G, D] into its slot."""
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)                                        # [G], [D]
    i = g[:, None] * D + d[None, :]                                                            # [G, D]
    x = tl.load(x_ptr + i, mask=mask, other=0.0).to(tl.float32)                                # [G, D]
    size = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1)     # compared as integers, NaN is the largest
    scale = tl.div_rn(size.to(tl.float32, bitcast=True), LARGEST)                              # [G]
    sound = (scale > 0) & (scale < float("inf"))                                               # [G]
    q = tl.div_rn(x, tl.where(sound, scale, 1.0)[:, None] + tl.zeros_like(x))                  # [G, D]
    q = tl.where(sound[:, None], tl.minimum(tl.maximum(q, -LARGEST), LARGEST), 0.0)            # [G, D]
    if cache_ptr.dtype.element_ty == tl.int8:
        q = _nearest(q)
    else:                                                   # not left to the conversion: interpreted, it loses carries
        q = _nearest_e4m3(q)
    tl.store(cache_ptr + slot * G * D + i, q.to(cache_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + slot * G + g, scale, mask=(g < G) & (slot >= 0))


@triton.jit
def _kv_write_scaled_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, slots_ptr,
    k_stride, v_stride, LARGEST: tl.constexpr,              # elements from one token to the next; 127 or 448
    G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # Who am I?  One program = one token; its slot is int64 before it meets a size.
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    mask = (tl.arange(0, BLOCK_G) < G)[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :] & (slot >= 0)  # [G, D]
    _write_rows(k_ptr + t * k_stride, k_cache_ptr, k_scales_ptr, slot, mask, LARGEST, G, D, BLOCK_G, BLOCK_D)
    _write_rows(v_ptr + t * v_stride, v_cache_ptr, v_scales_ptr, slot, mask, LARGEST, G, D, BLOCK_G, BLOCK_D)


@triton.jit
def _range_of(low, high, poisoned):
    """(scale, minimum) as fp16 holds them, in fp32."""
    scale = tl.minimum(tl.div_rn(high - low, 15.0), 65504.0)
    minimum = tl.minimum(tl.maximum(low, -65504.0), 65504.0)
    scale, minimum = tl.where(poisoned, float("nan"), scale), tl.where(poisoned, float("nan"), minimum)
    return scale.to(tl.float16).to(tl.float32), minimum.to(tl.float16).to(tl.float32)


@triton.jit
def _levels(x, scale, minimum):
    n = tl.div_rn(x - minimum, tl.where(scale > 0, scale, 1.0) + tl.zeros_like(x))
    n = _nearest(tl.minimum(tl.maximum(n, 0.0), 15.0))
    return tl.where(scale > 0, n, 0.0).to(tl.uint8)


@triton.jit
def _seal_kernel(
    fresh_k_ptr, fresh_v_ptr, starts_ptr, pages_ptr, k4_ptr, v4_ptr, k_affine_ptr, v_affine_ptr,
    S: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,       # HALF = D / 2
):
    # Who am I?  One program = one head of one page, as two halves: channels d and HALF + d share a byte.
    i, g = tl.program_id(0) // G, tl.program_id(0) % G
    page = tl.load(pages_ptr + i).to(tl.int64)
    if page < 0:
        return
    s, d = tl.arange(0, S), tl.arange(0, BLOCK_HALF)                                           # [S], [H]
    live = (d < HALF)[None, :]                                                                 # [1, H]
    token = tl.load(starts_ptr + i).to(tl.int64) + s                                           # [S]
    there = ((token * G + g) * 2 * HALF)[:, None] + d[None, :]                                 # [S, H]
    byte = (((page * S + s) * G + g) * HALF)[:, None] + d[None, :]                             # [S, H]

    # Keys: one range per channel, over the page.
    k_affine_ptr += (page * 2 * G + g) * 2 * HALF
    packed = tl.zeros([S, BLOCK_HALF], tl.uint8)                                               # [S, H]
    for half in tl.static_range(2):
        x = tl.load(fresh_k_ptr + there + half * HALF, mask=live, other=0.0).to(tl.float32)    # [S, H]
        scale, minimum = _range_of(tl.min(x, axis=0), tl.max(x, axis=0), tl.sum((x != x).to(tl.int32), axis=0) > 0)
        packed |= _levels(x, scale[None, :], minimum[None, :]) << (4 * half)
        at = k_affine_ptr + half * HALF + d                                                    # [H]
        tl.store(at, scale.to(tl.float16), mask=d < HALF)
        tl.store(at + G * 2 * HALF, minimum.to(tl.float16), mask=d < HALF)
    tl.store(k4_ptr + byte, packed, mask=live)

    # Values: one range per token, over both halves.
    a = tl.load(fresh_v_ptr + there, mask=live, other=0.0).to(tl.float32)                      # [S, H]
    b = tl.load(fresh_v_ptr + there + HALF, mask=live, other=0.0).to(tl.float32)               # [S, H]
    low = tl.min(tl.where(live, tl.minimum(a, b), float("inf")), axis=1)                       # [S]
    high = tl.max(tl.where(live, tl.maximum(a, b), -float("inf")), axis=1)                     # [S]
    scale, minimum = _range_of(low, high, tl.sum(((a != a) | (b != b)).to(tl.int32), axis=1) > 0)
    packed = _levels(a, scale[:, None], minimum[:, None]) | _levels(b, scale[:, None], minimum[:, None]) << 4
    tl.store(v4_ptr + byte, packed, mask=live)
    at = v_affine_ptr + ((page * S + s) * G + g) * 2                                           # [S]
    tl.store(at, scale.to(tl.float16))
    tl.store(at + 1, minimum.to(tl.float16))
# fmt: on


# ---------------------------------------------------------------- the launchers
def kv_write_scaled(k, v, k_cache, v_cache, k_scales, v_scales, slots) -> None:
    """Quantise k and v into their slots, in place. Shapes: see the module docstring."""
    check_write(k, v, k_cache, v_cache, k_scales, v_scales, slots)
    if not on_triton(k):
        return kv_write_scaled_reference(k, v, k_cache, v_cache, k_scales, v_scales, slots)
    T, G, D = k.shape
    if T:
        _kv_write_scaled_kernel[(T,)](
            k, v, k_cache, v_cache, k_scales, v_scales, slots, k.stride(0), v.stride(0),
            LARGEST[k_cache.dtype], G=G, D=D, **tiles(G, D),
        )  # fmt: skip


def tiles(G: int, D: int) -> dict:
    block = dict(BLOCK_G=triton.next_power_of_2(G), BLOCK_D=triton.next_power_of_2(D))
    return dict(block, num_warps=min(8, max(1, block["BLOCK_G"] * block["BLOCK_D"] // 256)))


def seal(fresh_k, fresh_v, starts, pages, k4, v4, k_affine, v_affine) -> None:
    """Quantise full pages out of the fresh tokens, in place. Shapes: see the module docstring."""
    check_seal(fresh_k, fresh_v, starts, pages, k4, v4, k_affine, v_affine)
    if not on_triton(fresh_k):
        return seal_reference(fresh_k, fresh_v, starts, pages, k4, v4, k_affine, v_affine)
    _, S, G, HALF = k4.shape
    if len(pages):
        _seal_kernel[(len(pages) * G,)](
            fresh_k, fresh_v, starts, pages, k4, v4, k_affine, v_affine,
            S=S, G=G, HALF=HALF, BLOCK_HALF=triton.next_power_of_2(HALF),
        )  # fmt: skip
