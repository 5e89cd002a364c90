// The CPU device.
#include <cstring>

#include "launches.h"
#include "memory.h"

namespace ferrum {

namespace cpu {

namespace {

class CpuDevice;

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

constexpr uint32_t kMostThreads = 256;

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
          pool_(
              std::make_unique<Pool>(options.threads ? std::min(options.threads, kMostThreads) : available_threads())) {
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
        if (temp_size_ < job->temp_bytes()) {
            const uint64_t size = BlockCache::size_class(job->temp_bytes());
            temp_.reset(static_cast<uint8_t *>(blocks.take(size)));
            temp_size_ = size;
        }
        job->set_temp(temp_.get());
        if (job->is_small())
            run_alone(*job);
        else
            pool_->run(job);
        job->let_go();
    }

    uint64_t prepare(const ferrum_tensor &weight) override {
        const uint64_t rows = weight.shape[0], width = weight.shape[1];
        const FormatInfo &info = *weight_format(weight.format);
        auto *buffer = reinterpret_cast<CpuBuffer *>(weight.buffer);
        const uint64_t bytes = packed_bytes(weight.format, rows, width);
        buffer->wait();
        std::lock_guard lock(run_);
        if (bytes == 0 || buffer->prepared(weight.offset, weight.format, rows, width)) return bytes;
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
