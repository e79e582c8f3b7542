// y = x w^T + bias with grouped weights and inputs quantized to int8 per block: integer dot products, floats per block.

#include "grouped_linear.h"

namespace {

constexpr int MAX_TOKENS = 8;
constexpr int CHUNK_TILES = 4;    // tiles that a thread takes at a time
constexpr int PREFETCH = 2048;    // bytes of codes fetched ahead of the products

// acc[lane] += sum of weights (4 unsigned bytes of a lane) * inputs (4 signed bytes, the same for all lanes)
inline i32x16 dot(i32x16 acc, u32x16 weights, int32_t inputs) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, _mm512_set1_epi32(inputs));
#elif defined(__AVX2__)
    __m256i sums[2], bytes[2];
    __builtin_memcpy(sums, &acc, sizeof acc);
    __builtin_memcpy(bytes, &weights, sizeof weights);
    const __m256i x = _mm256_set1_epi32(inputs);
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
    for (int i = 0; i < 4; i++) acc += (i32x16)(weights >> 8 * i & 0xff) * (int32_t)(int8_t)(inputs >> 8 * i);
    return acc;
#endif
}

// Codes that are numbers.
template <class B>
struct Plain {
    static constexpr int BITS = B::BITS;
    explicit Plain(const uint8_t*) {}
    void unpack(const uint8_t* p, u32x16 quads[QUADS]) const { unpack_unit<BITS>(p, quads); }
};

// Codes that index a table of 16 bytes.
struct Table {
    static constexpr int BITS = 4;
    u8x64 table;
    explicit Table(const uint8_t* bytes) {
        for (int i = 0; i < 64; i++) table[i] = bytes[i % SMALL_CODEBOOK];
    }
    void unpack(const uint8_t* p, u32x16 quads[QUADS]) const {
        unpack_unit<BITS>(p, quads);
        for (int q = 0; q < QUADS; q++) quads[q] = look_up(quads[q]);
    }
    u32x16 look_up(u32x16 codes) const {
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
    uint8_t table[SMALL_CODEBOOK];
};

// Products of one tile of outputs with TOKENS tokens from `first` on. sums [TOKENS]
template <class Codes, int TOKENS>
struct TileProduct {
    const Problem& p;
    const Codes codes;
    const int8_t* x[TOKENS];
    int64_t block_index;  // of token `first`
    f32x16 sums[TOKENS] = {};

    TileProduct(const Problem& problem, int64_t first)
        : p(problem), codes(problem.table), block_index(first * problem.inputs.blocks) {
        for (int t = 0; t < TOKENS; t++) x[t] = p.inputs.codes + (first + t) * p.inputs.in;
    }

    // acc += the products of quads [begin, end) of a unit
    template <int BEGIN, int END>
    void multiply(const u32x16* quads, int64_t position, i32x16* acc) const {
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 8
            for (int q = BEGIN; q < END; q++) {
                int32_t inputs;
                __builtin_memcpy(&inputs, x[t] + position + 4 * q, 4);
                acc[t] = dot(acc[t], quads[q], inputs);
            }
    }

    void start(i32x16* acc) const {
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) acc[t] = i32x16{} + p.inputs.starts[block_index + t * p.inputs.blocks];
    }

    // Adds the integer sums of a block to the result.
    void finish_block(const i32x16* acc, f32x16 scale, const float* offset) {
        const float* scales = p.inputs.scales + block_index;
        const float* block_sums = p.inputs.sums + block_index++;
        const int64_t stride = p.inputs.blocks;
        if (p.weight.offset_kind == NONE) {
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++)
                sums[t] += __builtin_convertvector(acc[t], f32x16) * (scale * scales[t * stride]);
        } else if (p.weight.has_minimums()) {
            const f32x16 minimum = load(offset);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++)
                sums[t] += (__builtin_convertvector(acc[t], f32x16) * scale + minimum * block_sums[t * stride]) *
                           scales[t * stride];
        } else {
            const f32x16 zero = load(offset);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++)
                sums[t] += (__builtin_convertvector(acc[t], f32x16) - zero * block_sums[t * stride]) *
                           (scale * scales[t * stride]);
        }
    }

    void run(const uint8_t* stream, const float* scales, const float* offsets) {
        const GroupedWeight& w = p.weight;
        u32x16 quads[QUADS];
        i32x16 acc[TOKENS];
        const int64_t units = w.units();
        if (w.padded_group() < UNIT) {
            for (int64_t u = 0; u < units; u++, stream += Codes::BITS * 64, scales += 2 * TILE, offsets += 2 * TILE) {
                prefetch(stream);
                codes.unpack(stream, quads);
                start(acc);
                multiply<0, QUADS / 2>(quads, u * UNIT, acc);
                finish_block(acc, load(scales), offsets);
                start(acc);
                multiply<QUADS / 2, QUADS>(quads, u * UNIT, acc);
                finish_block(acc, load(scales + TILE), offsets + TILE);
            }
            return;
        }
        const int units_per_block = w.block() / UNIT, units_per_group = w.padded_group() / UNIT;
        for (int64_t group_end = units_per_group, u = 0; u < units; group_end += units_per_group) {
            const f32x16 scale = load(scales);
            while (u < group_end) {
                start(acc);
                for (int64_t block_end = u + units_per_block; u < block_end; u++, stream += Codes::BITS * 64) {
                    prefetch(stream);
                    codes.unpack(stream, quads);
                    multiply<0, QUADS>(quads, u * UNIT, acc);
                }
                finish_block(acc, scale, offsets);
            }
            scales += TILE;
            offsets += TILE;
        }
    }

    static void prefetch(const uint8_t* stream) {
#pragma GCC unroll 8
        for (int i = 0; i < Codes::BITS; i++) __builtin_prefetch(stream + PREFETCH + i * 64);  // past the end: no effect
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
    const int64_t tokens = output.tokens, tiles = w.tiles(), group_floats = w.padded_groups() * TILE;
    const int64_t passes = (tokens + MAX_TOKENS - 1) / MAX_TOKENS, step = (tokens + passes - 1) / passes;
    parallel::for_each(threads, (tiles + CHUNK_TILES - 1) / CHUNK_TILES, [&](int64_t chunk) {
        const int64_t begin = chunk * CHUNK_TILES, end = std::min(tiles, begin + CHUNK_TILES);
        static thread_local std::vector<float> memory;
        memory.resize(2 * CHUNK_TILES * group_floats);
        float* const groups = memory.data();
        for (int64_t first = 0; first < tokens; first += step) {
            const int count = (int)std::min(step, tokens - first);
            for (int64_t tile = begin; tile < end; tile++) {
                float* scales = groups + (tile - begin) * 2 * group_floats;
                float* offsets = scales + group_floats;
                if (first == 0) {
                    expand_groups(w, tile, false, scales);
                    if (w.offset_kind != NONE) expand_groups(w, tile, true, offsets);
                }
                f32x16 sums[MAX_TOKENS];
                products[count - 1](p, first, tile, scales, offsets, sums);
                for (int t = 0; t < count; t++) output.write(first + t, tile, sums[t]);
            }
        }
    });
}

}  // namespace

void grouped_linear_int8(const GroupedWeight& weight, const void* x, const int32_t* permutation, const Output& output,
                         int threads) {
    QuantizedInputs inputs(weight, output.tokens);
    with_dtype(output.dtype, [&](auto t) {
        for_tokens(threads, output.tokens, weight.in, [&](int64_t token) {
            inputs.quantize(weight, inputs_of<decltype(t)>(weight, x, permutation, token), token);
        });
    });
    Problem problem = {weight, inputs, {}};
    if (!weight.codebook) {
        with_bits(weight.bits, [&](auto bits) { linear<Plain<decltype(bits)>>(problem, output, threads); });
        return;
    }
    for (int i = 0; i < 1 << weight.bits; i++) problem.table[i] = (uint8_t)(weight.codebook[i] + TABLE_ZERO_POINT);
    linear<Table>(problem, output, threads);
}
