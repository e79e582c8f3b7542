// Attention over a paged KV cache: cut into tiles (attention_plan.h), which threads work off (attention_run.h).

#include "attention/attention_run.h"
#include "common/replay.h"

constexpr int64_t SERIAL_WORK = 100'000;  // multiply-adds below which another thread gains nothing

namespace {

void attend(const Problem& p, int kv_dtype, int threads) {
    const Plan plan = Planner(p, threads).plan();
    if (plan.tiles.empty()) return;
    if (plan.work < SERIAL_WORK) threads = 1;
    if (kv_dtype == FLOAT8_E4M3) return run_plan_fp8(p, plan, threads);
    if (kv_dtype == INT8) return run_plan_int8(p, plan, threads);
#if defined(__AVX512BF16__)
    if (p.output_dtype == BFLOAT16 && kv_dtype == BFLOAT16) return run_plan<Bf16Pair, bf16>(p, plan, threads);
#endif
    with_dtype(kv_dtype, [&](auto t) { run_plan<Fp32, decltype(t)>(p, plan, threads); });
}

}  // namespace

extern "C" void pagewire_paged_attention(int query_dtype, int output_dtype, int kv_dtype, const void* query,
                                         const void* kv_cache, void* output, const int32_t* block_table,
                                         const int32_t* query_start,
                                         const int32_t* seq_lens, const void* kv_scales,
                                         const float* sinks, int64_t query_stride, int64_t query_head_stride,
                                         int64_t block_stride, int64_t table_stride, int num_requests, int num_heads,
                                         int num_kv_heads, int head_dim, int block_size, float scale, int window,
                                         float soft_cap, int threads) {
    const int64_t head_size = (int64_t)block_size * head_dim;  // of a head's keys in a page
    const Problem p = {(const char*)query, (const char*)kv_cache, (char*)output, block_table, query_start, seq_lens,
                       kv_dtype == INT8 ? nullptr : (const float*)kv_scales,
                       kv_dtype == INT8 ? (const bf16*)kv_scales : nullptr, sinks, query_stride, query_head_stride,
                       block_stride, table_stride, head_size, num_kv_heads * head_size, num_requests, num_heads,
                       num_kv_heads, head_dim, head_dim, block_size, scale, soft_cap, window, query_dtype,
                       output_dtype};
    attend(p, kv_dtype, threads);
}

// As KV heads that share their pages: groups of at most FEW_ROWS heads, so that threads can share a request's.
extern "C" void pagewire_latent_attention(int dtype, const void* query, const void* kv_cache, void* output,
                                          const int32_t* block_table, const int32_t* query_start,
                                          const int32_t* seq_lens, int64_t query_stride, int64_t query_head_stride,
                                          int64_t block_stride, int64_t table_stride, int num_requests, int num_heads,
                                          int head_dim, int value_dim, int block_size, float scale, int threads) {
    int groups = 1;
    while (num_heads % groups || num_heads / groups > FEW_ROWS) groups++;
    const Problem p = {(const char*)query, (const char*)kv_cache, (char*)output, block_table, query_start, seq_lens,
                       nullptr, nullptr, nullptr, query_stride, query_head_stride, block_stride, table_stride, 0, 0,
                       num_requests, num_heads, groups, head_dim, value_dim, block_size, scale, 0.0f, 0, dtype, dtype};
    attend(p, dtype, threads);
}

PAGEWIRE_REPLAYABLE(paged_attention)
PAGEWIRE_REPLAYABLE(latent_attention)
