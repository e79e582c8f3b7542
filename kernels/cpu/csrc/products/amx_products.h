// Products of tokens with weights in bf16 on the matrix unit of x86, shared by dense and quantized weights.
//
// Blocks of 32 tokens by 32 outputs are summed in four tile registers. Weights come in stages: units of two tiles of
// outputs, as many as fit into the L1 cache. All tokens pass by a stage, read where they are, past the L1; meanwhile
// the next stage is made ready.
//
// A token's sums do not depend on the other tokens: all forms add up the units in the same order.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "common/amx.h"
#include "common/vector.h"

#if defined(PAGEWIRE_AMX)

namespace amx {

constexpr int SIDE = 16;                // tokens or outputs of a register
constexpr int BLOCK = 2 * SIDE;         // tokens, and outputs, multiplied at once
constexpr int SUMS = SIDE * SIDE;       // of a register
constexpr int64_t DEPTH = 18;           // units of a stage, at most: 36 KiB of weights
constexpr int UNIT_BYTES = 64;          // of a token

// Rows of bf16 of which all units can be read, `stride` bytes apart.
struct Tokens {
    const char* data;
    int64_t stride, count;
};

// Tokens of a piece of work, at most: they stay in the L2 cache.
inline int64_t part_of(int64_t row_bytes) {
    return std::clamp<int64_t>((1 << 20) / row_bytes / BLOCK * BLOCK, 128, 512);
}

// Units [unit, unit + units) of tiles of outputs [tile, tile + tiles), one or two.
struct Stage {
    int64_t tile, tiles, unit, units;
    bool last;  // of its tiles
};

// Where a stage's weights lie: w_tile pairs from one tile of outputs to the next.
struct StageWeights {
    const uint32_t* data;
    int64_t w_tile;
};

// The tile registers for up to BLOCK tokens, so that no load reads on.
inline TileRows rows_of(int64_t tokens) {
    const uint8_t upper = (uint8_t)std::min<int64_t>(SIDE, tokens);
    const uint8_t lower = tokens > SIDE ? (uint8_t)std::min<int64_t>(SIDE, tokens - SIDE) : 16;
    return {{upper, upper, lower, lower, upper, lower, 16, 16}};
}

// sums [2][2][16][16] (tokens by outputs) (+)= products of tiles of tokens with tiles of outputs. background() is
// called after each unit, to do what the matrix unit leaves time for.
template <int TOKEN_TILES, int OUTPUT_TILES, class Background>
[[gnu::always_inline]] inline void multiply_block(const char* x, int64_t stride, const StageWeights& weights,
                                                  int64_t units, bool accumulate, float* sums,
                                                  Background&& background) {
    memory_is_written();
    if (accumulate) {
        _tile_loadd(0, sums, 64);
        if (OUTPUT_TILES > 1) _tile_loadd(1, sums + SUMS, 64);
        if (TOKEN_TILES > 1) _tile_loadd(2, sums + 2 * SUMS, 64);
        if (TOKEN_TILES > 1 && OUTPUT_TILES > 1) _tile_loadd(3, sums + 3 * SUMS, 64);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const uint32_t* w = weights.data;
    for (int64_t u = 0; u < units; u++, x += UNIT_BYTES, w += TILE_PAIRS) {
        _tile_stream_loadd(4, x, stride);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (OUTPUT_TILES > 1) {
            _tile_loadd(7, w + weights.w_tile, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (TOKEN_TILES > 1) {
            _tile_stream_loadd(5, x + SIDE * stride, stride);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (OUTPUT_TILES > 1) _tile_dpbf16ps(3, 5, 7);
        }
        background();
    }
    _tile_stored(0, sums, 64);
    if (OUTPUT_TILES > 1) _tile_stored(1, sums + SUMS, 64);
    if (TOKEN_TILES > 1) _tile_stored(2, sums + 2 * SUMS, 64);
    if (TOKEN_TILES > 1 && OUTPUT_TILES > 1) _tile_stored(3, sums + 3 * SUMS, 64);
}

// Blocks of a number of tokens: of BLOCK tokens, the last perhaps of SIDE. It begins so early that it is whole, if
// there are so many tokens, and computes some of them again.
struct TokenBlocks {
    int64_t tokens;

    int64_t count() const { return (tokens + BLOCK - 1) / BLOCK; }
    int64_t size(int64_t block) const { return tokens - block * BLOCK > SIDE ? BLOCK : SIDE; }
    int64_t first(int64_t block) const {
        return std::max<int64_t>(0, std::min(block * BLOCK, tokens - size(block)));
    }
};

constexpr int64_t STREAMED = 1 << 20;  // bytes from which on a result is written past the caches

// Results of type T, [tokens, out], `stride` numbers from a token to the next.
template <class T>
struct Results {
    T* data;
    const T* bias;  // [out] or null
    int64_t out, stride;

    // Whether it is worth while, and possible, to write whole lines of the caches past them.
    bool streamed(int64_t tokens) const {
        return tokens * out * (int64_t)sizeof(T) >= STREAMED && (uintptr_t)data % 64 == 0 && out * sizeof(T) % 64 == 0;
    }

    // sums: those of multiply_block
    void write(const float* sums, int64_t first, int64_t tokens, const Stage& stage) const {
        const int64_t n = stage.tile * SIDE, count = std::min(stage.tiles * SIDE, out - n);
        for (int64_t t = 0; t < tokens; t++) {
            const float* const row = sums + t / SIDE * 2 * SUMS + t % SIDE * SIDE;
            T* const target = data + (first + t) * stride + n;
            if (count == BLOCK) {
                write_pair(target, n, load(row), load(row + SUMS));
            } else {
                write_part(target, n, load(row), std::min<int64_t>(SIDE, count));
                if (count > SIDE) write_part(target + SIDE, n + SIDE, load(row + SUMS), count - SIDE);
            }
        }
    }

    // All results of a stage's tiles have been written.
    void finish(const Stage&) const {}

   private:
    void write_part(T* target, int64_t n, f32x16 sums, int64_t count) const {
        if (bias) sums += load(bias + n, (int)count);
        store(target, sums, (int)count);
    }

    void write_pair(T* target, int64_t n, f32x16 left, f32x16 right) const {
        if (bias) {
            left += load(bias + n);
            right += load(bias + n + SIDE);
        }
        if constexpr (std::is_same_v<T, bf16>) {
            _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh((__m512)right, (__m512)left));
        } else {
            store(target, left);
            store(target + SIDE, right);
        }
    }
};

// Results of tiles of outputs [begin, end) on their way past the caches: collected for some tiles, since whole lines
// one after the other are written faster than one here and one there.
template <class T>
class StreamedResults {
   public:
    StreamedResults(const Results<T>& target, int64_t begin, int64_t end, int64_t tokens)
        : target_(target), begin_(begin), end_(end), tokens_(tokens) {
        static thread_local std::vector<T> memory;
        memory.resize(tokens * COLLECTED);
        memory_ = memory.data();
    }

    void write(const float* sums, int64_t first, int64_t tokens, const Stage& stage) const {
        const int64_t skipped = collection_of(stage.tile) * SIDE;
        Results<T>{memory_ - skipped, target_.bias, target_.out, COLLECTED}.write(sums, first, tokens, stage);
    }

    void finish(const Stage& stage) const {
        const int64_t next = stage.tile + stage.tiles, first = collection_of(stage.tile);
        if (next < end_ && next < first + COLLECTED / SIDE) return;
        const int64_t n = first * SIDE, bytes = (std::min(next * SIDE, target_.out) - n) * sizeof(T);
        for (int64_t t = 0; t < tokens_; t++) {
            const char* const source = (const char*)(memory_ + t * COLLECTED);
            char* const target = (char*)(target_.data + t * target_.stride + n);
            for (int64_t i = 0; i < bytes; i += 64)
                _mm512_stream_si512((__m512i*)(target + i), load_raw<__m512i>(source + i));
        }
        _mm_sfence();
    }

   private:
    static constexpr int64_t COLLECTED = 256;  // outputs of a token

    // The first tile of those that are collected with this one.
    int64_t collection_of(int64_t tile) const {
        return begin_ + (tile - begin_) / (COLLECTED / SIDE) * (COLLECTED / SIDE);
    }

    const Results<T> target_;
    const int64_t begin_, end_, tokens_;
    T* memory_;
};

// All tokens with the tiles of outputs [begin, end), of `units` units. The thread has TileRegisters of rows_of(count).
//
// Weights has StageWeights take(stage), which is ready then; prepare(stage, steps), called before for each stage; and
// step(), called `steps` times between the two.
template <class Weights, class Results>
void multiply_tokens(const Tokens& x, int64_t begin, int64_t end, int64_t units, Weights& weights,
                     const Results& results) {
    static thread_local std::vector<float> memory;
    const TokenBlocks blocks = {x.count};
    const int64_t passes = (units + DEPTH - 1) / DEPTH, depth = (units + passes - 1) / passes;
    float* const all_sums = aligned_memory(memory, (passes == 1 ? 1 : blocks.count()) * 4 * SUMS);
    const int64_t stages = (end - begin + 1) / 2 * passes;
    const auto stage_at = [&](int64_t i) {
        const int64_t tile = begin + i / passes * 2, unit = i % passes * depth;
        const int64_t count = std::min(depth, units - unit);
        return Stage{tile, std::min<int64_t>(2, end - tile), unit, count, unit + count == units};
    };
    weights.prepare(stage_at(0), 0);
    for (int64_t i = 0; i < stages; i++) {
        const Stage stage = stage_at(i);
        const StageWeights w = weights.take(stage);
        if (i + 1 < stages) weights.prepare(stage_at(i + 1), blocks.count() * stage.units);
        const auto background = [&] { weights.step(); };
        for (int64_t block = 0; block < blocks.count(); block++) {
            const int64_t first = blocks.first(block), size = blocks.size(block);
            float* const sums = all_sums + (passes == 1 ? 0 : block * 4 * SUMS);
            const char* const tokens = x.data + first * x.stride + stage.unit * UNIT_BYTES;
            const bool accumulate = stage.unit > 0;
            if (size > SIDE) {
                stage.tiles > 1 ? multiply_block<2, 2>(tokens, x.stride, w, stage.units, accumulate, sums, background)
                                : multiply_block<2, 1>(tokens, x.stride, w, stage.units, accumulate, sums, background);
            } else {
                stage.tiles > 1 ? multiply_block<1, 2>(tokens, x.stride, w, stage.units, accumulate, sums, background)
                                : multiply_block<1, 1>(tokens, x.stride, w, stage.units, accumulate, sums, background);
            }
            if (stage.last) results.write(sums, first, std::min(size, x.count - first), stage);
        }
        if (stage.last) results.finish(stage);
    }
}

// As multiply_tokens; the results of all tokens of the product, of which this is a part, may be streamed.
template <class Weights, class T>
void multiply_piece(const Tokens& x, int64_t begin, int64_t end, int64_t units, Weights& weights,
                    const Results<T>& results, bool streamed) {
    const TileRegisters registers(rows_of(x.count));
    if (!streamed) {
        multiply_tokens(x, begin, end, units, weights, results);
        return;
    }
    multiply_tokens(x, begin, end, units, weights, StreamedResults<T>(results, begin, end, x.count));
}

}  // namespace amx

#endif
