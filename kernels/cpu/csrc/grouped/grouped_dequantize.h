// Grouped weights as floats, a tile's unit of inputs at a time.
#pragma once

#include <vector>

#include "grouped/grouped.h"

// What a product rounds separately in the definition of a weight is not fused here.
static inline f32x16 product_rounded(f32x16 a, f32x16 b) { return __builtin_assoc_barrier(a * b); }

// Walks along the inputs of one tile of 16 outputs.
class TileDequantizer {
   public:
    explicit TileDequantizer(const GroupedWeight& w)
        : w_(w), group_floats_(w.padded_groups() * TILE), groups_(2 * group_floats_) {}

    void start(int64_t tile) {
        tile_ = tile;
        expand_groups(w_, tile, false, groups_.data());
        expand_groups(w_, tile, true, groups_.data() + group_floats_);
    }

    // The weights of inputs [32 * unit, 32 * unit + 32) in padded order: out[input][lane]
    void unit(int64_t unit, f32x16 out[UNIT]) const {
        const uint8_t* codes = w_.tile_codes(tile_) + unit * w_.unit_bytes();
        if (w_.codebook) {
            with_bits(w_.bits, [&](auto b) { unit_of<decltype(b)::BITS, Form::CODEBOOK>(codes, unit, out); });
        } else if (w_.has_minimums()) {
            with_bits(w_.bits, [&](auto b) { unit_of<decltype(b)::BITS, Form::MINIMUMS>(codes, unit, out); });
        } else {
            with_bits(w_.bits, [&](auto b) { unit_of<decltype(b)::BITS, Form::ZEROS>(codes, unit, out); });
        }
    }

   private:
    enum class Form { ZEROS, MINIMUMS, CODEBOOK };

    template <int BITS, Form FORM>
    void unit_of(const uint8_t* codes, int64_t unit, f32x16* out) const {
        u32x16 quads[QUADS];
        unpack_unit<BITS>(codes, quads);
        for (int half = 0; half < 2; half++) {
            const int64_t group = (unit * UNIT + half * UNIT / 2) / w_.padded_group();
            const f32x16 scale = load(groups_.data() + group * TILE);
            const f32x16 offset = load(groups_.data() + group_floats_ + group * TILE);
#pragma GCC unroll 4
            for (int q = half * QUADS / 2; q < (half + 1) * QUADS / 2; q++)
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const i32x16 code = (i32x16)(quads[q] >> 8 * i & 0xff);
                    const f32x16 value = __builtin_convertvector(code, f32x16);
                    if constexpr (FORM == Form::MINIMUMS) out[4 * q + i] = product_rounded(scale, value) + offset;
                    if constexpr (FORM == Form::ZEROS) out[4 * q + i] = scale * (value - offset);
                    if constexpr (FORM == Form::CODEBOOK) out[4 * q + i] = scale * look_up<BITS>(code);
                }
        }
    }

    template <int BITS>
    f32x16 look_up(i32x16 code) const {
#if defined(__AVX512F__)
        if constexpr (BITS == 4)
            return (f32x16)_mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(w_.codebook));
        return (f32x16)_mm512_i32gather_ps((__m512i)code, w_.codebook, sizeof(float));
#else
        f32x16 values;
        for (int i = 0; i < LANES; i++) values[i] = w_.codebook[code[i]];
        return values;
#endif
    }

    const GroupedWeight& w_;
    const int64_t group_floats_;
    std::vector<float> groups_;  // scales, then offsets
    int64_t tile_ = 0;
};
