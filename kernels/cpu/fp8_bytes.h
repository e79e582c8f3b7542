// e4m3 to bf16, 64 numbers at a time, by looking up bytes.
#pragma once

#include "vector.h"

#if defined(__AVX512VBMI__)

// Either byte of the bf16 of an e4m3 is looked up by its 7 bits of magnitude.
struct E4m3Bytes {
    uint8_t low[128], high[128];
    constexpr E4m3Bytes() : low(), high() {
        for (int i = 0; i < 128; i++) {
            // Below 8 a number is i * 2^-9, whose bits begin at the leading one of i.
            const int leading = i >= 4 ? 2 : i >= 2 ? 1 : 0;
            const int subnormal = i ? ((118 + leading) << 7) + ((i << (7 - leading)) & 0x7f) : 0;
            const int bits = i == 127 ? 0x7fc0 : i < 8 ? subnormal : (i << 4) + 0x3c00;
            low[i] = (uint8_t)bits;
            high[i] = (uint8_t)(bits >> 8);
        }
    }
};
alignas(64) constexpr E4m3Bytes E4M3_BYTES;

// 64 weights as bf16. In order: numbers 16 i .. 16 i + 7 in `first`, 16 i + 8 .. 16 i + 15 in `second`
struct Fp8Operand {
    __m512i first, second;
};
static inline Fp8Operand convert_e4m3(__m512i codes) {
    const uint8_t *low = E4M3_BYTES.low, *high = E4M3_BYTES.high;
    const __m512i lows = _mm512_permutex2var_epi8(load_raw<__m512i>(low), codes, load_raw<__m512i>(low + 64));
    const __m512i highs = _mm512_permutex2var_epi8(load_raw<__m512i>(high), codes, load_raw<__m512i>(high + 64));
    const __m512i with_sign = _mm512_ternarylogic_epi64(highs, codes, _mm512_set1_epi8((char)0x80), 0xf8);  // a | b & c
    return {_mm512_unpacklo_epi8(lows, with_sign), _mm512_unpackhi_epi8(lows, with_sign)};
}

// Of 16 outputs by 4 inputs (an output's in a lane) the first two inputs of each output, and the last two.
static inline Fp8Operand convert_e4m3_pairs(__m512i codes) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return convert_e4m3(_mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(order)));
}

#endif
