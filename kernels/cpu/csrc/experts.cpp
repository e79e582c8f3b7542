// A mixture of experts: routing, sorting pairs of a token and an expert by expert, products per expert, weighted sums.
//
// The products are those of linear.cpp, linear_many.cpp, packed_linear.cpp and grouped.cpp, once per expert that has
// pairs: their rows are gathered before and scattered after, which costs little beside the weights.

#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "common/replay.h"
#include "common/rows.h"

extern "C" {
void pagewire_linear(int dtype, const void* x, const void* weight, const void* bias, void* out, int64_t tokens,
                     int64_t in, int64_t out_features, int threads);
void pagewire_linear_many(const float* x, const float* weight, const float* bias, float* out, int64_t tokens,
                          int64_t in, int64_t out_features, int threads);
void pagewire_packed_linear(int x_dtype, int is_fixed, int result_dtype, const void* x, const void* weight,
                            const void* bias, void* result, int64_t tokens, int64_t in, int64_t out, int threads);
void pagewire_grouped_linear(int dtype, int result_dtype, int exact, const void* x, const uint8_t* codes,
                             int scale_kind, const char* scales, int offset_kind, const char* offsets,
                             const float* codebook, const int32_t* permutation, const void* bias, void* result,
                             int64_t tokens, int64_t in,
                             int64_t out, int bits, int64_t group_size, int zero_point, int threads);
}

namespace {

// ---- routing ----

enum Scoring : int { SOFTMAX = 0, SIGMOID = 1, SOFTMAX_OF_CHOSEN = 2 };

struct Routing {
    const float* correction_bias;  // [experts] or null
    int experts, top_k;
    Scoring scoring;
    bool normalize;
    float scale;
    int groups, topk_groups, group_best;
};

// x [size] -> e^(x - max x), of which the sum is returned
float exponentials(float* x, int size) {
    const float peak = *std::max_element(x, x + size);
    float total = 0.0f;
    for (int i = 0; i < size; i += LANES) {
        const int count = std::min(LANES, size - i);
        store(x + i, exp2((load(x + i, count) - peak) * LOG2E), count);
        for (int lane = 0; lane < count; lane++) total += x[i + lane];
    }
    return total;
}

void softmax(float* x, int size) {
    const float factor = 1.0f / exponentials(x, size);
    for (int i = 0; i < size; i++) x[i] *= factor;
}

// The `count` largest of x [size], the first of equals first; ids of a NaN come last.
void largest(const float* x, int size, int count, int32_t* ids) {
    const auto before = [](float a, float b) { return a > b || (a == a && b != b); };
    for (int i = 0, found = 0; i < size; i++) {
        if (found == count && !before(x[i], x[ids[count - 1]])) continue;
        int at = found < count ? found++ : count - 1;
        for (; at > 0 && before(x[i], x[ids[at - 1]]); at--) ids[at] = ids[at - 1];
        ids[at] = i;
    }
}

// choice [experts]: those of groups that are not eligible become -inf
void limit_groups(const Routing& r, float* choice, std::vector<int32_t>& ids) {
    const int size = r.experts / r.groups;
    std::vector<float> best(r.groups);
    ids.resize(std::max(r.groups, r.group_best));
    for (int g = 0; g < r.groups; g++) {
        largest(choice + g * size, size, r.group_best, ids.data());
        for (int i = 0; i < r.group_best; i++) best[g] += choice[g * size + ids[i]];
    }
    largest(best.data(), r.groups, r.groups, ids.data());
    for (int i = r.topk_groups; i < r.groups; i++)
        std::fill_n(choice + ids[i] * size, size, -INFINITY);
}

// scores [experts]: a token's logits
void route(const Routing& r, float* scores, int32_t* ids, float* weights) {
    static thread_local std::vector<float> choice;
    static thread_local std::vector<int32_t> group_ids;
    if (r.scoring == SOFTMAX) softmax(scores, r.experts);
    if (r.scoring == SIGMOID)
        for (int i = 0; i < r.experts; i += LANES) {
            const int count = std::min(LANES, r.experts - i);
            store(scores + i, sigmoid(load(scores + i, count)), count);
        }
    choice.assign(scores, scores + r.experts);
    if (r.correction_bias)
        for (int e = 0; e < r.experts; e++) choice[e] += r.correction_bias[e];
    if (r.groups > 1) limit_groups(r, choice.data(), group_ids);
    largest(choice.data(), r.experts, r.top_k, ids);
    for (int i = 0; i < r.top_k; i++) weights[i] = scores[ids[i]];
    if (r.scoring == SOFTMAX_OF_CHOSEN) softmax(weights, r.top_k);
    float factor = r.scale;
    if (r.normalize) {
        float total = 0.0f;
        for (int i = 0; i < r.top_k; i++) total += weights[i];
        factor /= total + 1e-20f;
    }
    for (int i = 0; i < r.top_k; i++) weights[i] *= factor;
}

// ---- products ----

// Pairs sorted by expert, and the rows that go with them.
struct Pairs {
    const int32_t* order;   // [count]
    const int32_t* starts;  // [experts + 1]
    int experts;
    int64_t count, inputs;  // inputs: rows of x
    const char* x;
    char* result;
    int64_t x_bytes, result_bytes;  // of a row

    int64_t of(int expert) const { return starts[expert + 1] - starts[expert]; }
    const char* input(int64_t pair) const { return x + pair * inputs / count * x_bytes; }
};

// multiply(expert, rows, their results, how many, threads), the rows side by side
template <class F>
void multiply_expert(const Pairs& p, int expert, int threads, F&& multiply) {
    const int32_t* const pairs = p.order + p.starts[expert];
    const int64_t count = p.of(expert);
    if (count == 1) return multiply(expert, p.input(pairs[0]), p.result + pairs[0] * p.result_bytes, count, threads);
    static thread_local std::vector<char> memory;
    char* const rows = aligned_memory(memory, count * (p.x_bytes + p.result_bytes));
    char* const results = rows + count * p.x_bytes;
    for (int64_t i = 0; i < count; i++) __builtin_memcpy(rows + i * p.x_bytes, p.input(pairs[i]), p.x_bytes);
    multiply(expert, rows, results, count, threads);
    for (int64_t i = 0; i < count; i++)
        __builtin_memcpy(p.result + pairs[i] * p.result_bytes, results + i * p.result_bytes, p.result_bytes);
}

// An expert with many of the pairs keeps all threads busy; of the others, if they are many, each thread takes one at a
// time, as there is less to wait for.
template <class F>
void for_experts(const Pairs& p, int threads, F&& multiply) {
    constexpr int PER_THREAD = 4;
    std::vector<int> together, alone;
    for (int e = 0; e < p.experts; e++)
        if (const int64_t count = p.of(e)) (count * PER_THREAD * threads > p.count ? together : alone).push_back(e);
    if ((int64_t)alone.size() < PER_THREAD * threads) {
        together.insert(together.end(), alone.begin(), alone.end());
        alone.clear();
    }
    for (const int e : together) multiply_expert(p, e, threads, multiply);
    parallel::for_each(threads, alone.size(), [&](int64_t i) { multiply_expert(p, alone[i], 1, multiply); });
}

int64_t size_of(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

Pairs pairs_of(int dtype, const void* x, void* result, const int32_t* order, const int32_t* starts, int64_t count,
               int64_t inputs, int experts, int64_t in, int64_t out) {
    const int64_t size = size_of(dtype);
    return {order, starts, experts, count, inputs, (const char*)x, (char*)result, in * size, out * size};
}

}  // namespace

extern "C" {

// logits [tokens, experts] of dtype; ids, weights [tokens, top_k]
void pagewire_route_experts(int dtype, const void* logits, const float* correction_bias, int32_t* ids, float* weights,
                            int64_t tokens, int experts, int top_k, int scoring, int normalize, float scale, int groups,
                            int topk_groups, int group_best, int threads) {
    const Routing routing = {correction_bias, experts, top_k, (Scoring)scoring, (bool)normalize, scale,
                             groups, topk_groups, group_best};
    with_dtype(dtype, [&](auto t) {
        typedef decltype(t) T;
        for_rows(threads, tokens, [&](int64_t token) {
            static thread_local std::vector<float> scores;
            scores.resize(experts);
            const T* const row = (const T*)logits + token * experts;
            for (int i = 0; i < experts; i += LANES) {
                const int count = std::min(LANES, experts - i);
                store(scores.data() + i, load(row + i, count), count);
            }
            route(routing, scores.data(), ids + token * top_k, weights + token * top_k);
        });
    });
}

// ids [count] -> order [count], starts [experts + 1]
void pagewire_sort_by_expert(const int32_t* ids, int32_t* order, int32_t* starts, int64_t count, int experts) {
    std::fill_n(starts, experts + 1, 0);
    for (int64_t i = 0; i < count; i++) starts[ids[i] + 1]++;
    for (int e = 0; e < experts; e++) starts[e + 1] += starts[e];
    std::vector<int32_t> next(starts, starts + experts);
    for (int64_t i = 0; i < count; i++) order[next[ids[i]]++] = (int32_t)i;
}

// x [inputs, in], weight [experts, out, in], bias [experts, out] or null, result [count, out]
void pagewire_experts_linear(int dtype, const void* x, const char* weight, const char* bias, void* result,
                             const int32_t* order, const int32_t* starts, int64_t count, int64_t inputs, int experts,
                             int64_t in, int64_t out, int threads) {
    constexpr int64_t MAX_DIRECT = 31;  // rows; more than in linear.py, as an expert's weights come from memory
    const int64_t size = size_of(dtype);
    for_experts(pairs_of(dtype, x, result, order, starts, count, inputs, experts, in, out), threads,
                [&](int e, const char* rows, char* results, int64_t tokens, int threads) {
                    const char* const own_weight = weight + e * out * in * size;
                    const char* const own_bias = bias ? bias + e * out * size : nullptr;
                    if (dtype == FLOAT32 && tokens > MAX_DIRECT)
                        pagewire_linear_many((const float*)rows, (const float*)own_weight, (const float*)own_bias,
                                             (float*)results, tokens, in, out, threads);
                    else
                        pagewire_linear(dtype, rows, own_weight, own_bias, results, tokens, in, out, threads);
                });
}

// As pagewire_experts_linear in bf16, weight packed; expert_bytes: of one expert's
void pagewire_packed_experts_linear(const void* x, const char* weight, int is_fixed, const char* bias, void* result,
                                    const int32_t* order, const int32_t* starts, int64_t count, int64_t inputs,
                                    int experts, int64_t in, int64_t out, int64_t expert_bytes, int threads) {
    const int64_t size = size_of(BFLOAT16);
    for_experts(pairs_of(BFLOAT16, x, result, order, starts, count, inputs, experts, in, out), threads,
                [&](int e, const char* rows, char* results, int64_t tokens, int threads) {
                    pagewire_packed_linear(BFLOAT16, is_fixed, BFLOAT16, rows, weight + e * expert_bytes,
                                           bias ? bias + e * out * size : nullptr, results, tokens, in, out, threads);
                });
}

// As pagewire_experts_linear; code_bytes, scale_bytes, offset_bytes: of one expert's
void pagewire_grouped_experts_linear(int dtype, const void* x, const uint8_t* codes, int64_t code_bytes, int scale_kind,
                                     const char* scales, int64_t scale_bytes, int offset_kind, const char* offsets,
                                     int64_t offset_bytes, const float* codebook, const char* bias, void* result,
                                     const int32_t* order, const int32_t* starts, int64_t count, int64_t inputs,
                                     int experts, int64_t in, int64_t out, int bits, int64_t group_size, int zero_point,
                                     int threads) {
    const int64_t size = size_of(dtype);
    for_experts(pairs_of(dtype, x, result, order, starts, count, inputs, experts, in, out), threads,
                [&](int e, const char* rows, char* results, int64_t tokens, int threads) {
                    pagewire_grouped_linear(dtype, dtype, dtype == FLOAT32, rows, codes + e * code_bytes, scale_kind,
                                            scales + e * scale_bytes, offset_kind,
                                            offsets ? offsets + e * offset_bytes : nullptr, codebook,
                                            nullptr, bias ? bias + e * out * size : nullptr, results, tokens, in, out,
                                            bits, group_size, zero_point, threads);
                });
}

// y [tokens, top_k, size], weights [tokens, top_k] -> result [tokens, size]
void pagewire_combine_experts(int dtype, const void* y, const float* weights, void* result, int64_t tokens, int top_k,
                              int64_t size, int threads) {
    with_dtype(dtype, [&](auto t) {
        typedef decltype(t) T;
        for_rows(threads, tokens, [&](int64_t token) {
            const T* const rows = (const T*)y + token * top_k * size;
            for (int64_t i = 0; i < size; i += REGISTER_LANES) {
                f32_register sum = {};
                for (int j = 0; j < top_k; j++) {
                    const float weight = weights[token * top_k + j];
                    if (weight != 0) sum += load_register(rows + j * size + i, (int)(size - i)) * weight;
                }
                store_register((T*)result + token * size + i, sum, (int)(size - i));
            }
        });
    });
}
}

PAGEWIRE_REPLAYABLE(route_experts)
PAGEWIRE_REPLAYABLE(sort_by_expert)
PAGEWIRE_REPLAYABLE(experts_linear)
PAGEWIRE_REPLAYABLE(packed_experts_linear)
PAGEWIRE_REPLAYABLE(grouped_experts_linear)
PAGEWIRE_REPLAYABLE(combine_experts)
