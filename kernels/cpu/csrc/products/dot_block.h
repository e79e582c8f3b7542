// Inner products of a few tokens with rows of a weight along their contiguous dimension: no packing, every weight is
// read once. A block is 4 weight rows by up to as many tokens as there are registers for; 4 sums are reduced across
// lanes together. A sum takes its terms in the same order, whatever it is computed together with.
#pragma once

#include <algorithm>

#include "common/registers.h"

namespace {

typedef float f32x4 __attribute__((vector_size(16)));

constexpr int WEIGHT_ROWS = 4;
#if defined(__AVX__) && !defined(__AVX512F__)
constexpr int MAX_TOKENS = 3;                // 12 sums of 16 registers
#else
constexpr int MAX_TOKENS = 6;                // 24 of the 32 of AVX-512 and of NEON
#endif
constexpr int PREFETCH_BLOCKS = 2;           // how far ahead of the products the weights are fetched

// How one step along the inner dimension multiplies: STEP elements of a token (type X) by STEP weights (type W).
template <class Weight>
struct WidenedDot {
    typedef float X;
    typedef Weight W;
    static constexpr int STEP = REGISTER_LANES;
    typedef f32_register operand;
    static operand load_x(const X* p) { return load_register(p); }
    static operand load_w(const W* p) { return load_register(p); }
    static operand load_x(const X* p, int count) { return load_register(p, count); }
    static operand load_w(const W* p, int count) { return load_register(p, count); }
    static f32_register multiply_add(f32_register sum, operand x, operand w) { return sum + x * w; }
};

#if defined(__AVX512BF16__)
struct Bf16Dot {
    typedef bf16 X;
    typedef bf16 W;
    static constexpr int STEP = 2 * LANES;
    typedef u32x16 operand;
    static operand load_x(const X* p) { return load_raw<operand>(p); }
    static operand load_w(const W* p) { return load_raw<operand>(p); }
    static operand load_x(const X* p, int count) {
        operand padded = {};
        __builtin_memcpy(&padded, p, count * sizeof(X));
        return padded;
    }
    static operand load_w(const W* p, int count) { return load_x(p, count); }
    static f32_register multiply_add(f32_register sum, operand x, operand w) {
        return (f32_register)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
    }
};
#endif

inline f32x16 all_lanes(f32_register x) {
    f32x16 all = {};
    __builtin_memcpy(&all, &x, sizeof x);
    return all;
}

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

struct LinearShape {
    int64_t tokens, in, out;
};

template <class D, int TOKENS>
void dot_block(const typename D::W* const* rows, const typename D::X* x, int64_t in, f32x4* sums) {
    f32_register acc[TOKENS][WEIGHT_ROWS] = {};
    int64_t k = 0;
    for (; k + D::STEP <= in; k += D::STEP) {
        typename D::operand w[WEIGHT_ROWS];
#pragma GCC unroll 4
        for (int n = 0; n < WEIGHT_ROWS; n++) {
            w[n] = D::load_w(rows[n] + k);
            __builtin_prefetch(rows[n] + k + PREFETCH_BLOCKS * WEIGHT_ROWS * in);  // past the end it does nothing
        }
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) {
            const typename D::operand token = in_register(D::load_x(x + t * in + k));
#pragma GCC unroll 4
            for (int n = 0; n < WEIGHT_ROWS; n++) acc[t][n] = D::multiply_add(acc[t][n], token, w[n]);
        }
    }
    if (const int rest = (int)(in - k))
#pragma GCC unroll 4
        for (int n = 0; n < WEIGHT_ROWS; n++) {
            const typename D::operand w = D::load_w(rows[n] + k, rest);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++) acc[t][n] = D::multiply_add(acc[t][n], D::load_x(x + t * in + k, rest), w);
        }
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++)
        sums[t] = sum_each(all_lanes(acc[t][0]), all_lanes(acc[t][1]), all_lanes(acc[t][2]), all_lanes(acc[t][3]));
}

template <class T, class B>
void write_sums(T* out, f32x4 sums, const B* bias, int count) {
    f32x16 wide = {};
    __builtin_memcpy(&wide, &sums, sizeof sums);
    if (bias) wide += load(bias, count);
    T narrow_sums[LANES];
    store(narrow_sums, wide);
    __builtin_memcpy(out, narrow_sums, count * sizeof(T));
}

// Outputs begin .. end - 1 of all tokens; x [tokens, in], weight [.., in], out [tokens, shape.out]
template <class D, class T>
void linear_chunk(const typename D::X* x, const typename D::W* weight, const typename D::W* bias, T* out,
                  const LinearShape& shape, int64_t begin, int64_t end) {
    typedef void (*Block)(const typename D::W* const*, const typename D::X*, int64_t, f32x4*);
    static constexpr Block blocks[] = {dot_block<D, 1>, dot_block<D, 2>, dot_block<D, 3>,
                                       dot_block<D, 4>, dot_block<D, 5>, dot_block<D, 6>};
    const int64_t passes = (shape.tokens + MAX_TOKENS - 1) / MAX_TOKENS;
    const int64_t step = (shape.tokens + passes - 1) / passes;  // 8 tokens are 4 + 4, not 6 + 2
    for (int64_t t = 0; t < shape.tokens; t += step) {
        const int tokens = (int)std::min<int64_t>(step, shape.tokens - t);
        for (int64_t n = begin; n < end; n += WEIGHT_ROWS) {
            const int count = (int)std::min<int64_t>(WEIGHT_ROWS, end - n);
            const typename D::W* rows[WEIGHT_ROWS];
            for (int i = 0; i < WEIGHT_ROWS; i++) rows[i] = weight + (n + std::min(i, count - 1)) * shape.in;
            f32x4 sums[MAX_TOKENS];
            blocks[tokens - 1](rows, x + t * shape.in, shape.in, sums);
            for (int i = 0; i < tokens; i++)
                write_sums(out + (t + i) * shape.out + n, sums[i], bias ? bias + n : nullptr, count);
        }
    }
}

}  // namespace
