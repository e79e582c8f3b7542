// Data parallelism for work of a few microseconds on cores that others use too.
//
// A piece of work is cut into chunks that the calling thread and its helpers take one by one. Unlike an OpenMP team,
// no helper has to turn up: a helper that is asleep or has lost its core costs nothing, since the caller takes the
// chunks itself; it only waits for chunks that a helper has begun. Helpers watch for new work for a moment after the
// last, as layers follow each other within microseconds, and then sleep.

#pragma once

#include <cstdint>

namespace parallel {

using Body = void (*)(void* context, int64_t chunk);

// Runs body(context, 0 .. chunks - 1), in any order, on up to `threads` threads; returns when all are done.
void run(int threads, int64_t chunks, Body body, void* context);

template <class F>
void for_each(int threads, int64_t chunks, F&& f) {
    if (threads <= 1 || chunks <= 1) {
        for (int64_t i = 0; i < chunks; i++) f(i);
        return;
    }
    run(threads, chunks, [](void* context, int64_t chunk) { (*(F*)context)(chunk); }, (void*)&f);
}

}  // namespace parallel
