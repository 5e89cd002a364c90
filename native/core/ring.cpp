#include "ring.h"

#include <algorithm>

#include "launch.h"

namespace ferrum {

namespace {

// Holds that nobody has taken over yet.
struct Holds {
    Arena &arena;
    std::vector<PageId> pages;
    ~Holds() { arena.drop(pages); }
};

}  // namespace

RingLayout RingLayout::make(uint32_t lanes, uint32_t window, uint32_t key_value_heads, uint32_t head_dim) {
    constexpr const char *op = "dflash2_ring";
    if (lanes == 0 || lanes > kMaxLanes)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] lanes: expected 1…%u, got %u", op, kMaxLanes, lanes);
    if (head_dim != 64 && head_dim != 128 && head_dim != 256)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] head_dim: expected 64, 128 or 256, got %u", op, head_dim);
    const uint32_t most_heads = FERRUM_PAGE_BYTES / (4 * head_dim);
    if (key_value_heads == 0 || key_value_heads > most_heads)
        fail(FERRUM_INVALID_ARGUMENT,
             "[%s] key_value_heads: expected 1…%u (a token's keys and values fit a page of %d bytes), got %u", op,
             most_heads, FERRUM_PAGE_BYTES, key_value_heads);
    const uint32_t slots = FERRUM_PAGE_BYTES / (4 * key_value_heads * head_dim);
    const uint64_t most = uint64_t(FERRUM_MAX_STATE_PAGES) * slots / lanes;
    if (window < 3 || window > most)
        fail(FERRUM_INVALID_ARGUMENT,
             "[%s] window: expected 3…%llu (more than the rows of a block, of which there are at least 2; %d pages at "
             "most), got %u",
             op, (unsigned long long)most, FERRUM_MAX_STATE_PAGES, window);
    return {lanes, window, key_value_heads, head_dim, slots};
}

Ring::Ring(Ref<Device> device, RingLayout layout, std::vector<PageId> pages, const RingLane *given)
    : layout(layout), device_(std::move(device)) {
    std::copy_n(given, layout.lanes, lanes);
    table = device_->allocate(lanes_offset() + layout.lanes * 8);
    device_->arena().addresses(pages, static_cast<uint64_t *>(table->host()));
    auto *entries = reinterpret_cast<uint32_t *>(static_cast<uint8_t *>(table->host()) + lanes_offset());
    for (uint32_t lane = 0; lane < layout.lanes; lane++) {
        *entries++ = uint32_t(std::min<uint64_t>(lanes[lane].length, layout.window));
        *entries++ = lanes[lane].write_position;
    }
    pages_ = std::move(pages);
}

// A forked child leaks its parent's pages, as with states.
Ring::~Ring() {
    if (!device_->forked()) device_->arena().drop(pages_);
}

Ref<Ring> Ring::with_lanes(const RingLane *given) {
    Holds holds{device_->arena(), device_->arena().hold("dflash2_ring", pages_, {})};
    Ref<Ring> ring = Ref<Ring>::adopt(new Ring(device_, layout, holds.pages, given));
    holds.pages.clear();
    return ring;
}

Ref<Ring> Ring::commit(const char *op, Resource keys, Resource values, uint32_t rows, const uint32_t *counts) {
    std::vector<uint32_t> touched;
    std::vector<bool> is_touched(layout.pages());
    RingLane after[kMaxLanes];
    for (uint32_t lane = 0; lane < layout.lanes; lane++) {
        for (uint32_t i = 0; i < counts[lane]; i++) {
            const uint64_t slot = (uint64_t(lanes[lane].write_position) + i) % layout.window;
            const auto page = uint32_t((uint64_t(lane) * layout.window + slot) / layout.slots_per_page);
            if (!is_touched[page]) touched.push_back(page);
            is_touched[page] = true;
        }
        after[lane] = {lanes[lane].length + counts[lane],
                       uint32_t((uint64_t(lanes[lane].write_position) + counts[lane]) % layout.window)};
    }
    if (touched.empty()) return Ref<Ring>::share(this);
    const uint64_t lanes_at = touched.size() * 24;
    Ref<Buffer> work_table = device_->allocate(lanes_at + layout.lanes * 8);
    Holds holds{device_->arena(), device_->arena().hold(op, pages_, touched)};
    Ref<Ring> ring = Ref<Ring>::adopt(new Ring(device_, layout, holds.pages, after));
    holds.pages.clear();

    const auto *sources = static_cast<const uint64_t *>(table->host());
    const auto *targets = static_cast<const uint64_t *>(ring->table->host());
    auto *entry = static_cast<uint64_t *>(work_table->host());
    for (uint32_t page : touched) {
        *entry++ = sources[page];
        *entry++ = targets[page];
        *entry++ = page;
    }
    auto *positions = reinterpret_cast<uint32_t *>(entry);
    for (uint32_t lane = 0; lane < layout.lanes; lane++) {
        *positions++ = counts[lane];
        *positions++ = lanes[lane].write_position;
    }
    Submission work;
    work.label = op;
    Launch launch(kernel_dflash2_commit_bf16);
    const uint32_t pages = work.add(work_table.get());
    launch.bind(FERRUM_DFLASH2_COMMIT_KEY, work.add(keys.buffer, keys.offset))
        .bind(FERRUM_DFLASH2_COMMIT_VALUE, work.add(values.buffer, values.offset))
        .bind(FERRUM_DFLASH2_COMMIT_PAGES, pages)
        .bind(FERRUM_DFLASH2_COMMIT_LANES, pages, lanes_at)
        .with(FERRUM_DFLASH2_COMMIT_PARAMS,
              ferrum_dflash2_params{layout.lanes, 0, layout.key_value_heads, layout.head_dim, rows, layout.window, 0,
                                    layout.slots_per_page})
        .over(layout.slots_per_page, uint32_t(touched.size()), 8 * FERRUM_SIMD_WIDTH);
    work.launches.push_back(launch);
    for (const Resource &resource : work.resources) work.keep.push_back(Ref<Buffer>::share(resource.buffer));
    work.keep.push_back(Ref<Ring>::share(this));
    work.keep.push_back(ring);
    device_->submit(std::move(work));
    return ring;
}

uint32_t pages_shown(const Ring &ring) {
    return uint32_t(std::count_if(ring.pages_.begin(), ring.pages_.end(), [](PageId page) { return page != kNoPage; }));
}

}  // namespace ferrum
