// The Metal device's traffic with the GPU: one open command buffer, what is in flight, and what went wrong.
//
// Locks: `mutex_` guards everything here and is never held while a submission's kept objects are dropped: dropping a
// state takes the arena's lock, and the arena calls in here (for slabs) with its lock held.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <set>

#include "../core/device.h"
#include "metal.h"

namespace ferrum::metal {

// Where a Buffer's bytes begin, as the GPU has it.
struct Place {
    metal_buffer *buffer;
    uint64_t offset;
};

class Engine;

class MetalBuffer : public Buffer {
   public:
    MetalBuffer(Device *device, Engine *engine, uint64_t bytes, Place place, void *host)
        : Buffer(device, bytes), place(place), engine_(engine), host_(host) {}
    void *host() override { return host_; }
    uint64_t device_address() override { return metal_buffer_address(place.buffer) + place.offset; }

    void wait() override;  // for what was submitted that touches it, not for the rest

    const Place place;
    uint64_t last_batch = 0;  // the latest one that touches it, 0: none yet; the engine's lock guards it

   private:
    Engine *const engine_;  // the device's, which lives as long as this
    void *const host_;
};

// Outlives its device while the GPU works: the completed handler may drop the device's last reference.
class Engine : public std::enable_shared_from_this<Engine> {
   public:
    explicit Engine(metal_context *context) : context_(context) {}
    ~Engine();
    metal_context *context() const { return context_; }

    // After fork: nothing of Metal's may be touched in the child, not even to release it.
    void abandon() { abandoned_ = true; }
    bool abandoned() const { return abandoned_; }

    // Slabs are reached through page tables, which Metal cannot see: every encoder has to declare them.
    void add_slab(metal_buffer *slab);
    void remove_slab(metal_buffer *slab);

    void submit(Submission &&work);
    void wait();                               // for all that was submitted; throws what failed since the last wait
    void wait_for(const MetalBuffer &buffer);  // for the latest work that touches `buffer`; throws if that failed

   private:
    // The launches of one command buffer.
    struct Batch {
        std::shared_ptr<Engine> engine;  // from the commit on
        metal_commands *commands = nullptr;
        uint64_t number = 0;
        uint32_t launches = 0;
        size_t declared_slabs = 0;
        std::vector<const char *> labels;  // of its submissions, each once
        std::vector<Ref<const RefCounted>> keep;
    };
    using Lock = std::unique_lock<std::mutex>;

    metal_pipeline *pipeline_for(const ferrum_launch &launch);
    Batch &open_batch();
    void encode(Batch &batch, const Submission &work, const std::vector<metal_pipeline *> &pipelines);
    void commit();
    void wait_until_past(Lock &lock, uint64_t batch);
    static void completed(void *user, const char *failure, const char *label);

    metal_context *const context_;
    std::atomic<bool> abandoned_{false};
    std::mutex mutex_;
    std::condition_variable progress_;
    std::unique_ptr<Batch> open_;
    std::set<uint64_t> in_flight_;  // numbers of committed batches
    uint64_t batches_ = 0;          // opened so far
    std::vector<metal_buffer *> slabs_;
    std::map<uint64_t, metal_pipeline *> pipelines_;  // by kernel and constants
    size_t pipelines_at_wait_ = 0;
    std::map<uint64_t, std::string> failures_;  // by batch
    std::string unread_failure_;
};

}  // namespace ferrum::metal
