"""What a right product with quantized weights does: the tests call it on ours, the mutations on wrong ones."""

import torch
from kernel_checks import DEVICE, TOLERANCE, moat, randn, wide

from minserve.kernels import int4_matmul as int4
from minserve.kernels import int8_matmul as int8

REFERENCE = {4: int4.int4_matmul_reference, 8: int8.int8_matmul_reference}


def integers(low, high, *shape, dtype, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=gen).to(dtype).to(DEVICE)


def case(bits, M, N, K, group, zeros=True, bias=True, dtype=torch.float32, wide_scales=False, seed=0):
    """x, qweight, scales, zeros, group, bias: NaN around x, scales and bias, other numbers around the integers."""
    Q = -(-K // (group or K))
    x = wide(randn(M, K, dtype=dtype, seed=seed))
    held, kind, step = (-(-K // 8), torch.int32, 1 / 8) if bits == 4 else (K, torch.int8, 1 / 128)
    least = -(2 ** (8 * kind.itemsize - 1))
    room = integers(least, -least, N + 2, held + 4, dtype=kind, seed=seed + 1)
    scales = moat(((randn(N, Q, seed=seed + 2) / 4 + 1) * step).to(torch.float32 if wide_scales else dtype))
    if zeros:
        low, kind = (0, torch.uint8) if bits == 4 else (-100, torch.int8)
        zeros = integers(low, 16 if bits == 4 else 100, N + 5, Q, dtype=kind, seed=seed + 3)[2:-3]
    bias = moat(randn(N, dtype=dtype, seed=seed + 4) * 10) if bias else None
    return x, room[1:-1, :held], scales, zeros if torch.is_tensor(zeros) else None, group, bias


def close(got, expected, K):
    """Sums of K products of numbers around 1."""
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, **dict(tolerance, atol=tolerance["atol"] * K**0.5))


def words(bits, qweight):
    return qweight if bits == 4 else qweight.view(torch.int32)


def check_packed(module, road, bits, M, N, K, group, splits=None, **kind):
    """road: by_gemv, by_dot or by_dense, as the module at hand has them."""
    x, qweight, *rest = case(bits, M, N, K, group, **kind)
    more = {} if splits is None else dict(splits=splits)
    got = getattr(module, road)(bits, x, words(bits, qweight), *rest, **more)
    close(got, REFERENCE[bits](x, qweight, *rest), K)


def check_w8a8(module, M, N, K, bias=True, dtype=torch.float32, full=False, seed=0):
    """The integers are summed exactly: scales are powers of two, so the results are equal to the last bit."""
    x8, qweight = (
        integers(-128, 128, rows + 2, K + 4, dtype=torch.int8, seed=seed + rows)[1:-1, :K] for rows in (M, N)
    )
    if full:  # the largest sum there can be
        x8, qweight = torch.full_like(x8, -128), torch.full_like(qweight, -128)
    scales = [moat(2.0 ** integers(-9, -5, rows, dtype=torch.float32, seed=rows)) for rows in (M, N)]
    scales[1] = moat(scales[1].to(dtype))
    bias = moat(randn(N, dtype=dtype, seed=seed)) if bias else None
    case = x8, scales[0], qweight, scales[1], bias, dtype
    got = module.w8a8_matmul(*case)
    sums = (x8.cpu().long() @ qweight.cpu().long().T).to(DEVICE).float()  # no definition of ours
    expected = sums * scales[0][:, None] * scales[1].float()
    expected = (expected if bias is None else expected + bias.float()).to(dtype)
    assert got.dtype == dtype and torch.equal(got, expected)
    assert torch.equal(module.w8a8_matmul_reference(*case), expected)
