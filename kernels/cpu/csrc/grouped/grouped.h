// Grouped quantized weights in the layout of `grouped_layout.py`, and what every kernel on them reads.
//
// Outputs come in tiles of 16, one per vector lane. A tile's codes follow each other along the inputs in units of 32
// inputs: 8 quads (a quad is 4 neighbouring inputs in the 4 bytes of a lane, as the integer dot product wants them)
// of `bits` * 64 bytes. Groups are padded with zero codes, to 16 inputs or to a multiple of 32, so that they begin at
// a unit, or at half a unit.
#pragma once

#include <algorithm>

#include "common/vector.h"

constexpr int TILE = LANES;        // outputs
constexpr int UNIT = 32;           // inputs
constexpr int QUADS = UNIT / 4;
constexpr int SUPER_SIZE = 256;    // inputs that share a scale of scales
constexpr int MAX_BLOCK = 64;      // inputs that share an activation scale, at most
constexpr int SMALL_CODEBOOK = 16;

// What a tensor of scales or offsets holds per tile: 16 numbers per group; TWO_LEVEL: for each SUPER_SIZE inputs 16
// float16 and then 16 bytes per group, which they multiply.
enum GroupKind : int { NONE = 0, HALF = 1, SINGLE = 2, ZEROS = 3, TWO_LEVEL = 4 };

struct GroupedWeight {
    const uint8_t* codes;
    const char* scales;
    const char* offsets;
    const float* codebook;  // [2^bits] or null
    int64_t in, out;
    int bits, group_size, zero_point;
    GroupKind scale_kind, offset_kind;

    int64_t groups() const { return (in + group_size - 1) / group_size; }
    int padded_group() const { return group_size <= UNIT / 2 ? UNIT / 2 : (group_size + UNIT - 1) / UNIT * UNIT; }
    int64_t padded_in() const { return (groups() * padded_group() + UNIT - 1) / UNIT * UNIT; }
    int64_t padded_groups() const { return padded_in() / padded_group(); }
    int64_t tiles() const { return (out + TILE - 1) / TILE; }
    int64_t units() const { return padded_in() / UNIT; }
    int64_t unit_bytes() const { return bits * 64; }
    const uint8_t* tile_codes(int64_t tile) const { return codes + tile * units() * unit_bytes(); }
    // Inputs that share an activation scale and a conversion of integer sums to floats.
    int block() const {
        const int group = padded_group();
        return group % MAX_BLOCK == 0 ? MAX_BLOCK : std::min(group, UNIT);
    }
    // Of the numbers of a tile's groups: of scales, or of offsets
    int64_t group_bytes(GroupKind kind) const {
        switch (kind) {
            case NONE: return 0;
            case HALF: return groups() * TILE * 2;
            case SINGLE: return groups() * TILE * 4;
            case ZEROS: return groups() * TILE;
            case TWO_LEVEL: break;
        }
        const int64_t per_super = SUPER_SIZE / group_size;
        return (groups() + per_super - 1) / per_super * TILE * (2 + per_super);
    }
    // Whether offsets are added to scale * code; else they are subtracted from the code.
    bool has_minimums() const { return offset_kind != NONE && offset_kind != ZEROS; }
};

static inline f32x16 widen_bytes(const char* p, bool with_sign) {
    i32x16 wide;
#if defined(__AVX512F__)  // GCC 12 takes the portable form apart
    const __m128i bytes = load_raw<__m128i>(p);
    wide = (i32x16)(with_sign ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#else
    wide = with_sign ? __builtin_convertvector(load_raw<i8x16>(p), i32x16)
                     : __builtin_convertvector(load_raw<u8x16>(p), i32x16);
#endif
    return __builtin_convertvector(wide, f32x16);
}

// The 16 numbers of each of a tile's groups as floats: `offsets` says which tensor. out [padded_groups, 16]
static inline void expand_groups(const GroupedWeight& w, int64_t tile, bool offsets, float* out) {
    const char* data = offsets ? w.offsets : w.scales;
    const int64_t groups = w.groups(), first = tile * groups * TILE;
    float* const end = out + w.padded_groups() * TILE;
    const auto each = [&](auto value) {
        for (int64_t g = 0; g < groups; g++, out += TILE) store(out, value(first + g * TILE));
    };
    switch (offsets ? w.offset_kind : w.scale_kind) {
        case NONE: each([&](int64_t) { return splat(w.zero_point); }); break;
        case HALF: each([&](int64_t i) { return load((const f16*)data + i); }); break;
        case SINGLE: each([&](int64_t i) { return load((const float*)data + i); }); break;
        case ZEROS: each([&](int64_t i) { return widen_bytes(data + i, false); }); break;
        case TWO_LEVEL: {
            const int per_super = SUPER_SIZE / w.group_size, super_bytes = TILE * (2 + per_super);
            const char* super = data + tile * ((groups + per_super - 1) / per_super) * super_bytes;
            for (int64_t g = 0; g < groups; super += super_bytes) {
                const f32x16 scale = load((const f16*)super);
                for (int i = 0; i < per_super && g < groups; i++, g++, out += TILE)
                    store(out, widen_bytes(super + TILE * (2 + i), !offsets) * scale);
            }
            break;
        }
    }
    for (; out < end; out += TILE) store(out, f32x16{});
}

// ---- codes of a unit: quads[q] has inputs 4q .. 4q + 3 of a lane's output in the lane's bytes ----
//
// Planes: 4 low bits, two quads to a vector; then (or alone) 2 bits, four quads to a vector; then 1 bit, eight quads.

// V is a vector of 32-bit lanes, of all 16 outputs of a tile or of those that one register holds.

template <class V>
[[gnu::always_inline]] static inline V plane(const uint8_t* p, int vector) {
    return load_raw<V>(p + vector * 64);
}

// Bits [from, from + width) of each byte, moved to bit `to`.
template <class V>
[[gnu::always_inline]] static inline V field(V bytes, int from, int width, int to) {
    const uint32_t mask = (((1u << width) - 1) << to) * 0x01010101u;
    return (from > to ? bytes >> (from - to) : bytes << (to - from)) & mask;
}

template <int BITS, class V>
[[gnu::always_inline]] static inline V unpack_quad(const uint8_t* p, int q) {
    constexpr int NIBBLES = BITS >= 4 ? 4 : 0, REST = BITS - NIBBLES;
    if constexpr (BITS == 8) return plane<V>(p, q);
    V code = {};
    if constexpr (NIBBLES) code = field(plane<V>(p, q / 2), q % 2 * 4, 4, 0);
    if constexpr (REST >= 2) code |= field(plane<V>(p + NIBBLES * 64, q / 4), q % 4 * 2, 2, NIBBLES);
    if constexpr (REST % 2) code |= field(plane<V>(p + (BITS - 1) * 64, 0), q, 1, BITS - 1);
    return code;
}

template <int BITS, class V>
[[gnu::always_inline]] static inline void unpack_unit(const uint8_t* p, V* quads) {
#pragma GCC unroll 8
    for (int q = 0; q < QUADS; q++) quads[q] = unpack_quad<BITS, V>(p, q);
}

// function(std::integral_constant-like tag with ::BITS) for the number of bits.
template <int N>
struct Bits {
    static constexpr int BITS = N;
};
template <class F>
static inline void with_bits(int bits, F function) {
    switch (bits) {
        case 2: return function(Bits<2>{});
        case 3: return function(Bits<3>{});
        case 4: return function(Bits<4>{});
        case 5: return function(Bits<5>{});
        case 6: return function(Bits<6>{});
        case 8: return function(Bits<8>{});
    }
}
