// Vectors of 16 floats and the element types the kernels read and write.
//
// GCC's vector extensions: one AVX-512 register, two AVX2 registers, or whatever the machine has. Intrinsics appear
// only where the compiler cannot find the instruction by itself.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__) && !defined(PAGEWIRE_PORTABLE)  // a test sees what compilers for other processors see
#include <immintrin.h>
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef int16_t i16x16 __attribute__((vector_size(32)));

constexpr int LANES = 16;

// What one register holds: of wider vectors GCC keeps no sums in registers.
#if defined(__AVX512F__)
constexpr int REGISTER_LANES = 16;
#elif defined(__AVX__)
constexpr int REGISTER_LANES = 8;
#else
constexpr int REGISTER_LANES = 4;
#endif
constexpr int REGISTERS = LANES / REGISTER_LANES;  // for LANES numbers
typedef float f32_register __attribute__((vector_size(4 * REGISTER_LANES)));
typedef int32_t i32_register __attribute__((vector_size(4 * REGISTER_LANES)));
typedef uint32_t u32_register __attribute__((vector_size(4 * REGISTER_LANES)));
typedef uint8_t u8_register __attribute__((vector_size(4 * REGISTER_LANES)));

constexpr float LOG2E = 1.4426950408889634f;

// `lanes` is what 16 of them are in memory.
struct bf16 {
    typedef u16x16 lanes;
    uint16_t bits;
};
struct f16 {
    typedef u16x16 lanes;
    uint16_t bits;
};
#if defined(__aarch64__)  // where GCC 12 knows no _Float16 in C++
typedef __fp16 float16;
#else
typedef _Float16 float16;
#endif
struct e4m3 {  // torch's float8_e4m3fn: no infinity, at most 448
    typedef u8x16 lanes;
    uint8_t bits;
};

struct i8 {  // an integer, which a scale beside it belongs to
    typedef i8x16 lanes;
    int8_t bits;
};

// The dtype codes that the Python side passes. The last two are dtypes of KV caches only.
enum Dtype : int { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT8_E4M3 = 3, INT8 = 4 };

// function(T{}) for the element type T of activations.
template <class F>
void with_dtype(int dtype, F function) {
    if (dtype == FLOAT32) function(float{});
    if (dtype == BFLOAT16) function(bf16{});
    if (dtype == FLOAT16) function(f16{});
}

template <class V>
static inline V load_raw(const void* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(V));
    return v;
}

// x, as something that was computed: GCC would load it anew for each instruction that it is an operand of, and the
// loads would take longer than the products.
template <class V>
[[gnu::always_inline]] static inline V in_register(V x) {
#if defined(__AVX512F__)
    asm("" : "+v"(x));
#endif
    return x;
}

static inline f32x16 splat(float x) { return x - f32x16{}; }

// ---- conversions ----

static inline u32x16 zero_extend(u16x16 bits) {
#if defined(__AVX512F__)
    return (u32x16)_mm512_cvtepu16_epi32((__m256i)bits);  // GCC 12 splits the portable form in two halves
#else
    return __builtin_convertvector(bits, u32x16);
#endif
}

static inline f32x16 widen(u16x16 bits, bf16) { return (f32x16)(zero_extend(bits) << 16); }

// To nearest, ties to even; in the lower half of each lane.
template <class Bits, class V>
static inline Bits bf16_bits(V x) {
    const Bits bits = (Bits)x, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, nan = (bits >> 16) | 0x40u;
    return x != x ? nan : rounded;
}

static inline u16x16 narrow(f32x16 x, bf16) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
    return __builtin_convertvector(bf16_bits<u32x16>(x), u16x16);
#endif
}

#if defined(__AVX512F__)
static inline f32x16 widen(u16x16 bits, f16) { return (f32x16)_mm512_cvtph_ps((__m256i)bits); }
static inline u16x16 narrow(f32x16 x, f16) {
    return (u16x16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__F16C__)
static inline f32x16 widen(u16x16 bits, f16) {
    __m128i half[2];
    __m256 full[2];
    __builtin_memcpy(half, &bits, 32);
    for (int i = 0; i < 2; i++) full[i] = _mm256_cvtph_ps(half[i]);
    return load_raw<f32x16>(full);
}
static inline u16x16 narrow(f32x16 x, f16) {
    __m256 full[2];
    __m128i half[2];
    __builtin_memcpy(full, &x, 64);
    for (int i = 0; i < 2; i++) half[i] = _mm256_cvtps_ph(full[i], _MM_FROUND_TO_NEAREST_INT);
    return load_raw<u16x16>(half);
}
#else
static inline f32x16 widen(u16x16 bits, f16) {
    f32x16 x;
    for (int i = 0; i < LANES; i++) {
        const uint16_t h = bits[i];
        float16 value;
        __builtin_memcpy(&value, &h, 2);
        x[i] = (float)value;
    }
    return x;
}
static inline u16x16 narrow(f32x16 x, f16) {
    u16x16 bits;
    for (int i = 0; i < LANES; i++) {
        const float16 value = (float16)x[i];
        uint16_t h;
        __builtin_memcpy(&h, &value, 2);
        bits[i] = h;
    }
    return bits;
}
#endif

// As fp16, the bits of an e4m3 are 2^-8 of its value, also below the smallest normal number.
static inline f32x16 widen(u8x16 bits, e4m3) {
    const u16x16 wide = __builtin_convertvector(bits, u16x16);
    const u16x16 magnitude = wide & 0x7f;
    const f32x16 x = widen((wide & 0x80) << 8 | magnitude << 7, f16{}) * 256.0f;
    return zero_extend(magnitude) == 0x7f ? splat(NAN) : x;
}

// bits: e4m3, zero-extended
static inline f32x16 e4m3_to_float(u32x16 bits) {
#if defined(__AVX512F__)
    return widen((u8x16)_mm512_cvtepi32_epi8((__m512i)bits), e4m3{});
#else
    return widen(__builtin_convertvector(bits, u8x16), e4m3{});
#endif
}

// To nearest, ties to even; what lies beyond +-448 becomes that.
static inline u8x16 narrow(f32x16 x, e4m3) {
    const u32x16 u = (u32x16)x, magnitude = u & 0x7fffffffu;
    const u32x16 normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
    // Below 2^-6 neighbours lie 2^-9 apart, as floats do from 2^14 on: an addition rounds.
    const u32x16 subnormal = (u32x16)((f32x16)magnitude + 16384.0f) - 0x46800000u;
    u32x16 bits = magnitude < 0x3c800000u ? subnormal : normal;
    bits = magnitude > 0x43e00000u ? (u32x16{} + 0x7eu) : bits;
    bits = magnitude > 0x7f800000u ? (u32x16{} + 0x7fu) : bits;
    bits |= (u >> 24) & 0x80u;
#if defined(__AVX512F__)
    return (u8x16)_mm512_cvtepi32_epi8((__m512i)bits);
#else
    return __builtin_convertvector(bits, u8x16);
#endif
}

static inline f32x16 widen(i8x16 bits, i8) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bits));
#else
    return __builtin_convertvector(__builtin_convertvector(bits, i32x16), f32x16);
#endif
}

// To nearest, ties to even; x is within +-127, or NaN, which becomes any number.
static inline i8x16 narrow(f32x16 x, i8) {
#if defined(__AVX512F__)
    return (i8x16)_mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)x));
#else
    // 1.5 * 2^23: the sum has the integer in its lowest bits.
    return __builtin_convertvector((i32x16)(x + 12582912.0f), i8x16);
#endif
}

// ---- loads and stores; the `count` forms touch only that many elements (the other lanes read as zero) ----

static inline f32x16 load(const float* p) { return load_raw<f32x16>(p); }
template <class T>
static inline f32x16 load(const T* p) {
    return widen(load_raw<typename T::lanes>(p), T{});
}

static inline void store(float* p, f32x16 x) { __builtin_memcpy(p, &x, sizeof x); }
template <class T>
static inline void store(T* p, f32x16 x) {
    const typename T::lanes bits = narrow(x, T{});
    __builtin_memcpy(p, &bits, sizeof bits);
}

template <class T>
static inline f32x16 load(const T* p, int count) {
    if (count >= LANES) return load(p);
    T padded[LANES] = {};
    __builtin_memcpy(padded, p, count * sizeof(T));
    return load(padded);
}

template <class T>
static inline void store(T* p, f32x16 x, int count) {
    if (count >= LANES) return store(p, x);
    T padded[LANES];
    store(padded, x);
    __builtin_memcpy(p, padded, count * sizeof(T));
}

// ---- arithmetic, on vectors of any width where V is one ----

template <class V>
static inline V max(V a, V b) {
    return a > b ? a : b;
}

// All lanes of x combined: halves, then quarters, ... in each lane.
template <class F>
static inline float reduce(f32x16 x, F combine) {
    x = combine(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = combine(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = combine(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return combine(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))[0];
}

static inline float sum(f32x16 x) {
    return reduce(x, [](f32x16 a, f32x16 b) { return a + b; });
}

static inline float max(f32x16 x) {
    return reduce(x, [](f32x16 a, f32x16 b) { return max(a, b); });
}

// 2^x, relative error below 1.5e-7; 0 below the smallest normal number, also for -inf.
template <class V>
static inline V exp2(V x) {
    static_assert(sizeof(V) > sizeof(float), "V is a vector");
    const V low = V{} - 126.0f, high = V{} + 127.0f;
    const V clamped = x < low ? low : (x > high ? high : x);
    const V magic = V{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const V shifted = clamped + magic;
    const V r = clamped - (shifted - magic);  // in [-0.5, 0.5]
    V p = V{} + 1.537070482e-4f;              // minimax polynomial of 2^r
    p = p * r + 1.339984829e-3f;
    p = p * r + 9.618373251e-3f;
    p = p * r + 5.550329035e-2f;
    p = p * r + 2.402264846e-1f;
    p = p * r + 6.931472056e-1f;
    p = p * r + 1.0f;
    typedef decltype(x < low) Bits;
    const V power = (V)((Bits)p + ((Bits)shifted << 23));
    return x < low ? V{} : power;
}

template <class V>
static inline V sigmoid(V x) {
    return 1.0f / (1.0f + exp2(x * -LOG2E));
}

template <class V>
static inline V tanh(V x) {
    return 2.0f * sigmoid(2.0f * x) - 1.0f;
}

// `size` elements in `memory`, beginning with a line of the cache.
template <class T>
T* aligned_memory(std::vector<T>& memory, int64_t size) {
    const size_t needed = size + 64 / sizeof(T);
    if (memory.size() < needed) memory.resize(needed);  // what grows again would be filled with zeros again
    return (T*)(((uintptr_t)memory.data() + 63) / 64 * 64);
}
