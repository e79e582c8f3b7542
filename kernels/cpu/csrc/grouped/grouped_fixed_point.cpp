// y = x w^T + bias with grouped weights in fixed point (fixed_point.h), for many tokens.

#include "products/fixed_point.h"

#include "grouped/grouped_input.h"
#include "grouped/grouped_linear.h"
#include "grouped/table_decoder.h"

#if defined(PAGEWIRE_FIXED_POINT)

namespace {

using fixed_point::i16_register;
using fixed_point::Integers;
using fixed_point::u16_register;

constexpr int UNIT_ROWS = UNIT / 2;  // of pairs of inputs, in the order of `in_order_of_pairs`
constexpr int HALF_ROWS = UNIT_ROWS / 2;
constexpr int FACTOR_BITS = 15;      // a product of codes is divided by 2^15

// Codes that are numbers: in rows as 2^SHIFT of themselves.
template <class B>
class Numbers {
   public:
    static constexpr int BITS = B::BITS;

    explicit Numbers(const GroupedWeight&) {}
    float lowest() const { return 0.0f; }
    float highest() const { return (1 << BITS) - 1; }
    float unit() const { return 1 << (FACTOR_BITS - BITS); }  // of a row, what a number of 1 is

    // The codes of a unit, of as many outputs as a register holds
    void unpack(const uint8_t* codes, i16_register rows[UNIT_ROWS]) const {
        u32_register quads[QUADS];
        unpack_unit<BITS>(codes, quads);
#pragma GCC unroll 8
        for (int q = 0; q < QUADS; q++) {
            rows[2 * q] = (i16_register)(quads[q] & 0x00ff00ffu) << (FACTOR_BITS - BITS);
            rows[2 * q + 1] = (i16_register)(quads[q] >> 8 & 0x00ff00ffu) << (FACTOR_BITS - BITS);
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
        for (int i = 0; i < SMALL_CODEBOOK; i++) highest_ += w.codebook[i] * 0.0f;  // NaN must show in the result
        const float largest = std::max(highest_, -lowest_);
        unit_ = INT16_MAX / (largest > 0.0f ? largest : 1.0f);
        for (int i = 0; i < LANES_OF_WORDS; i++)
            table_[i] = (int16_t)std::lrint(w.codebook[i % SMALL_CODEBOOK] * unit_);
        for (size_t i = 0; i < sizeof(Integers); i++) {
            low_[i] = (uint8_t)table_[i % SMALL_CODEBOOK];
            high_[i] = (uint8_t)(table_[i % SMALL_CODEBOOK] >> 8);
        }
    }
    float lowest() const { return lowest_; }
    float highest() const { return highest_; }
    float unit() const { return unit_; }

    void unpack(const uint8_t* codes, i16_register rows[UNIT_ROWS]) const {
        for (int plane = 0; plane < QUADS / 2; plane++, codes += 64, rows += 4) {
            const u16_register words = load_raw<u16_register>(codes);
            rows[0] = look_up(words);
            rows[1] = look_up(words >> 8);
            rows[2] = look_up(words >> 4);
            rows[3] = look_up(words >> 12);
        }
    }

   private:
    static constexpr int LANES_OF_WORDS = sizeof(Integers) / sizeof(int16_t);

    // at: the code in each word's lowest 4 bits
    i16_register look_up(u16_register at) const {
#if defined(__AVX512BW__)  // of which 5 bits count; the table's halves are the same
        return (i16_register)_mm512_permutexvar_epi16((Integers)at, load_raw<Integers>(table_));
#else
        const Integers low_byte = (Integers)((at & 15) | 0x8000);  // nothing for the other
        const auto bytes = [&](const uint8_t* table) {
            return (u16_register)_mm256_shuffle_epi8(load_raw<Integers>(table), low_byte);
        };
        return (i16_register)(bytes(low_) | bytes(high_) << 8);
#endif
    }

    float lowest_, highest_, unit_;
    int16_t table_[LANES_OF_WORDS];
    uint8_t low_[sizeof(Integers)], high_[sizeof(Integers)];
};

// The scales and offsets of a tile's groups; offsets of a codebook do not count.
class TileGroups {
   public:
    explicit TileGroups(const GroupedWeight& w) : w_(w), floats_(w.padded_groups() * TILE), memory_(2 * floats_) {}

    void start(int64_t tile) {
        expand_groups(w_, tile, false, memory_.data());
        if (!w_.codebook) expand_groups(w_, tile, true, memory_.data() + floats_);
    }
    const float* scales(int64_t group) const { return memory_.data() + group * TILE; }
    const float* offsets(int64_t group) const { return memory_.data() + floats_ + group * TILE; }

   private:
    const GroupedWeight& w_;
    const int64_t floats_;
    std::vector<float> memory_;  // scales, then offsets
};

// Numbers times their group's scale, plus its minimum: rounded to 12 bits of the largest that the block could hold.
template <class Codes>
class Scaled {
   public:
    explicit Scaled(const GroupedWeight& w, int) : w_(w), codes_(w), groups_(w) {}

    void start(int64_t tile) {
        tile_ = tile;
        groups_.start(tile);
    }

    void block(int64_t index, uint32_t* pairs, float* scales) const {
        for (int lane = 0; lane < TILE; lane += REGISTER_LANES) block_part(index, lane, pairs + lane, scales + lane);
    }

   private:
    static constexpr int AHEAD_UNITS = 4;
    static constexpr int HALVES = 2 * fixed_point::MAX_BLOCK / UNIT;  // of units

    void block_part(int64_t index, int lane, uint32_t* pairs, float* scales) const {
        const int64_t first = index * HALVES;
        const int halves = (int)std::min<int64_t>(HALVES, 2 * w_.units() - first);
        f32_register factors[HALVES], minimums[HALVES], peak = {}, poison = {};
        for (int h = 0; h < halves; h++) {
            const int64_t group = (first + h) * (UNIT / 2) / w_.padded_group();
            factors[h] = load_register(groups_.scales(group) + lane);
            const f32_register offset = load_register(groups_.offsets(group) + lane);
            minimums[h] = w_.has_minimums() ? offset : -factors[h] * offset;
            peak = max(peak, max(fixed_point::magnitude(factors[h] * codes_.lowest() + minimums[h]),
                                 fixed_point::magnitude(factors[h] * codes_.highest() + minimums[h])));
            poison += (factors[h] * codes_.highest() + minimums[h]) * 0.0f;
        }
        store_register(scales, peak / fixed_point::LARGEST_WEIGHT + poison);
        const f32_register unit =
            peak > SMALLEST_PEAK ? fixed_point::LARGEST_WEIGHT / peak : f32_register{};
        const float row_unit = (1 << FACTOR_BITS) / codes_.unit();
        const uint8_t* codes = w_.tile_codes(tile_) + first / 2 * w_.unit_bytes() + 4 * lane;
        for (int h = 0; h < halves; codes += w_.unit_bytes()) {
            i16_register rows[UNIT_ROWS];
#pragma GCC unroll 8
            for (int i = 0; i < Codes::BITS; i++) __builtin_prefetch(codes + (AHEAD_UNITS * Codes::BITS + i) * 64);
            codes_.unpack(codes, rows);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++, h++) {
                // Of a code's range no more than 2 * LARGEST_WEIGHT is left: 16 bits hold a step, 2^BITS times as
                // large.
                const f32_register steps = factors[h] * unit * row_unit, least = minimums[h] * unit;
                const i16_register factor = fixed_point::pairs_of(steps, steps);
                const i16_register minimum = fixed_point::pairs_of(least, least);
#pragma GCC unroll 8
                for (int row = half * HALF_ROWS; row < (half + 1) * HALF_ROWS; row++, pairs += TILE) {
                    const i16_register weights = fixed_point::scaled(rows[row], factor) + minimum;
                    __builtin_memcpy(pairs, &weights, sizeof weights);
                }
            }
        }
    }

    const GroupedWeight& w_;
    const Codes codes_;
    TileGroups groups_;
    int64_t tile_ = 0;
};

// fp8 e4m3: blocks are parts of groups.
class Fp8 {
   public:
    Fp8(const GroupedWeight& w, int block) : w_(w), block_units_(block / UNIT), decoder_(w), groups_(w) {}

    void start(int64_t tile) {
        codes_ = w_.tile_codes(tile);
        groups_.start(tile);
    }

    void block(int64_t index, uint32_t* pairs, float* scales) const {
        alignas(64) uint32_t numbers[fixed_point::MAX_BLOCK / 2 * TILE];
        const int64_t first = index * block_units_;
        for (int i = 0; i < block_units_; i++) {
            const uint8_t* const codes = codes_ + (first + i) * w_.unit_bytes();
            for (int line = 0; line < QUADS; line++) __builtin_prefetch(codes + packed::PREFETCH + line * 64);
            decoder_.unit(codes, numbers + i * UNIT_ROWS * TILE);
        }
        fixed_point::to_fixed_point(numbers, block_units_ * UNIT_ROWS, pairs, scales);
        store(scales, load(scales) * load(groups_.scales(first * UNIT / w_.padded_group())) * E4M3_UNIT);
    }

   private:
    const GroupedWeight& w_;
    const int block_units_;
    const TableDecoder decoder_;
    TileGroups groups_;
    const uint8_t* codes_ = nullptr;
};

template <class Weights, class T>
void linear_of(const GroupedWeight& w, const void* x, const int32_t* permutation, const Output& output, int block,
               int threads) {
    const auto walk = [&](int64_t token) {
        return [inputs = TokenInputs<T>(w, x, permutation, token)]() mutable {
            return in_order_of_pairs(inputs.next());
        };
    };
    fixed_point::linear(output.tokens, w.padded_in(), block, w.tiles(), threads, walk,
                        [&] { return Weights(w, block); },
                        [&](int64_t token, int64_t tile, int64_t end, const f32x16* sums) {
                            for (int64_t n = tile; n < end; n++) output.write(token, n, sums[n - tile]);
                        });
}

template <class Weights>
void linear(const GroupedWeight& w, const void* x, const int32_t* permutation, const Output& output, int block,
            int threads) {
    if (output.dtype == FLOAT32) return linear_of<Weights, float>(w, x, permutation, output, block, threads);
    linear_of<Weights, bf16>(w, x, permutation, output, block, threads);
}

}  // namespace

bool grouped_linear_fixed_point(const GroupedWeight& w, const void* x, const int32_t* permutation,
                                const Output& output, int threads) {
    const bool is_fp8 = w.codebook && w.bits == 8;
    if (!output.is_bf16()) return false;
    if ((w.codebook && !TableDecoder::fits(w)) || (is_fp8 && w.block() < UNIT)) return false;
    if (is_fp8) {
        linear<Fp8>(w, x, permutation, output, w.block(), threads);
    } else if (w.codebook) {
        linear<Scaled<Table>>(w, x, permutation, output, fixed_point::MAX_BLOCK, threads);
    } else {
        with_bits(w.bits, [&](auto bits) {
            linear<Scaled<Numbers<decltype(bits)>>>(w, x, permutation, output, fixed_point::MAX_BLOCK, threads);
        });
    }
    return true;
}

#else

bool grouped_linear_fixed_point(const GroupedWeight&, const void*, const int32_t*, const Output&, int) {
    return false;
}

#endif
