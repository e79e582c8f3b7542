#include "common/parallel.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace {

using Time = std::chrono::steady_clock::time_point;

constexpr auto WATCH_TIME = std::chrono::microseconds(60);
constexpr auto TURN = std::chrono::microseconds(80);  // of a helper
constexpr int MAX_HELPERS = 255;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// One piece of work at a time. `epoch` is odd while it may be entered. A helper counts itself in and then looks at the
// epoch again; the caller makes the epoch even and then looks at the count: in the one order of sequentially consistent
// operations either the helper sees that it is late, or the caller sees the helper and waits for it.
struct Pool {
    std::atomic<uint32_t> epoch{0};
    std::atomic<int> inside{0};
    std::atomic<int> asleep{0};
    std::atomic<int64_t> next{0};
    int64_t chunks = 0;
    int wanted = 0;  // helpers that this work is for
    parallel::Body body = nullptr;
    void* context = nullptr;
    std::mutex busy;
    int helpers = 0;

    void work() {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) body(context, i);
    }

    // Returns whether a helper's turn has ended before the work.
    bool work_until(Time turn_end) {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
            body(context, i);
            if (std::chrono::steady_clock::now() >= turn_end) return true;
        }
        return false;
    }

    // Returns the first odd epoch other than `seen`.
    uint32_t wait_for_work(uint32_t seen) {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 1;; i++) {
            const uint32_t now = epoch.load(std::memory_order_acquire);
            if (now % 2 && now != seen) return now;
            relax();
            if (i % 64 || std::chrono::steady_clock::now() - start < WATCH_TIME) continue;
            asleep.fetch_add(1);
            syscall(SYS_futex, (uint32_t*)&epoch, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
            asleep.fetch_sub(1);
        }
    }

    // A helper offers its core between chunks, when the caller does not wait for it: what takes the core in the middle
    // of one holds up the caller, too.
    void help(int index) {
        Time turn_end{};
        for (uint32_t seen = 0;;) {
            seen = wait_for_work(seen);
            for (bool goes_on = true; goes_on;) {
                inside.fetch_add(1);
                goes_on = epoch.load() == seen && index < wanted && work_until(turn_end);
                inside.fetch_sub(1);
                if (!goes_on) break;
                sched_yield();
                turn_end = std::chrono::steady_clock::now() + TURN;
            }
        }
    }

    void start_helpers(int count) {
        for (; helpers < count && helpers < MAX_HELPERS; helpers++)
            std::thread([this, index = helpers] { help(index); }).detach();
    }

    void run(int threads, int64_t count, parallel::Body f, void* f_context) {
        start_helpers(threads - 1);
        body = f;
        context = f_context;
        chunks = count;
        wanted = threads - 1;
        next.store(0, std::memory_order_relaxed);
        epoch.fetch_add(1);
        if (asleep.load() > 0) syscall(SYS_futex, (uint32_t*)&epoch, FUTEX_WAKE_PRIVATE, wanted, nullptr, nullptr, 0);
        work();
        epoch.fetch_add(1);
        for (int i = 0; inside.load() > 0; i++) {
            if (i < 1000) relax();
            else sched_yield();
        }
    }
};

// Never destroyed: helpers outlive the end of main().
Pool& pool() {
    static Pool* const instance = new Pool;
    return *instance;
}

}  // namespace

void parallel::run(int threads, int64_t chunks, Body body, void* context) {
    std::unique_lock<std::mutex> lock(pool().busy, std::try_to_lock);
    if (!lock) {  // another thread computes: the cores are taken
        for (int64_t i = 0; i < chunks; i++) body(context, i);
        return;
    }
    pool().run(threads, chunks, body, context);
}
