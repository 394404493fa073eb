"""The kernels of a CPU: C++ compiled once with the user's own compiler, and called on torch's memory.

    native.usable()     None, or the reason why this machine has to do without
    Native()            the operations below, on CPU tensors of float32 or bfloat16

Shapes
    embed           table [V, E], ids [T] int64                    -> [T, E]     an id outside the table: NaN
    rms_norm        x [T, E], weight [E]                           -> [T, E]
    add_rms_norm    x, residual [T, E], weight [E]                 -> [T, E], [T, E]: (normed, total)
    linear          x [T, K], weight [N, K], bias [N] or None      -> [T, N]     made for few rows: see fused.Linear
    rope_and_write  see kernels/rope_and_write.py                  -> [T, H, D]
    attend          q [B, H, D], caches [P, S, G, D], tables [B, M] int32, lengths [B] int32 -> [B, H, D]
                    kernels/paged_attention.py with one query per row, at the last of its positions; also `trees`
    silu_mul        x [T, 2I], the gates before what they gate     -> [T, I]
    best            logits [T, V]                                  -> [T] int64: first of the largest, -1: not finite

Each checks what can be checked without reading values: positions, slots and pages are trusted, as on a GPU.

Recording   A call is a C function and numbers: addresses and sizes. Inside `with ops.recording() as calls` they
            are also written down, and `for f, args, _ in calls: f(*args)` does the same work on the same memory:
            what a CUDA graph is to a GPU. replay(calls) does it in C++, where a call costs no Python.
Build       kernels/native_build.py, the first time somebody asks.
Threads     torch.get_num_threads(), asked at every call.
"""

import contextlib
import ctypes
import functools
import struct

import torch

from minserve.kernels import check_match, check_packed, native_kv, native_quant
from minserve.kernels.native_build import Unavailable, library
from minserve.kernels.native_kv import check_queries
from minserve.kernels.paged_check import check_trees
from minserve.kernels.rms_norm import _check as check_norm
from minserve.kernels.rope_and_write import _check as check_rope_and_write

SIGNATURES = {  # p: pointer, i: int64, f: float
    "embed": "pppiii",
    "rms_norm": "pppiiif",
    "add_rms_norm": "pppppiiiif",
    "silu_mul": "ppiii",
    "linear": "ppppiii",
    "rope_and_write": "pppppppppiiiiiiif",
    "attend": "pppppppiiiiiiiiiiii",
    "best": "ppiii",
    **native_quant.SIGNATURES,
    **native_kv.SIGNATURES,
}
PACKED = str.maketrans({"p": "q", "i": "q", "f": "f4x"})  # 8 bytes each
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@functools.cache
def usable() -> str | None:
    """None, or why there are no native kernels here."""
    try:
        Native()
    except Unavailable as error:
        return str(error)
    return None


class Native(native_quant.WeightOps, native_kv.KVOps):
    """The compiled kernels. One per model: what is recorded belongs to the instance."""

    def __init__(self, compiled: ctypes.CDLL | None = None):
        compiled = compiled or library()
        self._threads, self._calls = ctypes.c_int.in_dll(compiled, "threads"), None
        self.matrix_units = bool(compiled.matrix_units())  # linear takes bf16 to them
        address = lambda name: ctypes.c_void_p.in_dll(compiled, name).value
        self._replay, self._functions = compiled.replay, {}
        self._replay.argtypes, self._replay.restype = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p), None
        for name, signature in SIGNATURES.items():
            for dtype, suffix in DTYPES.items():
                kind = ctypes.CFUNCTYPE(None, *(TYPES[c] for c in signature))
                function = self._functions[name, dtype] = kind(address(f"{name}_{suffix}"))
                function.again, function.signature = address(f"{name}_{suffix}_again"), signature

    @contextlib.contextmanager
    def recording(self):
        """Every call inside is done and also listed: (C function, arguments, the tensors they point into)."""
        calls: list = []
        before, self._calls = self._calls, calls
        try:
            yield calls
        finally:
            self._calls = before

    def replay(self, calls: list):
        """A function that makes all the calls of a recording again, at the cost of one."""
        packed = [
            struct.pack("=" + f.signature.translate(PACKED), *(x or 0 for x in its)) for f, its, _ in calls
        ]
        lines = [ctypes.create_string_buffer(line, len(line)) for line in packed]
        kernels = (ctypes.c_void_p * len(calls))(*(f.again for f, *_ in calls))
        arguments = (ctypes.c_void_p * len(calls))(*map(ctypes.addressof, lines))

        def run(kept=(lines, calls)):  # what the addresses point to
            self.set_threads()
            self._replay(len(kernels), kernels, arguments)

        return run

    def set_threads(self) -> None:
        """As many as torch uses now: every fresh call does this itself, a replay has to ask for it."""
        self._threads.value = torch.get_num_threads()

    def _call(self, name, tensors, *numbers):
        function = self._functions.get((name, tensors[0].dtype))
        if function is None or not tensors[0].is_cpu:
            raise ValueError(
                f"{name}: {tensors[0].dtype} on {tensors[0].device}; the CPU's kernels take float32 and bfloat16 "
                f"on cpu; convert with .to(), or use the definition"
            )
        self.set_threads()
        arguments = (*(None if x is None else x.data_ptr() for x in tensors), *numbers)
        function(*arguments)
        if self._calls is not None:
            self._calls.append((function, arguments, tensors))

    def embed(self, table, ids):
        check_packed("embed", 2, table=table)
        check_match("embed", torch.int64, ids=(ids, (len(ids),)))
        (V, E), T = table.shape, len(ids)
        out = torch.empty((T, E), dtype=table.dtype)
        self._call("embed", (table, ids, out), T, E, V)
        return out

    def rms_norm(self, x, weight, eps: float):
        check_norm("rms_norm", weight, x=x)
        out = torch.empty(x.shape, dtype=x.dtype)
        self._call("rms_norm", (x, weight, out), *x.shape, x.stride(0), eps)
        return out

    def add_rms_norm(self, x, residual, weight, eps: float):
        check_norm("add_rms_norm", weight, x=x, residual=residual)
        out, total = torch.empty((2, *x.shape), dtype=x.dtype)
        strides = x.stride(0), residual.stride(0)
        self._call("add_rms_norm", (x, residual, weight, out, total), *x.shape, *strides, eps)
        return out, total

    def silu_mul(self, x):
        check_packed("silu_mul", 1, x=x)
        T, I = len(x), x.shape[-1] // 2
        check_match("silu_mul", x.dtype, x=(x, (T, 2 * I)))
        out = torch.empty((T, I), dtype=x.dtype)
        self._call("silu_mul", (x, out), T, I, x.stride(0))
        return out

    def linear(self, x, weight, bias=None):
        (T, K), N = x.shape, len(weight)
        check_packed("linear", 2, x=x, weight=weight)
        check_match("linear", x.dtype, weight=(weight, (N, K)), bias=(bias, (N,)))
        out = torch.empty((T, N), dtype=x.dtype)
        self._call("linear", (x, weight, bias, out), T, N, K)
        return out

    def rope_and_write(
        self, qkv, turns, positions, slots, k_cache, v_cache, q_norm=None, k_norm=None, eps: float = 0.0
    ):
        H = check_rope_and_write(qkv, turns, positions, slots, k_cache, v_cache, q_norm, k_norm)
        T, (G, D) = len(qkv), k_cache.shape[1:]
        q = torch.empty((T, H, D), dtype=qkv.dtype)
        tensors = qkv, turns, positions, slots, k_cache, v_cache, q_norm, k_norm, q
        strides = qkv.stride(0), k_cache.stride(0), v_cache.stride(0)
        self._call("rope_and_write", tensors, T, H, G, D, *strides, eps)
        return q

    def attend(
        self, q, k_cache, v_cache, tables, lengths, window: int | None = None, sinks: int = 0, trees=None
    ):
        D, (P, S, G, _) = q.shape[2], k_cache.shape
        check_packed("attend", 2, k_cache=k_cache, v_cache=v_cache)
        check_match("attend", q.dtype, k_cache=(k_cache, (P, S, G, D)), v_cache=(v_cache, (P, S, G, D)))
        check_trees("attend", q, trees, window)
        *plan, window, sinks = check_queries("attend", q, S, G, tables, lengths, window, sinks)
        out = torch.empty(q.shape, dtype=q.dtype)
        strides = *k_cache.stride()[:2], *v_cache.stride()[:2]
        tensors = q, k_cache, v_cache, tables, lengths, trees, out
        self._call("attend", tensors, *plan, *strides, window, sinks)
        return out

    def best(self, logits):
        check_packed("best", 1, logits=logits)
        T, V = logits.shape
        out = torch.empty(T, dtype=torch.int64)
        self._call("best", (logits, out), T, V, logits.stride(0))
        return out
