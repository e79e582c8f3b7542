// Sums and copies between the processes of one machine, through memory that they share. `channel.py` says what
// a channel is and how ranks take turns.

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>

#include "common/parallel.h"
#include "common/registers.h"
#include "common/replay.h"

namespace {

// As in channel.py.
constexpr int64_t LINE_BYTES = 64, PAGE_BYTES = 4096, SLOT_BYTES = 1 << 20;
constexpr int64_t CHUNK = 16384;  // elements, or bytes of a copy, that one thread takes at a time

using Clock = std::chrono::steady_clock;
// A rank waits so long for a late peer before it sleeps; meanwhile it yields its core to threads that are ready.
constexpr auto WATCH_TIME = std::chrono::microseconds(500);
constexpr timespec SLEEP = {0, 20'000'000};  // between checks of whether the group has ended

struct alignas(LINE_BYTES) Line {
    std::atomic<uint32_t> turn;    // that this rank has begun; the first line's `turn` is not 0 once no rank may go on
    std::atomic<uint32_t> asleep;  // ranks that sleep until it changes
    std::atomic<uint64_t> waited;  // nanoseconds that this rank has waited for others
    int64_t meaning[2];            // of the slot of an even turn, and of an odd one: all ranks mean the same
};
static_assert(sizeof(Line) == LINE_BYTES);

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Channel {
    Line* lines;  // [1 + size]
    char* slots;  // [size, 2, SLOT_BYTES]
    int rank, size;

    Channel(void* memory, int rank, int size) : lines((Line*)memory), rank(rank), size(size) {
        const int64_t header = ((1 + size) * LINE_BYTES + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
        slots = (char*)memory + header;
    }

    Line& line(int of) { return lines[1 + of]; }
    char* slot(int of, uint32_t turn) { return slots + (of * 2 + turn % 2) * SLOT_BYTES; }
    bool has_ended() { return lines[0].turn.load(std::memory_order_relaxed) != 0; }

    static bool has_begun(Line& peer, uint32_t turn) {
        return (int32_t)(peer.turn.load(std::memory_order_acquire) - turn) >= 0;  // turns may start again from 0
    }

    // False: the group has ended.
    bool await(int of, uint32_t turn) {
        Line& peer = line(of);
        if (has_begun(peer, turn)) return true;
        const auto start = Clock::now();
        const bool is_there = watch(peer, turn, start) || sleep(peer, turn);
        const auto waited = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
        line(rank).waited.fetch_add(waited, std::memory_order_relaxed);
        return is_there;
    }

    bool watch(Line& peer, uint32_t turn, Clock::time_point start) {
        for (int i = 1; i <= 256; i++, relax())
            if (has_begun(peer, turn)) return true;
        // There may be fewer cores than ranks: the peer may need this one.
        while (!has_begun(peer, turn)) {
            if (has_ended() || Clock::now() - start > WATCH_TIME) return false;
            sched_yield();
        }
        return true;
    }

    bool sleep(Line& peer, uint32_t turn) {
        while (!has_ended()) {
            peer.asleep.fetch_add(1);  // before the turn is read: a rank that changes it reads this afterwards
            const uint32_t now = peer.turn.load();
            if ((int32_t)(now - turn) < 0)
                syscall(SYS_futex, (uint32_t*)&peer.turn, FUTEX_WAIT, now, &SLEEP, nullptr, 0);
            peer.asleep.fetch_sub(1);
            if (has_begun(peer, turn)) return true;
        }
        return false;
    }

    // Takes the next turn: what was written two turns ago may be written over now. False: the group has ended.
    bool enter(uint32_t& turn) {
        turn = line(rank).turn.load(std::memory_order_relaxed) + 1;
        for (int peer = 0; peer < size; peer++)
            if (!await(peer, turn - 1)) return false;  // a rank that has begun it has read what was written before it
        return true;
    }

    void begin(uint32_t turn, int64_t meaning) {
        Line& own = line(rank);
        own.meaning[turn % 2] = meaning;
        own.turn.store(turn);
        if (own.asleep.load() > 0) syscall(SYS_futex, (uint32_t*)&own.turn, FUTEX_WAKE, size, nullptr, nullptr, 0);
    }

    // What `of` has written for this turn is there. Ranks that do not do the same end the group.
    bool arrived(int of, uint32_t turn, int64_t meaning) {
        if (!await(of, turn)) return false;
        if (line(of).meaning[turn % 2] == meaning) return true;
        uint32_t running = 0;
        lines[0].turn.compare_exchange_strong(running, 2);
        return false;
    }
};

enum Kind : int64_t { EXCHANGE = 0, SUM = 1, GATHER = 2, COPY = 3 };

int64_t meaning_of(Kind kind, int64_t bytes) { return bytes * 4 + kind; }

template <class F>
void in_chunks(int threads, int64_t count, F&& function) {
    parallel::for_each(threads, (count + CHUNK - 1) / CHUNK,
                       [&](int64_t chunk) { function(chunk * CHUNK, std::min(count, (chunk + 1) * CHUNK)); });
}

void copy(void* to, const void* from, int64_t bytes, int threads) {
    in_chunks(threads, bytes, [&](int64_t begin, int64_t end) {
        std::memcpy((char*)to + begin, (const char*)from + begin, end - begin);
    });
}

// x [count] += those of the other ranks, in the order of ranks
template <class T>
bool sum(Channel& channel, T* x, int64_t count, int threads) {
    uint32_t turn;
    const int64_t meaning = meaning_of(SUM, count * sizeof(T));
    if (!channel.enter(turn)) return false;
    copy(channel.slot(channel.rank, turn), x, count * sizeof(T), threads);
    channel.begin(turn, meaning);
    for (int of = 0; of < channel.size; of++)
        if (!channel.arrived(of, turn, meaning)) return false;
    in_chunks(threads, count, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i += REGISTER_LANES) {
            f32_register total = load_register((const T*)channel.slot(0, turn) + i, end - i);
            for (int of = 1; of < channel.size; of++)
                total += load_register((const T*)channel.slot(of, turn) + i, end - i);
            store_register(x + i, total, end - i);
        }
    });
    return true;
}

// out: rows of `stride` bytes, of which each rank has `row` bytes; this is about bytes `begin` to `end` of each
// rank's x.
bool gather(Channel& channel, const char* x, char* out, int64_t row, int64_t begin, int64_t end, int threads) {
    uint32_t turn;
    const int64_t meaning = meaning_of(GATHER, end - begin), stride = row * channel.size;
    if (!channel.enter(turn)) return false;
    copy(channel.slot(channel.rank, turn), x + begin, end - begin, threads);
    channel.begin(turn, meaning);
    for (int of = 0; of < channel.size; of++) {
        if (!channel.arrived(of, turn, meaning)) return false;
        const char* slot = channel.slot(of, turn);
        for (int64_t i = begin; i < end;) {
            const int64_t column = i % row, bytes = std::min(end - i, row - column);
            copy(out + i / row * stride + of * row + column, slot + (i - begin), bytes, threads);
            i += bytes;
        }
    }
    return true;
}

bool copy_from(Channel& channel, int root, char* x, int64_t bytes, int threads) {
    uint32_t turn;
    const int64_t meaning = meaning_of(COPY, bytes);
    if (!channel.enter(turn)) return false;
    if (channel.rank == root) copy(channel.slot(root, turn), x, bytes, threads);
    channel.begin(turn, meaning);
    if (channel.rank == root) return true;
    if (!channel.arrived(root, turn, meaning)) return false;
    copy(x, channel.slot(root, turn), bytes, threads);
    return true;
}

// Which rows go from rank to rank; what a rank sends is in the order of those that receive it.
struct Routes {
    const int32_t *rows, *starts;  // as of all_to_all
    int size;

    int64_t count(int from, int to) const {
        const int edge = to * size + from;
        return from == to ? 0 : starts[edge + 1] - starts[edge];
    }

    // Rows that `from` sends to ranks below `to`.
    int64_t before(int from, int to) const {
        int64_t total = 0;
        for (int below = 0; below < to; below++) total += count(from, below);
        return total;
    }

    int64_t most() const {
        int64_t most = 0;
        for (int from = 0; from < size; from++) most = std::max(most, before(from, size));
        return most;
    }

    // Equal, but for strange chance, where ranks mean the same.
    int64_t meaning() const {
        int64_t sum = 0;
        for (int i = 0; i <= size * size; i++) sum += (i + 1) * (int64_t)starts[i];
        return sum * 4 + EXCHANGE;
    }

    // Calls function(row, place) for rows from `from` to `to` with a place in [begin, end) among all that `from` sends.
    template <class F>
    void each(int from, int to, int64_t begin, int64_t end, int64_t row_bytes, int threads, F&& function) const {
        const int64_t first = before(from, to), stop = std::min(end, first + count(from, to));
        const int64_t start = std::max(begin, first), per_chunk = std::max<int64_t>(1, CHUNK / row_bytes);
        if (start >= stop) return;
        const int32_t* const chosen = rows + starts[to * size + from] - first;
        parallel::for_each(threads, (stop - start + per_chunk - 1) / per_chunk, [&](int64_t chunk) {
            const int64_t from_place = start + chunk * per_chunk, to_place = std::min(stop, from_place + per_chunk);
            for (int64_t place = from_place; place < to_place; place++) function((int64_t)chosen[place], place);
        });
    }
};

// Of what each rank sends, rows [begin, end).
bool exchange(Channel& channel, const Routes& routes, char* x, int64_t row, int64_t begin, int64_t end, int threads) {
    uint32_t turn;
    const int64_t meaning = routes.meaning();
    if (!channel.enter(turn)) return false;
    const int rank = channel.rank;
    char* const own = channel.slot(rank, turn);
    for (int to = 0; to < channel.size; to++)
        routes.each(rank, to, begin, end, row, threads, [&](int64_t index, int64_t place) {
            std::memcpy(own + (place - begin) * row, x + index * row, row);
        });
    channel.begin(turn, meaning);
    for (int from = 0; from < channel.size; from++) {
        const int64_t first = routes.before(from, rank), stop = first + routes.count(from, rank);
        if (first >= std::min(end, stop) || stop <= begin) continue;
        if (!channel.arrived(from, turn, meaning)) return false;
        const char* const slot = channel.slot(from, turn);
        routes.each(from, rank, begin, end, row, threads, [&](int64_t index, int64_t place) {
            std::memcpy(x + index * row, slot + (place - begin) * row, row);
        });
    }
    return true;
}

}  // namespace

extern "C" {

// x [count], in place
void pagewire_all_reduce(int dtype, void* x, int64_t count, void* memory, int rank, int size, int threads) {
    Channel channel(memory, rank, size);
    with_dtype(dtype, [&](auto t) {
        typedef decltype(t) T;
        constexpr int64_t MOST = SLOT_BYTES / sizeof(T);
        for (int64_t begin = 0; begin < count; begin += MOST)
            if (!sum(channel, (T*)x + begin, std::min(MOST, count - begin), threads)) return;
    });
}

// x: rows of `row` bytes, `bytes` in all; out: rows of size * row bytes
void pagewire_all_gather(const void* x, void* out, int64_t row, int64_t bytes, void* memory, int rank, int size,
                         int threads) {
    Channel channel(memory, rank, size);
    for (int64_t begin = 0; begin < bytes; begin += SLOT_BYTES) {
        const int64_t end = std::min(bytes, begin + SLOT_BYTES);
        if (!gather(channel, (const char*)x, (char*)out, row, begin, end, threads)) return;
    }
}

// x: rows of `row` bytes; rows, starts: as of the op
void pagewire_all_to_all(void* x, int64_t row, const int32_t* rows, const int32_t* starts, void* memory, int rank,
                         int size, int threads) {
    Channel channel(memory, rank, size);
    const Routes routes = {rows, starts, size};
    const int64_t most = routes.most(), per_turn = SLOT_BYTES / row;
    for (int64_t begin = 0; begin < most; begin += per_turn)
        if (!exchange(channel, routes, (char*)x, row, begin, begin + per_turn, threads)) return;
}

// x: `bytes`, in place
void pagewire_broadcast(void* x, int64_t bytes, int root, void* memory, int rank, int size, int threads) {
    Channel channel(memory, rank, size);
    for (int64_t begin = 0; begin < bytes; begin += SLOT_BYTES)
        if (!copy_from(channel, root, (char*)x + begin, std::min(SLOT_BYTES, bytes - begin), threads)) return;
}
}

PAGEWIRE_REPLAYABLE(all_reduce)
PAGEWIRE_REPLAYABLE(all_gather)
PAGEWIRE_REPLAYABLE(all_to_all)
PAGEWIRE_REPLAYABLE(broadcast)
