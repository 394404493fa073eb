// ---------------------------------------------------------------- few rows on the matrix unit, in integers
// The unit multiplies bytes, 16 x 64 by 64 x 16, twice as many at once as bf16, and the weights are bytes. So x becomes
// bytes, too: three digits, to the base 256, of x in units of 2^(e-22), where 2^e is the power of two above the row's
// largest number. A column of the unit is one digit of one row, so four rows cost what one costs, and of the weight
// nothing is unpacked but nibbles to bytes.
//     y = 2^(e-22) sum over groups of scale (c0 + 256 c1 + 65536 c2 - zero (the same of 1)),  c_i = sum of q digit_i
// What is lost       Rounding to whole units: of each number of x at most 2^-23 of that power of two. Products of bytes
//                    and their sums are exact: 128 * 128 * the columns summed up at once is below 2^31.
// What is not finite makes the row's unit NaN, and all that the row results in. Other rows have units of their own.
#ifndef NO_TILES
constexpr int64_t TOKENS = 4;  // rows of x to a tile, four columns each: three digits and one that is not used
constexpr int64_t MOST_ROWS = 8, MOST_GROUPS = 256, MOST_COLUMNS = 1 << 16;

struct Digits {  // of up to 4 rows of x, as the unit wants its second operand: [K / 4][column][4]
    std::vector<int8_t> tiles;
    std::vector<float> sums;                                                   // [group][column], of the digits
    float unit[TOKENS];                                                        // 2^(e-22); NaN if x is not finite
    void lay(const bf16* row, int64_t t, int64_t K, int64_t group, int64_t Q) {
        vec most = {}, odd = {};
        for (int64_t k = 0; k < K; k += W) {
            vec y = load(row + k), size = (vec)((ivec)y & 0x7fffffff);
            most = size > most ? size : most;
            odd += y * 0.f;                                                    // NaN, if one of them is not finite
        }
        int e = 0;
        std::frexp(largest(most), &e);                                         // largest < 2^e
        e = std::max(e, -100);                                                 // less is as good as nothing
        float up = std::ldexp(1.f, 22 - e);
        unit[t] = std::ldexp(1.f, e - 22) + total(odd);
        for (int64_t g = 0; g < Q; g++) {
            ivec totals[3] = {};
            for (int64_t k = g * group, end = std::min(k + group, K); k < end; k += W) {
                ivec v = (ivec)(load(row + k) * up + 12582912.f) - 0x4b400000; // to the nearest, as in exp
                __m128i digits[3];
                for (int d = 0; d < 3; d++) {
                    ivec digit = v << 24 >> 24;
                    v = (v - digit) >> 8, totals[d] += digit;
                    digits[d] = _mm512_cvtepi32_epi8((__m512i)digit);
                }
                auto* to = (__m128i*)(tiles.data() + (k + t) * 16);             // four columns of x: four digits of each
                __m128i a = _mm_unpacklo_epi32(digits[0], digits[1]), b = _mm_unpacklo_epi32(digits[2], __m128i{});
                _mm_storeu_si128(to, _mm_unpacklo_epi64(a, b));
                _mm_storeu_si128(to + 4, _mm_unpackhi_epi64(a, b));
                a = _mm_unpackhi_epi32(digits[0], digits[1]), b = _mm_unpackhi_epi32(digits[2], __m128i{});
                _mm_storeu_si128(to + 8, _mm_unpacklo_epi64(a, b));
                _mm_storeu_si128(to + 12, _mm_unpackhi_epi64(a, b));
            }
            for (int d = 0; d < 3; d++) sums[g * 16 + t * 4 + d] = _mm512_reduce_add_epi32((__m512i)totals[d]);
        }
    }
};

// 16 rows of the weight, 64 bytes of each: from where they lie, or from nibbles laid out before.
struct ByteRows {
    typedef int8_t zero;
    const int8_t* q;
    int64_t K;
    ByteRows(const Quantized& w, int64_t n) : q((const int8_t*)w.q + n * w.held), K(w.K) {}
    const int8_t* at(int64_t k) const {
        for (int r = 0; r < 16; r++) __builtin_prefetch(q + (r + 16) * K + k);
        return q + k;
    }
    int64_t stride() const { return K; }
};
struct NibbleRows {
    typedef uint8_t zero;
    static constexpr int64_t LEAD = 128;                                       // columns that are laid out ahead
    const uint8_t* q;
    int64_t K, row;
    int8_t* room;
    NibbleRows(const Quantized& w, int64_t n)
        : q((const uint8_t*)w.q + n * w.held * 4), K(w.K), row(w.held * 4) {
        static thread_local std::vector<int8_t> bytes;
        bytes.resize(16 * K + 64);
        room = (int8_t*)(((uintptr_t)bytes.data() + 63) & ~63);
        for (int64_t k = 0; k < std::min(LEAD, K); k += 64) lay_out(k);
    }
    void lay_out(int64_t k) const {
        const __m512i low = _mm512_set1_epi8(15);
        for (int64_t r = 0; r < 16; r++) {
            const uint8_t* from = q + r * row + k / 2;
            __builtin_prefetch(from + 16 * row);
            __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
            _mm512_store_si512(room + k * 16 + r * 64, (pairs | _mm512_slli_epi16(pairs, 4)) & low);
        }
    }
    const int8_t* at(int64_t k) const {
        if (k + LEAD < K) lay_out(k + LEAD);
        return room + k * 16;
    }
    int64_t stride() const { return 64; }
};

// The sums of one part of the columns: in tile C, and for the next four rows of x in tile D. Tiles need to be numbers by
// the time that macros are done.
#define SUM_PART(C, D, part)                                                                  \
    if ((part) < parts) {                                                                     \
        _tile_zero(C);                                                                        \
        if (two) _tile_zero(D);                                                               \
        for (int64_t k = (part) * width, end = std::min(k + width, w.K); k < end; k += 64) {  \
            _tile_loadd(4, rows.at(k), rows.stride());                                        \
            _tile_loadd(5, digits[0].tiles.data() + k * 16, 64);                              \
            _tile_dpbssd(C, 4, 5);                                                            \
            if (!two) continue;                                                               \
            _tile_loadd(6, digits[1].tiles.data() + k * 16, 64);                              \
            _tile_dpbssd(D, 4, 6);                                                            \
        }                                                                                     \
        _tile_stored(C, c[C], 64);                                                            \
        if (two) _tile_stored(D, c[D], 64);                                                   \
    }

// 16 rows of the weight with all digits: sums[b][r][column], of row r and of the columns of block b.
template <bool two, class Rows>
static void sum_digits(const Digits* digits, Rows& rows, const Quantized& w, const float* scales, const float* shifts,
                       int64_t width, int64_t parts, vec (*sums)[16]) {
    constexpr int BLOCKS = 1 + two, TOGETHER = 4 / BLOCKS;
    alignas(64) int32_t c[4][16][16];
    for (int64_t p = 0; p < parts; p += TOGETHER) {
        if constexpr (two) {
            SUM_PART(0, 1, p);
            SUM_PART(2, 3, p + 1);
        } else {
            SUM_PART(0, 0, p);
            SUM_PART(1, 1, p + 1);
            SUM_PART(2, 2, p + 2);
            SUM_PART(3, 3, p + 3);
        }
        for (int64_t i = p; i < std::min(p + TOGETHER, parts); i++)
            for (int b = 0; b < BLOCKS; b++) {
                int64_t g = w.Q == 1 ? 0 : i;
                vec shift = load(digits[b].sums.data() + i * 16);
                for (int r = 0; r < 16; r++) {
                    ivec sum;
                    memcpy(&sum, c[(i - p) * BLOCKS + b][r], sizeof sum);
                    vec all = __builtin_convertvector(sum, vec);
                    sums[b][r] += scales[r * w.Q + g] * all - shifts[r * w.Q + g] * shift;
                }
            }
    }
}

template <class Rows>
static void multiply_digits(const bf16* x, const Quantized& w, const bf16* bias, bf16* out, int64_t T, float middle) {
    struct { uint8_t palette = 1, zero[15] = {}; uint16_t row_bytes[16] = {}; uint8_t rows[16] = {}; } shape;
    for (int i = 0; i < 8; i++) shape.row_bytes[i] = 64, shape.rows[i] = 16;
    // A sum waits for the one before it: four at a time do not. A row without groups is cut into four as well.
    int64_t width = w.Q == 1 ? (w.K + 255) / 256 * 64 : w.group, parts = (w.K + width - 1) / width;
    static thread_local Digits own[MOST_ROWS / TOKENS];
    Digits* digits = own;
    for (int b = 0; b < 2; b++) digits[b].tiles.resize(w.K * 16), digits[b].sums.resize(parts * 16);
    for (int64_t t = 0; t < T; t++) digits[t / TOKENS].lay(x + t * w.K, t % TOKENS, w.K, width, parts);
    #pragma omp parallel num_threads(hands(w.N * w.K / 2))
    {
        _tile_loadconfig(&shape);
        #pragma omp for schedule(static)
        for (int64_t block = 0; block < w.N; block += 16) {
            int64_t n = std::min(block, w.N - 16);                             // the last 16 may be done in part twice
            Rows rows(w, n);
            alignas(64) float scales[16 * MOST_GROUPS], shifts[16 * MOST_GROUPS];
            for (int64_t i = 0; i < 16 * w.Q; i += W) {
                int64_t at = n * w.Q + i;
                vec scale = w.wide ? load((const float*)w.scales + at) : load((const bf16*)w.scales + at);
                vec zero = w.zeros ? load((const typename Rows::zero*)w.zeros + at) : vec{} + middle;
                store(scales + i, scale);
                store(shifts + i, scale * zero);
            }
            alignas(64) vec sums[2][16] = {};
            if (T > TOKENS) sum_digits<true>(digits, rows, w, scales, shifts, width, parts, sums);
            else sum_digits<false>(digits, rows, w, scales, shifts, width, parts, sums);
            for (int64_t t = 0; t < T; t++) {
                alignas(64) float y[16];
                auto digits_of = [&](int r) { return _mm_load_ps((const float*)&sums[t / TOKENS][r] + 4 * (t % TOKENS)); };
                for (int r = 0; r < 16; r += 4) {
                    lanes4 c0 = digits_of(r), c1 = digits_of(r + 1), c2 = digits_of(r + 2), c3 = digits_of(r + 3);
                    _MM_TRANSPOSE4_PS(c0, c1, c2, c3);                         // now: digit 0 of four rows, digit 1, ...
                    _mm_store_ps(y + r, c0 + 256.f * c1 + 65536.f * c2);
                }
                vec value = load(y) * digits[t / TOKENS].unit[t % TOKENS];
                store(out + t * w.N + n, bias ? value + load(bias + n) : value);
            }
        }
        _tile_release();
    }
}

template <class B>
static bool linear_digits(const bf16* x, const Quantized& w, const bf16* bias, bf16* out, int64_t T) {
    bool whole = w.K % 64 == 0 && (w.Q == 1 || w.group % 64 == 0), few = T <= MOST_ROWS && w.Q <= MOST_GROUPS;
    if (!whole || !few || w.N < 16 || w.K > MOST_COLUMNS || !has_tiles()) return false;
    using Rows = std::conditional_t<std::is_same_v<B, Nibbles>, NibbleRows, ByteRows>;
    multiply_digits<Rows>(x, w, bias, out, T, B::MIDDLE);
    return true;
}
#endif
