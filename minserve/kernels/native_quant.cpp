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
template <int VECTORS> struct Bytes {
    typedef int8_t stored, zero;
    static constexpr int U = VECTORS, HELD = U * W, MIDDLE = 0;                // HELD: stored things of a step
    static int64_t column(int64_t s, int u, int l) { return (s * U + u) * W + l; }
    const int8_t* p;
    int64_t left;
    Bytes(const int8_t* p, int64_t left) : p(p), left(left) {}
    vec operator[](int u) const { return load(p + u * W, left - u * W); }
};
struct Nibbles {
    typedef int32_t stored;
    typedef uint8_t zero;
    static constexpr int U = 8, HELD = W, MIDDLE = 8;
    static int64_t column(int64_t s, int u, int l) { return (s * W + l) * U + u; }
    ivec words;
    Nibbles(const int32_t* p, int64_t left) : words(load(p, left)) {}
    vec operator[](int u) const { return low_nibbles(words >> 4 * u); }
};

struct Quantized {  // a weight [N, K]; `held` stored things and Q scales a row
    const void *q, *scales, *zeros;
    int64_t N, K, group, wide, held, Q;                                        // wide: scales are fp32, not as x
    template <class E> float scale(int64_t i) const {
        return wide ? ((const float*)scales)[i] : load((const E*)scales + i, 1)[0];
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
    static float number(float x) { return x; }
    static float number(bf16 x) {
        uint32_t u = (uint32_t)x << 16;
        float y;
        memcpy(&y, &u, 4);
        return y;
    }
};

// M rows of x from row t on, and R of the rows n .. end - 1 of the weight at once; `scales` and `shifts` from row n on.
template <class B, int M, int R, class E>
static void multiply(const Laid<B>& laid, int64_t t, const Quantized& w, const float* scales, const float* shifts,
                     const E* bias, E* out, int64_t n, int64_t end) {
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
        for (int r = 0; r < R && n + r < end; r++)
            for (int m = 0; m < M; m++) {
                vec y = {total(sums[r][m]) + (bias ? load(bias + n + r, 1)[0] : 0.f)};
                store(out + (t + m) * w.N + n + r, y, 1);
            }
    }
}

template <class B, class E>
static void linear_vectors(const E* x, const Quantized& w, const E* bias, E* out, int64_t T) {
    constexpr int BLOCK = 16;                                                  // rows of the weight that stay in L1
    static thread_local Laid<B> own;
    Laid<B>& laid = own;
    laid.lay(x, T, w);
    #pragma omp parallel for schedule(static) num_threads(hands(w.N * w.held * sizeof(typename B::stored)))
    for (int64_t n = 0; n < w.N; n += BLOCK) {
        int64_t end = std::min(n + BLOCK, w.N), count = (end - n) * w.Q, t = 0;
        static thread_local std::vector<float> room;
        room.resize(2 * (count + W));                                          // the last look-ups load a whole vector
        float *scales = room.data(), *shifts = w.zeros ? scales + count + W : nullptr;
        for (int64_t i = 0; i < count; i += W) {
            int64_t at = n * w.Q + i, left = count - i;
            vec scale = w.wide ? load((const float*)w.scales + at, left) : load((const E*)w.scales + at, left);
            store(scales + i, scale);
            if (shifts) store(shifts + i, scale * ((float)B::MIDDLE - load((const typename B::zero*)w.zeros + at, left)));
        }
        auto some = [&](auto rows) __attribute__((always_inline)) {
            constexpr int M = decltype(rows)::value, R = std::max(1, std::min(4, REGISTERS / 2 / M));
            for (; t + M <= T; t += M) multiply<B, M, R>(laid, t, w, scales, shifts, bias, out, n, end);
        };
        some(std::integral_constant<int, 8>{});
        some(std::integral_constant<int, 4>{});
        some(std::integral_constant<int, 2>{});
        some(std::integral_constant<int, 1>{});
    }
}

template <class E>
static void linear_int8(const E* x, const int8_t* q, const void* scales, const int8_t* zeros, const E* bias, E* out,
                        int64_t T, int64_t N, int64_t K, int64_t group, int64_t wide) {
    Quantized w = {q, scales, zeros, N, K, group, wide, K, (K + group - 1) / group};
    if (w.Q == 1 || group % (8 * W) == 0) linear_vectors<Bytes<8>>(x, w, bias, out, T);
    else if (group % (2 * W) == 0) linear_vectors<Bytes<2>>(x, w, bias, out, T);
    else linear_vectors<Bytes<1>>(x, w, bias, out, T);
}

template <class E>
static void linear_int4(const E* x, const int32_t* q, const void* scales, const uint8_t* zeros, const E* bias, E* out,
                        int64_t T, int64_t N, int64_t K, int64_t group, int64_t wide) {
    Quantized w = {q, scales, zeros, N, K, group, wide, (K + 7) / 8, (K + group - 1) / group};
    linear_vectors<Nibbles>(x, w, bias, out, T);
}

extern "C" {
EXPORT(linear_int8)
EXPORT(linear_int4)
}
