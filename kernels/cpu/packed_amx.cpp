// y = x w^T + bias with packed bf16 weights and the matrix unit of x86 (AMX).
//
// A token's sums do not depend on the other tokens here: all forms add up the units in the same order.

#include "packed_linear.h"

#include "amx.h"

#if defined(PAGEWIRE_AMX)

namespace packed {
namespace {

constexpr int BLOCK = 2 * TILE;                    // tokens multiplied at once, with two tiles of outputs
constexpr int SUMS = TILE * TILE;                  // of a register
constexpr int64_t FEW_GROUP = 4, MANY_GROUP = 16;  // tiles of a piece of work, at most
constexpr int64_t DEPTH = 12;                      // units multiplied in one pass: weights stay in the L1 cache,
constexpr int64_t MAX_PART = 256;                  // and so many tokens in the L2
constexpr int PREFETCH = 4096;                     // bytes of a tile fetched ahead of the products
constexpr int64_t STREAMED = 4 << 20;              // bytes from which on a result is written past the caches

// Where a register's worth of inputs lies: bytes from a token, a unit, a tile of 16 tokens to the next.
struct Inputs {
    const char* data;
    int64_t token, unit, tile;
};

// sums [4][16][16] (+)= products of tiles of tokens with tiles of outputs, w_tile pairs apart: one with up to four, in
// order, or two with up to two (in sums of four: tokens by outputs).
template <int TOKEN_TILES, int OUTPUT_TILES, bool COLD>
void multiply(const Inputs& x, const uint32_t* w, int64_t w_tile, int64_t units, bool accumulate, float* sums) {
    if (accumulate) {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + SUMS, 64);
        _tile_loadd(2, sums + 2 * SUMS, 64);
        _tile_loadd(3, sums + 3 * SUMS, 64);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const char* tokens = x.data;
    for (int64_t u = 0; u < units; u++, tokens += x.unit, w += UNIT_PAIRS) {
        if constexpr (COLD) {
            for (int n = 0; n < OUTPUT_TILES; n++) {
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; row++)  // past the end it does nothing
                    __builtin_prefetch((const char*)(w + n * w_tile + row * TILE) + PREFETCH);
            }
        }
        _tile_loadd(4, tokens, x.token);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (OUTPUT_TILES > 1) {
            _tile_loadd(7, w + w_tile, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (TOKEN_TILES == 2) {
            _tile_loadd(5, tokens + x.tile, x.token);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (OUTPUT_TILES > 1) _tile_dpbf16ps(3, 5, 7);
        }
        if constexpr (OUTPUT_TILES > 2) {
            _tile_loadd(6, w + 2 * w_tile, 64);
            _tile_dpbf16ps(2, 4, 6);
        }
        if constexpr (OUTPUT_TILES > 3) {
            _tile_loadd(7, w + 3 * w_tile, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + SUMS, 64);
    _tile_stored(2, sums + 2 * SUMS, 64);
    _tile_stored(3, sums + 3 * SUMS, 64);
}

// The product of up to BLOCK tokens with up to four tiles (more than 16 tokens: two).
template <bool COLD>
void multiply(int64_t tokens, int64_t tiles, const Inputs& x, const uint32_t* w, int64_t w_tile, int64_t units,
              bool accumulate, float* sums) {
    typedef void (*Multiply)(const Inputs&, const uint32_t*, int64_t, int64_t, bool, float*);
    static constexpr Multiply products[2][4] = {
        {multiply<1, 1, COLD>, multiply<1, 2, COLD>, multiply<1, 3, COLD>, multiply<1, 4, COLD>},
        {multiply<2, 1, COLD>, multiply<2, 2, COLD>}};
    products[tokens > TILE][tiles - 1](x, w, w_tile, units, accumulate, sums);
}

void write(const Problem& p, const float* sums, int64_t first, int64_t tokens, int64_t tile, int64_t tiles) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t n = 0; n < tiles; n++)
            p.write(first + t, tile + n, load(sums + (t / TILE * 2 + n) * SUMS + t % TILE * TILE));
}

// A token's results of two tiles, the second of which may be missing.
inline void write_pair(const Problem& p, const float* sums, int64_t token, int64_t tile, bool stream) {
    const int64_t n = tile * TILE;
    if (n + 2 * TILE > p.out) {
        p.write(token, tile, load(sums));
        if (n + TILE < p.out) p.write(token, tile + 1, load(sums + SUMS));
        return;
    }
    f32x16 first = load(sums), second = load(sums + SUMS);
    if (p.bias) {
        first += load(p.bias + n);
        second += load(p.bias + n + TILE);
    }
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    bf16* const target = p.result + token * p.out + n;
    if (stream) {
        _mm512_stream_si512((__m512i*)target, both);
    } else {
        _mm512_storeu_si512(target, both);
    }
}

// At most BLOCK tokens, read where they are: each weight is used once.
void linear_few(const Problem& p, int threads) {
    const int64_t row_bytes = p.stride * sizeof(bf16);
    const Inputs x = {(const char*)p.x, row_bytes, UNIT * sizeof(bf16), TILE * row_bytes};
    const uint8_t upper = (uint8_t)std::min<int64_t>(TILE, p.tokens), lower = (uint8_t)(p.tokens - upper);
    const amx::TileRows rows = lower ? amx::TileRows{{upper, upper, lower, lower, upper, lower, 16, 16}}
                                     : amx::TileRows{{upper, upper, upper, upper, upper, 16, 16, 16}};
    const int64_t most = lower ? 2 : 4;  // tiles multiplied at once
    const Pieces pieces(threads, p.tiles(), p.tokens, 1, FEW_GROUP, BLOCK, BLOCK);
    pieces.for_each(threads, [&](int64_t tile, int64_t end, int64_t, int64_t) {
        const amx::TileRegisters registers(rows);
        alignas(64) float sums[4 * SUMS];
        for (int64_t count; tile < end; tile += count) {
            count = std::min(most, end - tile);
            multiply<true>(p.tokens, count, x, p.tile(tile), p.tile_pairs(), p.units(), false, sums);
            write(p, sums, 0, p.tokens, tile, count);
        }
    });
}

// Tokens in tiles as the registers take them: [tiles of tokens, units, 16, 32]
const uint32_t* pack_inputs(const Problem& p, int threads) {
    static thread_local std::vector<uint32_t> memory;
    const int64_t token_tiles = (p.tokens + BLOCK - 1) / BLOCK * 2;
    uint32_t* const packed = aligned_memory(memory, token_tiles * p.tile_pairs());
    parallel::for_each(threads, token_tiles, [&](int64_t tile) {
        for (int64_t t = 0; t < std::min<int64_t>(TILE, p.tokens - tile * TILE); t++) {
            const bf16* const row = p.x + (tile * TILE + t) * p.stride;
            uint32_t* const out = packed + tile * p.tile_pairs() + t * ROWS;
            for (int64_t u = 0; u < p.units(); u++)
                __builtin_memcpy(out + u * UNIT_PAIRS, row + u * UNIT, UNIT * sizeof(bf16));
        }
    });
    return packed;
}

// Results of a piece of work, one token after the other: rows of the result lie far apart. sums: per two tiles, and per
// BLOCK tokens, four registers
void write_piece(const Problem& p, const float* sums, int64_t first_tile, int64_t tiles_end, int64_t first, int64_t end,
                 bool stream) {
    const int64_t blocks = (end - first + BLOCK - 1) / BLOCK;
    for (int64_t t = 0; t < end - first; t++) {
        const float* row = sums + (t / BLOCK * 4 + t % BLOCK / TILE * 2) * SUMS + t % TILE * TILE;
        for (int64_t tile = first_tile; tile < tiles_end; tile += 2, row += blocks * 4 * SUMS)
            write_pair(p, row, first + t, tile, stream);
    }
    if (stream) _mm_sfence();
}

// As many tokens as fit into the L2 cache.
void linear_part(const Problem& p, bool stream, int threads) {
    const uint32_t* const inputs = pack_inputs(p, threads);
    const int64_t units = p.units(), passes = (units + DEPTH - 1) / DEPTH, depth = (units + passes - 1) / passes;
    const Pieces pieces(threads, p.tiles(), p.tokens, 2, MANY_GROUP, BLOCK, MAX_PART);
    pieces.for_each(threads, [&](int64_t first_tile, int64_t tiles_end, int64_t first, int64_t end) {
        static thread_local std::vector<float> memory;
        const int64_t blocks = (pieces.part + BLOCK - 1) / BLOCK;
        float* const all_sums = aligned_memory(memory, blocks * pieces.group * 2 * SUMS);
        const amx::TileRegisters registers;
        for (int64_t unit = 0; unit < units; unit += depth) {
            const int64_t count = std::min(depth, units - unit);
            float* sums = all_sums;
            for (int64_t tile = first_tile; tile < tiles_end; tile += 2) {
                const int64_t tiles = std::min<int64_t>(2, tiles_end - tile);
                for (int64_t t = first; t < end; t += BLOCK, sums += 4 * SUMS) {
                    const int64_t tokens = std::min<int64_t>(BLOCK, end - t), tile_bytes = p.tile_pairs() * 4;
                    const Inputs x = {(const char*)inputs + t / TILE * tile_bytes + unit * UNIT_PAIRS * 4, 64,
                                      UNIT_PAIRS * 4, tile_bytes};
                    multiply<false>(tokens, tiles, x, p.tile(tile) + unit * UNIT_PAIRS, p.tile_pairs(), count, unit > 0,
                                    sums);
                }
            }
        }
        write_piece(p, all_sums, first_tile, tiles_end, first, end, stream);
    });
}

void linear_many(const Problem& p, int threads) {
    const bool aligned = (uintptr_t)p.result % 64 == 0 && p.out % BLOCK == 0;
    const bool stream = aligned && p.tokens * p.out * (int64_t)sizeof(bf16) >= STREAMED;
    for (int64_t t = 0; t < p.tokens; t += MAX_PART) {
        Problem part = p;
        part.x += t * p.stride;
        part.result += t * p.out;
        part.tokens = std::min(MAX_PART, p.tokens - t);
        linear_part(part, stream, threads);
    }
}

}  // namespace

bool linear_amx(const Problem& problem, int threads) {
    if (!amx::permitted()) return false;
    if (problem.tokens <= BLOCK) {
        linear_few(problem, threads);
    } else {
        linear_many(problem, threads);
    }
    return true;
}

}  // namespace packed

#else

bool packed::linear_amx(const Problem&, int) { return false; }

#endif
