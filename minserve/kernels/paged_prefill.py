"""Paged prefill."""

from minserve.kernels import on_triton
from minserve.kernels.paged_attention import check, paged_attention_reference


def paged_prefill(
    q, k_cache, v_cache, pages, starts_q, lengths, max_queries: int,
    window: int | None = None, sinks: int = 0,
):  # fmt: skip
    most = pages.shape[-1] * k_cache.shape[1]
    check("paged_prefill", q, k_cache, v_cache, pages, starts_q, lengths, max_queries, most, window, sinks)
    return paged_attention_reference(q, k_cache, v_cache, pages, starts_q, lengths, window, sinks)
