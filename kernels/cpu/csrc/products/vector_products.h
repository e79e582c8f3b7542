// Products of tokens with packed bf16 weights (packed_linear.h) in vector registers, shared by dense weights and by
// those that are decoded to bf16.
#pragma once

#include <algorithm>
#include <utility>

#include "common/passes.h"
#include "products/packed_linear.h"

namespace packed {

#if defined(__AVX512F__)
constexpr int MAX_GROUP = 4;       // tiles multiplied together, at most
constexpr int MAX_SUMS = 24;       // sums of tiles x tokens that the registers hold
#else
constexpr int MAX_GROUP = 1;
constexpr int MAX_SUMS = 6;
#endif
constexpr int MAX_TOKENS = 12;     // multiplied together, at most
constexpr int FEW_TOKENS = 4;      // up to which as many tiles as possible are: memory is what takes time
constexpr int64_t MAX_PART = 256;  // tokens of a piece of work
constexpr int PREFETCH = 2048;     // bytes of a tile fetched ahead of the products
constexpr int ROW_BYTES = TILE * sizeof(uint32_t);

// Tokens multiplied together with `group` tiles, at most.
constexpr int tokens_with(int group) { return std::min(MAX_TOKENS, MAX_SUMS / group); }

#if defined(__AVX512BF16__)
// Pairs of inputs by the bf16 dot product.
struct Pairs {
    typedef uint32_t X;
    typedef f32x16 Sums;
    static constexpr int STEPS = 1;  // of a row of weights
    static constexpr int GROUP = 4;  // tiles multiplied together
    static u32x16 weights(const uint32_t* row, int) { return load_raw<u32x16>(row); }
    static u32x16 broadcast(uint32_t x) { return u32x16{} + x; }
    static f32x16 multiply_add(f32x16 sum, u32x16 w, u32x16 x) {
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
    }
};
#endif

// One input after the other, as floats: first the even ones, in the lower halves of the pairs.
struct Floats {
    typedef float X;
    typedef f32_register Sums;
    static constexpr int STEPS = 2;
    static constexpr int GROUP = std::min(MAX_GROUP, 2);  // and more tokens: a weight is widened once for them all
    static Sums weights(const uint32_t* row, int step) {
        const u32_register pairs = load_raw<u32_register>(row);
        return step == 0 ? (Sums)(pairs << 16) : (Sums)(pairs & 0xffff0000u);
    }
    static Sums broadcast(float x) { return x - Sums{}; }
    static Sums multiply_add(Sums sum, Sums w, Sums x) { return sum + w * x; }
};

template <class M>
int64_t group_for(int64_t tokens) {
    return tokens <= FEW_TOKENS ? MAX_GROUP : M::GROUP;
}

// Weights of GROUP tiles over `units` units.
template <int GROUP>
struct TileGroup {
    const uint32_t* tiles[GROUP];
    int64_t units;
    const char* ahead[GROUP];       // what is fetched meanwhile, this many bytes with every row; past the end nothing
    int64_t ahead_step;
    const float* scales = nullptr;  // of the sums: TILE of each tile, scale_stride apart
    int64_t scale_stride = 0;
};

// Products of TOKENS tokens, `stride` numbers apart, with a group of tiles. `begins`: sums [TOKENS, GROUP] are products
// of these units alone; else they go on from what they are. Scaled products are added to what sums are. Every sum takes
// the inputs in order, one after the other, whatever it is multiplied together with.
template <class M, int TOKENS, int GROUP>
void multiply(const typename M::X* x, int64_t stride, const TileGroup<GROUP>& weights, bool begins, f32x16* sums) {
    typedef typename M::Sums Sums;
    constexpr int PARTS = sizeof(f32x16) / sizeof(Sums), PART_LANES = LANES / PARTS;
    Sums acc[TOKENS][GROUP * PARTS] = {};
    if (!begins) __builtin_memcpy(acc, sums, sizeof acc);
    const uint32_t* tiles[GROUP];
    const char* ahead[GROUP];
    for (int n = 0; n < GROUP; n++) {
        tiles[n] = weights.tiles[n];
        ahead[n] = weights.ahead[n];
    }
    const int64_t ahead_step = weights.ahead_step;
    for (int64_t at = 0; at < weights.units * UNIT_PAIRS; at += TILE, x += M::STEPS) {
#pragma GCC unroll 4
        for (int n = 0; n < GROUP; n++) {
            __builtin_prefetch(ahead[n]);
            ahead[n] += ahead_step;
        }
#pragma GCC unroll 2
        for (int step = 0; step < M::STEPS; step++) {
            decltype(M::weights(nullptr, 0)) w[GROUP * PARTS];
#pragma GCC unroll 4
            for (int n = 0; n < GROUP * PARTS; n++)
                w[n] = M::weights(tiles[n / PARTS] + at + n % PARTS * PART_LANES, step);
#pragma GCC unroll 12
            for (int t = 0; t < TOKENS; t++) {
                const auto input = M::broadcast(x[t * stride + step]);
#pragma GCC unroll 4
                for (int n = 0; n < GROUP * PARTS; n++) acc[t][n] = M::multiply_add(acc[t][n], w[n], input);
            }
        }
    }
    if (weights.scales) {
#pragma GCC unroll 4
        for (int n = 0; n < GROUP * PARTS; n++) {
            const int part = n % PARTS * PART_LANES;
            const Sums scale = load_raw<Sums>(weights.scales + n / PARTS * weights.scale_stride + part);
#pragma GCC unroll 12
            for (int t = 0; t < TOKENS; t++) {
                Sums* const sum = (Sums*)(sums + t * GROUP) + n;
                *sum += acc[t][n] * scale;
            }
        }
    } else {
        __builtin_memcpy(sums, acc, sizeof acc);
    }
}

template <class M, int GROUP>
using Multiply = void (*)(const typename M::X*, int64_t, const TileGroup<GROUP>&, bool, f32x16*);

template <class M, int GROUP, int... COUNTS>
Multiply<M, GROUP> multiply_of(int64_t tokens, std::integer_sequence<int, COUNTS...>) {
    static constexpr Multiply<M, GROUP> products[] = {multiply<M, COUNTS + 1, GROUP>...};
    return products[tokens - 1];
}
// The product of that many tokens.
template <class M, int GROUP>
Multiply<M, GROUP> multiply_of(int64_t tokens) {
    return multiply_of<M, GROUP>(tokens, std::make_integer_sequence<int, tokens_with(GROUP)>{});
}

// f(first token, end) for passes over the tokens [0, count), of at most MOST and about as many.
template <int MOST, class F>
void for_passes(int64_t count, F&& f) {
    const Passes passes(count, MOST);
    for (int64_t t = 0; t < count; t += passes.per_pass) f(t, t + passes.count(t));
}

// f(std::integral_constant<int, GROUP>) of a group of 1, 2 or 4 tiles
template <class F>
void with_group(int64_t group, F&& f) {
#if defined(__AVX512F__)
    if (group == 4) return f(std::integral_constant<int, 4>{});
    if (group == 2) return f(std::integral_constant<int, 2>{});
#endif
    f(std::integral_constant<int, 1>{});
}

}  // namespace packed
