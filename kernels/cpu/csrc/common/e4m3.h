// e4m3 numbers of grouped weights (grouped.h) as pairs of bf16. They come out as 2^-8 of themselves, exactly: of most
// of them bits are shifted, and the exponent's other bias is set. NaN became its group's scale when the weight was
// packed.
#pragma once

#include "common/registers.h"

constexpr float E4M3_UNIT = 256.0f;  // what a converted 1 stands for

// Of outputs by 4 inputs (an output's in a lane) the inputs 0 and 2 of each output, and 1 and 3.
struct E4m3Pairs {
    u32_register first, second;
};

// Floats, in bits, of the codes in the lowest bytes; only their upper halves are not 0.
static inline u32_register e4m3_bits(u32_register code) { return (u32_register)(e4m3_to_register(code) / E4M3_UNIT); }

static inline E4m3Pairs e4m3_pairs(const uint8_t* codes) {
    const u32_register code = load_raw<u32_register>(codes);
#if defined(__AVX512BW__)
    const __m512i bytes = (__m512i)code;
    if (__builtin_expect(_mm512_testn_epi8_mask(bytes, _mm512_set1_epi8(0x78)) == 0, 1)) {  // nothing subnormal
        const auto convert = [](__m512i upper_bytes) {
            const __m512i words = _mm512_srai_epi16(upper_bytes, 4);
            return (u32_register)_mm512_ternarylogic_epi64(words, _mm512_set1_epi16((short)0x87f0),
                                                           _mm512_set1_epi16(0x3800), 0xea);  // a & b | c
        };
        return {convert(_mm512_bslli_epi128(bytes, 1)), convert(bytes)};
    }
#endif
    const auto pairs = [&](int first) { return e4m3_bits(code >> first) >> 16 | e4m3_bits(code >> (first + 16)); };
    return {pairs(0), pairs(8)};
}
