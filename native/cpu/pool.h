// Persistent threads. A submission runs on all of them at once; each walks the same list of launches.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "worker.h"

namespace ferrum::cpu {

class Pool {
   public:
    // `threads` counts the caller's: one means no thread of our own.
    explicit Pool(unsigned threads);
    ~Pool();
    unsigned threads() const { return count_; }
    using Body = void (*)(void *context, Worker &worker);
    // Runs body on every thread and returns when all are done; shared loops in it number at most `loops`.
    // One run at a time: callers hold a lock.
    void run(Body body, void *context, unsigned loops);
    // The process forked: the threads are not here, so they cannot be joined.
    void abandon() { abandoned_ = true; }

   private:
    friend class Worker;
    struct alignas(64) Counter {
        std::atomic<uint64_t> next{0};
    };
    void serve(unsigned index);

    unsigned count_;
    std::vector<Counter> counters_;
    Body body_ = nullptr;
    void *context_ = nullptr;
    alignas(64) std::atomic<uint64_t> job_{0};
    alignas(64) std::atomic<unsigned> running_{0};
    alignas(64) std::atomic<unsigned> arrived_{0};
    alignas(64) std::atomic<uint64_t> phase_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
    unsigned sleeping_ = 0;
    bool stop_ = false;
    bool abandoned_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace ferrum::cpu
