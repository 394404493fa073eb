// ---------------------------------------------------------------- linear, with quantized weights
//     w = (q - zero) * scale     q: a byte, or a nibble of a word of eight; scale and zero: one for `group` columns
//
// q becomes a number in a register, and is read once for all rows of x. Lanes keep to themselves: in a step each sums
// q x over U columns of one group, then scales the sum once. Where zeros are given, the same for the sum of x alone.
// The columns of lane l in step s, u = 0 .. U - 1:
//     Bytes<U>   (s U + u) W + l    whole vectors; U = 1 takes any group, more must all lie in one
//     Nibbles    (s W + l) 8 + u    the nibbles of a word; x is laid out to fit
#ifdef __AVX512F__
static inline vec looked_up(const float* table, ivec i) { return _mm512_permutexvar_ps((__m512i)i, load(table)); }
static inline vec low_nibbles(ivec w) {                                        // only these bits are looked at
    const vec values = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return _mm512_permutexvar_ps((__m512i)w, values);
}
static inline ivec load(const int32_t* p, int64_t n) {
    return (ivec)_mm512_maskz_loadu_epi32(n >= W ? 0xffff : (1 << n) - 1, p);
}
#else
static inline vec looked_up(const float* table, ivec i) {
    vec x;
    for (int j = 0; j < W; j++) x[j] = table[i[j]];
    return x;
}
static inline vec low_nibbles(ivec w) { return __builtin_convertvector(w & 15, vec) - 8.f; }
static inline ivec load(const int32_t* p, int64_t n) {
    ivec x = {};
    memcpy(&x, p, 4 * std::min<int64_t>(n, W));
    return x;
}
#endif
static inline float number(float x) { return x; }
static inline float number(bf16 x) {
    uint32_t u = (uint32_t)x << 16;
    float y;
    memcpy(&y, &u, 4);
    return y;
}
constexpr int64_t AHEAD = 8192;                                                // bytes: what is read soon is on its way
template <int VECTORS> struct Bytes {
    typedef int8_t stored, zero;
    static constexpr int U = VECTORS, HELD = U * W, MIDDLE = 0;                // HELD: stored things of a step
    static int64_t column(int64_t s, int u, int l) { return (s * U + u) * W + l; }
    const int8_t* p;
    int64_t left;
    Bytes(const int8_t* p, int64_t left) : p(p), left(left) {
        for (int i = 0; i < HELD; i += 64) __builtin_prefetch(p + AHEAD + i);
    }
    vec operator[](int u) const { return load(p + u * W, left - u * W); }
};
struct Nibbles {
    typedef int32_t stored;
    typedef uint8_t zero;
    static constexpr int U = 8, HELD = W, MIDDLE = 8;
    static int64_t column(int64_t s, int u, int l) { return (s * W + l) * U + u; }
    ivec words;
    Nibbles(const int32_t* p, int64_t left) : words(load(p, left)) { __builtin_prefetch((const char*)p + AHEAD); }
    vec operator[](int u) const { return low_nibbles(words >> 4 * u); }
};

struct Quantized {  // a weight [N, K]; `held` stored things and Q scales a row
    const void *q, *scales, *zeros;
    int64_t N, K, group, wide, held, Q;                                        // wide: scales are fp32, not as x
    template <class E> float scale(int64_t i) const {
        return wide ? ((const float*)scales)[i] : number(((const E*)scales)[i]);
    }
};

// x in the order of the steps, as fp32 with zeros at the end, and the group of every lane: first[s] + lane[s].
template <class B> struct Laid {
    int64_t steps, pitch;
    std::vector<float> x, sums;
    std::vector<int64_t> first;
    std::vector<ivec> lane;
    template <class E> void lay(const E* from, int64_t T, const Quantized& w) {
        steps = (w.held + B::HELD - 1) / B::HELD, pitch = steps * B::U * W;
        x.resize(T * pitch), sums.resize(T * steps * W), first.resize(steps), lane.resize(steps);
        for (int64_t s = 0; s < steps; s++) {
            auto group = [&](int l) { return std::min((uint32_t)B::column(s, 0, l) / (uint32_t)w.group, (uint32_t)w.Q - 1); };
            first[s] = group(0);
            for (int l = 0; l < W; l++) lane[s][l] = group(l) - first[s];
        }
        for (int64_t t = 0; t < T; t++)
            for (int64_t s = 0; s < steps; s++) {
                float part[B::U][W];
                for (int u = 0; u < B::U; u++)
                    for (int l = 0; l < W; l++) {
                        int64_t k = B::column(s, u, l);
                        part[u][l] = k < w.K ? number(from[t * w.K + k]) : 0.f;
                    }
                memcpy(x.data() + t * pitch + s * B::U * W, part, sizeof part);
                vec sum = {};
                for (int u = 0; u < B::U; u++) sum += load(part[u]);
                store(sums.data() + (t * steps + s) * W, sum);
            }
    }
};

constexpr int BLOCK = 16;                                                      // rows of the weight that stay in L1
// M rows of x from row t on, and R of the rows n .. end - 1 of the weight at once; `scales`, `shifts` from row n on.
// The result is y [M, BLOCK]: no matter what x and out are made of, this is compiled once.
template <class B, int M, int R>
static void multiply(const Laid<B>& laid, int64_t t, const Quantized& w, const float* scales, const float* shifts,
                     float* y, int64_t n, int64_t end) {
    const float *x = laid.x.data() + t * laid.pitch, *x_sums = laid.sums.data() + t * laid.steps * W;
    for (int64_t begin = n; n < end; n += R) {
        int64_t row[R];
        vec sums[R][M] = {};
        for (int r = 0; r < R; r++) row[r] = std::min(n + r, end - 1);         // past the end: the last again
        auto step = [&](int64_t s, int64_t left) __attribute__((always_inline)) {
            for (int r = 0; r < R; r++) {
                B q((const typename B::stored*)w.q + row[r] * w.held + s * B::HELD, left);
                int64_t at = (row[r] - begin) * w.Q + laid.first[s];
                vec part[M] = {}, scale = looked_up(scales + at, laid.lane[s]);
                for (int u = 0; u < B::U; u++) {
                    vec number = q[u];
                    for (int m = 0; m < M; m++) part[m] += load(x + m * laid.pitch + (s * B::U + u) * W) * number;
                }
                for (int m = 0; m < M; m++) sums[r][m] += scale * part[m];
                if (!shifts) continue;
                vec shift = looked_up(shifts + at, laid.lane[s]);
                for (int m = 0; m < M; m++) sums[r][m] += shift * load(x_sums + (m * laid.steps + s) * W);
            }
        };
        int64_t whole = w.held / B::HELD;
        for (int64_t s = 0; s < whole; s++) step(s, B::HELD);
        if (whole < laid.steps) step(whole, w.held - whole * B::HELD);
        for (int r = 0; r < std::min<int64_t>(R, end - n); r++)
            for (int m = 0; m < M; m++) y[m * BLOCK + n - begin + r] = total(sums[r][m]);
    }
}

template <class B, class E>
static void linear_vectors(const E* x, const Quantized& w, const E* bias, E* out, int64_t T) {
    static thread_local Laid<B> own;
    Laid<B>& laid = own;
    laid.lay(x, T, w);
    #pragma omp parallel for schedule(static) num_threads(hands(w.N * w.held * sizeof(typename B::stored)))
    for (int64_t n = 0; n < w.N; n += BLOCK) {
        int64_t end = std::min(n + BLOCK, w.N), count = (end - n) * w.Q, t = 0;
        static thread_local std::vector<float> room;
        room.resize(2 * (count + W) + T * BLOCK);                              // the last look-ups load a whole vector
        float *scales = room.data(), *shifts = w.zeros ? scales + count + W : nullptr, *y = scales + 2 * (count + W);
        for (int64_t i = 0; i < count; i += W) {
            int64_t at = n * w.Q + i, left = count - i;
            vec scale = w.wide ? load((const float*)w.scales + at, left) : load((const E*)w.scales + at, left);
            store(scales + i, scale);
            if (shifts) store(shifts + i, scale * ((float)B::MIDDLE - load((const typename B::zero*)w.zeros + at, left)));
        }
        auto take = [&](auto rows) __attribute__((always_inline)) {
            constexpr int M = decltype(rows)::value, R = std::max(1, std::min(4, REGISTERS / 2 / M));
            for (; t + M <= T; t += M) multiply<B, M, R>(laid, t, w, scales, shifts, y + t * BLOCK, n, end);
        };
        take(std::integral_constant<int, 8>{});
        take(std::integral_constant<int, 4>{});
        take(std::integral_constant<int, 2>{});
        take(std::integral_constant<int, 1>{});
        for (t = 0; t < T; t++)
            for (int64_t i = n; i < end; i += W) {
                vec sum = load(y + t * BLOCK + i - n, end - i);
                store(out + t * w.N + i, bias ? sum + load(bias + i, end - i) : sum, end - i);
            }
    }
}

// ---------------------------------------------------------------- the same with a matrix unit
// 32 rows of the weight at a time become bf16, CHUNK columns ahead of their use, in a buffer that stays in the cache. A
// scale a row: the integers are exact in bf16 and the sums are scaled. A scale a group: (q - zero) * scale is rounded to
// bf16, as if it were stored so.
#ifndef NO_TILES
// Columns k .. end - 1 of a row, 32 at a time.
static void to_bf16(const int8_t* row, int64_t k, int64_t end, float zero, float scale, bf16* to) {
    for (; k < end; k += 32) {
        __builtin_prefetch(row + k + AHEAD);
        vec low = (load(row + k) - zero) * scale, high = (load(row + k + W) - zero) * scale;
        __m512bh both = _mm512_cvtne2ps_pbh(high, low);
        memcpy(to + k, &both, sizeof both);
    }
}
static void to_bf16(const int32_t* row, int64_t k, int64_t end, float zero, float scale, bf16* to) {
    const vec nibbles = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    __m256bh values = _mm512_cvtneps_pbh((nibbles - zero) * scale);
    __m512i table = _mm512_broadcast_i64x4((__m256i)values);                   // twice: five bits of an index count
    for (; k < end; k += 32) {
        const char* bytes = (const char*)row + k / 2;
        __builtin_prefetch(bytes + AHEAD);
        ivec pairs = widened((const uint8_t*)bytes);                           // the low nibble in the lower half,
        __m512i both = _mm512_permutexvar_epi16((__m512i)(pairs | pairs << 12), table);  // the high one in the upper
        memcpy(to + k, &both, sizeof both);
    }
}

template <class B> struct Unpacked {  // 32 rows from row n on, as linear_tiles wants them
    const Quantized& w;
    int64_t n, ring, row, done = 0;                                            // ring: columns that there is room for
    float* scales;
    bf16* room;
    Unpacked(const Quantized& w, int64_t n, int64_t ring) : w(w), n(n), ring(ring), row(ring + 32) {
        static thread_local std::vector<bf16> numbers;
        static thread_local float sums[32];
        numbers.resize(32 * row);
        room = numbers.data(), scales = w.Q == 1 ? sums : nullptr;
        for (int64_t r = 0; scales && r < 32; r++) sums[r] = w.scale<bf16>(n + r);
    }
    void ready(int64_t k) {                                                    // and the columns that are next
        for (int64_t g, next, end = std::min(k + 2 * CHUNK, w.K); done < end; done = next) {
            g = done / w.group, next = std::min({(g + 1) * w.group, (done / CHUNK + 1) * CHUNK, end});
            const Quantized own = w;                                           // what is stored below is not among it
            bf16* to = room + done % ring - done;
            for (int64_t r = 0; r < 32; r++) {
                int64_t at = (n + r) * own.Q + g;
                float zero = own.zeros ? ((const typename B::zero*)own.zeros)[at] : B::MIDDLE;
                to_bf16((const typename B::stored*)own.q + (n + r) * own.held, done, next, zero,
                        scales ? 1.f : own.scale<bf16>(at), to + r * row);
            }
        }
    }
    const bf16* at(int64_t k) const { return room + k % ring; }
    void prefetch(int64_t) const {}
};
#endif

template <class B>  // native_digits.cpp; false: it does not take this
static bool linear_digits(const bf16* x, const Quantized& w, const bf16* bias, bf16* out, int64_t T);

// With the matrix unit, where there is one and this is for it. B: how it is stored.
template <class B, class E>
static bool linear_unit(const E* x, const Quantized& w, const E* bias, E* out, int64_t T) {
#ifndef NO_TILES
    constexpr int64_t FEW = 4;                                                 // rows of x for which vectors are as fast
    if constexpr (std::is_same_v<E, bf16>) {
        if (linear_digits<B>(x, w, bias, out, T)) return true;
        if (T > FEW && w.N >= 32 && w.K % 32 == 0 && (w.Q == 1 || w.group % 32 == 0) && has_tiles()) {
            auto panel = [&](int64_t n) { return Unpacked<B>(w, n, T > 32 ? w.K + CHUNK : 2 * CHUNK); };
            linear_tiles(x, panel, bias, out, T, w.N, w.K, w.N * w.held * (int64_t)sizeof(typename B::stored));
            return true;
        }
    }
#endif
    return false;
}

template <class E>
static void linear_int8(const E* x, const int8_t* q, const void* scales, const int8_t* zeros, const E* bias, E* out,
                        int64_t T, int64_t N, int64_t K, int64_t group, int64_t wide) {
    Quantized w = {q, scales, zeros, N, K, group, wide, K, (K + group - 1) / group};
    if (linear_unit<Bytes<1>>(x, w, bias, out, T)) return;
    if (w.Q == 1 || group % (8 * W) == 0) linear_vectors<Bytes<8>>(x, w, bias, out, T);
    else linear_vectors<Bytes<1>>(x, w, bias, out, T);
}

template <class E>
static void linear_int4(const E* x, const int32_t* q, const void* scales, const uint8_t* zeros, const E* bias, E* out,
                        int64_t T, int64_t N, int64_t K, int64_t group, int64_t wide) {
    Quantized w = {q, scales, zeros, N, K, group, wide, (K + 7) / 8, (K + group - 1) / group};
    if (!linear_unit<Nibbles>(x, w, bias, out, T)) linear_vectors<Nibbles>(x, w, bias, out, T);
}

// ---------------------------------------------------------------- the weight itself
// Columns k .. end - 1 of a row, which share a scale and a zero.
template <class E> static void unpack(const int8_t* row, int64_t k, int64_t end, float zero, float scale, E* to) {
    for (; k < end; k += W) store(to + k, (load(row + k, end - k) - zero) * scale, end - k);
}
template <class E> static void unpack(const int32_t* row, int64_t k, int64_t end, float zero, float scale, E* to) {
    for (; k < end; k += 2 * W) {
        int64_t n = std::min<int64_t>(2 * W, end - k);
        uint8_t bytes[W] = {};
        E low[W], high[W], both[2 * W];
        memcpy(bytes, (const char*)row + k / 2, (n + 1) / 2);
        ivec pairs = widened(bytes);
        store(low, (__builtin_convertvector(pairs & 15, vec) - zero) * scale);
        store(high, (__builtin_convertvector(pairs >> 4, vec) - zero) * scale);
        for (int i = 0; i < W; i++) both[2 * i] = low[i], both[2 * i + 1] = high[i];
        memcpy(to + k, both, n * sizeof(E));
    }
}

template <class B, class E> static void dequantize(const Quantized& w, E* out) {
    #pragma omp parallel for schedule(static) num_threads(hands(w.N * w.K * sizeof(E)))
    for (int64_t n = 0; n < w.N; n++)
        for (int64_t g = 0; g < w.Q; g++) {
            int64_t at = n * w.Q + g, k = g * w.group, end = std::min(k + w.group, w.K);
            auto row = (const typename B::stored*)w.q + n * w.held;
            float zero = w.zeros ? ((const typename B::zero*)w.zeros)[at] : B::MIDDLE, scale = w.scale<E>(at);
#ifndef NO_TILES
            if constexpr (std::is_same_v<E, bf16>)
                if (k % 32 == 0 && end % 32 == 0) {
                    to_bf16(row, k, end, zero, scale, out + n * w.K);
                    continue;
                }
#endif
            unpack(row, k, end, zero, scale, out + n * w.K);
        }
}

template <class E>
static void dequantize_int8(E* out, const int8_t* q, const void* scales, const int8_t* zeros, int64_t N, int64_t K,
                            int64_t group, int64_t wide) {
    dequantize<Bytes<1>>(Quantized{q, scales, zeros, N, K, group, wide, K, (K + group - 1) / group}, out);
}

template <class E>
static void dequantize_int4(E* out, const int32_t* q, const void* scales, const uint8_t* zeros, int64_t N, int64_t K,
                            int64_t group, int64_t wide) {
    dequantize<Nibbles>(Quantized{q, scales, zeros, N, K, group, wide, (K + 7) / 8, (K + group - 1) / group}, out);
}

#if !defined(PART) || PART == 1
extern "C" {
EXPORT(linear_int8)
EXPORT(linear_int4)
EXPORT(dequantize_int8)
EXPORT(dequantize_int4)
}
#endif
