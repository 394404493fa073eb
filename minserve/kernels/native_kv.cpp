// ---------------------------------------------------------------- quantized KV caches
// What is stored, and what it means: kernels/kv_quantize.py, kernels/quantized_attention.py. The caches lie in memory
// without gaps: row (slot * G + g) of any of them belongs to key head g of that slot, slots counted through the pages.
//
// How it is fast     Numbers are read as they are stored and become floats in registers. The scale that a row shares is
//                    a factor of its score or of its weight; what a page shares per channel is folded into the query.
constexpr float HALF_MAX = 65504;  // the largest fp16

static inline ivec nearest(vec x) { return (ivec)(x + 12582912.f) - 0x4b400000; }  // as in exp; ties to even
// The lowest bits of the first n lanes.
template <class B> static inline void put(B* p, ivec x, int64_t n) {
    for (int i = 0; i < std::min<int64_t>(n, W); i++) p[i] = x[i];
}
static inline uvec halves(const uint16_t* p, int64_t n) { return (uvec)load(p, n) >> 16; }
// With its exponent's bits in their place, a fp16 is 2^112 too small; inf and NaN have all of those bits.
static inline vec from_half(uvec x) {
    uvec bits = (x & 0x7fff) << 13, sign = (x & 0x8000) << 16, size = (uvec)((vec)bits * 0x1p112f);
    return (vec)(sign | ((x & 0x7c00) == 0x7c00 ? bits | 0x7f800000 : size));
}
// To nearest, ties to even; what is larger than the largest becomes it. The least fp16 are multiples of 2^-24.
static inline uvec to_half(vec x) {
    x = x > HALF_MAX ? vec{} + HALF_MAX : x < -HALF_MAX ? vec{} - HALF_MAX : x;
    uvec sign = (uvec)x >> 16 & 0x8000, u = (uvec)x & 0x7fffffff;
    uvec normal = (u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13, tiny = (uvec)((vec)u + 0.5f) - 0x3f000000;
    return sign | (x != x ? uvec{} + 0x7e00 : u < 0x38800000 ? tiny : normal);
}

// ---------------------------------------------------------------- 8 bits: a scale per row
template <class E> static float quantize(const E* x, int8_t* out, int64_t n) {
    ivec sizes = {};
    for (int64_t i = 0; i < n; i += W) {
        ivec size = (ivec)load(x + i, n - i) & 0x7fffffff;                     // compared as integers, NaN is the largest
        sizes = size > sizes ? size : sizes;
    }
    for (int i = 1; i < W; i++) sizes[0] = std::max(sizes[0], sizes[i]);
    float scale = ((vec)sizes)[0] / 127;
    for (int64_t i = 0; i < n; i += W) {
        vec y = scale > 0 && scale < INF ? load(x + i, n - i) / scale : vec{};
        y = y < -127.f ? vec{} - 127.f : y > 127.f ? vec{} + 127.f : y;        // the least scales are inexact
        put(out + i, nearest(y), n - i);
    }
    return scale;
}

template <class E>
static void kv_write_scaled(const E* k, const E* v, int8_t* k_cache, int8_t* v_cache, float* k_scales, float* v_scales,
                            const int64_t* slots, int64_t T, int64_t G, int64_t D, int64_t k_stride, int64_t v_stride) {
    #pragma omp parallel for num_threads(hands(2 * T * G * D * sizeof(E)))
    for (int64_t t = 0; t < T; t++)
        for (int64_t g = 0; g < G && slots[t] >= 0; g++) {                     // padding has no place in the cache
            int64_t row = slots[t] * G + g;
            k_scales[row] = quantize(k + t * k_stride + g * D, k_cache + row * D, D);
            v_scales[row] = quantize(v + t * v_stride + g * D, v_cache + row * D, D);
        }
}

template <class Find> struct Scaled : Rows<int8_t, Find> {
    using Base = Rows<int8_t, Find>;
    float k_scales[TILE], v_scales[TILE];
    using Base::Base;

    int look(int64_t begin, int64_t left) {
        int n = std::min<int64_t>(TILE, left);
        for (int j = 0; j < n; j++) {
            this->find(begin + j, this->keys[j], this->values[j], k_scales[j], v_scales[j]);
            soon(this->keys[j], this->D);
            soon(this->values[j], this->D);
        }
        return n;
    }
    template <int R> void score(const float (&q)[R][MOST_D], int n, float (&scores)[R][TILE]) const {
        Base::score(q, n, scores);
        for (int r = 0; r < R; r++)
            for (int j = 0; j < n; j++) scores[r][j] *= k_scales[j];
    }
    template <int R> void weigh(const float (&weights)[R][TILE], int n, float (&acc)[R][MOST_D]) const {
        alignas(64) float scaled[R][TILE];
        for (int r = 0; r < R; r++)
            for (int j = 0; j < n; j++) scaled[r][j] = weights[r][j] * v_scales[j];
        Base::weigh(scaled, n, acc);
    }
};

template <class E>
static void attend_scaled(const E* q, const int8_t* k_cache, const int8_t* v_cache, const float* k_scales,
                          const float* v_scales, const int32_t* tables, const int32_t* lengths, const int64_t* trees,
                          E* out, int64_t B, int64_t H, int64_t G, int64_t D, int64_t S, int64_t table_stride,
                          int64_t window, int64_t sinks) {
    int64_t shift = __builtin_ctzll(S);
    attend_rows(q, lengths, trees, out, B, H, G, D, window, sinks, 2 * (D + 4), [=](int64_t b, int64_t g, auto at) {
        const int32_t* table = tables + b * table_stride;
        auto find = [=](int64_t i, const int8_t*& key, const int8_t*& value, float& k_scale, float& v_scale) {
            int64_t p = at(i), page = table[p >> shift], row = (page * S + (p & (S - 1))) * G + g;
            key = k_cache + row * D, k_scale = k_scales[row];
            value = v_cache + row * D, v_scale = v_scales[row];
        };
        return Scaled<decltype(find)>(find, D);
    });
}

// ---------------------------------------------------------------- 4 bits: pages sealed when they are full
// 16 levels from the least to the largest number, as fp16 holds scale and minimum.
struct Range {
    uvec scale, minimum;
    Range(vec low, vec high, ivec nans)
        : scale(to_half(nans ? vec{} + NAN : (high - low) / 15.f)), minimum(to_half(nans ? vec{} + NAN : low)) {}
    ivec level(vec x) const {
        vec step = from_half(scale), n = (x - from_half(minimum)) / step;
        n = n < 0.f ? vec{} : n > 15.f ? vec{} + 15.f : n;
        return step > 0.f ? nearest(n) : ivec{};
    }
};
struct Extremes {
    vec low = vec{} + INF, high = vec{} - INF;
    ivec broken = {};
    void see(vec x) {
        low = x < low ? x : low;
        high = x > high ? x : high;
        broken |= x != x;
    }
};

// Pages whose tokens are starts[i] .. starts[i] + S - 1. Channels d and d + D/2 share a byte, d in its lower half.
template <class E>
static void seal(const E* fresh_k, const E* fresh_v, const int64_t* starts, const void* pages, uint8_t* k4, uint8_t* v4,
                 uint16_t* k_affine, uint16_t* v_affine, int64_t n, int64_t S, int64_t G, int64_t D, int64_t wide) {
    int64_t half = D / 2;
    #pragma omp parallel for num_threads(hands(2 * n * S * G * D * sizeof(E)))
    for (int64_t item = 0; item < n * G; item++) {
        int64_t i = item / G, g = item % G, page = wide ? ((const int64_t*)pages)[i] : ((const int32_t*)pages)[i];
        if (page < 0) continue;
        auto fresh = [&](const E* x, int64_t s) { return x + ((starts[i] + s) * G + g) * D; };
        uint16_t *scales = k_affine + (page * 2 * G + g) * D, *minima = scales + G * D;
        for (int64_t d = 0; d < half; d += W) {                                // keys: a range per channel
            auto range = [&](int64_t c) {
                Extremes seen;
                for (int64_t s = 0; s < S; s++) seen.see(load(fresh(fresh_k, s) + c, half - d));
                Range found(seen.low, seen.high, seen.broken);
                put(scales + c, (ivec)found.scale, half - d);
                put(minima + c, (ivec)found.minimum, half - d);
                return found;
            };
            Range low = range(d), high = range(half + d);
            for (int64_t s = 0; s < S; s++) {
                const E* x = fresh(fresh_k, s) + d;
                ivec both = low.level(load(x, half - d)) | high.level(load(x + half, half - d)) << 4;
                put(k4 + ((page * S + s) * G + g) * half + d, both, half - d);
            }
        }
        for (int64_t s = 0; s < S; s++) {                                      // values: a range per token
            const E* x = fresh(fresh_v, s);
            int64_t row = (page * S + s) * G + g;
            float low = INF, high = -INF;
            int32_t nan = 0;
            for (int64_t d = 0; d < D; d++) {
                float y = load(x + d, 1)[0];
                low = y < low ? y : low, high = y > high ? y : high, nan |= -(y != y);
            }
            Range range(vec{} + low, vec{} + high, ivec{} + nan);
            v_affine[2 * row] = range.scale[0], v_affine[2 * row + 1] = range.minimum[0];
            for (int64_t d = 0; d < half; d += W) {
                ivec both = range.level(load(x + d, half - d)) | range.level(load(x + half + d, half - d)) << 4;
                put(v4 + row * half + d, both, half - d);
            }
        }
    }
}

// Two channels to a byte: the vectors of the first and of the second half of the channels.
static inline void nibbles(const uint8_t* p, int64_t n, vec& low, vec& high) {
    uint8_t part[W] = {};
    if (n < W) p = (const uint8_t*)memcpy(part, p, n);
    ivec both = widened(p);
    low = __builtin_convertvector(both & 15, vec);
    high = __builtin_convertvector(both >> 4, vec);
}

// Sealed positions, and after them those of the query's own page, as they are. A tile holds either kind.
template <class E, class Find, class FindFresh> struct Sealed {
    static constexpr int PARTS = 2;
    Find find;
    Rows<E, FindFresh, 2> fresh;
    int64_t D, half, pitch, minima;                                            // minima lie so far behind their scales
    bool own;
    const uint8_t *keys[TILE], *values[TILE];
    const uint16_t* ranges[TILE];                                              // of the keys of the position's page
    alignas(64) uint32_t pairs[TILE];                                          // of the value: scale, minimum
    Sealed(Find find, FindFresh fresh, int64_t D, int64_t G)
        : find(find), fresh(fresh, D), D(D), half(D / 2), pitch((D / 2 + W - 1) / W * W), minima(G * D) {}

    int look(int64_t begin, int64_t left) {
        int n = 0;
        for (; n < std::min<int64_t>(TILE, left); n++) {
            if (!find(begin + n, keys[n], values[n], ranges[n], pairs[n])) break;
            soon(keys[n], half);
            soon(values[n], half);
        }
        for (int j = n; j % W; j++) pairs[j] = 0;
        own = !n;
        return own ? fresh.look(begin, left) : n;
    }
    // q . (minimum + n scale) = q . minimum + (q scale) . n: the first term and the bracket once per page
    template <int R> void score(const float (&q)[R][MOST_D], int n, float (&scores)[R][TILE]) const {
        if (own) return fresh.score(q, n, scores);
        alignas(64) float scaled[R][MOST_D];
        float least[R];
        for (int j = 0; j < n; j++) {
            vec dot[R] = {};
            if (!j || ranges[j] != ranges[j - 1]) {
                channels<2>(D, [&](int64_t d, int64_t c, int64_t left) {
                    vec scale = from_half(halves(ranges[j] + c, left));
                    vec minimum = from_half(halves(ranges[j] + minima + c, left));
                    for (int r = 0; r < R; r++) {
                        store(scaled[r] + d, load(q[r] + d) * scale);
                        dot[r] += load(q[r] + d) * minimum;
                    }
                });
                for (int r = 0; r < R; r++) least[r] = total(dot[r]), dot[r] = vec{};
            }
            for (int64_t d = 0; d < half; d += W) {
                vec low, high;
                nibbles(keys[j] + d, half - d, low, high);
                for (int r = 0; r < R; r++) dot[r] += load(scaled[r] + d) * low + load(scaled[r] + pitch + d) * high;
            }
            for (int r = 0; r < R; r++) scores[r][j] = least[r] + total(dot[r]);
        }
    }
    // sum of p (minimum + n scale) = sum of p minimum, in every channel, + sum of (p scale) n
    template <int R> void weigh(const float (&weights)[R][TILE], int n, float (&acc)[R][MOST_D]) const {
        if (own) return fresh.weigh(weights, n, acc);
        alignas(64) float scaled[R][TILE];
        vec base[R] = {};
        for (int j = 0; j < n; j += W) {
            uvec pair;
            memcpy(&pair, pairs + j, sizeof pair);
            vec scale = from_half(pair & 0xffff), minimum = from_half(pair >> 16);
            for (int r = 0; r < R; r++) {
                store(scaled[r] + j, load(weights[r] + j) * scale);
                base[r] += load(weights[r] + j) * minimum;
            }
        }
        for (int r = 0; r < R; r++) base[r] = vec{} + total(base[r]);
        for (int64_t d = 0; d < half; d += W) {
            vec lows[R], highs[R];
            for (int r = 0; r < R; r++) lows[r] = load(acc[r] + d) + base[r], highs[r] = load(acc[r] + pitch + d) + base[r];
            for (int j = 0; j < n; j++) {
                vec low, high;
                nibbles(values[j] + d, half - d, low, high);
                for (int r = 0; r < R; r++) lows[r] += scaled[r][j] * low, highs[r] += scaled[r][j] * high;
            }
            for (int r = 0; r < R; r++) store(acc[r] + d, lows[r]), store(acc[r] + pitch + d, highs[r]);
        }
    }
};

template <class E>
static void attend_int4(const E* q, const uint8_t* k4, const uint8_t* v4, const uint16_t* k_affine,
                        const uint16_t* v_affine, const E* fresh_k, const E* fresh_v, const int64_t* home,
                        const int32_t* tables, const int32_t* lengths, E* out, int64_t B, int64_t H, int64_t G, int64_t D,
                        int64_t S, int64_t table_stride, int64_t window, int64_t sinks) {
    int64_t shift = __builtin_ctzll(S), half = D / 2;
    attend_rows(q, lengths, nullptr, out, B, H, G, D, window, sinks, D, [=](int64_t b, int64_t g, auto at) {
        const int32_t* table = tables + b * table_stride;
        int64_t first = (lengths[b] - 1) & -S;                                 // of the page that the query stands in
        auto find = [=](int64_t i, const uint8_t*& key, const uint8_t*& value, const uint16_t*& range, uint32_t& pair) {
            int64_t p = at(i);
            if (p >= first) return false;
            int64_t page = table[p >> shift], row = (page * S + (p & (S - 1))) * G + g;
            key = k4 + row * half, value = v4 + row * half, range = k_affine + (page * 2 * G + g) * D;
            pair = v_affine[2 * row] | (uint32_t)v_affine[2 * row + 1] << 16;
            return true;
        };
        auto fresh = [=](int64_t i, const E*& key, const E*& value) {
            int64_t row = (home[b] + at(i) - first) * G + g;
            key = fresh_k + row * D, value = fresh_v + row * D;
        };
        return Sealed<E, decltype(find), decltype(fresh)>(find, fresh, D, G);
    });
}

#if !defined(PART) || PART == 2
extern "C" {
EXPORT(kv_write_scaled)
EXPORT(attend_scaled)
EXPORT(seal)
EXPORT(attend_int4)
}
#endif
