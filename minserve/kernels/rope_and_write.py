"""From one fused projection to attention's inputs: normalise heads, turn them, put keys and values away.

    q, k, v = split(qkv)
    q, k    = rope(rms_norm(q), rms_norm(k))       the norms only where the model has them (Qwen3)
    k_cache[slots[t]], v_cache[slots[t]] = k[t], v[t]      for every t with slots[t] != -1
    returns q

As separate steps these are two norms, a rotation and a write: four launches, and q and k would travel through
memory three times each. Here every number is read once and written once, and k never exists outside the cache.

Shapes
    qkv               [T, (H + 2 G) D]   T tokens: H query heads, G key heads, G value heads (H % G == 0) of D
                                         channels (even); rows may be strided
    turns             [C, D] fp32        row p: the cosines of position p's D/2 angles, then their sines
    positions         [T] int64          below C, also where the slot is -1
    slots             [T] int64          where each token goes: below S, no slot twice; -1 is nowhere (padding)
    k_cache, v_cache  [S, G, D]          written in place; slots may be strided, [G, D] contiguous
    q_norm, k_norm    [D]                or None, both
    returns           [T, H, D]          new and contiguous

How      One program takes one key head of one token and all that goes with it: the H/G query heads of its group,
         the key, the value. They are the rows of one tile; the value passes through unturned. A step of decode
         has T * G programs instead of T.
         Rounded where the separate steps round: after the norm, and after the turn.
Cost     about 10 flops per number of q and k; 2 * T * (H + 2 G) * D * itemsize bytes: memory-bound.
Trap     slot * G * D and position * D pass 2**31 before memory ends: both are int64 before they meet a stride.
Story    notebooks/08_the_engine.ipynb
"""

import torch

from minserve.kernels import check_alike, check_packed, on_triton, tl, triton
from minserve.kernels.kv_write import kv_write_reference
from minserve.kernels.rms_norm import rms_norm_reference
from minserve.kernels.rope import rope_reference


# ---------------------------------------------------------------- the definition
def rope_and_write_reference(
    qkv, turns, positions, slots, k_cache, v_cache, q_norm=None, k_norm=None, eps: float = 0.0
):
    G, D = k_cache.shape[1:]
    q, k, v = qkv.unflatten(1, (-1, D)).tensor_split((-2 * G, -G), dim=1)  # [T, H, D], [T, G, D] twice
    if q_norm is not None:
        q, k = rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps)
    q, k = rope_reference(q, k, *turns[positions].chunk(2, dim=-1))
    kv_write_reference(k, v, k_cache, v_cache, slots)
    return q


# ---------------------------------------------------------------- the kernel
# fmt: off
@triton.jit
def _rope_and_write_kernel(
    qkv_ptr, turns_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr,       # norms: None, or both
    q_out_ptr, k_cache_ptr, v_cache_ptr,
    qkv_stride, k_cache_stride, v_cache_stride, eps,        # elements from one token or slot to the next
    H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr,   # HALF = D / 2
    BLOCK_R: tl.constexpr, BLOCK_HALF: tl.constexpr,        # BLOCK_R holds R queries, a key and a value
):
    # Who am I?  One program = one key head of one token, and its group: rows 0 .. R-1 query, R key, R+1 value.
    R: tl.constexpr = H // G
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r = tl.arange(0, BLOCK_R)[:, None]                                                         # [R, 1]
    i = tl.arange(0, BLOCK_HALF)[None, :]                                                      # [1, HALF]
    mine = i < HALF                                                                            # [1, HALF]
    live = (r < R + 2) & mine                                                                  # [R, HALF]

    # What do I read?  Both halves of each of my heads, once.
    head = tl.where(r < R, g * R + r, H + (r - R) * G + g)                                     # [R, 1]
    pair = head * HALF * 2 + i                                                                 # [R, HALF]
    first = tl.load(qkv_ptr + t * qkv_stride + pair, mask=live, other=0.0)                     # [R, HALF]
    second = tl.load(qkv_ptr + t * qkv_stride + pair + HALF, mask=live, other=0.0)             # [R, HALF]
    kind = first.dtype

    # What do I carry?  This token's angles, and its slot, or none.
    turn = tl.load(positions_ptr + t).to(tl.int64) * HALF * 2 + i                              # [1, HALF]
    cos = tl.load(turns_ptr + turn, mask=mine, other=0.0)                                      # [1, HALF]
    sin = tl.load(turns_ptr + turn + HALF, mask=mine, other=0.0)                               # [1, HALF]
    slot = tl.load(slots_ptr + t).to(tl.int64)

    x, y = first.to(tl.float32), second.to(tl.float32)                                         # [R, HALF]
    if q_norm_ptr is not None:
        square = tl.sum(x * x + y * y, axis=1, keep_dims=True)                                 # [R, 1]
        scale = 1.0 / tl.sqrt(square / (HALF * 2) + eps)                                       # [R, 1]
        q_first = tl.load(q_norm_ptr + i, mask=mine, other=0.0).to(tl.float32)                 # [1, HALF]
        k_first = tl.load(k_norm_ptr + i, mask=mine, other=0.0).to(tl.float32)                 # [1, HALF]
        q_second = tl.load(q_norm_ptr + HALF + i, mask=mine, other=0.0).to(tl.float32)         # [1, HALF]
        k_second = tl.load(k_norm_ptr + HALF + i, mask=mine, other=0.0).to(tl.float32)         # [1, HALF]
        x = (x * scale * tl.where(r < R, q_first, k_first)).to(kind).to(tl.float32)            # [R, HALF]
        y = (y * scale * tl.where(r < R, q_second, k_second)).to(kind).to(tl.float32)          # [R, HALF]
    turned_first = (x * cos - y * sin).to(kind)                                                # [R, HALF]
    turned_second = (y * cos + x * sin).to(kind)                                               # [R, HALF]

    out = q_out_ptr + t * H * HALF * 2 + pair
    tl.store(out, turned_first, mask=live & (r < R))
    tl.store(out + HALF, turned_second, mask=live & (r < R))
    written = live & (slot >= 0)                                                               # [R, HALF]
    cached = g * HALF * 2 + i + r * 0                       # my key head's place in a slot      [R, HALF]
    k_place, v_place = k_cache_ptr + slot * k_cache_stride, v_cache_ptr + slot * v_cache_stride
    tl.store(k_place + cached, turned_first, mask=written & (r == R))
    tl.store(k_place + cached + HALF, turned_second, mask=written & (r == R))
    tl.store(v_place + cached, first, mask=written & (r == R + 1))
    tl.store(v_place + cached + HALF, second, mask=written & (r == R + 1))
# fmt: on


# ---------------------------------------------------------------- the launcher
def rope_and_write(
    qkv, turns, positions, slots, k_cache, v_cache, q_norm=None, k_norm=None, eps: float = 0.0
):
    """The queries, turned; keys and values are in the caches. Shapes: see the module docstring."""
    H = _check(qkv, turns, positions, slots, k_cache, v_cache, q_norm, k_norm)
    case = qkv, turns, positions, slots
    if not on_triton(qkv):
        return rope_and_write_reference(*case, k_cache, v_cache, q_norm, k_norm, eps)
    T, (G, D) = len(qkv), k_cache.shape[1:]
    q = torch.empty((T, H, D), dtype=qkv.dtype, device=qkv.device)
    if T:
        block = dict(BLOCK_R=triton.next_power_of_2(H // G + 2), BLOCK_HALF=triton.next_power_of_2(D // 2))
        numbers = 2 * block["BLOCK_R"] * block["BLOCK_HALF"]
        _rope_and_write_kernel[(T, G)](
            *case, q_norm, k_norm, q, k_cache, v_cache,
            qkv.stride(0), k_cache.stride(0), v_cache.stride(0), eps,
            H=H, G=G, HALF=D // 2, **block, num_warps=min(8, max(1, numbers // 512)),    # 16 per thread
        )  # fmt: skip
    return q


def _check(qkv, turns, positions, slots, k_cache, v_cache, q_norm, k_norm) -> int:
    """The number of query heads: what is left of a row when keys and values are taken off."""
    who, (T, row), (_, G, D) = "rope_and_write", qkv.shape, k_cache.shape
    norms = {name: x for name, x in (("q_norm", q_norm), ("k_norm", k_norm)) if x is not None}
    check_alike(who, qkv=qkv, k_cache=k_cache, v_cache=v_cache, **norms)
    check_packed(who, 1, qkv=qkv, positions=positions, slots=slots, **norms)
    check_packed(who, 2, k_cache=k_cache, v_cache=v_cache, turns=turns)
    H, odd = divmod(row - 2 * G * D, D)
    if odd or H < 1 or H % G or k_cache.shape != v_cache.shape or D % 2:
        raise ValueError(
            f"{who}: rows of {row} do not hold (H + 2 x {G}) x {D} numbers for some multiple H of {G} and an even "
            f"{D}; qkv is {list(qkv.shape)}, the caches {list(k_cache.shape)} and {list(v_cache.shape)}"
        )
    if turns.ndim != 2 or turns.shape[1] != D or turns.dtype != torch.float32 or turns.device != qkv.device:
        raise ValueError(
            f"{who}: turns is {list(turns.shape)} {turns.dtype} on {turns.device}; heads of {D} channels need "
            f"[positions, {D}] torch.float32 on {qkv.device}: {D // 2} cosines, then {D // 2} sines"
        )
    for name, x in (("positions", positions), ("slots", slots)):
        if x.shape != (T,) or x.dtype != torch.int64 or x.device != qkv.device:
            raise ValueError(
                f"{who}: {name} is {list(x.shape)} {x.dtype} on {x.device}; {T} tokens need [{T}] torch.int64 "
                f"on {qkv.device}, one each"
            )
    if len(norms) == 1 or any(x.shape != (D,) for x in norms.values()):
        shapes = {name: list(x.shape) for name, x in norms.items()}
        raise ValueError(
            f"{who}: norms {shapes}; a head of {D} channels needs q_norm [{D}] and k_norm [{D}], or neither"
        )
    return H
