// Causal paged attention: the validated configuration and the pure plan of a call.
#pragma once

#include <array>
#include <optional>

#include "arena.h"
#include "launch.h"

namespace ferrum {

struct AttentionShape : ferrum_attention_config {
    KVLayout layout;
    uint32_t span_tokens;  // of this device: whole pages
    bool exact;

    uint64_t query_features() const { return uint64_t(query_heads) * head_dim; }
    uint64_t query_projection_features() const { return query_features() * (output_gate ? 2 : 1); }
    uint64_t key_value_features() const { return uint64_t(key_value_heads) * head_dim; }
    uint64_t maximum_pages() const { return layout.pages(maximum_context_tokens); }
    // Validates every rule of the configuration.
    static AttentionShape make(const ferrum_attention_config &config, Traits traits);
};

class Attention : public RefCounted {
   public:
    Attention(Ref<Device> device, const ferrum_attention_config &config, const double *inverse_frequencies);
    Device *device() const { return device_.get(); }
    const AttentionShape shape;
    Ref<Buffer> rope;  // rows of (cos, sin) pairs: FERRUM_ROPE_LOW low positions, then multiples of FERRUM_ROPE_LOW

   private:
    Counted counted_{live_counts.attentions};
    Ref<Device> device_;
};

// Scratch of a call: seven regions, each a row per token of all participants, rows aligned.
struct ScratchLayout {
    enum Region { normalized, query_raw, key_raw, value_raw, query, context, projected, region_count };
    uint64_t offset[region_count];
    uint32_t stride[region_count];  // elements between tokens
    uint64_t bytes_per_token;
    uint64_t bytes;

    ScratchLayout(const AttentionShape &shape, uint64_t total_tokens);
    uint64_t at(Region region, uint64_t token) const { return offset[region] + token * stride[region] * 2; }
};

struct AttentionPlan : public RefCounted {
    std::optional<Counted> counted;  // as a handle; programs keep plans of their own
    ferrum_plan_summary summary{};   // but for the fingerprint
    std::vector<uint64_t> topology;  // what the fingerprint is of
    std::array<uint8_t, 32> fingerprint() const;
    // The plan of the same call behind `start` tokens, for one sequence: NULL where that takes other launches.
    Ref<AttentionPlan> behind(const AttentionShape &shape, uint64_t start) const;
    const AttentionPlan *like = nullptr;  // the plan whose `behind` this is; its launches are these but for params
    std::vector<ferrum_launch> launches;
    std::vector<ferrum_resource> resources;
    std::vector<uint64_t> page_table_offsets;  // bytes, per participant
    std::vector<uint64_t> partials_offsets;    // the same
};

// Pure: a function of its arguments. Reads no state, arena or buffer.
Ref<AttentionPlan> plan_causal_attention(const AttentionShape &shape, const ferrum_plan_request &request);

// The weights in the order of ferrum_attention_weights.
constexpr int kAttentionWeights = 11;

// Where a planned call's tensors are.
struct AttentionOperands {
    std::vector<Resource> xs, ys;
    Resource weights[kAttentionWeights];
    Resource scratch, partials, tables;
};
// Writes the page tables of the new states and adds the call's launches, copies of shared pages first.
void add_causal_attention(Submission &work, const Attention &attention, const AttentionPlan &plan,
                          const Arena::Appended &appended, const AttentionOperands &operands);

}  // namespace ferrum
