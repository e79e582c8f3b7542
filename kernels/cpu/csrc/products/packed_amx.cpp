// y = x w^T + bias with packed bf16 weights and the matrix unit of x86 (AMX).

#include "products/packed_linear.h"

#include "products/amx_products.h"

#if defined(PAGEWIRE_AMX)

namespace packed {
namespace {

constexpr int FEW_TILES = 4;              // of outputs, multiplied at once with up to 16 tokens
constexpr int64_t MANY_GROUP = 16;        // tiles of a piece of work with more tokens, at most
constexpr int PREFETCH = 4096;            // bytes of a tile fetched ahead of the products with few tokens

// sums [OUTPUT_TILES][16][16] = products of up to 16 tokens with tiles of outputs, w_tile pairs apart: each weight is
// used once.
template <int OUTPUT_TILES>
void multiply_few(const char* x, int64_t stride, const uint32_t* w, int64_t w_tile, int64_t units, float* sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t u = 0; u < units; u++, x += amx::UNIT_BYTES, w += UNIT_PAIRS) {
        for (int n = 0; n < OUTPUT_TILES; n++) {
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++)  // past the end it does nothing
                __builtin_prefetch((const char*)(w + n * w_tile + row * TILE) + PREFETCH);
        }
        _tile_loadd(4, x, stride);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (OUTPUT_TILES > 1) {
            _tile_loadd(7, w + w_tile, 64);
            _tile_dpbf16ps(1, 4, 7);
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
    _tile_stored(1, sums + amx::SUMS, 64);
    _tile_stored(2, sums + 2 * amx::SUMS, 64);
    _tile_stored(3, sums + 3 * amx::SUMS, 64);
}

// Up to 16 tokens.
void linear_few(const Problem& p, int threads) {
    typedef void (*Multiply)(const char*, int64_t, const uint32_t*, int64_t, int64_t, float*);
    static constexpr Multiply products[FEW_TILES] = {multiply_few<1>, multiply_few<2>, multiply_few<3>,
                                                     multiply_few<4>};
    const uint8_t rows = (uint8_t)p.tokens;
    // A gate and what it multiplies do not lie as far apart as the next gate.
    const Pieces pieces(threads, p.tiles(), p.tokens, p.gated ? 2 : 1, p.gated ? 2 : FEW_TILES, TILE, TILE);
    pieces.for_each(threads, [&](int64_t tile, int64_t end, int64_t, int64_t) {
        const amx::TileRegisters registers(amx::TileRows{{rows, rows, rows, rows, rows, 16, 16, 16}});
        alignas(64) float sums[FEW_TILES * amx::SUMS];
        const int64_t tiles = end - tile;
        products[tiles - 1]((const char*)p.x, p.stride * sizeof(bf16), p.tile_in_turn(tile), p.next_tile(), p.units(),
                            sums);
        for (int64_t t = 0; t < p.tokens; t++) {
            const float* const row = sums + t * TILE;
            if (p.gated) {
                p.write_gated(t, tile / 2, load(row), load(row + amx::SUMS));
            } else {
                for (int64_t n = 0; n < tiles; n++) p.write(t, tile + n, load(row + n * amx::SUMS));
            }
        }
    });
}

// The weights of multiply_tokens, where they lie. Many tokens leave time to fetch the next stage's; with fewer the
// processor's own prefetching does better.
class PackedStages {
   public:
    explicit PackedStages(const Problem& p) : p_(p) {}

    void prepare(const amx::Stage& stage, int64_t steps) {
        next_ = at(stage);
        second_tile_ = stage.tiles > 1 ? p_.next_tile() : 0;
        left_ = steps >= stage.units * UNIT_PAIRS / STEP_PAIRS ? stage.units * UNIT_PAIRS / STEP_PAIRS : 0;
    }
    amx::StageWeights take(const amx::Stage& stage) const { return {at(stage), p_.next_tile()}; }
    void step() {
        if (left_ == 0) return;
        left_--;
        for (int64_t pairs = 0; pairs < STEP_PAIRS; pairs += TILE) {
            _mm_prefetch(next_ + pairs, _MM_HINT_T1);
            _mm_prefetch(next_ + second_tile_ + pairs, _MM_HINT_T1);
        }
        next_ += STEP_PAIRS;
    }

   private:
    static constexpr int STEP_PAIRS = 2 * TILE;  // fetched of a tile at a time

    const uint32_t* at(const amx::Stage& stage) const { return p_.tile_in_turn(stage.tile) + stage.unit * UNIT_PAIRS; }

    const Problem& p_;
    const uint32_t* next_ = nullptr;
    int64_t second_tile_ = 0, left_ = 0;
};

// Results of gates and what they multiply: a stage's two tiles.
struct GatedResults {
    const Problem& p;
    int64_t first_token;

    void write(const float* sums, int64_t first, int64_t tokens, const amx::Stage& stage) const {
        for (int64_t t = 0; t < tokens; t++) {
            const float* const row = sums + t / TILE * 2 * amx::SUMS + t % TILE * TILE;
            p.write_gated(first_token + first + t, stage.tile / 2, load(row), load(row + amx::SUMS));
        }
    }
    void finish(const amx::Stage&) const {}
};

// multiply(tokens, first of them, first tile, end, weights) for each piece of work
template <class Multiply>
void for_pieces(const Problem& p, int threads, Multiply&& multiply) {
    const int64_t row_bytes = p.stride * sizeof(bf16);
    const Pieces pieces(threads, p.tiles(), p.tokens, 2, MANY_GROUP, amx::BLOCK, amx::part_of(row_bytes));
    pieces.for_each(threads, [&](int64_t tile, int64_t tiles_end, int64_t first, int64_t end) {
        PackedStages weights(p);
        const amx::Tokens x = {(const char*)(p.x + first * p.stride), row_bytes, end - first};
        multiply(x, first, tile, tiles_end, weights);
    });
}

template <class T>
void linear_many(const Problem& p, int threads) {
    const amx::Results<T> all = {(T*)p.result, (const T*)p.bias, p.out, p.out};
    const bool streamed = all.streamed(p.tokens);
    for_pieces(p, threads, [&](const amx::Tokens& x, int64_t first, int64_t tile, int64_t end, PackedStages& weights) {
        const amx::Results<T> results = {all.data + first * p.out, all.bias, p.out, p.out};
        amx::multiply_piece(x, tile, end, p.units(), weights, results, streamed);
    });
}

void linear_many_gated(const Problem& p, int threads) {
    for_pieces(p, threads, [&](const amx::Tokens& x, int64_t first, int64_t tile, int64_t end, PackedStages& weights) {
        const amx::TileRegisters registers(amx::rows_of(x.count));
        amx::multiply_tokens(x, tile, end, p.units(), weights, GatedResults{p, first});
    });
}

}  // namespace

bool linear_amx(const Problem& problem, int threads) {
    if (!amx::permitted()) return false;
    if (problem.tokens <= TILE) {
        linear_few(problem, threads);
    } else if (problem.gated) {
        linear_many_gated(problem, threads);
    } else if (problem.wide) {
        linear_many<float>(problem, threads);
    } else {
        linear_many<bf16>(problem, threads);
    }
    return true;
}

}  // namespace packed

#else

bool packed::linear_amx(const Problem&, int) { return false; }

#endif
