// What the core asks of a device, and what a call hands to it. A device interprets launches; it knows no operation.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "error.h"

namespace ferrum {

// Intrusive reference counting: handles cross the C boundary as plain pointers.
class RefCounted {
   public:
    RefCounted() = default;
    RefCounted(const RefCounted &) = delete;
    RefCounted &operator=(const RefCounted &) = delete;
    virtual ~RefCounted() = default;
    void retain() const { references_.fetch_add(1, std::memory_order_relaxed); }
    void release() const {
        if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
    }

   private:
    mutable std::atomic<uint64_t> references_{1};
};

template <class T>
class Ref {
   public:
    Ref() = default;
    static Ref adopt(T *object) {  // takes over the caller's reference
        Ref ref;
        ref.object_ = object;
        return ref;
    }
    static Ref share(T *object) {
        object->retain();
        return adopt(object);
    }
    Ref(const Ref &other) : object_(other.object_) {
        if (object_) object_->retain();
    }
    Ref(Ref &&other) noexcept : object_(other.detach()) {}
    template <class U>
    Ref(const Ref<U> &other) : object_(other.get()) {
        if (object_) object_->retain();
    }
    Ref &operator=(Ref other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Ref() {
        if (object_) object_->release();
    }
    T *get() const { return object_; }
    T *operator->() const { return object_; }
    explicit operator bool() const { return object_; }
    T *detach() {  // gives the reference to the caller
        T *object = object_;
        object_ = nullptr;
        return object;
    }

   private:
    T *object_ = nullptr;
};

// Gives back the reference in a caller's variable, and clears it.
template <class Object, class Handle>
void release_handle(Handle **variable) {
    if (!variable || !*variable) return;
    Object *object = reinterpret_cast<Object *>(*variable);
    *variable = nullptr;
    object->release();
}

// Counts the live objects of one kind, for ferrum_debug_counts.
class Counted {
   public:
    explicit Counted(std::atomic<uint64_t> &counter) : counter_(counter) { counter_++; }
    ~Counted() { counter_--; }

   private:
    std::atomic<uint64_t> &counter_;
};

struct LiveCounts {
    std::atomic<uint64_t> devices{0}, buffers{0}, states{0}, attentions{0}, plans{0}, page_lists{0}, rings{0},
        programs{0};
};
extern LiveCounts live_counts;

class Arena;
class Device;

// Bytes on a device. Devices subclass it to own or wrap memory.
class Buffer : public RefCounted {
   public:
    Buffer(Device *device, uint64_t bytes);
    ~Buffer() override;
    Device *device() const { return device_.get(); }
    uint64_t bytes() const { return bytes_; }
    virtual bool is_name() const { return false; }  // of an array that only runs of a program have
    virtual void *host() = 0;                       // the host's address; no waiting
    virtual void wait();                    // until every call so far that writes it is done; throws what failed
    virtual uint64_t device_address() = 0;  // what a kernel follows: for page tables

   private:
    Counted counted_{live_counts.buffers};
    Ref<Device> device_;  // a buffer keeps its device alive
    uint64_t bytes_;
};

// Memory of many pages. The device owns the arena and the arena its slabs, so a slab holds no reference back.
class Slab {
   public:
    virtual ~Slab() = default;
    virtual uint8_t *host() = 0;
    virtual uint64_t device_address() = 0;
};

struct Resource {
    Buffer *buffer = nullptr;
    uint64_t offset = 0;
};

// Launches that are submitted again and again, each time with other bytes behind some of their resources and other
// grids and params in some of them.
struct LaunchList {
    std::vector<ferrum_launch> launches;
    std::vector<Resource> resources;  // but for those that vary
    std::vector<uint32_t> varying;    // which those are
    // What a device has made of all this, for the next time. Devices set and read it one submission at a time.
    mutable std::shared_ptr<void> compiled;
};

// One call's work: launches whose bindings index `resources`. The device keeps `keep` alive until it is past the work;
// so a page, which lives as long as a state that shows it, is never handed out while a kernel may still touch it.
struct Submission {
    const char *label = "";  // the operation, for captures and for errors that are found later
    std::vector<ferrum_launch> launches;
    std::vector<Resource> resources;
    std::vector<Ref<const RefCounted>> keep;
    std::shared_ptr<const LaunchList> list;  // whose launches and resources these are, if they come again

    uint32_t add(Buffer *buffer, uint64_t offset = 0) {
        resources.push_back({buffer, offset});
        return uint32_t(resources.size() - 1);
    }
    // Launches over resources of their own, to run after what is here.
    void append(const std::vector<ferrum_launch> &more, const std::vector<Resource> &more_resources) {
        const uint32_t first = uint32_t(resources.size());
        resources.insert(resources.end(), more_resources.begin(), more_resources.end());
        for (ferrum_launch launch : more) {
            for (uint32_t b = 0; b < launch.binding_count; b++) launch.bindings[b].resource += first;
            launches.push_back(launch);
        }
    }
};

// What a plan takes from the device it is for.
struct Traits {
    uint32_t span_tokens;  // wanted length of a softmax span: short ones spread a context further, long ones merge less
    bool exact;            // no kernel may give a row another order of sums because of how many come with it
};

class Device : public RefCounted {
   public:
    Device();
    ~Device() override;
    virtual Ref<Buffer> allocate(uint64_t bytes) = 0;
    virtual Ref<Buffer> wrap(const void *data, uint64_t bytes) = 0;
    virtual std::unique_ptr<Slab> allocate_slab(uint64_t bytes) = 0;
    virtual void submit(Submission &&work) = 0;
    // Makes what the device needs to multiply this checked matrix often; gives the bytes it holds for that.
    virtual uint64_t prepare(const ferrum_tensor &weight) {
        (void)weight;
        return 0;
    }
    virtual void wait() = 0;  // until everything submitted is done
    virtual ferrum_device_summary describe() const = 0;
    virtual Traits traits() const = 0;
    Arena &arena() { return *arena_; }
    bool poison() const { return poison_; }
    bool forked() const;  // since it was opened
    // Throws after fork, since the child has none of the device's threads; and while this thread records a program, if
    // the operation is none that a program replays.
    void check_usable(const char *op, bool replayable = false) const;

   protected:
    void open_arena(uint64_t limit_bytes, bool poison);

   private:
    Counted counted_{live_counts.devices};
    uint64_t fork_generation_;
    std::unique_ptr<Arena> arena_;
    bool poison_ = false;
};

uint64_t machine_memory_bytes();

// Opens a device by name; each device's folder defines its own opener.
Ref<Device> open_cpu_device(const ferrum_device_options &options);
Ref<Device> open_metal_device(const ferrum_device_options &options);  // in libraries built with FERRUM_METAL

}  // namespace ferrum
