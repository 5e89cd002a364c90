// What a kernel sees of the threads that run it. Includes nothing that emits code: see kernels.h.
#pragma once

#include <stdint.h>

namespace ferrum::cpu {

struct Job;

// One thread's way through a submission. It may come late, when the buffers of the call are gone: so a kernel touches
// memory inside of items only; outside it reads its Call and params. Every thread that takes part makes the same calls
// in the same order, so it knows without asking how many items there are up to any point.
class Worker {
   public:
    Worker(Job &job, unsigned index, unsigned threads) : job_(job), index_(index), threads_(threads) {}
    // Of the thread: for memory of its own.
    unsigned index() const { return index_; }

    // Runs body(i) for every i in [0, n), shared between the threads; returns when there is nothing left to take.
    template <class Body>
    void for_each(uint64_t n, uint64_t grain, Body &&body) {
        uint64_t done = 0;
        for (uint64_t begin, end; take(n, grain, begin, end); done += end - begin)
            for (uint64_t i = begin; i < end; i++) body(i);
        close(n, done);
    }
    // The same by ranges, body(begin, end), for items of equal cost that lie one behind another in memory: each thread
    // goes through its own share, from its start on, and then helps others with theirs.
    template <class Body>
    void for_ranges(uint64_t n, Body &&body) {
        uint64_t done = 0;
        for (uint64_t begin, end; take_range(n, begin, end); done += end - begin) body(begin, end);
        close(n, done);
    }
    // Where this thread's share of n items starts and ends.
    uint64_t share(uint64_t n) const { return n * index_ / threads_; }
    uint64_t share_end(uint64_t n) const { return n * (index_ + 1) / threads_; }
    // Waits until every item of every loop so far is done.
    void barrier();

   private:
    bool take(uint64_t n, uint64_t grain, uint64_t &begin, uint64_t &end);
    bool take_range(uint64_t n, uint64_t &begin, uint64_t &end);
    bool take_all(uint64_t n, uint64_t &begin, uint64_t &end);
    void close(uint64_t n, uint64_t done);

    Job &job_;
    unsigned index_, threads_;
    unsigned loop_ = 0;
    uint64_t opened_ = 0;
};

}  // namespace ferrum::cpu
