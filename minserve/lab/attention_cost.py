"""What attention costs before anything runs: bytes and tiles of one layer and one causal prompt, by counting.

    scores     H T^2                  the matrix that naive attention stores, once per trip to memory
    least      2 T (H + G) D          q and out, k and v: each once
    asked      least + re-reading     every tile of queries reads all keys before it, mostly from a cache
    tiles      full | diagonal | never touched

T tokens, H query heads, G key/value heads, D channels; bytes are for `itemsize` bytes per number.

Sources  FlashAttention, Dao et al. 2022 (arXiv:2205.14135), section 3.2 counts the same.
Story    notebooks/04_flash_attention.ipynb
"""

from collections.abc import Iterator


def score_bytes(T: int, H: int, itemsize: int = 2) -> int:
    return H * T * T * itemsize


def least_bytes(T: int, H: int, G: int, D: int, itemsize: int = 2) -> int:
    return 2 * T * (H + G) * D * itemsize


def naive_bytes(T: int, H: int, G: int, D: int, itemsize: int = 2, trips: int = 4) -> int:
    """The trips of a score: written by one matmul, read and written by the softmax, read by the other."""
    return least_bytes(T, H, G, D, itemsize) + trips * score_bytes(T, H, itemsize)


def asked_bytes(T: int, H: int, G: int, D: int, itemsize: int = 2, rows: int = 128) -> int:
    """What tiles of `rows` (tokens x heads of a group) ask memory and caches for."""
    tokens = rows // (H // G)
    keys = sum(min(first + tokens, T) for first in range(0, T, tokens))
    return 2 * (T * H + keys * G) * D * itemsize


def kv_asked_bytes(queries: int, keys: int, H: int, G: int, D: int, itemsize: int = 2, rows: int = 128):
    """Bytes of keys and values that `queries` tokens ask for, every one of them seeing all `keys`.

    A program has `rows` rows, tokens x query heads of one of G groups. One query head per program: G = H.
    """
    return G * -(-queries * (H // G) // rows) * 2 * keys * D * itemsize


def crossing(H: int, G: int, D: int) -> float:
    """The tokens from which the scores outweigh q, k, v and the output together."""
    return 2 * (H + G) * D / H


def causal_tiles(T: int, block_m: int, block_n: int) -> tuple[int, int, int]:
    """(full, on the diagonal, never touched) tiles of block_m queries x block_n keys in a causal square."""
    full = visited = 0
    for first in range(0, T, block_m):
        full += (first + 1) // block_n  # even the tile's first query sees all of these keys
        visited += -(-min(first + block_m, T) // block_n)  # its last query sees into these
    return full, visited - full, -(-T // block_m) * -(-T // block_n) - visited


def tile_picture(T: int, block_m: int, block_n: int) -> Iterator[str]:
    """A line per row of tiles: ■ full, ◪ on the diagonal, · never touched."""
    across = -(-T // block_n)
    for first in range(0, T, block_m):
        full, visited = (first + 1) // block_n, -(-min(first + block_m, T) // block_n)
        yield " ".join("■" * full + "◪" * (visited - full) + "·" * (across - visited))
