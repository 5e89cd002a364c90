#include "program.h"

#include <algorithm>

#include "operation.h"

namespace ferrum {

namespace {

constexpr const char *kOp = "jit";

// Owned by plain pointer: a thread that ends in the middle of a recording leaks it rather than running destructors of a
// library that may be half gone.
thread_local Recorder *recorder = nullptr;

// Stands for an array of a recording in which nothing runs.
class Name : public Buffer {
   public:
    using Buffer::Buffer;
    bool is_name() const override { return true; }
    void *host() override { return nullptr; }
    uint64_t device_address() override { return 0; }
};

template <class Object>
void check_name(Expected what, const Object &object, bool is_name) {
    if (is_name && !(recorder && recorder->knows(&object)))
        fail(FERRUM_INVALID_ARGUMENT,
             "[%s] %s: comes from a recording that has ended, in which nothing ran; expected what a run of the program "
             "gave",
             what.op, what.name);
}

}  // namespace

void check_known(Expected what, const Buffer &buffer) {
    check_name(what, buffer, buffer.is_name());
}
void check_known(Expected what, const State &state) {
    check_name(what, state, state.is_name);
}

// ---- Recording

Recorder *Recorder::current() {
    return recorder;
}

Recorder *Recorder::on(const Device *device) {
    return recorder && recorder->program_->device() == device ? recorder : nullptr;
}

Ref<Buffer> Recorder::allocate(Device *device, uint64_t bytes) {
    const Recorder *current = on(device);
    if (!current || current->runs) return device->allocate(bytes);
    return Ref<Name>::adopt(new Name(device, bytes));
}

Recorder::Recorder(Device *device, bool run) : runs(run), program_(Ref<Program>::adopt(new Program)) {
    program_->device_ = Ref<Device>::share(device);
}

void Recorder::begin(Device *device, bool run, const ferrum_tensor *inputs, size_t arrays, ferrum_state *const *states,
                     size_t state_count) {
    if (recorder) fail(FERRUM_INVALID_ARGUMENT, "[%s] this thread is recording already", kOp);
    std::unique_ptr<Recorder> started(new Recorder(device, run));
    Program &program = *started->program_.get();
    for (size_t i = 0; i < arrays; i++) {
        // Whatever is read of this buffer will be read of another one: it must hold the input and nothing else.
        const uint64_t bytes = check_storage({kOp, "inputs"}, device, inputs[i]);
        auto *buffer = reinterpret_cast<Buffer *>(inputs[i].buffer);
        if (inputs[i].offset || bytes != buffer->bytes() || !started->slots_.emplace(buffer, int(i)).second)
            fail(FERRUM_INVALID_ARGUMENT,
                 "[%s] inputs: expected buffers of their own, that of input %zu has other bytes or another input in it",
                 kOp, i);
        started->keep_.push_back(Ref<Buffer>::share(buffer));
        program.inputs_.push_back(inputs[i]);
        program.slots_.push_back({bytes, 0, false, 0});
    }
    for (size_t i = 0; i < state_count; i++) {
        auto *state = reinterpret_cast<State *>(required(states[i], "states[i]"));
        check_known({kOp, "states"}, *state);
        if (state->device() != device)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] states: state %zu lives on another device", kOp, i);
        if (!started->states_.emplace(state, int(i)).second)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] states: expected distinct handles, state %zu comes twice", kOp, i);
        started->keep_.push_back(Ref<State>::share(state));
        program.input_states_.push_back(state->layout);
    }
    program.state_slots_ = state_count;
    recorder = started.release();
}

void Recorder::abandon() {
    delete recorder;
    recorder = nullptr;
}

Ref<Program> Recorder::end(const ferrum_tensor *outputs, size_t arrays, ferrum_state *const *states,
                           size_t state_count) {
    if (!recorder) fail(FERRUM_INVALID_ARGUMENT, "[%s] this thread is not recording", kOp);
    std::unique_ptr<Recorder> ended(recorder);
    recorder = nullptr;
    Program &program = *ended->program_.get();
    for (size_t i = 0; i < arrays; i++) {
        auto found = ended->slots_.find(reinterpret_cast<Buffer *>(outputs[i].buffer));
        if (found == ended->slots_.end() || size_t(found->second) < program.inputs_.size())
            fail(FERRUM_UNSUPPORTED, "[%s] outputs: output %zu is a view of an input, or was not made by the function",
                 kOp, i);
        program.slots_[size_t(found->second)].is_output = true;
        program.output_arrays_.push_back(found->second);
    }
    for (size_t i = 0; i < state_count; i++) {
        auto found = ended->states_.find(reinterpret_cast<State *>(states[i]));
        if (found == ended->states_.end() || size_t(found->second) < program.input_states_.size())
            fail(FERRUM_UNSUPPORTED, "[%s] outputs: state %zu was not made by the function", kOp, i);
        program.output_states_.push_back(found->second);
    }
    program.finish();
    return std::move(ended->program_);
}

Place Recorder::place(Buffer *buffer, uint64_t offset) {
    auto found = slots_.find(buffer);
    if (found == slots_.end()) return {Ref<Buffer>::share(buffer), -1, offset};
    program_->slots_[size_t(found->second)].last_use = program_->nodes_.size();
    return {{}, found->second, offset};
}

int Recorder::add_output(Buffer *buffer) {
    const int slot = int(program_->slots_.size());
    program_->slots_.push_back({buffer->bytes(), program_->nodes_.size(), false, 0});
    slots_[buffer] = slot;
    keep_.push_back(Ref<Buffer>::share(buffer));
    return slot;
}

int Recorder::state_slot(State *state) {
    auto found = states_.find(state);
    if (found != states_.end()) return found->second;
    const int slot = int(program_->state_slots_++);
    program_->captured_states_.push_back({slot, Ref<State>::share(state)});
    return states_[state] = slot;
}

std::optional<IndexCheck> Recorder::check_of(const char *op, const char *name, const ferrum_tensor &tensor,
                                             uint64_t limit) {
    Place where = place(reinterpret_cast<Buffer *>(tensor.buffer), tensor.offset);
    if (where.slot < 0) return {};
    if (size_t(where.slot) >= program_->inputs_.size())
        fail(FERRUM_UNSUPPORTED,
             "[%s] %s: inside a jitted function expected an input, got the result of another operation", op, name);
    return IndexCheck{op, name, where, tensor.shape[0], limit};
}

void Recorder::operation(const Submission &work, const std::vector<Ref<Buffer>> &outputs) {
    LaunchNode node{work.launches, {}, {}};
    for (const Ref<Buffer> &output : outputs) node.outputs.push_back(add_output(output.get()));
    for (const Resource &resource : work.resources) node.resources.push_back(place(resource.buffer, resource.offset));
    program_->nodes_.push_back(std::move(node));
}

void Recorder::attention(Attention *attention, const ferrum_plan_request &request,
                         const ferrum_attention_weights &weights, const std::vector<State *> &states,
                         const ferrum_tensor *xs, const std::vector<Ref<State>> &new_states,
                         const std::vector<Ref<Buffer>> &outputs) {
    AttentionNode node{Ref<Attention>::share(attention), request, {}, {}, {}, {}, {}, {}};
    node.tokens.assign(request.tokens, request.tokens + request.participants);
    node.request.starts = node.request.tokens = nullptr;
    const auto *fields = reinterpret_cast<const ferrum_tensor *>(&weights);
    for (int i = 0; i < kAttentionWeights; i++)
        if (fields[i].buffer) node.weights[i] = place(reinterpret_cast<Buffer *>(fields[i].buffer), fields[i].offset);
    for (const Ref<Buffer> &output : outputs) node.outputs.push_back(add_output(output.get()));
    for (size_t i = 0; i < outputs.size(); i++)
        node.xs.push_back(place(reinterpret_cast<Buffer *>(xs[i].buffer), xs[i].offset));
    for (State *state : states) node.old_states.push_back(state_slot(state));
    for (const Ref<State> &state : new_states) {
        node.new_states.push_back(state_slot(state.get()));
        program_->captured_states_.pop_back();  // made by this node, not captured
        keep_.push_back(state);
    }
    program_->nodes_.push_back(std::move(node));
}

// Arrays that nobody outside sees share one block: a range is free again behind the last node that reads it. Every node
// begins with a barrier, so what it writes there meets no earlier reader.
void Program::lay_out_scratch() {
    std::map<uint64_t, uint64_t> free{{0, UINT64_MAX}};  // offset to bytes
    auto take = [&](uint64_t bytes) {
        for (auto [offset, room] : free) {
            if (room < bytes) continue;
            free.erase(offset);
            if (room > bytes) free[offset + bytes] = room - bytes;
            scratch_bytes_ = std::max(scratch_bytes_, offset + bytes);
            return offset;
        }
        fail(FERRUM_OUT_OF_MEMORY, "[%s] no room for scratch", kOp);
    };
    auto give = [&](uint64_t offset, uint64_t bytes) {
        auto next = free.lower_bound(offset);
        if (next != free.end() && offset + bytes == next->first) {
            bytes += next->second;
            next = free.erase(next);
        }
        if (next != free.begin() && std::prev(next)->first + std::prev(next)->second == offset)
            std::prev(next)->second += bytes;
        else
            free[offset] = bytes;
    };
    const auto size = [](const Slot &slot) { return align_up(std::max<uint64_t>(slot.bytes, 1), 256); };
    std::vector<std::vector<int>> ends(nodes_.size());
    for (size_t i = inputs_.size(); i < slots_.size(); i++)
        if (!slots_[i].is_output) ends[slots_[i].last_use].push_back(int(i));
    for (size_t n = 0; n < nodes_.size(); n++) {
        const auto *outputs = std::visit([](const auto &node) { return &node.outputs; }, nodes_[n]);
        for (int output : *outputs)
            if (Slot &slot = slots_[size_t(output)]; !slot.is_output) slot.scratch_offset = take(size(slot));
        for (int slot : ends[n]) give(slots_[size_t(slot)].scratch_offset, size(slots_[size_t(slot)]));
    }
}

}  // namespace ferrum

using namespace ferrum;

int32_t ferrum_program_begin(ferrum_device *device, uint32_t run, uint32_t arrays, const ferrum_tensor *inputs,
                             uint32_t states, ferrum_state *const *input_states) {
    return guard([&] {
        auto *owner = reinterpret_cast<Device *>(required(device, "device"));
        owner->check_usable(kOp, true);
        Recorder::begin(owner, run != 0, arrays ? required(inputs, "inputs") : nullptr, arrays,
                        states ? required(input_states, "input_states") : nullptr, states);
    });
}

int32_t ferrum_program_end(uint32_t arrays, const ferrum_tensor *outputs, uint32_t states,
                           ferrum_state *const *output_states, ferrum_program **out_program) {
    return guard([&] {
        struct Ending {
            ~Ending() { Recorder::abandon(); }
        } whatever_happens;
        required(out_program, "out_program");
        Ref<Program> program = Recorder::end(arrays ? required(outputs, "outputs") : nullptr, arrays,
                                             states ? required(output_states, "output_states") : nullptr, states);
        *out_program = reinterpret_cast<ferrum_program *>(program.detach());
    });
}

void ferrum_program_abandon(void) {
    Recorder::abandon();
}

void ferrum_program_release(ferrum_program **program) {
    release_handle<Program>(program);
}

int32_t ferrum_program_run(ferrum_program *program, const ferrum_tensor *inputs, const void *values,
                           ferrum_state *const *states, ferrum_buffer **const *out_arrays, uint32_t groups,
                           const uint32_t *sizes, ferrum_state **const *out_states, uint64_t *out_lengths) {
    return guard([&] {
        const auto *object = reinterpret_cast<const Program *>(required(program, "program"));
        if (object->arrays()) required(out_arrays, "out_arrays");
        if (groups) {
            required(sizes, "sizes");
            required(out_states, "out_states");
        }
        for (size_t i = 0; i < object->arrays(); i++) required(out_arrays[i], "out_arrays[i]");
        uint64_t variables = 0;
        for (uint32_t i = 0; i < groups; i++) {
            required(out_states[i], "out_states[i]");
            variables += sizes[i];
        }
        if (variables != object->states())
            fail(FERRUM_INVALID_ARGUMENT, "[%s] sizes: expected groups of %zu states in all, got %llu", kOp,
                 object->states(), (unsigned long long)variables);
        if (object->input_arrays() && !values) required(inputs, "inputs");
        if (object->input_states()) required(states, "states");
        Program::Outputs results = object->run(inputs, values, states);
        for (Ref<Buffer> &array : results.arrays) **out_arrays++ = reinterpret_cast<ferrum_buffer *>(array.detach());
        Ref<State> *state = results.states.data();
        for (uint32_t i = 0; i < groups; i++)
            for (uint32_t j = 0; j < sizes[i]; j++, state++) {
                if (out_lengths) *out_lengths++ = (*state)->length;
                out_states[i][j] = reinterpret_cast<ferrum_state *>(state->detach());
            }
    });
}
