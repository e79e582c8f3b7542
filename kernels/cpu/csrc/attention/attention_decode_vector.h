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
constexpr int VALUES_AT_A_TIME = 4;  // registers of a row of values

// Sums across registers, several at a time: each step puts what is left of two into one, and shuffles only one of its
// two operands, since a processor has one unit that shuffles.
#if defined(__AVX512F__)
constexpr int QUADS = 4;  // of numbers in a register
#define LANES_OF(x, y, a, b, c, d) \
    __builtin_shufflevector(x, y, a, b, c, d, (a) + 4, (b) + 4, (c) + 4, (d) + 4, (a) + 8, (b) + 8, (c) + 8, (d) + 8, \
                            (a) + 12, (b) + 12, (c) + 12, (d) + 12)
#elif defined(__AVX__)
constexpr int QUADS = 2;
#define LANES_OF(x, y, a, b, c, d) __builtin_shufflevector(x, y, a, b, c, d, (a) + 4, (b) + 4, (c) + 4, (d) + 4)
#else
constexpr int QUADS = 1;
#define LANES_OF(x, y, a, b, c, d) __builtin_shufflevector(x, y, a, b, c, d)
#endif

// In each quad {sum(a), sum(b), sum(c), sum(d)} of the quads of a, b, c and d.
inline f32_register sum_quads(f32_register a, f32_register b, f32_register c, f32_register d) {
    constexpr int Y = REGISTER_LANES;
    const f32_register ac = LANES_OF(a, c, 0, 1, Y + 2, Y + 3) + LANES_OF(a, c, 2, 3, Y, Y + 1);
    const f32_register bd = LANES_OF(b, d, 0, 1, Y + 2, Y + 3) + LANES_OF(b, d, 2, 3, Y, Y + 1);
    return LANES_OF(ac, bd, 0, Y + 1, 2, Y + 3) + LANES_OF(ac, bd, 1, Y, 3, Y + 2);
}
#undef LANES_OF

// Of QUADS registers, each the sum of its quads.
inline f32_register sum_registers(const f32_register* x) {
#if defined(__AVX512F__)
#define QUADS_OF(x, y, a, b, c, d) \
    (f32_register)__builtin_shufflevector((f64x8)(x), (f64x8)(y), 2 * (a), 2 * (a) + 1, 2 * (b), 2 * (b) + 1, 2 * (c), \
                                          2 * (c) + 1, 2 * (d), 2 * (d) + 1)
    typedef double f64x8 __attribute__((vector_size(64)));
    const f32_register ac = QUADS_OF(x[0], x[2], 0, 1, 6, 7) + QUADS_OF(x[0], x[2], 2, 3, 4, 5);
    const f32_register bd = QUADS_OF(x[1], x[3], 0, 1, 6, 7) + QUADS_OF(x[1], x[3], 2, 3, 4, 5);
    return QUADS_OF(ac, bd, 0, 5, 2, 7) + QUADS_OF(ac, bd, 1, 4, 3, 6);
#undef QUADS_OF
#elif defined(__AVX__)
    return __builtin_shufflevector(x[0], x[1], 0, 1, 2, 3, 12, 13, 14, 15) +
           __builtin_shufflevector(x[0], x[1], 4, 5, 6, 7, 8, 9, 10, 11);
#else
    return x[0];
#endif
}

// scores[r][key] of ROWS rows with `count` keys, a multiple of REGISTER_LANES.
template <class M, class T, int ROWS>
void dot_keys(const typename M::element* query, int depth, const T* const* keys, int count, int head_dim,
              float* scores, Prefetcher& prefetcher) {
    constexpr int WIDTH = 2 * REGISTER_LANES;
    for (int first = 0; first < count; first += REGISTER_LANES) {
        prefetcher.fetch(REGISTER_LANES * head_dim * (int)sizeof(T));
        f32_register quads[ROWS][QUADS];
        for (int quad = 0; quad < QUADS; quad++) {
            const T* const* const four = keys + first + quad * 4;
            f32_register acc[ROWS][4] = {};
            const auto add = [&](int d, int left) {
                typename M::part key[4][PARTS<M>];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) load_parts<M>(four[i] + d, left, key[i]);
#pragma GCC unroll 2
                for (int part = 0; part < PARTS<M>; part++)
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; r++) {
                        const auto q = load_raw<typename M::part>(query + r * depth + d / M::PER_ELEMENT +
                                                                  part * REGISTER_LANES);
#pragma GCC unroll 4
                        for (int i = 0; i < 4; i++) acc[r][i] = M::multiply_add(acc[r][i], q, key[i][part]);
                    }
            };
            int d = 0;
            for (; d + WIDTH <= head_dim; d += WIDTH) add(d, WIDTH);
            if (d < head_dim) add(d, head_dim - d);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) quads[r][quad] = sum_quads(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const f32_register sums = sum_registers(quads[r]);
            __builtin_memcpy(scores + r * FEW_ROWS_RANGE + first, &sums, sizeof sums);
        }
    }
}

// Elements in the order of load_parts, and sums of products with its values from there.
inline void part_pairs(float* row, int size) {
    for (int d = 0; d < size; d += 2 * REGISTER_LANES) {
        float pairs[2 * REGISTER_LANES];
        std::copy(row + d, row + d + 2 * REGISTER_LANES, pairs);
        for (int i = 0; i < REGISTER_LANES; i++) {
            row[d + i] = pairs[2 * i];
            row[d + REGISTER_LANES + i] = pairs[2 * i + 1];
        }
    }
}
inline void join_pairs(float* row, int size) {
    for (int d = 0; d < size; d += 2 * REGISTER_LANES) {
        float parts[2 * REGISTER_LANES];
        std::copy(row + d, row + d + 2 * REGISTER_LANES, parts);
        for (int i = 0; i < REGISTER_LANES; i++) {
            row[d + 2 * i] = parts[i];
            row[d + 2 * i + 1] = parts[REGISTER_LANES + i];
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
    const auto add = [&](auto left_here) {
        for (int k = 0; k < count; k += M::PER_ELEMENT) {
            typename M::part value[COUNT];
            load_values<M, COUNT>(values[k] + d, values[k + M::PER_ELEMENT - 1] + d, left_here, value);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                const auto weight = M::broadcast_part(weights[r * WEIGHT_STRIDE + k / M::PER_ELEMENT]);
#pragma GCC unroll 4
                for (int v = 0; v < COUNT; v++) acc[r][v] = M::multiply_add(acc[r][v], weight, value[v]);
            }
        }
    };
    if (constexpr int WHOLE = COUNT * REGISTER_LANES; left >= WHOLE) {
        add(std::integral_constant<int, WHOLE>{});
    } else {
        add(left);
    }
    // One by one: of an array that is copied as a whole, GCC keeps nothing in registers.
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < COUNT; v++) store_register(sums + r * stride + v * REGISTER_LANES, acc[r][v]);
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

    void score(typename M::element* query, int rows, const T* const* keys, int count, float* scores,
               Prefetcher& prefetcher) {
        const int depth = dim_ / M::PER_ELEMENT;
        const int padded = (count + REGISTER_LANES - 1) / REGISTER_LANES * REGISTER_LANES;
        if constexpr (PARTS_PAIRS) part_pairs(query, rows * dim_);
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
        if constexpr (PARTS_PAIRS) join_pairs(sums, rows * stride);
        if (M::PER_ELEMENT == 2)
            for (int i = 0; i < rows * stride; i += 2 * LANES) order_sums(sums + i);
    }

   private:
    static constexpr bool PARTS_PAIRS = M::PER_ELEMENT == 1 && IN_PAIRS<T>;

    const int head_dim_, dim_, value_dim_, padded_value_dim_;
};

}  // namespace
