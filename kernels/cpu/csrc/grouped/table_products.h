// Products of tokens, as floats, with weights stored as codes of a table's numbers: each code becomes a float in a
// register when it is multiplied.
#pragma once

#include "common/e4m3.h"
#include "grouped/grouped.h"
#include "products/vector_products.h"

#if defined(__AVX512F__)

namespace table {

// 4 bits. A Block are 64 bytes of codes, of the inputs that follow each other.
class Nibbles {
   public:
    static constexpr int INPUTS = 8;
    typedef u32x16 Block;

    explicit Nibbles(const GroupedWeight& w) : numbers_(_mm512_loadu_ps(w.codebook)) {}
    static Block load(const uint8_t* codes) { return load_raw<u32x16>(codes); }
    f32x16 weights(const Block& block, int input) const {  // the index is a lane's lowest 4 bits
        return (f32x16)_mm512_permutexvar_ps((__m512i)(block >> (8 * (input % 4) + input / 4 * 4)), numbers_);
    }

   private:
    const __m512 numbers_;
};

// fp8 e4m3
class Bytes {
   public:
    static constexpr int INPUTS = 4;

    explicit Bytes(const GroupedWeight&) {}
    typedef E4m3Pairs Block;
    static Block load(const uint8_t* codes) { return e4m3_pairs(codes); }
    static f32x16 weights(const Block& block, int input) {
        const u32x16 pairs = input < 2 ? block.first : block.second;
        return (f32x16)(input % 2 ? pairs & 0xffff0000u : pairs << 16);
    }
};

// GROUP tiles and the scales of their groups of inputs, [padded_groups, TILE] for each tile.
template <int GROUP>
struct Tiles {
    const uint8_t* codes[GROUP];
    const float* scales[GROUP];
    int64_t groups;
    int units_per_group;
};

// sums [TOKENS, GROUP] = products of TOKENS tokens, `stride` numbers apart, with a group of tiles.
template <class Codes, int TOKENS, int GROUP>
void multiply(const Codes& codes, const float* x, int64_t stride, const Tiles<GROUP>& tiles, f32x16* sums) {
    const uint8_t* next[GROUP];
    for (int n = 0; n < GROUP; n++) next[n] = tiles.codes[n];
    std::fill(sums, sums + TOKENS * GROUP, f32x16{});
    for (int64_t group = 0; group < tiles.groups; group++) {
        f32x16 acc[TOKENS][GROUP] = {};
        for (int block = 0; block < tiles.units_per_group * (UNIT / Codes::INPUTS); block++, x += Codes::INPUTS) {
            typename Codes::Block blocks[GROUP];
#pragma GCC unroll 4
            for (int n = 0; n < GROUP; n++) {
                blocks[n] = codes.load(next[n]);
                next[n] += 64;
                __builtin_prefetch(next[n] + packed::PREFETCH);  // past the end it does nothing
            }
#pragma GCC unroll 8
            for (int i = 0; i < Codes::INPUTS; i++) {
                f32x16 w[GROUP];
#pragma GCC unroll 4
                for (int n = 0; n < GROUP; n++) w[n] = codes.weights(blocks[n], i);
#pragma GCC unroll 12
                for (int t = 0; t < TOKENS; t++) {
                    const f32x16 input = splat(x[t * stride + i]);
#pragma GCC unroll 4
                    for (int n = 0; n < GROUP; n++) acc[t][n] += w[n] * input;
                }
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < GROUP; n++) {
            const f32x16 scale = load(tiles.scales[n] + group * TILE);
#pragma GCC unroll 12
            for (int t = 0; t < TOKENS; t++) sums[t * GROUP + n] += acc[t][n] * scale;
        }
    }
}

template <class Codes, int GROUP>
using Multiply = void (*)(const Codes&, const float*, int64_t, const Tiles<GROUP>&, f32x16*);

template <class Codes, int GROUP, int... COUNTS>
Multiply<Codes, GROUP> multiply_of(int64_t tokens, std::integer_sequence<int, COUNTS...>) {
    static constexpr Multiply<Codes, GROUP> products[] = {multiply<Codes, COUNTS + 1, GROUP>...};
    return products[tokens - 1];
}

// The product of that many tokens.
template <class Codes, int GROUP>
Multiply<Codes, GROUP> multiply_of(int64_t tokens) {
    return multiply_of<Codes, GROUP>(tokens, std::make_integer_sequence<int, packed::tokens_with(GROUP)>{});
}

}  // namespace table

#endif
