// The C face of devices, buffers and states.
#include <algorithm>

#include "program.h"
#include "launch.h"

namespace ferrum {

namespace {

Device *unwrap(ferrum_device *handle) {
    return reinterpret_cast<Device *>(required(handle, "device"));
}
Buffer *unwrap(ferrum_buffer *handle) {
    return reinterpret_cast<Buffer *>(required(handle, "buffer"));
}
State *unwrap(ferrum_state *handle) {
    return reinterpret_cast<State *>(required(handle, "state"));
}

// Adds the launch that moves whole arrays between pages and buffers.
void add_kv_move(Submission &work, Kernel kernel, State *state, uint64_t start, uint64_t tokens, Resource keys,
                 Resource values) {
    const KVLayout &layout = state->layout;
    Ref<Buffer> table = state->device()->allocate(layout.pages(state->length) * 8);
    state->device()->arena().page_table(state, static_cast<uint64_t *>(table->host()));
    Launch launch(kernel);
    launch.bind(FERRUM_KV_KEYS, work.add(keys.buffer, keys.offset))
        .bind(FERRUM_KV_VALUES, work.add(values.buffer, values.offset))
        .bind(FERRUM_KV_PAGES, work.add(table.get()))
        .with(FERRUM_KV_PARAMS, ferrum_kv_params{uint32_t(start), uint32_t(tokens), layout.key_value_heads,
                                                 layout.head_dim, layout.tokens_per_page, 0})
        .over(uint32_t(tokens), layout.key_value_heads, FERRUM_SIMD_WIDTH);
    work.launches.push_back(launch);
    for (const Resource &resource : work.resources) work.keep.push_back(Ref<Buffer>::share(resource.buffer));
    work.keep.push_back(Ref<State>::share(state));
}

Ref<State> append(State *state, const ferrum_tensor &keys, const ferrum_tensor &values) {
    constexpr const char *op = "state_append";
    Device *device = state->device();
    device->check_usable(op);
    check_known({op, "state"}, *state);
    const KVLayout &layout = state->layout;
    check_format({op, "keys"}, keys, {format_f16});
    check_format({op, "values"}, values, {format_f16});
    const uint64_t tokens = keys.rank ? keys.shape[0] : 0;
    for (auto [name, tensor] : {std::pair{"keys", &keys}, {"values", &values}}) {
        check_shape({op, name}, *tensor, {tokens, layout.key_value_heads, layout.head_dim},
                    "tokens, key_value_heads, head_dim");
        check_storage({op, name}, device, *tensor);
    }
    if (tokens == 0) return Ref<State>::share(state);
    const uint64_t most = uint64_t(FERRUM_MAX_STATE_PAGES) * layout.tokens_per_page;
    if (tokens > most - state->length)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] keys: a state holds at most %llu tokens; this one has %llu and gets %llu",
             op, (unsigned long long)most, (unsigned long long)state->length, (unsigned long long)tokens);
    Arena::Appended appended = device->arena().append(op, {state}, {tokens});
    State *extended = appended.states[0].get();
    Submission work;
    add_page_copies(work, layout, appended.copies, device);
    add_kv_move(work, kernel_kv_append_f16, extended, state->length, tokens,
                {reinterpret_cast<Buffer *>(keys.buffer), keys.offset},
                {reinterpret_cast<Buffer *>(values.buffer), values.offset});
    work.keep.push_back(Ref<State>::share(state));
    device->submit(std::move(work));
    return appended.states[0];
}

}  // namespace

}  // namespace ferrum

using namespace ferrum;

uint32_t ferrum_abi_version(void) {
    return FERRUM_ABI_VERSION;
}

void ferrum_debug_counts(ferrum_counts *out_counts) {
    if (!out_counts) return;
    *out_counts = {live_counts.devices, live_counts.buffers,    live_counts.states, live_counts.attentions,
                   live_counts.plans,   live_counts.page_lists, live_counts.rings,  live_counts.programs};
}

int32_t ferrum_device_new(const char *name, const ferrum_device_options *options, ferrum_device **out_device) {
    return guard([&] {
        const std::string wanted = required(name, "name");
        const ferrum_device_options chosen = options ? *options : ferrum_device_options{};
        Ref<Device> device;
        if (wanted == "cpu") device = open_cpu_device(chosen);
#ifdef FERRUM_METAL
        if (wanted == "metal") device = open_metal_device(chosen);
        constexpr const char *known = "\"cpu\" and \"metal\"";
#else
        constexpr const char *known = "\"cpu\" only";
#endif
        if (!device)
            fail(FERRUM_DEVICE_ERROR, "[device] name: this library was built with %s, got \"%s\"", known, name);
        auto &result = *required(out_device, "out_device");
        result = reinterpret_cast<ferrum_device *>(device.detach());
    });
}

void ferrum_device_release(ferrum_device **device) {
    release_handle<Device>(device);
}

int32_t ferrum_device_describe(ferrum_device *device, ferrum_device_summary *out_summary) {
    return guard([&] {
        auto &result = *required(out_summary, "out_summary");
        result = unwrap(device)->describe();
    });
}

int32_t ferrum_device_arena_stats(ferrum_device *device, ferrum_arena_stats *out_stats) {
    return guard([&] {
        auto &result = *required(out_stats, "out_stats");
        unwrap(device)->check_usable("arena_stats", true);
        unwrap(device)->wait();  // a page returns when the device is past its last use
        result = unwrap(device)->arena().stats();
    });
}

int32_t ferrum_buffer_new(ferrum_device *device, uint64_t bytes, ferrum_buffer **out_buffer) {
    return guard([&] {
        unwrap(device)->check_usable("buffer", true);
        auto &result = *required(out_buffer, "out_buffer");
        result = reinterpret_cast<ferrum_buffer *>(unwrap(device)->allocate(bytes).detach());
    });
}

int32_t ferrum_buffer_wrap(ferrum_device *device, const void *data, uint64_t bytes, ferrum_buffer **out_buffer) {
    return guard([&] {
        unwrap(device)->check_usable("buffer", true);
        auto &result = *required(out_buffer, "out_buffer");
        result = reinterpret_cast<ferrum_buffer *>(
            unwrap(device)->wrap(bytes ? required(data, "data") : data, bytes).detach());
    });
}

void ferrum_buffer_release(ferrum_buffer **buffer) {
    release_handle<Buffer>(buffer);
}

int32_t ferrum_buffer_contents(ferrum_buffer *buffer, void **out_data, uint64_t *out_bytes) {
    return guard([&] {
        Buffer *object = unwrap(buffer);
        if (const Recorder *recorder = Recorder::current(); recorder && recorder->knows(object))
            fail(FERRUM_UNSUPPORTED,
                 "[jit] the values of an array that depends on the inputs were asked for while a function is recorded: "
                 "they differ from run to run");
        check_known({"buffer_contents", "buffer"}, *object);
        object->wait();
        *required(out_data, "out_data") = object->host();
        if (out_bytes) *out_bytes = object->bytes();
    });
}

int32_t ferrum_state_new(ferrum_device *device, uint32_t key_value_heads, uint32_t head_dim, ferrum_state **out_state) {
    return guard([&] {
        Device *owner = unwrap(device);
        owner->check_usable("state", true);
        auto &result = *required(out_state, "out_state");
        result = reinterpret_cast<ferrum_state *>(
            owner->arena().empty(owner, KVLayout::make("state", key_value_heads, head_dim)).detach());
    });
}

void ferrum_states_release(ferrum_state **states) {
    if (!states || !*states) return;
    size_t count = 0;
    for (; states[count]; count++) __builtin_prefetch(states[count]);
    Device *device = unwrap(*states)->device();
    const bool together = std::all_of(states, states + count, [&](auto *s) { return unwrap(s)->device() == device; });
    if (together && !device->forked()) device->arena().fetch(reinterpret_cast<State *const *>(states), count);
    for (; *states; states++) release_handle<State>(states);
}

void ferrum_state_release(ferrum_state **state) {
    release_handle<State>(state);
}

int32_t ferrum_state_describe(ferrum_state *state, ferrum_state_summary *out_summary) {
    return guard([&] {
        State *object = unwrap(state);
        if (object->is_name)
            fail(FERRUM_UNSUPPORTED,
                 "[state_describe] state: comes from a recording in which nothing runs; a run has the state, and its "
                 "length");
        const KVLayout &layout = object->layout;
        auto &result = *required(out_summary, "out_summary");
        result = {object->length,  layout.pages(object->length), layout.key_value_heads,
                  layout.head_dim, layout.tokens_per_page,       0};
    });
}

int32_t ferrum_state_pages(ferrum_state *state, uint64_t capacity, uint64_t *out_pages, uint64_t *out_count) {
    return guard([&] {
        State *object = unwrap(state);
        object->device()->check_usable("state_pages");
        check_known({"state_pages", "state"}, *object);
        uint64_t &count = *required(out_count, "out_count");
        if (capacity) required(out_pages, "out_pages");
        const std::vector<PageId> pages = object->device()->arena().pages(object);
        std::copy_n(pages.begin(), std::min<uint64_t>(pages.size(), capacity), out_pages);
        count = pages.size();
    });
}

int32_t ferrum_state_truncate(ferrum_state *state, uint64_t length, ferrum_state **out_state) {
    return guard([&] {
        State *object = unwrap(state);
        object->device()->check_usable("truncate");
        check_known({"truncate", "state"}, *object);
        if (length > object->length)
            fail(FERRUM_INVALID_ARGUMENT, "[truncate] length: expected at most %llu, the state's, got %llu",
                 (unsigned long long)object->length, (unsigned long long)length);
        auto &result = *required(out_state, "out_state");
        result = reinterpret_cast<ferrum_state *>(object->device()->arena().truncate(object, length).detach());
    });
}

int32_t ferrum_state_append(ferrum_state *state, const ferrum_tensor *keys, const ferrum_tensor *values,
                            ferrum_state **out_state) {
    return guard([&] {
        required(out_state, "out_state");
        *out_state = reinterpret_cast<ferrum_state *>(
            append(unwrap(state), *required(keys, "keys"), *required(values, "values")).detach());
    });
}

int32_t ferrum_state_read(ferrum_state *state, uint64_t start, uint64_t tokens, ferrum_buffer **out_keys,
                          ferrum_buffer **out_values) {
    return guard([&] {
        State *object = unwrap(state);
        Device *device = object->device();
        device->check_usable("state_read");
        check_known({"state_read", "state"}, *object);
        if (start > object->length || tokens > object->length - start)
            fail(FERRUM_INVALID_ARGUMENT, "[state_read] tokens: expected a range inside 0…%llu, got %llu from %llu",
                 (unsigned long long)object->length, (unsigned long long)tokens, (unsigned long long)start);
        required(out_keys, "out_keys");
        required(out_values, "out_values");
        const uint64_t bytes = tokens * object->layout.bytes_per_token() / 2;
        Ref<Buffer> keys = device->allocate(bytes), values = device->allocate(bytes);
        if (tokens) {
            Submission work;
            add_kv_move(work, kernel_kv_gather_f16, object, start, tokens, {keys.get(), 0}, {values.get(), 0});
            device->submit(std::move(work));
        }
        *out_keys = reinterpret_cast<ferrum_buffer *>(keys.detach());
        *out_values = reinterpret_cast<ferrum_buffer *>(values.detach());
    });
}
