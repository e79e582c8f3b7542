// The register-blocked inner product shared by both matrix products of attention:
//     C[r][:] = beta[r] * C[r][:] + sum_k A[r][k] * B[k][:]
// A is row-major, B has its columns in vector lanes. Two element forms exist:
//   Fp32      A and B are floats;
//   Bf16Pair  A and B hold pairs of bf16, (2k, 2k + 1) in one 32-bit element, multiplied by the bf16 dot instruction.
#pragma once

#include "common/vector.h"

#if defined(__AVX__) && !defined(__AVX512F__)
constexpr int MAX_GEMM_REGISTERS = 2;  // 6 x 2 sums of the 16 registers
#else
constexpr int MAX_GEMM_REGISTERS = 4;  // of the 32 of AVX-512 and of NEON
#endif
constexpr int MAX_GEMM_ROWS = 6;

// `part` stands for the columns that one register holds.
struct Fp32 {
    typedef float element;
    typedef f32_register part;
    typedef f32_register part_sums;
    static constexpr int PER_ELEMENT = 1;
    static part broadcast_part(element a) { return a - part{}; }
    template <class V>
    static V multiply_add(V sum, V a, V b) {
        return sum + a * b;
    }
};

#if defined(__AVX512BF16__)
struct Bf16Pair {
    typedef uint32_t element;
    typedef u32x16 part;
    typedef f32x16 part_sums;
    static constexpr int PER_ELEMENT = 2;
    static part broadcast_part(element a) { return (part)_mm512_set1_epi32((int)a); }
    static f32x16 multiply_add(f32x16 sum, part a, part b) {
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
};
#endif

// ROWS x REGISTERS sums
template <class M, int ROWS, int REGISTERS>
static inline void gemm_block(const typename M::element* a, int a_stride, const typename M::element* b, int b_stride,
                              int depth, float* c, int c_stride, const float* beta) {
    typedef typename M::part_sums Sums;
    constexpr int WIDTH = sizeof(Sums) / sizeof(float);
    Sums acc[ROWS][REGISTERS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < REGISTERS; v++)
            acc[r][v] = beta ? load_raw<Sums>(c + r * c_stride + v * WIDTH) * beta[r] : Sums{};
    for (int k = 0; k < depth; k++) {
        typename M::part columns[REGISTERS];
#pragma GCC unroll 4
        for (int v = 0; v < REGISTERS; v++)
            columns[v] = load_raw<typename M::part>(b + (int64_t)k * b_stride + v * WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const typename M::part row = in_register(M::broadcast_part(a[r * a_stride + k]));
#pragma GCC unroll 4
            for (int v = 0; v < REGISTERS; v++) acc[r][v] = M::multiply_add(acc[r][v], row, columns[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < REGISTERS; v++)
            __builtin_memcpy(c + r * c_stride + v * WIDTH, &acc[r][v], sizeof(Sums));
}

template <class M, int REGISTERS>
static void gemm_columns(const typename M::element* a, int a_stride, const typename M::element* b, int b_stride,
                         int depth, float* c, int c_stride, const float* beta, int rows) {
    typedef void (*Block)(const typename M::element*, int, const typename M::element*, int, int, float*, int,
                          const float*);
    static constexpr Block blocks[MAX_GEMM_ROWS] = {
        gemm_block<M, 1, REGISTERS>, gemm_block<M, 2, REGISTERS>, gemm_block<M, 3, REGISTERS>,
        gemm_block<M, 4, REGISTERS>, gemm_block<M, 5, REGISTERS>, gemm_block<M, 6, REGISTERS>,
    };
    for (int r = 0; r < rows; r += MAX_GEMM_ROWS) {
        const int count = rows - r < MAX_GEMM_ROWS ? rows - r : MAX_GEMM_ROWS;
        blocks[count - 1](a + r * a_stride, a_stride, b, b_stride, depth, c + r * c_stride, c_stride,
                          beta ? beta + r : nullptr);
    }
}

// rows x (vectors * 16) outputs. Null `beta` overwrites C. Strides and depth count elements of the form M.
template <class M>
inline void multiply(const typename M::element* a, int a_stride, const typename M::element* b, int b_stride, int depth,
                     float* c, int c_stride, const float* beta, int rows, int vectors) {
    constexpr int WIDTH = sizeof(typename M::part_sums) / sizeof(float);
    const int registers = vectors * (LANES / WIDTH);
    for (int v = 0; v < registers; v += MAX_GEMM_REGISTERS) {
        const int count = registers - v < MAX_GEMM_REGISTERS ? registers - v : MAX_GEMM_REGISTERS;
        const typename M::element* columns = b + v * WIDTH;
        float* out = c + v * WIDTH;
        switch (count) {
            case 1: gemm_columns<M, 1>(a, a_stride, columns, b_stride, depth, out, c_stride, beta, rows); break;
            case 2: gemm_columns<M, 2>(a, a_stride, columns, b_stride, depth, out, c_stride, beta, rows); break;
#if !defined(__AVX__) || defined(__AVX512F__)
            case 3: gemm_columns<M, 3>(a, a_stride, columns, b_stride, depth, out, c_stride, beta, rows); break;
            case 4: gemm_columns<M, 4>(a, a_stride, columns, b_stride, depth, out, c_stride, beta, rows); break;
#endif
        }
    }
}
