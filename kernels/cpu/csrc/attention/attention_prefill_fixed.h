// Attention of many query rows of one KV head in fixed point, as attention_prefill.h does it in floating point: there
// the processor multiplies twice as many pairs of 16-bit integers as floats at a time.
//
// Queries and keys are integers with a scale each, by their lengths, values with a scale each, by their largest
// element, and weights with one per row and tile of keys, by their sum. That is what makes sums fit 32 bits. It changes
// results about half as much as rounding keys and values to bf16 does; where attention is flat, or one dimension of
// values far larger, about twice as much. Each scale depends on its own row alone (and on the keys that it sees), so
// that the result of a row still depends only on its own position.
//
// Rows of queries lie side by side in the lanes of vectors, keys and dimensions follow each other: maxima, sums and
// scales of rows are vectors, and neither keys nor values are transposed.
#pragma once

#include "attention/attention_rows.h"

#if defined(__AVX512VNNI__)

namespace {

// finish(i, v, sums) for i < count (a multiple of BLOCK): sums over `depth` pairs k of a[i * stride + k * step], with
// LANES * VECTORS columns of b[k].
template <int VECTORS, class F>
void multiply_pairs(const uint32_t* a, int stride, int step, int count, const uint32_t* b, int depth, F&& finish) {
    constexpr int BLOCK = 8;  // with two vectors 16 sums: more than the 10 products that are under way at a time
    for (int i = 0; i < count; i += BLOCK, a += BLOCK * stride) {
        i32x16 sums[BLOCK][VECTORS] = {};
        for (int k = 0; k < depth; k++) {
            __m512i columns[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) columns[v] = _mm512_load_si512(b + (k * VECTORS + v) * LANES);
#pragma GCC unroll 8
            for (int j = 0; j < BLOCK; j++) {
                const __m512i pair = in_register(_mm512_set1_epi32((int)a[j * stride + k * step]));
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++)
                    sums[j][v] = (i32x16)_mm512_dpwssd_epi32((__m512i)sums[j][v], columns[v], pair);
            }
        }
#pragma GCC unroll 8
        for (int j = 0; j < BLOCK; j++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) finish(i + j, v, sums[j][v]);
    }
}

inline f32x16 as_floats(i32x16 x) { return (f32x16)_mm512_cvtepi32_ps((__m512i)x); }
inline i32x16 as_integers(f32x16 x) { return (i32x16)_mm512_cvtps_epi32((__m512)x); }

template <class T>
class FixedPrefillWorker {
   public:
    FixedPrefillWorker(const Problem& p, int64_t most_rows)
        : p_(p), dim_(p.padded_dim()), value_dim_(p.padded_value_dim()) {
        static thread_local Scratch scratch;
        const size_t rows = (most_rows + ROW_TILE - 1) / ROW_TILE * ROW_TILE, dim = dim_, value_dim = value_dim_;
        const size_t sizes[] = {rows * dim / 2, KEY_TILE * dim / 2, KEY_TILE * value_dim / 2, ROW_TILE * KEY_TILE,
                                rows * value_dim, rows, rows, rows, rows, KEY_TILE, KEY_TILE};
        size_t total = 0;
        for (size_t s : sizes) total += s;
        scratch.reserve(total * sizeof(float));
        float* next = (float*)scratch.data();
        float** const targets[] = {(float**)&query_, (float**)&keys_, (float**)&values_, &scores_, &acc_, &maximum_,
                                   &denominator_, &factor_, (float**)&position_, &key_scale_, &value_scale_};
        for (size_t i = 0; i < std::size(sizes); i++) {
            *targets[i] = next;
            next += sizes[i];
        }
    }

    void run(const Tile& tile, float* partials) {
        const int rows = tile.tokens() * p_.group(), padded = (rows + LANES - 1) / LANES * LANES;
        load_rows(tile, rows, padded);
        std::fill(acc_, acc_ + padded * value_dim_, 0.0f);
        std::fill(maximum_, maximum_ + padded, LOWEST);
        std::fill(denominator_, denominator_ + padded, 0.0f);
        walk_keys<KEY_TILE, KEY_STEP, ROW_TILE>(
            p_, tile, [&](int begin, int end) { pack(tile, begin, end); },
            [&](int begin, int first, int count, int from, int to) {
                const auto step = count > LANES ? &FixedPrefillWorker::step<2> : &FixedPrefillWorker::step<1>;
                (this->*step)(begin, first, from, to);
            });
        for (int r = 0; r < rows; r += ROW_TILE) finish(tile, r, std::min(ROW_TILE, rows - r), rows, partials);
    }

   private:
    static constexpr int KEY_TILE = 128;  // keys per softmax step: its scores, keys and values stay in L1
    static constexpr int KEY_STEP = 8;    // bounds within a tile are multiples of it
    static constexpr int ROW_TILE = 2 * LANES;
    static constexpr float LONGEST = 32766.0f;  // of an integer vector before it is rounded: elements fit 16 bits
    static constexpr float SMALLEST = 1e-30f;   // a divisor instead of zero

    // LANES elements of a row of `size` from d on; those past the end are zeros.
    template <class E>
    static f32x16 piece(const E* row, int d, int size) {
        return d < size ? load(row + d, size - d) : f32x16{};
    }

    // If the squares of a row exceed float, all its elements count as if they were as large as the largest
    template <class E>
    static float length(const E* row, int size) {
        f32x16 squares = {};
        for (int d = 0; d < size; d += LANES) squares += piece(row, d, size) * piece(row, d, size);
        const float square = sum(squares);
        return square > 1e-30f && square < 1e37f ? std::sqrt(square) : largest(row, size) * std::sqrt((float)size);
    }

    // NaN where an element is, or is infinite: it must show in the result. As integers NaN are the largest.
    template <class E>
    static float largest(const E* row, int size) {
        u32x16 most = (u32x16)splat(SMALLEST);
        for (int d = 0; d < size; d += LANES) most = max(most, (u32x16)piece(row, d, size) & 0x7fffffffu);
        return max((f32x16)most) + sum((f32x16)most * 0.0f);
    }

    // A row as integers, as long as LONGEST; returns their scale.
    template <class E>
    float shorten(const E* row, int16_t* out) const {
        const float size = length(row, p_.head_dim), inverse = LONGEST / size;
        for (int d = 0; d < dim_; d += LANES) {
            const i32x16 wide = as_integers(piece(row, d, p_.head_dim) * inverse);
            _mm256_store_si256((__m256i*)(out + d), _mm512_cvtepi32_epi16((__m512i)wide));
        }
        return size / LONGEST;
    }

    static int lanes_of(int rows) { return rows > LANES ? ROW_TILE : LANES; }

    // Queries as columns of pairs, in tiles of ROW_TILE or, for the last few, LANES columns.
    void load_rows(const Tile& tile, int rows, int padded) {
        alignas(64) uint32_t pairs[8][MOST_DIM / 2];
        const float scale = p_.scale * p_.key_scale(tile.head_begin);
        const int position = first_position(p_, tile);
        for (int r = 0; r < padded; r++) {
            const int row = std::min(r, rows - 1);
            const int64_t source = row_of(p_, tile, tile.head_begin, row).query;
            with_dtype(p_.query_dtype, [&](auto t) {
                factor_[r] = scale * shorten((const decltype(t)*)p_.query + source, (int16_t*)pairs[r % 8]);
            });
            position_[r] = position + row / p_.group();
            if (r % 8 < 7) continue;
            const int first = r / ROW_TILE * ROW_TILE, lanes = lanes_of(padded - first);
            for (int d = 0; d < dim_ / 2; d += 8) {
                u32x8 block[8];
                for (int i = 0; i < 8; i++) block[i] = load_raw<u32x8>(pairs[i] + d);
                transpose_8x8(block, query_ + first * dim_ / 2 + d * lanes + r - 7 - first, lanes);
            }
        }
    }

    void pack(const Tile& tile, int begin, int end) {
        const T* keys[KEY_TILE];
        const T* values[KEY_TILE];
        float stored_key_scale[KEY_TILE], stored_value_scale[KEY_TILE];
        const int count = find_keys<KEY_STEP>(p_, tile, begin, end, keys, values, stored_key_scale, stored_value_scale);
        const int size = p_.value_dim;
        for (int k = 0; k < count; k++) key_scale_[k] = shorten(keys[k], keys_ + k * dim_);
        for (int k = 0; k < count; k += 2) {
            const float even = largest(values[k], size), odd = largest(values[k + 1], size);
            value_scale_[k] = even / LONGEST;
            value_scale_[k + 1] = odd / LONGEST;
            for (int d = 0; d < value_dim_; d += LANES)
                store_pairs(piece(values[k], d, size) * (LONGEST / even),
                            piece(values[k + 1], d, size) * (LONGEST / odd), values_ + k / 2 * value_dim_ + d);
        }
        if constexpr (HAS_TOKEN_SCALES<T>)
            for (int k = 0; k < count; k++) {
                key_scale_[k] *= stored_key_scale[k];
                value_scale_[k] *= stored_value_scale[k];
            }
    }

    static void store_pairs(f32x16 even, f32x16 odd, uint32_t* out) {
        const i32x16 pairs = (as_integers(even) & 0xffff) | as_integers(odd) << 16;
        _mm512_store_si512(out, (__m512i)pairs);
    }

    // Rows first .. with the keys from .. to of the packed ones, the first of which stands at `begin`.
    template <int VECTORS>
    void step(int begin, int first, int from, int to) {
        constexpr int WIDTH = VECTORS * LANES;
        const int count = to - from;
        const float* const key_scale = key_scale_ + from;
        multiply_pairs<VECTORS>((const uint32_t*)keys_ + from * dim_ / 2, dim_ / 2, 1, count, query_ + first * dim_ / 2,
                                dim_ / 2, [&](int k, int v, i32x16 product) {
                                    store(scores_ + k * WIDTH + v * LANES, as_floats(product) * key_scale[k]);
                                });
        f32x16 correction[VECTORS], unit[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++)
            weigh<WIDTH>(begin + from, first + v * LANES, count, scores_ + v * LANES, value_scale_ + from,
                         correction[v], unit[v]);
        const uint32_t* const weights = (const uint32_t*)scores_;
        float* const acc = acc_ + first * value_dim_;
        multiply_pairs<VECTORS>(values_ + from / 2 * value_dim_, 1, value_dim_, value_dim_, weights, count / 2,
                                [&](int d, int v, i32x16 product) {
                                    float* const out = acc + d * WIDTH + v * LANES;
                                    store(out, load(out) * correction[v] + as_floats(product) * unit[v]);
                                });
    }

    // Makes weights of the scores of LANES rows, WIDTH scores apart: in the place of each two vectors' first half pairs
    // of integers, which are to be multiplied by `unit`. The first key stands at `begin`.
    template <int WIDTH>
    void weigh(int begin, int first, int count, float* scores, const float* value_scale, f32x16& correction,
               f32x16& unit) {
        f32x16 factor;
        const f32x16 before = load(maximum_ + first);
        const f32x16 after = max(before, finish_columns<WIDTH>(begin, first, count, scores, factor));
        correction = rough_exp2(before - after);
        store(maximum_ + first, after);
        f32x16 total[2] = {}, scaled[2] = {};
        for (int k = 0; k < count; k += 2)
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                float* const score = scores + (k + i) * WIDTH;
                const f32x16 weight = rough_exp2(load(score) * factor - after);
                const f32x16 of_value = weight * value_scale[k + i];
                total[i] += weight;
                scaled[i] += of_value;
                store(score, of_value);
            }
        store(denominator_ + first, load(denominator_ + first) * correction + (total[0] + total[1]));
        // Units of which the sum is 2^14 .. 2^15: each weight fits 16 bits, and sums with values 32. A float this large
        // has its units in the lowest bits.
        const f32x16 sum = (scaled[0] + scaled[1]) * 1.001f;
        const __m512 exponent = _mm512_getexp_ps((__m512)sum);
        unit = (f32x16)_mm512_scalef_ps(_mm512_set1_ps(0x1p-14f), exponent);
        const f32x16 large = unit * 0x1.8p23f;
        for (int k = 0; k < count; k += 2) {
            const i32x16 even = (i32x16)(load(scores + k * WIDTH) + large);
            const i32x16 odd = (i32x16)(load(scores + (k + 1) * WIDTH) + large);
            const i32x16 pair = (even & 0xffff) | odd << 16;
            __builtin_memcpy(scores + k / 2 * WIDTH, &pair, sizeof pair);
        }
    }

    // Makes products of LANES rows, WIDTH apart, scores but for `factor`; those of keys that a row does not see are
    // -inf. Returns the maxima.
    template <int WIDTH>
    f32x16 finish_columns(int begin, int first, int count, float* scores, f32x16& factor) const {
        const Scoring scoring = {p_.scale, p_.soft_cap};
        const bool is_plain = scoring.is_plain();
        const f32x16 scale = load(factor_ + first) * LOG2E;
        factor = is_plain ? scale : splat(1.0f);
        const int lowest = position_[first], highest = position_[first + LANES - 1];
        f32x16 maximum[4];
        for (auto& m : maximum) m = splat(-INFINITY);
        if (is_plain && begin + count <= lowest + 1 && (p_.window <= 0 || begin > highest - p_.window)) {
            for (int k = 0; k < count; k += 4)
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) maximum[i] = max(maximum[i], load(scores + (k + i) * WIDTH));
            return max(max(maximum[0], maximum[1]), max(maximum[2], maximum[3])) * factor;
        }
        const i32x16 last = load_raw<i32x16>(position_ + first);
        const i32x16 unseen = p_.window > 0 ? last - p_.window : i32x16{} - 1;
        for (int k = 0; k < count; k++) {
            f32x16 s = load(scores + k * WIDTH);
            if (!is_plain) s = p_.soft_cap > 0 ? tanh(s * scale * (1 / LOG2E / p_.soft_cap)) * (p_.soft_cap * LOG2E)
                                               : s * scale;
            const i32x16 key = i32x16{} + (begin + k);
            s = (key <= last) & (key > unseen) ? s : splat(-INFINITY);
            store(scores + k * WIDTH, s);
            maximum[0] = max(maximum[0], s);
        }
        return maximum[0] * factor;
    }

    // Rows first .. first + count of the tile's, from columns to the output.
    void finish(const Tile& tile, int first, int count, int rows, float* partials) {
        alignas(64) float out[8 * MOST_DIM];
        const int lanes = lanes_of(count);
        for (int r = 0; r < count; r += 8) {
            const float* const columns = acc_ + first * value_dim_ + r;
            for (int d = 0; d < value_dim_; d += 8) {
                u32x8 block[8];
                for (int i = 0; i < 8; i++) block[i] = load_raw<u32x8>(columns + (d + i) * lanes);
                transpose_8x8(block, (uint32_t*)out + d, value_dim_);
            }
            for (int i = 0; i < std::min(8, count - r); i++) {
                const int row = first + r + i;
                finish_row(p_, tile, tile.head_begin, rows, row, out + i * value_dim_, maximum_[row],
                           denominator_[row], partials);
            }
        }
    }

    const Problem& p_;
    const int dim_, value_dim_;
    uint32_t *query_, *values_;
    int16_t* keys_;
    int32_t* position_;
    float *scores_, *acc_, *maximum_, *denominator_, *factor_, *key_scale_, *value_scale_;
};

}  // namespace

#endif
