// The block functions of DFlash 2: checks, one launch each.
#include <cmath>

#include "operation.h"
#include "ring.h"

namespace ferrum {

namespace {

Ring *unwrap(ferrum_ring *handle) {
    return reinterpret_cast<Ring *>(required(handle, "ring"));
}

ferrum_device *device_of(ferrum_ring *handle) {
    return reinterpret_cast<ferrum_device *>(unwrap(handle)->device());
}

void give(Ref<Ring> ring, ferrum_ring **out) {
    *out = reinterpret_cast<ferrum_ring *>(ring.detach());
}

// Rules of a block over a ring: 2 <= rows <= 16, window > rows, query heads a multiple of the ring's.
void check_block(const char *op, const RingLayout &layout, uint64_t rows, uint64_t heads) {
    if (rows < 2 || rows > FERRUM_DFLASH2_MAX_ROWS || rows >= layout.window)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] rows: expected 2…%u, less than the window of %u, got %llu", op,
             uint32_t(FERRUM_DFLASH2_MAX_ROWS), layout.window, (unsigned long long)rows);
    if (heads == 0 || heads > UINT32_MAX || heads % layout.key_value_heads)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] heads: expected a multiple of key_value_heads=%u, got %llu", op,
             layout.key_value_heads, (unsigned long long)heads);
}

void check_lanes(const char *op, uint64_t lanes) {
    if (lanes == 0 || lanes > kMaxLanes)
        fail(FERRUM_INVALID_ARGUMENT, "[%s] lanes: expected 1…%u, got %llu", op, kMaxLanes, (unsigned long long)lanes);
}

ferrum_dflash2_params params(const RingLayout &layout, uint32_t heads, uint32_t rows) {
    return {layout.lanes, heads,         layout.key_value_heads,   layout.head_dim,
            rows,         layout.window, layout.window - 1 + rows, layout.slots_per_page};
}

Resource resource(const ferrum_tensor &t) {
    return {reinterpret_cast<Buffer *>(t.buffer), t.offset};
}

}  // namespace

}  // namespace ferrum

using namespace ferrum;

int32_t ferrum_ring_new(ferrum_device *device, uint32_t lanes, uint32_t window, uint32_t key_value_heads,
                        uint32_t head_dim, ferrum_ring **out_ring) {
    return guard([&] {
        auto *owner = reinterpret_cast<Device *>(required(device, "device"));
        owner->check_usable("dflash2_ring");
        required(out_ring, "out_ring");
        const RingLayout layout = RingLayout::make(lanes, window, key_value_heads, head_dim);
        const RingLane empty[kMaxLanes] = {};
        give(Ref<Ring>::adopt(
                 new Ring(Ref<Device>::share(owner), layout, std::vector<PageId>(layout.pages(), kNoPage), empty)),
             out_ring);
    });
}

void ferrum_ring_release(ferrum_ring **ring) {
    release_handle<Ring>(ring);
}

int32_t ferrum_ring_describe(ferrum_ring *ring, ferrum_ring_summary *out_summary) {
    return guard([&] {
        const Ring &object = *unwrap(ring);
        ferrum_ring_summary summary{};
        for (uint32_t lane = 0; lane < object.layout.lanes; lane++) {
            summary.lengths[lane] = object.lanes[lane].length;
            summary.write_positions[lane] = object.lanes[lane].write_position;
        }
        summary.lanes = object.layout.lanes;
        summary.window = object.layout.window;
        summary.key_value_heads = object.layout.key_value_heads;
        summary.head_dim = object.layout.head_dim;
        summary.slots_per_page = object.layout.slots_per_page;
        summary.pages = pages_shown(object);
        *required(out_summary, "out_summary") = summary;
    });
}

int32_t ferrum_ring_load(ferrum_ring *ring, const ferrum_tensor *keys, const ferrum_tensor *values,
                         const uint64_t *lengths, const uint32_t *write_positions, ferrum_ring **out_ring) {
    return guard([&] {
        Operation op("dflash2_ring", device_of(ring));
        Ring &object = *unwrap(ring);
        const RingLayout &layout = object.layout;
        for (auto [name, tensor] : {std::pair{"keys", keys}, {"values", values}})
            check_shape({"dflash2_ring", name}, op.argument(name, tensor, {format_f32}, 4),
                        {layout.lanes, layout.window, layout.key_value_heads, layout.head_dim},
                        "lanes, window, key_value_heads, head_dim");
        required(lengths, "lengths");
        required(write_positions, "write_positions");
        required(out_ring, "out_ring");
        RingLane lanes[kMaxLanes];
        uint32_t counts[kMaxLanes];
        for (uint32_t lane = 0; lane < layout.lanes; lane++) {
            if (object.lanes[lane].length)
                fail(FERRUM_INVALID_ARGUMENT, "[dflash2_ring] ring: expected an empty one, lane %u holds %llu tokens",
                     lane, (unsigned long long)object.lanes[lane].length);
            if (write_positions[lane] >= layout.window)
                fail(FERRUM_INVALID_ARGUMENT,
                     "[dflash2_ring] write_positions: expected less than the window of %u, got %u", layout.window,
                     write_positions[lane]);
            if (lengths[lane] > INT64_MAX)
                fail(FERRUM_INVALID_ARGUMENT, "[dflash2_ring] lengths: expected less than 2^63, got %llu",
                     (unsigned long long)lengths[lane]);
            lanes[lane] = {lengths[lane], write_positions[lane]};
            counts[lane] = layout.window;
        }
        Ref<Ring> filled = object.commit("dflash2_ring", resource(*keys), resource(*values), layout.window, counts);
        give(filled->with_lanes(lanes), out_ring);
    });
}

int32_t ferrum_ring_read(ferrum_ring *ring, ferrum_buffer **out_keys, ferrum_buffer **out_values) {
    return guard([&] {
        Operation op("dflash2_ring", device_of(ring));
        Ring *object = unwrap(ring);
        const RingLayout &layout = object->layout;
        const uint64_t rows = uint64_t(layout.lanes) * layout.key_value_heads * layout.window;
        Ref<Buffer> keys = op.output(rows, layout.head_dim, 2), values = op.output(rows, layout.head_dim, 2);
        Launch launch(kernel_dflash2_gather_bf16);
        launch.bind(FERRUM_DFLASH2_GATHER_PAGES, op.bind(object->table.get()).resource)
            .bind(FERRUM_DFLASH2_GATHER_LANES, op.bind(object->table.get()).resource, object->lanes_offset())
            .bind(FERRUM_DFLASH2_GATHER_KEY, op.bind(keys.get()).resource)
            .bind(FERRUM_DFLASH2_GATHER_VALUE, op.bind(values.get()).resource)
            .with(FERRUM_DFLASH2_GATHER_PARAMS, params(layout, 0, 0))
            .over(layout.window, layout.lanes * layout.key_value_heads, FERRUM_SIMD_WIDTH);
        required(out_keys, "out_keys");
        required(out_values, "out_values");
        op.keep(object);
        op.submit(launch, rows);
        give(std::move(keys), out_keys);
        give(std::move(values), out_values);
    });
}

int32_t ferrum_dflash2_commit(ferrum_ring *ring, const ferrum_tensor *keys, const ferrum_tensor *values,
                              const uint32_t *counts, ferrum_ring **out_ring) {
    return guard([&] {
        Operation op("dflash2_commit", device_of(ring));
        Ring &object = *unwrap(ring);
        const RingLayout &layout = object.layout;
        const auto &k = op.argument("k", keys, {format_f32}, 4);
        const uint64_t rows = k.shape[1];
        if (rows == 0 || rows > FERRUM_DFLASH2_MAX_ROWS || rows >= layout.window)
            fail(FERRUM_INVALID_ARGUMENT,
                 "[dflash2_commit] k: expected 1…%u tokens a lane, less than the window of %u, got %llu",
                 uint32_t(FERRUM_DFLASH2_MAX_ROWS), layout.window, (unsigned long long)rows);
        for (auto [name, tensor] : {std::pair{"k", keys}, {"v", values}})
            check_shape({"dflash2_commit", name}, op.argument(name, tensor, {format_f32}, 4),
                        {layout.lanes, rows, layout.key_value_heads, layout.head_dim},
                        "lanes, tokens of k, key_value_heads, head_dim");
        required(counts, "counts");
        required(out_ring, "out_ring");
        for (uint32_t lane = 0; lane < layout.lanes; lane++)
            if (counts[lane] > rows)
                fail(FERRUM_INVALID_ARGUMENT,
                     "[dflash2_commit] counts: expected at most %llu, the tokens of k, got %u for lane %u",
                     (unsigned long long)rows, counts[lane], lane);
        give(object.commit("dflash2_commit", resource(*keys), resource(*values), uint32_t(rows), counts), out_ring);
    });
}

int32_t ferrum_dflash2_pack(ferrum_ring *ring, const ferrum_tensor *queries, const ferrum_tensor *keys,
                            const ferrum_tensor *values, ferrum_buffer **out_queries, ferrum_buffer **out_keys,
                            ferrum_buffer **out_values) {
    return guard([&] {
        Operation op("dflash2_pack", device_of(ring));
        Ring *object = unwrap(ring);
        const RingLayout &layout = object->layout;
        const auto &q = op.argument("q", queries, {format_f32}, 4);
        const uint64_t rows = q.shape[1], heads = q.shape[2];
        check_block("dflash2_pack", layout, rows, heads);
        check_shape({"dflash2_pack", "q"}, q, {layout.lanes, rows, heads, layout.head_dim},
                    "lanes, rows, heads, head_dim");
        for (auto [name, tensor] : {std::pair{"k", keys}, {"v", values}})
            check_shape({"dflash2_pack", name}, op.argument(name, tensor, {format_f32}, 4),
                        {layout.lanes, rows, layout.key_value_heads, layout.head_dim},
                        "lanes, rows, key_value_heads, head_dim");
        const ferrum_dflash2_params p = params(layout, uint32_t(heads), uint32_t(rows));
        const uint64_t columns = uint64_t(layout.lanes) * layout.key_value_heads * p.columns;
        Ref<Buffer> packed_q = op.output(layout.lanes * heads * rows, layout.head_dim, 2);
        Ref<Buffer> packed_k = op.output(columns, layout.head_dim, 2),
                    packed_v = op.output(columns, layout.head_dim, 2);
        required(out_queries, "out_queries");
        required(out_keys, "out_keys");
        required(out_values, "out_values");
        Launch launch(kernel_dflash2_pack_bf16);
        const uint32_t table = op.bind(object->table.get()).resource;
        const Operand k = op.bind(*keys), v = op.bind(*values);
        launch.bind(FERRUM_DFLASH2_PACK_QUERY, op.bind(q).resource)
            .bind(FERRUM_DFLASH2_PACK_KEY, k.resource)
            .bind(FERRUM_DFLASH2_PACK_VALUE, v.resource)
            .bind(FERRUM_DFLASH2_PACK_PAGES, table)
            .bind(FERRUM_DFLASH2_PACK_LANES, table, object->lanes_offset())
            .bind(FERRUM_DFLASH2_PACK_PACKED_QUERY, op.bind(packed_q.get()).resource)
            .bind(FERRUM_DFLASH2_PACK_PACKED_KEY, op.bind(packed_k.get()).resource)
            .bind(FERRUM_DFLASH2_PACK_PACKED_VALUE, op.bind(packed_v.get()).resource)
            .with(FERRUM_DFLASH2_PACK_PARAMS, p)
            .over(p.columns, layout.lanes * layout.key_value_heads, FERRUM_SIMD_WIDTH);
        op.keep(object);
        op.submit(launch, 1);
        give(std::move(packed_q), out_queries);
        give(std::move(packed_k), out_keys);
        give(std::move(packed_v), out_values);
    });
}

int32_t ferrum_dflash2_mask(ferrum_ring *ring, uint32_t rows, uint32_t query_heads, ferrum_buffer **out_mask) {
    return guard([&] {
        Operation op("dflash2_mask", device_of(ring));
        Ring *object = unwrap(ring);
        const RingLayout &layout = object->layout;
        check_block("dflash2_mask", layout, rows, query_heads);
        const ferrum_dflash2_params p = params(layout, query_heads, rows);
        const uint64_t all_rows = checked_multiply(uint64_t(layout.lanes) * rows, query_heads, "heads");
        Ref<Buffer> mask = op.output(checked_u32({"dflash2_mask", "heads"}, all_rows), p.columns, 2);
        required(out_mask, "out_mask");
        Launch launch(kernel_dflash2_mask_bf16);
        launch.bind(FERRUM_DFLASH2_MASK_LANES, op.bind(object->table.get()).resource, object->lanes_offset())
            .bind(FERRUM_DFLASH2_MASK_Y, op.bind(mask.get()).resource)
            .with(FERRUM_DFLASH2_MASK_PARAMS, p)
            .over(div_up(p.columns, 256), uint32_t(all_rows), 256);
        op.keep(object);
        op.submit(launch, 1);
        give(std::move(mask), out_mask);
    });
}

int32_t ferrum_dflash2_mask_rows(ferrum_device *device, const ferrum_tensor *hidden, const ferrum_tensor *embedding,
                                 uint32_t lanes, uint32_t rows, ferrum_buffer **out_hidden) {
    return guard([&] {
        Operation op("dflash2_mask_rows", device);
        check_lanes("dflash2_mask_rows", lanes);
        if (rows < 2 || rows > FERRUM_DFLASH2_MAX_ROWS)
            fail(FERRUM_INVALID_ARGUMENT, "[dflash2_mask_rows] rows: expected 2…%u, got %u",
                 uint32_t(FERRUM_DFLASH2_MAX_ROWS), rows);
        const auto &x = op.argument("hidden", hidden, {format_f32}, 2);
        const auto &e = op.argument("mask_embedding", embedding, {format_bf16}, 1);
        if (e.shape[0] == 0)
            fail(FERRUM_INVALID_ARGUMENT, "[dflash2_mask_rows] mask_embedding: expected numbers, got none");
        check_shape({"dflash2_mask_rows", "hidden"}, x, {uint64_t(lanes) * rows, e.shape[0]},
                    "lanes * rows, the width of mask_embedding");
        const auto width = uint32_t(e.shape[0]);
        Ref<Buffer> y = op.output(x.shape[0], width, 4);
        Launch launch(kernel_dflash2_mask_rows_f32);
        launch.bind(FERRUM_DFLASH2_MASK_ROWS_HIDDEN, op.bind(x).resource)
            .bind(FERRUM_DFLASH2_MASK_ROWS_EMBEDDING, op.bind(e).resource)
            .bind(FERRUM_DFLASH2_MASK_ROWS_Y, op.bind(y.get()).resource)
            .with(FERRUM_DFLASH2_MASK_ROWS_PARAMS, ferrum_dflash2_mask_rows_params{lanes, rows, width, 0})
            .over(div_up(width, 256), lanes * rows, 256);
        required(out_hidden, "out_hidden");
        op.submit(launch, 1);
        give(std::move(y), out_hidden);
    });
}
