// Persistent threads that help with a submission.
//
// Nobody waits for a thread, only for items: a thread that the system has put aside holds nobody up unless it is in the
// middle of one, and when it comes back it finds nothing left and moves on. So a job lives until the last thread has
// left it, though its caller went on when the last item was done.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "worker.h"

namespace ferrum::cpu {

// Work for all threads: subclasses hold everything that `run` reads outside of items.
struct Job {
    Job(unsigned loops, unsigned threads) : loops_(loops), taken_(size_t(loops) * threads) {}
    virtual ~Job() = default;
    virtual void run(Worker &worker) = 0;
    // Called again and again by a thread that has left `run` and finds no next job yet: a chance to fetch what a job
    // like this one would read first. May not touch what the caller owned. False: nothing more to do.
    struct Cursor {
        uint64_t part = 0, offset = 0, bytes = 0;
    };
    virtual bool warm_up(Cursor &) { return false; }

    // Items of a shared loop that threads have taken: in all, or of each thread's share.
    std::atomic<uint64_t> &taken(unsigned loop, unsigned thread) { return taken_[size_t(thread) * loops_ + loop]; }
    alignas(64) std::atomic<uint64_t> done{0};  // items done in all loops

   private:
    const unsigned loops_;
    std::vector<std::atomic<uint64_t>> taken_;  // thread by thread, who mostly meets its own
};

// On the calling thread, whatever number the job was made for.
void run_alone(Job &job);

class Pool {
   public:
    // `threads` counts the caller's: one means no thread of our own. Fails if the system has no more of them.
    explicit Pool(unsigned threads);
    ~Pool();
    unsigned threads() const { return unsigned(workers_.size()) + 1; }
    // Returns when every item is done. One call at a time: callers hold a lock.
    void run(std::shared_ptr<Job> job);

   private:
    void serve(unsigned index);
    void stop();

    std::mutex mutex_;
    std::condition_variable wake_;
    std::shared_ptr<Job> job_;
    alignas(64) std::atomic<uint64_t> generation_{0};
    unsigned sleeping_ = 0;
    bool stop_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace ferrum::cpu
