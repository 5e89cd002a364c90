// Rings: the context of DFlash 2 drafts, in pages of the arena. docs/dflash2.md draws one.
#pragma once

#include "arena.h"

namespace ferrum {

constexpr uint32_t kMaxLanes = FERRUM_DFLASH2_MAX_LANES;

struct RingLayout {
    uint32_t lanes = 0;
    uint32_t window = 0;
    uint32_t key_value_heads = 0;
    uint32_t head_dim = 0;
    uint32_t slots_per_page = 0;

    uint32_t pages() const { return uint32_t((uint64_t(lanes) * window + slots_per_page - 1) / slots_per_page); }
    // Validates.
    static RingLayout make(uint32_t lanes, uint32_t window, uint32_t key_value_heads, uint32_t head_dim);
};

struct RingLane {
    uint64_t length = 0;  // tokens committed so far
    uint32_t write_position = 0;
};

// Immutable: pages that relatives share, and where each lane stands. A page that no token lies on yet is not there.
class Ring : public RefCounted {
   public:
    // Takes over the holds on `pages`.
    Ring(Ref<Device> device, RingLayout layout, std::vector<PageId> pages, const RingLane *lanes);
    ~Ring() override;
    Device *device() const { return device_.get(); }
    // Byte offset, in `table`, of the lane table: two u32 a lane, min(length, window) and write position.
    uint64_t lanes_offset() const { return uint64_t(layout.pages()) * 8; }
    // A ring with counts[b] of `rows` rows of keys and values, f32 [lanes, rows, key_value_heads, head_dim], behind
    // lane b.
    Ref<Ring> commit(const char *op, Resource keys, Resource values, uint32_t rows, const uint32_t *counts);
    // This ring's pages under other lanes.
    Ref<Ring> with_lanes(const RingLane *lanes);

    const RingLayout layout;
    RingLane lanes[kMaxLanes];
    Ref<Buffer> table;  // page addresses, then the lane table

   private:
    Counted counted_{live_counts.rings};
    Ref<Device> device_;
    std::vector<PageId> pages_;

    friend uint32_t pages_shown(const Ring &ring);
};

uint32_t pages_shown(const Ring &ring);

}  // namespace ferrum
