// What a thread will read of the pages, fetched while it computes with what it has. A core has few reads of memory
// under way at once, and reads of its caches queue behind them: so every line is asked for once, shortly before its
// use, in the order of use, and at the pace of computing. Where a thread has many spans before it, the order of memory
// is worth more: behind every run of it the core reads on into what nobody wants yet. There the heads of a span go
// together, page by page, a span ahead.
#pragma once

#include "causal_attention.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

// The work of a call: numbered parts, each a span for a key head.
struct Parts {
    uint32_t heads, spans;
    bool heads_first;  // part = span * heads + head, else head * spans + span
    uint64_t count() const { return (uint64_t)heads * spans; }
    uint32_t head(uint64_t part) const { return uint32_t(heads_first ? part % heads : part / spans); }
    uint32_t span(uint64_t part) const { return uint32_t(heads_first ? part / heads : part % spans); }
};

// A place on the way through parts, always some way ahead of the work.
class Ahead {
   public:
    Ahead(const Params &p, const uint64_t *pages, Parts parts) : p_(p), pages_(pages), parts_(parts) {}

    // Before part `part`: the thread will go through parts [part, end), of whose keys rows see those in `seen`. One
    // that reads all of a part before it computes has only later ones fetched.
    void start(uint64_t part, uint64_t end, Range seen, bool reads_first) {
        if (part != expected_ || end != end_part_) {
            part_ = part + reads_first;
            end_part_ = end;
            seen_ = seen;
            at_ = end_ = (const half *)pages_;
            const uint32_t head_elements = 2 * p_.span_tokens * p_.head_dim;
            heads_ = parts_.heads < kSpanElements / head_elements ? parts_.heads : kSpanElements / head_elements;
            if (reads_first || !parts_.heads_first || end - part < kManySpans * parts_.heads ||
                heads_ < (parts_.heads + 1) / 2)
                heads_ = 1;
            if (enter_part() && !reads_first) fetch_on(heads_ > 1 ? heads_ * head_elements : kLead + late_values());
        }
        expected_ = part + 1;
    }
    // A piece to be fetched while as many elements are computed with. It may have been already.
    const half *take(uint32_t elements) {
        const half *piece = at_;
        if (uint64_t(end_ - at_) < elements) {
            piece = end_ - elements;
            fetch_on(elements);
        } else {
            at_ += elements;
        }
        return piece;
    }

   private:
    // In elements: 12 KiB in the order of use, and a span as large as a quarter of the second cache.
    static constexpr uint32_t kLead = 6144, kSpanElements = 128 << 10, kManySpans = 8;

    // Values are weighed some dims at a time: when the first ones are through, all keys' are needed.
    uint32_t late_values() const {
        return p_.head_dim > kDirectVectors * kLanes ? (p_.head_dim - kDirectVectors * kLanes) * p_.span_tokens : 0;
    }

    // Fetches the next so many elements, from run to run.
    FERRUM_NOINLINE void fetch_on(uint64_t elements) {
        for (;;) {
            const uint64_t count = elements < uint64_t(end_ - at_) ? elements : uint64_t(end_ - at_);
            for (uint64_t i = 0; i < count; i += 32) __builtin_prefetch(at_ + i);
            at_ += count;
            elements -= count;
            if (elements == 0 || !next_run()) return;
        }
    }

    // The first run of `part_` or, if no row sees its span, of a later part.
    bool enter_part() {
        for (; part_ < end_part_; part_ = next_part_) {
            const uint32_t head = parts_.head(part_), left = parts_.heads - head, heads = heads_ - head % heads_;
            next_part_ = part_ + (heads_ == 1 ? 1 : heads < left ? heads : left);
            if (next_part_ > end_part_) next_part_ = end_part_;
            const uint32_t begin = (p_.first_span + parts_.span(part_)) * p_.span_tokens;
            keys_ = {begin > seen_.begin ? begin : seen_.begin, begin + p_.span_tokens};
            if (keys_.end > seen_.end) keys_.end = seen_.end;
            if (keys_.begin >= keys_.end) continue;
            page_ = keys_.begin / p_.tokens_per_page;
            values_ = false;
            enter_run();
            return true;
        }
        return false;
    }

    bool next_run() {
        if (part_ >= end_part_) return false;
        if (++page_ * p_.tokens_per_page >= keys_.end) {
            page_ = keys_.begin / p_.tokens_per_page;
            values_ = !values_;
            if (!values_ || heads_ > 1) {
                part_ = next_part_;
                return enter_part();
            }
        }
        enter_run();
        return true;
    }

    // Of a page, keys or values that rows see; or all of several heads.
    void enter_run() {
        const uint32_t dim = p_.head_dim, per_page = p_.tokens_per_page, first = page_ * per_page;
        const half *head = (const half *)pages_[page_] + ferrum_kv_head(per_page, dim, parts_.head(part_));
        if (heads_ > 1) {
            at_ = head;
            end_ = at_ + ferrum_kv_head(per_page, dim, uint32_t(next_part_ - part_));
            return;
        }
        uint32_t from = keys_.begin > first ? keys_.begin - first : 0;
        uint32_t to = keys_.end - first < per_page ? keys_.end - first : per_page;
        if (!values_) {  // whole tiles
            from -= from % FERRUM_KEY_TILE;
            to = per_page - to < FERRUM_KEY_TILE ? per_page
                                                 : (to + FERRUM_KEY_TILE - 1) / FERRUM_KEY_TILE * FERRUM_KEY_TILE;
        }
        at_ = head + (values_ ? ferrum_kv_value(per_page, dim, from) : from * dim);
        end_ = at_ + (to - from) * dim;
    }

    const Params &p_;
    const uint64_t *pages_;
    const Parts parts_;
    uint64_t expected_ = ~uint64_t(0), end_part_ = 0;
    Range seen_{};
    uint32_t heads_ = 1;  // that are fetched together, page by page
    // The run that is being handed out: of which part, or parts, which of their keys, page, and whether their values.
    uint64_t part_ = 0, next_part_ = 0;
    Range keys_{};
    uint32_t page_ = 0;
    bool values_ = false;
    const half *at_ = nullptr, *end_ = nullptr;
};

}  // namespace

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
