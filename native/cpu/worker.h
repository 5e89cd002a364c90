// What a kernel sees of the threads that run it. Includes nothing that emits code: see kernels.h.
#pragma once

#include <stdint.h>

namespace ferrum::cpu {

class Pool;

// One thread's view of a running submission. Every thread calls the same members in the same order.
class Worker {
   public:
    Worker(Pool &pool, unsigned index) : pool_(pool), index_(index) {}
    unsigned index() const { return index_; }
    // Waits until every thread is here.
    void barrier();
    // Opens the next shared loop over [0, n); then `take` hands out ranges of at most `grain` until it returns false.
    void open(uint64_t n, uint64_t grain);
    bool take(uint64_t &begin, uint64_t &end);

    // Runs body(i) for every i in [0, n), shared between the threads; no barrier at the end.
    template <class Body>
    void for_each(uint64_t n, uint64_t grain, Body &&body) {
        open(n, grain);
        for (uint64_t begin, end; take(begin, end);)
            for (uint64_t i = begin; i < end; i++) body(i);
    }

   private:
    Pool &pool_;
    unsigned index_;
    unsigned loop_ = 0;
    uint64_t n_ = 0, grain_ = 1;
};

}  // namespace ferrum::cpu
