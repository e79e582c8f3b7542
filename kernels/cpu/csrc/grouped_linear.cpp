// y = x w^T + bias with grouped weights and inputs quantized per block: integer dot products, floats per block.

#include "grouped_linear.h"

namespace {

constexpr int MAX_TOKENS = 8;
constexpr int CHUNK_TILES = 4;    // tiles that a thread takes at a time
constexpr int PREFETCH = 2048;    // bytes of codes fetched ahead of the products

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
    [[gnu::always_inline]] void unpack(const uint8_t* p, u32_register* quads) const { unpack_unit<BITS>(p, quads); }
};

// Codes that index a table of 16 bytes.
struct Table {
    static constexpr int BITS = 4, LARGEST = 255;
    u8_register table;
    explicit Table(const uint8_t* bytes) {
        for (size_t i = 0; i < sizeof table; i++) table[i] = bytes[i % SMALL_CODEBOOK];
    }
    [[gnu::always_inline]] void unpack(const uint8_t* p, u32_register* quads) const {
        unpack_unit<BITS>(p, quads);
        for (int q = 0; q < QUADS; q++) quads[q] = look_up(quads[q]);
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

struct Problem {
    const GroupedWeight& weight;
    const QuantizedInputs& inputs;
    const Passes& passes;
    uint8_t table[SMALL_CODEBOOK];
};

// Products of a part of a tile's outputs, as many as a register holds, with TOKENS tokens, those of a pass.
template <class Codes, int TOKENS, bool ROUGH>
struct TileProduct {
    typedef QuantizedInputs::Block Block;

    const GroupedWeight& w;
    const Codes codes;
    const int8_t* x;
    const Block* block;
    const int first_lane;
    f32_register sums[TOKENS] = {};
    i32_register acc[TOKENS];

    [[gnu::always_inline]] TileProduct(const Problem& p, int64_t first, int part)
        : w(p.weight), codes(p.table), x(p.inputs.codes(first)), block(p.inputs.blocks(first)),
          first_lane(part * REGISTER_LANES) {}

    [[gnu::always_inline]] void start_block() {
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++)
            acc[t] = i32_register{} + block[t].start;
    }

    // The products of quads [begin, end) of a unit
    template <int BEGIN, int END>
    [[gnu::always_inline]] void multiply(const u32_register* quads) {
#if defined(PAGEWIRE_MADDUBS)
        if constexpr (takes_words<Codes::LARGEST>()) {
#pragma GCC unroll 8
            for (int q = BEGIN; q < END; q++) {
#pragma GCC unroll 8
                for (int t = 0; t < TOKENS; t++) acc[t] += dot_words(quads[q], x + INPUT_BYTES * (t * UNIT + 4 * q));
            }
        } else
#endif
        {
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++) {
                i32_register high = {};
                dot<Codes::LARGEST, BEGIN, END, ROUGH>(high, acc[t], quads, x + t * INPUT_BYTES * UNIT);
                acc[t] += high << LOW_BITS;
            }
        }
    }

    // Of the 16 numbers of a tile
    [[gnu::always_inline]] f32_register of_part(const float* numbers) const {
        return load_raw<f32_register>(numbers + first_lane);
    }

    // Adds the integer sums of a block to the result.
    [[gnu::always_inline]] void finish_block(f32_register scale, const float* offset) {
        if (w.offset_kind == NONE) {
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++)
                sums[t] += __builtin_convertvector(acc[t], f32_register) * (scale * block[t].scale);
        } else if (w.has_minimums()) {
            const f32_register minimum = of_part(offset);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++)
                sums[t] += __builtin_convertvector(acc[t], f32_register) * (scale * block[t].scale) +
                           minimum * block[t].sum;
        } else {
            const f32_register zero = of_part(offset);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++)
                sums[t] += (__builtin_convertvector(acc[t], f32_register) - zero * block[t].code_sum) *
                           (scale * block[t].scale);
        }
        block += TOKENS;
    }

    [[gnu::always_inline]] void run(const uint8_t* stream, const float* scales, const float* offsets) {
        if (w.padded_group() < UNIT) {
            run_half_units(stream, scales, offsets);
            return;
        }
        const int units_per_block = w.block() / UNIT, blocks_per_group = w.padded_group() / w.block();
        const int64_t groups = w.padded_groups();
        for (int64_t g = 0; g < groups; g++, scales += TILE, offsets += TILE) {
            const f32_register scale = of_part(scales);
            for (int b = 0; b < blocks_per_group; b++) {
                start_block();
                for (int u = 0; u < units_per_block; u++) {
                    u32_register quads[QUADS];
                    prefetch(stream);
                    codes.unpack(stream + 4 * first_lane, quads);
                    multiply<0, QUADS>(quads);
                    stream += Codes::BITS * 64;
                    x += TOKENS * INPUT_BYTES * UNIT;
                }
                finish_block(scale, offsets);
            }
        }
    }

    // Where groups are half a unit.
    [[gnu::always_inline]] void run_half_units(const uint8_t* stream, const float* scales, const float* offsets) {
        for (int64_t u = w.units(); u > 0; u--, stream += Codes::BITS * 64, x += TOKENS * INPUT_BYTES * UNIT) {
            u32_register quads[QUADS];
            prefetch(stream);
            codes.unpack(stream + 4 * first_lane, quads);
            start_block();
            multiply<0, QUADS / 2>(quads);
            finish_block(of_part(scales), offsets);
            start_block();
            multiply<QUADS / 2, QUADS>(quads);
            finish_block(of_part(scales + TILE), offsets + TILE);
            scales += 2 * TILE;
            offsets += 2 * TILE;
        }
    }

    [[gnu::always_inline]] static void prefetch(const uint8_t* stream) {
        // Past the end it has no effect.
#pragma GCC unroll 8
        for (int i = 0; i < Codes::BITS; i++) __builtin_prefetch(stream + PREFETCH + i * 64);
    }
};

template <class Codes, int TOKENS, bool ROUGH>
void tile_product(const Problem& p, int64_t first, int64_t tile, const float* scales, const float* offsets,
                  f32x16* sums) {
    for (int part = 0; part < REGISTERS; part++) {
        TileProduct<Codes, TOKENS, ROUGH> product(p, first, part);
        product.run(p.weight.tile_codes(tile), scales, offsets);
        for (int t = 0; t < TOKENS; t++)
            __builtin_memcpy((float*)(sums + t) + product.first_lane, product.sums + t, sizeof(f32_register));
    }
}

template <class Codes, bool ROUGH>
void linear(const Problem& p, const Output& output, int threads) {
    typedef void (*Product)(const Problem&, int64_t, int64_t, const float*, const float*, f32x16*);
    static constexpr Product products[MAX_TOKENS] = {
        tile_product<Codes, 1, ROUGH>, tile_product<Codes, 2, ROUGH>,
        tile_product<Codes, 3, ROUGH>, tile_product<Codes, 4, ROUGH>,
        tile_product<Codes, 5, ROUGH>, tile_product<Codes, 6, ROUGH>,
        tile_product<Codes, 7, ROUGH>, tile_product<Codes, 8, ROUGH>};
    const GroupedWeight& w = p.weight;
    const int64_t tiles = w.tiles(), group_floats = w.padded_groups() * TILE;
    parallel::for_each(threads, (tiles + CHUNK_TILES - 1) / CHUNK_TILES, [&](int64_t chunk) {
        static thread_local std::vector<float> memory;
        memory.resize(2 * group_floats);
        float* const scales = memory.data();
        float* const offsets = scales + group_floats;
        const int64_t end = std::min(tiles, (chunk + 1) * CHUNK_TILES);
        for (int64_t tile = chunk * CHUNK_TILES; tile < end; tile++) {
            expand_groups(w, tile, false, scales);
            if (w.offset_kind != NONE) expand_groups(w, tile, true, offsets);
            for (int64_t first = 0; first < output.tokens; first += p.passes.per_pass) {
                f32x16 sums[MAX_TOKENS];
                const int count = p.passes.count(first);
                products[count - 1](p, first, tile, scales, offsets, sums);
                for (int t = 0; t < count; t++) output.write(first + t, tile, sums[t]);
            }
        }
    });
}

}  // namespace

void grouped_linear_int8(const GroupedWeight& weight, const void* x, const int32_t* permutation, const Output& output,
                         int threads, bool rough) {
    const Passes passes(output.tokens, MAX_TOKENS);
    const bool in_words = weight.codebook || weight.bits == 8 ? takes_words<255>() : false;
    QuantizedInputs inputs(weight, passes, in_words, rough);
    with_dtype(output.dtype, [&](auto t) {
        for_tokens(threads, output.tokens, weight.in, [&](int64_t token) {
            inputs.quantize(TokenInputs<decltype(t)>(weight, x, permutation, token), token);
        });
    });
    Problem problem = {weight, inputs, passes, {}};
    if (!weight.codebook) {
        with_bits(weight.bits, [&](auto bits) {
            if (rough) linear<Plain<decltype(bits)>, true>(problem, output, threads);
            else linear<Plain<decltype(bits)>, false>(problem, output, threads);
        });
        return;
    }
    for (int i = 0; i < 1 << weight.bits; i++) problem.table[i] = (uint8_t)(weight.codebook[i] + TABLE_ZERO_POINT);
    linear<Table, false>(problem, output, threads);
}
