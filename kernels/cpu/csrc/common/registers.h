// Loads and stores of as many floats as one register holds. Where that is fewer than the 16 of vector.h, of which GCC
// keeps none in registers, they are what loops that take time are made of.
#pragma once

#include "common/vector.h"

// code: e4m3, in the lowest byte; others do not count
static inline f32_register e4m3_to_register(u32_register code) {
    const u32_register magnitude = code & 0x7f, normal = (magnitude << 20) + 0x3c000000u;
    const f32_register subnormal = __builtin_convertvector((i32_register)magnitude, f32_register) * 0x1p-9f;
    u32_register bits = magnitude < 8 ? (u32_register)subnormal : normal;
    bits = magnitude == 0x7f ? u32_register{} + 0x7fc00000u : bits;
    return (f32_register)(bits | (code & 0x80) << 24);
}

static inline f32_register load_register(const float* p) { return load_raw<f32_register>(p); }
static inline void store_register(float* p, f32_register x) { __builtin_memcpy(p, &x, sizeof x); }

#if defined(__AVX512F__)

template <class T>
static inline f32_register load_register(const T* p) {
    return load(p);
}
template <class T>
static inline void store_register(T* p, f32_register x) {
    store(p, x);
}

#else

typedef uint16_t u16_half __attribute__((vector_size(2 * REGISTER_LANES)));
typedef uint8_t u8_quarter __attribute__((vector_size(REGISTER_LANES)));

static inline f32_register load_register(const bf16* p) {
    return (f32_register)(__builtin_convertvector(load_raw<u16_half>(p), u32_register) << 16);
}
static inline void store_register(bf16* p, f32_register x) {
    const u32_register bits = bf16_bits<u32_register>(x);
#if defined(__AVX2__)  // GCC 12 takes the portable form apart
    const __m256i twice = _mm256_packus_epi32((__m256i)bits, (__m256i)bits);
    const __m128i half = _mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, 0x08));
#else
    const u16_half half = __builtin_convertvector(bits, u16_half);
#endif
    __builtin_memcpy(p, &half, sizeof half);
}

static inline f32_register load_register(const i8* p) {
#if defined(__AVX2__)
    return (f32_register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    typedef int8_t i8_quarter __attribute__((vector_size(REGISTER_LANES)));
    const i32_register integers = __builtin_convertvector(load_raw<i8_quarter>(p), i32_register);
    return __builtin_convertvector(integers, f32_register);
#endif
}

#if defined(__F16C__)

static inline f32_register load_register(const f16* p) { return (f32_register)_mm256_cvtph_ps(load_raw<__m128i>(p)); }
static inline void store_register(f16* p, f32_register x) {
    const __m128i half = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
    __builtin_memcpy(p, &half, sizeof half);
}

// As fp16, the bits of an e4m3 are 2^-8 of its value, also below the smallest normal number.
static inline f32_register load_register(const e4m3* p) {
    const __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
    const __m128i bits = _mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16((short)0xbf80));
    const __m128i largest = _mm_set1_epi16(0x3f80);
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(bits, largest), largest);
    return (f32_register)_mm256_cvtph_ps(_mm_or_si128(bits, _mm_srli_epi16(nan, 1))) * 256.0f;
}

#else

typedef float16 f16_half __attribute__((vector_size(2 * REGISTER_LANES)));

static inline f32_register load_register(const f16* p) {
    return __builtin_convertvector(load_raw<f16_half>(p), f32_register);
}
static inline void store_register(f16* p, f32_register x) {
    const f16_half half = __builtin_convertvector(x, f16_half);
    __builtin_memcpy(p, &half, sizeof half);
}
static inline f32_register load_register(const e4m3* p) {
    return e4m3_to_register(__builtin_convertvector(load_raw<u8_quarter>(p), u32_register));
}

#endif

static inline float sum(f32_register x) {
    f32x16 all = {};
    __builtin_memcpy(&all, &x, sizeof x);
    return sum(all);
}
static inline float max(f32_register x) {
    f32x16 all = splat(-INFINITY);
    __builtin_memcpy(&all, &x, sizeof x);
    return max(all);
}

#endif

// The forms with a count touch only that many elements, at least one; the other lanes read as zero.

template <class T>
static inline f32_register load_register(const T* p, int count) {
    if (count >= REGISTER_LANES) return load_register(p);
    T padded[REGISTER_LANES] = {};
    __builtin_memcpy(padded, p, count * sizeof(T));
    return load_register(padded);
}

template <class T>
static inline void store_register(T* p, f32_register x, int count) {
    if (count >= REGISTER_LANES) return store_register(p, x);
    T padded[REGISTER_LANES];
    store_register(padded, x);
    __builtin_memcpy(p, padded, count * sizeof(T));
}

// x as a T would hold it
template <class T>
static inline f32_register rounded(f32_register x) {
    T stored[REGISTER_LANES];
    store_register(stored, x);
    return load_register(stored);
}
template <>
inline f32_register rounded<float>(f32_register x) {
    return x;
}
