"""lab/look and lab/attention_cost: what notebook 04 looks through and counts with."""

import subprocess
import sys

import pytest
import torch

from minserve.lab import attention_cost, look
from minserve.lab.attention_cost import asked_bytes, causal_tiles, kv_asked_bytes, least_bytes, tile_picture
from minserve.model import Model
from minserve.weights import load


def tiles_by_eye(T, block_m, block_n):
    """Build the mask and look at every tile."""
    seen, counts = torch.ones(T, T).tril().bool(), [0, 0, 0]
    for rows in seen.split(block_m, 0):
        for tile in rows.split(block_n, 1):
            whole = bool(tile.all()) and tile.shape[1] == block_n  # a ragged last tile is masked by its end
            counts[0 if whole else 1 if tile.any() else 2] += 1
    return tuple(counts)


@pytest.mark.parametrize(
    "T, block_m, block_n", [(64, 16, 16), (100, 16, 32), (97, 32, 8), (5, 9, 9), (64, 1, 7)]
)
def test_causal_tiles_equal_the_mask(T, block_m, block_n):
    counts = causal_tiles(T, block_m, block_n)
    assert counts == tiles_by_eye(T, block_m, block_n)
    drawn = "".join(tile_picture(T, block_m, block_n))
    assert tuple(drawn.count(mark) for mark in "■◪·") == counts


def test_bytes_by_hand():
    assert attention_cost.score_bytes(4, 2) == 2 * 16 * 2
    assert least_bytes(4, 2, 1, 8) == (2 * 4 * 2 * 8 + 2 * 4 * 1 * 8) * 2
    assert attention_cost.naive_bytes(4, 2, 1, 8, trips=6) == least_bytes(4, 2, 1, 8) + 6 * 64
    assert asked_bytes(4, 2, 1, 8, rows=8) == least_bytes(4, 2, 1, 8)  # one tile reads every key once
    assert asked_bytes(4, 2, 1, 8, rows=4) == (2 * 4 * 2 * 8 + 2 * (2 + 4) * 8) * 2  # 2 keys, then 4
    assert kv_asked_bytes(1, 100, 32, 8, 64) * 4 == kv_asked_bytes(1, 100, 32, 32, 64)
    assert kv_asked_bytes(128, 100, 32, 8, 64) == kv_asked_bytes(128, 100, 32, 32, 64)
    T = attention_cost.crossing(32, 8, 128)
    assert T == 320 and attention_cost.score_bytes(320, 32) == least_bytes(320, 32, 8, 128)


def test_show_prints_from_landmark_to_landmark(capsys):
    look.show(least_bytes, "return")
    assert capsys.readouterr().out == "    return 2 * T * (H + G) * D * itemsize\n"
    look.show(causal_tiles, "full = visited", "full +=")
    assert capsys.readouterr().out.count("\n") == 2
    for landmarks in (("no such line",), ("return", "no such line")):
        with pytest.raises(ValueError, match="no such line"):
            look.show(causal_tiles, *landmarks)


def test_a_mutant_differs_and_the_original_does_not():
    wrong = look.mutant(attention_cost, "H * T * T", "H * T")
    assert wrong.score_bytes(4, 2) == 16 and attention_cost.score_bytes(4, 2) == 64
    with pytest.raises(ValueError, match="it occurs 0 times"):
        look.mutant(attention_cost, "no such text", "")


PEAKS = """
import torch
from minserve.lab.look import peak_bytes
size, device = 256 << 20, "cuda" if torch.cuda.is_available() else "cpu"
def use_and_forget():
    gone = torch.ones(size // 4, device=device)
    for _ in range(5):
        float(gone.sum())
peak_bytes(lambda: float(torch.ones(9, device=device).sum()))
print(peak_bytes(use_and_forget) / size, peak_bytes(lambda: None) / size)
"""


def test_peak_bytes_sees_what_is_gone_afterwards():
    """In a process of its own: where much was freed before, new memory may be old memory, and nothing grows."""
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    used, nothing = map(float, done.stdout.split())
    assert 0.8 < used < 2 and nothing < 0.1
    with pytest.raises(ZeroDivisionError):
        look.peak_bytes(lambda: 1 / 0)


def test_plain_seconds_counts_all_but_the_first_call():
    calls = []
    assert look.plain_seconds(lambda: calls.append(1), repeats=3) < 1
    assert len(calls) == 4


def test_layer_inputs_are_what_attention_gets(checkpoints):
    model: Model = load(checkpoints("llama-3"), dtype=torch.float32)
    seen = look.layer_inputs(model, [5, 6, 7, 8])
    config = model.config
    assert list(seen) == list(range(config.num_layers))
    q, k, v = seen[0]
    assert q.shape == (4, config.num_heads, config.head_dim)
    assert k.shape == v.shape == (4, config.num_kv_heads, config.head_dim)
    again = look.layer_inputs(model, [5, 6, 7, 9])[0][0]
    assert torch.equal(again[:3], q[:3]) and not torch.equal(again[3], q[3])
