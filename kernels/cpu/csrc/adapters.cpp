// Adapters: out += up (down x), of each token its own, see ops/adapters.py.
//
// Tokens are sorted by slot, so that a slot's weights are read once for a few of its tokens, which a thread takes
// through both products. Where there are too few of these for the threads, these share the rows of `down` first, then
// the outputs. Every sum takes its terms in one order, so that a token's result depends neither on other tokens nor on
// how the work is divided.

#include <algorithm>
#include <vector>

#include "common/gemm.h"
#include "common/parallel.h"
#include "common/passes.h"
#include "common/replay.h"
#include "common/rows.h"
#include "products/dot_block.h"

namespace {

constexpr int64_t SHARED_ROWS = 8;          // of `down`, where threads share them
constexpr int64_t SHARED_OUTPUTS = 256;
constexpr int64_t SERIAL_WORK = 64 * 1024;  // multiply-adds below which other threads are not woken
constexpr int STEP = 2 * REGISTER_LANES;    // weights that are read together
constexpr int WIDE = MAX_GEMM_REGISTERS / 2;
constexpr int LINE = 64;

struct Shape {
    int64_t tokens, inputs, outputs, slots, parts, rank, x_stride, out_stride;
};

// Some sorted tokens of a slot
struct Piece {
    int64_t slot, first;
    int count;
};

// Rows of `down`, or outputs, of a part
struct Share {
    Piece piece;
    int64_t part, begin, end;
};

// Tokens with adapters by slot, and what is to be done with them.
struct Plan {
    std::vector<int32_t> order, firsts;  // [tokens with adapters], [slots + 1]
    std::vector<Piece> pieces;
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
        pieces.clear();
        work = 0;
        for (int64_t slot = 0; slot < s.slots; slot++) {
            if (firsts[slot] == firsts[slot + 1]) continue;
            int64_t products = 0;  // multiply-adds of a token
            for (int64_t part = 0; part < s.parts; part++)
                products += ranks[slot * s.parts + part] * (s.inputs + starts[part + 1] - starts[part]);
            if (products == 0) continue;
            const Passes passes(firsts[slot + 1] - firsts[slot], MAX_TOKENS);
            work += passes.tokens * products;
            for (int64_t pass = 0; pass < passes.tokens; pass += passes.per_pass)
                pieces.push_back({slot, firsts[slot] + pass, passes.count(pass)});
        }
    }
};


// STEP weights in two registers. Of bf16, which are the halves of 32 bits, each has every other one: to part them takes
// half as long as to widen them in order.
template <class W>
struct Halves {
    static constexpr bool ALTERNATE = false;
    static f32_register first(const W* p) { return load_register(p); }
    static f32_register second(const W* p) { return load_register(p + REGISTER_LANES); }
};
#if defined(__AVX512F__)
template <>
struct Halves<bf16> {
    static constexpr bool ALTERNATE = true;
    static f32_register first(const bf16* p) { return (f32_register)(load_raw<u32_register>(p) << 16); }
    static f32_register second(const bf16* p) { return (f32_register)(load_raw<u32_register>(p) & 0xffff0000u); }
};
#define EVERY_OTHER(a, b, i) \
    __builtin_shufflevector(a, b, i, i + 2, i + 4, i + 6, i + 8, i + 10, i + 12, i + 14, i + 16, i + 18, i + 20, \
                            i + 22, i + 24, i + 26, i + 28, i + 30)
#define IN_TURN(a, b, i) \
    __builtin_shufflevector(a, b, i, i + 16, i + 1, i + 17, i + 2, i + 18, i + 3, i + 19, i + 4, i + 20, i + 5, \
                            i + 21, i + 6, i + 22, i + 7, i + 23)
#else
#define EVERY_OTHER(a, b, i) (a)
#define IN_TURN(a, b, i) (a)
#endif

// x [inputs] -> floats in the order of the weights, then zeros up to a multiple of REGISTER_LANES
template <class W, class T>
void arrange(const T* x, int64_t inputs, float* arranged) {
    int64_t k = 0;
    if constexpr (Halves<W>::ALTERNATE)
        for (; k + STEP <= inputs; k += STEP) {
            const f32_register a = load_register(x + k), b = load_register(x + k + REGISTER_LANES);
            store_register(arranged + k, EVERY_OTHER(a, b, 0));
            store_register(arranged + k + REGISTER_LANES, EVERY_OTHER(a, b, 1));
        }
    for (; k < inputs; k += REGISTER_LANES) store_register(arranged + k, load_register(x + k, (int)(inputs - k)));
}

// sums [TOKENS] = inner products of tokens with 4 rows
template <class W, int TOKENS>
void shrink_block(const W* const* rows, const float* x, int64_t x_stride, int64_t inputs, f32x4* sums) {
    f32_register acc[TOKENS][WEIGHT_ROWS] = {};
    const auto add = [&](const f32_register* w, int64_t k) {
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) {
            const f32_register token = in_register(load_register(x + t * x_stride + k));
#pragma GCC unroll 4
            for (int n = 0; n < WEIGHT_ROWS; n++) acc[t][n] += token * w[n];
        }
    };
    int64_t k = 0;
    for (; k + STEP <= inputs; k += STEP) {
        f32_register w[WEIGHT_ROWS];
#pragma GCC unroll 4
        for (int n = 0; n < WEIGHT_ROWS; n++) {
            w[n] = Halves<W>::first(rows[n] + k);
            __builtin_prefetch(rows[n] + k + PREFETCH_BLOCKS * WEIGHT_ROWS * inputs);  // past the end it does nothing
        }
        add(w, k);
#pragma GCC unroll 4
        for (int n = 0; n < WEIGHT_ROWS; n++) w[n] = Halves<W>::second(rows[n] + k);
        add(w, k + REGISTER_LANES);
    }
    for (; k < inputs; k += REGISTER_LANES) {
        f32_register w[WEIGHT_ROWS];
        for (int n = 0; n < WEIGHT_ROWS; n++) w[n] = load_register(rows[n] + k, (int)(inputs - k));
        add(w, k);
    }
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++)
        sums[t] = sum_each(all_lanes(acc[t][0]), all_lanes(acc[t][1]), all_lanes(acc[t][2]), all_lanes(acc[t][3]));
}

// low [count, low_stride] = inner products with the rows [begin, end)
template <class W>
void shrink(const float* x, int64_t x_stride, const W* down, float* low, int64_t low_stride, int count, int64_t inputs,
            int64_t begin, int64_t end) {
    typedef void (*Block)(const W* const*, const float*, int64_t, int64_t, f32x4*);
    static constexpr Block blocks[] = {shrink_block<W, 1>, shrink_block<W, 2>, shrink_block<W, 3>,
                                       shrink_block<W, 4>, shrink_block<W, 5>, shrink_block<W, 6>};
    for (int64_t n = begin; n < end; n += WEIGHT_ROWS) {
        const int there = (int)std::min<int64_t>(WEIGHT_ROWS, end - n);
        const W* rows[WEIGHT_ROWS];
        for (int i = 0; i < WEIGHT_ROWS; i++) rows[i] = down + (n + std::min(i, there - 1)) * inputs;
        f32x4 sums[MAX_TOKENS];
        blocks[count - 1](rows, x, x_stride, inputs, sums);
        for (int t = 0; t < count; t++) __builtin_memcpy(low + t * low_stride + n, &sums[t], there * sizeof(float));
    }
}

template <class O>
void add_to(O* out, f32_register sum, int count) {
    store_register(out, load_register(out, count) + sum, count);
}

// Of TOKENS tokens, as many outputs as 2 PAIRS registers hold, or `count` < STEP where PAIRS is 0.
template <class W, int TOKENS, int PAIRS, class O>
void expand_block(const float* low, int64_t low_stride, const W* up, int64_t up_stride, int rank, int count,
                  O* const* out, int64_t o) {
    constexpr int REGISTERS = PAIRS ? 2 * PAIRS : 2;
    f32_register acc[TOKENS][REGISTERS] = {};
    for (int r = 0; r < rank; r++, up += up_stride) {
        f32_register columns[REGISTERS] = {};
        if constexpr (PAIRS == 0) {
            columns[0] = load_register(up, count);
            if (count > REGISTER_LANES) columns[1] = load_register(up + REGISTER_LANES, count - REGISTER_LANES);
        }
#pragma GCC unroll 2
        for (int p = 0; p < PAIRS; p++) {
            columns[2 * p] = Halves<W>::first(up + p * STEP);
            columns[2 * p + 1] = Halves<W>::second(up + p * STEP);
        }
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) {
            const f32_register factor = in_register(low[t * low_stride + r] - f32_register{});
#pragma GCC unroll 4
            for (int v = 0; v < REGISTERS; v++) acc[t][v] += factor * columns[v];
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) {
        O* const row = out[t] + o;
        if constexpr (PAIRS == 0) {
            add_to(row, acc[t][0], count);
            if (count > REGISTER_LANES) add_to(row + REGISTER_LANES, acc[t][1], count - REGISTER_LANES);
        }
#pragma GCC unroll 2
        for (int p = 0; p < PAIRS; p++) {
            f32_register a = acc[t][2 * p], b = acc[t][2 * p + 1];
            if constexpr (Halves<W>::ALTERNATE) {
                const f32_register even = a;
                a = IN_TURN(even, b, 0);
                b = IN_TURN(even, b, 8);
            }
            add_to(row + p * STEP, a, REGISTER_LANES);
            add_to(row + p * STEP + REGISTER_LANES, b, REGISTER_LANES);
        }
    }
}

template <class W, int PAIRS, class O>
void expand_tokens(const float* low, int64_t low_stride, const W* up, int64_t up_stride, int rank, int count,
                   int tokens, O* const* out, int64_t o) {
    typedef void (*Block)(const float*, int64_t, const W*, int64_t, int, int, O* const*, int64_t);
    static constexpr Block blocks[] = {expand_block<W, 1, PAIRS, O>, expand_block<W, 2, PAIRS, O>,
                                       expand_block<W, 3, PAIRS, O>, expand_block<W, 4, PAIRS, O>,
                                       expand_block<W, 5, PAIRS, O>, expand_block<W, 6, PAIRS, O>};
    blocks[tokens - 1](low, low_stride, up, up_stride, rank, count, out, o);
}

// The outputs [begin, end); out [count] rows
template <class W, class O>
void expand(const float* low, int64_t low_stride, const W* up, int64_t up_stride, int rank, int count, O* const* out,
            int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end;) {
        const int64_t left = end - o;
        const W* const columns = up + o;
        if (left >= WIDE * STEP) {
            if (left >= 2 * WIDE * STEP)
                for (int r = 0; r < rank; r++)
                    for (int i = 0; i < WIDE * STEP; i += LINE / (int)sizeof(W))
                        __builtin_prefetch(columns + r * up_stride + WIDE * STEP + i);
            expand_tokens<W, WIDE>(low, low_stride, columns, up_stride, rank, 0, count, out, o);
            o += WIDE * STEP;
        } else if (left >= STEP) {
            expand_tokens<W, 1>(low, low_stride, columns, up_stride, rank, 0, count, out, o);
            o += STEP;
        } else {
            expand_tokens<W, 0>(low, low_stride, columns, up_stride, rank, (int)left, count, out, o);
            o = end;
        }
    }
}

template <class W>
struct Products {
    int out_dtype, x_dtype;
    void* out;
    const void* x;
    const W *down, *up;
    const int32_t *starts, *ranks;
    const Plan& plan;
    const Shape& s;
    float* low;  // [tokens with adapters, parts, rank]

    void run(int threads) const {
        if (threads == 1 || (int64_t)plan.pieces.size() >= 2 * threads)
            parallel::for_each(threads, plan.pieces.size(), [&](int64_t i) { multiply(plan.pieces[i]); });
        else
            multiply_together(threads);
    }

   private:
    void multiply(const Piece& p) const {
        const float* const inputs = arranged(p);
        for (int64_t part = 0; part < s.parts; part++) {
            shrink({p, part, 0, rank_of(p, part)}, inputs);
            if (rank_of(p, part) > 0) expand({p, part, starts[part], starts[part + 1]});
        }
    }

    void multiply_together(int threads) const {
        static thread_local std::vector<Share> rows, outputs;
        rows.clear();
        outputs.clear();
        for (const Piece& p : plan.pieces)
            for (int64_t part = 0; part < s.parts; part++) {
                if (rank_of(p, part) == 0) continue;
                divide(rows, {p, part, 0, rank_of(p, part)}, SHARED_ROWS);
                divide(outputs, {p, part, starts[part], starts[part + 1]}, SHARED_OUTPUTS);
            }
        // Other threads have vectors of their own.
        const Share *const row = rows.data(), *const output = outputs.data();
        parallel::for_each(threads, rows.size(), [&](int64_t i) { shrink(row[i], arranged(row[i].piece)); });
        parallel::for_each(threads, outputs.size(), [&](int64_t i) { expand(output[i]); });
    }

    static void divide(std::vector<Share>& shares, Share all, int64_t size) {
        for (int64_t begin = all.begin; begin < all.end; begin += size)
            shares.push_back({all.piece, all.part, begin, std::min(begin + size, all.end)});
    }

    // Inputs of a piece's tokens, [count, stride]
    float* arranged(const Piece& p) const {
        static thread_local std::vector<float> memory;
        float* const inputs = aligned_memory(memory, p.count * stride());
        with_dtype(x_dtype, [&](auto type) {
            typedef decltype(type) T;
            for (int t = 0; t < p.count; t++)
                arrange<W>((const T*)x + plan.order[p.first + t] * s.x_stride, s.inputs, inputs + t * stride());
        });
        return inputs;
    }

    void shrink(const Share& rows, const float* inputs) const {
        const W* const weights = down + (rows.piece.slot * s.parts + rows.part) * s.rank * s.inputs;
        ::shrink(inputs, stride(), weights, low_of(rows), s.parts * s.rank, rows.piece.count, s.inputs, rows.begin,
                 rows.end);
    }

    void expand(const Share& outputs) const {
        const Piece& p = outputs.piece;
        with_dtype(out_dtype, [&](auto type) {
            typedef decltype(type) O;
            O* tokens[MAX_TOKENS];
            for (int t = 0; t < p.count; t++) tokens[t] = (O*)out + plan.order[p.first + t] * s.out_stride;
            ::expand(low_of(outputs), s.parts * s.rank, up + p.slot * s.rank * s.outputs, s.outputs,
                     rank_of(p, outputs.part), p.count, tokens, outputs.begin, outputs.end);
        });
    }

    int rank_of(const Piece& p, int64_t part) const { return ranks[p.slot * s.parts + part]; }
    int64_t stride() const { return (s.inputs + REGISTER_LANES - 1) / REGISTER_LANES * REGISTER_LANES; }
    float* low_of(const Share& share) const { return low + (share.piece.first * s.parts + share.part) * s.rank; }
};

template <class W>
void add_adapters(int out_dtype, int x_dtype, void* out, const void* x, const void* down, const void* up,
                  const int32_t* starts, const int32_t* ranks, const Plan& plan, const Shape& s, int threads) {
    static thread_local std::vector<float> memory;
    float* const low = aligned_memory(memory, plan.order.size() * s.parts * s.rank);
    Products<W>{out_dtype, x_dtype, out, x, (const W*)down, (const W*)up, starts, ranks, plan, s, low}.run(threads);
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
    with_dtype(weight_dtype, [&](auto type) {
        add_adapters<decltype(type)>(out_dtype, x_dtype, out, x, down, up, starts, ranks, plan, shape, threads);
    });
}

PAGEWIRE_REPLAYABLE(add_adapters)
