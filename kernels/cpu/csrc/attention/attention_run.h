// The run of a whole plan (attention_plan.h).
//
// Included by one source file per form of the cache: with more instances side by side, GCC optimises each of them less.
#pragma once

#include <atomic>

#include "attention/attention_decode_amx.h"
#include "attention/attention_decode_vector.h"
#include "attention/attention_prefill.h"
#include "attention/attention_prefill_fixed.h"
#include "common/gemm_amx.h"
#include "common/parallel.h"
#include "common/processor.h"

namespace {

// Prefill computes tiles with many rows; Products multiplies those with few.
template <class Prefill, class Products>
void run_tiles(const Problem& p, const Plan& plan, std::atomic<int>& remaining, float* partials) {
    Prefill prefill(p, plan.most_rows);
    DecodeWorker<Products> decode(p);
    // A thread takes its next tile early, so that the pages are on their way when it gets there.
    const auto has_few_rows = [&](int i) { return i >= 0 && p.has_few_rows(plan.tiles[i].request); };
    for (int i = --remaining; i >= 0;) {
        const int next = --remaining;
        if (has_few_rows(i)) {
            decode.run(plan.tiles[i], has_few_rows(next) ? &plan.tiles[next] : nullptr, partials);
        } else {
            prefill.run(plan.tiles[i], partials);
        }
        i = next;
    }
}

template <class M, class T>
void run_plan(const Problem& p, const Plan& plan, int threads) {
    static thread_local Scratch partial_memory;
    partial_memory.reserve(plan.partial_rows * partial_stride(p) * sizeof(float));
    float* const partials = (float*)partial_memory.data();
    const int num_tiles = (int)plan.tiles.size(), num_merges = (int)plan.merges.size();
    std::atomic<int> remaining{num_tiles};
    // One chunk per thread, not per tile: a worker's scratch memory serves all the tiles it takes.
    parallel::for_each(threads, std::min(threads, num_tiles), [&](int64_t) {
        if constexpr (M::PER_ELEMENT == 2) {
#if defined(PAGEWIRE_AMX)
            if (amx::permitted()) {
                const amx::TileRegisters registers;
                return run_tiles<PrefillWorker<AmxPair, T>, AmxProducts<T>>(p, plan, remaining, partials);
            }
#endif
#if defined(__AVX512VNNI__)
            if (attention_in_fixed_point())
                return run_tiles<FixedPrefillWorker<T>, VectorProducts<Fp32, T>>(p, plan, remaining, partials);
#endif
            if (floats_beat_bf16_pairs())
                return run_tiles<PrefillWorker<Fp32, T>, VectorProducts<Fp32, T>>(p, plan, remaining, partials);
        }
        run_tiles<PrefillWorker<M, T>, VectorProducts<M, T>>(p, plan, remaining, partials);
    });
    parallel::for_each(threads, num_merges, [&](int64_t i) { merge_partials(p, plan.merges[i], partials); });
}

}  // namespace
