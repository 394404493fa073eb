"""The sampling kernel draws what its definition draws, in poisoned memory; and wrong kernels do not.

Kernel and definition share no way of finding a cut (bits against a sort), and must agree in every token.
"""

import kernel_checks as checks
import pytest
import torch
from kernel_checks import DEVICE, DTYPES, NAN, needs_kernel
from test_mutations import changed, load, source_of

from minserve import sampling
from minserve.kernels import INTERPRETED, sample
from minserve.request import SamplingParams
from minserve.sampler import Sampler

INF = float("inf")
KINDS = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 4, 1.0, 0.0),
    (1.5, 0, 0.6, 0.0),
    (1.0, -1, 1.0, 0.2),
    (2.0, 9, 0.8, 0.05),
    (1e30, 2**40, 0.5, 0.0),
    (9e-6, 3, 0.5, 1.0),
    (3.0, 0, 1.0, 1.0),
]


def given(V, rows=8, seed=0, rounding=0.5, dtype=torch.float32):
    """Coarse logits, so that many tie; some tokens are banned; NaN between the rows and around them."""
    logits = (checks.randn(rows, V, seed=seed) * 3 / rounding).round() * rounding
    logits[:, 1::5] = -INF
    kinds = [KINDS[(i + seed) % len(KINDS)] for i in range(rows)]
    temperature, top_k, top_p, min_p = zip(*kinds)
    tensor = lambda x, dtype: torch.tensor(x, dtype=dtype, device=DEVICE)
    return (
        checks.wide(checks.moat(logits.to(dtype))),
        tensor(temperature, torch.float32), tensor(top_k, torch.int64),
        tensor(top_p, torch.float64), tensor(min_p, torch.float64),
        tensor([(-3) ** (i + 9 + seed) for i in range(rows)], torch.int64),
        tensor([i + seed + (i % 2 << 33) for i in range(rows)], torch.int64),
    )  # fmt: skip


def agree(module, case):
    assert torch.equal(module.sample(*case), module.sample_reference(*case))


def equal_weights(V, rows):
    """Everything ties and every sum is exact: only the tie rules decide."""
    case = list(given(V, len(rows)))
    case[0] = torch.zeros(len(rows), V, device=DEVICE)
    case[1].fill_(1.0)
    case[1][-1] = 0.0  # greedy
    for i, (k, p) in enumerate(rows):
        case[2][i], case[3][i] = k, p
    case[4].zero_()
    return case


def neighbouring_floats(V=12, rows=8):
    """Tokens whose d differ in the last bit only, the likelier the later, and nearly equal in weight."""
    case = list(given(V, rows))
    d = 1 + torch.arange(V, 0, -1, device=DEVICE) * 2.0**-23
    case[0] = torch.cat([torch.zeros(1, device=DEVICE), -d[1:]]).expand(rows, V).contiguous()
    case[1].fill_(1e6)
    case[2].copy_(torch.arange(rows) // 2 + 2)
    case[3].fill_(1.0)
    case[4].zero_()
    return case


def check_broken(module, V=20):
    case = given(V, rows=8, seed=1)
    case[0][0, 3] = case[0][1, V - 1] = case[0][2, 0] = NAN
    case[0][4], case[0][5, 2] = -INF, INF
    case[0][6], case[0][6, 7] = -INF, 1.0  # only one is left
    got = module.sample(*case)
    assert (got < 0).tolist() == [True, True, True, False, True, True, False, False] and got[6] == 7
    agree(module, case)


def check_all_bits_count(module):
    """The middle token owns 2^-28 around 1/2. This position's u is 1/2 by its first word; its second says: beyond."""
    case = [x[:1].clone() for x in given(3)]
    case[0] = torch.tensor([[0.0, -27 * 0.6931472, 0.0]], device=DEVICE)
    case[1].fill_(1.0)
    case[5].zero_()
    case[6].fill_(POSITION)
    assert module.sample(*case).tolist() == module.sample_reference(*case).tolist() == [2]


def check_streams(module):
    """Each stream draws its own tokens, and those of the definition."""
    case, every = given(200, rows=20, seed=1), range(3)
    got = [module.sample(*case, stream) for stream in every]
    assert all(torch.equal(got[i], module.sample_reference(*case, i)) for i in every)
    assert all((got[i] != got[i - 1]).any() for i in every)


POSITION = 169_383_018  # of seed 0: its words are 0x80000004 and 0xd343c38a; one position in 2^28 will do


# ---------------------------------------------------------------- the right kernel
@needs_kernel
@pytest.mark.parametrize("V, seed", [(1, 0), (2, 1), (63, 2), (64, 3), (65, 4), (130, 5)])
def test_sample(V, seed, monkeypatch):
    monkeypatch.setattr(sample, "BLOCK", 64)  # rows of one tile and of several
    agree(sample, given(V, rows=8 if V < 64 else 4, seed=seed))


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype(dtype):
    agree(sample, given(40, dtype=dtype))


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_more_rows(seed, monkeypatch):
    monkeypatch.setattr(sample, "BLOCK", 128)
    agree(sample, given(300, rows=16, seed=seed, rounding=[1e-3, 1.0][seed % 2]))


@needs_kernel
def test_ties():
    agree(sample, neighbouring_floats())
    agree(sample, equal_weights(16, [(0, 0.5), (0, 0.25), (3, 1.0), (15, 1.0), (8, 0.5), (0, 1.0)]))


@needs_kernel
def test_broken_rows():
    check_broken(sample)


@needs_kernel
def test_all_bits_of_the_random_number_count():
    check_all_bits_count(sample)


@needs_kernel
def test_streams():
    check_streams(sample)


@needs_kernel
def test_no_rows():
    assert sample.sample(*(x[:0] for x in given(8))).tolist() == []


@needs_kernel
def test_a_batch_through_the_kernel_equals_its_rows():
    """The Sampler hands rows that are drawn to the kernel, those with penalties among them."""
    every = [
        dict(),
        dict(temperature=1.0, top_p=0.7),
        dict(temperature=0.5, frequency_penalty=2.0, seed=-1),
        dict(frequency_penalty=2.0, logit_bias={3: 1.0}),
        dict(temperature=2.0, top_k=3, min_p=0.1),
    ]
    sampler, outputs = Sampler(9, 20, DEVICE), [[] for _ in every]
    for seat, asked in enumerate(every):
        sampler.put(2 * seat, SamplingParams(**asked), seat - 2, [1], [], [])
    for position in range(3):
        logits = checks.randn(5, 20, seed=position)
        got = sampler(logits, torch.tensor([0, 2, 4, 6, 8]), [position] * 5).tokens.tolist()
        for row, asked in enumerate(every):
            alone = sampling.sample(
                logits[row], SamplingParams(**asked), row - 2, position, [1], outputs[row]
            )
            assert got[row] == alone
            outputs[row].append(alone)


def test_refusals_say_what_to_change():
    case = given(8)
    for i, wrong, message in [
        (0, case[0].T, r"sample: logits .* must be contiguous"),
        (0, case[0][0], r"logits \[8\] must be \[rows, vocabulary\]"),
        (0, torch.empty(8, 2**19 + 1, device="meta"), r"1 to 524,288 tokens"),
        (1, case[1].double(), r"temperature is \[8\] torch.float64 .* must be \[8\] torch.float32"),
        (2, case[2].int(), r"top_k is .* must be \[8\] torch.int64"),
        (3, case[3].float(), "top_p is "),
        (4, case[4][:3], r"min_p is \[3\]"),
        (6, case[6].repeat_interleave(2)[::2], "positions is .*contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            sample.sample(*case[:i], wrong, *case[i + 1 :])


# ---------------------------------------------------------------- wrong kernels
MUTATIONS = [
    ("temperature forgotten", "exp(-d / cool)", "exp(-d)"),
    ("temperature multiplies", "exp(-d / cool)", "exp(-d * cool)"),
    ("one token too few", "COUNT, V, BLOCK) < need", "COUNT, V, BLOCK) < need - 1"),
    ("the last bit not searched", "for step in range(31)", "for step in range(30)"),
    ("top-k keeps all that tie", "ties = top_k - _below(row_ptr, edge, best, cool, True, V, BLOCK)", "ties += V"),
    ("the last of those that tie", "tl.cumsum(on_edge, axis=0) <= ties", "tl.cumsum(on_edge, axis=0) > ties"),
    ("ties counted afresh in each tile", "axis=0)\n        left -= on_edge\n    return",
     "axis=0)\n    return"),
    ("top-p drops the token that crosses", "ties = (need + each - 1) // each", "ties = (need - 1) // each"),
    ("top-p keeps all that tie", "ties = (need + each - 1) // each", "ties += V"),
    ("top-p of the whole row", "edge, ties, 0, V, BLOCK)", "0x7FFFFFFF, ties, 0, V, BLOCK)"),
    ("top-p ignored", "if top_p < 1:", "if top_p < 0:"),
    ("min-p ignored", "weight >= least", "weight >= 0"),
    ("min-p keeps only what is above", "weight >= least", "weight > least"),
    ("greedy takes the last", "first = tl.min(tl.where(x == highest, i, V), axis=0)",
     "first = tl.max(tl.where(x == highest, i, 0), axis=0)"),
    ("a later tile wins a tie", "if highest > best:", "if highest >= best:"),
    ("NaN passes", "(broken > 0) | ", ""),
    ("nothing but -inf passes", ' | (best == -float("inf"))', ""),
    ("the position's low word alone", "(position >> 32).to(tl.uint32)", "tl.full([], 0, tl.uint32)"),
    ("the seed's sign lost", "tl.load(seeds_ptr + b).to(tl.uint64, bitcast=True)",
     "(tl.load(seeds_ptr + b) & 0x7FFFFFFFFFFFFFFF).to(tl.uint64, bitcast=True)"),
    ("one stream for all", "tl.full([], STREAM, tl.uint32)", "tl.full([], 0, tl.uint32)"),
    ("half of the random bits", "(high >> 6).to(tl.float64)", "0.0"),
    ("the token after", "axis=0) + passed <= target", "axis=0) - weight + passed <= target"),
    ("tiles not added up", "axis=0) + passed <= target", "axis=0) <= target"),
    ("reads past the row", "mask=i < V, other=-float(\"inf\")).to(tl.float32)                   # [BLOCK]\n    d =",
     "mask=i < V + 1, other=-float(\"inf\")).to(tl.float32)                   # [BLOCK]\n    d ="),
    ("taken for contiguous", "b * logits_stride", "b * V"),
    ("the first row's seed", "seeds_ptr + b", "seeds_ptr"),
]  # fmt: skip


def battery(module):
    module.BLOCK = 16
    check_all_bits_count(module)
    agree(module, equal_weights(20, [(18, 1.0), (0, 0.5), (8, 0.5), (0, 1.0)]))
    agree(module, neighbouring_floats())
    check_broken(module)
    for seed in range(4):
        agree(module, given(24, rows=8, seed=seed, rounding=0.5 if seed % 2 else 1e-4))
    check_streams(module)


in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="wrong kernels run in the interpreter only")


@in_the_interpreter
@pytest.mark.slow
def test_the_right_kernel_passes(tmp_path):
    battery(load("sample", source_of("sample"), tmp_path))


@in_the_interpreter
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("what, right, wrong", MUTATIONS, ids=[m[0] for m in MUTATIONS])
def test_the_wrong_kernel_is_rejected(what, right, wrong, tmp_path):
    with pytest.raises(AssertionError):
        battery(load("sample", changed("sample", right, wrong), tmp_path))
