// The Metal device: memory, and the core's launches to the engine.
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "../core/arena.h"
#include "../core/kernel_ids.h"
#include "engine.h"

namespace ferrum {

namespace metal {

namespace {

// Freed buffers by size class, kept for the next call of the same shape: a new one costs a round to the driver.
class BufferCache {
   public:
    ~BufferCache() {
        for (auto &[size, buffers] : free_)
            for (metal_buffer *buffer : buffers) metal_buffer_release(buffer);
    }
    static uint64_t size_class(uint64_t bytes) {
        uint64_t power = 256;
        while (power < bytes) power *= 2;
        return align_up(bytes ? bytes : 1, power / 8 > 256 ? power / 8 : 256);
    }
    metal_buffer *take(uint64_t size) {
        std::lock_guard lock(mutex_);
        auto found = free_.find(size);
        if (found == free_.end() || found->second.empty()) return nullptr;
        metal_buffer *buffer = found->second.back();
        found->second.pop_back();
        cached_ -= size;
        return buffer;
    }
    void give(metal_buffer *buffer, uint64_t size) {
        {
            std::lock_guard lock(mutex_);
            if (cached_ + size <= kMostCached) {
                free_[size].push_back(buffer);
                cached_ += size;
                return;
            }
        }
        metal_buffer_release(buffer);
    }

   private:
    static constexpr uint64_t kMostCached = 256 << 20;
    std::mutex mutex_;
    std::map<uint64_t, std::vector<metal_buffer *>> free_;
    uint64_t cached_ = 0;
};

class MetalDevice;

class OwnedBuffer : public MetalBuffer {
   public:
    OwnedBuffer(MetalDevice *device, Engine *engine, uint64_t bytes, metal_buffer *buffer, uint64_t size);
    ~OwnedBuffer() override;

   private:
    MetalDevice *const metal_;
    const uint64_t size_;
};

// The caller's memory. The buffer covers the pages that hold it.
class WrappedBuffer : public MetalBuffer {
   public:
    using MetalBuffer::MetalBuffer;
    ~WrappedBuffer() override {
        if (!device()->forked()) metal_buffer_release(place.buffer);
    }
};

class MetalSlab : public Slab {
   public:
    MetalSlab(std::shared_ptr<Engine> engine, metal_buffer *buffer) : engine_(std::move(engine)), buffer_(buffer) {
        engine_->add_slab(buffer);
    }
    ~MetalSlab() override {
        if (engine_->abandoned()) return;
        engine_->remove_slab(buffer_);
        metal_buffer_release(buffer_);
    }
    uint8_t *host() override { return static_cast<uint8_t *>(metal_buffer_contents(buffer_)); }
    uint64_t device_address() override { return metal_buffer_address(buffer_); }

   private:
    const std::shared_ptr<Engine> engine_;
    metal_buffer *const buffer_;
};

// One archive per build of the library: pipelines of another build are of no use. None under Metal's shader validation,
// which instruments pipelines as they are compiled.
std::string archive_path() {
    const char *cache = getenv("PYFERRUM_CACHE"), *home = getenv("HOME"), *checks = getenv("MTL_SHADER_VALIDATION");
    if (checks && atoi(checks)) return "";
    if (!(cache && *cache) && !(home && *home)) return "";
    const std::string folder = cache && *cache ? cache : std::string(home) + "/.cache/pyferrum";
    return folder + "/pipelines-" + std::string(ferrum_build_fingerprint()).substr(0, 16) + ".metalar";
}

std::shared_ptr<Engine> open_engine() {
    const std::string archive = archive_path();
    const metal_options options{archive.empty() ? nullptr : archive.c_str()};
    metal_message message{};
    metal_context *context = metal_open(&options, &message);
    if (!context) fail(FERRUM_DEVICE_ERROR, "[device] metal: %s", message.text);
    return std::make_shared<Engine>(context);
}

// A copy that outlives every device: the summary's strings are static.
const char *forever(const char *text) {
    static std::mutex mutex;
    static auto *const texts = new std::set<std::string>;
    std::lock_guard lock(mutex);
    return texts->insert(text).first->c_str();
}

// A threadgroup's share of a long context: 32k tokens are then 32 threadgroups a head.
constexpr uint32_t kSpanTokens = 1024;

class MetalDevice : public Device {
   public:
    explicit MetalDevice(const ferrum_device_options &options)
        : engine_(open_engine()), exact_(options.exact), gpu_(forever(metal_name(engine_->context()))) {
        open_arena(options.arena_limit_bytes, options.poison);
    }
    ~MetalDevice() override {
        if (!forked()) return;
        engine_->abandon();
        new std::shared_ptr<Engine>(engine_);  // leaked, and the cached buffers with it
        cache.release();
    }

    Ref<Buffer> allocate(uint64_t bytes) override {
        check_length(bytes);
        // With poison every buffer is new and as long as it should be, so that a stale or a far access shows.
        const uint64_t size = poison() ? (bytes ? bytes : 1) : BufferCache::size_class(bytes);
        metal_buffer *buffer = cache->take(size);
        if (!buffer) buffer = new_buffer(size, "buffer");
        return Ref<OwnedBuffer>::adopt(new OwnedBuffer(this, engine_.get(), bytes, buffer, size));
    }

    Ref<Buffer> wrap(const void *data, uint64_t bytes) override {
        check_length(bytes);
        const uint64_t page = uint64_t(getpagesize()), offset = uint64_t(data) % page;
        auto *start = static_cast<uint8_t *>(const_cast<void *>(data)) - offset;
        metal_buffer *buffer =
            bytes ? metal_buffer_wrap(engine_->context(), start, align_up(offset + bytes, page), "wrapped") : nullptr;
        if (buffer)
            return Ref<WrappedBuffer>::adopt(
                new WrappedBuffer(this, engine_.get(), bytes, Place{buffer, offset}, const_cast<void *>(data)));
        Ref<Buffer> copy = allocate(bytes);
        if (bytes) memcpy(copy->host(), data, bytes);
        return copy;
    }

    std::unique_ptr<Slab> allocate_slab(uint64_t bytes) override {
        return std::make_unique<MetalSlab>(engine_, new_buffer(bytes, "slab"));
    }

    void submit(Submission &&work) override { engine_->submit(std::move(work)); }
    void wait() override {
        check_usable("wait", true);
        engine_->wait();
    }
    Traits traits() const override { return {kSpanTokens, exact_}; }
    ferrum_device_summary describe() const override { return {"metal", gpu_, 0, 0, machine_memory_bytes()}; }

    std::unique_ptr<BufferCache> cache = std::make_unique<BufferCache>();

   private:
    void check_length(uint64_t bytes) const {
        const uint64_t longest = metal_longest_buffer(engine_->context());
        if (bytes > longest)
            fail(FERRUM_OUT_OF_MEMORY, "[device] a buffer of %llu bytes: \"%s\" has at most %llu",
                 (unsigned long long)bytes, gpu_, (unsigned long long)longest);
    }
    metal_buffer *new_buffer(uint64_t bytes, const char *label) {
        metal_buffer *buffer = metal_buffer_new(engine_->context(), bytes, label);
        if (!buffer) throw std::bad_alloc();
        return buffer;
    }

    const std::shared_ptr<Engine> engine_;
    const bool exact_;
    const char *const gpu_;
};

OwnedBuffer::OwnedBuffer(MetalDevice *device, Engine *engine, uint64_t bytes, metal_buffer *buffer, uint64_t size)
    : MetalBuffer(device, engine, bytes, {buffer, 0}, metal_buffer_contents(buffer)), metal_(device), size_(size) {}

OwnedBuffer::~OwnedBuffer() {
    if (metal_->forked()) return;
    if (metal_->poison()) {
        memset(host(), 0xff, size_);
        metal_buffer_release(place.buffer);
    } else {
        metal_->cache->give(place.buffer, size_);
    }
}

}  // namespace

}  // namespace metal

Ref<Device> open_metal_device(const ferrum_device_options &options) {
    return Ref<metal::MetalDevice>::adopt(new metal::MetalDevice(options));
}

}  // namespace ferrum
