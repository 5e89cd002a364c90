#include "program.h"

#include <algorithm>

#include "operation.h"

namespace ferrum {

namespace {

constexpr const char *kOp = "jit";

// Owned by plain pointer: a thread that ends in the middle of a recording leaks it rather than running destructors of a
// library that may be half gone.
thread_local Recorder *recorder = nullptr;

bool same_request(const AttentionNode &a, const AttentionNode &b) {
    const auto &x = a.request, &y = b.request;
    return a.attention.get() == b.attention.get() && x.form == y.form && x.hidden_format == y.hidden_format &&
           std::equal(x.projection_formats, x.projection_formats + 4, y.projection_formats) &&
           x.constants == y.constants && x.biases == y.biases && a.tokens == b.tokens;
}

}  // namespace

// ---- Recording

Recorder *Recorder::current() {
    return recorder;
}

Recorder *Recorder::on(const Device *device) {
    return recorder && recorder->program_->device() == device ? recorder : nullptr;
}

Recorder::Recorder(Device *device) : program_(Ref<Program>::adopt(new Program)) {
    program_->device_ = Ref<Device>::share(device);
}

void Recorder::begin(Device *device, const ferrum_tensor *inputs, size_t arrays, ferrum_state *const *states,
                     size_t state_count) {
    if (recorder) fail(FERRUM_INVALID_ARGUMENT, "[%s] this thread is recording already", kOp);
    std::unique_ptr<Recorder> started(new Recorder(device));
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
        program.slots_.push_back({});
    }
    for (size_t i = 0; i < state_count; i++) {
        auto *state = reinterpret_cast<State *>(required(states[i], "states[i]"));
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
    program.lay_out_scratch();
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

void Recorder::check_indices(const char *op, const char *name, const ferrum_tensor &tensor, uint64_t limit) {
    Place where = place(reinterpret_cast<Buffer *>(tensor.buffer), tensor.offset);
    if (where.slot < 0) return;  // checked as it was recorded
    if (size_t(where.slot) >= program_->inputs_.size())
        fail(FERRUM_UNSUPPORTED,
             "[%s] %s: inside a jitted function expected an input, got the result of another operation", op, name);
    program_->checks_.push_back({op, name, where, tensor.shape[0], limit});
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

// ---- Running

Program::Outputs Program::run(const ferrum_tensor *inputs, ferrum_state *const *state_handles) const {
    Device *device = device_.get();
    device->check_usable(kOp);
    std::vector<Resource> slots(slots_.size());
    for (size_t i = 0; i < inputs_.size(); i++) {
        const ferrum_tensor &given = inputs[i], &wanted = inputs_[i];
        check_storage({kOp, "inputs"}, device, given);
        if (given.format != wanted.format || given.rank != wanted.rank ||
            !std::equal(given.shape, given.shape + given.rank, wanted.shape))
            fail(FERRUM_INVALID_ARGUMENT, "[%s] inputs: expected %s %s for input %zu as it was recorded, got %s %s",
                 kOp, format_name(wanted.format).c_str(), shape_text(wanted.shape, wanted.rank).c_str(), i,
                 format_name(given.format).c_str(), shape_text(given.shape, given.rank).c_str());
        slots[i] = {reinterpret_cast<Buffer *>(given.buffer), given.offset};
    }
    std::vector<Ref<State>> states(state_slots_);
    for (size_t i = 0; i < input_states_.size(); i++) {
        auto *state = reinterpret_cast<State *>(required(state_handles[i], "states[i]"));
        if (state->device() != device || !(state->layout == input_states_[i]))
            fail(FERRUM_INVALID_ARGUMENT, "[%s] states: state %zu is not of the kind that was recorded", kOp, i);
        states[i] = Ref<State>::share(state);
    }
    for (const auto &[slot, state] : captured_states_) states[size_t(slot)] = state;
    for (const IndexCheck &check : checks_) {
        const Resource &at = slots[size_t(check.place.slot)];
        check_index_range(check.op, check.name, at.buffer, at.offset + check.place.offset, check.count, check.limit);
    }

    Outputs results;
    Submission work;
    work.label = kOp;
    Ref<Buffer> scratch = device->allocate(scratch_bytes_);
    for (size_t i = inputs_.size(); i < slots_.size(); i++) slots[i] = {scratch.get(), slots_[i].scratch_offset};
    for (size_t i = 0; i < output_arrays_.size(); i++) {
        const auto slot = size_t(output_arrays_[i]);
        const size_t earlier =
            size_t(std::find(output_arrays_.begin(), output_arrays_.end(), int(slot)) - output_arrays_.begin());
        if (earlier < i) {  // two views of one array
            results.arrays.push_back(results.arrays[earlier]);
            continue;
        }
        Ref<Buffer> buffer = device->allocate(slots_[slot].bytes);
        slots[slot] = {buffer.get(), 0};
        results.arrays.push_back(buffer);
        work.keep.push_back(buffer);
    }
    auto resolve = [&](const Place &place) -> Resource {
        if (place.slot < 0) return {place.constant.get(), place.offset};
        const Resource &base = slots[size_t(place.slot)];
        return {base.buffer, base.offset + place.offset};
    };

    // Plan, reserve and claim everything first; a failure drops the new states, and with them the claims.
    struct Pending {
        Ref<AttentionPlan> plan;
        Arena::Appended appended;
    };
    std::vector<Pending> pending;
    pending.reserve(nodes_.size());
    uint64_t attention_bytes = 0, partials_bytes = 0, table_bytes = 0;
    const AttentionNode *planned = nullptr;
    std::vector<uint64_t> planned_starts, starts;
    for (const auto &entry : nodes_) {
        const auto *node = std::get_if<AttentionNode>(&entry);
        if (!node) continue;
        std::vector<State *> old;
        starts.clear();
        for (int slot : node->old_states) {
            old.push_back(states[size_t(slot)].get());
            starts.push_back(old.back()->length);
        }
        Ref<AttentionPlan> plan;
        if (planned && same_request(*planned, *node) && starts == planned_starts) {
            plan = pending.back().plan;  // layers that differ in their weights alone
        } else {
            ferrum_plan_request request = node->request;
            request.starts = starts.data();
            request.tokens = node->tokens.data();
            plan = plan_causal_attention(node->attention->shape, request);
            planned = node;
            planned_starts = starts;
        }
        Arena::Appended appended = device->arena().append("causal_attention", old, node->tokens);
        for (size_t i = 0; i < node->new_states.size(); i++) states[size_t(node->new_states[i])] = appended.states[i];
        attention_bytes = std::max(attention_bytes, plan->summary.scratch_bytes);
        partials_bytes = std::max(partials_bytes, plan->summary.partials_bytes);
        table_bytes += plan->summary.page_table_bytes;
        pending.push_back({std::move(plan), std::move(appended)});
    }
    Ref<Buffer> attention_scratch = device->allocate(attention_bytes), partials = device->allocate(partials_bytes),
                tables = device->allocate(table_bytes);

    uint64_t table_offset = 0;
    size_t next = 0;
    std::vector<Resource> resources;
    for (const auto &entry : nodes_) {
        resources.clear();
        if (const auto *node = std::get_if<LaunchNode>(&entry)) {
            for (const Place &place : node->resources) resources.push_back(resolve(place));
            work.append(node->launches, resources);
            continue;
        }
        const auto &node = std::get<AttentionNode>(entry);
        const Pending &call = pending[next++];
        AttentionOperands operands{
            {}, {}, {}, {attention_scratch.get(), 0}, {partials.get(), 0}, {tables.get(), table_offset}};
        for (const Place &x : node.xs) operands.xs.push_back(resolve(x));
        for (int slot : node.outputs) operands.ys.push_back(slots[size_t(slot)]);
        for (int i = 0; i < kAttentionWeights; i++) operands.weights[i] = resolve(node.weights[i]);
        add_causal_attention(work, *node.attention.get(), *call.plan.get(), call.appended, operands);
        table_offset += call.plan->summary.page_table_bytes;
    }
    for (size_t i = 0; i < inputs_.size(); i++) work.keep.push_back(Ref<Buffer>::share(slots[i].buffer));
    for (const Ref<State> &state : states) work.keep.push_back(state);
    for (const Ref<Buffer> &buffer : {scratch, attention_scratch, partials, tables}) work.keep.push_back(buffer);
    work.keep.push_back(Ref<const Program>::share(this));
    for (int slot : output_states_) results.states.push_back(states[size_t(slot)]);
    if (!work.launches.empty()) device->submit(std::move(work));
    return results;
}

}  // namespace ferrum

using namespace ferrum;

int32_t ferrum_program_begin(ferrum_device *device, uint32_t arrays, const ferrum_tensor *inputs, uint32_t states,
                             ferrum_state *const *input_states) {
    return guard([&] {
        auto *owner = reinterpret_cast<Device *>(required(device, "device"));
        owner->check_usable(kOp, true);
        Recorder::begin(owner, required(inputs, "inputs"), arrays, required(input_states, "input_states"), states);
    });
}

int32_t ferrum_program_end(uint32_t arrays, const ferrum_tensor *outputs, uint32_t states,
                           ferrum_state *const *output_states, ferrum_program **out_program) {
    return guard([&] {
        required(out_program, "out_program");
        Ref<Program> program =
            Recorder::end(required(outputs, "outputs"), arrays, required(output_states, "output_states"), states);
        *out_program = reinterpret_cast<ferrum_program *>(program.detach());
    });
}

void ferrum_program_abandon(void) {
    Recorder::abandon();
}

void ferrum_program_release(ferrum_program **program) {
    release_handle<Program>(program);
}

int32_t ferrum_program_run(ferrum_program *program, const ferrum_tensor *inputs, ferrum_state *const *states,
                           ferrum_buffer **const *out_arrays, ferrum_state **const *out_states, uint64_t *out_lengths) {
    return guard([&] {
        const auto *object = reinterpret_cast<const Program *>(required(program, "program"));
        required(out_arrays, "out_arrays");
        required(out_states, "out_states");
        required(out_lengths, "out_lengths");
        for (size_t i = 0; i < object->arrays(); i++) required(out_arrays[i], "out_arrays[i]");
        for (size_t i = 0; i < object->states(); i++) required(out_states[i], "out_states[i]");
        Program::Outputs results = object->run(required(inputs, "inputs"), required(states, "states"));
        for (Ref<Buffer> &array : results.arrays) **out_arrays++ = reinterpret_cast<ferrum_buffer *>(array.detach());
        for (Ref<State> &state : results.states) {
            *out_lengths++ = state->length;
            **out_states++ = reinterpret_cast<ferrum_state *>(state.detach());
        }
    });
}
