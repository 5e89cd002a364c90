#include "causal_attention.h"

#include <algorithm>
#include <cmath>

#include "program.h"

namespace ferrum {

namespace {

constexpr const char *kOp = "causal_attention";

Attention *unwrap(ferrum_attention *handle) {
    return reinterpret_cast<Attention *>(required(handle, "attention"));
}

// cos and sin of every position, from a low and a high table by the addition theorem: 256 + positions / 256 rows
// instead of one a position, and as good at any position as near zero, since both halves are computed in float64.
Ref<Buffer> rope_table(Device *device, const AttentionShape &shape, const double *inverse_frequencies) {
    const uint64_t pairs = shape.rope_dim / 2, high = div_up(shape.maximum_context_tokens, FERRUM_ROPE_LOW);
    for (uint64_t i = 0; i < pairs; i++)
        if (!std::isfinite(inverse_frequencies[i]))
            fail(FERRUM_INVALID_ARGUMENT, "[attention_config] inverse_frequencies[%llu]: expected a finite number",
                 (unsigned long long)i);
    Ref<Buffer> table = device->allocate((FERRUM_ROPE_LOW + high) * pairs * 2 * sizeof(float));
    auto *out = static_cast<float *>(table->host());
    for (uint64_t row = 0; row < FERRUM_ROPE_LOW + high; row++) {
        const bool is_low = row < FERRUM_ROPE_LOW;
        const double position = double(is_low ? row : (row - FERRUM_ROPE_LOW) * FERRUM_ROPE_LOW);
        const double factor = is_low ? shape.rope_attention_factor : 1;
        for (uint64_t i = 0; i < pairs; i++) {
            *out++ = float(std::cos(position * inverse_frequencies[i]) * factor);
            *out++ = float(std::sin(position * inverse_frequencies[i]) * factor);
        }
    }
    return table;
}

static_assert(sizeof(ferrum_attention_weights) == kAttentionWeights * sizeof(ferrum_tensor));

// Checks every weight and fills in what a plan needs to know of them.
void check_weights(const AttentionShape &shape, Device *device, const ferrum_attention_weights &w,
                   ferrum_plan_request &request) {
    const uint64_t hidden = shape.hidden_size, qp = shape.query_projection_features(), kv = shape.key_value_features();
    // Why a projection should have the rows it should have, for messages.
    auto why = [&](int projection) {
        const bool of_queries = projection == 0 || projection == 3;
        return (of_queries ? "query_heads=" + std::to_string(shape.query_heads)
                           : "key_value_heads=" + std::to_string(shape.key_value_heads)) +
               ", head_dim=" + std::to_string(shape.head_dim) +
               (of_queries && shape.output_gate ? ", output_gate=True" : "");
    };
    auto vector = [&](const char *name, const ferrum_tensor &t, uint64_t length, uint32_t present, uint32_t f32) {
        if (!t.buffer && present) return;
        Expected what{kOp, name};
        check_storage(what, device, t);
        check_format(what, t, {format_f32, format_f16});
        check_shape(what, t, {length});
        request.constants |= present | (t.format == format_f32 ? f32 : 0);
    };
    vector("weights.input_norm", w.input_norm, hidden, 0, FERRUM_CONSTANT_NORM_F32);
    vector("weights.q_norm", w.q_norm, shape.head_dim, FERRUM_CONSTANT_QUERY_NORM, FERRUM_CONSTANT_QUERY_NORM_F32);
    vector("weights.k_norm", w.k_norm, shape.head_dim, FERRUM_CONSTANT_KEY_NORM, FERRUM_CONSTANT_KEY_NORM_F32);
    const struct {
        const char *name, *bias_name;
        const ferrum_tensor &weight, &bias;
        uint64_t out, in;
    } projections[4] = {
        {"weights.q_proj", "weights.q_bias", w.q_proj, w.q_bias, qp, hidden},
        {"weights.k_proj", "weights.k_bias", w.k_proj, w.k_bias, kv, hidden},
        {"weights.v_proj", "weights.v_bias", w.v_proj, w.v_bias, kv, hidden},
        {"weights.o_proj", "weights.o_bias", w.o_proj, w.o_bias, hidden, shape.query_features()},
    };
    for (int i = 0; i < 4; i++) {
        const auto &p = projections[i];
        check_storage({kOp, p.name}, device, p.weight);
        if (p.weight.rank != 2 || p.weight.shape[0] != p.out || p.weight.shape[1] != p.in)
            check_shape({kOp, p.name}, p.weight, {p.out, p.in}, why(i));
        request.projection_formats[i] = p.weight.format;
        if (!p.bias.buffer) continue;
        check_storage({kOp, p.bias_name}, device, p.bias);
        check_format({kOp, p.bias_name}, p.bias, {format_f32, format_f16});
        check_shape({kOp, p.bias_name}, p.bias, {p.out});
        request.biases |= 1u << i | (p.bias.format == format_f32 ? 16u << i : 0);
    }
}

struct Call {
    std::vector<Ref<State>> states;
    std::vector<Ref<Buffer>> outputs;
};

Call run(Attention *attention, const ferrum_attention_weights &weights, uint32_t form, uint32_t participants,
         ferrum_state *const *state_handles, const uint64_t *tokens, const ferrum_tensor *xs) {
    Device *device = attention->device();
    device->check_usable(kOp, true);
    const AttentionShape &shape = attention->shape;
    std::vector<State *> states(participants);
    std::vector<uint64_t> starts(participants), new_tokens(tokens, tokens + participants);
    for (uint32_t i = 0; i < participants; i++) {
        states[i] = reinterpret_cast<State *>(required(state_handles[i], "states[i]"));
        check_known({kOp, "states"}, *states[i]);
        if (states[i]->device() != device)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] states: state %u lives on another device", kOp, i);
        if (!(states[i]->layout == shape.layout))
            fail(FERRUM_INVALID_ARGUMENT, "[%s] states: expected key_value_heads=%u, head_dim=%u, state %u has %u, %u",
                 kOp, shape.key_value_heads, shape.head_dim, i, states[i]->layout.key_value_heads,
                 states[i]->layout.head_dim);
        starts[i] = states[i]->length;
    }
    ferrum_plan_request request{};
    request.form = form;
    request.participants = participants;
    request.starts = starts.data();
    request.tokens = tokens;
    check_weights(shape, device, weights, request);
    if (participants == 0) fail(FERRUM_INVALID_ARGUMENT, "[%s] states: expected at least one, got none", kOp);
    const bool packed = form == FERRUM_FORM_PACKED;
    const uint32_t tensors = packed ? 1 : participants;
    uint64_t total = 0;
    for (uint32_t i = 0; i < participants; i++)
        if (__builtin_add_overflow(total, tokens[i], &total))
            fail(FERRUM_INVALID_ARGUMENT, "[%s] lengths: their sum does not fit 64 bits", kOp);
    request.hidden_format = xs[0].format;
    for (uint32_t i = 0; i < tensors; i++) {
        check_format({kOp, "x"}, xs[i], {format_f32, format_f16});
        check_storage({kOp, "x"}, device, xs[i]);
        if (xs[i].format != xs[0].format)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] xs: expected one dtype for all, got %s and %s", kOp,
                 format_name(xs[0].format).c_str(), format_name(xs[i].format).c_str());
        check_shape({kOp, "x"}, xs[i], {packed ? total : tokens[i], shape.hidden_size},
                    packed ? "the sum of lengths and hidden_size" : "tokens and hidden_size");
    }
    // A packed call of one sequence is a scalar call: the operands are the same.
    Ref<AttentionPlan> plan = plan_causal_attention(shape, request);

    Call call;
    const uint64_t element = xs[0].format == format_f32 ? 4 : 2;
    for (uint32_t i = 0; i < tensors; i++)
        call.outputs.push_back(Recorder::allocate(device, (packed ? total : tokens[i]) * shape.hidden_size * element));
    Recorder *recorder = Recorder::on(device);
    if (recorder && !recorder->runs) {
        // Their names: a run has the pages, and the lengths.
        for (const State *state : states) call.states.push_back(device->arena().empty(device, state->layout, true));
        recorder->attention(attention, request, weights, states, xs, call.states, call.outputs);
        return call;
    }
    constexpr uint64_t kRegion = 256;
    const uint64_t tables = align_up(plan->summary.scratch_bytes, kRegion);
    const uint64_t partials = align_up(tables + plan->summary.page_table_bytes, kRegion);
    Ref<Buffer> block = device->allocate(partials + plan->summary.partials_bytes);

    // Reserve and claim; from here on a failure drops the new states, and with them the claims.
    Arena::Appended appended = device->arena().append(kOp, states, new_tokens);
    if (recorder) recorder->attention(attention, request, weights, states, xs, appended.states, call.outputs);
    Submission work;
    work.label = kOp;
    AttentionOperands operands{{}, {}, {}, {block.get(), 0}, {block.get(), partials}, {block.get(), tables}};
    auto place = [](const ferrum_tensor &t) { return Resource{reinterpret_cast<Buffer *>(t.buffer), t.offset}; };
    for (uint32_t i = 0; i < tensors; i++) {
        operands.xs.push_back(place(xs[i]));
        operands.ys.push_back({call.outputs[i].get(), 0});
    }
    const auto *fields = reinterpret_cast<const ferrum_tensor *>(&weights);
    std::transform(fields, fields + kAttentionWeights, operands.weights, place);
    add_causal_attention(work, *attention, *plan.get(), appended, operands);
    work.keep.reserve(work.keep.size() + work.resources.size() + 2 * participants);
    for (const Resource &resource : work.resources) work.keep.push_back(Ref<Buffer>::share(resource.buffer));
    for (uint32_t i = 0; i < participants; i++) {
        work.keep.push_back(Ref<State>::share(states[i]));
        work.keep.push_back(appended.states[i]);
    }
    device->submit(std::move(work));
    call.states = std::move(appended.states);
    return call;
}

}  // namespace

void add_causal_attention(Submission &work, const Attention &attention, const AttentionPlan &plan,
                          const Arena::Appended &appended, const AttentionOperands &operands) {
    Device *device = attention.device();
    auto *tables = static_cast<uint8_t *>(operands.tables.buffer->host()) + operands.tables.offset;
    for (size_t i = 0; i < appended.states.size(); i++)
        device->arena().page_table(appended.states[i].get(),
                                   reinterpret_cast<uint64_t *>(tables + plan.page_table_offsets[i]));
    add_page_copies(work, attention.shape.layout, appended.copies, device);
    std::vector<Resource> resources;
    resources.reserve(plan.resources.size());
    for (const ferrum_resource &resource : plan.resources) switch (resource.role) {
            case FERRUM_ROLE_INPUT:
                resources.push_back(operands.xs[resource.index]);
                break;
            case FERRUM_ROLE_OUTPUT:
                resources.push_back(operands.ys[resource.index]);
                break;
            case FERRUM_ROLE_WEIGHT:
                resources.push_back(operands.weights[resource.index]);
                break;
            case FERRUM_ROLE_SCRATCH:
                resources.push_back(operands.scratch);
                break;
            case FERRUM_ROLE_PARTIALS:
                resources.push_back(operands.partials);
                break;
            case FERRUM_ROLE_PAGE_TABLE:
                resources.push_back(operands.tables);
                break;
            default:
                resources.push_back({attention.rope.get(), 0});
        }
    work.append(plan.launches, resources);
}

Attention::Attention(Ref<Device> device, const ferrum_attention_config &config, const double *inverse_frequencies)
    : shape(AttentionShape::make(config, device->traits())),
      rope(rope_table(device.get(), shape, inverse_frequencies)),
      device_(std::move(device)) {}

}  // namespace ferrum

using namespace ferrum;

int32_t ferrum_attention_new(ferrum_device *device, const ferrum_attention_config *config,
                             const double *inverse_frequencies, ferrum_attention **out_attention) {
    return guard([&] {
        auto *owner = reinterpret_cast<Device *>(required(device, "device"));
        owner->check_usable("attention_config", true);
        auto &result = *required(out_attention, "out_attention");
        result =
            reinterpret_cast<ferrum_attention *>(new Attention(Ref<Device>::share(owner), *required(config, "config"),
                                                               required(inverse_frequencies, "inverse_frequencies")));
    });
}

void ferrum_attention_release(ferrum_attention **attention) {
    release_handle<Attention>(attention);
}

int32_t ferrum_causal_attention(ferrum_attention *attention, const ferrum_attention_weights *weights, uint32_t form,
                                uint32_t participants, ferrum_state *const *states, const uint64_t *tokens,
                                const ferrum_tensor *xs, ferrum_state **const *out_states,
                                ferrum_buffer **const *out_ys) {
    return guard([&] {
        required(out_states, "out_states");
        required(out_ys, "out_ys");
        for (uint32_t i = 0; i < participants; i++) required(out_states[i], "out_states[i]");
        for (uint32_t i = 0; i < (form == FERRUM_FORM_PACKED ? 1 : participants); i++) required(out_ys[i], "out_ys[i]");
        Call call = run(unwrap(attention), *required(weights, "weights"), form, participants,
                        required(states, "states"), required(tokens, "tokens"), required(xs, "xs"));
        for (Ref<State> &state : call.states) **out_states++ = reinterpret_cast<ferrum_state *>(state.detach());
        for (Ref<Buffer> &y : call.outputs) **out_ys++ = reinterpret_cast<ferrum_buffer *>(y.detach());
    });
}

int32_t ferrum_attention_plan(ferrum_attention *attention, const ferrum_plan_request *request, ferrum_plan **out_plan) {
    return guard([&] {
        required(required(request, "request")->starts, "request.starts");
        required(request->tokens, "request.tokens");
        auto &result = *required(out_plan, "out_plan");
        Ref<AttentionPlan> plan = plan_causal_attention(unwrap(attention)->shape, *request);
        plan->counted.emplace(live_counts.plans);
        result = reinterpret_cast<ferrum_plan *>(plan.detach());
    });
}

void ferrum_plan_release(ferrum_plan **plan) {
    release_handle<AttentionPlan>(plan);
}

int32_t ferrum_plan_describe(ferrum_plan *plan, ferrum_plan_summary *out_summary) {
    return guard([&] {
        auto &result = *required(out_summary, "out_summary");
        const auto &object = *reinterpret_cast<AttentionPlan *>(required(plan, "plan"));
        const auto digest = object.fingerprint();
        result = object.summary;
        std::copy(digest.begin(), digest.end(), result.fingerprint);
    });
}

int32_t ferrum_plan_launch(ferrum_plan *plan, uint32_t index, ferrum_launch *out_launch) {
    return guard([&] {
        const auto &launches = reinterpret_cast<AttentionPlan *>(required(plan, "plan"))->launches;
        if (index >= launches.size())
            fail(FERRUM_INVALID_ARGUMENT, "index: expected less than %zu, got %u", launches.size(), index);
        auto &result = *required(out_launch, "out_launch");
        result = launches[index];
    });
}

int32_t ferrum_plan_resource(ferrum_plan *plan, uint32_t index, ferrum_resource *out_resource) {
    return guard([&] {
        const auto &resources = reinterpret_cast<AttentionPlan *>(required(plan, "plan"))->resources;
        if (index >= resources.size())
            fail(FERRUM_INVALID_ARGUMENT, "index: expected less than %zu, got %u", resources.size(), index);
        auto &result = *required(out_resource, "out_resource");
        result = resources[index];
    });
}
