#include "pool.h"

#include <sched.h>

namespace ferrum::cpu {

namespace {

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// Launches follow each other within microseconds, so spinning beats sleeping; but a core may be missing or busy with
// someone else's work, so after a while the spinner lets others run.
constexpr int kSpins = 4000;

template <class Done>
void spin_until(Done done) {
    for (int i = 0; !done(); i++) {
        if (i < kSpins)
            pause();
        else
            sched_yield();
    }
}

}  // namespace

void Worker::barrier() {
    if (pool_.count_ == 1) return;
    const uint64_t phase = pool_.phase_.load(std::memory_order_relaxed);
    if (pool_.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == pool_.count_) {
        pool_.arrived_.store(0, std::memory_order_relaxed);
        pool_.phase_.store(phase + 1, std::memory_order_release);
    } else {
        spin_until([&] { return pool_.phase_.load(std::memory_order_acquire) != phase; });
    }
}

void Worker::open(uint64_t n, uint64_t grain) {
    n_ = n;
    grain_ = grain;
    loop_++;
}

bool Worker::take(uint64_t &begin, uint64_t &end) {
    begin = pool_.counters_[loop_ - 1].next.fetch_add(grain_, std::memory_order_relaxed);
    if (begin >= n_) return false;
    end = begin + grain_ < n_ ? begin + grain_ : n_;
    return true;
}

Pool::Pool(unsigned threads) : count_(threads) {
    for (unsigned i = 1; i < count_; i++) workers_.emplace_back([this, i] { serve(i); });
}

Pool::~Pool() {
    if (abandoned_) {
        new std::vector<std::thread>(std::move(workers_));  // never joined: destroying them would end the process
        return;
    }
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread &worker : workers_) worker.join();
}

void Pool::run(Body body, void *context, unsigned loops) {
    if (counters_.size() < loops) counters_ = std::vector<Counter>(loops * 2);
    for (unsigned i = 0; i < loops; i++) counters_[i].next.store(0, std::memory_order_relaxed);
    body_ = body;
    context_ = context;
    running_.store(count_ - 1, std::memory_order_relaxed);
    bool anyone_sleeps = false;
    if (count_ > 1) {
        std::lock_guard lock(mutex_);
        job_.fetch_add(1, std::memory_order_release);
        anyone_sleeps = sleeping_ > 0;
    }
    if (anyone_sleeps) wake_.notify_all();
    Worker worker(*this, 0);
    body(context, worker);
    spin_until([&] { return running_.load(std::memory_order_acquire) == 0; });
}

void Pool::serve(unsigned index) {
    for (uint64_t seen = 0;; seen++) {
        for (int i = 0; i < kSpins && job_.load(std::memory_order_acquire) == seen; i++) pause();
        if (job_.load(std::memory_order_acquire) == seen) {
            std::unique_lock lock(mutex_);
            sleeping_++;
            wake_.wait(lock, [&] { return stop_ || job_.load(std::memory_order_acquire) != seen; });
            sleeping_--;
            if (job_.load(std::memory_order_acquire) == seen) return;  // stopped
        }
        Worker worker(*this, index);
        body_(context_, worker);
        running_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace ferrum::cpu
