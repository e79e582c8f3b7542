// Integer dot products of codes with quantized inputs: which instructions make them, of how many outputs and tokens.
#pragma once

#include "common/registers.h"
#include "grouped/grouped_input.h"

namespace {

// Which instructions multiply bytes.
#if defined(__AVX512VNNI__)
#define PAGEWIRE_VNNI 16  // lanes
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
#define PAGEWIRE_VNNI 8
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define PAGEWIRE_MADDUBS
#endif

#if defined(PAGEWIRE_MADDUBS)
// `vpmaddubsw` sums two products of bytes, unsigned by signed, in 16 bits, and saturates.
#if defined(__AVX512BW__)
typedef __m512i Integers;
#define PAGEWIRE_INTEGERS(name) _mm512_##name
#else
typedef __m256i Integers;
#define PAGEWIRE_INTEGERS(name) _mm256_##name
#endif

inline Integers broadcast(const int8_t* inputs) { return PAGEWIRE_INTEGERS(set1_epi32)(load_raw<int32_t>(inputs)); }

inline i32_register sums_of_pairs(Integers sums) {
    return (i32_register)PAGEWIRE_INTEGERS(madd_epi16)(sums, PAGEWIRE_INTEGERS(set1_epi16)(1));
}

// How many quads of weights up to LARGEST are summed in 16 bits.
template <int LARGEST>
constexpr int SUMS = (1 << 15) / (2 * 127 * LARGEST + 1);

// Of `count` quads, at most SUMS
template <int MOST>
[[gnu::always_inline]] inline i32_register dot_small(const u32_register* weights, const int8_t* inputs, int count) {
    Integers sums = {};
#pragma GCC unroll 8
    for (int q = 0; q < MOST && q < count; q++) {
        const Integers products = PAGEWIRE_INTEGERS(maddubs_epi16)((Integers)weights[q], broadcast(inputs + 4 * q));
        sums = PAGEWIRE_INTEGERS(add_epi16)(sums, products);
    }
    return sums_of_pairs(sums);
}

// Of a quad of any weights and inputs as words: even ones, then odd ones.
[[gnu::always_inline]] inline i32_register dot_words(u32_register weights, const int8_t* inputs) {
    const Integers even = (Integers)(weights & 0x00ff00ffu), odd = PAGEWIRE_INTEGERS(srli_epi16)((Integers)weights, 8);
    return (i32_register)PAGEWIRE_INTEGERS(madd_epi16)(even, broadcast(inputs)) +
           (i32_register)PAGEWIRE_INTEGERS(madd_epi16)(odd, broadcast(inputs + 4));
}
#endif

// Whether weights up to LARGEST are multiplied by inputs as words: their products with bytes may not fit 16 bits.
template <int LARGEST>
constexpr bool takes_words() {
#if defined(PAGEWIRE_MADDUBS)
    return SUMS<LARGEST> == 0;
#else
    return false;
#endif
}

// sum[lane] += sum of weights (4 unsigned bytes of a lane) * inputs (4 signed bytes, the same for all lanes), for quads
// [BEGIN, END) of weights up to LARGEST: high with the inputs' higher bytes, low with the lower ones, UNIT bytes
// further.
template <int LARGEST, int BEGIN, int END, bool ROUGH>
[[gnu::always_inline]] inline void dot(i32_register& high, i32_register& low, const u32_register* weights,
                                       const int8_t* inputs) {
#if defined(PAGEWIRE_MADDUBS)
    constexpr int MOST = SUMS<LARGEST>;
    for (int q = BEGIN; q < END; q += MOST) {
        high += dot_small<MOST>(weights + q, inputs + 4 * q, END - q);
        if constexpr (!ROUGH) low += dot_small<MOST>(weights + q, inputs + UNIT + 4 * q, END - q);
    }
#else
#if PAGEWIRE_VNNI == 16
    // The compiler does not know that the instruction itself broadcasts.
    const auto add = [](i32_register& sum, u32_register w, const int8_t* x) {
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const int32_t*)x));
    };
#elif PAGEWIRE_VNNI == 8
    const auto add = [](i32_register& sum, u32_register w, const int8_t* x) {
        sum = (i32_register)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, _mm256_set1_epi32(load_raw<int32_t>(x)));
    };
#else
    const auto add = [](i32_register& sum, u32_register w, const int8_t* x) {
        for (int i = 0; i < 4; i++) sum += (i32_register)(w >> 8 * i & 0xff) * x[i];
    };
#endif
#pragma GCC unroll 8
    for (int q = BEGIN; q < END; q++) {
        add(high, weights[q], inputs + 4 * q);
        if constexpr (!ROUGH) add(low, weights[q], inputs + UNIT + 4 * q);
    }
#endif
}

// Codes that are numbers.
template <class B>
struct Plain {
    static constexpr int BITS = B::BITS, LARGEST = (1 << BITS) - 1;
    explicit Plain(const uint8_t*) {}
    [[gnu::always_inline]] u32_register quad(const uint8_t* p, int q) const {
        return unpack_quad<BITS, u32_register>(p, q);
    }
};

// Codes that index a table of 16 bytes.
struct Table {
    static constexpr int BITS = 4, LARGEST = 255;
    u8_register table;
    explicit Table(const uint8_t* bytes) {
        for (size_t i = 0; i < sizeof table; i++) table[i] = bytes[i % SMALL_CODEBOOK];
    }
    [[gnu::always_inline]] u32_register quad(const uint8_t* p, int q) const {
        return look_up(unpack_quad<BITS, u32_register>(p, q));
    }
    [[gnu::always_inline]] u32_register look_up(u32_register codes) const {
#if defined(__AVX512BW__)
        return (u32_register)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
        return (u32_register)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#else
        return (u32_register)__builtin_shuffle(table, (u8_register)codes);
#endif
    }
};

// Tiles and, at most, tokens that are multiplied together. Loading a token's inputs takes as long as a product, so that
// two tiles share them where there are registers for so many sums.
#if PAGEWIRE_VNNI == 16
constexpr int TILES = 2, MAX_TOKENS = 6;
#else
constexpr int TILES = 1, MAX_TOKENS = 8;
#endif

// The integer sums of a block, of TOKENS tokens and as many outputs of each tile as a register holds.
template <class Codes, int TOKENS, bool ROUGH>
class BlockSums {
   public:
    // start(token): what a sum starts from
    template <class F>
    [[gnu::always_inline]] explicit BlockSums(F&& start) {
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) {
            const i32_register sum = in_register(i32_register{} + start(t));
#pragma GCC unroll 2
            for (int n = 0; n < TILES; n++) low_[t][n] = sum;
        }
    }

    // The products of quads [BEGIN, END) of a unit
    template <int BEGIN, int END>
    [[gnu::always_inline]] void add(const Codes& codes, const uint8_t* const* tiles, const int8_t* x) {
        if constexpr (TILES > 1) {
#pragma GCC unroll 8
            for (int q = BEGIN; q < END; q++) add_quad(codes, tiles, q, x + 4 * q);
            return;
        }
        u32_register quads[QUADS];
#pragma GCC unroll 8
        for (int q = 0; q < QUADS; q++) quads[q] = codes.quad(tiles[0], q);
        if constexpr (takes_words<Codes::LARGEST>()) {
            add_words<BEGIN, END>(quads, x);
        } else {
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++)
                dot<Codes::LARGEST, BEGIN, END, ROUGH>(high_[t][0], low_[t][0], quads, x + t * INPUT_BYTES * UNIT);
        }
    }

    // sums [TILES, TOKENS]
    [[gnu::always_inline]] void write(i32_register* sums) const {
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 2
            for (int n = 0; n < TILES; n++) sums[n * TOKENS + t] = low_[t][n] + (high_[t][n] << LOW_BITS);
    }

   private:
    template <int BEGIN, int END>
    [[gnu::always_inline]] void add_words(const u32_register (&quads)[QUADS], const int8_t* x) {
#if defined(PAGEWIRE_MADDUBS)
#pragma GCC unroll 8
        for (int q = BEGIN; q < END; q++)
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++)
                low_[t][0] += dot_words(quads[q], x + INPUT_BYTES * (t * UNIT + 4 * q));
#endif
    }

    [[gnu::always_inline]] void add_quad(const Codes& codes, const uint8_t* const* tiles, int q, const int8_t* x) {
#if PAGEWIRE_VNNI == 16
        u32_register weights[TILES];
#pragma GCC unroll 2
        for (int n = 0; n < TILES; n++) weights[n] = in_register(codes.quad(tiles[n], q));
        const auto add = [&](i32_register (&sums)[TILES], const int8_t* inputs) {
            const __m512i four = (__m512i)in_register(i32_register{} + load_raw<int32_t>(inputs));
#pragma GCC unroll 2
            for (int n = 0; n < TILES; n++)
                sums[n] = (i32_register)_mm512_dpbusd_epi32((__m512i)sums[n], (__m512i)weights[n], four);
        };
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++, x += INPUT_BYTES * UNIT) {
            add(high_[t], x);
            if constexpr (!ROUGH) add(low_[t], x + UNIT);
        }
#endif
    }

    i32_register high_[TOKENS][TILES] = {}, low_[TOKENS][TILES];
};

}  // namespace
