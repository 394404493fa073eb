"""Wrong versions of native_kv.cpp, each rejected by the checks the right one passes: see test_native_mutations.py."""

import pytest
import test_native_kv as checks
from test_native import BF16, FP32, needs_native
from test_native_mutations import rejecting

pytestmark = [pytest.mark.slow, needs_native]


def write(ops):
    for dtype in (FP32, BF16):
        checks.check_write(ops, dtype)


def seal(ops):
    for dtype in (FP32, BF16):
        checks.check_seal(ops, dtype)
    checks.check_seal(ops, ids=checks.torch.int32)
    checks.check_half_to_nearest(ops)


def attend(name, ops):
    for window, sinks in [(None, 0), (5, 3), (40, 4)]:
        checks.check_attend(ops, name, [1, 0, 15, 16, 17, 150], window=window, sinks=sinks)
        checks.check_attend(ops, name, [4, 130], H=7, G=1, D=16, S=4, dtype=BF16, window=window, sinks=sinks)
    checks.check_nan_stays(ops)
    checks.check_far(ops)


def scaled(ops):
    attend("attend_scaled", ops)
    checks.check_trees(ops, [1, 0, 62, 63, 64, 65, 300, 20])


def int4(ops):
    checks.check_half_is_read(ops)
    attend("attend_int4", ops)


MUTATIONS = {
    write: [
        ("cut off instead of rounded", "put(out + i, nearest(y), n - i)",
         "put(out + i, __builtin_convertvector(y, ivec), n - i)"),
        ("128 levels", "((vec)sizes)[0] / 127", "((vec)sizes)[0] / 128"),
        ("the largest, with its sign", "(ivec)load(x + i, n - i) & 0x7fffffff", "(ivec)load(x + i, n - i)"),
        ("the largest of a lane", "sizes[0] = std::max(sizes[0], sizes[i])", "sizes[0] = sizes[0]"),
        ("zero by zero", "scale > 0 && scale < INF ?", "scale < INF ?"),
        ("the least scales overflow", "y = y < -127.f ? vec{} - 127.f : y > 127.f ? vec{} + 127.f : y;  ", "  "),
        ("writes past the row", "i < std::min<int64_t>(n, W); i++) p[i] = x[i]", "i < W; i++) p[i] = x[i]"),
        ("-1 written before the cache", "g < G && slots[t] >= 0", "g < G && slots[t] >= -1"),
        ("the token for its slot", "row = slots[t] * G + g", "row = t * G + g"),
        ("one scale per token", "k_scales[row] = quantize", "k_scales[row - g] = quantize"),
        ("keys written as values", "quantize(v + t * v_stride", "quantize(k + t * k_stride"),
        ("values spaced like keys", "v + t * v_stride", "v + t * k_stride"),
    ],
    seal: [
        ("halves of a byte swapped", "low.level(load(x, half - d)) | high.level(load(x + half, half - d)) << 4",
         "low.level(load(x, half - d)) << 4 | high.level(load(x + half, half - d))"),
        ("neighbours share a byte", "both = range.level(load(x + d, half - d)) | range.level(load(x + half + d,",
         "both = range.level(load(x + 2 * d, half - d)) | range.level(load(x + 2 * d + 1,"),
        ("16 steps", "(high - low) / 15.f", "(high - low) / 16.f"),
        ("the range before it is rounded", "(x - from_half(minimum)) / step;",
         "(x - from_half(minimum)) / (step * 1.0004f);"),
        ("cut off instead of rounded", "step > 0.f ? nearest(n)", "step > 0.f ? __builtin_convertvector(n, ivec)"),
        ("zero by zero", "step > 0.f ? nearest(n) : ivec{}", "nearest(n) & 15"),
        ("no minimum", "(x - from_half(minimum)) / step", "x / step"),
        ("16 does not fit", "n > 15.f ? vec{} + 15.f : n", "n"),
        ("NaN overlooked", "broken |= x != x;", ""),
        ("NaN in values overlooked", "nan |= -(y != y)", "nan |= 0"),
        ("scale and minimum swapped", "*minima = scales + G * D", "*minima = scales, *unused = scales += G * D"),
        ("the first head's range", "(page * 2 * G + g) * D, *minima", "page * 2 * G * D, *minima"),
        ("-1 is a page", "if (page < 0) continue;", ""),
        ("narrow ids", "page = wide ?", "page = !wide ?"),
        ("the first page's tokens", "(starts[i] + s) * G + g", "(starts[0] + s) * G + g"),
        ("a token late", "(starts[i] + s) * G + g", "(starts[i] + s + 1) * G + g"),
        ("fp16 cut off", "(u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13", "(u - 0x38000000) >> 13"),
        ("fp16 ties upwards", "0xfff + (u >> 13 & 1)", "0x1000"),
        ("fp16 overflows", "x = x > HALF_MAX ? vec{} + HALF_MAX : x < -HALF_MAX ? vec{} - HALF_MAX : x;", ""),
        ("fp16 has no tiny numbers", "u < 0x38800000 ? tiny", "u < 0x38800000 ? uvec{}"),
    ],
    scaled: [
        ("keys not scaled", "scores[r][j] *= k_scales[j]", "scores[r][j] *= 1"),
        ("values not scaled", "weights[r][j] * v_scales[j];", "weights[r][j];"),
        ("the next token's scale", "scores[r][j] *= k_scales[j]", "scores[r][j] *= k_scales[(j + 1) % n]"),
        ("keys' scales for values", "v_scale = v_scales[row]", "v_scale = k_scales[row]"),
        ("the first head's scale", "k_scale = k_scales[row]", "k_scale = k_scales[row - g]"),
        ("one scale for both", "key = k_cache + row * D, k_scale = k_scales[row]",
         "key = k_cache + row * D, k_scale = v_scales[row]"),
        ("offsets of 32 bits", "key = k_cache + row * D", "key = k_cache + (int32_t)(row * D)"),
        ("trees forgotten", "lengths, trees, out, B, H, G, D, window, sinks, 2 * (D + 4)",
         "lengths, nullptr, out, B, H, G, D, window, sinks, 2 * (D + 4)"),
        ("values where keys are", "value = v_cache + row * D", "value = k_cache + row * D"),
    ],
    int4: [
        ("halves of a byte swapped", "both & 15, vec);\n    high = __builtin_convertvector(both >> 4, vec)",
         "both >> 4, vec);\n    high = __builtin_convertvector(both & 15, vec)"),
        ("levels with a sign", "both & 15, vec)", "(both & 15) - 8, vec)"),
        ("minimum forgotten", "scores[r][j] = least[r] + total(dot[r])", "scores[r][j] = total(dot[r])"),
        ("minimum counted again", "least[r] = total(dot[r]), dot[r] = vec{};", "least[r] = total(dot[r]);"),
        ("the first page's ranges", "if (!j || ranges[j] != ranges[j - 1])", "if (!j)"),
        ("the second half scaled like the first", "load(scaled[r] + pitch + d) * high", "load(scaled[r] + d) * high"),
        ("minima of the next head", "minima(G * D)", "minima(D)"),
        ("values: minimum forgotten", "base[r] = vec{} + total(base[r])", "base[r] = vec{}"),
        ("values: scale and minimum swapped", "v_affine[2 * row] | (uint32_t)v_affine[2 * row + 1] << 16",
         "v_affine[2 * row + 1] | (uint32_t)v_affine[2 * row] << 16"),
        ("values: the next token's range", "pair = v_affine[2 * row]", "pair = v_affine[2 * (row + G)]"),
        ("values: what is not there", "for (int j = n; j % W; j++) pairs[j] = 0;",
         "for (int j = n; j % W; j++) pairs[j] = 0x7e007e00;"),
        ("its own page sealed", "if (p >= first) return false;", "if (p >= first + S) return false;"),
        ("the page before it fresh", "if (p >= first) return false;", "if (p >= first - S) return false;"),
        ("a full page is not its own", "first = (lengths[b] - 1) & -S", "first = lengths[b] & -S"),
        ("the first row's home", "(home[b] + at(i) - first) * G + g", "(home[0] + at(i) - first) * G + g"),
        ("fresh from the row's beginning", "(home[b] + at(i) - first) * G + g", "(home[b] + at(i) % 2) * G + g"),
        ("fresh values like keys", "value = fresh_v + row * D", "value = fresh_k + row * D"),
        ("fp16 has no infinity", "== 0x7c00 ? bits | 0x7f800000 : size", "== 0x7c00 ? size : size"),
        ("fp16 has no sign", "(vec)(sign | (", "(vec)(0 * sign | ("),
        ("offsets of 32 bits", "key = k4 + row * half", "key = k4 + (int32_t)(row * half)"),
    ],
}  # fmt: skip
(
    others,
    wrong_ones,
    test_the_right_version_passes,
    test_the_wrong_version_is_rejected,
    test_there_are_enough,
) = rejecting(MUTATIONS, 2, least=8)
