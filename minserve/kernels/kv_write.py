"""Write this step's keys and values into their cache slots.

    k_cache[slots[t]] = k[t],  v_cache[slots[t]] = v[t]     for every t with slots[t] != -1

Shapes
    k, v              [T, G, D]       T tokens, G key/value heads, D channels; rows may be strided
    k_cache, v_cache  [S, G, D]       S slots, written in place; slots may be strided, [G, D] contiguous
    slots             [T] int64       where each token goes: below S, no slot twice; -1 is nowhere (padding)

Cost     no flops; 4 * T * G * D * itemsize bytes moved.
Trap     slot * G * D passes 2**31 before memory ends (2,097,152 slots of 8 heads x 128): offsets are int64.
         And -1 is not an index: in Python it is the last slot, on a GPU the memory before the cache.
Story    notebooks/03_kv_cache.ipynb
"""

import torch

from minserve.kernels import check_alike, check_packed, on_triton, tl, triton


# ---------------------------------------------------------------- the definition
def kv_write_reference(k, v, k_cache, v_cache, slots) -> None:
    live = slots >= 0  # [T]
    where = slots[live]
    k_cache.index_copy_(0, where, k[live])
    v_cache.index_copy_(0, where, v[live])


# ---------------------------------------------------------------- the kernel
# fmt: off
@triton.jit
def _kv_write_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    k_stride, v_stride, k_cache_stride, v_cache_stride,     # elements from one token or slot to the next
    ROW: tl.constexpr, BLOCK: tl.constexpr,                 # ROW = G * D elements; BLOCK holds them
):
    # Who am I?  One program = one token.
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)

    # What do I carry?  My slot, or none. int64 before it meets a stride.
    slot = tl.load(slots_ptr + t).to(tl.int64)
    live = (i < ROW) & (slot >= 0)                                                             # [BLOCK]

    # What do I read?  My key and my value, each once.
    k = tl.load(k_ptr + t * k_stride + i, mask=live, other=0.0)                                # [BLOCK]
    v = tl.load(v_ptr + t * v_stride + i, mask=live, other=0.0)                                # [BLOCK]
    tl.store(k_cache_ptr + slot * k_cache_stride + i, k, mask=live)
    tl.store(v_cache_ptr + slot * v_cache_stride + i, v, mask=live)
# fmt: on


# ---------------------------------------------------------------- the launcher
def kv_write(k, v, k_cache, v_cache, slots) -> None:
    """Scatter k and v into the caches, in place. Shapes: see the module docstring."""
    _check(k, v, k_cache, v_cache, slots)
    if not on_triton(k):
        return kv_write_reference(k, v, k_cache, v_cache, slots)
    T, G, D = k.shape
    if T:
        block = triton.next_power_of_2(G * D)
        _kv_write_kernel[(T,)](
            k, v, k_cache, v_cache, slots,
            k.stride(0), v.stride(0), k_cache.stride(0), v_cache.stride(0),
            ROW=G * D, BLOCK=block, num_warps=min(8, max(1, block // 512)),
        )  # fmt: skip


def _check(k, v, k_cache, v_cache, slots):
    check_alike("kv_write", k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    check_packed("kv_write", 2, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    if k.shape != v.shape or k_cache.shape != v_cache.shape or k.shape[1:] != k_cache.shape[1:]:
        raise ValueError(
            f"kv_write: k {list(k.shape)} and v {list(v.shape)} cannot go into caches "
            f"{list(k_cache.shape)} and {list(v_cache.shape)}; all four must agree on [heads, channels]"
        )
    if slots.shape != k.shape[:1] or slots.dtype != torch.int64 or slots.device != k.device:
        raise ValueError(
            f"kv_write: slots is {list(slots.shape)} {slots.dtype} on {slots.device}; {k.shape[0]} tokens "
            f"need [{k.shape[0]}] torch.int64 on {k.device}, one slot each"
        )
