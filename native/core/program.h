// Programs: calls recorded once and replayed as one. docs/programs.md says what a recording takes in and what it
// refuses.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <variant>

#include "causal_attention.h"

namespace ferrum {

// Bytes that a node reads or writes: of a slot, which is another buffer in every run, or of one that stays.
struct Place {
    Ref<Buffer> constant;
    int slot = -1;
    uint64_t offset = 0;
};

// A call of one operation as it was recorded.
struct LaunchNode {
    std::vector<ferrum_launch> launches;
    std::vector<Place> resources;
    std::vector<int> outputs;
};

struct AttentionNode {
    Ref<Attention> attention;
    ferrum_plan_request request;  // starts and tokens are filled in by a run
    Place weights[kAttentionWeights];
    std::vector<Place> xs;
    std::vector<int> outputs;
    std::vector<uint64_t> tokens;
    std::vector<int> old_states, new_states;
};

// Indices that a run reads before it starts anything.
struct IndexCheck {
    const char *op, *name;
    Place place;
    uint64_t count, limit;
};

// A program's launches as one list over one list of resources, for one topology of its attentions' plans. A run copies
// both and fills in what is its own: buffers, page tables, and params of attention.
struct Schedule : LaunchList {
    struct Step {
        size_t first;     // of the attention's launches
        uint64_t tables;  // where its page tables are in the block
    };
    struct Base {
        size_t index;  // an input, an output array, or the block
        uint64_t offset;
    };
    std::vector<Ref<AttentionPlan>> plans;  // of each attention; those that differ in their weights alone share one
    std::vector<Step> steps;
    std::vector<Base> bases;  // of each resource that varies
    uint64_t partials;        // where they are in the block, which ends with them, and with values
};

class Program : public RefCounted {
   public:
    Device *device() const { return device_.get(); }

    struct Outputs {
        std::vector<Ref<Buffer>> arrays;
        std::vector<Ref<State>> states;
    };
    // `values`, where it is not NULL, has the inputs' bytes one after another, and `inputs` is ignored.
    Outputs run(const ferrum_tensor *inputs, const void *values, ferrum_state *const *states) const;
    size_t input_arrays() const { return inputs_.size(); }
    size_t input_states() const { return input_states_.size(); }
    size_t arrays() const { return output_arrays_.size(); }
    size_t states() const { return output_states_.size(); }

   private:
    friend class Recorder;
    struct Slot {
        uint64_t bytes = 0;
        size_t last_use = 0;     // node
        bool is_output = false;  // has a buffer of its own, else lies in scratch
        uint64_t scratch_offset = 0;
    };
    // One attention's part in a run.
    struct Step {
        const AttentionNode *node;
        bool like_previous;     // but for the weights and, maybe, the states' lengths
        uint32_t first, count;  // of old_slots_, new_slots_ and tokens_
    };
    void finish();
    void lay_out_scratch();
    void list_steps();

    std::vector<Ref<AttentionPlan>> plan(const std::vector<Ref<State>> &states, const Schedule *latest) const;
    std::shared_ptr<const Schedule> latest_schedule() const;
    std::shared_ptr<const Schedule> schedule(const std::vector<Ref<AttentionPlan>> &plans) const;
    std::shared_ptr<const Schedule> make_schedule(const std::vector<Ref<AttentionPlan>> &plans) const;

    Counted counted_{live_counts.programs};
    Ref<Device> device_;
    std::vector<ferrum_tensor> inputs_;  // their shapes and formats; slots 0…
    std::vector<KVLayout> input_states_;
    std::vector<Slot> slots_;
    size_t state_slots_ = 0;
    std::vector<std::pair<int, Ref<State>>> captured_states_;
    std::vector<std::variant<LaunchNode, AttentionNode>> nodes_;
    std::vector<IndexCheck> checks_;
    std::vector<int> output_arrays_, output_states_;
    uint64_t scratch_bytes_ = 0;
    std::vector<Step> steps_;
    std::vector<int> old_slots_, new_slots_;
    std::vector<uint64_t> tokens_;

    mutable std::mutex mutex_;
    mutable std::vector<std::shared_ptr<const Schedule>> schedules_;  // the latest used first
};

// Fails for the name of an array or a state, unless the recording that made it still lasts, on this thread.
void check_known(Expected what, const Buffer &buffer);
void check_known(Expected what, const State &state);

// Takes down the calls of one thread, while they run as ever or instead.
class Recorder {
   public:
    static Recorder *current();                 // this thread's, or NULL
    static Recorder *on(const Device *device);  // the same, if it takes down the calls on this device
    // For the output of an operation: memory, or its name where nothing runs.
    static Ref<Buffer> allocate(Device *device, uint64_t bytes);
    static void begin(Device *device, bool run, const ferrum_tensor *inputs, size_t arrays, ferrum_state *const *states,
                      size_t state_count);
    // The recorded program. Ends the recording, whether it succeeds or not.
    static Ref<Program> end(const ferrum_tensor *outputs, size_t arrays, ferrum_state *const *states,
                            size_t state_count);
    static void abandon();

    const bool runs;
    // Whether the array is an input or depends on one.
    bool knows(const Buffer *buffer) const { return slots_.count(const_cast<Buffer *>(buffer)); }
    bool knows(const State *state) const { return states_.count(const_cast<State *>(state)); }
    // That the indices are an input's, whose values a run checks; none is needed where they are the same in every run.
    std::optional<IndexCheck> check_of(const char *op, const char *name, const ferrum_tensor &tensor, uint64_t limit);
    void check_in_runs(IndexCheck &&check) { program_->checks_.push_back(std::move(check)); }
    void operation(const Submission &work, const std::vector<Ref<Buffer>> &outputs);
    void attention(Attention *attention, const ferrum_plan_request &request, const ferrum_attention_weights &weights,
                   const std::vector<State *> &states, const ferrum_tensor *xs,
                   const std::vector<Ref<State>> &new_states, const std::vector<Ref<Buffer>> &outputs);

   private:
    Recorder(Device *device, bool run);
    Place place(Buffer *buffer, uint64_t offset);
    int add_output(Buffer *buffer);
    int state_slot(State *state);

    Ref<Program> program_;
    std::map<Buffer *, int> slots_;
    std::map<State *, int> states_;
    // What was seen stays alive until the end, so that no address comes twice.
    std::vector<Ref<RefCounted>> keep_;
};

}  // namespace ferrum
