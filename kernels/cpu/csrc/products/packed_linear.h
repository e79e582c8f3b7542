// Dense weights in the layouts of `packed_layout.py`, and what all products with them read.
//
// Outputs come in tiles of 16. A tile's weights follow each other along the inputs in units of 32 inputs: 16 rows of a
// pair of inputs for each of the 16 outputs. A unit is what the matrix unit multiplies with at once, a row what
// AVX512-BF16 or VNNI does. Inputs and outputs that are missing from the last unit and the last tile are zeros.
// Numbers are bf16; or integers of 16 bits (fixed_point.h), before which each tile has their units, fp32, of each block
// of inputs and each output.
#pragma once

#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "common/vector.h"

namespace packed {

constexpr int TILE = LANES;             // outputs
constexpr int UNIT = 32;                // inputs
constexpr int ROWS = UNIT / 2;          // of a unit
constexpr int UNIT_PAIRS = ROWS * TILE;
constexpr int MOST_BLOCK_UNITS = 32;    // of integers that share a unit

// Blocks of about as many units each
struct Blocks {
    int64_t units, per_block, number;

    explicit Blocks(int64_t in) : units((in + UNIT - 1) / UNIT) {
        const int64_t least = std::max<int64_t>(1, (units + MOST_BLOCK_UNITS - 1) / MOST_BLOCK_UNITS);
        per_block = std::max<int64_t>(1, (units + least - 1) / least);
        number = (units + per_block - 1) / per_block;
    }
    int64_t tile_pairs() const { return number * TILE + units * UNIT_PAIRS; }
};

struct Problem {
    const bf16* x;           // [tokens, stride]; null: inputs are floats
    const uint32_t* weight;  // [tiles, units, ROWS, TILE] pairs, if `is_fixed` after [number of blocks, TILE] floats
    const void* bias;        // [out], of the result's type, or null
    void* result;            // [tokens, out], fp32 if `wide`, else bf16
    int64_t tokens, in, out;
    int64_t stride;          // of x: all units of a token can be read
    bool wide;
    const float* floats = nullptr;  // [tokens, stride], where x is null
    bool is_fixed = false;
    bool gated = false;      // result [tokens, out / 2], bias fp32: silu of the first half times the second

    int64_t units() const { return (in + UNIT - 1) / UNIT; }
    int64_t tiles() const { return (out + TILE - 1) / TILE; }
    int64_t tile_pairs() const { return is_fixed ? Blocks(in).tile_pairs() : units() * UNIT_PAIRS; }
    const uint32_t* tile(int64_t index) const { return weight + index * tile_pairs(); }
    // The tile that is multiplied as the index-th: of gated ones each gate comes before what it multiplies.
    int64_t in_turn(int64_t index) const { return gated ? index / 2 + index % 2 * (tiles() / 2) : index; }
    const uint32_t* tile_in_turn(int64_t index) const { return tile(in_turn(index)); }
    // Pairs from a tile to the one that is multiplied after it, of gated ones from a gate to what it multiplies
    int64_t next_tile() const { return gated ? tiles() / 2 * tile_pairs() : tile_pairs(); }
    void write(int64_t token, int64_t tile, f32x16 sums) const {
        if (wide) return write_as<float>(token, tile, sums);
        write_as<bf16>(token, tile, sums);
    }
    // The sums of tiles [tile, end), in turn
    void write_tiles(int64_t token, int64_t tile, int64_t end, const f32x16* sums) const {
        if (gated) {
            for (; tile < end; tile += 2, sums += 2) write_gated(token, tile / 2, sums[0], sums[1]);
        } else {
            for (; tile < end; tile++, sums++) write(token, tile, *sums);
        }
    }
    // The gate of `tile`, and what it multiplies
    void write_gated(int64_t token, int64_t tile, f32x16 gate, f32x16 up) const {
        const int64_t n = tile * TILE, half = out / 2;
        if (bias) {
            gate += load((const float*)bias + n);
            up += load((const float*)bias + half + n);
        }
        const f32x16 product = gate * sigmoid(gate) * up;
        if (wide) return store(results<float>(token) + n, product);
        store(results<bf16>(token) + n, product);
    }
    // The same of `count` tokens, each of which has `stride` sums
    void write_tokens(int64_t token, int count, int64_t tile, int64_t end, const f32x16* sums, int64_t stride) const {
        if (gated || bias) {
            for (int t = 0; t < count; t++) write_tiles(token + t, tile, end, sums + t * stride);
        } else if (wide) {
            write_sums<float>(token, count, tile, end, sums, stride);
        } else {
            write_sums<bf16>(token, count, tile, end, sums, stride);
        }
    }
    int64_t token_results() const { return gated ? out / 2 : out; }
    template <class T>
    T* results(int64_t token) const {
        return (T*)result + token * token_results();
    }
    // Where the sums of a token and a tile are written
    const char* results_at(int64_t token, int64_t tile) const {
        return (const char*)result + (token * token_results() + (gated ? tile / 2 : tile) * TILE) * result_bytes();
    }
    int64_t result_bytes() const { return wide ? sizeof(float) : sizeof(bf16); }
    // That of at most `most` tokens from `first` on
    Problem part(int64_t first, int64_t most) const {
        Problem part = *this;
        if (x) part.x += first * stride;
        if (floats) part.floats += first * stride;
        part.result = wide ? (void*)results<float>(first) : (void*)results<bf16>(first);
        part.tokens = std::min(most, tokens - first);
        return part;
    }

   private:
    template <class T>
    void write_sums(int64_t token, int count, int64_t tile, int64_t end, const f32x16* sums, int64_t stride) const {
        T* const rows = results<T>(token);
        for (; tile < end; tile++, sums++) {
            const int lanes = (int)std::min<int64_t>(TILE, out - tile * TILE);
            for (int t = 0; t < count; t++) store(rows + t * out + tile * TILE, sums[t * stride], lanes);
        }
    }
    template <class T>
    void write_as(int64_t token, int64_t tile, f32x16 sums) const {
        const int64_t n = tile * TILE;
        const int count = (int)std::min<int64_t>(TILE, out - n);
        if (bias) sums += load((const T*)bias + n, count);
        store(results<T>(token) + n, sums, count);
    }
};

// Work in pieces of some tiles by some tokens, enough of them to keep all threads busy to the end.
struct Pieces {
    static constexpr int64_t PER_THREAD = 8;
    int64_t tiles, tokens;            // in all
    int64_t group = 1, groups = 1;    // tiles of a piece, a power of two
    int64_t part = 1, parts = 1;      // tokens of a piece, a multiple of `granule`

    Pieces(int threads, int64_t tiles, int64_t tokens, int64_t least_group, int64_t most_group, int64_t granule,
           int64_t most_part)
        : tiles(tiles), tokens(tokens) {
        const int64_t wanted = PER_THREAD * threads;
        for (group = least_group; group * 2 <= std::min(most_group, tiles / wanted);) group *= 2;
        groups = (tiles + group - 1) / group;
        const int64_t granules = (tokens + granule - 1) / granule;
        const int64_t few = std::max((tokens + most_part - 1) / most_part, (wanted / 2 + groups - 1) / groups);
        const int64_t part_granules = std::max<int64_t>(1, granules / few);
        parts = (granules + part_granules - 1) / part_granules;
        part = (granules + parts - 1) / parts * granule;  // 9 granules of at most 4 are 3 + 3 + 3, not 4 + 4 + 1
        parts = (tokens + part - 1) / part;
    }

    // f(first tile, end, first token, end); neighbours have tokens in common.
    template <class F>
    void for_each(int threads, F&& f) const {
        parallel::for_each(threads, groups * parts, [&](int64_t piece) {
            const int64_t tile = piece % groups * group, token = piece / groups * part;
            f(tile, std::min(tiles, tile + group), token, std::min(tokens, token + part));
        });
    }
};

// With the matrix unit. False: there is none, nothing was done.
bool linear_amx(const Problem& problem, int threads);

constexpr float LARGEST_NORM = 46300.0f;  // of a block's integers before they are rounded (fixed_point.h)

// With weights in fixed point
void linear_fixed_point(const Problem& problem, int threads);
// Whether gates can be summed side by side with what they multiply
bool gates_in_fixed_point(const Problem& problem);
// The row `id` of a weight of `in` inputs
void fixed_row(const uint32_t* weight, int64_t id, int64_t in, bf16* row);

}  // namespace packed
