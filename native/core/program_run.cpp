#include <algorithm>
#include <cstddef>
#include <tuple>

#include "operation.h"

namespace ferrum {

namespace {

constexpr const char *kOp = "jit";
constexpr uint64_t kRegion = 256;  // what the regions of a run's block are aligned to
constexpr size_t kSchedules = 4;   // that a program remembers: a context that grows needs another one now and then
constexpr int kBlock = -2;         // the slot of a Place in the block, beside -1 for what stays

bool same_request(const AttentionNode &a, const AttentionNode &b) {
    const auto &x = a.request, &y = b.request;
    return a.attention.get() == b.attention.get() && x.form == y.form && x.hidden_format == y.hidden_format &&
           std::equal(x.projection_formats, x.projection_formats + 4, y.projection_formats) &&
           x.constants == y.constants && x.biases == y.biases && a.tokens == b.tokens;
}

// Whether launches differ in their grids and params alone.
bool same_topology(const AttentionPlan &a, const AttentionPlan &b) {
    if (a.launches.size() != b.launches.size() || a.page_table_offsets != b.page_table_offsets ||
        a.summary.scratch_bytes != b.summary.scratch_bytes ||
        a.summary.page_table_bytes != b.summary.page_table_bytes ||
        !std::equal(a.resources.begin(), a.resources.end(), b.resources.begin(), b.resources.end(),
                    [](auto &x, auto &y) { return x.role == y.role && x.index == y.index; }))
        return false;
    for (size_t i = 0; i < a.launches.size(); i++) {
        ferrum_launch alike = a.launches[i];
        std::copy_n(b.launches[i].grid, 3, alike.grid);
        if (memcmp(&alike, &b.launches[i], offsetof(ferrum_launch, params))) return false;
    }
    return true;
}

// Launches of two such plans that do differ.
std::vector<size_t> differences(const AttentionPlan &a, const AttentionPlan &b) {
    std::vector<size_t> found;
    for (size_t i = 0; i < a.launches.size(); i++)
        if (memcmp(&a.launches[i], &b.launches[i], sizeof(ferrum_launch))) found.push_back(i);
    return found;
}

// Calls body(i, whether the pair (a[i], b[i]) is another one than that before it).
template <class Body>
bool each_pair(const std::vector<Ref<AttentionPlan>> &a, const std::vector<Ref<AttentionPlan>> &b, Body &&body) {
    for (size_t i = 0; i < a.size(); i++)
        if (!body(i, i == 0 || a[i].get() != a[i - 1].get() || b[i].get() != b[i - 1].get())) return false;
    return true;
}

}  // namespace

// ---- Once, after the recording

void Program::finish() {
    lay_out_scratch();
    list_steps();
}

void Program::list_steps() {
    for (const auto &entry : nodes_) {
        const auto *node = std::get_if<AttentionNode>(&entry);
        if (!node) continue;
        const bool like_previous = !steps_.empty() && same_request(*steps_.back().node, *node);
        steps_.push_back({node, like_previous, uint32_t(tokens_.size()), uint32_t(node->tokens.size())});
        old_slots_.insert(old_slots_.end(), node->old_states.begin(), node->old_states.end());
        new_slots_.insert(new_slots_.end(), node->new_states.begin(), node->new_states.end());
        tokens_.insert(tokens_.end(), node->tokens.begin(), node->tokens.end());
    }
}

// ---- Once for a topology

std::shared_ptr<const Schedule> Program::make_schedule(const std::vector<Ref<AttentionPlan>> &plans) const {
    auto made = std::make_shared<Schedule>();
    Schedule &schedule = *made;
    schedule.plans = plans;
    uint64_t attention_bytes = 0;
    for (const Ref<AttentionPlan> &plan : plans)
        attention_bytes = std::max(attention_bytes, plan->summary.scratch_bytes);
    const uint64_t attention = align_up(scratch_bytes_, kRegion);
    uint64_t tables = align_up(attention + attention_bytes, kRegion);
    schedule.partials = tables;
    for (const Ref<AttentionPlan> &plan : plans) schedule.partials += plan->summary.page_table_bytes;
    schedule.partials = align_up(schedule.partials, kRegion);

    std::map<std::tuple<Buffer *, int, uint64_t>, uint32_t> known;
    auto add = [&](const Place &place) {
        auto [found, is_new] = known.try_emplace({place.constant.get(), place.slot, place.offset}, known.size());
        if (!is_new) return found->second;
        schedule.resources.push_back({place.constant.get(), place.offset});
        if (place.slot == -1) return found->second;
        size_t base = inputs_.size() + output_arrays_.size();
        uint64_t offset = place.offset;
        if (place.slot >= 0 && size_t(place.slot) < inputs_.size()) {
            base = size_t(place.slot);
        } else if (place.slot >= 0 && slots_[size_t(place.slot)].is_output) {
            base = inputs_.size() +
                   size_t(std::find(output_arrays_.begin(), output_arrays_.end(), place.slot) - output_arrays_.begin());
        } else if (place.slot >= 0) {
            offset += slots_[size_t(place.slot)].scratch_offset;
        }
        schedule.varying.push_back(uint32_t(schedule.resources.size() - 1));
        schedule.bases.push_back({base, offset});
        return found->second;
    };
    auto append = [&](const std::vector<ferrum_launch> &launches, const std::vector<uint32_t> &resources) {
        for (ferrum_launch launch : launches) {
            for (uint32_t b = 0; b < launch.binding_count; b++)
                launch.bindings[b].resource = resources[launch.bindings[b].resource];
            schedule.launches.push_back(launch);
        }
    };
    std::vector<uint32_t> resources;
    for (const auto &entry : nodes_) {
        resources.clear();
        if (const auto *node = std::get_if<LaunchNode>(&entry)) {
            for (const Place &place : node->resources) resources.push_back(add(place));
            append(node->launches, resources);
            continue;
        }
        const auto &node = std::get<AttentionNode>(entry);
        const AttentionPlan &plan = *plans[schedule.steps.size()].get();
        auto place_of = [&](const ferrum_resource &resource) -> Place {
            switch (resource.role) {
                case FERRUM_ROLE_INPUT:
                    return node.xs[resource.index];
                case FERRUM_ROLE_OUTPUT:
                    return {{}, node.outputs[resource.index], 0};
                case FERRUM_ROLE_WEIGHT:
                    return node.weights[resource.index];
                case FERRUM_ROLE_SCRATCH:
                    return {{}, kBlock, attention};
                case FERRUM_ROLE_PARTIALS:
                    return {{}, kBlock, schedule.partials};
                case FERRUM_ROLE_PAGE_TABLE:
                    return {{}, kBlock, tables};
                default:
                    return {node.attention->rope, -1, 0};
            }
        };
        for (const ferrum_resource &resource : plan.resources) resources.push_back(add(place_of(resource)));
        schedule.steps.push_back({schedule.launches.size(), tables});
        append(plan.launches, resources);
        tables += plan.summary.page_table_bytes;
    }
    return made;
}

// ---- In every run

// Nothing but numbers: what each attention will do to states of these lengths. Most of it is what it was in the latest
// run.
std::vector<Ref<AttentionPlan>> Program::plan(const std::vector<Ref<State>> &states, const Schedule *latest) const {
    std::vector<uint64_t> lengths(states.size()), starts(tokens_.size());
    for (size_t i = 0; i < states.size(); i++)
        if (states[i]) lengths[i] = states[i]->length;
    std::vector<Ref<AttentionPlan>> plans;
    plans.reserve(steps_.size());
    const Step *planned = nullptr;
    for (const Step &step : steps_) {
        for (uint32_t i = step.first; i < step.first + step.count; i++) {
            starts[i] = lengths[size_t(old_slots_[i])];
            lengths[size_t(new_slots_[i])] = starts[i] + tokens_[i];
        }
        const uint64_t *own = starts.data() + step.first;
        Ref<AttentionPlan> plan;
        if (planned && step.like_previous && std::equal(own, own + step.count, starts.data() + planned->first))
            plan = plans.back();
        else if (latest)
            plan = latest->plans[plans.size()]->behind(step.node->attention->shape, *own);
        if (!plan) {
            ferrum_plan_request request = step.node->request;
            request.starts = own;
            request.tokens = tokens_.data() + step.first;
            plan = plan_causal_attention(step.node->attention->shape, request);
        }
        plans.push_back(std::move(plan));
        planned = &step;
    }
    return plans;
}

std::shared_ptr<const Schedule> Program::latest_schedule() const {
    std::lock_guard lock(mutex_);
    return schedules_.empty() ? nullptr : schedules_.front();
}

std::shared_ptr<const Schedule> Program::schedule(const std::vector<Ref<AttentionPlan>> &plans) const {
    std::lock_guard lock(mutex_);
    auto fits = [&](const std::shared_ptr<const Schedule> &known) {
        return each_pair(known->plans, plans, [&](size_t i, bool is_new) {
            return !is_new || plans[i]->like == known->plans[i].get() ||
                   same_topology(*known->plans[i].get(), *plans[i].get());
        });
    };
    auto found = std::find_if(schedules_.begin(), schedules_.end(), fits);
    if (found == schedules_.end()) {
        if (schedules_.size() == kSchedules) schedules_.pop_back();
        found = schedules_.insert(schedules_.end(), make_schedule(plans));
    }
    std::rotate(schedules_.begin(), found, found + 1);
    return schedules_.front();
}

Program::Outputs Program::run(const ferrum_tensor *inputs, const void *values,
                              ferrum_state *const *state_handles) const {
    Device *device = device_.get();
    device->check_usable(kOp);
    for (size_t i = 0; i < input_states_.size() && state_handles[i]; i++) __builtin_prefetch(state_handles[i]);
    // What the schedule's resources count from: inputs, output arrays, the block.
    std::vector<Resource> bases(inputs_.size() + output_arrays_.size() + 1);
    for (size_t i = 0; i < inputs_.size() && !values; i++) {
        const ferrum_tensor &given = inputs[i], &wanted = inputs_[i];
        check_storage({kOp, "inputs"}, device, given);
        if (given.format != wanted.format || given.rank != wanted.rank ||
            !std::equal(given.shape, given.shape + given.rank, wanted.shape))
            fail(FERRUM_INVALID_ARGUMENT, "[%s] inputs: expected %s %s for input %zu as it was recorded, got %s %s",
                 kOp, format_name(wanted.format).c_str(), shape_text(wanted.shape, wanted.rank).c_str(), i,
                 format_name(given.format).c_str(), shape_text(given.shape, given.rank).c_str());
        bases[i] = {reinterpret_cast<Buffer *>(given.buffer), given.offset};
    }
    std::vector<Ref<State>> states(state_slots_);
    for (size_t i = 0; i < input_states_.size(); i++) {
        auto *state = reinterpret_cast<State *>(required(state_handles[i], "states[i]"));
        check_known({kOp, "states"}, *state);
        if (state->device() != device || !(state->layout == input_states_[i]))
            fail(FERRUM_INVALID_ARGUMENT, "[%s] states: state %zu is not of the kind that was recorded", kOp, i);
        states[i] = Ref<State>::share(state);
    }
    for (const auto &[slot, state] : captured_states_) states[size_t(slot)] = state;
    device->arena().fetch(reinterpret_cast<State *const *>(state_handles), input_states_.size());
    const std::shared_ptr<const Schedule> latest = latest_schedule();  // as long as plans may be like its own
    const std::vector<Ref<AttentionPlan>> plans = plan(states, latest.get());
    const std::shared_ptr<const Schedule> known = schedule(plans);

    uint64_t block_bytes = known->partials;
    for (const Ref<AttentionPlan> &plan : plans)
        block_bytes = std::max(block_bytes, known->partials + plan->summary.partials_bytes);
    uint64_t value = block_bytes = align_up(block_bytes, kRegion);
    for (size_t i = 0; i < inputs_.size() && values; i++) block_bytes += align_up(slots_[i].bytes, kRegion);
    Ref<Buffer> block = device->allocate(block_bytes);
    bases.back() = {block.get(), 0};
    auto *memory = static_cast<uint8_t *>(block->host());
    const auto *next_value = static_cast<const uint8_t *>(values);
    for (size_t i = 0; i < inputs_.size() && values; i++) {
        memcpy(memory + value, next_value, slots_[i].bytes);
        bases[i] = {block.get(), value};
        next_value += slots_[i].bytes;
        value += align_up(slots_[i].bytes, kRegion);
    }
    for (const IndexCheck &check : checks_) {
        const Resource &at = bases[size_t(check.place.slot)];
        check_index_range(check.op, check.name, at.buffer, at.offset + check.place.offset, check.count, check.limit);
    }

    Outputs results;
    Submission work;
    work.label = kOp;
    work.keep.reserve(states.size() + inputs_.size() + output_arrays_.size() + 2);
    for (size_t i = 0; i < output_arrays_.size(); i++) {
        const size_t earlier =
            size_t(std::find(output_arrays_.begin(), output_arrays_.end(), output_arrays_[i]) - output_arrays_.begin());
        results.arrays.push_back(earlier < i ? results.arrays[earlier]  // two views of one array
                                             : device->allocate(slots_[size_t(output_arrays_[i])].bytes));
        bases[inputs_.size() + i] = {results.arrays[i].get(), 0};
        work.keep.push_back(results.arrays[i]);
    }

    // Claim everything first; a failure drops the new states, and with them the claims.
    std::vector<State *> old;
    std::vector<Ref<State>> made;
    std::vector<PageCopy> copies;
    std::vector<size_t> copies_until(steps_.size());
    for (size_t s = 0; s < steps_.size(); s++) {
        const Step &step = steps_[s];
        old.clear();
        made.resize(step.count);
        for (uint32_t i = step.first; i < step.first + step.count; i++)
            old.push_back(states[size_t(old_slots_[i])].get());
        device->arena().append("causal_attention", step.count, old.data(), tokens_.data() + step.first, made.data(),
                               copies);
        copies_until[s] = copies.size();
        for (uint32_t i = 0; i < step.count; i++) {
            device->arena().page_table(made[i].get(), reinterpret_cast<uint64_t *>(memory + known->steps[s].tables +
                                                                                   plans[s]->page_table_offsets[i]));
            states[size_t(new_slots_[step.first + i])] = std::move(made[i]);
        }
    }

    work.resources = known->resources;
    for (size_t i = 0; i < known->varying.size(); i++) {
        const Resource &base = bases[known->bases[i].index];
        work.resources[known->varying[i]] = {base.buffer, base.offset + known->bases[i].offset};
    }
    if (copies.empty()) work.list = known;
    // Copies of shared pages come before the attention whose states they are for; each is a launch.
    work.launches.reserve(known->launches.size() + copies.size());
    size_t copied = 0;
    auto begin = known->launches.begin(), next = begin;
    for (size_t s = 0; s < steps_.size() && copied < copies.size(); s++) {
        if (copies_until[s] == copied) continue;
        work.launches.insert(work.launches.end(), next, begin + long(known->steps[s].first));
        next = begin + long(known->steps[s].first);
        add_page_copies(work, steps_[s].node->attention->shape.layout,
                        {copies.begin() + long(copied), copies.begin() + long(copies_until[s])}, device);
        copied = copies_until[s];
    }
    work.launches.insert(work.launches.end(), next, known->launches.end());
    std::vector<size_t> differ;
    each_pair(known->plans, plans, [&](size_t s, bool is_new) {
        if (is_new) differ = differences(*known->plans[s].get(), *plans[s].get());
        for (size_t i : differ) {
            const ferrum_launch &from = plans[s]->launches[i];
            ferrum_launch &to = work.launches[known->steps[s].first + copies_until[s] + i];
            std::copy_n(from.grid, 3, to.grid);
            memcpy(to.params, from.params, sizeof(to.params));
        }
        return true;
    });
    for (int slot : output_states_) results.states.push_back(states[size_t(slot)]);
    for (size_t i = 0; i < inputs_.size() && !values; i++) work.keep.push_back(Ref<Buffer>::share(bases[i].buffer));
    for (Ref<State> &state : states) work.keep.push_back(std::move(state));
    work.keep.push_back(std::move(block));
    work.keep.push_back(Ref<const Program>::share(this));
    if (!work.launches.empty()) device->submit(std::move(work));
    return results;
}

}  // namespace ferrum
