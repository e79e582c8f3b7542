// e4m3 to bf16, 64 numbers at a time, by looking up bytes.
#pragma once

#include <initializer_list>

#include "vector.h"

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)

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

// 64 fp8 weights, scaled, as bf16
static inline void dequantize_64(const e4m3* codes, float scale, bf16* out) {
    alignas(64) static constexpr uint16_t INTERLEAVE[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i apart = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // so that the conversion's result is in order
    const Fp8Operand both = convert_e4m3(_mm512_permutexvar_epi64(apart, load_raw<__m512i>(codes)));
    for (const __m512i part : {both.first, both.second}) {
        const f32x16 even = (f32x16)((u32x16)part << 16) * scale, odd = (f32x16)((u32x16)part & 0xffff0000u) * scale;
        const __m512i narrow = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(load_raw<__m512i>(INTERLEAVE), narrow));
        out += 2 * LANES;
    }
}

#endif
