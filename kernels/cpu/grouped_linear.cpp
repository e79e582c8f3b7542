// y = x w^T + bias with grouped weights and inputs quantized per block: integer dot products, floats per block.

#include "grouped_linear.h"

namespace {

constexpr int MAX_TOKENS = 8;
constexpr int CHUNK_TILES = 4;    // tiles that a thread takes at a time
constexpr int PREFETCH = 2048;    // bytes of codes fetched ahead of the products

// acc[lane] += sum of weights (4 unsigned bytes of a lane) * inputs (4 signed bytes, the same for all lanes)
[[gnu::always_inline]] inline i32x16 dot(i32x16 acc, u32x16 weights, const int8_t* inputs) {
#if defined(__AVX512VNNI__)
    // The compiler does not know that the instruction itself broadcasts.
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(weights), "m"(*(const int32_t*)inputs));
    return acc;
#elif defined(__AVX2__)
    __m256i sums[2], bytes[2];
    __builtin_memcpy(sums, &acc, sizeof acc);
    __builtin_memcpy(bytes, &weights, sizeof weights);
    const __m256i x = _mm256_set1_epi32(load_raw<int32_t>(inputs));
    for (int i = 0; i < 2; i++) {
#if defined(__AVXVNNI__)
        sums[i] = _mm256_dpbusd_avx_epi32(sums[i], bytes[i], x);
#else  // as two sums of 16-bit products: one of 8-bit products (vpmaddubsw) saturates
        const __m256i even = _mm256_madd_epi16(_mm256_and_si256(bytes[i], _mm256_set1_epi16(0xff)),
                                               _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
        const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(bytes[i], 8), _mm256_srai_epi16(x, 8));
        sums[i] = _mm256_add_epi32(sums[i], _mm256_add_epi32(even, odd));
#endif
    }
    return load_raw<i32x16>(sums);
#else
    for (int i = 0; i < 4; i++) acc += (i32x16)(weights >> 8 * i & 0xff) * inputs[i];
    return acc;
#endif
}

// Codes that are numbers.
template <class B>
struct Plain {
    static constexpr int BITS = B::BITS;
    explicit Plain(const uint8_t*) {}
    [[gnu::always_inline]] void unpack(const uint8_t* p, u32x16 quads[QUADS]) const { unpack_unit<BITS>(p, quads); }
};

// Codes that index a table of 16 bytes.
struct Table {
    static constexpr int BITS = 4;
    u8x64 table;
    explicit Table(const uint8_t* bytes) {
        for (int i = 0; i < 64; i++) table[i] = bytes[i % SMALL_CODEBOOK];
    }
    [[gnu::always_inline]] void unpack(const uint8_t* p, u32x16 quads[QUADS]) const {
        unpack_unit<BITS>(p, quads);
        for (int q = 0; q < QUADS; q++) quads[q] = look_up(quads[q]);
    }
    [[gnu::always_inline]] u32x16 look_up(u32x16 codes) const {
#if defined(__AVX512BW__)
        return (u32x16)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(__AVX2__)
        __m256i halves[2];
        __builtin_memcpy(halves, &codes, sizeof codes);
        for (__m256i& half : halves) half = _mm256_shuffle_epi8(load_raw<__m256i>(&table), half);
        return load_raw<u32x16>(halves);
#else
        return (u32x16)__builtin_shuffle(table, (u8x64)codes);
#endif
    }
};

struct Problem {
    const GroupedWeight& weight;
    const QuantizedInputs& inputs;
    const Passes& passes;
    uint8_t table[SMALL_CODEBOOK];
};

// Products of one tile of outputs with TOKENS tokens, those of a pass.
template <class Codes, int TOKENS>
struct TileProduct {
    typedef QuantizedInputs::Block Block;

    const GroupedWeight& w;
    const Codes codes;
    const int8_t* x;
    const Block* block;
    f32x16 sums[TOKENS] = {};
    i32x16 acc[TOKENS];

    [[gnu::always_inline]] TileProduct(const Problem& p, int64_t first)
        : w(p.weight), codes(p.table), x(p.inputs.codes(first)), block(p.inputs.blocks(first)) {}

    [[gnu::always_inline]] void start_block() {
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) acc[t] = i32x16{} + block[t].start;
    }

    // The products of quads [begin, end) of a unit
    template <int BEGIN, int END>
    [[gnu::always_inline]] void multiply(const u32x16* quads) {
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) {
            const int8_t* const token = x + t * INPUT_BYTES * UNIT;
            i32x16 high = {};
#pragma GCC unroll 8
            for (int q = BEGIN; q < END; q++) {
                high = dot(high, quads[q], token + 4 * q);
                acc[t] = dot(acc[t], quads[q], token + UNIT + 4 * q);
            }
            acc[t] += high << LOW_BITS;
        }
    }

    // Adds the integer sums of a block to the result.
    [[gnu::always_inline]] void finish_block(f32x16 scale, const float* offset) {
        if (w.offset_kind == NONE) {
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++)
                sums[t] += __builtin_convertvector(acc[t], f32x16) * (scale * block[t].scale);
        } else if (w.has_minimums()) {
            const f32x16 minimum = load(offset);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++)
                sums[t] += __builtin_convertvector(acc[t], f32x16) * (scale * block[t].scale) + minimum * block[t].sum;
        } else {
            const f32x16 zero = load(offset);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++)
                sums[t] += (__builtin_convertvector(acc[t], f32x16) - zero * block[t].code_sum) *
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
            const f32x16 scale = load(scales);
            for (int b = 0; b < blocks_per_group; b++) {
                start_block();
                for (int u = 0; u < units_per_block; u++) {
                    u32x16 quads[QUADS];
                    prefetch(stream);
                    codes.unpack(stream, quads);
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
            u32x16 quads[QUADS];
            prefetch(stream);
            codes.unpack(stream, quads);
            start_block();
            multiply<0, QUADS / 2>(quads);
            finish_block(load(scales), offsets);
            start_block();
            multiply<QUADS / 2, QUADS>(quads);
            finish_block(load(scales + TILE), offsets + TILE);
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

template <class Codes, int TOKENS>
void tile_product(const Problem& p, int64_t first, int64_t tile, const float* scales, const float* offsets,
                  f32x16* sums) {
    TileProduct<Codes, TOKENS> product(p, first);
    product.run(p.weight.tile_codes(tile), scales, offsets);
    for (int t = 0; t < TOKENS; t++) sums[t] = product.sums[t];
}

template <class Codes>
void linear(const Problem& p, const Output& output, int threads) {
    typedef void (*Product)(const Problem&, int64_t, int64_t, const float*, const float*, f32x16*);
    static constexpr Product products[MAX_TOKENS] = {
        tile_product<Codes, 1>, tile_product<Codes, 2>, tile_product<Codes, 3>, tile_product<Codes, 4>,
        tile_product<Codes, 5>, tile_product<Codes, 6>, tile_product<Codes, 7>, tile_product<Codes, 8>};
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
                         int threads) {
    const Passes passes(output.tokens, MAX_TOKENS);
    QuantizedInputs inputs(weight, passes);
    with_dtype(output.dtype, [&](auto t) {
        for_tokens(threads, output.tokens, weight.in, [&](int64_t token) {
            inputs.quantize(TokenInputs<decltype(t)>(weight, x, permutation, token), token);
        });
    });
    Problem problem = {weight, inputs, passes, {}};
    if (!weight.codebook) {
        with_bits(weight.bits, [&](auto bits) { linear<Plain<decltype(bits)>>(problem, output, threads); });
        return;
    }
    for (int i = 0; i < 1 << weight.bits; i++) problem.table[i] = (uint8_t)(weight.codebook[i] + TABLE_ZERO_POINT);
    linear<Table>(problem, output, threads);
}
