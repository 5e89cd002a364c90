// y = x W^T + b, the weights' values exactly what their stored form says. packed.h has the layout they are read in.
//
// Block formats. Each activation row is first turned into 16-bit fixed point, 128 elements at a time by the power of
// two that makes their largest magnitude fit: an element within 1/16 of that largest is kept exactly, as float16 has 11
// bits, and others to 2^-15 of it. Then a block's products and their sum are integers, exact, whatever the order; what
// is left in float is a multiply-add for each scale of a block, one for its minimum, and one for the scale of four
// blocks, in order. So an output depends on its own row and weights alone: not on how many rows come with it, on
// threads, on tiles, or on the instruction set.
//
// Dense formats. Products are summed in float32 by one fused multiply-add after another over 32 inputs, and the sums of
// 32 added in order.
//
// A few rows take the weights straight into registers, twelve at a time or, in narrower registers, four to six: the
// limit of one is memory, and where there are more, laying weights out for later costs more than unpacking them again.
// Many go in items that unpack a panel of weights once, as pairs of 16-bit integers or as float32, and run tiles of
// rows over it: their limit is the multiply-adds, two vectors a cycle. So a tile keeps as many sums in registers as
// there are, those over blocks stay in the first-level cache, and so does the panel.
#include "linear_blocks.h"
#include "linear_dense.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

// How a format is multiplied, and up to how many rows stream its weights: fields of 5 and 6 bits take longest to
// unpack, those of 8 least.
template <class F, bool kDense = (F::bits > 8)>
struct Form {
    static constexpr uint64_t kStreamed = kRegisterLanes == 16 ? (F::bits % 4 ? 24 : 48) : F::bits == 8 ? 16 : 4;
    using X = FixedPoint;
    using Panel = IntegerPanel<Packed<F>::groups, F::has_min>;
};
template <class F>
struct Form<F, true> {
    static constexpr uint64_t kStreamed = kRegisterLanes < 8 ? 4 : 48;
    using X = Floats;
    using Panel = FloatPanel;
};

// `count` blocks of a panel against all rows of an item; `x` starts at the first of them.
template <class Panel, class X>
FERRUM_NOINLINE void multiply_panel(const Panel *panel, uint32_t count, uint32_t width, X x, const Sums &sums) {
    in_groups<Panel::kRows>(0, x.rows, [&](auto rows, uint64_t row) __attribute__((always_inline)) {
        Panel::template multiply<decltype(rows)::value>(panel, count, width, x.at(0, row), sums.at(row));
    });
}

// Rows [begin, begin + x.rows) against groups [group, last) of outputs.
template <class F, class X>
void multiply_item(const Call &call, X x, uint64_t begin, const uint8_t *packed, uint32_t group, uint32_t last) {
    using Panel = typename Form<F>::Panel;
    const auto &p = call.params<ferrum_linear_params>();
    const uint32_t width = p.in_features, blocks = (width + 31) / 32;
    const uint64_t group_bytes = packed_group_bytes<F>(width);
    if (x.rows <= Form<F>::kStreamed) {
        for (; group < last; group++, packed += group_bytes)
            in_even_groups<kStreamRows>(x.rows, [&](auto rows, uint64_t row) {
                multiply_stream<F, decltype(rows)::value>(call, x.at(0, row), begin + row, packed, group);
            });
        return;
    }
    Panel panel[Panel::kBlocks];
    f32x16 acc[kItemRows][kTileGroups];
    const bool exact = !call.constant(FERRUM_CONSTANT_BIAS | FERRUM_CONSTANT_OUTPUT_F32);
    for (; group < last; group += kTileGroups, packed += kTileGroups * group_bytes) {
        const uint32_t groups = last - group < kTileGroups ? last - group : kTileGroups;
        const bool direct = exact && (group + kTileGroups) * kOutputs <= p.out_features;
        for (uint32_t first = 0; first < blocks; first += Panel::kBlocks) {
            const uint32_t count = blocks - first < Panel::kBlocks ? blocks - first : Panel::kBlocks;
            for (uint32_t g = 0; g < kTileGroups; g++)  // the sums of a group that is not there are not used
                for (uint32_t b = 0; b < count; b++)
                    panel[b].template unpack<F>(packed + (g < groups ? g : 0) * group_bytes, width, first + b, g);
            half *finished = nullptr;
            if (direct && first + count == blocks)
                finished = call.at<half>(FERRUM_LINEAR_Y) + begin * p.output_stride + group * kOutputs;
            multiply_panel(panel, count, width - 32 * first, x.at(first, 0),
                           Sums{acc, first == 0, finished, p.output_stride});
        }
        for (uint64_t row = 0; row < x.rows && !direct; row++)
            for (uint32_t g = 0; g < groups; g++) store_output(call, begin + row, group + g, acc[row][g]);
    }
}

// Groups [group, last) against rows of one item; weights that are not prepared are packed a tile at a time into `own`.
template <class F, class X>
void multiply_groups(const Call &call, const X &x, uint64_t row, uint32_t group, uint32_t last, uint8_t *own) {
    const auto &p = call.params<ferrum_linear_params>();
    const uint64_t group_bytes = packed_group_bytes<F>(p.in_features);
    if (call.packed) return multiply_item<F>(call, x, row, call.packed + group * group_bytes, group, last);
    for (uint32_t next; group < last; group = next) {
        next = last - group < kTileGroups ? last : group + kTileGroups;
        for (uint32_t g = group; g < next; g++) {
            const uint32_t left = p.out_features - g * kOutputs;
            pack_group<F>(call.at<const uint8_t>(FERRUM_LINEAR_WEIGHT) + g * kOutputs * p.weight_row_bytes,
                          p.weight_row_bytes, left < kOutputs ? (int)left : kOutputs, p.in_features,
                          own + (g - group) * group_bytes);
        }
        multiply_item<F>(call, x, row, own, group, next);
    }
}

template <class F, class ItemOf>
void multiply(const Call &call, Worker &worker, const LinearTemp &temp, ItemOf &&item_of) {
    const auto &p = call.params<ferrum_linear_params>();
    const uint32_t groups = (p.out_features + kOutputs - 1) / kOutputs, tiles = div_up(groups, kMostTileGroups);
    const uint64_t row_items = (p.rows + kItemRows - 1) / kItemRows;
    uint8_t *own = call.temp + temp.groups + worker.index() * temp.thread_bytes;
    worker.for_ranges(tiles * row_items, [&](uint64_t begin, uint64_t end) {
        while (begin < end) {
            const uint64_t row = begin / tiles * kItemRows, tile = begin % tiles;
            const uint64_t count = end - begin < tiles - tile ? end - begin : tiles - tile;
            const uint32_t last = (uint32_t)(tile + count) * kMostTileGroups;
            multiply_groups<F>(call, item_of(row), row, (uint32_t)tile * kMostTileGroups, last < groups ? last : groups,
                               own);
            begin += count;
        }
    });
}

void run_before(const Call &call, uint64_t row, uint32_t width) {
    if (!call.before) return;
    run_before(*call.before, row, width);
    call.before->row_function(*call.before, row, width);
}

template <class F>
void linear(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_linear_params>();
    const LinearTemp temp = linear_temp(*call.launch, call.threads);
    const uint32_t blocks = (p.in_features + 31) / 32;
    // The activations of the item whose first row this is.
    auto item_of = [&](uint64_t row) -> typename Form<F>::X {
        const uint64_t rows = p.rows - row < kItemRows ? p.rows - row : kItemRows;
        if constexpr (F::bits > 8)
            return {(float *)(call.temp + temp.values) + row * blocks * 32, rows};
        else
            return {(int16_t *)(call.temp + temp.values) + row * blocks * 32,
                    (BlockSums *)(call.temp + temp.sums) + row * blocks, rows};
    };
    if (!call.temp_is_ready) {
        worker.for_ranges(p.rows, [&](uint64_t begin, uint64_t end) {
            for (uint64_t row = begin; row < end; row++) {
                run_before(call, row, p.in_features);
                const half *from = call.at<const half>(FERRUM_LINEAR_X) + row * p.input_stride;
                const auto to = item_of(row / kItemRows * kItemRows).at(0, row % kItemRows);
                if constexpr (F::bits > 8)
                    for (uint32_t i = 0; i < p.in_features; i += kLanes)
                        store(to.at(i / 32, 0).values + i % 32, load_up_to(from + i, p.in_features - i));
                else
                    to_fixed_point(from, p.in_features, to);
            }
        });
        worker.barrier();
    }
    multiply<F>(call, worker, temp, item_of);
}

}  // namespace

// The shapes that a plan tells apart are one kernel here: it looks at the rows itself, and no bit depends on them.
#define FERRUM_LINEAR(NAME, name, id, elements, bytes)            \
    void linear_vector_##name(const Call &call, Worker &worker) { \
        linear<name>(call, worker);                               \
    }                                                             \
    void linear_rows_##name(const Call &call, Worker &worker) {   \
        linear<name>(call, worker);                               \
    }                                                             \
    void linear_tiles_##name(const Call &call, Worker &worker) {  \
        linear<name>(call, worker);                               \
    }
FERRUM_FORMATS(FERRUM_LINEAR)
#undef FERRUM_LINEAR

void pack(const Packing &job, uint64_t group) {
    switch (job.format) {
#define FERRUM_PACK(NAME, name, id, elements, bytes)                                        \
    case id: {                                                                              \
        const uint64_t left = job.rows - group * kOutputs;                                  \
        return pack_group<name>(job.from + group * kOutputs * job.row_bytes, job.row_bytes, \
                                left < kOutputs ? (int)left : kOutputs, job.width,          \
                                job.to + group * packed_group_bytes<name>(job.width));      \
    }
        FERRUM_FORMATS(FERRUM_PACK)
#undef FERRUM_PACK
    }
}

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
