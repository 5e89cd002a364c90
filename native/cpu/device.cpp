// The CPU device: memory, and the interpreter of launches.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include "../core/launch.h"
#include "kernels.h"
#include "pool.h"

namespace ferrum {

namespace cpu {

namespace {

// Freed blocks by size class, kept for the next call of the same shape: fresh pages from the system cost a fault each.
class BlockCache {
   public:
    ~BlockCache() {
        for (auto &[size, blocks] : free_)
            for (void *block : blocks) free(block);
    }
    static uint64_t size_class(uint64_t bytes) {
        if (bytes > uint64_t(1) << 62) throw std::bad_alloc();
        uint64_t power = 256;
        while (power < bytes) power *= 2;
        const uint64_t step = std::max<uint64_t>(power / 8, 256);
        return (std::max<uint64_t>(bytes, 1) + step - 1) / step * step;
    }
    void *take(uint64_t size) {
        {
            std::lock_guard lock(mutex_);
            auto found = free_.find(size);
            if (found != free_.end() && !found->second.empty()) {
                void *block = found->second.back();
                found->second.pop_back();
                cached_ -= size;
                return block;
            }
        }
        void *block = nullptr;
        if (posix_memalign(&block, 64, size)) throw std::bad_alloc();
        return block;
    }
    void give(void *block, uint64_t size) {
        {
            std::lock_guard lock(mutex_);
            if (cached_ + size <= kMostCached) {
                free_[size].push_back(block);
                cached_ += size;
                return;
            }
        }
        free(block);
    }

   private:
    static constexpr uint64_t kMostCached = 256 << 20;
    std::mutex mutex_;
    std::map<uint64_t, std::vector<void *>> free_;
    uint64_t cached_ = 0;
};

constexpr uint64_t kHugePage = 2 << 20;
constexpr uint64_t kPreparedSlab = 32 << 20;

class MappedSlab : public Slab {
   public:
    explicit MappedSlab(uint64_t bytes) : bytes_(bytes) {
        data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data_ == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        madvise(data_, bytes, MADV_HUGEPAGE);  // a wish: what is streamed stalls on page walks
#endif
    }
    ~MappedSlab() override { munmap(data_, bytes_); }
    uint8_t *host() override { return static_cast<uint8_t *>(data_); }
    uint64_t device_address() override { return uint64_t(data_); }
    uint64_t bytes() const { return bytes_; }

   private:
    void *data_;
    uint64_t bytes_;
};

class CpuDevice;

// A matrix that lies in a buffer at some offset, laid out for the linear kernels.
struct Prepared {
    uint32_t format;
    uint64_t rows, width;
    std::shared_ptr<MappedSlab> slab;
    uint8_t *data;
};

class CpuBuffer : public Buffer {
   public:
    using Buffer::Buffer;
    const uint8_t *prepared(uint64_t offset, uint32_t format, uint64_t rows, uint64_t width) {
        std::lock_guard lock(mutex_);
        auto found = prepared_.find(offset);
        if (found == prepared_.end()) return nullptr;
        const Prepared &p = found->second;
        return p.format == format && p.rows == rows && p.width == width ? p.data : nullptr;
    }
    // The first one of an offset stays: a launch may be reading it.
    void keep_prepared(uint64_t offset, Prepared &&copy) {
        std::lock_guard lock(mutex_);
        prepared_.emplace(offset, std::move(copy));
    }

   private:
    std::mutex mutex_;
    std::unordered_map<uint64_t, Prepared> prepared_;
};

class OwnedBuffer : public CpuBuffer {
   public:
    OwnedBuffer(CpuDevice *device, uint64_t bytes);
    ~OwnedBuffer() override;
    void *host() override { return data_; }
    uint64_t device_address() override { return uint64_t(data_); }

   private:
    CpuDevice *cpu_;
    uint64_t size_;
    void *data_;
};

class WrappedBuffer : public CpuBuffer {
   public:
    WrappedBuffer(Device *device, const void *data, uint64_t bytes)
        : CpuBuffer(device, bytes), data_(const_cast<void *>(data)) {}
    void *host() override { return data_; }
    uint64_t device_address() override { return uint64_t(data_); }

   private:
    void *data_;
};

struct InstructionSet {
    const char *name;
    const KernelFunction *kernels;
    RowFunction (*row_function)(uint32_t kernel);
    void (*pack)(const Packing &job, uint64_t group);
    bool available;
};

std::vector<InstructionSet> instruction_sets() {
    return {
#if defined(__x86_64__)
        {"avx512", avx512::kernels, avx512::row_function, avx512::pack,
         __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vnni")},
        {"avx2", avx2::kernels, avx2::row_function, avx2::pack,
         __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")},
#elif defined(__aarch64__)
        {"neon", neon::kernels, neon::row_function, neon::pack, true},
#endif
        {"portable", portable::kernels, portable::row_function, portable::pack, true},
    };
}

InstructionSet choose(const char *wanted) {
    const std::string name = wanted ? wanted : "";
    std::string known;
    for (const InstructionSet &set : instruction_sets()) {
        if (set.available && (name.empty() || name == set.name)) return set;
        if (set.available) known += std::string(known.empty() ? "" : ", ") + set.name;
    }
    fail(FERRUM_DEVICE_ERROR, "[device] instruction_set: this machine has %s, got \"%s\"", known.c_str(), name.c_str());
}

unsigned available_threads() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) return unsigned(std::max(1, CPU_COUNT(&set)));
#endif
    return std::max(1u, std::thread::hardware_concurrency());
}

// Both multiply the same rows, prepared in the same way; the second finds them ready.
bool same_input(const Call &first, const Call &second) {
    if (!is_linear(first.launch->kernel) || !is_linear(second.launch->kernel)) return false;
    const auto &a = first.params<ferrum_linear_params>(), &b = second.params<ferrum_linear_params>();
    return first.slots[FERRUM_LINEAR_X] == second.slots[FERRUM_LINEAR_X] && a.rows == b.rows &&
           a.in_features == b.in_features && a.input_stride == b.input_stride &&
           linear_temp(*first.launch, 1).fixed_point == linear_temp(*second.launch, 1).fixed_point;
}

// What a launch reads row by row.
struct Input {
    const uint8_t *at;  // NULL: nothing that is
    bool f32;
    uint64_t rows, width, stride;
};

Input input_of(const Call &call) {
    const uint32_t kernel = call.launch->kernel;
    if (is_linear(kernel)) {
        const auto &p = call.params<ferrum_linear_params>();
        return {call.slots[FERRUM_LINEAR_X], false, p.rows, p.in_features, p.input_stride};
    }
    if (kernel == kernel_rms_norm_f16 || kernel == kernel_rms_norm_f32) {
        const auto &p = call.params<ferrum_rms_norm_params>();
        return {call.slots[FERRUM_RMS_NORM_X], kernel == kernel_rms_norm_f32, p.rows, p.width, p.width};
    }
    return {};
}

// Whether the rows that the launch writes are these.
bool writes(const Call &call, const Input &input) {
    const uint32_t kernel = call.launch->kernel;
    switch (kernel) {
        case kernel_rms_norm_f16:
        case kernel_rms_norm_f32: {
            const auto &p = call.params<ferrum_rms_norm_params>();
            return call.slots[FERRUM_RMS_NORM_Y] == input.at && !input.f32 && p.rows == input.rows &&
                   p.width == input.width && p.output_stride == input.stride;
        }
        case kernel_residual_add_f16:
        case kernel_residual_add_f32: {
            const auto &p = call.params<ferrum_residual_add_params>();
            return call.slots[FERRUM_RESIDUAL_ADD_Y] == input.at && input.f32 == (kernel == kernel_residual_add_f32) &&
                   p.rows == input.rows && p.width == input.width && p.width == input.stride;
        }
        case kernel_swiglu_f16:
            return call.slots[FERRUM_SWIGLU_Y] == input.at && !input.f32 && input.width == input.stride &&
                   call.params<ferrum_swiglu_params>().elements == input.rows * input.width;
        default:
            return false;
    }
}

// Whether a row of `y`, written early, could be part of another row that the residual has yet to read: memory is given
// out again once its last reader is done, and behind a residual come launches that know it to be.
bool overwrites(const ferrum_rms_norm_params &norm, const uint8_t *y, const Call &residual) {
    const auto &p = residual.params<ferrum_residual_add_params>();
    const uint64_t element = residual.launch->kernel == kernel_residual_add_f32 ? 4 : 2;
    auto meets = [&](const uint8_t *x, uint64_t row_bytes) {
        const uint64_t y_row_bytes = uint64_t(norm.output_stride) * 2;
        const bool same_rows = x == y && row_bytes == y_row_bytes;
        return !same_rows && x < y + norm.rows * y_row_bytes && y < x + p.rows * row_bytes;
    };
    return meets(residual.slots[FERRUM_RESIDUAL_ADD_X], p.width * element) ||
           meets(residual.slots[FERRUM_RESIDUAL_ADD_BRANCH], uint64_t(p.branch_stride) * 2);
}

// What a list of launches that comes again needs no second look at.
struct Compiled {
    struct Varying {
        uint32_t call, slot, resource;
        uint64_t offset;
    };
    std::vector<Call> calls;
    std::vector<Varying> varying;
    uint64_t temp_bytes;
};

// A submission with its buffers resolved and its temporary memory laid out.
struct Launches : Job {
    Launches(Submission &&submission, const InstructionSet &set, unsigned threads)
        : Job(unsigned(submission.launches.size()) * kLoopsPerLaunch, threads),
          work(std::move(submission)),
          kernels(set.kernels),
          calls(work.launches.size()) {
        if (work.list && work.list->compiled) {
            const auto &known = *static_cast<const Compiled *>(work.list->compiled.get());
            calls = known.calls;
            temp_bytes = known.temp_bytes;
            for (size_t i = 0; i < calls.size(); i++) {
                calls[i].launch = &work.launches[i];
                if (calls[i].before) calls[i].before = &calls[i - 1];
            }
            std::vector<uint8_t *> base(work.resources.size());
            for (uint32_t resource : work.list->varying)
                base[resource] =
                    static_cast<uint8_t *>(work.resources[resource].buffer->host()) + work.resources[resource].offset;
            for (const Compiled::Varying &one : known.varying)
                calls[one.call].slots[one.slot] = base[one.resource] + one.offset;
            return;
        }
        uint64_t at = 0;
        for (size_t i = 0; i < calls.size(); i++) {
            const ferrum_launch &launch = work.launches[i];
            Call &call = calls[i];
            call = {};
            call.launch = &launch;
            call.threads = threads;
            for (uint32_t b = 0; b < launch.binding_count; b++) {
                const ferrum_binding &binding = launch.bindings[b];
                const Resource &resource = work.resources[binding.resource];
                call.slots[binding.slot] =
                    static_cast<uint8_t *>(resource.buffer->host()) + resource.offset + binding.offset;
            }
            if (is_linear(launch.kernel)) call.packed = prepared_weight(launch);
            // Launches that may overlap have temporary memory of their own, but projections of one input share it.
            if (launch.barrier) at = 0;
            call.temp_offset = at;
            if (i && !launch.barrier && same_input(calls[i - 1], call)) {
                call.temp_offset = calls[i - 1].temp_offset;
                call.temp_is_ready = true;
            }
            at = std::max(at, call.temp_offset + align_up(cpu::temp_bytes(launch, threads), 64));
            temp_bytes = std::max(temp_bytes, at);
            if (is_linear(launch.kernel) && !call.temp_is_ready) merge(i, set.row_function);
        }
    }
    // Norms, residuals and SwiGLU in front of linear launch `i` become part of how it prepares its input: one pass over
    // memory and one barrier instead of several.
    void merge(size_t i, RowFunction (*row_function)(uint32_t)) {
        for (; i > 0; i--) {
            const bool alone = calls[i].launch->barrier && (i == 1 || calls[i - 1].launch->barrier);
            const RowFunction function = row_function(calls[i - 1].launch->kernel);
            if (!alone || !function || !writes(calls[i - 1], input_of(calls[i]))) return;
            if (!is_linear(calls[i].launch->kernel) &&
                overwrites(calls[i].params<ferrum_rms_norm_params>(), calls[i].slots[FERRUM_RMS_NORM_Y], calls[i - 1]))
                return;
            calls[i].before = &calls[i - 1];
            calls[i - 1].row_function = function;
        }
        find_next();
        if (work.list) remember();
    }
    void remember() const {
        auto known = std::make_shared<Compiled>();
        known->calls = calls;
        known->temp_bytes = temp_bytes;
        std::vector<bool> varies(work.resources.size());
        for (uint32_t resource : work.list->varying) varies[resource] = true;
        for (uint32_t i = 0; i < calls.size(); i++) {
            const bool linear = is_linear(work.launches[i].kernel);
            if (linear && !calls[i].packed) return;  // if its weight is prepared later, that is found then
            for (uint32_t b = 0; b < work.launches[i].binding_count; b++) {
                const ferrum_binding &bound = work.launches[i].bindings[b];
                if (!varies[bound.resource]) continue;
                if (linear && bound.slot == FERRUM_LINEAR_WEIGHT) return;  // another weight each time
                known->varying.push_back({i, bound.slot, bound.resource, bound.offset});
            }
        }
        work.list->compiled = std::move(known);
    }
    const uint8_t *prepared_weight(const ferrum_launch &launch) const {
        const auto &p = *reinterpret_cast<const ferrum_linear_params *>(launch.params);
        for (uint32_t b = 0; b < launch.binding_count; b++) {
            if (launch.bindings[b].slot != FERRUM_LINEAR_WEIGHT) continue;
            const Resource &resource = work.resources[launch.bindings[b].resource];
            return static_cast<CpuBuffer *>(resource.buffer)
                ->prepared(resource.offset + launch.bindings[b].offset, linear_format(launch.kernel), p.out_features,
                           p.in_features);
        }
        return nullptr;
    }
    void run(Worker &worker) override {
        for (const Call &call : calls) {
            if (call.row_function) continue;
            if (call.launch->barrier) worker.barrier();
            kernels[call.launch->kernel](call, worker);
            // The start of this thread's share of the next matrix is on its way while the thread waits for others.
            if (!call.next_packed) continue;
            const uint8_t *start = call.next_packed + worker.share(call.next_tiles) * call.next_tile_bytes;
            for (uint64_t at = 0; at < kStreamAhead; at += 64) __builtin_prefetch(start + at);
        }
    }
    void find_next() {
        const Call *next = nullptr;
        for (size_t i = calls.size(); i-- > 0;) {
            Call &call = calls[i];
            if (next) {
                const auto &p = next->params<ferrum_linear_params>();
                call.next_packed = next->packed;
                call.next_tiles = div_up(div_up(p.out_features, kGroupOutputs), kMostTileGroups);
                call.next_tile_bytes = uint32_t(
                    kMostTileGroups * packed_bytes(linear_format(next->launch->kernel), kGroupOutputs, p.in_features));
            }
            if (call.packed && call.params<ferrum_linear_params>().rows <= FERRUM_FEW_ROWS) next = &call;
        }
    }
    // The weights that a pass of a few rows reads first, for the next token's pass.
    bool warm_up(Cursor &at) override {
        constexpr uint64_t kPiece = 4096, kMost = 8 << 20;  // what the caches keep until then
        for (; at.part < calls.size() && at.bytes < kMost; at.part++, at.offset = 0) {
            const Call &call = calls[at.part];
            if (!call.packed) continue;
            const auto &p = call.params<ferrum_linear_params>();
            if (p.rows > FERRUM_FEW_ROWS) return false;
            if (at.offset >= packed_bytes(linear_format(call.launch->kernel), p.out_features, p.in_features)) continue;
            for (uint64_t i = 0; i < kPiece; i += 64) __builtin_prefetch(call.packed + at.offset + i);
            at.offset += kPiece;
            at.bytes += kPiece;
            return true;
        }
        return false;
    }

    Submission work;
    const KernelFunction *const kernels;
    std::vector<Call> calls;
    uint64_t temp_bytes = 0;
};

struct PackingJob : Job {
    PackingJob(const Packing &packing, void (*pack)(const Packing &, uint64_t), unsigned threads)
        : Job(1, threads), packing(packing), pack(pack) {}
    void run(Worker &worker) override {
        worker.for_each(div_up(packing.rows, kGroupOutputs), 8, [&](uint64_t group) { pack(packing, group); });
    }
    const Packing packing;
    void (*const pack)(const Packing &, uint64_t);
};

class CpuDevice : public Device {
   public:
    explicit CpuDevice(const ferrum_device_options &options)
        : set_(choose(options.instruction_set)),
          pool_(std::make_unique<Pool>(options.threads ? std::min(options.threads, 256u) : available_threads())) {
        open_arena(options.arena_limit_bytes, options.poison);
    }
    ~CpuDevice() override {
        // A forked child leaks the pool: its threads are not here to be joined, and its condition variable would wait
        // for them.
        if (forked()) (void)pool_.release();
    }

    Ref<Buffer> allocate(uint64_t bytes) override { return Ref<OwnedBuffer>::adopt(new OwnedBuffer(this, bytes)); }
    Ref<Buffer> wrap(const void *data, uint64_t bytes) override {
        return Ref<WrappedBuffer>::adopt(new WrappedBuffer(this, data, bytes));
    }
    std::unique_ptr<Slab> allocate_slab(uint64_t bytes) override { return std::make_unique<MappedSlab>(bytes); }
    // Every kernel here is exact; spans of 256 tokens give several threads something to do in a short context.
    Traits traits() const override { return {256, false}; }
    void wait() override {}  // submit returns when the work is done
    ferrum_device_summary describe() const override {
        return {"cpu", set_.name, pool_->threads(), 0, machine_memory_bytes()};
    }

    void submit(Submission &&work) override {
        std::lock_guard lock(run_);
        auto job = std::make_shared<Launches>(std::move(work), set_, pool_->threads());
        if (temp_size_ < job->temp_bytes) {
            temp_.reset(static_cast<uint8_t *>(blocks.take(BlockCache::size_class(job->temp_bytes))));
            temp_size_ = BlockCache::size_class(job->temp_bytes);
        }
        for (Call &call : job->calls) call.temp = temp_.get() + call.temp_offset;
        pool_->run(job);
        // A thread may still be leaving the job; what the call kept alive goes now, while the caller is here.
        job->work.keep.clear();
        job->work.list.reset();
    }

    uint64_t prepare(const ferrum_tensor &weight) override {
        const uint64_t rows = weight.shape[0], width = weight.shape[1];
        const FormatInfo &info = *weight_format(weight.format);
        auto *buffer = reinterpret_cast<CpuBuffer *>(weight.buffer);
        const uint64_t bytes = packed_bytes(weight.format, rows, width);
        if (bytes == 0 || buffer->prepared(weight.offset, weight.format, rows, width)) return bytes;
        buffer->wait();
        std::lock_guard lock(run_);
        if (!prepared_slab_ || prepared_slab_->bytes() - prepared_used_ < bytes) {
            prepared_slab_ = std::make_shared<MappedSlab>(std::max(align_up(bytes, kHugePage), kPreparedSlab));
            prepared_used_ = 0;
        }
        Prepared copy{weight.format, rows, width, prepared_slab_, prepared_slab_->host() + prepared_used_};
        prepared_used_ += align_up(bytes, 64);
        pool_->run(std::make_shared<PackingJob>(
            Packing{static_cast<const uint8_t *>(buffer->host()) + weight.offset, rows, width,
                    width / info.block_elements * info.block_bytes, weight.format, copy.data},
            set_.pack, pool_->threads()));
        buffer->keep_prepared(weight.offset, std::move(copy));
        return bytes;
    }

    BlockCache blocks;

   private:
    const InstructionSet set_;
    std::unique_ptr<Pool> pool_;
    std::mutex run_;
    std::unique_ptr<uint8_t, decltype(&free)> temp_{nullptr, &free};
    uint64_t temp_size_ = 0;
    std::shared_ptr<MappedSlab> prepared_slab_;  // the one being filled; each copy in it keeps it alive
    uint64_t prepared_used_ = 0;
};

OwnedBuffer::OwnedBuffer(CpuDevice *device, uint64_t bytes)
    : CpuBuffer(device, bytes), cpu_(device), size_(BlockCache::size_class(bytes)), data_(device->blocks.take(size_)) {}

OwnedBuffer::~OwnedBuffer() {
    if (cpu_->forked()) return;  // the cache's lock may have been held by a thread that is not in the child
    if (cpu_->poison()) memset(data_, 0xff, size_);
    cpu_->blocks.give(data_, size_);
}

}  // namespace

}  // namespace cpu

Ref<Device> open_cpu_device(const ferrum_device_options &options) {
    return Ref<cpu::CpuDevice>::adopt(new cpu::CpuDevice(options));
}

}  // namespace ferrum
