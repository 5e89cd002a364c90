#include "engine.h"

#include <algorithm>
#include <utility>

#include "../core/kernel_ids.h"

namespace ferrum::metal {

namespace {

// A batch is committed when it has this many launches; earlier when someone waits, or when the GPU has fewer than
// kMinInFlight command buffers to go on with. So nothing waits to be read before it runs, a lone call starts at once,
// and a host that is ahead of the GPU fills its batches.
constexpr uint32_t kLongEnough = 64;
constexpr size_t kMinInFlight = 2;
// A host further ahead than this waits in submit(). Metal itself would block at 64, with our lock held.
constexpr size_t kMaxInFlight = 8;

constexpr uint32_t kThreadgroupMemory = 32768;  // of every Apple GPU

const char *label_of(const Submission &work) {
    return *work.label ? work.label : ferrum_kernel_name(work.launches[0].kernel);
}

}  // namespace

Engine::~Engine() {
    metal_save(context_);
    for (auto &[key, pipeline] : pipelines_) metal_pipeline_release(pipeline);
    metal_close(context_);
}

void Engine::add_slab(metal_buffer *slab) {
    Lock lock(mutex_);
    slabs_.push_back(slab);
}

void Engine::remove_slab(metal_buffer *slab) {
    Lock lock(mutex_);
    slabs_.erase(std::find(slabs_.begin(), slabs_.end(), slab));
}

metal_pipeline *Engine::pipeline_for(const ferrum_launch &launch) {
    metal_pipeline *&pipeline = pipelines_[uint64_t(launch.kernel) << 32 | launch.constants];
    const char *name = ferrum_kernel_name(launch.kernel), *gpu = metal_name(context_);
    if (!pipeline) {
        metal_message message;
        pipeline = metal_pipeline_new(context_, name, launch.constants, &message);
        if (!pipeline) fail(FERRUM_DEVICE_ERROR, "[%s] %s", name, message.text);
    }
    const metal_limits limits = metal_pipeline_limits(pipeline);
    const uint32_t threads = launch.threads[0] * launch.threads[1] * launch.threads[2];
    // The kernels count on 32 lanes: with another number they would compute something else.
    if (limits.simd_width != FERRUM_SIMD_WIDTH)
        fail(FERRUM_DEVICE_ERROR, "[%s] SIMD-groups of %u threads on \"%s\", expected %d", name, limits.simd_width, gpu,
             FERRUM_SIMD_WIDTH);
    if (threads > limits.threads)
        fail(FERRUM_DEVICE_ERROR, "[%s] at most %u threads a threadgroup with constants %u on \"%s\", expected %u",
             name, limits.threads, launch.constants, gpu, threads);
    if (limits.threadgroup_bytes + launch.threadgroup_bytes > kThreadgroupMemory)
        fail(FERRUM_DEVICE_ERROR, "[%s] %u bytes of threadgroup memory, \"%s\" has %u", name,
             limits.threadgroup_bytes + launch.threadgroup_bytes, gpu, kThreadgroupMemory);
    return pipeline;
}

Engine::Batch &Engine::open_batch() {
    if (!open_) {
        auto batch = std::make_unique<Batch>();
        batch->commands = metal_commands_begin(context_);
        if (!batch->commands) fail(FERRUM_DEVICE_ERROR, "[device] Metal gives no command buffer");
        batch->number = ++batches_;
        open_ = std::move(batch);
    }
    return *open_;
}

void Engine::encode(Batch &batch, const Submission &work, const std::vector<metal_pipeline *> &pipelines) {
    metal_commands *commands = batch.commands;
    metal_commands_use(commands, slabs_.data() + batch.declared_slabs, slabs_.size() - batch.declared_slabs);
    batch.declared_slabs = slabs_.size();
    metal_commands_begin_group(commands, label_of(work));
    for (size_t i = 0; i < work.launches.size(); i++) {
        const ferrum_launch &launch = work.launches[i];
        // Submissions run one after the other, whatever their first launch says.
        if ((launch.barrier || i == 0) && batch.launches) metal_commands_barrier(commands);
        metal_binding bindings[FERRUM_MAX_BINDINGS];
        for (uint32_t b = 0; b < launch.binding_count; b++) {
            const ferrum_binding &binding = launch.bindings[b];
            const Resource &resource = work.resources[binding.resource];
            auto *buffer = static_cast<MetalBuffer *>(resource.buffer);
            buffer->last_batch = batch.number;
            bindings[b] = {buffer->place.buffer, buffer->place.offset + resource.offset + binding.offset, binding.slot};
        }
        metal_dispatch dispatch{};
        dispatch.pipeline = pipelines[i];
        dispatch.bindings = bindings;
        dispatch.binding_count = launch.binding_count;
        dispatch.params = launch.params;
        dispatch.params_bytes = launch.params_bytes;
        dispatch.params_slot = launch.params_slot;
        std::copy_n(launch.grid, 3, dispatch.grid);
        std::copy_n(launch.threads, 3, dispatch.threads);
        dispatch.threadgroup_bytes = launch.threadgroup_bytes;
        metal_commands_dispatch(commands, &dispatch);
        batch.launches++;
    }
    metal_commands_end_group(commands);
}

void Engine::submit(Submission &&work) {
    if (work.launches.empty()) return;
    Lock lock(mutex_);
    progress_.wait(lock, [&] { return in_flight_.size() < kMaxInFlight; });
    // Whatever may fail comes first: once encoding begins the submission is in.
    std::vector<metal_pipeline *> pipelines;
    pipelines.reserve(work.launches.size());
    for (const ferrum_launch &launch : work.launches) pipelines.push_back(pipeline_for(launch));
    Batch &batch = open_batch();
    batch.keep.reserve(batch.keep.size() + work.keep.size());
    const char *label = label_of(work);
    if (std::find(batch.labels.begin(), batch.labels.end(), label) == batch.labels.end()) batch.labels.push_back(label);

    encode(batch, work, pipelines);
    for (Ref<const RefCounted> &kept : work.keep) batch.keep.push_back(std::move(kept));
    work.keep.clear();
    if (batch.launches >= kLongEnough || in_flight_.size() < kMinInFlight) commit();
}

void Engine::commit() {
    if (!open_) return;
    in_flight_.insert(open_->number);
    Batch *batch = open_.release();
    batch->engine = shared_from_this();
    metal_commands_commit(batch->commands, completed, batch);
}

// Runs on a thread of Metal's. What the batch kept goes first, and without the lock: pages become free, and this may be
// the end of the device. Then whoever waits may go on, and finds them free.
void Engine::completed(void *user, const char *failure, const char *label) {
    std::unique_ptr<Batch> batch(static_cast<Batch *>(user));
    std::shared_ptr<Engine> engine = std::move(batch->engine);
    batch->keep.clear();
    Lock lock(engine->mutex_);
    if (failure) {
        std::string who = label;
        if (who.empty())
            for (const char *one : batch->labels) who += std::string(who.empty() ? "" : " or ") + one;
        const std::string message = "[" + who + "] the GPU failed: " + failure;
        engine->failures_[batch->number] = message;
        if (engine->unread_failure_.empty()) engine->unread_failure_ = message;
    }
    engine->in_flight_.erase(batch->number);
    if (engine->in_flight_.size() < kMinInFlight) engine->commit();
    engine->progress_.notify_all();
}

void Engine::wait_until_past(Lock &lock, uint64_t batch) {
    if (open_ && open_->number <= batch) commit();
    progress_.wait(lock, [&] { return in_flight_.empty() || *in_flight_.begin() > batch; });
}

void Engine::wait() {
    Lock lock(mutex_);
    wait_until_past(lock, batches_);
    // Saved once a round of work has compiled nothing new, so that a first run does not write the file many times.
    if (pipelines_.size() == pipelines_at_wait_) metal_save(context_);
    pipelines_at_wait_ = pipelines_.size();
    if (unread_failure_.empty()) return;
    throw Error{FERRUM_DEVICE_ERROR, std::exchange(unread_failure_, "")};
}

void Engine::wait_for(const MetalBuffer &buffer) {
    Lock lock(mutex_);
    if (!buffer.last_batch) return;
    wait_until_past(lock, buffer.last_batch);
    auto failure = failures_.find(buffer.last_batch);
    if (failure == failures_.end()) return;
    if (unread_failure_ == failure->second) unread_failure_.clear();
    throw Error{FERRUM_DEVICE_ERROR, failure->second};
}

void MetalBuffer::wait() {
    device()->check_usable("wait", true);
    engine_->wait_for(*this);
}

}  // namespace ferrum::metal
