// Adapters: out += up (down x), of each token its own, see ops/adapters.py.
//
// Tokens are sorted by slot, so that a slot's weights are read once for all of its tokens. Two rounds follow: inner
// products with some rows of a slot's `down` for some of its tokens, then some of their outputs. Every sum takes its
// terms in one order, so that a token's result depends neither on other tokens nor on how the work is divided.

#include <algorithm>
#include <vector>

#include "common/gemm.h"
#include "common/parallel.h"
#include "common/passes.h"
#include "common/replay.h"
#include "common/rows.h"
#include "products/dot_block.h"

namespace {

constexpr int64_t MAX_PASS = 48;            // tokens of a piece: their inputs stay in the L2 cache
constexpr int64_t PIECE_ROWS = 8;           // of `down`
constexpr int64_t PIECE_OUTPUTS = 256;      // with 16 ranks 8 KB of `up`, which stay in the L1 cache
constexpr int64_t SERIAL_WORK = 64 * 1024;  // multiply-adds below which other threads are not woken
constexpr int BLOCK_OUTPUTS = MAX_GEMM_REGISTERS * REGISTER_LANES;

struct Shape {
    int64_t tokens, inputs, outputs, slots, parts, rank, x_stride, out_stride;
};

// Some sorted tokens of a slot, and rows of a part's `down`, or outputs.
struct Piece {
    int64_t slot, part, first, count, begin, end;
};

// Tokens with adapters by slot, and what is to be done with them.
struct Plan {
    std::vector<int32_t> order, firsts;  // [tokens with adapters], [slots + 1]
    std::vector<Piece> shrink, expand;
    int64_t work;  // multiply-adds

    void sort(const int32_t* slots, const Shape& s) {
        firsts.assign(s.slots + 2, 0);
        const auto has = [&](int64_t t) { return slots[t] >= 0 && slots[t] < s.slots; };
        for (int64_t t = 0; t < s.tokens; t++)
            if (has(t)) firsts[slots[t] + 2]++;
        for (int64_t i = 2; i <= s.slots + 1; i++) firsts[i] += firsts[i - 1];
        order.resize(firsts[s.slots + 1]);
        for (int64_t t = 0; t < s.tokens; t++)
            if (has(t)) order[firsts[slots[t] + 1]++] = (int32_t)t;
    }

    void divide(const int32_t* starts, const int32_t* ranks, const Shape& s) {
        shrink.clear();
        expand.clear();
        work = 0;
        for (int64_t slot = 0; slot < s.slots; slot++) {
            if (firsts[slot] == firsts[slot + 1]) continue;
            const Passes passes(firsts[slot + 1] - firsts[slot], MAX_PASS);
            for (int64_t part = 0; part < s.parts; part++) {
                const int64_t rank = ranks[slot * s.parts + part];
                if (rank == 0) continue;
                work += passes.tokens * rank * (s.inputs + starts[part + 1] - starts[part]);
                for (int64_t pass = 0; pass < passes.tokens; pass += passes.per_pass) {
                    const Piece piece = {slot, part, firsts[slot] + pass, passes.count(pass), 0, 0};
                    add_pieces(shrink, piece, 0, rank, PIECE_ROWS);
                    add_pieces(expand, piece, starts[part], starts[part + 1], PIECE_OUTPUTS);
                }
            }
        }
    }

   private:
    static void add_pieces(std::vector<Piece>& pieces, Piece piece, int64_t begin, int64_t end, int64_t size) {
        for (int64_t i = begin; i < end; i += size) {
            piece.begin = i;
            piece.end = std::min(i + size, end);
            pieces.push_back(piece);
        }
    }
};

// x [tokens, ..] -> sorted [tokens with adapters, inputs]
template <class T, class X>
void gather(const T* x, X* sorted, const Plan& plan, const Shape& s, int threads) {
    for_rows(threads, plan.order.size(), [&](int64_t i) {
        const T* const row = x + plan.order[i] * s.x_stride;
        X* const target = sorted + i * s.inputs;
        if constexpr (std::is_same_v<T, X>) {
            std::copy_n(row, s.inputs, target);
        } else {
            for (int64_t k = 0; k < s.inputs; k += REGISTER_LANES)
                store_register(target + k, load_register(row + k, (int)(s.inputs - k)), (int)(s.inputs - k));
        }
    });
}

// sums [TOKENS, BLOCK_OUTPUTS] = low up, of as many outputs as REGISTERS hold, or the `count` that one does.
template <class W, int TOKENS, int REGISTERS>
void expand_block(const float* low, int64_t low_stride, const W* up, int64_t up_stride, int64_t rank, int count,
                  float* sums) {
    f32_register acc[TOKENS][REGISTERS] = {};
    for (int64_t r = 0; r < rank; r++) {
        f32_register columns[REGISTERS];
#pragma GCC unroll 4
        for (int v = 0; v < REGISTERS; v++) {
            const W* const place = up + r * up_stride + v * REGISTER_LANES;
            columns[v] = REGISTERS > 1 ? load_register(place) : load_register(place, count);
        }
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) {
            const f32_register factor = in_register(low[t * low_stride + r] - f32_register{});
#pragma GCC unroll 4
            for (int v = 0; v < REGISTERS; v++) acc[t][v] += factor * columns[v];
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 4
        for (int v = 0; v < REGISTERS; v++) store_register(sums + t * BLOCK_OUTPUTS + v * REGISTER_LANES, acc[t][v]);
}

template <class W, int REGISTERS>
void expand_tokens(const float* low, int64_t low_stride, const W* up, int64_t up_stride, int64_t rank, int count,
                   int tokens, float* sums) {
    typedef void (*Block)(const float*, int64_t, const W*, int64_t, int64_t, int, float*);
    static constexpr Block blocks[MAX_GEMM_ROWS] = {
        expand_block<W, 1, REGISTERS>, expand_block<W, 2, REGISTERS>, expand_block<W, 3, REGISTERS>,
        expand_block<W, 4, REGISTERS>, expand_block<W, 5, REGISTERS>, expand_block<W, 6, REGISTERS>,
    };
    blocks[tokens - 1](low, low_stride, up, up_stride, rank, count, sums);
}

// sums [tokens, BLOCK_OUTPUTS] of dtype are added to `count` outputs of each token.
template <class O>
void add_sums(O* out, const int32_t* order, int64_t out_stride, int tokens, int count, const float* sums) {
    for (int t = 0; t < tokens; t++) {
        O* const row = out + order[t] * out_stride;
        for (int i = 0; i < count; i += REGISTER_LANES) {
            const f32_register sum = load_register(sums + t * BLOCK_OUTPUTS + i);
            store_register(row + i, load_register(row + i, count - i) + sum, count - i);
        }
    }
}

template <class W>
void expand(const Piece& p, const float* low, const W* up, void* out, int out_dtype, const int32_t* ranks,
            const Plan& plan, const Shape& s) {
    const int64_t rank = ranks[p.slot * s.parts + p.part], low_stride = s.parts * s.rank;
    const Passes blocks(p.count, MAX_GEMM_ROWS);
    alignas(64) float sums[MAX_GEMM_ROWS * BLOCK_OUTPUTS];
    for (int64_t o = p.begin; o < p.end;) {
        const int wide = p.end - o >= BLOCK_OUTPUTS ? BLOCK_OUTPUTS : (int)std::min<int64_t>(REGISTER_LANES, p.end - o);
        const W* const columns = up + p.slot * s.rank * s.outputs + o;
        if (o + 2 * BLOCK_OUTPUTS <= s.outputs)
            for (int64_t r = 0; r < rank; r++)
                for (int i = 0; i < BLOCK_OUTPUTS; i += 64 / (int)sizeof(W))
                    __builtin_prefetch(columns + r * s.outputs + BLOCK_OUTPUTS + i);
        for (int64_t t = 0; t < p.count; t += blocks.per_pass) {
            const int tokens = blocks.count(t);
            const float* const factors = low + (p.first + t) * low_stride + p.part * s.rank;
            if (wide == BLOCK_OUTPUTS)
                expand_tokens<W, MAX_GEMM_REGISTERS>(factors, low_stride, columns, s.outputs, rank, wide, tokens, sums);
            else
                expand_tokens<W, 1>(factors, low_stride, columns, s.outputs, rank, wide, tokens, sums);
            with_dtype(out_dtype, [&](auto type) {
                add_sums((decltype(type)*)out + o, plan.order.data() + p.first + t, s.out_stride, tokens, wide, sums);
            });
        }
        o += wide;
    }
}

// D: how `down` is multiplied, see dot_block.h
template <class D>
void add_adapters(int out_dtype, int x_dtype, void* out, const void* x, const void* down, const void* up,
                  const int32_t* ranks, const Plan& plan, const Shape& s, int threads) {
    typedef typename D::W W;
    typedef typename D::X X;
    static thread_local std::vector<X> x_memory;
    static thread_local std::vector<float> low_memory;
    const int64_t tokens = plan.order.size(), low_stride = s.parts * s.rank;
    X* const sorted = aligned_memory(x_memory, tokens * s.inputs);
    float* const low = aligned_memory(low_memory, tokens * low_stride);
    const int gathering = tokens * s.inputs < SERIAL_INPUTS ? 1 : threads;
    if constexpr (std::is_same_v<X, float>)
        with_dtype(x_dtype, [&](auto type) { gather((const decltype(type)*)x, sorted, plan, s, gathering); });
    else
        gather((const X*)x, sorted, plan, s, gathering);
    parallel::for_each(threads, plan.shrink.size(), [&](int64_t i) {
        const Piece& p = plan.shrink[i];
        const W* const rows = (const W*)down + (p.slot * s.parts + p.part) * s.rank * s.inputs;
        auto* const result = low + p.first * low_stride + p.part * s.rank;
        linear_chunk<D>(sorted + p.first * s.inputs, rows, (const W*)nullptr, result,
                        LinearShape{p.count, s.inputs, low_stride}, p.begin, p.end);
    });
    parallel::for_each(threads, plan.expand.size(), [&](int64_t i) {
        expand<W>(plan.expand[i], low, (const W*)up, out, out_dtype, ranks, plan, s);
    });
}

}  // namespace

// out [tokens, ..], x [tokens, ..] with strides between rows; down [slots, parts, rank, inputs] and up [slots, rank,
// outputs] of weight_dtype; slots [tokens], starts [parts + 1], ranks [slots, parts]
extern "C" void pagewire_add_adapters(int out_dtype, int x_dtype, int weight_dtype, void* out, const void* x,
                                      const void* down, const void* up, const int32_t* slots, const int32_t* starts,
                                      const int32_t* ranks, int64_t tokens, int64_t inputs, int64_t outputs,
                                      int64_t num_slots, int64_t parts, int64_t rank, int64_t x_stride,
                                      int64_t out_stride, int threads) {
    static thread_local Plan plan;
    const Shape shape = {tokens, inputs, outputs, num_slots, parts, rank, x_stride, out_stride};
    plan.sort(slots, shape);
    if (plan.order.empty()) return;
    plan.divide(starts, ranks, shape);
    if (plan.work < SERIAL_WORK) threads = 1;
#if defined(__AVX512BF16__)
    if (x_dtype == BFLOAT16 && weight_dtype == BFLOAT16)
        return add_adapters<Bf16Dot>(out_dtype, x_dtype, out, x, down, up, ranks, plan, shape, threads);
#endif
    with_dtype(weight_dtype, [&](auto type) {
        add_adapters<WidenedDot<decltype(type)>>(out_dtype, x_dtype, out, x, down, up, ranks, plan, shape, threads);
    });
}

PAGEWIRE_REPLAYABLE(add_adapters)
