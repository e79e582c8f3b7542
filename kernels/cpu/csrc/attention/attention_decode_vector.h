// The two products of attention with few query rows in vector registers: keys and values are multiplied as they lie in
// their pages.
#pragma once

#include <type_traits>

#include "attention/attention_decode.h"

namespace {

#if defined(__x86_64__) && !defined(__AVX512F__)
constexpr int DECODE_ROWS = 3;  // query rows multiplied at a time: 3 x 4 sums, beside a key and queries in 16 registers
#else
constexpr int DECODE_ROWS = 4;  // of 32 registers
#endif
constexpr int KEYS_AT_A_TIME = 4;
constexpr int VALUES_AT_A_TIME = 4;  // registers of a row of values

typedef float f32x4 __attribute__((vector_size(16)));

// {sum(a), sum(b), sum(c), sum(d)}
inline f32x4 sum_each(f32_register a, f32_register b, f32_register c, f32_register d) {
#if defined(__AVX512F__)
#define LOW(x, y) __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(x, y) __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define PAIRS(x, y, i) \
    __builtin_shufflevector(x, y, i, i + 1, i + 16, i + 17, i + 4, i + 5, i + 20, i + 21, i + 8, i + 9, i + 24, \
                            i + 25, i + 12, i + 13, i + 28, i + 29)
#elif defined(__AVX__)
#define LOW(x, y) __builtin_shufflevector(x, y, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH(x, y) __builtin_shufflevector(x, y, 2, 10, 3, 11, 6, 14, 7, 15)
#define PAIRS(x, y, i) __builtin_shufflevector(x, y, i, i + 1, i + 8, i + 9, i + 4, i + 5, i + 12, i + 13)
#else
#define LOW(x, y) __builtin_shufflevector(x, y, 0, 4, 1, 5)
#define HIGH(x, y) __builtin_shufflevector(x, y, 2, 6, 3, 7)
#define PAIRS(x, y, i) __builtin_shufflevector(x, y, i, i + 1, i + 4, i + 5)
#endif
    const f32_register ab = LOW(a, b) + HIGH(a, b), cd = LOW(c, d) + HIGH(c, d);
    const f32_register all = PAIRS(ab, cd, 0) + PAIRS(ab, cd, 2);
#undef LOW
#undef HIGH
#undef PAIRS
    f32x4 part[REGISTER_LANES / 4];
    __builtin_memcpy(part, &all, sizeof all);
    if constexpr (REGISTER_LANES == 4) return part[0];
    if constexpr (REGISTER_LANES == 8) return part[0] + part[1];
    if constexpr (REGISTER_LANES == 16) return (part[0] + part[1]) + (part[2] + part[3]);
}

// scores[r][key] of ROWS rows with `count` keys, a multiple of KEYS_AT_A_TIME.
template <class M, class T, int ROWS>
void dot_keys(const typename M::element* query, int depth, const T* const* keys, int count, int head_dim,
              float* scores, Prefetcher& prefetcher) {
    constexpr int WIDTH = REGISTER_LANES * M::PER_ELEMENT;
    for (int k = 0; k < count; k += KEYS_AT_A_TIME) {
        prefetcher.fetch(KEYS_AT_A_TIME * head_dim * (int)sizeof(T));
        f32_register acc[ROWS][KEYS_AT_A_TIME] = {};
        const auto add = [&](int d, int left) {
            typename M::part key[KEYS_AT_A_TIME];
#pragma GCC unroll 4
            for (int i = 0; i < KEYS_AT_A_TIME; i++) key[i] = load_row<M>(keys[k + i] + d, left);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                const auto q = load_raw<typename M::part>(query + r * depth + d / M::PER_ELEMENT);
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

// COUNT registers of sums[r][..] = sum_key weights[r][key] * values[key][d ..] of ROWS rows, in the order of
// load_values; `left` dimensions are there.
template <class M, class T, int ROWS, int COUNT>
void weigh_block(const typename M::element* weights, const T* const* values, int d, int count, int left, float* sums,
                 int stride) {
    constexpr int WEIGHT_STRIDE = FEW_ROWS_RANGE / M::PER_ELEMENT;
    f32_register acc[ROWS][COUNT] = {};
    for (int k = 0; k < count; k += M::PER_ELEMENT) {
        typename M::part value[COUNT];
        load_values<M, COUNT>(values[k] + d, values[k + M::PER_ELEMENT - 1] + d, left, value);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const auto weight = M::broadcast_part(weights[r * WEIGHT_STRIDE + k / M::PER_ELEMENT]);
#pragma GCC unroll 4
            for (int v = 0; v < COUNT; v++) acc[r][v] = M::multiply_add(acc[r][v], weight, value[v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
        __builtin_memcpy(sums + r * stride, acc[r], sizeof acc[r]);
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

    explicit VectorProducts(const Problem& p)
        : head_dim_(p.head_dim),
          dim_(p.padded_dim()),
          value_dim_(p.value_dim),
          padded_value_dim_(p.padded_value_dim()) {}

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
        constexpr int WIDTH = VALUES_AT_A_TIME * REGISTER_LANES, HALF = VALUES_AT_A_TIME / 2;
        const int stride = padded_value_dim_;
        for (int r = 0; r < rows; r += DECODE_ROWS) {
            with_rows(std::min(DECODE_ROWS, rows - r), [&](auto n) {
                const auto* row_weights = weights + r * FEW_ROWS_RANGE / M::PER_ELEMENT;
                for (int d = 0; d < stride; d += WIDTH) {
                    const int left = value_dim_ - d;  // none, where only padding is: its sums are zeros
                    const auto block = stride - d > WIDTH / 2 ? weigh_block<M, T, n(), VALUES_AT_A_TIME>
                                                              : weigh_block<M, T, n(), HALF>;
                    block(row_weights, values, d, count, left, sums + r * stride + d, stride);
                    prefetcher.fetch((int64_t)count * std::min(left, WIDTH) * sizeof(T));
                }
            });
        }
        if (M::PER_ELEMENT == 2)
            for (int i = 0; i < rows * stride; i += 2 * LANES) order_sums(sums + i);
    }

   private:
    const int head_dim_, dim_, value_dim_, padded_value_dim_;
};

}  // namespace
