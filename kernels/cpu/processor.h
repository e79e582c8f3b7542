// What decides between ways to compute besides the instructions that a processor has.
#pragma once

// Whether products of bf16 are faster as products of floats than as AVX512-BF16's dot products of pairs. Intel's cores
// (without the matrix unit, which beats both) begin a dot product every other cycle but two vectors of float products
// in each, AMD's as many of one as of the other.
inline bool floats_beat_bf16_pairs() {
#if defined(__AVX512BF16__)
    static const bool result = __builtin_cpu_is("intel");
    return result;
#else
    return true;
#endif
}
