// Attention over pages in int8 with a scale per token.

#include "attention/attention_run.h"

void run_plan_int8(const Problem& p, const Plan& plan, int threads) {
#if defined(__AVX512BF16__)
    if (p.output_dtype == BFLOAT16) return run_plan<Bf16Pair, i8>(p, plan, threads);
#endif
    run_plan<Fp32, i8>(p, plan, threads);
}
