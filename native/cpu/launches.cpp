#include "launches.h"

#include <algorithm>
#include <array>

#include "memory.h"

namespace ferrum::cpu {

namespace {

constexpr uint64_t kFewProducts = 1 << 16;  // less work than meeting other threads for it

// Both multiply the same rows, prepared in the same way; the second finds them ready.
bool same_input(const Call &first, const Call &second) {
    if (!is_linear(first.launch->kernel) || !is_linear(second.launch->kernel)) return false;
    const auto &a = first.params<ferrum_linear_params>(), &b = second.params<ferrum_linear_params>();
    return first.slots[FERRUM_LINEAR_X] == second.slots[FERRUM_LINEAR_X] && a.rows == b.rows &&
           a.in_features == b.in_features && a.input_stride == b.input_stride &&
           linear_temp(*first.launch, 1).fixed_point == linear_temp(*second.launch, 1).fixed_point;
}

// What a launch reads row by row.
struct Input {
    const uint8_t *at;  // NULL: nothing that is
    bool f32;
    uint64_t rows, width, stride;
};

Input input_of(const Call &call) {
    const uint32_t kernel = call.launch->kernel;
    if (is_linear(kernel)) {
        const auto &p = call.params<ferrum_linear_params>();
        return {call.slots[FERRUM_LINEAR_X], false, p.rows, p.in_features, p.input_stride};
    }
    if (kernel == kernel_rms_norm_f16 || kernel == kernel_rms_norm_f32) {
        const auto &p = call.params<ferrum_rms_norm_params>();
        return {call.slots[FERRUM_RMS_NORM_X], kernel == kernel_rms_norm_f32, p.rows, p.width, p.width};
    }
    return {};
}

// Whether the rows that the launch writes are these.
bool writes(const Call &call, const Input &input) {
    const uint32_t kernel = call.launch->kernel;
    switch (kernel) {
        case kernel_rms_norm_f16:
        case kernel_rms_norm_f32: {
            const auto &p = call.params<ferrum_rms_norm_params>();
            return call.slots[FERRUM_RMS_NORM_Y] == input.at && !input.f32 && p.rows == input.rows &&
                   p.width == input.width && p.output_stride == input.stride;
        }
        case kernel_residual_add_f16:
        case kernel_residual_add_f32: {
            const auto &p = call.params<ferrum_residual_add_params>();
            return call.slots[FERRUM_RESIDUAL_ADD_Y] == input.at && input.f32 == (kernel == kernel_residual_add_f32) &&
                   p.rows == input.rows && p.width == input.width && p.width == input.stride;
        }
        case kernel_swiglu_f16:
            return call.slots[FERRUM_SWIGLU_Y] == input.at && !input.f32 && input.width == input.stride &&
                   call.params<ferrum_swiglu_params>().elements == input.rows * input.width;
        default:
            return false;
    }
}

struct Rows {
    const uint8_t *at;
    uint64_t count, bytes;  // of a row
};

// What a launch reads that can be run row by row in front of another: of `rows` rows.
std::array<Rows, 2> rows_read(const Call &call, uint64_t rows) {
    auto slot = [&](uint32_t i) { return call.slots[i]; };
    switch (call.launch->kernel) {
        case kernel_rms_norm_f16:
        case kernel_rms_norm_f32: {
            const uint64_t element = call.launch->kernel == kernel_rms_norm_f32 ? 4 : 2;
            return {Rows{slot(FERRUM_RMS_NORM_X), rows, call.params<ferrum_rms_norm_params>().width * element}};
        }
        case kernel_swiglu_f16: {
            const uint64_t bytes = call.params<ferrum_swiglu_params>().elements / std::max<uint64_t>(rows, 1) * 2;
            return {Rows{slot(FERRUM_SWIGLU_GATE), rows, bytes}, Rows{slot(FERRUM_SWIGLU_UP), rows, bytes}};
        }
        default: {
            const auto &p = call.params<ferrum_residual_add_params>();
            const uint64_t element = call.launch->kernel == kernel_residual_add_f32 ? 4 : 2;
            return {Rows{slot(FERRUM_RESIDUAL_ADD_X), rows, p.width * element},
                    Rows{slot(FERRUM_RESIDUAL_ADD_BRANCH), rows, uint64_t(p.branch_stride) * 2}};
        }
    }
}

// Whether a row that `norm` writes early could be part of another row that `earlier` has yet to read: memory is given
// out again once its last reader is done, and a launch behind that one relies on it.
bool overwrites(const Call &norm, const Call &earlier) {
    const auto &p = norm.params<ferrum_rms_norm_params>();
    const Rows y{norm.slots[FERRUM_RMS_NORM_Y], p.rows, uint64_t(p.output_stride) * 2};
    for (const Rows &x : rows_read(earlier, p.rows)) {
        const bool same_rows = x.at == y.at && x.bytes == y.bytes;
        if (!same_rows && x.at < y.at + y.count * y.bytes && y.at < x.at + x.count * x.bytes) return true;
    }
    return false;
}

// Multiplications of a launch, or what takes as long; of kernels not known to be small, more than enough.
uint64_t products(const ferrum_launch &launch) {
    if (is_linear(launch.kernel)) {
        const auto &p = *reinterpret_cast<const ferrum_linear_params *>(launch.params);
        return uint64_t(p.rows) * p.in_features * p.out_features;
    }
    switch (launch.kernel) {
        case kernel_rms_norm_f16:
        case kernel_rms_norm_f32: {
            const auto &p = *reinterpret_cast<const ferrum_rms_norm_params *>(launch.params);
            return 8ull * p.rows * p.width;
        }
        case kernel_residual_add_f16:
        case kernel_residual_add_f32: {
            const auto &p = *reinterpret_cast<const ferrum_residual_add_params *>(launch.params);
            return 8ull * p.rows * p.width;
        }
        case kernel_swiglu_f16:
            return 32 * reinterpret_cast<const ferrum_swiglu_params *>(launch.params)->elements;
        case kernel_causal_attention_prepare_f16:
        case kernel_causal_attention_decode_f16:
        case kernel_causal_attention_tiles_f16:
        case kernel_causal_attention_split_f16:
        case kernel_causal_attention_combine_f16: {
            const auto &p = *reinterpret_cast<const ferrum_causal_attention_params *>(launch.params);
            const uint64_t elements = uint64_t(p.tokens) * p.query_heads * p.head_dim;
            if (launch.kernel == kernel_causal_attention_prepare_f16) return 8 * elements;
            if (launch.kernel == kernel_causal_attention_combine_f16) return elements * p.spans;
            return 2 * elements * p.spans * p.span_tokens;
        }
        default:
            return kFewProducts;
    }
}

// What a list of launches that comes again needs no second look at.
struct Compiled {
    struct Varying {
        uint32_t call, slot, resource;
        uint64_t offset;
    };
    std::vector<Call> calls;
    std::vector<Varying> varying;
    uint64_t temp_bytes;
};

}  // namespace

Launches::Launches(Submission &&submission, const InstructionSet &set, unsigned threads)
    : Job(unsigned(submission.launches.size()) * kLoopsPerLaunch, threads),
      work_(std::move(submission)),
      kernels_(set.kernels),
      calls_(work_.launches.size()) {
    if (recall()) return;
    resolve(set, threads);
    find_next();
    if (work_.list) remember();
}

void Launches::resolve(const InstructionSet &set, unsigned threads) {
    uint64_t at = 0;
    for (size_t i = 0; i < calls_.size(); i++) {
        const ferrum_launch &launch = work_.launches[i];
        Call &call = calls_[i];
        call = {};
        call.launch = &launch;
        call.threads = threads;
        for (uint32_t b = 0; b < launch.binding_count; b++) {
            const ferrum_binding &binding = launch.bindings[b];
            const Resource &resource = work_.resources[binding.resource];
            call.slots[binding.slot] =
                static_cast<uint8_t *>(resource.buffer->host()) + resource.offset + binding.offset;
        }
        if (is_linear(launch.kernel)) call.packed = prepared_weight(launch);
        // Launches that may overlap have temporary memory of their own, but projections of one input share it.
        if (launch.barrier) at = 0;
        call.temp_offset = at;
        if (i && !launch.barrier && same_input(calls_[i - 1], call)) {
            call.temp_offset = calls_[i - 1].temp_offset;
            call.temp_is_ready = true;
        }
        at = std::max(at, call.temp_offset + align_up(cpu::temp_bytes(launch, threads), 64));
        temp_bytes_ = std::max(temp_bytes_, at);
        if (is_linear(launch.kernel) && !call.temp_is_ready) merge(i, set.row_function);
    }
}

const uint8_t *Launches::prepared_weight(const ferrum_launch &launch) const {
    const auto &p = *reinterpret_cast<const ferrum_linear_params *>(launch.params);
    for (uint32_t b = 0; b < launch.binding_count; b++) {
        if (launch.bindings[b].slot != FERRUM_LINEAR_WEIGHT) continue;
        const Resource &resource = work_.resources[launch.bindings[b].resource];
        return static_cast<CpuBuffer *>(resource.buffer)
            ->prepared(resource.offset + launch.bindings[b].offset, linear_format(launch.kernel), p.out_features,
                       p.in_features);
    }
    return nullptr;
}

// Norms, residuals and SwiGLU in front of linear launch `i` become part of how it prepares its input: one pass over
// memory and one barrier instead of several.
void Launches::merge(size_t i, RowFunction (*row_function)(uint32_t)) {
    for (const size_t last = i; i > 0; i--) {
        const bool alone = calls_[i].launch->barrier && (i == 1 || calls_[i - 1].launch->barrier);
        const RowFunction function = row_function(calls_[i - 1].launch->kernel);
        if (!alone || !function || !writes(calls_[i - 1], input_of(calls_[i]))) return;
        for (size_t norm = i; norm < last; norm++)  // those that come between it and the linear launch
            if (overwrites(calls_[norm], calls_[i - 1])) return;
        calls_[i].before = &calls_[i - 1];
        calls_[i - 1].row_function = function;
    }
}

// For each call, the matrix that a thread will stream next.
void Launches::find_next() {
    const Call *next = nullptr;
    for (size_t i = calls_.size(); i-- > 0;) {
        Call &call = calls_[i];
        if (next) {
            const auto &p = next->params<ferrum_linear_params>();
            call.next_packed = next->packed;
            call.next_tiles = div_up(div_up(p.out_features, kGroupOutputs), kMostTileGroups);
            call.next_tile_bytes = uint32_t(
                kMostTileGroups * packed_bytes(linear_format(next->launch->kernel), kGroupOutputs, p.in_features));
        }
        if (call.packed && call.params<ferrum_linear_params>().rows <= FERRUM_FEW_ROWS) next = &call;
    }
}

// ---- Launches that come again

bool Launches::recall() {
    if (!work_.list || !work_.list->compiled) return false;
    const auto &known = *static_cast<const Compiled *>(work_.list->compiled.get());
    calls_ = known.calls;
    temp_bytes_ = known.temp_bytes;
    for (size_t i = 0; i < calls_.size(); i++) {
        calls_[i].launch = &work_.launches[i];
        if (calls_[i].before) calls_[i].before = &calls_[i - 1];
    }
    std::vector<uint8_t *> base(work_.resources.size());
    for (uint32_t resource : work_.list->varying)
        base[resource] =
            static_cast<uint8_t *>(work_.resources[resource].buffer->host()) + work_.resources[resource].offset;
    for (const Compiled::Varying &one : known.varying)
        calls_[one.call].slots[one.slot] = base[one.resource] + one.offset;
    return true;
}

void Launches::remember() const {
    auto known = std::make_shared<Compiled>();
    known->calls = calls_;
    known->temp_bytes = temp_bytes_;
    std::vector<bool> varies(work_.resources.size());
    for (uint32_t resource : work_.list->varying) varies[resource] = true;
    for (uint32_t i = 0; i < calls_.size(); i++) {
        const bool linear = is_linear(work_.launches[i].kernel);
        if (linear && !calls_[i].packed) return;  // if its weight is prepared later, that is found then
        for (uint32_t b = 0; b < work_.launches[i].binding_count; b++) {
            const ferrum_binding &bound = work_.launches[i].bindings[b];
            if (!varies[bound.resource]) continue;
            if (linear && bound.slot == FERRUM_LINEAR_WEIGHT) return;  // another weight each time
            known->varying.push_back({i, bound.slot, bound.resource, bound.offset});
        }
    }
    work_.list->compiled = std::move(known);
}

// ---- Running

bool Launches::is_small() const {
    uint64_t sum = 0;
    for (const ferrum_launch &launch : work_.launches)
        if ((sum += products(launch)) >= kFewProducts) return false;
    return true;
}

void Launches::run(Worker &worker) {
    for (const Call &call : calls_) {
        if (call.row_function) continue;
        if (call.launch->barrier) worker.barrier();
        kernels_[call.launch->kernel](call, worker);
        // The start of this thread's share of the next matrix is on its way while the thread waits for others.
        if (!call.next_packed) continue;
        const uint8_t *start = call.next_packed + worker.share(call.next_tiles) * call.next_tile_bytes;
        for (uint64_t at = 0; at < kStreamAhead; at += 64) __builtin_prefetch(start + at);
    }
}

// The weights that a pass of a few rows reads first, for the next token's pass.
bool Launches::warm_up(Cursor &at) {
    constexpr uint64_t kPiece = 4096, kMost = 8 << 20;  // what the caches keep until then
    for (; at.part < calls_.size() && at.bytes < kMost; at.part++, at.offset = 0) {
        const Call &call = calls_[at.part];
        if (!call.packed) continue;
        const auto &p = call.params<ferrum_linear_params>();
        if (p.rows > FERRUM_FEW_ROWS) return false;
        if (at.offset >= packed_bytes(linear_format(call.launch->kernel), p.out_features, p.in_features)) continue;
        for (uint64_t i = 0; i < kPiece; i += 64) __builtin_prefetch(call.packed + at.offset + i);
        at.offset += kPiece;
        at.bytes += kPiece;
        return true;
    }
    return false;
}

}  // namespace ferrum::cpu
