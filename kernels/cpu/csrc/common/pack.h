// Rearrange key and value rows, scattered over pages, into the tiles that gemm.h multiplies.
#pragma once

#include "common/gemm.h"

typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));

// Write the transpose of an 8 x 8 tile of 32-bit elements: out[j * stride + i] = in[i][j].
static inline void transpose_8x8(const u32x8 in[8], uint32_t* out, int stride) {
    u32x8 pairs[8], quads[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = __builtin_shufflevector(in[i], in[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        pairs[i + 1] = __builtin_shufflevector(in[i], in[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            quads[i + 2 * j] = __builtin_shufflevector(pairs[i + j], pairs[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            quads[i + 2 * j + 1] = __builtin_shufflevector(pairs[i + j], pairs[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int j = 0; j < 4; j++) {
        const u32x8 low = __builtin_shufflevector(quads[j], quads[j + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        const u32x8 high = __builtin_shufflevector(quads[j], quads[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        __builtin_memcpy(out + j * stride, &low, 32);
        __builtin_memcpy(out + (j + 4) * stride, &high, 32);
    }
}

#if defined(__AVX512BF16__)
// The bf16 of the e4m3 in the low byte of each 16-bit lane. It differs in the exponent's bias; subnormal numbers and
// NaN come from a table, indexed modulo the number of lanes.
template <class V>
static inline V e4m3_as_bf16(Bf16Pair, V bits) {
    alignas(64) static constexpr uint16_t SPECIAL[32] = {
        0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60, 0, 0, 0, 0, 0, 0, 0, 0x7fc0,
        0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60, 0, 0, 0, 0, 0, 0, 0, 0x7fc0};
    const V magnitude = bits & 0x7f, normal = (magnitude << 4) + 0x3c00;
    V special = load_raw<V>(SPECIAL);
    if constexpr (sizeof(V) == 64) {
        special = (V)_mm512_permutexvar_epi16((__m512i)magnitude, (__m512i)special);
    } else {
        special = (V)_mm256_permutexvar_epi16((__m256i)magnitude, (__m256i)special);
    }
    return (magnitude - 8 >= 0x77 ? special : normal) | (bits << 8 & 0x8000);
}
#endif

// `count` e4m3 zero-extended to 32 bits each.
static inline u32x16 load_bytes(const e4m3* p, int count) {
    e4m3 padded[LANES] = {};
    if (__builtin_expect(count < LANES, 0)) {
        __builtin_memcpy(padded, p, count);
        p = padded;
    }
    const u8x16 bytes = load_raw<u8x16>(p);
#if defined(__AVX512F__)
    return (u32x16)_mm512_cvtepu8_epi32((__m128i)bytes);
#else
    return __builtin_convertvector(bytes, u32x16);
#endif
}

// The 8 elements of form M that begin at row[0]; of the `size` row elements left, those past the end read as zero.
template <class M, class T>
static inline u32x8 load_elements(const T* row, int size) {
    constexpr int COUNT = 8 * M::PER_ELEMENT;
    T padded[COUNT] = {};
    if (__builtin_expect(size < COUNT, 0)) {
        __builtin_memcpy(padded, row, size * sizeof(T));
        row = padded;
    }
    if constexpr (COUNT * sizeof(T) == 32) {
        return load_raw<u32x8>(row);  // already in the form: fp32, or bf16 pairs
    } else if constexpr (M::PER_ELEMENT == 2 && std::is_same_v<T, i8>) {
        return (u32x8)narrow(load(row), bf16{});  // exactly
    } else if constexpr (M::PER_ELEMENT == 2) {
        return (u32x8)e4m3_as_bf16(M{}, __builtin_convertvector(load_raw<u8x16>(row), u16x16));
    } else {
        float wide[LANES];
        store(wide, load(row, COUNT));
        return load_raw<u32x8>(wide);
    }
}

// keys: `count` (a multiple of 8) rows of head_dim elements -> out[element][key], row stride `stride`; dimensions are
// padded with zeros to a multiple of 8 elements.
template <class M, class T>
static void pack_keys(const T* const* keys, int count, int head_dim, typename M::element* out, int stride) {
    for (int k = 0; k < count; k += 8) {
        for (int dim = 0; dim < head_dim; dim += 8 * M::PER_ELEMENT) {
            u32x8 tile[8];
            for (int i = 0; i < 8; i++) tile[i] = load_elements<M>(keys[k + i] + dim, head_dim - dim);
            transpose_8x8(tile, (uint32_t*)out + dim / M::PER_ELEMENT * stride + k, stride);
        }
    }
}

// The rows of one element: (row) for Fp32, (first, second) for Bf16Pair.
template <class M, class T>
static inline void pack_value_element(const T* first, const T* second, int size, typename M::element* out) {
    if constexpr (M::PER_ELEMENT == 1) {
        store(out, load(first, size));
    } else if constexpr (std::is_same_v<T, e4m3>) {
        const u32x16 both = load_bytes(first, size) | load_bytes(second, size) << 16;
        const u16x32 pairs = e4m3_as_bf16(M{}, (u16x32)both);
        __builtin_memcpy(out, &pairs, sizeof pairs);
    } else {
        // What bf16 holds exactly has its bits in the upper half of a float: the second row stays there, the first goes
        // down.
        const u32x16 both = ((u32x16)load(first, size) >> 16) | (u32x16)load(second, size);
        __builtin_memcpy(out, &both, sizeof both);
    }
}

// values: `count` (a multiple of 2) rows of head_dim elements -> out[element along keys][dimension], dimensions padded
// with zeros to a multiple of 16.
template <class M, class T>
static void pack_values(const T* const* values, int count, int head_dim, typename M::element* out, int stride) {
    const int whole = head_dim / LANES * LANES;
    for (int k = 0; k < count; k += M::PER_ELEMENT, out += stride) {
        const T* first = values[k];
        const T* second = values[k + M::PER_ELEMENT - 1];
        for (int dim = 0; dim < whole; dim += LANES)
            pack_value_element<M>(first + dim, second + dim, LANES, out + dim);
        if (whole < head_dim) pack_value_element<M>(first + whole, second + whole, head_dim - whole, out + whole);
    }
}
