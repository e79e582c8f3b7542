// y = x w^T + bias with grouped weights in fixed point (fixed_point.h), for many tokens.

#include "fixed_point.h"

#include "e4m3.h"
#include "grouped_input.h"
#include "grouped_linear.h"

#if defined(PAGEWIRE_FIXED_POINT)

namespace {

using fixed_point::i16x32;
using fixed_point::rounded;

constexpr int UNIT_ROWS = UNIT / 2;  // of pairs of inputs, in the order of `in_order_of_e4m3_pairs`
constexpr int HALF_ROWS = UNIT_ROWS / 2;
constexpr int FACTOR_BITS = 15;      // a product of codes is divided by 2^15

i16x32 both_halves(f32x16 x) {
    const u32x16 integer = rounded(x);
    return (i16x32)fixed_point::pairs_of(integer, integer);
}

i16x32 scaled(i16x32 numbers, i16x32 factor) {
    return (i16x32)_mm512_mulhrs_epi16((__m512i)numbers, (__m512i)factor);
}

// Codes that are numbers: in rows as 2^SHIFT of themselves.
template <class B>
class Integers {
   public:
    static constexpr int BITS = B::BITS;

    explicit Integers(const GroupedWeight&) {}
    float lowest() const { return 0.0f; }
    float highest() const { return (1 << BITS) - 1; }
    float unit() const { return 1 << (FACTOR_BITS - BITS); }  // of a row, what a number of 1 is

    void unpack(const uint8_t* codes, i16x32 rows[UNIT_ROWS]) const {
        u32x16 quads[QUADS];
        unpack_unit<BITS>(codes, quads);
#pragma GCC unroll 8
        for (int q = 0; q < QUADS; q++) {
            rows[2 * q] = (i16x32)(quads[q] & 0x00ff00ffu) << (FACTOR_BITS - BITS);
            rows[2 * q + 1] = (i16x32)(quads[q] >> 8 & 0x00ff00ffu) << (FACTOR_BITS - BITS);
        }
    }
};

// Codes of 4 bits that stand for numbers of a table.
class Table {
   public:
    static constexpr int BITS = 4;

    explicit Table(const GroupedWeight& w)
        : lowest_(*std::min_element(w.codebook, w.codebook + SMALL_CODEBOOK)),
          highest_(*std::max_element(w.codebook, w.codebook + SMALL_CODEBOOK)) {
        const float largest = std::max(highest_, -lowest_);
        unit_ = INT16_MAX / (largest > 0.0f ? largest : 1.0f);
        for (int i = 0; i < SMALL_CODEBOOK; i++)
            table_[i] = table_[i + SMALL_CODEBOOK] = (int16_t)std::lrint(w.codebook[i] * unit_);
    }
    float lowest() const { return lowest_; }
    float highest() const { return highest_; }
    float unit() const { return unit_; }

    void unpack(const uint8_t* codes, i16x32 rows[UNIT_ROWS]) const {
        const __m512i table = load_raw<__m512i>(table_);
        // The index is a word's lowest 5 bits; the table's halves are the same.
        const auto look_up = [&](__m512i at) { return (i16x32)_mm512_permutexvar_epi16(at, table); };
        for (int plane = 0; plane < QUADS / 2; plane++, codes += 64, rows += 4) {
            const __m512i words = load_raw<__m512i>(codes);
            rows[0] = look_up(words);
            rows[1] = look_up(_mm512_srli_epi16(words, 8));
            rows[2] = look_up(_mm512_srli_epi16(words, 4));
            rows[3] = look_up(_mm512_srli_epi16(words, 12));
        }
    }

   private:
    float lowest_, highest_, unit_;
    alignas(64) int16_t table_[2 * SMALL_CODEBOOK];
};

// The scales and offsets of a tile's groups.
class TileGroups {
   public:
    explicit TileGroups(const GroupedWeight& w) : w_(w), floats_(w.padded_groups() * TILE), memory_(2 * floats_) {}

    void start(int64_t tile) {
        expand_groups(w_, tile, false, memory_.data());
        expand_groups(w_, tile, true, memory_.data() + floats_);
    }
    f32x16 scale(int64_t group) const { return load(memory_.data() + group * TILE); }
    f32x16 offset(int64_t group) const { return load(memory_.data() + floats_ + group * TILE); }

   private:
    const GroupedWeight& w_;
    const int64_t floats_;
    std::vector<float> memory_;  // scales, then offsets
};

// Numbers times their group's scale, plus its minimum: rounded to 12 bits of the block's largest possible one.
template <class Codes>
class Scaled {
   public:
    explicit Scaled(const GroupedWeight& w, int) : w_(w), codes_(w), groups_(w) {}

    void start(int64_t tile) {
        tile_ = tile;
        groups_.start(tile);
    }

    void block(int64_t index, uint32_t* pairs, float* scale) const {
        constexpr int HALVES = 2 * fixed_point::MAX_BLOCK / UNIT;
        const int64_t first = index * HALVES;
        const int halves = (int)std::min<int64_t>(HALVES, 2 * w_.units() - first);
        f32x16 factors[HALVES], minimums[HALVES], peak = {}, poison = {};
        for (int h = 0; h < halves; h++) {
            const int64_t group = (first + h) * (UNIT / 2) / w_.padded_group();
            factors[h] = groups_.scale(group);
            const f32x16 offset = groups_.offset(group);
            minimums[h] = w_.has_minimums() ? offset : w_.codebook ? f32x16{} : -factors[h] * offset;
            peak = max(peak, max(magnitude(factors[h] * codes_.lowest() + minimums[h]),
                                 magnitude(factors[h] * codes_.highest() + minimums[h])));
            poison += (factors[h] + minimums[h]) * 0.0f;
        }
        store(scale, peak / fixed_point::LARGEST_WEIGHT + poison);
        const f32x16 unit = peak > fixed_point::SMALLEST_PEAK ? fixed_point::LARGEST_WEIGHT / peak : f32x16{};
        const float row_unit = (1 << FACTOR_BITS) / codes_.unit();
        const uint8_t* codes = w_.tile_codes(tile_) + first / 2 * w_.unit_bytes();
        for (int h = 0; h < halves; codes += w_.unit_bytes()) {
            i16x32 rows[UNIT_ROWS];
            __builtin_prefetch(codes + AHEAD_UNITS * Codes::BITS * 64);
            codes_.unpack(codes, rows);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++, h++) {
                const i16x32 factor = both_halves(factors[h] * unit * row_unit);
                const i16x32 minimum = both_halves(minimums[h] * unit);
#pragma GCC unroll 8
                for (int row = half * HALF_ROWS; row < (half + 1) * HALF_ROWS; row++, pairs += TILE) {
                    const i16x32 weights = scaled(rows[row], factor) + minimum;
                    __builtin_memcpy(pairs, &weights, sizeof weights);
                }
            }
        }
    }

   private:
    static constexpr int AHEAD_UNITS = 4;
    static f32x16 magnitude(f32x16 x) { return x < 0.0f ? -x : x; }

    const GroupedWeight& w_;
    const Codes codes_;
    TileGroups groups_;
    int64_t tile_ = 0;
};

// fp8 e4m3: blocks are parts of groups.
class Fp8 {
   public:
    Fp8(const GroupedWeight& w, int block) : w_(w), block_(block), groups_(w) {}

    void start(int64_t tile) {
        tile_ = tile;
        groups_.start(tile);
    }

    void block(int64_t index, uint32_t* pairs, float* scale) const {
        alignas(64) uint32_t rows[fixed_point::MAX_BLOCK / 2 * TILE];
        const uint8_t* codes = w_.tile_codes(tile_) + index * block_ / UNIT * w_.unit_bytes();
        for (int row = 0; row < block_ / 2; row += 2, codes += 64) {
            __builtin_prefetch(codes + packed::PREFETCH);
            const E4m3Pairs numbers = e4m3_pairs(codes);
            __builtin_memcpy(rows + row * TILE, &numbers.first, sizeof numbers.first);
            __builtin_memcpy(rows + (row + 1) * TILE, &numbers.second, sizeof numbers.second);
        }
        const f32x16 group_scale = groups_.scale(index * block_ / w_.padded_group());
        store(scale, fixed_point::fix(rows, block_ / 2, pairs) * group_scale * E4M3_UNIT);
    }

   private:
    const GroupedWeight& w_;
    const int block_;
    TileGroups groups_;
    int64_t tile_ = 0;
};

template <class Weights>
void linear(const GroupedWeight& w, const void* x, const int32_t* permutation, const Output& output, int block,
            int threads) {
    const auto walk = [&](int64_t token) {
        return [inputs = TokenInputs<bf16>(w, x, permutation, token)]() mutable {
            return in_order_of_e4m3_pairs(inputs.next());
        };
    };
    fixed_point::linear(output.tokens, w.padded_in(), block, w.tiles(), threads, walk,
                        [&] { return Weights(w, block); },
                        [&](int64_t token, int64_t tile, f32x16 sums) { output.write(token, tile, sums); });
}

}  // namespace

bool grouped_linear_fixed_point(const GroupedWeight& w, const void* x, const int32_t* permutation,
                                const Output& output, int threads) {
    const bool is_fp8 = w.codebook && w.bits == 8;
    if (output.dtype != BFLOAT16 || (w.codebook && w.bits < 4) || (is_fp8 && w.block() < UNIT)) return false;
    if (is_fp8) {
        linear<Fp8>(w, x, permutation, output, w.block(), threads);
    } else if (w.codebook) {
        linear<Scaled<Table>>(w, x, permutation, output, fixed_point::MAX_BLOCK, threads);
    } else {
        with_bits(w.bits, [&](auto bits) {
            linear<Scaled<Integers<decltype(bits)>>>(w, x, permutation, output, fixed_point::MAX_BLOCK, threads);
        });
    }
    return true;
}

#else

bool grouped_linear_fixed_point(const GroupedWeight&, const void*, const int32_t*, const Output&, int) {
    return false;
}

#endif
