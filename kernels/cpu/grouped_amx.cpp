// y = x w^T + bias with the matrix unit of x86 (AMX), for so many tokens that decoding the weights to bf16 pays.

#include "amx.h"
#include "grouped_linear.h"

#if defined(PAGEWIRE_AMX)

namespace {

using amx::TILE_PAIRS;

constexpr int BLOCK = 32;              // tokens and outputs of a register block: 2 x 2 tiles of 16
constexpr int64_t DEPTH = 48;           // units multiplied in one pass, so that
constexpr int64_t CACHED = 512 * 1024;  // so many inputs are enough tokens to make up for decoding, and stay in L2

// Products of 32 tokens with 32 outputs in sums [2][2][16][16]: tiles of tokens, then of outputs.
// x: per tile of tokens, x_tile elements apart, and per unit a tile; weights: per unit a tile for either tile of outputs
void multiply_block(const uint32_t* x, int64_t x_tile, const uint32_t* weights, int64_t units, float* sums,
                    bool accumulate) {
    if (accumulate) {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + 256, 64);
        _tile_loadd(2, sums + 512, 64);
        _tile_loadd(3, sums + 768, 64);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t u = 0; u < units; u++, x += TILE_PAIRS, weights += 2 * TILE_PAIRS) {
        _tile_loadd(4, x, 64);
        _tile_loadd(6, weights, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + TILE_PAIRS, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + x_tile, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

// ---- weights as bf16, rounded once ----

struct PlainValue {
    static f32x16 at(u32x16 quad, int byte, const float*) {
        const u32x16 code = byte == 3 ? quad >> 24 : byte == 0 ? quad & 0xff : quad >> 8 * byte & 0xff;
        return __builtin_convertvector((i32x16)code, f32x16);
    }
};

struct CodebookValue {
    static f32x16 at(u32x16 quad, int byte, const float* codebook) {  // of 16: an index's other bits do not count
        return (f32x16)_mm512_permutexvar_ps((__m512i)(quad >> 8 * byte), _mm512_loadu_ps(codebook));
    }
};

// Units [begin, end) of a tile; scales and offsets (added) [padded_groups, 16]. out: units 2 * TILE_PAIRS apart
template <int BITS, class Value>
void decode_units(const GroupedWeight& w, int64_t tile, int64_t begin, int64_t end, const float* scales,
                  const float* offsets, uint32_t* out) {
    alignas(64) static constexpr uint16_t INTERLEAVE[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = load_raw<__m512i>(INTERLEAVE);
    const uint8_t* codes = w.tile_codes(tile) + begin * w.unit_bytes();
    const int half_units_per_group = w.padded_group() / (UNIT / 2);
    int64_t group = begin * 2 / half_units_per_group;
    int left = half_units_per_group - (int)(begin * 2 % half_units_per_group);  // of the group
    for (int64_t u = begin; u < end; u++, codes += BITS * 64, out += 2 * TILE_PAIRS) {
        u32x16 quads[QUADS];
        unpack_unit<BITS>(codes, quads);
        for (int half = 0; half < 2; half++) {
            const f32x16 scale = load(scales + group * TILE), offset = load(offsets + group * TILE);
#pragma GCC unroll 4
            for (int i = 0; i < QUADS / 2; i++) {
                const u32x16 quad = quads[half * QUADS / 2 + i];
                uint32_t* target = out + (half * QUADS / 2 + i) * 2 * TILE;
#pragma GCC unroll 2
                for (int byte = 0; byte < 4; byte += 2, target += TILE) {
                    const f32x16 even = Value::at(quad, byte, w.codebook) * scale + offset;
                    const f32x16 odd = Value::at(quad, byte + 1, w.codebook) * scale + offset;
                    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
                    _mm512_store_si512(target, _mm512_permutexvar_epi16(order, both));
                }
            }
            if (--left == 0) {
                left = half_units_per_group;
                group++;
            }
        }
    }
}

void decode_tile(const GroupedWeight& w, int64_t tile, int64_t begin, int64_t end, uint32_t* out) {
    static thread_local std::vector<float> memory;
    const int64_t floats = w.padded_groups() * TILE;
    memory.resize(2 * floats);
    float* const scales = memory.data();
    float* const offsets = scales + floats;
    expand_groups(w, tile, false, scales);
    expand_groups(w, tile, true, offsets);
    if (!w.has_minimums())
        for (int64_t i = 0; i < floats; i++) offsets[i] *= -scales[i];
    if (w.codebook) return decode_units<4, CodebookValue>(w, tile, begin, end, scales, offsets, out);
    with_bits(w.bits, [&](auto bits) {
        decode_units<decltype(bits)::BITS, PlainValue>(w, tile, begin, end, scales, offsets, out);
    });
}

// The two tiles of a block of outputs.
void decode_block(const GroupedWeight& w, int64_t block, int64_t begin, int64_t end, uint32_t* out) {
    for (int half = 0; half < 2; half++, out += TILE_PAIRS) {
        if (block * 2 + half < w.tiles()) {
            decode_tile(w, block * 2 + half, begin, end, out);
        } else {
            for (int64_t u = 0; u < end - begin; u++)
                std::fill_n(out + u * 2 * TILE_PAIRS, TILE_PAIRS, 0u);
        }
    }
}

template <class T>
T* aligned_memory(std::vector<T>& memory, int64_t size) {
    memory.resize(size + 64 / sizeof(T));
    return (T*)(((uintptr_t)memory.data() + 63) / 64 * 64);
}

// Inputs of one token as bf16, in its tile's row.
template <class T>
void pack_inputs(TokenInputs<T> inputs, int64_t units, uint32_t* row) {
    for (int64_t u = 0; u < units; u++, row += TILE_PAIRS) {
        bf16* const out = (bf16*)row;
        store(out, inputs.next());
        store(out + LANES, inputs.next());
    }
}

// sums of multiply_block -> results of the tokens from `first` on
void write_block(const GroupedWeight& w, const float* sums, int64_t block, int64_t first, const Output& output) {
    const int64_t tokens = std::min<int64_t>(BLOCK, output.tokens - first);
    for (int half = 0; half < 2; half++) {
        const int64_t tile = block * 2 + half;
        if (tile >= w.tiles()) break;
        for (int64_t t = 0; t < tokens; t++)
            output.write(first + t, tile, load(sums + t / TILE * 2 * 256 + half * 256 + t % TILE * TILE));
    }
}

}  // namespace

bool grouped_linear_amx(const GroupedWeight& w, const void* x, const int32_t* permutation, const Output& output,
                        int threads) {
    if (!amx::permitted() || (w.codebook && w.bits != 4)) return false;
    static thread_local std::vector<uint32_t> input_memory;
    static thread_local std::vector<float> sums_memory;
    const int64_t units = w.units(), x_tile = units * TILE_PAIRS, blocks = (w.tiles() + 1) / 2;
    const int64_t passes = (units + DEPTH - 1) / DEPTH, depth = (units + passes - 1) / passes;
    const int64_t block_tokens = std::max<int64_t>(BLOCK, CACHED / (depth * UNIT) / BLOCK * BLOCK);
    const int64_t most = std::min(block_tokens, (output.tokens + BLOCK - 1) / BLOCK * BLOCK);
    uint32_t* const inputs = aligned_memory(input_memory, most / TILE * x_tile);
    float* const sums = aligned_memory(sums_memory, passes == 1 ? 0 : most * blocks * BLOCK);
    for (int64_t first = 0; first < output.tokens; first += block_tokens) {
        const int64_t tokens = std::min(block_tokens, output.tokens - first);
        const int64_t token_blocks = (tokens + BLOCK - 1) / BLOCK;
        with_dtype(output.dtype, [&](auto t) {
            for_tokens(threads, tokens, w.in, [&](int64_t token) {
                pack_inputs(TokenInputs<decltype(t)>(w, x, permutation, first + token), units,
                            inputs + token / TILE * x_tile + token % TILE * TILE);
            });
        });
        for (int64_t begin = 0; begin < units; begin += depth) {
            const int64_t end = std::min(units, begin + depth);
            parallel::for_each(threads, blocks, [&](int64_t block) {
                static thread_local std::vector<uint32_t> memory;
                uint32_t* const weights = aligned_memory(memory, DEPTH * 2 * TILE_PAIRS);
                decode_block(w, block, begin, end, weights);
                const amx::TileRegisters registers;
                alignas(64) float block_sums[BLOCK * BLOCK];
                for (int64_t t = 0; t < token_blocks; t++) {
                    float* const target = passes == 1 ? block_sums : sums + (block * token_blocks + t) * BLOCK * BLOCK;
                    multiply_block(inputs + 2 * t * x_tile + begin * TILE_PAIRS, x_tile, weights, end - begin, target,
                                   begin > 0);
                    if (end == units) write_block(w, target, block, first + t * BLOCK, output);
                }
            });
        }
    }
    return true;
}

#else

bool grouped_linear_amx(const GroupedWeight&, const void*, const int32_t*, const Output&, int) { return false; }

#endif
