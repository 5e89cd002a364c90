#include "emulator.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>

#include <unistd.h>

#include "sanitizers.h"
#include "threadgroup.h"

// No libgcc of Debian 12 rounds to bfloat16.
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    if (value != value) return __builtin_bit_cast(__bf16, (uint16_t)(bits >> 16 | 64));
    return __builtin_bit_cast(__bf16, (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

namespace emu {

alignas(64) unsigned char absent[4096];

namespace {

// OS threads that take threadgroups one after another. One with ThreadSanitizer: its fibers do the running there.
class Workers {
   public:
    Workers() {
        const char *asked = getenv("EMU_THREADS");
        unsigned count = asked ? (unsigned)atoi(asked) : std::thread::hardware_concurrency();
        if (races_checked || count == 0) count = 1;
        for (unsigned i = 1; i < count && i < 8; i++) std::thread([this] { serve(); }).detach();
        others_ = std::min(count, 8u) - 1;
        owner_ = getpid();
    }

    bool run(const Dispatch &dispatch, std::string &message) {
        const uint64_t count = (uint64_t)dispatch.groups[0] * dispatch.groups[1] * dispatch.groups[2];
        order_.clear();
        if (dispatch.seed) {
            order_.resize(count);
            std::iota(order_.begin(), order_.end(), 0);
            uint64_t state = dispatch.seed;
            for (uint64_t i = count; i > 1; i--) {
                state = state * 6364136223846793005u + 1442695040888963407u;
                std::swap(order_[i - 1], order_[(state >> 33) % i]);
            }
        }
        if (getpid() != owner_) others_ = 0;  // a fork has only the thread that made it
        message_.clear();
        failed_ = false;
        taken_ = 0;
        count_ = count;
        if (others_ && count > 1) {
            std::lock_guard lock(mutex_);
            dispatch_ = &dispatch;
            round_++;
            busy_ = others_;
            wake_.notify_all();
        }
        work(dispatch);
        if (others_ && count > 1) {
            std::unique_lock lock(mutex_);
            idle_.wait(lock, [this] { return busy_ == 0; });
        }
        message = message_;
        return !failed_;
    }

   private:
    void work(const Dispatch &dispatch) {
        static thread_local std::unique_ptr<Threadgroup> threadgroup;
        if (!threadgroup) threadgroup = std::make_unique<Threadgroup>();
        for (uint64_t i; !failed_ && (i = taken_++) < count_;) {
            if (threadgroup->run(dispatch, order_.empty() ? i : order_[i])) continue;
            std::lock_guard lock(mutex_);
            if (!failed_) message_ = threadgroup->message;
            failed_ = true;
        }
        threadgroup->settle();
    }

    void serve() {
        for (uint64_t seen = 0;;) {
            std::unique_lock lock(mutex_);
            wake_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            lock.unlock();
            work(*dispatch_);
            lock.lock();
            if (--busy_ == 0) idle_.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    const Dispatch *dispatch_ = nullptr;
    uint64_t round_ = 0;
    unsigned others_ = 0, busy_ = 0;
    pid_t owner_ = 0;
    std::vector<uint64_t> order_;
    std::atomic<uint64_t> taken_{0};
    uint64_t count_ = 0;
    std::atomic<bool> failed_{false};
    std::string message_;
};

std::mutex one_dispatch;
// EMU_ORDER: the seed to begin with, for programs that do not ask.
uint64_t order_seed = [] {
    const char *asked = getenv("EMU_ORDER");
    return asked ? strtoull(asked, nullptr, 10) : 0;
}();
uint64_t dispatches = 0;

const linked_kernel *kernel_at(uint32_t index) {
    for (unsigned f = 0; f < linked_file_count; f++) {
        if (index < linked_files[f]->count) return &linked_files[f]->kernels[index];
        index -= linked_files[f]->count;
    }
    return nullptr;
}

std::string dimensions(const uint32_t *three) {
    return "(" + std::to_string(three[0]) + ", " + std::to_string(three[1]) + ", " + std::to_string(three[2]) + ")";
}

std::string run(const emu_kernel &kernel, const emu_binding *bindings, uint32_t binding_count, Dispatch &dispatch) {
    const std::string name = kernel.name;
    for (uint32_t i = 0; i < binding_count; i++) {
        if (bindings[i].index >= EMU_MAX_BUFFERS) return name + ": buffer index " + std::to_string(bindings[i].index);
        dispatch.buffers[bindings[i].index] = bindings[i].address;
    }
    for (uint32_t i = 0; i < kernel.buffer_count; i++) {
        const emu_buffer_argument &argument = kernel.buffers[i];
        const uint32_t constant = argument.function_constant_plus_one;
        const bool there = constant == 0 || (constants >> (constant - 1) & 1);
        if (!there)
            dispatch.buffers[argument.index] = nullptr;  // the argument does not exist
        else if (!dispatch.buffers[argument.index])
            return name + ": buffer " + std::to_string(argument.index) + " is unbound";
    }
    const uint32_t *threads = dispatch.threads, *groups = dispatch.groups;
    const uint64_t total = (uint64_t)threads[0] * threads[1] * threads[2];
    if (total == 0 || total > EMU_MAX_THREADS) return name + ": threads of a threadgroup: " + dimensions(threads);
    if (dispatch.threadgroup_bytes > EMU_MAX_THREADGROUP_BYTES)
        return name + ": threadgroup memory: " + std::to_string(dispatch.threadgroup_bytes) + " bytes";
    if ((uint64_t)groups[0] * groups[1] * groups[2] == 0) return name + ": threadgroups: " + dimensions(groups);
    static const bool once = [] {
        memset(absent, 0xff, sizeof(absent));
        ASAN_POISON_MEMORY_REGION(absent, sizeof(absent));
        return true;
    }();
    (void)once;
    static Workers &workers = *new Workers;  // never ends: its threads wait until the process does
    std::string message;
    workers.run(dispatch, message);
    return message;
}

}  // namespace
}  // namespace emu

using namespace emu;

uint32_t emu_kernel_count(void) {
    uint32_t count = 0;
    for (unsigned f = 0; f < linked_file_count; f++) count += linked_files[f]->count;
    return count;
}

const emu_kernel *emu_kernel_at(uint32_t index) {
    const linked_kernel *kernel = kernel_at(index);
    return kernel ? &kernel->face : nullptr;
}

const emu_kernel *emu_find_kernel(const char *name) {
    for (uint32_t i = 0; const linked_kernel *kernel = kernel_at(i); i++)
        if (!strcmp(kernel->face.name, name)) return &kernel->face;
    return nullptr;
}

void emu_set_order(uint64_t seed) {
    std::lock_guard lock(one_dispatch);
    order_seed = seed;
    dispatches = 0;
}

int emu_dispatch(const emu_kernel *kernel, uint32_t constants, const emu_binding *bindings, uint32_t binding_count,
                 const uint32_t groups[3], const uint32_t threads[3], uint32_t threadgroup_bytes, char *message,
                 uint64_t message_bytes) {
    std::lock_guard lock(one_dispatch);
    Dispatch dispatch = {};
    dispatch.kernel = (const linked_kernel *)kernel;  // whose first member it is
    memcpy(dispatch.groups, groups, sizeof(dispatch.groups));
    memcpy(dispatch.threads, threads, sizeof(dispatch.threads));
    dispatch.threadgroup_bytes = threadgroup_bytes;
    dispatch.seed = order_seed ? order_seed + 1000003 * dispatches++ : 0;
    emu::constants = constants;
    const std::string failure = run(*kernel, bindings, binding_count, dispatch);
    if (message_bytes) {
        strncpy(message, failure.c_str(), message_bytes - 1);
        message[message_bytes - 1] = 0;
    }
    return !failure.empty();
}
