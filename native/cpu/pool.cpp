#include "pool.h"

#include <sched.h>

#include <system_error>

#include "../core/error.h"

namespace ferrum::cpu {

namespace {

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// Launches and calls follow each other within microseconds, so spinning beats sleeping. Someone who waits for items
// longer than this waits for a thread that was put aside: let it run.
constexpr int kSpinsBeforeYield = 1000;
constexpr int kSpinsBeforeSleep = 4000;

}  // namespace

bool Worker::take(uint64_t n, uint64_t grain, uint64_t &begin, uint64_t &end) {
    if (threads_ == 1) return take_all(n, begin, end);
    std::atomic<uint64_t> &next = job_.taken(loop_, 0);
    if (next.load(std::memory_order_relaxed) >= n) return false;
    begin = next.fetch_add(grain, std::memory_order_relaxed);
    if (begin >= n) return false;
    end = begin + grain < n ? begin + grain : n;
    return true;
}

// Of a share, always the same part of what is left: long ranges first, short ones when others may want to help.
bool Worker::take_range(uint64_t n, uint64_t &begin, uint64_t &end) {
    if (threads_ == 1) return take_all(n, begin, end);
    for (unsigned i = 0; i < threads_; i++) {
        const unsigned owner = index_ + i < threads_ ? index_ + i : index_ + i - threads_;
        const uint64_t first = n * owner / threads_, count = n * (owner + 1) / threads_ - first;
        std::atomic<uint64_t> &taken = job_.taken(loop_, owner);
        for (uint64_t at = taken.load(std::memory_order_relaxed); at < count;) {
            const uint64_t range = (count - at + 3) / 4;
            if (!taken.compare_exchange_weak(at, at + range, std::memory_order_relaxed)) continue;
            begin = first + at;
            end = begin + range;
            return true;
        }
    }
    return false;
}

// A thread alone shares nothing and needs no locked instructions.
bool Worker::take_all(uint64_t n, uint64_t &begin, uint64_t &end) {
    std::atomic<uint64_t> &taken = job_.taken(loop_, 0);
    begin = taken.load(std::memory_order_relaxed);
    end = n;
    taken.store(n, std::memory_order_relaxed);
    return begin < end;
}

void Worker::close(uint64_t n, uint64_t done) {
    if (done && threads_ > 1) job_.done.fetch_add(done, std::memory_order_release);
    opened_ += n;
    loop_++;
}

// Items behind a barrier start only when all before it are done: so "at least as many as were opened" means all of
// them.
void Worker::barrier() {
    if (threads_ == 1) return;
    for (int i = 0; job_.done.load(std::memory_order_acquire) < opened_; i++) {
        if (i < kSpinsBeforeYield)
            pause();
        else
            sched_yield();
    }
}

void run_alone(Job &job) {
    Worker worker(job, 0, 1);
    job.run(worker);
}

Pool::Pool(unsigned threads) {
    workers_.reserve(threads - 1);
    try {
        for (unsigned i = 1; i < threads; i++) workers_.emplace_back([this, i] { serve(i); });
    } catch (const std::system_error &error) {
        const unsigned started = this->threads();
        stop();
        fail(FERRUM_DEVICE_ERROR, "[device] threads: the system gave %u of %u: %s", started, threads, error.what());
    }
}

Pool::~Pool() {
    stop();
}

void Pool::stop() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
        generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread &worker : workers_) worker.join();
}

void Pool::run(std::shared_ptr<Job> job) {
    bool anyone_sleeps = false;
    if (!workers_.empty()) {
        std::lock_guard lock(mutex_);
        job_ = job;
        generation_.fetch_add(1, std::memory_order_release);
        anyone_sleeps = sleeping_ > 0;
    }
    if (anyone_sleeps) wake_.notify_all();
    Worker worker(*job, 0, threads());
    job->run(worker);
    worker.barrier();
}

void Pool::serve(unsigned index) {
    std::shared_ptr<Job> last;
    for (uint64_t seen = 0;;) {
        Job::Cursor cursor;
        while (last && generation_.load(std::memory_order_acquire) == seen && last->warm_up(cursor)) {
        }
        last.reset();
        for (int i = 0; i < kSpinsBeforeSleep && generation_.load(std::memory_order_acquire) == seen; i++) pause();
        std::shared_ptr<Job> job;
        {
            std::unique_lock lock(mutex_);
            sleeping_++;
            wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
            sleeping_--;
            if (stop_) return;
            seen = generation_.load(std::memory_order_relaxed);
            job = job_;
        }
        Worker worker(*job, index, threads());
        job->run(worker);
        last = std::move(job);
    }
}

}  // namespace ferrum::cpu
