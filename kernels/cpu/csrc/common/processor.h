// What decides between ways to compute besides the instructions that a processor has.
#pragma once

#include <cstdint>

// How bf16 is multiplied: FASTEST is what fits the machine, with its matrix unit if it has one; tests ask for the
// others.
enum Bf16Form : int { FASTEST = 0, PAIRS = 1, FLOATS = 2, FIXED_POINT = 3 };
inline Bf16Form bf16_form = FASTEST;

// Whether a token's numbers are to be the same bit by bit whatever it is computed together with: then no way to compute
// is chosen by how many tokens there are.
inline bool batch_invariant = false;

inline bool is_intel() {
#if defined(__x86_64__) && !defined(PAGEWIRE_PORTABLE)
    static const bool is = __builtin_cpu_is("intel");
    return is;
#else
    return false;
#endif
}

// Whether products of bf16 are faster as products of floats than as AVX512-BF16's dot products of pairs. Measured: an
// Intel core (Emerald Rapids; with the matrix unit, which beats both, it does not matter) begins a dot product every
// other cycle, but two vectors of float products in each. AMD's cores begin as many of one as of the other.
inline bool floats_beat_bf16_pairs() {
#if defined(__AVX512BF16__)
    return bf16_form == FASTEST ? is_intel() : bf16_form != PAIRS;
#else
    return true;
#endif
}

// Whether this many tokens are multiplied with quantized weights in fixed point (fixed_point.h) where there is no
// matrix unit. `least` is from how many on that is faster, since they share what converting the weights takes; measured
// on that core, with AVX-512 and compiled without. AMD's were not measured: both ways' dot products, which are what
// takes time, are alike on them, too.
inline bool in_fixed_point(int64_t tokens, int64_t least) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    if (batch_invariant) return false;
    return bf16_form == FASTEST ? tokens >= least : bf16_form == FIXED_POINT;
#else
    return false;
#endif
}

// Whether attention of many rows to bf16 is multiplied in fixed point (attention_prefill_fixed.h) where there is no
// matrix unit. Measured on that core: it begins as many products of 32 pairs of integers as of 16 floats.
inline bool attention_in_fixed_point() {
#if defined(__AVX512VNNI__)
    return bf16_form == FASTEST ? is_intel() : bf16_form == FIXED_POINT;
#else
    return false;
#endif
}
