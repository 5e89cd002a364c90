// The arena: every state's keys and values, in pages shared copy-on-write. docs/states.md draws the claim rule.
#pragma once

#include <mutex>

#include "../include/ferrum_kernels.h"
#include "device.h"

namespace ferrum {

struct KVLayout {
    uint32_t key_value_heads = 0;
    uint32_t head_dim = 0;
    uint32_t tokens_per_page = 0;

    uint64_t bytes_per_token() const { return uint64_t(key_value_heads) * head_dim * 4; }
    uint64_t pages(uint64_t tokens) const { return (tokens + tokens_per_page - 1) / tokens_per_page; }
    bool operator==(const KVLayout &other) const {
        return key_value_heads == other.key_value_heads && head_dim == other.head_dim;
    }
    // Validates; `op` prefixes the message.
    static KVLayout make(const char *op, uint64_t key_value_heads, uint64_t head_dim);
};

using PageId = uint32_t;
constexpr PageId kNoPage = UINT32_MAX;
struct PageList;

// Immutable: a prefix, `length` tokens long, of a page list that relatives share.
class State : public RefCounted {
   public:
    State(Ref<Device> device, KVLayout layout, PageList *list, uint64_t length, bool is_name = false);
    ~State() override;
    Device *device() const { return device_.get(); }
    const KVLayout layout;
    const uint64_t length;
    const bool is_name;  // of a state that only runs of a program have

   private:
    friend class Arena;
    Counted counted_{live_counts.states};
    Ref<Device> device_;
    PageList *const list_;
};

// Before a new state's slots are written, the first `tokens` tokens of `source` have to be copied to `target`.
struct PageCopy {
    uint64_t source;  // device addresses
    uint64_t target;
    uint32_t tokens;
};

class Arena {
   public:
    Arena(Device &device, uint64_t limit_bytes);
    ~Arena();

    Ref<State> empty(Device *device, KVLayout layout, bool is_name = false);
    Ref<State> truncate(State *state, uint64_t length);

    struct Appended {
        std::vector<Ref<State>> states;
        std::vector<PageCopy> copies;
    };
    // Waits for calls under way, once, where the pages they hold are what is missing.
    // States with tokens[i] unwritten slots claimed behind states[i]: all of them or, on failure, none.
    Appended append(const char *op, const std::vector<State *> &states, const std::vector<uint64_t> &tokens);
    // The same into made[0…count) and behind `copies`; on failure the caller drops what is in `made`.
    void append(const char *op, size_t count, State *const *states, const uint64_t *tokens, Ref<State> *made,
                std::vector<PageCopy> &copies);
    // Brings what an append to these states, or their end, reads into the caches: for those who have many of them.
    void fetch(State *const *states, size_t count);

    // Numbers of the state's pages, in order.
    std::vector<PageId> pages(const State *state);
    // Device addresses of the state's pages, in order.
    void page_table(const State *state, uint64_t *table);

    // Pages of a ring: those of `pages` held once more, but for the numbers in `touched`, which get fresh ones.
    // Waits as append does.
    std::vector<PageId> hold(const char *op, const std::vector<PageId> &pages, const std::vector<uint32_t> &touched);
    void drop(const std::vector<PageId> &pages);
    // Device addresses of a ring's pages; 0 for kNoPage.
    void addresses(const std::vector<PageId> &pages, uint64_t *table);

    ferrum_arena_stats stats();

   private:
    friend class State;
    struct Cover {
        uint32_t tokens;  // leading slots that `lists` lists show through their longest living state
        uint32_t lists;
    };
    struct Page {
        std::vector<Cover> covers;  // rarely more than two; empty: free
    };

    struct Step {  // what one participant's append takes
        bool in_place;
        uint64_t fresh;
    };
    void try_append(const char *op, size_t count, State *const *states, const uint64_t *tokens, Ref<State> *made,
                    std::vector<PageCopy> &copies);
    std::vector<PageId> try_hold(const char *op, const std::vector<PageId> &pages,
                                 const std::vector<uint32_t> &touched);
    Step plan_append(State *const *states, size_t i, uint64_t tokens, const Step *steps) const;
    void reserve(const char *op, uint64_t fresh);
    PageId take();
    uint64_t address(PageId page) const;
    uint32_t mark(PageId page) const;
    void cover(PageId page, uint32_t from, uint32_t to);
    void show(PageList &list, uint64_t length, const KVLayout &layout);
    void hide(PageList &list, uint64_t length, const KVLayout &layout);
    void forget(State *state);

    Device &device_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Slab>> slabs_;
    std::vector<Page> pages_;
    std::vector<PageId> free_;
    uint64_t limit_pages_;
    uint64_t used_ = 0, peak_ = 0, allocated_ = 0, copied_ = 0;
};

}  // namespace ferrum
