#include "device.h"

#include <pthread.h>
#include <unistd.h>

#include "program.h"

namespace ferrum {

LiveCounts live_counts;

namespace {

std::atomic<uint64_t> fork_generation{0};

[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { fork_generation++; });

}  // namespace

Buffer::Buffer(Device *device, uint64_t bytes) : device_(Ref<Device>::share(device)), bytes_(bytes) {}
Buffer::~Buffer() = default;
void Buffer::wait() {
    device_->wait();
}

Device::Device() : fork_generation_(fork_generation) {}
Device::~Device() = default;

void Device::open_arena(uint64_t limit_bytes, bool poison) {
    poison_ = poison;
    arena_ = std::make_unique<Arena>(*this, limit_bytes ? limit_bytes : machine_memory_bytes() / 2);
}

bool Device::forked() const {
    return fork_generation_ != fork_generation;
}

void Device::check_usable(const char *op, bool replayable) const {
    if (!replayable && Recorder::on(this)) fail(FERRUM_UNSUPPORTED, "[%s] cannot be part of a jitted function", op);
    if (forked())
        fail(FERRUM_STATE_ERROR, "[%s] the device was opened before fork(): open one in the child process", op);
}

uint64_t machine_memory_bytes() {
    return uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE));
}

}  // namespace ferrum
