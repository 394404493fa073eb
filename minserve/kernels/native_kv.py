"""The CPU's C++ kernels for a quantized KV cache: a part of native.Native.

Shapes
    kv_write_scaled   k, v [T, G, D] into caches [N, G, D] int8 with scales [N, G]: as kernels/kv_quantize.py
    seal              fresh tokens [Z, G, D] into 4-bit pages: as kernels/kv_quantize.py
    attend_scaled     q [B, H, D], caches [P, S, G, D] int8, scales [P, S, G], tables [B, M] int32, lengths [B] int32
    attend_int4       the same over 4-bit pages, and home [B] int64: where a row's own page lies among the fresh tokens
                      both -> [B, H, D]: kernels/quantized_attention.py with one query per row, at its last position;
                      attend_scaled also with `trees`

Keys, values and queries are float32 or bfloat16. Numbers stay as small as they are stored until they are in a
register, so a cache of half the bytes takes at most half the time to read.
Story       notebooks/10_smaller_kv_cache.ipynb
"""

import torch

from minserve.kernels import check_match, check_packed
from minserve.kernels.paged_check import check_trees
from minserve.kernels.quantized_check import check_scaled, check_sealed, check_write

SIGNATURES = {  # as in native.py
    "kv_write_scaled": "pppppppiiiii",
    "attend_scaled": "pppppppppiiiiiiii",
    "seal": "ppppppppiiiii",
    "attend_int4": "pppppppppppiiiiiiii",
}
MOST_CHANNELS = 512  # of a head, as in native.cpp
FOREVER = 2**62  # a window that no position falls out of


class KVOps:
    """What `Native` can do with quantized caches."""

    def kv_write_scaled(self, k, v, k_cache, v_cache, k_scales, v_scales, slots) -> None:
        check_write(k, v, k_cache, v_cache, k_scales, v_scales, slots)
        check_match("kv_write_scaled", torch.int8, k_cache=(k_cache, k_cache.shape))
        tensors = k, v, k_cache, v_cache, k_scales, v_scales, slots
        self._call("kv_write_scaled", tensors, *k.shape, k.stride(0), v.stride(0))

    def attend_scaled(
        self, q, k_cache, v_cache, k_scales, v_scales, tables, lengths,
        window: int | None = None, sinks: int = 0, trees=None,
    ):  # fmt: skip
        who, (_, S, G, _) = "attend_scaled", k_cache.shape
        check_scaled(who, k_cache, v_cache, k_scales, v_scales)
        check_match(who, torch.int8, k_cache=(k_cache, (len(k_cache), S, G, q.shape[2])))
        check_trees(who, q, trees, window)
        plan = check_queries(who, q, S, G, tables, lengths, window, sinks)
        out = torch.empty(q.shape, dtype=q.dtype)
        self._call(who, (q, k_cache, v_cache, k_scales, v_scales, tables, lengths, trees, out), *plan)
        return out

    def seal(self, fresh_k, fresh_v, starts, pages, k4, v4, k_affine, v_affine) -> None:
        check_sealed("seal", fresh_k, fresh_v, k4, v4, k_affine, v_affine)
        check_match("seal", torch.int64, starts=(starts, starts.shape[:1]))
        wide = pages.dtype == torch.int64
        check_match("seal", torch.int64 if wide else torch.int32, pages=(pages, starts.shape))
        tensors = fresh_k, fresh_v, starts, pages, k4, v4, k_affine, v_affine
        self._call("seal", tensors, len(pages), k4.shape[1], *fresh_k.shape[1:], wide)

    def attend_int4(
        self, q, k4, v4, k_affine, v_affine, fresh_k, fresh_v, home, tables, lengths,
        window: int | None = None, sinks: int = 0,
    ):  # fmt: skip
        who, (_, S, G, _) = "attend_int4", k4.shape
        check_sealed(who, fresh_k, fresh_v, k4, v4, k_affine, v_affine)
        check_match(who, q.dtype, fresh_k=(fresh_k, (len(fresh_k), G, q.shape[2])))
        check_match(who, torch.int64, home=(home, lengths.shape))
        plan = check_queries(who, q, S, G, tables, lengths, window, sinks)
        out = torch.empty(q.shape, dtype=q.dtype)
        tensors = q, k4, v4, k_affine, v_affine, fresh_k, fresh_v, home, tables, lengths, out
        self._call(who, tensors, *plan)
        return out


def check_queries(who, q, S: int, G: int, tables, lengths, window: int | None, sinks: int):
    """The sizes that an attention of one query per row is called with, or what is wrong with them."""
    B, H, D = q.shape
    check_packed(who, 3, q=q)
    check_match(who, torch.int32, tables=(tables, (B, tables.shape[-1])), lengths=(lengths, (B,)))
    if H % G or D > MOST_CHANNELS or S & (S - 1) or (window is not None and window < 1) or sinks < 0:
        raise ValueError(
            f"{who}: {H} query heads over {G} key heads of {D} channels, pages of {S} slots, window {window}, "
            f"sinks {sinks}; heads must divide evenly, channels be at most {MOST_CHANNELS}, slots a power of "
            f"two, window >= 1 or None, sinks >= 0"
        )
    seen = (FOREVER, 0) if window is None else (window, sinks)
    return B, H, G, D, S, tables.stride(0), *seen
