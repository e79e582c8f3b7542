// y = x w^T + bias with grouped weights and inputs quantized per block: integer dot products, floats per block.

#include "grouped/grouped_dot.h"
#include "grouped/grouped_linear.h"

namespace {

static_assert(TILES == (PAIRS_OF_TILES ? 2 : 1));

constexpr int CHUNK_TILES = 4;    // tiles that a thread takes at a time
constexpr int STAGE_BLOCKS = 8;   // with integer sums before any becomes a float
constexpr int PREFETCH = 2048;    // bytes of a tile's codes fetched ahead of the products
constexpr int MOST_PREFETCH = 128 * 1024;  // likewise

typedef QuantizedInputs::Block Block;

struct Problem {
    const GroupedWeight& weight;
    const QuantizedInputs& inputs;
    const Passes& passes;
    uint8_t table[SMALL_CODEBOOK];
};

// ---- integer sums ----

// What a stage reads: the codes of tiles that are multiplied together, and the inputs of a pass of TOKENS tokens.
template <int TOKENS, int UNIT_BYTES>
struct Streams {
    const uint8_t* codes[TILES];
    const int8_t* x;
    int64_t ahead;  // bytes to the codes that are fetched

    [[gnu::always_inline]] void fetch() const {
#pragma GCC unroll 2
        for (int n = 0; n < TILES; n++)
#pragma GCC unroll 8
            for (int i = 0; i < UNIT_BYTES; i += 64) __builtin_prefetch(codes[n] + ahead + i);
    }
    [[gnu::always_inline]] void next_unit() {
#pragma GCC unroll 2
        for (int n = 0; n < TILES; n++) codes[n] += UNIT_BYTES;
        x += TOKENS * INPUT_BYTES * UNIT;
    }
};

// sums [blocks, tiles, TOKENS] of a part of the tiles' outputs, as many as a register holds, with those TOKENS of a
// pass, for blocks of so many units; 0: of half a unit.
template <class Codes, int TOKENS, bool ROUGH, class Streams>
void sum_blocks(const Codes& codes, Streams& streams, const Block* block, int blocks, int units, i32_register* sums) {
    typedef BlockSums<Codes, TOKENS, ROUGH> Sums;
    constexpr int COUNT = TILES * TOKENS;
    Streams at = streams;
    for (; units > 0 && blocks > 0; blocks--, block += TOKENS, sums += COUNT) {
        Sums result([&](int t) { return block[t].start; });
        for (int u = 0; u < units; u++) {
            at.fetch();
            result.template add<0, QUADS>(codes, at.codes, at.x);
            at.next_unit();
        }
        result.write(sums);
    }
    for (; blocks > 0; blocks -= 2, block += 2 * TOKENS, sums += 2 * COUNT) {
        at.fetch();
        Sums first([&](int t) { return block[t].start; });
        first.template add<0, QUADS / 2>(codes, at.codes, at.x);
        first.write(sums);
        Sums second([&](int t) { return block[TOKENS + t].start; });
        second.template add<QUADS / 2, QUADS>(codes, at.codes, at.x);
        second.write(sums + COUNT);
        at.next_unit();
    }
    streams = at;
}

// ---- floats ----

enum Form { SCALES, MINIMUMS, ZERO_POINTS };

// Where the blocks of a stage lie in their groups.
struct BlockRange {
    int count, in_group, per_group;
};

// result [TOKENS] += what a tile's integer sums [blocks, stride] stand for. S: what scales and minimums are stored as
template <Form FORM, class S, int TOKENS>
void add_scaled(const i32_register* sums, int stride, const Block* block, BlockRange blocks, const char* scales,
                const char* offsets, f32_register* result) {
    typedef std::conditional_t<FORM == ZERO_POINTS, float, S> O;
    f32_register total[TOKENS];
    __builtin_memcpy(total, result, sizeof total);
    for (int b = 0; b < blocks.count; b++, block += TOKENS, sums += stride) {
        const f32_register scale = load_register((const S*)scales);
        const f32_register offset = FORM == SCALES ? f32_register{} : load_register((const O*)offsets);
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) {
            const f32_register sum = __builtin_convertvector(sums[t], f32_register);
            if constexpr (FORM == SCALES) total[t] += sum * (scale * block[t].scale);
            if constexpr (FORM == MINIMUMS) total[t] += sum * (scale * block[t].scale) + offset * block[t].sum;
            if constexpr (FORM == ZERO_POINTS)
                total[t] += (sum - offset * block[t].code_sum) * (scale * block[t].scale);
        }
        if (++blocks.in_group < blocks.per_group) continue;
        blocks.in_group = 0;
        scales += TILE * sizeof(S);
        offsets += TILE * sizeof(O);
    }
    __builtin_memcpy(result, total, sizeof total);
}

using AddScaled = void (*)(const i32_register*, int, const Block*, BlockRange, const char*, const char*, f32_register*);

template <int TOKENS, class S>
AddScaled add_scaled_of(const GroupedWeight& w) {
    if (w.offset_kind == NONE) return add_scaled<SCALES, S, TOKENS>;
    return w.has_minimums() ? add_scaled<MINIMUMS, S, TOKENS> : add_scaled<ZERO_POINTS, S, TOKENS>;
}

// The scales or offsets of tiles that are multiplied together: as they are stored, or expanded.
class GroupNumbers {
   public:
    GroupNumbers(const GroupedWeight& w, bool offsets)
        : w_(w), offsets_(offsets), as_stored_(are_halves(w) && (offsets ? w.offset_kind : w.scale_kind) == HALF),
          bytes_(w.group_bytes(offsets ? w.offset_kind : w.scale_kind)) {}

    // Whether scales, and minimums if there are any, need not be expanded.
    static bool are_halves(const GroupedWeight& w) {
        return w.scale_kind == HALF && (w.offset_kind == HALF || !w.has_minimums()) && w.padded_groups() == w.groups();
    }
    static int64_t floats(const GroupedWeight& w) { return w.padded_groups() * TILE; }
    int number_bytes() const { return as_stored_ ? sizeof(f16) : sizeof(float); }

    // Of a tile; meanwhile those `next` tiles on are fetched. memory: [floats()]
    const char* of(int64_t tile, int next, float* memory) const {
        const char* const stored = (offsets_ ? w_.offsets : w_.scales) + tile * bytes_;
        for (int64_t i = 0; i < bytes_; i += 64) __builtin_prefetch(stored + next * bytes_ + i);
        if (as_stored_) return stored;
        if (bytes_ > 0) expand_groups(w_, tile, offsets_, memory);
        return (const char*)memory;
    }

   private:
    const GroupedWeight& w_;
    const bool offsets_, as_stored_;
    const int64_t bytes_;
};

// ---- products ----

// A tile, and the numbers of its groups
struct WeightTile {
    const uint8_t* codes;
    const char* scales;
    const char* offsets;
    int scale_bytes, offset_bytes;  // of a number
};

// sums [MAX_TOKENS] of each of the tiles that are multiplied together, with those TOKENS of a pass. `ahead`: bytes to
// the codes that are fetched meanwhile
template <class Codes, int TOKENS, bool ROUGH>
void multiply(const Problem& p, int64_t first, const WeightTile* tiles, int64_t ahead, f32x16 (*sums)[MAX_TOKENS]) {
    const GroupedWeight& w = p.weight;
    const Codes codes(p.table);
    const bool half_units = w.padded_group() < UNIT;
    const int units = half_units ? 0 : w.block() / UNIT, per_group = half_units ? 1 : w.padded_group() / w.block();
    const int64_t blocks = w.padded_groups() * per_group;
    const AddScaled add =
        GroupNumbers::are_halves(w) ? add_scaled_of<TOKENS, f16>(w) : add_scaled_of<TOKENS, float>(w);
    for (int lane = 0; lane < TILE; lane += REGISTER_LANES) {
        Streams<TOKENS, Codes::BITS * 64> streams = {{}, p.inputs.codes(first), ahead};
        for (int n = 0; n < TILES; n++) streams.codes[n] = tiles[n].codes + 4 * lane;
        const Block* block = p.inputs.blocks(first);
        f32_register total[TILES][TOKENS] = {};
        for (int64_t begin = 0; begin < blocks; begin += STAGE_BLOCKS, block += STAGE_BLOCKS * TOKENS) {
            const int count = (int)std::min<int64_t>(STAGE_BLOCKS, blocks - begin);
            i32_register integers[STAGE_BLOCKS * TILES * TOKENS];
            sum_blocks<Codes, TOKENS, ROUGH>(codes, streams, block, count, units, integers);
            const BlockRange range = {count, (int)(begin % per_group), per_group};
            const int64_t at = begin / per_group * TILE + lane;
            for (int n = 0; n < TILES; n++)
                add(integers + n * TOKENS, TILES * TOKENS, block, range, tiles[n].scales + at * tiles[n].scale_bytes,
                    tiles[n].offsets + at * tiles[n].offset_bytes, total[n]);
        }
        for (int n = 0; n < TILES; n++)
            for (int t = 0; t < TOKENS; t++)
                __builtin_memcpy((float*)&sums[n][t] + lane, &total[n][t], sizeof(f32_register));
    }
}

using Multiply = void (*)(const Problem&, int64_t, const WeightTile*, int64_t, f32x16 (*)[MAX_TOKENS]);

template <class Codes, bool ROUGH, int... COUNTS>
Multiply multiply_of(int tokens, std::integer_sequence<int, COUNTS...>) {
    static constexpr Multiply products[] = {multiply<Codes, COUNTS + 1, ROUGH>...};
    return products[tokens - 1];
}
template <class Codes, bool ROUGH>
Multiply multiply_of(int tokens) {
    return multiply_of<Codes, ROUGH>(tokens, std::make_integer_sequence<int, MAX_TOKENS>{});
}

template <class Codes, bool ROUGH>
void linear(const Problem& p, const Output& output, int threads) {
    const GroupedWeight& w = p.weight;
    const int64_t tiles = w.tiles(), group_floats = GroupNumbers::floats(w), tile_bytes = w.units() * w.unit_bytes();
    // The same codes of the next tiles; or of these, so that the cache still holds them when they are read.
    const int next = output.gated ? 1 : TILES;  // tiles from one to that which comes after it
    const int64_t ahead = next * tile_bytes <= MOST_PREFETCH ? next * tile_bytes : PREFETCH;
    const GroupNumbers scales(w, false), offsets(w, true);
    parallel::for_each(threads, (tiles + CHUNK_TILES - 1) / CHUNK_TILES, [&](int64_t chunk) {
        static thread_local std::vector<float> memory;
        memory.resize(2 * TILES * group_floats);
        const int64_t end = std::min(tiles, (chunk + 1) * CHUNK_TILES);
        for (int64_t tile = chunk * CHUNK_TILES; tile < end; tile += TILES) {
            const int tiles_here = (int)std::min<int64_t>(TILES, end - tile);
            WeightTile weights[TILES];
            for (int n = 0; n < TILES; n++) {
                const int64_t one = output.in_turn(tile + std::min(n, tiles_here - 1));
                float* const numbers = memory.data() + 2 * n * group_floats;
                weights[n] = {w.tile_codes(one), scales.of(one, next, numbers),
                              offsets.of(one, next, numbers + group_floats), scales.number_bytes(),
                              offsets.number_bytes()};
            }
            for (int64_t first = 0; first < output.tokens; first += p.passes.per_pass) {
                f32x16 sums[TILES][MAX_TOKENS];
                const int count = p.passes.count(first);
                multiply_of<Codes, ROUGH>(count)(p, first, weights, ahead, sums);
                for (int t = 0; t < count && output.gated; t++)
                    output.write_gated(first + t, tile, sums[0][t], sums[TILES - 1][t]);
                for (int n = 0; n < tiles_here && !output.gated; n++)
                    for (int t = 0; t < count; t++) output.write(first + t, tile + n, sums[n][t]);
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
