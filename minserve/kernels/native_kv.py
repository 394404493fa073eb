"""The CPU's kernels for quantized KV caches."""

SIGNATURES: dict[str, str] = {}  # as in native.py


class KVOps:
    """What `Native` can do with quantized caches."""
