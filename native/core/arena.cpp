#include "arena.h"

#include <algorithm>
#include <cstring>

#include "../include/ferrum_kernels.h"

namespace ferrum {

namespace {

constexpr uint64_t kSlabPages = 256;  // 16 MiB; memory that no page has touched costs nothing

uint32_t slots_shown(uint64_t length, uint64_t page, uint32_t tokens_per_page) {
    uint64_t start = page * tokens_per_page;
    return length <= start ? 0 : uint32_t(std::min<uint64_t>(length - start, tokens_per_page));
}

}  // namespace

// Pages in order, and the lengths of the living states that show a prefix of them. It holds exactly the pages that the
// longest of these needs, and dies with the last one.
struct PageList {
    std::vector<PageId> pages;
    std::map<uint64_t, uint32_t> lengths;
    Counted counted{live_counts.page_lists};

    uint64_t longest() const { return lengths.empty() ? 0 : lengths.rbegin()->first; }
};

KVLayout KVLayout::make(const char *op, uint64_t key_value_heads, uint64_t head_dim) {
    if (head_dim == 0 || head_dim > FERRUM_MAX_HEAD_DIM)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] head_dim: expected 1…%d, got %llu", op, FERRUM_MAX_HEAD_DIM,
             (unsigned long long)head_dim);
    if (key_value_heads == 0 || key_value_heads > FERRUM_PAGE_BYTES / (4 * head_dim))
        fail(FERRUM_INVALID_ARGUMENT,
             "[%s] key_value_heads: expected 1…%llu (a token's keys and values fit a page of %d bytes), got %llu", op,
             (unsigned long long)(FERRUM_PAGE_BYTES / (4 * head_dim)), FERRUM_PAGE_BYTES,
             (unsigned long long)key_value_heads);
    return {uint32_t(key_value_heads), uint32_t(head_dim),
            uint32_t(FERRUM_PAGE_BYTES / (4 * key_value_heads * head_dim))};
}

State::State(Ref<Device> device, KVLayout layout, PageList *list, uint64_t length)
    : layout(layout), length(length), device_(std::move(device)), list_(list) {}

// A forked child leaks its parent's pages: the arena's lock may have been held by a thread it does not have.
State::~State() {
    if (!device_->forked()) device_->arena().forget(this);
}

Arena::Arena(Device &device, uint64_t limit_bytes) : device_(device), limit_pages_(limit_bytes / FERRUM_PAGE_BYTES) {}
Arena::~Arena() = default;

Ref<State> Arena::empty(Device *device, KVLayout layout) {
    auto list = std::make_unique<PageList>();
    list->lengths[0] = 1;
    auto state = Ref<State>::adopt(new State(Ref<Device>::share(device), layout, list.get(), 0));
    list.release();
    return state;
}

Ref<State> Arena::truncate(State *state, uint64_t length) {
    std::lock_guard lock(mutex_);
    // Registered first: if the allocation below throws, the entry has to go again.
    state->list_->lengths[length]++;
    try {
        return Ref<State>::adopt(new State(state->device_, state->layout, state->list_, length));
    } catch (...) {
        hide(*state->list_, length, state->layout);
        throw;
    }
}

Arena::Step Arena::plan_append(const State &state, uint64_t tokens, const std::vector<const State *> &claimed) const {
    const KVLayout &layout = state.layout;
    const PageList &list = *state.list_;
    const uint64_t have = layout.pages(state.length), need = layout.pages(state.length + tokens);
    const uint32_t partial = uint32_t(state.length % layout.tokens_per_page);
    bool in_place = list.longest() == state.length && (!partial || mark(list.pages[have - 1]) == partial);
    for (const State *other : claimed) {  // an earlier participant of the same call took these slots
        bool same_tail = partial && layout.pages(other->length) == have && other->length % layout.tokens_per_page &&
                         other->list_->pages[have - 1] == list.pages[have - 1];
        in_place = in_place && other->list_ != &list && !same_tail;
    }
    return {in_place, need - have + (partial && !in_place ? 1 : 0)};
}

void Arena::reserve(const char *op, uint64_t fresh) {
    if (fresh > limit_pages_ - used_)
        fail(FERRUM_OUT_OF_PAGES,
             "[%s] out of pages: needed %llu more of %d bytes, %llu in use, %llu free of a limit of %llu. Close states "
             "that are no longer needed, or open the device with a larger arena_bytes",
             op, (unsigned long long)fresh, FERRUM_PAGE_BYTES, (unsigned long long)used_,
             (unsigned long long)(limit_pages_ - used_), (unsigned long long)limit_pages_);
    while (free_.size() < fresh) {
        pages_.reserve(pages_.size() + kSlabPages);
        slabs_.reserve(slabs_.size() + 1);
        free_.reserve(pages_.size() + kSlabPages);
        slabs_.push_back(device_.allocate_slab(kSlabPages * FERRUM_PAGE_BYTES));
        for (uint64_t i = 0; i < kSlabPages; i++) {
            free_.insert(free_.begin(), PageId(pages_.size()));  // lowest page on top of the stack
            pages_.emplace_back();
        }
    }
}

PageId Arena::take() {
    PageId page = free_.back();
    free_.pop_back();
    used_++, allocated_++;
    peak_ = std::max(peak_, used_);
    return page;
}

uint64_t Arena::address(PageId page) const {
    return slabs_[page / kSlabPages]->device_address() + page % kSlabPages * FERRUM_PAGE_BYTES;
}

uint32_t Arena::mark(PageId page) const {
    uint32_t most = 0;
    for (const Cover &cover : pages_[page].covers) most = std::max(most, cover.tokens);
    return most;
}

// One list shows `to` slots of the page where it showed `from`. The page is free when no list shows any.
void Arena::cover(PageId page, uint32_t from, uint32_t to) {
    auto &covers = pages_[page].covers;
    if (to) {
        auto found = std::find_if(covers.begin(), covers.end(), [&](const Cover &c) { return c.tokens == to; });
        if (found != covers.end())
            found->lists++;
        else
            covers.push_back({to, 1});
    }
    if (from) {
        auto found = std::find_if(covers.begin(), covers.end(), [&](const Cover &c) { return c.tokens == from; });
        if (--found->lists == 0) covers.erase(found);
    }
    if (from && covers.empty()) {
        if (device_.poison())
            memset(slabs_[page / kSlabPages]->host() + page % kSlabPages * FERRUM_PAGE_BYTES, 0xff, FERRUM_PAGE_BYTES);
        free_.push_back(page);
        used_--;
    }
}

// A living state of `list` is now `length` long; the pages it needs are in the list.
void Arena::show(PageList &list, uint64_t length, const KVLayout &layout) {
    uint64_t before = list.longest();
    list.lengths[length]++;
    for (uint64_t page = before / layout.tokens_per_page; length > before && page < layout.pages(length); page++)
        cover(list.pages[page], slots_shown(before, page, layout.tokens_per_page),
              slots_shown(length, page, layout.tokens_per_page));
}

void Arena::hide(PageList &list, uint64_t length, const KVLayout &layout) {
    uint64_t before = list.longest();
    auto entry = list.lengths.find(length);
    if (--entry->second == 0) list.lengths.erase(entry);
    uint64_t after = list.longest();
    for (uint64_t page = after / layout.tokens_per_page; before > after && page < layout.pages(before); page++)
        cover(list.pages[page], slots_shown(before, page, layout.tokens_per_page),
              slots_shown(after, page, layout.tokens_per_page));
    if (list.lengths.empty())
        delete &list;
    else
        list.pages.resize(layout.pages(after));
}

void Arena::forget(State *state) {
    std::lock_guard lock(mutex_);
    hide(*state->list_, state->length, state->layout);
}

Arena::Appended Arena::append(const char *op, const std::vector<State *> &states, const std::vector<uint64_t> &tokens) {
    try {
        return try_append(op, states, tokens);
    } catch (const Error &error) {
        if (error.code != FERRUM_OUT_OF_PAGES) throw;
    }
    device_.wait();  // without the lock: what is done drops its states, and that takes it
    return try_append(op, states, tokens);
}

Arena::Appended Arena::try_append(const char *op, const std::vector<State *> &states,
                                  const std::vector<uint64_t> &tokens) {
    Appended result;  // outlives the lock: dropping its states takes the lock again
    std::lock_guard lock(mutex_);
    // Reserve: count every fresh page, and make all memory allocations, before anything is claimed.
    std::vector<const State *> claimed;
    std::vector<Step> steps;
    uint64_t fresh = 0;
    for (size_t i = 0; i < states.size(); i++) {
        steps.push_back(plan_append(*states[i], tokens[i], claimed));
        fresh += steps.back().fresh;
        if (steps.back().in_place) {
            claimed.push_back(states[i]);
            auto &pages = states[i]->list_->pages;
            const uint64_t need = states[i]->layout.pages(states[i]->length + tokens[i]);
            if (need > pages.capacity()) pages.reserve(std::max<uint64_t>(need, 2 * pages.capacity()));
        }
    }
    reserve(op, fresh);
    result.states.reserve(states.size());
    result.copies.reserve(states.size());

    // Claim.
    for (size_t i = 0; i < states.size(); i++) {
        const KVLayout &layout = states[i]->layout;
        const uint64_t length = states[i]->length, extended = length + tokens[i];
        PageList *list = states[i]->list_;
        if (steps[i].in_place) {
            while (list->pages.size() < layout.pages(extended)) list->pages.push_back(take());
            show(*list, extended, layout);
        } else {
            auto branch = std::make_unique<PageList>();
            branch->pages.assign(list->pages.begin(), list->pages.begin() + long(length / layout.tokens_per_page));
            while (branch->pages.size() < layout.pages(extended)) branch->pages.push_back(take());
            if (uint32_t partial = uint32_t(length % layout.tokens_per_page)) {
                uint64_t tail = length / layout.tokens_per_page;
                result.copies.push_back({address(list->pages[tail]), address(branch->pages[tail]), partial});
                copied_++;
            }
            list = branch.release();
            show(*list, extended, layout);
        }
        result.states.push_back(Ref<State>::adopt(new State(states[i]->device_, layout, list, extended)));
    }
    return result;
}

void Arena::page_table(const State *state, uint64_t *table) {
    std::lock_guard lock(mutex_);
    for (uint64_t i = 0; i < state->layout.pages(state->length); i++) table[i] = address(state->list_->pages[i]);
}

std::vector<PageId> Arena::hold(const char *op, const std::vector<PageId> &pages,
                                const std::vector<uint32_t> &touched) {
    try {
        return try_hold(op, pages, touched);
    } catch (const Error &error) {
        if (error.code != FERRUM_OUT_OF_PAGES) throw;
    }
    device_.wait();  // without the lock, as in append
    return try_hold(op, pages, touched);
}

std::vector<PageId> Arena::try_hold(const char *op, const std::vector<PageId> &pages,
                                    const std::vector<uint32_t> &touched) {
    std::vector<PageId> result = pages;
    std::lock_guard lock(mutex_);
    reserve(op, touched.size());
    for (PageId page : pages)
        if (page != kNoPage) pages_[page].covers.reserve(1);
    for (size_t i = 0; i < touched.size(); i++) pages_[free_[free_.size() - 1 - i]].covers.reserve(1);
    for (uint32_t number : touched) {
        if (pages[number] != kNoPage) copied_++;
        result[number] = take();
    }
    for (PageId page : result)
        if (page != kNoPage) cover(page, 0, 1);
    return result;
}

void Arena::drop(const std::vector<PageId> &pages) {
    std::lock_guard lock(mutex_);
    for (PageId page : pages)
        if (page != kNoPage) cover(page, 1, 0);
}

void Arena::addresses(const std::vector<PageId> &pages, uint64_t *table) {
    std::lock_guard lock(mutex_);
    for (PageId page : pages) *table++ = page == kNoPage ? 0 : address(page);
}

ferrum_arena_stats Arena::stats() {
    std::lock_guard lock(mutex_);
    return {FERRUM_PAGE_BYTES, limit_pages_, pages_.size(), used_, limit_pages_ - used_, peak_, allocated_, copied_};
}

}  // namespace ferrum
