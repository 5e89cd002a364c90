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
    struct Living {
        uint64_t length;
        uint32_t states;
    };
    std::vector<PageId> pages;
    std::vector<Living> lengths;  // shortest first; a sequence that is decoded has one or two
    Counted counted{live_counts.page_lists};

    uint64_t longest() const { return lengths.empty() ? 0 : lengths.back().length; }
    std::vector<Living>::iterator find(uint64_t length) {
        return std::lower_bound(lengths.begin(), lengths.end(), length,
                                [](const Living &living, uint64_t value) { return living.length < value; });
    }
    void add(uint64_t length) {
        auto at = find(length);
        if (at == lengths.end() || at->length != length) at = lengths.insert(at, {length, 0});
        at->states++;
    }
    void remove(uint64_t length) {
        auto at = find(length);
        if (--at->states == 0) lengths.erase(at);
    }
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

State::State(Ref<Device> device, KVLayout layout, PageList *list, uint64_t length, bool is_name)
    : layout(layout), length(length), is_name(is_name), device_(std::move(device)), list_(list) {}

// A forked child leaks its parent's pages: the arena's lock may have been held by a thread it does not have.
State::~State() {
    if (!device_->forked()) device_->arena().forget(this);
}

Arena::Arena(Device &device, uint64_t limit_bytes) : device_(device), limit_pages_(limit_bytes / FERRUM_PAGE_BYTES) {}
Arena::~Arena() = default;

Ref<State> Arena::empty(Device *device, KVLayout layout, bool is_name) {
    auto list = std::make_unique<PageList>();
    list->add(0);
    auto state = Ref<State>::adopt(new State(Ref<Device>::share(device), layout, list.get(), 0, is_name));
    list.release();
    return state;
}

Ref<State> Arena::truncate(State *state, uint64_t length) {
    std::lock_guard lock(mutex_);
    // Registered first: if the allocation below throws, the entry has to go again.
    state->list_->add(length);
    try {
        return Ref<State>::adopt(new State(state->device_, state->layout, state->list_, length));
    } catch (...) {
        hide(*state->list_, length, state->layout);
        throw;
    }
}

// The step of states[i], behind those of the states before it.
Arena::Step Arena::plan_append(State *const *states, size_t i, uint64_t tokens, const Step *steps) const {
    const State &state = *states[i];
    const KVLayout &layout = state.layout;
    const PageList &list = *state.list_;
    const uint64_t have = layout.pages(state.length), need = layout.pages(state.length + tokens);
    const uint32_t partial = uint32_t(state.length % layout.tokens_per_page);
    bool in_place = list.longest() == state.length && (!partial || mark(list.pages[have - 1]) == partial);
    for (size_t j = 0; in_place && j < i; j++) {  // an earlier participant of the same call may have taken these slots
        if (!steps[j].in_place) continue;
        const State *other = states[j];
        bool same_tail = partial && layout.pages(other->length) == have && other->length % layout.tokens_per_page &&
                         other->list_->pages[have - 1] == list.pages[have - 1];
        in_place = other->list_ != &list && !same_tail;
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
    list.add(length);
    for (uint64_t page = before / layout.tokens_per_page; length > before && page < layout.pages(length); page++)
        cover(list.pages[page], slots_shown(before, page, layout.tokens_per_page),
              slots_shown(length, page, layout.tokens_per_page));
}

void Arena::hide(PageList &list, uint64_t length, const KVLayout &layout) {
    uint64_t before = list.longest();
    list.remove(length);
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
    Appended result;
    result.states.resize(states.size());
    append(op, states.size(), states.data(), tokens.data(), result.states.data(), result.copies);
    return result;
}

void Arena::append(const char *op, size_t count, State *const *states, const uint64_t *tokens, Ref<State> *made,
                   std::vector<PageCopy> &copies) {
    try {
        return try_append(op, count, states, tokens, made, copies);
    } catch (const Error &error) {
        if (error.code != FERRUM_OUT_OF_PAGES) throw;
    }
    device_.wait();  // without the lock: what is done drops its states, and that takes it
    try_append(op, count, states, tokens, made, copies);
}

// What was made before a failure is in `made`, which the caller drops without the lock: dropping takes it again.
void Arena::try_append(const char *op, size_t count, State *const *states, const uint64_t *tokens, Ref<State> *made,
                       std::vector<PageCopy> &copies) {
    Step one;
    std::vector<Step> several(count > 1 ? count : 0);
    Step *steps = count > 1 ? several.data() : &one;
    std::lock_guard lock(mutex_);
    // Reserve: count every fresh page, and make all memory allocations, before anything is claimed.
    uint64_t fresh = 0;
    size_t branches = 0;
    for (size_t i = 0; i < count; i++) {
        steps[i] = plan_append(states, i, tokens[i], steps);
        fresh += steps[i].fresh;
        branches += !steps[i].in_place;
        if (steps[i].in_place) {
            PageList &list = *states[i]->list_;
            const uint64_t need = states[i]->layout.pages(states[i]->length + tokens[i]);
            if (need > list.pages.capacity()) list.pages.reserve(std::max<uint64_t>(need, 2 * list.pages.capacity()));
            if (list.lengths.size() == list.lengths.capacity()) list.lengths.reserve(2 * list.lengths.size() + 1);
        }
    }
    reserve(op, fresh);
    if (branches) copies.reserve(copies.size() + branches);

    // Claim.
    for (size_t i = 0; i < count; i++) {
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
                copies.push_back({address(list->pages[tail]), address(branch->pages[tail]), partial});
                copied_++;
            }
            list = branch.release();
            show(*list, extended, layout);
        }
        made[i] = Ref<State>::adopt(new State(states[i]->device_, layout, list, extended));
    }
}

// Long after a state was made its memory has left the caches, and a walk of many such chains waits at every link. Link
// by link for all of them, the waits overlap.
void Arena::fetch(State *const *states, size_t count) {
    for (size_t i = 0; i < count; i++) __builtin_prefetch(states[i]->list_);
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < count; i++) {
        __builtin_prefetch(states[i]->list_->lengths.data());
        const auto &pages = states[i]->list_->pages;
        __builtin_prefetch(pages.data() + pages.size());
    }
    for (size_t i = 0; i < count; i++)
        if (const auto &pages = states[i]->list_->pages; !pages.empty()) __builtin_prefetch(&pages_[pages.back()]);
    for (size_t i = 0; i < count; i++)
        if (const auto &pages = states[i]->list_->pages; !pages.empty())
            __builtin_prefetch(pages_[pages.back()].covers.data());
}

std::vector<PageId> Arena::pages(const State *state) {
    std::lock_guard lock(mutex_);
    const auto &pages = state->list_->pages;
    return {pages.begin(), pages.begin() + long(state->layout.pages(state->length))};
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
