// Memory of the CPU device.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../core/device.h"

namespace ferrum::cpu {

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
        for (auto [at, end] = prepared_.equal_range(offset); at != end; at++)
            if (const Prepared &p = at->second; p.format == format && p.rows == rows && p.width == width) return p.data;
        return nullptr;
    }
    void keep_prepared(uint64_t offset, Prepared &&copy) {
        std::lock_guard lock(mutex_);
        prepared_.emplace(offset, std::move(copy));
    }

   private:
    std::mutex mutex_;
    std::unordered_multimap<uint64_t, Prepared> prepared_;
};

}  // namespace ferrum::cpu
