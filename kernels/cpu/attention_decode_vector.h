// The two products of attention with few query rows in vector registers: keys and values are multiplied as they lie in
// their pages.
#pragma once

#include <type_traits>

#include "attention_decode.h"

namespace {

#if defined(__AVX512F__)
constexpr int DECODE_ROWS = 4;  // query rows multiplied at a time: 4 x 4 sums, beside keys or values in registers
#else
constexpr int DECODE_ROWS = 1;
#endif
constexpr int KEYS_AT_A_TIME = 4;

typedef float f32x4 __attribute__((vector_size(16)));

// {sum(a), sum(b), sum(c), sum(d)}
inline f32x4 sum_each(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
#define LOW(x, y) __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(x, y) __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
    const f32x16 ab = LOW(a, b) + HIGH(a, b), cd = LOW(c, d) + HIGH(c, d);
#undef LOW
#undef HIGH
    const f32x16 all =
        __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
        __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    f32x4 quarter[4];
    __builtin_memcpy(quarter, &all, sizeof all);
    return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
}

// scores[r][key] of ROWS rows with `count` keys, a multiple of KEYS_AT_A_TIME.
template <class M, class T, int ROWS>
void dot_keys(const typename M::element* query, int depth, const T* const* keys, int count, int head_dim,
              float* scores, Prefetcher& prefetcher) {
    constexpr int WIDTH = LANES * M::PER_ELEMENT;
    for (int k = 0; k < count; k += KEYS_AT_A_TIME) {
        prefetcher.fetch(KEYS_AT_A_TIME * head_dim * (int)sizeof(T));
        f32x16 acc[ROWS][KEYS_AT_A_TIME] = {};
        const auto add = [&](int d, int left) {
            typename M::vector key[KEYS_AT_A_TIME];
#pragma GCC unroll 4
            for (int i = 0; i < KEYS_AT_A_TIME; i++) key[i] = load_row<M>(keys[k + i] + d, left);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                const auto q = load_raw<typename M::vector>(query + r * depth + d / M::PER_ELEMENT);
#pragma GCC unroll 4
                for (int i = 0; i < KEYS_AT_A_TIME; i++) acc[r][i] = M::multiply_add(acc[r][i], q, key[i]);
            }
        };
        int d = 0;
        for (; d + WIDTH <= head_dim; d += WIDTH) add(d, WIDTH);
        if (d < head_dim) add(d, head_dim - d);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const f32x4 sums = sum_each(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
            __builtin_memcpy(scores + r * FEW_ROWS_RANGE + k, &sums, sizeof sums);
        }
    }
}

// sums[r][0 .. 32 * BLOCKS] = sum_key weights[r][key] * values[key][d ..] of ROWS rows, in the order of load_values;
// `left` dimensions are there.
template <class M, class T, int ROWS, int BLOCKS>
void weigh_block(const typename M::element* weights, const T* const* values, int d, int count, int left, float* sums,
                 int stride) {
    constexpr int VECTORS = 2 * BLOCKS, WEIGHT_STRIDE = FEW_ROWS_RANGE / M::PER_ELEMENT;
    f32x16 acc[ROWS][VECTORS] = {};
    for (int k = 0; k < count; k += M::PER_ELEMENT) {
        typename M::vector value[VECTORS];
        const T* first = values[k] + d;
        const T* second = values[k + M::PER_ELEMENT - 1] + d;
#pragma GCC unroll 2
        for (int i = 0; i < BLOCKS; i++)
            load_values<M>(first + i * 2 * LANES, second + i * 2 * LANES, left - i * 2 * LANES, value + 2 * i);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const auto weight = M::broadcast(weights[r * WEIGHT_STRIDE + k / M::PER_ELEMENT]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) acc[r][v] = M::multiply_add(acc[r][v], weight, value[v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(sums + r * stride + v * LANES, acc[r][v]);
}

template <class F>
void with_rows(int rows, F function) {
    switch (rows) {
        case 1: return function(std::integral_constant<int, 1>{});
        case 2: return function(std::integral_constant<int, 2>{});
        case 3: return function(std::integral_constant<int, 3>{});
        case 4: return function(std::integral_constant<int, 4>{});
    }
}

// Products of decode workers (attention_decode.h), multiplied in the form M.
template <class M, class Stored>
class VectorProducts {
   public:
    typedef M Form;
    typedef Stored T;
    static constexpr int KEY_STEP = LANES * M::PER_ELEMENT;

    explicit VectorProducts(const Problem& p) : head_dim_(p.head_dim), dim_(p.padded_dim()) {}

    void score(const typename M::element* query, int rows, const T* const* keys, int count, float* scores,
               Prefetcher& prefetcher) {
        const int depth = dim_ / M::PER_ELEMENT;
        const int padded = (count + KEYS_AT_A_TIME - 1) / KEYS_AT_A_TIME * KEYS_AT_A_TIME;
        for (int r = 0; r < rows; r += DECODE_ROWS) {
            with_rows(std::min(DECODE_ROWS, rows - r), [&](auto n) {
                dot_keys<M, T, n()>(query + r * depth, depth, keys, padded, head_dim_, scores + r * FEW_ROWS_RANGE,
                                    prefetcher);
            });
        }
    }

    void weigh(const typename M::element* weights, int rows, const T* const* values, int count, float* sums,
               Prefetcher& prefetcher) {
        constexpr int WIDTH = 4 * LANES;
        for (int r = 0; r < rows; r += DECODE_ROWS) {
            with_rows(std::min(DECODE_ROWS, rows - r), [&](auto n) {
                const auto* row_weights = weights + r * FEW_ROWS_RANGE / M::PER_ELEMENT;
                for (int d = 0; d < head_dim_; d += WIDTH) {
                    const int left = head_dim_ - d;
                    const auto block = left > WIDTH / 2 ? weigh_block<M, T, n(), 2> : weigh_block<M, T, n(), 1>;
                    block(row_weights, values, d, count, left, sums + r * dim_ + d, dim_);
                    prefetcher.fetch((int64_t)count * std::min(left, WIDTH) * sizeof(T));
                }
            });
        }
        if (M::PER_ELEMENT == 2)
            for (int i = 0; i < rows * dim_; i += 2 * LANES) order_sums(sums + i);
    }

   private:
    const int head_dim_, dim_;
};

}  // namespace
