#include <algorithm>
#include <cmath>

#include "../include/ferrum_kv_layout.h"
#include "causal_attention.h"
#include "sha256.h"

namespace ferrum {

namespace {

constexpr const char *kOp = "causal_attention";

void expect(bool holds, const char *field, const std::string &expected, double got) {
    if (!holds)
        fail(FERRUM_INVALID_ARGUMENT, "[attention_config] %s: expected %s, got %.17g", field, expected.c_str(), got);
}

bool positive(float value) {
    return std::isfinite(value) && value > 0;
}

bool zero_or_positive(float value) {
    return value == 0 || positive(value);
}

// Fields of ferrum_attention_weights, in order.
enum Weight { input_norm, q_proj, k_proj, v_proj, o_proj, q_norm, k_norm, q_bias, k_bias, v_bias, o_bias };

// The params that depend on where in its sequence a call is.
void place(ferrum_causal_attention_params &p, const AttentionShape &shape, uint64_t start) {
    const uint64_t end = start + p.tokens;
    p.position_start = uint32_t(start);
    p.page_count = uint32_t(shape.layout.pages(end));
    const uint64_t seen = p.window && p.position_start + 1 > p.window ? p.position_start + 1 - p.window : 0;
    p.first_span = uint32_t(seen / p.span_tokens);
    p.spans = uint32_t((end - 1) / p.span_tokens) + 1 - p.first_span;
}

// A few tokens over several spans: a launch that takes the spans side by side, and later one that combines them.
bool is_split(const ferrum_causal_attention_params &p) {
    return p.tokens <= FERRUM_FEW_ROWS && p.spans > 1;
}

uint64_t partials_bytes(const ferrum_causal_attention_params &p) {
    return is_split(p) ? uint64_t(p.tokens) * p.query_heads * p.spans * p.partial_stride * 4 : 0;
}

class Planner {
   public:
    Planner(const AttentionShape &shape, const ferrum_plan_request &request, AttentionPlan &plan, uint64_t total_tokens)
        : shape_(shape), request_(request), plan_(plan), scratch_(shape, total_tokens), total_(total_tokens) {}

    const ScratchLayout &scratch() const { return scratch_; }

    void run(bool packed) {
        lay_out_partials();
        if (packed) {
            norm(0, 0, total_);
            projections(0, total_);
            // Each step of one participant needs only its own step before; one barrier serves all of them.
            each_participant([&](uint32_t i, uint64_t token) { prepare(i, token, i == 0); });
            each_participant([&](uint32_t i, uint64_t token) { attention(i, token, i == 0); });
            bool first = true;
            each_participant([&](uint32_t i, uint64_t token) {
                if (!splits(i)) return;
                combine(i, token, first);
                first = false;
            });
            finish(0, 0, total_);
            return;
        }
        each_participant([&](uint32_t i, uint64_t token) {
            const size_t first = plan_.launches.size();
            norm(i, token, request_.tokens[i]);
            projections(token, request_.tokens[i]);
            prepare(i, token, true);
            attention(i, token, true);
            if (splits(i)) combine(i, token, true);
            finish(i, token, request_.tokens[i]);
            for (size_t l = first; l < plan_.launches.size(); l++) plan_.launches[l].participant = i;
        });
    }

   private:
    // body(participant, its first row among all rows)
    template <class Body>
    void each_participant(Body &&body) const {
        uint64_t token = 0;
        for (uint32_t i = 0; i < request_.participants; token += request_.tokens[i++]) body(i, token);
    }

    void lay_out_partials() {
        for (uint32_t i = 0; i < request_.participants; i++) {
            plan_.partials_offsets.push_back(plan_.summary.partials_bytes);
            plan_.summary.partials_bytes += partials_bytes(params(i));
        }
    }

    uint32_t resource(uint32_t role, uint32_t index) {
        for (uint32_t i = 0; i < plan_.resources.size(); i++)
            if (plan_.resources[i].role == role && plan_.resources[i].index == index) return i;
        plan_.resources.push_back({role, index});
        return uint32_t(plan_.resources.size() - 1);
    }
    Operand weight(Weight which) { return {resource(FERRUM_ROLE_WEIGHT, which), 0}; }
    Operand scratch(ScratchLayout::Region region, uint64_t token) {
        return {resource(FERRUM_ROLE_SCRATCH, 0), scratch_.at(region, token)};
    }

    void norm(uint32_t input, uint64_t token, uint64_t rows) {
        plan_.launches.push_back(rms_norm_launch(
            request_.hidden_format, request_.constants & FERRUM_CONSTANT_NORM_F32 ? format_f32 : format_f16,
            {resource(FERRUM_ROLE_INPUT, input), 0}, weight(input_norm), scratch(ScratchLayout::normalized, token),
            uint32_t(rows), shape_.hidden_size, scratch_.stride[ScratchLayout::normalized], shape_.epsilon));
    }

    void project(int projection, uint64_t in, uint64_t out, ScratchLayout::Region from, ScratchLayout::Region to,
                 uint64_t token, uint64_t rows, bool barrier) {
        LinearOperands linear{request_.projection_formats[projection],
                              uint32_t(in),
                              uint32_t(out),
                              weight(Weight(q_proj + projection)),
                              bool(request_.biases >> projection & 1),
                              bool(request_.biases >> (projection + 4) & 1),
                              {}};
        if (linear.has_bias) linear.bias = weight(Weight(q_bias + projection));
        plan_.launches.push_back(linear_launch(linear, scratch(from, token), scratch_.stride[from], scratch(to, token),
                                               scratch_.stride[to], false, uint32_t(rows), barrier, shape_.exact));
    }

    void projections(uint64_t token, uint64_t rows) {
        using S = ScratchLayout;
        project(0, shape_.hidden_size, shape_.query_projection_features(), S::normalized, S::query_raw, token, rows,
                true);
        project(1, shape_.hidden_size, shape_.key_value_features(), S::normalized, S::key_raw, token, rows, false);
        project(2, shape_.hidden_size, shape_.key_value_features(), S::normalized, S::value_raw, token, rows, false);
    }

    ferrum_causal_attention_params params(uint32_t participant) const {
        using S = ScratchLayout;
        ferrum_causal_attention_params p{};
        p.tokens = uint32_t(request_.tokens[participant]);
        p.query_heads = shape_.query_heads;
        p.key_value_heads = shape_.key_value_heads;
        p.head_dim = shape_.head_dim;
        p.rope_dim = shape_.rope_dim;
        p.query_raw_stride = scratch_.stride[S::query_raw];
        p.query_head_stride = shape_.head_dim * (shape_.output_gate ? 2 : 1);
        p.key_value_stride = scratch_.stride[S::key_raw];
        p.query_stride = scratch_.stride[S::query];
        p.tokens_per_page = shape_.layout.tokens_per_page;
        p.window = shape_.sliding_window;
        p.span_tokens = shape_.span_tokens;
        p.partial_stride = ferrum_partial_stride(shape_.head_dim);
        p.epsilon = shape_.epsilon;
        p.scale = shape_.scale;
        p.softcap = shape_.softcap;
        place(p, shape_, request_.starts[participant]);
        return p;
    }

    Operand page_table(uint32_t participant) {
        return {resource(FERRUM_ROLE_PAGE_TABLE, 0), plan_.page_table_offsets[participant]};
    }

    void prepare(uint32_t participant, uint64_t token, bool barrier) {
        using S = ScratchLayout;
        uint32_t constants = request_.constants & (FERRUM_CONSTANT_QUERY_NORM | FERRUM_CONSTANT_QUERY_NORM_F32 |
                                                   FERRUM_CONSTANT_KEY_NORM | FERRUM_CONSTANT_KEY_NORM_F32);
        if (shape_.rope_interleaved) constants |= FERRUM_CONSTANT_ROPE_INTERLEAVED;
        Launch launch(kernel_causal_attention_prepare_f16, constants, barrier);
        auto bind = [&](uint32_t slot, Operand operand) { launch.bind(slot, operand.resource, operand.offset); };
        bind(FERRUM_PREPARE_QUERY_RAW, scratch(S::query_raw, token));
        bind(FERRUM_PREPARE_KEY_RAW, scratch(S::key_raw, token));
        bind(FERRUM_PREPARE_VALUE_RAW, scratch(S::value_raw, token));
        if (constants & FERRUM_CONSTANT_QUERY_NORM) bind(FERRUM_PREPARE_QUERY_NORM, weight(q_norm));
        if (constants & FERRUM_CONSTANT_KEY_NORM) bind(FERRUM_PREPARE_KEY_NORM, weight(k_norm));
        bind(FERRUM_PREPARE_ROPE, {resource(FERRUM_ROLE_ROPE, 0), 0});
        bind(FERRUM_PREPARE_QUERY, scratch(S::query, token));
        bind(FERRUM_PREPARE_PAGES, page_table(participant));
        launch.with(FERRUM_PREPARE_PARAMS, params(participant))
            .over(uint32_t(request_.tokens[participant]), shape_.query_heads + 2 * shape_.key_value_heads,
                  FERRUM_SIMD_WIDTH);
        launch.participant = participant;
        plan_.launches.push_back(launch);
    }

    bool splits(uint32_t participant) const { return is_split(params(participant)); }

    void attention(uint32_t participant, uint64_t token, bool barrier) {
        using S = ScratchLayout;
        const auto p = params(participant);
        const bool split = is_split(p), tiles = p.tokens > FERRUM_FEW_ROWS && !shape_.exact;
        Launch launch(split   ? kernel_causal_attention_split_f16
                      : tiles ? kernel_causal_attention_tiles_f16
                              : kernel_causal_attention_decode_f16,
                      split ? 0 : gate_constant(), barrier);
        auto bind = [&](uint32_t slot, Operand operand) { launch.bind(slot, operand.resource, operand.offset); };
        if (split) {
            bind(FERRUM_SPLIT_QUERY, scratch(S::query, token));
            bind(FERRUM_SPLIT_PAGES, page_table(participant));
            bind(FERRUM_SPLIT_PARTIALS, partials(participant));
            launch.with(FERRUM_SPLIT_PARAMS, p)
                .over(p.spans, p.query_heads, FERRUM_SIMD_WIDTH, FERRUM_ATTENTION_SIMDGROUPS, p.tokens);
        } else {
            bind(FERRUM_ATTENTION_QUERY, scratch(S::query, token));
            bind(FERRUM_ATTENTION_QUERY_RAW, scratch(S::query_raw, token));
            bind(FERRUM_ATTENTION_CONTEXT, scratch(S::context, token));
            bind(FERRUM_ATTENTION_PAGES, page_table(participant));
            launch.with(FERRUM_ATTENTION_PARAMS, p);
            if (tiles)
                launch.over(div_up(p.tokens, FERRUM_ATTENTION_TILE_TOKENS), p.query_heads, FERRUM_SIMD_WIDTH, 4);
            else
                launch.over(p.tokens, p.query_heads, FERRUM_SIMD_WIDTH, FERRUM_ATTENTION_SIMDGROUPS);
        }
        launch.participant = participant;
        plan_.launches.push_back(launch);
    }

    void combine(uint32_t participant, uint64_t token, bool barrier) {
        using S = ScratchLayout;
        const auto p = params(participant);
        Launch launch(kernel_causal_attention_combine_f16, gate_constant(), barrier);
        auto bind = [&](uint32_t slot, Operand operand) { launch.bind(slot, operand.resource, operand.offset); };
        bind(FERRUM_COMBINE_PARTIALS, partials(participant));
        bind(FERRUM_COMBINE_QUERY_RAW, scratch(S::query_raw, token));
        bind(FERRUM_COMBINE_CONTEXT, scratch(S::context, token));
        launch.with(FERRUM_COMBINE_PARAMS, p).over(p.tokens, p.query_heads, FERRUM_SIMD_WIDTH);
        launch.participant = participant;
        plan_.launches.push_back(launch);
    }

    uint32_t gate_constant() const { return shape_.output_gate ? FERRUM_CONSTANT_OUTPUT_GATE : 0; }

    Operand partials(uint32_t participant) {
        return {resource(FERRUM_ROLE_PARTIALS, 0), plan_.partials_offsets[participant]};
    }

    void finish(uint32_t participant, uint64_t token, uint64_t rows) {
        using S = ScratchLayout;
        project(3, shape_.query_features(), shape_.hidden_size, S::context, S::projected, token, rows, true);
        plan_.launches.push_back(
            residual_add_launch(request_.hidden_format, {resource(FERRUM_ROLE_INPUT, participant), 0},
                                scratch(S::projected, token), scratch_.stride[S::projected],
                                {resource(FERRUM_ROLE_OUTPUT, participant), 0}, uint32_t(rows), shape_.hidden_size));
    }

    const AttentionShape &shape_;
    const ferrum_plan_request &request_;
    AttentionPlan &plan_;
    const ScratchLayout scratch_;
    const uint64_t total_;
};

}  // namespace

AttentionShape AttentionShape::make(const ferrum_attention_config &config, Traits traits) {
    AttentionShape shape;
    static_cast<ferrum_attention_config &>(shape) = config;
    expect(config.hidden_size > 0 && config.hidden_size <= INT32_MAX, "hidden_size", "1…2^31 - 1", config.hidden_size);
    expect(config.query_heads > 0, "query_heads", "at least 1", config.query_heads);
    expect(config.key_value_heads > 0, "key_value_heads", "at least 1", config.key_value_heads);
    expect(config.query_heads % config.key_value_heads == 0, "query_heads",
           "a multiple of key_value_heads=" + std::to_string(config.key_value_heads), config.query_heads);
    expect(config.head_dim > 0 && config.head_dim <= FERRUM_MAX_HEAD_DIM, "head_dim",
           "1…" + std::to_string(FERRUM_MAX_HEAD_DIM), config.head_dim);
    expect(config.rope_dim > 0 && config.rope_dim % 2 == 0 && config.rope_dim <= config.head_dim, "rope_dim",
           "an even number in 2…head_dim=" + std::to_string(config.head_dim), config.rope_dim);
    expect(config.maximum_context_tokens > 0, "maximum_context_tokens", "at least 1",
           double(config.maximum_context_tokens));
    expect(config.output_gate <= 1, "output_gate", "0 or 1", config.output_gate);
    expect(config.rope_interleaved <= 1, "rope_interleaved", "0 or 1", config.rope_interleaved);
    expect(positive(config.epsilon), "epsilon", "a positive number", config.epsilon);
    expect(zero_or_positive(config.scale), "scale", "a positive number, or 0 for 1/sqrt(head_dim)", config.scale);
    expect(zero_or_positive(config.softcap), "softcap", "a positive number, or 0 for none", config.softcap);
    expect(positive(config.rope_attention_factor), "rope_attention_factor", "a positive number",
           config.rope_attention_factor);
    expect(shape.query_projection_features() <= UINT32_MAX / 2, "query_heads", "rows that fit 32 bits",
           config.query_heads);
    shape.layout = KVLayout::make("attention_config", config.key_value_heads, config.head_dim);
    shape.span_tokens = ferrum_kv_span_tokens(shape.layout.tokens_per_page, traits.span_tokens);
    shape.exact = traits.exact;
    const uint64_t most = uint64_t(FERRUM_MAX_STATE_PAGES) * shape.layout.tokens_per_page;
    expect(config.maximum_context_tokens <= most, "maximum_context_tokens",
           "at most " + std::to_string(most) + " (" + std::to_string(FERRUM_MAX_STATE_PAGES) + " pages of " +
               std::to_string(shape.layout.tokens_per_page) + " tokens)",
           double(config.maximum_context_tokens));
    if (config.scale == 0) shape.scale = 1 / std::sqrt(float(config.head_dim));
    return shape;
}

ScratchLayout::ScratchLayout(const AttentionShape &shape, uint64_t total_tokens) : bytes_per_token(0), bytes(0) {
    const uint64_t widths[region_count] = {shape.hidden_size,          shape.query_projection_features(),
                                           shape.key_value_features(), shape.key_value_features(),
                                           shape.query_features(),     shape.query_features(),
                                           shape.hidden_size};
    for (int region = 0; region < region_count; region++) {
        uint64_t row = align_up(widths[region] * 2, FERRUM_SCRATCH_ALIGNMENT);
        offset[region] = bytes;
        stride[region] = uint32_t(row / 2);
        bytes_per_token += row;
        bytes += checked_multiply(row, total_tokens, "scratch");
    }
}

Ref<AttentionPlan> plan_causal_attention(const AttentionShape &shape, const ferrum_plan_request &request) {
    if (request.participants == 0) fail(FERRUM_INVALID_ARGUMENT, "[%s] states: expected at least one, got none", kOp);
    if (request.hidden_format != format_f32 && request.hidden_format != format_f16)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] x: expected F32 or F16, got %s", kOp,
             format_name(request.hidden_format).c_str());
    const uint64_t inputs[4] = {shape.hidden_size, shape.hidden_size, shape.hidden_size, shape.query_features()};
    static const char *const names[4] = {"weights.q_proj", "weights.k_proj", "weights.v_proj", "weights.o_proj"};
    for (int i = 0; i < 4; i++) {
        const FormatInfo *info = weight_format(request.projection_formats[i]);
        if (!info)
            fail(FERRUM_UNSUPPORTED, "[%s] %s: no kernel reads format %s", kOp, names[i],
                 format_name(request.projection_formats[i]).c_str());
        if (inputs[i] % info->block_elements)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] %s: rows of format %s come in blocks of %u elements, got rows of %llu",
                 kOp, names[i], info->name, info->block_elements, (unsigned long long)inputs[i]);
    }
    auto plan = Ref<AttentionPlan>::adopt(new AttentionPlan);
    ferrum_plan_summary &summary = plan->summary;
    for (uint32_t i = 0; i < request.participants; i++) {
        const uint64_t start = request.starts[i], tokens = request.tokens[i];
        if (tokens == 0)
            fail(FERRUM_INVALID_ARGUMENT, "[%s] x: expected at least one token for sequence %u, got none", kOp, i);
        if (start > shape.maximum_context_tokens || tokens > shape.maximum_context_tokens - start)
            fail(FERRUM_INVALID_ARGUMENT,
                 "[%s] x: sequence %u has %llu tokens and gets %llu more; the configuration's "
                 "maximum_context_tokens is %llu",
                 kOp, i, (unsigned long long)start, (unsigned long long)tokens,
                 (unsigned long long)shape.maximum_context_tokens);
        plan->page_table_offsets.push_back(summary.page_table_bytes);
        summary.page_table_bytes += align_up(shape.layout.pages(start + tokens) * 8, FERRUM_SCRATCH_ALIGNMENT);
        summary.pages += shape.layout.pages(start + tokens);
        summary.total_tokens += tokens;
    }
    checked_u32({kOp, "x (tokens of all sequences)"}, summary.total_tokens);
    const bool packed = request.form == FERRUM_FORM_PACKED && request.participants > 1;
    plan->launches.reserve(9 * size_t(request.participants) + 6);
    Planner planner(shape, request, *plan.get(), summary.total_tokens);
    planner.run(packed);
    summary.form = packed                      ? FERRUM_FORM_PACKED
                   : request.participants == 1 ? FERRUM_FORM_SCALAR
                                               : FERRUM_FORM_PARTICIPANT_LOOP;
    summary.participants = request.participants;
    summary.launches = uint32_t(plan->launches.size());
    summary.resources = uint32_t(plan->resources.size());
    summary.scratch_bytes = planner.scratch().bytes;
    summary.scratch_bytes_per_token = planner.scratch().bytes_per_token;
    std::copy_n(planner.scratch().offset, ScratchLayout::region_count, summary.scratch_regions);
    summary.maximum_pages = shape.maximum_pages();
    summary.state_bytes_per_token = shape.layout.bytes_per_token();
    plan->topology = {request.participants, summary.total_tokens};
    for (uint32_t i = 0; i < request.participants; i++)
        for (uint64_t value : {request.tokens[i], request.starts[i], request.starts[i] + request.tokens[i]})
            plan->topology.push_back(value);
    return plan;
}

Ref<AttentionPlan> AttentionPlan::behind(const AttentionShape &shape, uint64_t start) const {
    const uint64_t tokens = summary.total_tokens;
    if (summary.participants != 1 || start > shape.maximum_context_tokens ||
        tokens > shape.maximum_context_tokens - start ||
        align_up(shape.layout.pages(start + tokens) * 8, FERRUM_SCRATCH_ALIGNMENT) != summary.page_table_bytes)
        return {};
    auto plan = Ref<AttentionPlan>::adopt(new AttentionPlan);
    plan->like = this;
    plan->summary = summary;
    plan->topology = {1, tokens, tokens, start, start + tokens};
    plan->launches = launches;
    plan->resources = resources;
    plan->page_table_offsets = page_table_offsets;
    plan->partials_offsets = partials_offsets;
    for (ferrum_launch &launch : plan->launches) {
        if (launch.kernel != kernel_causal_attention_prepare_f16 &&
            launch.kernel != kernel_causal_attention_decode_f16 && launch.kernel != kernel_causal_attention_tiles_f16 &&
            launch.kernel != kernel_causal_attention_split_f16 && launch.kernel != kernel_causal_attention_combine_f16)
            continue;
        ferrum_causal_attention_params p;
        memcpy(&p, launch.params, sizeof(p));
        place(p, shape, start);
        if (is_split(p) != (summary.partials_bytes > 0)) return {};
        memcpy(launch.params, &p, sizeof(p));
        if (launch.kernel == kernel_causal_attention_split_f16) launch.grid[0] = p.spans;
        plan->summary.partials_bytes = partials_bytes(p);
        plan->summary.pages = p.page_count;
    }
    return plan;
}

// SHA-256 over this preimage: domain, number of ranges, total new tokens, then per range the new
// tokens and where they start and end in their sequence; u64, little-endian.
std::array<uint8_t, 32> AttentionPlan::fingerprint() const {
    static const char domain[] = "ferrum.metal.causal-attention.reusable-topology.v1";  // its NUL is hashed
    std::vector<uint8_t> preimage(domain, domain + sizeof(domain));
    for (uint64_t value : topology)
        for (int i = 0; i < 8; i++) preimage.push_back(uint8_t(value >> (8 * i)));
    return sha256(preimage);
}

}  // namespace ferrum
