"""What no kernel of a quantized cache can do, and the message that says so. The shapes: kernels/kv_quantize.py."""

import torch

from minserve.kernels import architecture, check_alike, check_packed
from minserve.kernels.paged_check import check_plan

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # what the largest number of a row becomes


def check_scaled(who: str, k_cache, v_cache, k_scales, v_scales) -> None:
    """8-bit caches [.., G, D] with their scales [.., G], on a device that has the type."""
    check_alike(who, k_cache=k_cache, v_cache=v_cache)
    caches = dict(k_cache=k_cache, v_cache=v_cache, k_scales=k_scales, v_scales=v_scales)
    for name, x in caches.items():
        check_packed(who, x.ndim, **{name: x})
    if k_cache.dtype not in LARGEST:
        raise ValueError(f"{who}: k_cache is {k_cache.dtype}; 8 bits are torch.int8 or torch.float8_e4m3fn")
    if k_cache.shape != v_cache.shape or any(
        x.shape != k_cache.shape[:-1] or x.dtype != torch.float32 for x in (k_scales, v_scales)
    ):
        raise ValueError(
            f"{who}: caches {list(k_cache.shape)} and {list(v_cache.shape)} with scales {list(k_scales.shape)} "
            f"{k_scales.dtype} and {list(v_scales.shape)} {v_scales.dtype}; the caches must be equal, and the "
            f"scales torch.float32 of {list(k_cache.shape[:-1])}"
        )
    arch = architecture(k_cache.device)
    if k_cache.dtype is torch.float8_e4m3fn and arch in ("sm_75", "sm_80", "sm_86", "sm_87"):
        raise ValueError(
            f"{who}: {arch} has no fp8 (e4m3 comes with sm_89); use int8, which takes as many bytes"
        )


def check_write(k, v, k_cache, v_cache, k_scales, v_scales, slots):
    who = "kv_write_scaled"
    check_scaled(who, k_cache, v_cache, k_scales, v_scales)
    check_alike(who, k=k, v=v)
    check_packed(who, 2, k=k, v=v)
    if k.shape != v.shape or k.shape[1:] != k_cache.shape[1:] or k.device != k_cache.device:
        raise ValueError(
            f"{who}: k {list(k.shape)} and v {list(v.shape)} on {k.device} cannot go into caches "
            f"{list(k_cache.shape)} on {k_cache.device}; all must agree on [heads, channels] and device"
        )
    if slots.shape != k.shape[:1] or slots.dtype != torch.int64 or slots.device != k.device:
        raise ValueError(
            f"{who}: slots is {list(slots.shape)} {slots.dtype} on {slots.device}; {k.shape[0]} tokens "
            f"need [{k.shape[0]}] torch.int64 on {k.device}, one slot each"
        )


def check_sealed(who: str, fresh_k, fresh_v, k4, v4, k_affine, v_affine) -> None:
    """4-bit pages with their ranges, and the fresh tokens beside them."""
    check_alike(who, fresh_k=fresh_k, fresh_v=fresh_v)
    (Z, G, D), (P, S, _, _) = fresh_k.shape, k4.shape
    half, byte = torch.float16, torch.uint8
    for name, x, shape, dtype in (
        ("fresh_v", fresh_v, (Z, G, D), fresh_k.dtype),
        ("k4", k4, (P, S, G, D // 2), byte), ("v4", v4, (P, S, G, D // 2), byte),
        ("k_affine", k_affine, (P, 2, G, D), half), ("v_affine", v_affine, (P, S, G, 2), half),
    ):  # fmt: skip
        if x.shape != shape or x.dtype != dtype or x.device != fresh_k.device:
            raise ValueError(
                f"{who}: {name} is {list(x.shape)} {x.dtype} on {x.device}; with fresh_k {[Z, G, D]} and "
                f"{P} pages of {S} slots it must be {list(shape)} {dtype} on {fresh_k.device}"
            )
        check_packed(who, x.ndim, **{name: x})
    check_packed(who, 3, fresh_k=fresh_k)
    if D % 2:
        raise ValueError(f"{who}: {D} channels; channels d and d + D/2 share a byte, so D must be even")
    if S & (S - 1):
        raise ValueError(f"{who}: pages of {S} slots; the number of slots must be a power of two")


def check_seal(fresh_k, fresh_v, starts, pages, k4, v4, k_affine, v_affine):
    check_sealed("seal", fresh_k, fresh_v, k4, v4, k_affine, v_affine)
    for name, x, dtypes in (
        ("starts", starts, (torch.int64,)), ("pages", pages, (torch.int32, torch.int64)),
    ):  # fmt: skip
        if x.shape != starts.shape or x.ndim != 1 or x.dtype not in dtypes or x.device != fresh_k.device:
            raise ValueError(
                f"seal: {name} is {list(x.shape)} {x.dtype} on {x.device}; one number per page is needed, "
                f"[{starts.numel()}] {' or '.join(map(str, dtypes))} on {fresh_k.device}"
            )
    if not fresh_k.is_cuda and len(pages):  # reading a tensor would make the CPU wait for the GPU
        inside = (starts >= 0) & (starts + k4.shape[1] <= len(fresh_k)) & (pages < len(k4)) | (pages < 0)
        if not inside.all():
            i = int((~inside).nonzero()[0])
            raise ValueError(
                f"seal: entry {i} puts tokens {int(starts[i])} to {int(starts[i]) + k4.shape[1] - 1} into page "
                f"{int(pages[i])}; there are {len(fresh_k)} fresh tokens and {len(k4)} pages"
            )


def check_int4(
    who, q, k4, v4, k_affine, v_affine, fresh_k, fresh_v, home, pages, starts_q, lengths, *limits
):  # fmt: skip
    check_sealed(who, fresh_k, fresh_v, k4, v4, k_affine, v_affine)
    if fresh_k.dtype != q.dtype or fresh_k.shape[2] != q.shape[2] or fresh_k.device != q.device:
        raise ValueError(
            f"{who}: fresh_k is {list(fresh_k.shape)} {fresh_k.dtype} on {fresh_k.device}, q is {list(q.shape)} "
            f"{q.dtype} on {q.device}; they must agree on channels, type and device"
        )
    if home.shape != lengths.shape or home.dtype != torch.int64 or home.device != q.device:
        raise ValueError(
            f"{who}: home is {list(home.shape)} {home.dtype} on {home.device}; {lengths.numel()} rows need "
            f"[{lengths.numel()}] torch.int64 on {q.device}, each where its fresh page begins"
        )
    check_plan(who, q, k4, v4, pages, starts_q, lengths, *limits, k4.shape[3])
