// The kernels of the fast step for a CPU: the same operations as the Triton files beside this one, whose
// definitions they equal. kernels/native.py compiles this file with the user's compiler and calls it.
//
//   T tokens, E hidden, H query heads, G key/value heads, D channels of a head, I intermediate, V vocabulary
//   N x K a weight, B rows of a batch, S slots of a page, M entries of a row's page table
//
// How it is fast     Decoding reads every weight once per step: memory bandwidth is the ceiling. So weights are
//                    read once, in order, several rows at a time, each thread its own contiguous part.
// How it is right    Whatever the element type, sums are fp32 and rounded once, at the store, to nearest even.
//                    Nothing assumes finite numbers: NaN stays NaN, so a broken model does not look well.
//                    A result does not depend on the number of threads, nor on the other rows of the batch.
// What it relies on  Vectors are a compiler extension that GCC and Clang share, for x86 as for ARM. Addresses are
//                    64 bits wide before they meet a stride.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

// ---------------------------------------------------------------- vectors
#if defined(__AVX512F__)
constexpr int W = 16, REGISTERS = 32;  // lanes of a vector of floats; how many vectors a core holds at once
#elif defined(__AVX__)
constexpr int W = 8, REGISTERS = 16;
#else
constexpr int W = 4, REGISTERS = 16;
#endif
typedef float lanes4 __attribute__((vector_size(16)));
typedef float lanes8 __attribute__((vector_size(32)));
typedef float lanes16 __attribute__((vector_size(64)));
typedef float vec __attribute__((vector_size(4 * W)));  // one of these three
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t hvec __attribute__((vector_size(2 * W)));
typedef uint16_t bf16;  // the upper half of a float
constexpr float INF = __builtin_inff();

static inline vec load(const float* p) {
    vec x;
    memcpy(&x, p, sizeof x);  // becomes one load that need not be aligned
    return x;
}
static inline vec load(const bf16* p) {
    hvec x;
    memcpy(&x, p, sizeof x);
    return (vec)(__builtin_convertvector(x, uvec) << 16);
}
// Bytes, as numbers. One instruction, where there is one: compilers find it in no form of what follows.
#if defined(__AVX512F__)
static inline ivec widened(const int8_t* p) { return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
static inline ivec widened(const uint8_t* p) { return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
#elif defined(__AVX2__)
static inline ivec widened(const int8_t* p) { return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
static inline ivec widened(const uint8_t* p) { return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
#else
template <class B> static inline ivec widened(const B* p) {
    ivec x;
    for (int i = 0; i < W; i++) x[i] = p[i];
    return x;
}
#endif
static inline vec load(const int8_t* p) { return __builtin_convertvector(widened(p), vec); }
static inline vec load(const uint8_t* p) { return __builtin_convertvector(widened(p), vec); }
static inline void store(float* p, vec x) { memcpy(p, &x, sizeof x); }
static inline void store(bf16* p, vec x) {
    uvec u = (uvec)x;
    uvec rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;                       // to nearest, ties to even
    uvec any = x == x ? rounded : uvec{} + 0x7fc0;                             // NaN would round to inf
    hvec half = __builtin_convertvector(any, hvec);
    memcpy(p, &half, sizeof half);
}
// The last n lanes of a row: what lies behind them is neither read nor written.
template <class E> static inline vec load(const E* p, int64_t n) {
    if (n >= W) return load(p);
    E part[W] = {};
    for (int i = 0; i < n; i++) part[i] = p[i];
    return load(part);
}
template <class E> static inline void store(E* p, vec x, int64_t n) {
    if (n >= W) return store(p, x);
    E part[W];
    store(part, x);
    for (int i = 0; i < n; i++) p[i] = part[i];
}
// The sum of the lanes: the upper half onto the lower half, until four are left.
template <class Half, class V> static inline Half folded(V x) {
    Half low, high;
    memcpy(&low, &x, sizeof low);
    memcpy(&high, (const char*)&x + sizeof low, sizeof high);
    return low + high;
}
static inline float total(lanes4 x) { return (x[0] + x[2]) + (x[1] + x[3]); }
static inline float total(lanes8 x) { return total(folded<lanes4>(x)); }
static inline float total(lanes16 x) { return total(folded<lanes8>(x)); }
static inline float largest(vec x) {
    float most = x[0];
    for (int i = 1; i < W; i++) most = std::max(most, x[i]);
    return most;
}
// exp(x) = 2^n exp(r), n the nearest whole number to x / ln 2, so |r| <= ln 2 / 2: there a polynomial will do.
static inline vec exp(vec x) {
    x = x < -150.f ? vec{} - 150.f : x > 150.f ? vec{} + 150.f : x;            // beyond: 0 and inf; NaN stays
    vec t = x * 1.44269504f + 12582912.f;                                      // 1.5 * 2^23: its last bit is 1,
    ivec n = (ivec)t - 0x4b400000;                                             // so adding it rounds
    vec whole = t - 12582912.f;
    vec r = x - whole * 0.693145752f - whole * 1.42860677e-6f;                 // ln 2 in two pieces
    vec y = 1.f + r * (1.f + r * (0.5f + r * (1.66666667e-1f + r * (4.16666667e-2f + r * (8.33333333e-3f
            + r * 1.38888889e-3f)))));
    ivec half = n >> 1;                                                        // 2^n may not be a float, its root is
    return y * (vec)((half + 127) << 23) * (vec)((n - half + 127) << 23);
}

// ---------------------------------------------------------------- threads
extern "C" int threads;  // Python's to set
#if !defined(PART) || PART == 0  // this file's own; compiled in parts, each has all templates and some that are exported
int threads = 1;
#endif
// To wake a thread costs microseconds: it pays from some tens of KB on.
static int hands(int64_t bytes) { return bytes < 65536 ? 1 : threads; }

// ---------------------------------------------------------------- rows
template <class E>
static void embed(const E* table, const int64_t* ids, E* out, int64_t T, int64_t width, int64_t V) {
    for (int64_t t = 0; t < T; t++)
        if (ids[t] >= 0 && ids[t] < V)
            memcpy(out + t * width, table + ids[t] * width, width * sizeof(E));
        else  // no such token: NaN, which no later step can overlook
            for (int64_t i = 0; i < width; i += W) store(out + t * width + i, vec{} + NAN, width - i);
}

// x / sqrt(mean(x^2) + eps) * weight; out may be x
template <class E> static void normalise(const E* x, const E* weight, E* out, int64_t n, float eps) {
    vec squares = {};
    for (int64_t i = 0; i < n; i += W) {
        vec y = load(x + i, n - i);
        squares += y * y;
    }
    float scale = 1 / std::sqrt(total(squares) / n + eps);
    for (int64_t i = 0; i < n; i += W)
        store(out + i, load(x + i, n - i) * scale * load(weight + i, n - i), n - i);
}

template <class E>
static void rms_norm(const E* x, const E* weight, E* out, int64_t T, int64_t width, int64_t stride, float eps) {
    #pragma omp parallel for num_threads(hands(2 * T * width * sizeof(E)))
    for (int64_t t = 0; t < T; t++) normalise(x + t * stride, weight, out + t * width, width, eps);
}

template <class E>
static void add_rms_norm(const E* x, const E* residual, const E* weight, E* out, E* sum, int64_t T, int64_t width,
                         int64_t x_stride, int64_t residual_stride, float eps) {
    #pragma omp parallel for num_threads(hands(4 * T * width * sizeof(E)))
    for (int64_t t = 0; t < T; t++) {
        const E *a = residual + t * residual_stride, *b = x + t * x_stride;
        for (int64_t i = 0; i < width; i += W)
            store(sum + t * width + i, load(a + i, width - i) + load(b + i, width - i), width - i);
        normalise(sum + t * width, weight, out + t * width, width, eps);       // the sum as it was rounded
    }
}

// x is [T, 2 I]: the gates, then what they gate
template <class E> static void silu_mul(const E* x, E* out, int64_t T, int64_t I, int64_t stride) {
    #pragma omp parallel for num_threads(hands(3 * T * I * sizeof(E)))
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < I; i += W) {
            vec gate = load(x + t * stride + i, I - i), up = load(x + t * stride + I + i, I - i);
            store(out + t * I + i, gate / (1.f + exp(-gate)) * up, I - i);
        }
}

// The first of the largest, or -1 where it is no finite number. Each lane keeps the best of what it has seen.
template <class E> static void best(const E* logits, int64_t* out, int64_t T, int64_t V, int64_t stride) {
    #pragma omp parallel for num_threads(hands(T * V * sizeof(E)))
    for (int64_t t = 0; t < T; t++) {
        const E* row = logits + t * stride;
        vec most = vec{} - INF;
        ivec at = {}, here = {}, nans = {};
        for (int i = 0; i < W; i++) here[i] = i;
        auto see = [&](vec x) {
            nans |= x != x;
            at = x > most ? here : at;
            most = x > most ? x : most;
            here += W;
        };
        int64_t i = 0;
        for (; i + W <= V; i += W) see(load(row + i));
        if (i < V) {  // again the last W of them (a shorter row: the first of them, repeated)
            E part[W];
            for (int j = 0; j < W; j++) part[j] = row[std::min(i + j, V - 1)];
            see(load(part));
        }
        float top = largest(most);
        int64_t first = V, broken = !std::isfinite(top);
        for (int j = 0; j < W; j++) {
            broken |= nans[j];
            if (most[j] == top) first = std::min<int64_t>(first, at[j]);
        }
        out[t] = broken ? -1 : first;
    }
}

// ---------------------------------------------------------------- linear, for few rows
// M rows of x against R rows of the weight at once: M x R running sums stay in registers, and each piece of the
// weight is read once for all M. x is fp32, padded with zeros to `pitch`, a multiple of W.
template <class E, int M, int R>
static void multiply(const float* x, int64_t pitch, const E* weight, const E* bias, E* out, int64_t n, int64_t end,
                     int64_t N, int64_t K) {
    for (; n < end; n += R) {
        const E* w[R];
        vec sums[R][M] = {};
        for (int r = 0; r < R; r++) w[r] = weight + std::min(n + r, end - 1) * K;   // past the end: the last again
        auto step = [&](int64_t k, int64_t lanes) __attribute__((always_inline)) {
            vec own[M];
            for (int m = 0; m < M; m++) own[m] = load(x + m * pitch + k);
            for (int r = 0; r < R; r++) {
                vec other = load(w[r] + k, lanes);
                for (int m = 0; m < M; m++) sums[r][m] += own[m] * other;
            }
        };
        int64_t k = 0;
        for (; k + W <= K; k += W) step(k, W);
        if (k < K) step(k, K - k);
        for (int r = 0; r < R && n + r < end; r++)
            for (int m = 0; m < M; m++) {
                vec y = {total(sums[r][m]) + (bias ? load(bias + n + r, 1)[0] : 0.f)};
                store(out + m * N + n + r, y, 1);
            }
    }
}

// The same with a matrix unit: Intel's AMX multiplies two tiles of 1 KB, 16 x 32 by 32 x 16 bf16, in one instruction.
//     out^T [N, T] = weight [N, K] x^T [K, T]
// A tile of the weight is 16 of its rows as they lie in memory, so nothing is stored twice. x is laid out anew: pairs
// of channels, as the unit wants its second operand. 32 rows of the weight meet 32 tokens at once: 4 tiles of sums.
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__linux__) && !defined(NO_TILES)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool has_tiles() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;      // Linux lends them on request
    return granted;
}

// Tokens b * 16 .. b * 16 + 15 for the unit: for each 32 channels, 16 rows of 16 pairs. Missing tokens are zeros.
static void lay_out(const bf16* x, bf16* tiles, int64_t b, int64_t T, int64_t K) {
    for (int64_t k = 0; k < K; k += 32)
        for (int64_t t = 0; t < 16; t++) {
            uint32_t* to = (uint32_t*)(tiles + (b * K + k) * 16) + t;
            if (b * 16 + t >= T) for (int p = 0; p < 16; p++) to[p * 16] = 0;
            else for (int p = 0; p < 16; p++) memcpy(to + p * 16, x + (b * 16 + t) * K + k + 2 * p, 4);
        }
}

// The transpose of 16 x 16: in four rounds the off-diagonal halves, quarters, ... of each square change places.
static void turn_over(vec (&m)[16]) {
    for (int s = 8; s; s /= 2) {
        ivec from_left, from_right;                                            // lane j of either; 16 and on: of the lower
        for (int j = 0; j < 16; j++) from_left[j] = j & s ? 16 + (j ^ s) : j, from_right[j] = j & s ? 16 + j : j ^ s;
        for (int i = 0; i < 16; i++)
            if (!(i & s)) {
                vec above = m[i], below = m[i | s];
                m[i] = _mm512_permutex2var_ps(above, (__m512i)from_left, below);
                m[i | s] = _mm512_permutex2var_ps(above, (__m512i)from_right, below);
            }
    }
}

constexpr int CHUNK = 128;                                                     // columns that become ready together
// 32 rows of a weight as they lie in memory. `row`: elements from one to the next.
struct Lying {
    const bf16* first;
    int64_t row;
    static constexpr float* scales = nullptr;                                  // of the sums
    void ready(int64_t) {}
    const bf16* at(int64_t k) const { return first + k; }
    void prefetch(int64_t k) const {                                           // the next 32 rows are on their way
        for (int line = 0; line < 32; line++)
            _mm_prefetch((const char*)(first + 32 * row + k * 32) + line * 64, _MM_HINT_T1);
    }
};

// Rows n .. n + 31 of the weight, for tokens b * 16 .. b * 16 + 15 and, if `two`, for the 16 after them.
template <bool two, class Panel>
static void tiles_of(const bf16* tiles, Panel& panel, const bf16* bias, bf16* out, int64_t n, int64_t b,
                     int64_t T, int64_t N, int64_t K) {
    const bf16* ours = tiles + b * 16 * K;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < K; k += 32) {
        if (k % CHUNK == 0) panel.ready(k);
        _tile_loadd(4, panel.at(k), panel.row * sizeof(bf16));
        _tile_loadd(5, panel.at(k) + 16 * panel.row, panel.row * sizeof(bf16));
        _tile_loadd(6, ours + k * 16, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (two) {
            _tile_loadd(7, ours + (K + k) * 16, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        if (!b) panel.prefetch(k);
    }
    vec sums[4][16];                                                           // [tile][row of the weight], 16 tokens
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int tile = 0; tile < (two ? 4 : 2); tile++) {
        turn_over(sums[tile]);                                                 // now: [token], 16 rows of the weight
        int64_t first = b * 16 + tile / 2 * 16, row = n + tile % 2 * 16;
        vec scale = panel.scales ? load(panel.scales + tile % 2 * 16) : vec{} + 1.f;
        for (int64_t t = 0; t < std::min<int64_t>(16, T - first); t++)
            store(out + (first + t) * N + row, sums[tile][t] * scale + (bias ? load(bias + row) : vec{}));
    }
}

// panel(n) are rows n .. n + 31 of the weight, whose N rows are read from so many bytes.
template <class Panels>
static void linear_tiles(const bf16* x, const Panels& panel, const bf16* bias, bf16* out, int64_t T, int64_t N,
                         int64_t K, int64_t bytes) {
    struct { uint8_t palette = 1, zero[15] = {}; uint16_t row_bytes[16] = {}; uint8_t rows[16] = {}; } shape;
    for (int i = 0; i < 8; i++) shape.row_bytes[i] = 64, shape.rows[i] = 16;
    int64_t blocks = (T + 15) / 16;
    static thread_local std::vector<bf16> room;
    room.resize(blocks * 16 * K);
    bf16* tiles = room.data();
    #pragma omp parallel num_threads(hands(bytes))
    {
        _tile_loadconfig(&shape);
        #pragma omp for
        for (int64_t b = 0; b < blocks; b++) lay_out(x, tiles, b, T, K);
        #pragma omp for schedule(static)
        for (int64_t i = 0; i < N; i += 32) {
            int64_t n = std::min(i, N - 32);                                   // the last 32 may be done in part twice
            auto rows = panel(n);
            for (int64_t b = 0; b < blocks; b += 2)
                if (b + 1 < blocks) tiles_of<true>(tiles, rows, bias, out, n, b, T, N, K);
                else tiles_of<false>(tiles, rows, bias, out, n, b, T, N, K);
        }
        _tile_release();
    }
}
#else
#define NO_TILES
static bool has_tiles() { return false; }
#endif
template <class E>
static void linear(const E* x, const E* weight, const E* bias, E* out, int64_t T, int64_t N, int64_t K) {
#ifndef NO_TILES
    if constexpr (std::is_same_v<E, bf16>)
        if (N >= 32 && K % 32 == 0 && has_tiles())
            return linear_tiles(x, [=](int64_t n) { return Lying{weight + n * K, K}; }, bias, out, T, N,
                                K, N * K * (int64_t)sizeof(E));
#endif
    constexpr int BLOCK = 16;                                                  // rows of the weight that stay in L1
    int64_t pitch = (K + W - 1) / W * W;
    static thread_local std::vector<float> room;
    room.resize(T * pitch);
    float* own = room.data();
    for (int64_t t = 0; t < T; t++)
        for (int64_t k = 0; k < K; k += W) store(own + t * pitch + k, load(x + t * K + k, K - k));
    #pragma omp parallel for schedule(static) num_threads(hands(N * K * sizeof(E)))
    for (int64_t n = 0; n < N; n += BLOCK) {
        int64_t end = std::min(n + BLOCK, N), t = 0;
        constexpr int Q = REGISTERS / 2;                                       // half of them hold sums
        auto some = [&](auto rows) __attribute__((always_inline)) {
            constexpr int M = decltype(rows)::value, R = std::max(1, std::min(8, Q / M));
            for (; t + M <= T; t += M) multiply<E, M, R>(own + t * pitch, pitch, weight, bias, out + t * N, n, end, N, K);
        };
        some(std::integral_constant<int, 8>{});
        some(std::integral_constant<int, 4>{});
        some(std::integral_constant<int, 2>{});
        some(std::integral_constant<int, 1>{});
    }
}

// ---------------------------------------------------------------- rope, and the write into the cache
// Channels i and i + half are a point, turned by the angle whose cosine and sine stand in turns; out may be x.
template <class E> static void turn(const E* x, const float* turns, E* out, int64_t half) {
    for (int64_t i = 0; i < half; i += W) {
        int64_t n = half - i;
        vec a = load(x + i, n), b = load(x + half + i, n), c = load(turns + i, n), s = load(turns + half + i, n);
        store(out + i, a * c - b * s, n);
        store(out + half + i, b * c + a * s, n);
    }
}

template <class E>
static void rope_and_write(const E* qkv, const float* turns, const int64_t* positions, const int64_t* slots,
                           E* k_cache, E* v_cache, const E* q_norm, const E* k_norm, E* q_out, int64_t T, int64_t H,
                           int64_t G, int64_t D, int64_t stride, int64_t k_stride, int64_t v_stride, float eps) {
    auto ready = [&](const E* x, const E* norm, const float* angles, E* out) {
        if (norm) normalise(x, norm, out, D, eps);
        turn(norm ? out : x, angles, out, D / 2);
    };
    #pragma omp parallel for num_threads(hands(2 * T * (H + 2 * G) * D * sizeof(E)))
    for (int64_t t = 0; t < T; t++) {
        const E *q = qkv + t * stride, *k = q + H * D, *v = k + G * D;
        const float* angles = turns + positions[t] * D;
        for (int64_t h = 0; h < H; h++) ready(q + h * D, q_norm, angles, q_out + (t * H + h) * D);
        if (slots[t] < 0) continue;                                            // padding has no place in the cache
        for (int64_t g = 0; g < G; g++) ready(k + g * D, k_norm, angles, k_cache + slots[t] * k_stride + g * D);
        memcpy(v_cache + slots[t] * v_stride, v, G * D * sizeof(E));
    }
}

// ---------------------------------------------------------------- attention of one query per row over its pages
constexpr int TILE = 128, MOST_D = 512;  // positions whose scores are held at once; channels of a head
constexpr int NEAR = 63;                 // positions about which a tree has a bit

// A head's channels in vectors: f(place in a padded array, channel, channels left). Where they lie in two halves, each
// half is padded.
template <int PARTS, class F> static inline __attribute__((always_inline)) void channels(int64_t D, F f) {
    int64_t part = D / PARTS, pitch = (part + W - 1) / W * W;
    for (int64_t p = 0; p < PARTS; p++)
        for (int64_t d = 0; d < part; d += W) f(p * pitch + d, p * part + d, part - d);
}
template <class E> static inline void soon(const E* row, int64_t n) {
    for (int64_t i = 0; i < n; i += 64 / (int64_t)sizeof(E)) __builtin_prefetch(row + i);
}

// A past, as attend_heads reads it: `look` finds the next positions of a tile, `score` multiplies their keys with R
// queries, `weigh` adds their weighted values. This one: keys and values are rows of numbers, where find says.
template <class K, class Find, int PARTS_ = 1> struct Rows {
    static constexpr int PARTS = PARTS_;
    Find find;
    int64_t D;
    const K *keys[TILE], *values[TILE];
    Rows(Find find, int64_t D) : find(find), D(D) {}

    int look(int64_t begin, int64_t left) {
        int n = std::min<int64_t>(TILE, left);
        for (int j = 0; j < n; j++) {
            find(begin + j, keys[j], values[j]);
            soon(keys[j], D);                                                  // all of them are on their way now
            soon(values[j], D);
        }
        return n;
    }
    template <int R> void score(const float (&q)[R][MOST_D], int n, float (&scores)[R][TILE]) const {
        for (int j = 0; j < n; j++) {
            vec dot[R] = {};
            channels<PARTS>(D, [&](int64_t d, int64_t c, int64_t left) {
                vec key = load(keys[j] + c, left);
                for (int r = 0; r < R; r++) dot[r] += load(q[r] + d) * key;
            });
            for (int r = 0; r < R; r++) scores[r][j] = total(dot[r]);
        }
    }
    template <int R> void weigh(const float (&weights)[R][TILE], int n, float (&acc)[R][MOST_D]) const {
        channels<PARTS>(D, [&](int64_t d, int64_t c, int64_t left) {
            vec part[R];
            for (int r = 0; r < R; r++) part[r] = load(acc[r] + d);
            for (int j = 0; j < n; j++) {
                vec value = load(values[j] + c, left);
                for (int r = 0; r < R; r++) part[r] += weights[r][j] * value;
            }
            for (int r = 0; r < R; r++) store(acc[r] + d, part[r]);
        });
    }
};

// The online softmax, for R rows of n scores: they become weights, and what was summed up before them shrinks.
static void soften(float (*scores)[TILE], int n, int R, float* top, float* sum, float (*acc)[MOST_D], int64_t places) {
    int padded = (n + W - 1) / W * W;
    for (int r = 0; r < R; r++) {
        for (int j = n; j < padded; j++) scores[r][j] = -INF;
        vec most = vec{} + top[r], weights = {};
        for (int j = 0; j < padded; j += W) {
            vec s = load(scores[r] + j);
            most = s > most ? s : most;
        }
        float high = largest(most), base = high == -INF ? 0.f : high;          // inf - inf would be NaN
        for (int j = 0; j < padded; j += W) {
            vec weight = exp(load(scores[r] + j) - base);
            store(scores[r] + j, weight);
            weights += weight;
        }
        float shrink = exp(vec{top[r] - base})[0];
        sum[r] = sum[r] * shrink + total(weights);
        top[r] = high;
        for (int64_t d = 0; d < places; d += W) store(acc[r] + d, load(acc[r] + d) * shrink);
    }
}

// R heads that share a key head see `count` positions.
template <int R, class E, class Past>
static void attend_heads(const E* query, Past& past, int64_t count, int64_t D, E* out) {
    alignas(64) float q[R][MOST_D], acc[R][MOST_D], scores[R][TILE];
    float top[R], sum[R] = {};
    int64_t places = 0;
    std::fill(top, top + R, -INF);
    for (int r = 0; r < R; r++)
        channels<Past::PARTS>(D, [&](int64_t d, int64_t c, int64_t left) {
            store(q[r] + d, load(query + r * D + c, left) / std::sqrt((float)D));
            store(acc[r] + d, vec{});
            places = d + W;
        });
    for (int64_t begin = 0; begin < count;) {
        int n = past.look(begin, count - begin);
        begin += n;
        past.score(q, n, scores);
        soften(scores, n, R, top, sum, acc, places);
        past.weigh(scores, n, acc);
    }
    for (int r = 0; r < R; r++)
        channels<Past::PARTS>(D, [&](int64_t d, int64_t c, int64_t left) {
            store(out + r * D + c, load(acc[r] + d) / sum[r], left);
        });
}

// A query stands at the last of its row's `lengths[b]` positions. Of those it sees the first `sinks` and the last
// `window`; or, of the last 63, those whose bits in trees[b] are set, bit 0 its own, and all before them.
// past_of(b, g, at) is what key head g of row b has, where at(i) is the i-th position that is seen; `bytes` what a
// position has there.
template <class E, class PastOf>
static void attend_rows(const E* q, const int32_t* lengths, const int64_t* trees, E* out, int64_t B, int64_t H, int64_t G,
                        int64_t D, int64_t window, int64_t sinks, int64_t bytes, const PastOf& past_of) {
    int64_t all = 0, group = H / G;
    for (int64_t b = 0; b < B; b++) all += lengths[b];
    int64_t together = B < 4 * threads ? 1 : G;                                // heads of one row lie side by side
    #pragma omp parallel for schedule(dynamic, together) num_threads(hands(all * G * bytes))
    for (int64_t item = 0; item < B * G; item++) {
        int64_t b = item / G, g = item % G, length = lengths[b];
        int64_t oldest = std::max<int64_t>(0, length - window), kept = std::min(sinks, oldest);
        int64_t count = kept + length - oldest, near[NEAR], *listed = nullptr;
        if (trees) {
            kept = count = std::max<int64_t>(0, length - NEAR), listed = near;
            for (int64_t p = kept; p < length; p++)
                if (trees[b] >> (length - 1 - p) & 1) near[count++ - kept] = p;
        }
        auto past = past_of(b, g, [=](int64_t i) {
            return i < kept ? i : listed ? listed[i - kept] : oldest + i - kept;
        });
        for (int64_t h = 0; h < group;) {                                      // four heads share each read
            const E* from = q + (b * H + g * group + h) * D;
            E* to = out + (b * H + g * group + h) * D;
            int64_t heads = std::min<int64_t>(4, group - h);
            if (count <= 0) memset(to, 0, heads * D * sizeof(E));
            else if (heads == 4) attend_heads<4>(from, past, count, D, to);
            else if (heads == 3) attend_heads<3>(from, past, count, D, to);
            else if (heads == 2) attend_heads<2>(from, past, count, D, to);
            else attend_heads<1>(from, past, count, D, to);
            h += heads;
        }
    }
}

// Only the pages of positions that are seen are looked up: the rest of the table may hold anything.
template <class E>
static void attend(const E* q, const E* k_cache, const E* v_cache, const int32_t* tables, const int32_t* lengths,
                   const int64_t* trees, E* out, int64_t B, int64_t H, int64_t G, int64_t D, int64_t S,
                   int64_t table_stride, int64_t k_page, int64_t k_slot, int64_t v_page, int64_t v_slot, int64_t window,
                   int64_t sinks) {
    int64_t shift = __builtin_ctzll(S);                                        // S is a power of two
    attend_rows(q, lengths, trees, out, B, H, G, D, window, sinks, 2 * D * sizeof(E), [=](int64_t b, int64_t g, auto at) {
        auto find = [=](int64_t i, const E*& key, const E*& value) {
            int64_t p = at(i), page = tables[b * table_stride + (p >> shift)], slot = p & (S - 1);
            key = k_cache + page * k_page + slot * k_slot + g * D;
            value = v_cache + page * v_page + slot * v_slot + g * D;
        };
        return Rows<E, decltype(find)>(find, D);
    });
}

// ---------------------------------------------------------------- what Python calls
// A kernel called with arguments that were written down, 8 bytes each whatever they are.
template <class... A> static void again(void (*kernel)(A...), const int64_t* from) {
    auto next = [&](auto* kind) {
        std::remove_pointer_t<decltype(kind)> x;
        memcpy(&x, from++, sizeof x);
        return x;
    };
    std::apply(kernel, std::tuple<A...>{next((A*)nullptr)...});                // in braces: from left to right
}
typedef void (*Again)(const int64_t*);
// Variables that hold the addresses of the kernels, as templates have no names that C knows.
#define EXPORT_AS(NAME, TYPE, E)                                                     \
    auto NAME##_##TYPE = &NAME<E>;                                                   \
    Again NAME##_##TYPE##_again = [](const int64_t* from) { again(&NAME<E>, from); };
#define EXPORT(NAME) EXPORT_AS(NAME, float32, float) EXPORT_AS(NAME, bfloat16, bf16)
#if !defined(PART) || PART == 0
extern "C" {
int matrix_units() { return has_tiles(); }
// A recorded step: all of its calls, in order.
void replay(int64_t calls, const Again* kernels, const int64_t* const* arguments) {
    for (int64_t i = 0; i < calls; i++) kernels[i](arguments[i]);
}
EXPORT(embed)
EXPORT(rms_norm)
EXPORT(add_rms_norm)
EXPORT(silu_mul)
EXPORT(linear)
EXPORT(rope_and_write)
EXPORT(attend)
EXPORT(best)
}
#endif
