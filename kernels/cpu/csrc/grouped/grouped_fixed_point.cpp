// y = x w^T + bias with grouped weights in fixed point (fixed_point.h), for many tokens.

#include "products/fixed_point.h"

#include "grouped/grouped_input.h"
#include "grouped/grouped_linear.h"
#include "grouped/table_decoder.h"

#if defined(PAGEWIRE_FIXED_POINT)

namespace {

using fixed_point::DECODED_NORM;
using fixed_point::i16_register;
using fixed_point::Integers;
using fixed_point::LARGEST_DECODED;
using fixed_point::u16_register;

static_assert(!PAIRS_OF_TILES || fixed_point::GROUP == 2);

constexpr int UNIT_ROWS = UNIT / 2;  // of pairs of inputs, in the order of `in_order_of_pairs`
constexpr int FACTOR_BITS = 15;      // a product of codes is divided by 2^15

// Codes that are numbers: in rows as multiples of unit().
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
        if constexpr (BITS == 4) {  // four to a word
#pragma GCC unroll 4
            for (int plane = 0; plane < QUADS / 2; plane++) {
                const u16_register words = load_raw<u16_register>(codes + plane * 64);
                rows[4 * plane] = row_of<0>(words);
                rows[4 * plane + 1] = row_of<8>(words);
                rows[4 * plane + 2] = row_of<4>(words);
                rows[4 * plane + 3] = row_of<12>(words);
            }
        } else {
#pragma GCC unroll 8
            for (int q = 0; q < QUADS; q++) {
                const u16_register words = (u16_register)unpack_quad<BITS, u32_register>(codes, q);
                rows[2 * q] = row_of<0>(words);
                rows[2 * q + 1] = row_of<8>(words);
            }
        }
    }

   private:
    // The codes that begin at this bit of each word
    template <int FROM>
    static i16_register row_of(u16_register words) {
        constexpr int TO = FACTOR_BITS - BITS;
        const u16_register moved = FROM > TO ? words >> (FROM - TO) : words << (TO - FROM);
        return (i16_register)(moved & (uint16_t)(0x7fff << TO & 0x7fff));
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

// The codes, scales and offsets of a tile; offsets of a codebook do not count.
class TileOf {
   public:
    TileOf(const GroupedWeight& w, int block)
        : w(w), block_units((int)(block / UNIT)), floats_(w.padded_groups() * TILE), memory_(2 * floats_) {}

    void start(int64_t tile, int64_t next) {
        codes_ = w.tile_codes(tile);
        next_ = w.tile_codes(next);
        expand(tile, next, false, memory_.data());
        if (!w.codebook) expand(tile, next, true, memory_.data() + floats_);
    }
    const uint8_t* codes(int64_t unit) const { return codes_ + unit * w.unit_bytes(); }
    const float* scales(int64_t group) const { return memory_.data() + group * TILE; }
    const float* offsets(int64_t group) const { return memory_.data() + floats_ + group * TILE; }
    const char* ahead(int64_t block) const { return (const char*)next_ + block * block_units * w.unit_bytes(); }
    int64_t row_bytes() const { return w.unit_bytes() / UNIT_ROWS; }
    int units(int64_t block) const { return (int)std::min<int64_t>(block_units, w.units() - block * block_units); }

    const GroupedWeight& w;
    const int block_units;

   private:
    void expand(int64_t tile, int64_t next, bool offsets, float* out) {
        const int64_t bytes = w.group_bytes(offsets ? w.offset_kind : w.scale_kind);
        const char* const ahead = (offsets ? w.offsets : w.scales) + next * bytes;
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        expand_groups(w, tile, offsets, out);
    }

    const uint8_t *codes_ = nullptr, *next_ = nullptr;
    const int64_t floats_;
    std::vector<float> memory_;  // scales, then offsets
};

inline f32_register square_root(f32_register x) { return (f32_register)PAGEWIRE_FIXED_POINT(sqrt_ps)(x); }

// Numbers times their group's scale, plus its minimum.
template <class Codes>
class Scaled : public TileOf {
   public:
    Scaled(const GroupedWeight& w, int block) : TileOf(w, block), codes_(w) {}

    void block(int64_t index, uint32_t* pairs, float* scales) const {
        for (int lane = 0; lane < TILE; lane += REGISTER_LANES) {
            if (w.padded_group() < UNIT) decode<2>(index, lane, pairs + lane, scales + lane);
            else decode<1>(index, lane, pairs + lane, scales + lane);
        }
    }

   private:
    // PARTS of a unit have a scale each.
    template <int PARTS>
    void decode(int64_t index, int lane, uint32_t* pairs, float* scales) const {
        constexpr int MOST_PARTS = PARTS * fixed_point::MOST_DECODED / UNIT, PART_ROWS = UNIT_ROWS / PARTS;
        const int64_t first = index * block_units * PARTS, per_group = w.padded_group() * PARTS / UNIT;
        const int parts = units(index) * PARTS;
        f32_register factors[MOST_PARTS], minimums[MOST_PARTS], peak = {}, squares = {}, poison = {};
        for (int i = 0, group = first / per_group, left = per_group - first % per_group; i < parts; i++) {
            factors[i] = load_register(this->scales(group) + lane);
            const f32_register offset = load_register(offsets(group) + lane);
            minimums[i] = w.has_minimums() ? offset : -factors[i] * offset;
            const f32_register highest = factors[i] * codes_.highest() + minimums[i];
            const f32_register largest = max(fixed_point::magnitude(factors[i] * codes_.lowest() + minimums[i]),
                                             fixed_point::magnitude(highest));
            peak = max(peak, largest);
            squares += largest * largest;
            poison += highest * 0.0f;
            if (--left > 0) continue;
            left = per_group;
            group++;
        }
        // Where squares are no floats it is as if all were as large as the peak.
        const f32_register by_norm = (peak > 1e-15f) & (peak < 1e17f)
                                         ? square_root(squares * (float)(UNIT / PARTS)) * (1 / DECODED_NORM)
                                         : peak * (fixed_point::MOST_NORM / DECODED_NORM);
        const f32_register unit = max(peak * (1 / LARGEST_DECODED), by_norm);
        store_register(scales, unit + poison);
        const f32_register integers = peak > SMALLEST_PEAK ? 1.0f / unit : f32_register{};
        const f32_register steps = integers * (float)((1 << FACTOR_BITS) / codes_.unit());
        const uint8_t* at = codes(index * block_units) + 4 * lane;
        for (int i = 0; i < parts; at += w.unit_bytes()) {
            i16_register rows[UNIT_ROWS];
            codes_.unpack(at, rows);
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++, i++) {
                const f32_register step = factors[i] * steps, least = minimums[i] * integers;
                const i16_register factor = fixed_point::pairs_of(step, step);
                const i16_register minimum = fixed_point::pairs_of(least, least);
#pragma GCC unroll 16
                for (int row = part * PART_ROWS; row < (part + 1) * PART_ROWS; row++, pairs += TILE) {
                    const i16_register weights = fixed_point::scaled(rows[row], factor) + minimum;
                    __builtin_memcpy(pairs, &weights, sizeof weights);
                }
            }
        }
    }

    const Codes codes_;
};

// fp8 e4m3: blocks are parts of groups.
class Fp8 : public TileOf {
   public:
    Fp8(const GroupedWeight& w, int block) : TileOf(w, block), decoder_(w) {}

    void block(int64_t index, uint32_t* pairs, float* block_scales) const {
        alignas(64) uint32_t numbers[fixed_point::MOST_DECODED / 2 * TILE];
        const int64_t first = index * block_units;
        for (int i = 0; i < block_units; i++) decoder_.unit(codes(first + i), numbers + i * UNIT_ROWS * TILE);
        fixed_point::to_fixed_point(numbers, block_units * UNIT_ROWS, pairs, block_scales);
        store(block_scales, load(block_scales) * load(scales(first * UNIT / w.padded_group())) * E4M3_UNIT);
    }

   private:
    const TableDecoder decoder_;
};

// Units of a block: about as many in each; or, `in_groups`, of as many blocks as a group is
int block_units(const GroupedWeight& w, bool in_groups) {
    constexpr int64_t MOST = fixed_point::MOST_DECODED / UNIT;
    const int64_t units = in_groups ? w.padded_group() / UNIT : w.units();
    int64_t blocks = (units + MOST - 1) / MOST;
    while (in_groups && units % blocks) blocks++;
    return (int)((units + blocks - 1) / blocks);
}

struct Results {
    const Output& output;

    int64_t in_turn(int64_t index) const { return output.in_turn(index); }
    void fetch(int64_t token, int count, int64_t tile, int64_t end) const {
        for (int t = 0; t < count; t++)
            for (int64_t i = tile; i < end; i += output.gated ? 2 : 1) __builtin_prefetch(output.at(token + t, i), 1);
    }
    void write(int64_t token, int count, int64_t tile, int64_t end, const f32x16* sums, int64_t stride) const {
        output.write_tokens(token, count, tile, end, sums, stride);
    }
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
                        [&] { return Weights(w, block); }, Results{output});
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
    if ((w.codebook && !TableDecoder::fits(w)) || (is_fp8 && w.padded_group() < UNIT)) return false;
    const int block = block_units(w, is_fp8) * UNIT;
    if (is_fp8) {
        linear<Fp8>(w, x, permutation, output, block, threads);
    } else if (w.codebook) {
        linear<Scaled<Table>>(w, x, permutation, output, block, threads);
    } else {
        with_bits(w.bits, [&](auto bits) {
            linear<Scaled<Numbers<decltype(bits)>>>(w, x, permutation, output, block, threads);
        });
    }
    return true;
}

#else

bool grouped_linear_fixed_point(const GroupedWeight&, const void*, const int32_t*, const Output&, int) {
    return false;
}

#endif
