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
// A few rows read the weights once, straight into registers: their limit is memory. More rows go in items that unpack a
// panel of weights once, as pairs of 16-bit integers or as float32, and run tiles of rows over it: their limit is the
// multiply-adds, two vectors a cycle. So a tile keeps as many sums in registers as there are, those over blocks stay in
// the first-level cache, and so does the panel.
#include "kernels.h"
#include "packed.h"
#include "simd_math.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

constexpr uint32_t kTileGroups = kRegisterLanes == 16 ? 2 : 1;  // groups of outputs that a tile takes at once
static_assert(kTileGroups <= kMostTileGroups);
constexpr uint64_t kItemRows = 144;     // rows of a work item
constexpr uint32_t kScaledBlocks = 4;   // of activations, that share a scale
constexpr int kStreamRows = 4;          // up to so many, one group at a time: their pace is memory's
constexpr uint64_t kPanelAhead = 5120;  // bytes of weights that are fetched ahead of a panel

FERRUM_NOINLINE void store_output(const Call &call, uint64_t row, uint32_t group, f32x16 value) {
    const auto &p = call.params<ferrum_linear_params>();
    const uint32_t first = group * kOutputs, count = p.out_features - first;
    if (call.constant(FERRUM_CONSTANT_BIAS))
        value = value + (call.constant(FERRUM_CONSTANT_BIAS_F32)
                             ? load_up_to(call.at<const float>(FERRUM_LINEAR_BIAS) + first, count)
                             : load_up_to(call.at<const half>(FERRUM_LINEAR_BIAS) + first, count));
    const uint64_t at = row * p.output_stride + first;
    if (call.constant(FERRUM_CONSTANT_OUTPUT_F32))
        store_up_to(call.at<float>(FERRUM_LINEAR_Y) + at, value, count);
    else
        store_up_to(call.at<half>(FERRUM_LINEAR_Y) + at, value, count);
}

// Sums of a tile: they start at zero, go on where another panel left them, and leave as the outputs they are when no
// more inputs follow. Where nothing is added or cut off, that is straight from registers: a loop of stores to many
// lines would stall.
struct Sums {
    f32x16 (*acc)[kTileGroups];
    bool start;
    half *finished;   // NULL: stays in acc
    uint64_t stride;  // of finished rows

    Sums at(uint64_t row) const { return {acc + row, start, finished ? finished + row * stride : nullptr, stride}; }
    // to(r, g, sum so far) for every one, when `left` blocks of this panel follow.
    template <int kRows, class To>
    FERRUM_ALWAYS_INLINE void add(uint32_t left, To &&to) {
        if (finished && left == 0) {
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++)
                store(finished + r * stride + g * kOutputs, to(r, g, start ? splat(0.0f) : acc[r][g]));
        } else {
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++)
                acc[r][g] = to(r, g, start ? splat(0.0f) : acc[r][g]);
        }
        start = false;
    }
};

// ---- Block formats

// What goes with a block of 32 activations in fixed point.
struct BlockSums {
    float scale;  // of one unit
    float sum;    // of the block's integers
    int32_t half_sums[2];
};
static_assert(sizeof(BlockSums) == kBlockSumsBytes);

// Activations of the rows of an item, block of 32 inputs by block: so the rows of a tile lie together.
struct FixedPoint {
    int16_t *values;  // [width / 32][rows][32]
    BlockSums *sums;  // [width / 32][rows]
    uint64_t rows;
    FixedPoint at(uint64_t block, uint64_t row) const {
        return {values + (block * rows + row) * 32, sums + block * rows + row, rows};
    }
};

void to_fixed_point(const half *x, uint32_t width, FixedPoint to) {
    const f32x16 magic = splat(12582912.0f);  // rounds to nearest even, see simd_math.h
    for (uint32_t left = width / 32; left;) {
        const uint32_t blocks = left < kScaledBlocks ? left : kScaledBlocks;
        constexpr int kHalves = 2 * kScaledBlocks;
        f32x16 v[kHalves];
        i32x16 top = splat((int32_t)0);
        FERRUM_UNROLL for (int h = 0; h < kHalves; h++) {
            v[h] = h < 2 * (int)blocks ? load(x + 16 * h) : splat(0.0f);
            top = max(top, magnitude_bits(v[h]));
        }
        const int32_t most = largest(top);
        // NaN and infinity have no fixed point: their scale is NaN, and so is every sum that meets it.
        const bool finite = most < 0x7f800000;
        // 2^(14 - e) for a largest in [2^e, 2^(e + 1)); -24 is the exponent of the least float16.
        const int32_t exponent = most >> 23 < 127 - 24 ? -24 : (most >> 23) - 127;
        const f32x16 inverse = splat(power_of_two(14 - (finite ? exponent : 0)));
        const float scale = finite ? power_of_two(exponent - 14) : __builtin_nanf("");
        FERRUM_UNROLL for (int h = 0; h < kHalves; h++) v[h] =
            ((finite ? v[h] * inverse : splat(0.0f)) + magic) - magic;
        float half_sums[kHalves];
        whole_sums(v, half_sums);
        FERRUM_UNROLL for (uint32_t b = 0; b < kScaledBlocks; b++) {
            if (b == blocks) break;
            store_shorts(to.values, to_integer(v[2 * b]));
            store_shorts(to.values + 16, to_integer(v[2 * b + 1]));
            const float first = half_sums[2 * b], second = half_sums[2 * b + 1];
            *to.sums = {scale, first + second, {(int32_t)first, (int32_t)second}};
            to = to.at(1, 0);
        }
        x += 32 * blocks;
        left -= blocks;
    }
}

// kRows rows against one group, whose blocks are unpacked as they come.
template <class F, int kRows>
void multiply_stream(const Call &call, FixedPoint x, uint64_t row, const uint8_t *packed, uint32_t group) {
    using P = Packed<F>;
    const uint32_t blocks = call.params<ferrum_linear_params>().in_features / 32;
    // Sums of one output wait for each other: they are kept in several parts.
    constexpr int kChains = kRows >= 4 ? 2 : 4;
    constexpr int kPairs = 16 / P::groups;
    const P weights{packed};
    f32x16 acc[kRows], scaled[kRows];
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) acc[r] = scaled[r] = splat(0.0f);
    for (uint32_t b = 0; b < blocks; b++, x = x.at(1, 0)) {
        f32x16 scale[P::groups], min;
        FERRUM_UNROLL for (uint64_t i = 0; i < P::block_bytes; i += 64)
            __builtin_prefetch(packed + P::block_at(b) + kStreamAhead + i);
        weights.block_scales(b, scale, min);
        if constexpr (F::has_min)
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) scaled[r] = fma(min, splat(x.sums[r].sum), scaled[r]);
        FERRUM_UNROLL for (int part = 0; part < P::groups; part++) {
            i32x16 dots[kRows][kChains];
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                FERRUM_UNROLL for (int c = 0; c < kChains; c++) dots[r][c] = splat((int32_t)0);
                if constexpr (F::offset != 0) {
                    const int32_t *halves = x.sums[r].half_sums;
                    dots[r][0] = splat(-F::offset * (P::groups == 1 ? halves[0] + halves[1] : halves[part]));
                }
            }
            FERRUM_UNROLL for (int i = 0; i < kPairs; i++) {
                const int s = part * kPairs + i;
                const i32x16 w = weights.pair(b, s);
                FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                    int32_t two;
                    memcpy(&two, x.values + 32 * r + 2 * s, 4);
                    dots[r][i % kChains] = dot_pairs(dots[r][i % kChains], w, splat(two));
                }
            }
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                i32x16 dot = dots[r][0];
                FERRUM_UNROLL for (int c = 1; c < kChains; c++) dot = dot + dots[r][c];
                scaled[r] = fma(to_float(dot), scale[part], scaled[r]);
            }
        }
        if (b % kScaledBlocks == kScaledBlocks - 1 || b == blocks - 1) FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                acc[r] = fma(scaled[r], splat(x.sums[r].scale), acc[r]);
                scaled[r] = splat(0.0f);
            }
    }
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) store_output(call, row + r, group, acc[r]);
}

// A block of kTileGroups groups, unpacked.
template <int kScales, bool kMin>
struct IntegerPanel {
    static constexpr int kRows = kRegisterLanes == 16 ? 6 : 3;  // of a tile: as many sums of a block, and of four
    static constexpr uint32_t kBlocks = 3 * kScaledBlocks;      // of a panel
    i32x16 pairs[16][kTileGroups];
    f32x16 scale[kScales][kTileGroups], min[kTileGroups];

    template <class F>
    void unpack(const uint8_t *packed, uint32_t, uint64_t b, int g) {
        const Packed<F> weights{packed};
        FERRUM_UNROLL for (uint64_t i = 0; i < Packed<F>::block_bytes; i += 64)
            __builtin_prefetch(packed + Packed<F>::block_at(b) + kPanelAhead + i);
        f32x16 scales[kScales];
        weights.block_scales(b, scales, min[g]);
        FERRUM_UNROLL for (int i = 0; i < kScales; i++) scale[i][g] = scales[i];
        FERRUM_UNROLL for (int s = 0; s < 16; s++) pairs[s][g] = subtract_shorts(weights.pair(b, s), F::offset);
    }

    template <int kRows>
    static FERRUM_ALWAYS_INLINE void multiply(const IntegerPanel *panel, uint32_t blocks, uint32_t, FixedPoint x,
                                              Sums out) {
        while (blocks) {
            f32x16 scaled[kRows][kTileGroups];
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++)
                scaled[r][g] = splat(0.0f);
            const BlockSums *sums = x.sums;
            for (uint32_t b = 0; b < kScaledBlocks && blocks; b++, blocks--, panel++, x = x.at(1, 0)) {
                if constexpr (kMin)
                    FERRUM_UNROLL for (int r = 0; r < kRows; r++)
                        FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++) scaled[r][g] =
                            fma(panel->min[g], splat(x.sums[r].sum), scaled[r][g]);
                FERRUM_UNROLL for (int part = 0; part < kScales; part++) {
                    i32x16 dots[kRows][kTileGroups];
                    FERRUM_UNROLL for (int r = 0; r < kRows; r++)
                        FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++) dots[r][g] = splat((int32_t)0);
                    FERRUM_UNROLL for (int i = 0; i < 16 / kScales; i++) {
                        const int s = part * 16 / kScales + i;
                        FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                            int32_t two;
                            memcpy(&two, x.values + 32 * r + 2 * s, 4);
                            const i32x16 both = splat(two);
                            FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++) dots[r][g] =
                                dot_pairs(dots[r][g], panel->pairs[s][g], both);
                        }
                    }
                    FERRUM_UNROLL for (int r = 0; r < kRows; r++)
                        FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++) scaled[r][g] =
                            fma(to_float(dots[r][g]), panel->scale[part][g], scaled[r][g]);
                }
            }
            out.add<kRows>(blocks, [&](int r, int g, f32x16 sum) __attribute__((always_inline)) {
                return fma(scaled[r][g], splat(sums[r].scale), sum);
            });
        }
    }
};

// ---- Dense formats

struct Floats {
    float *values;  // [ceil(width / 32)][rows][32]
    uint64_t rows;
    Floats at(uint64_t block, uint64_t row) const { return {values + (block * rows + row) * 32, rows}; }
};

template <class F, int kRows>
void multiply_stream(const Call &call, Floats x, uint64_t row, const uint8_t *packed, uint32_t group) {
    const auto *weights = (const typename F::Element *)packed;
    const uint32_t width = call.params<ferrum_linear_params>().in_features;
    f32x16 acc[kRows];
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) acc[r] = splat(0.0f);
    for (uint32_t first = 0; first < width; first += 32, x = x.at(1, 0)) {
        const uint32_t count = width - first < 32 ? width - first : 32;
        constexpr uint64_t kBlockBytes = 32 * kOutputs * sizeof(*weights);
        for (uint64_t i = 0; i < kBlockBytes; i += 64)
            __builtin_prefetch((const uint8_t *)(weights + (uint64_t)first * kOutputs) + kStreamAhead + i);
        f32x16 part[kRows];
        FERRUM_UNROLL for (int r = 0; r < kRows; r++) part[r] = splat(0.0f);
        for (uint32_t k = 0; k < count; k++) {
            const f32x16 w = load(weights + (uint64_t)(first + k) * kOutputs);
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) part[r] = fma(splat(x.values[32 * r + k]), w, part[r]);
        }
        FERRUM_UNROLL for (int r = 0; r < kRows; r++) acc[r] = acc[r] + part[r];
    }
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) store_output(call, row + r, group, acc[r]);
}

struct FloatPanel {
    static constexpr int kRows = kRegisterLanes == 16 ? 12 : 3;
    static constexpr uint32_t kBlocks = 4;
    f32x16 values[32][kTileGroups];

    template <class F>
    void unpack(const uint8_t *packed, uint32_t width, uint64_t b, int g) {
        const auto *weights = (const typename F::Element *)packed + b * 32 * kOutputs;
        for (uint64_t i = 0; i < 32 * kOutputs * sizeof(*weights); i += 64)
            __builtin_prefetch((const uint8_t *)(weights + kBlocks * 32 * kOutputs) + i);
        const uint32_t count = width - 32 * b < 32 ? width - 32 * b : 32;
        for (uint32_t k = 0; k < count; k++) values[k][g] = load(weights + k * kOutputs);
    }

    // `width` inputs are left.
    template <int kRows>
    static FERRUM_ALWAYS_INLINE void multiply(const FloatPanel *panel, uint32_t blocks, uint32_t width, Floats x,
                                              Sums out) {
        for (; blocks; blocks--, panel++, x = x.at(1, 0), width -= 32) {
            const uint32_t count = width < 32 ? width : 32;
            f32x16 part[kRows][kTileGroups];
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++)
                part[r][g] = splat(0.0f);
            for (uint32_t k = 0; k < count; k++) FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                    const f32x16 v = splat(x.values[32 * r + k]);
                    FERRUM_UNROLL for (uint32_t g = 0; g < kTileGroups; g++) part[r][g] =
                        fma(v, panel->values[k][g], part[r][g]);
                }
            out.add<kRows>(blocks - 1,
                           [&](int r, int g, f32x16 sum) __attribute__((always_inline)) { return sum + part[r][g]; });
        }
    }
};

// ---- What they share

template <class F, bool kDense = (F::bits > 8)>
struct Form {
    using X = FixedPoint;
    using Panel = IntegerPanel<Packed<F>::groups, F::has_min>;
};
template <class F>
struct Form<F, true> {
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
    if (x.rows <= kStreamRows) {
        for (; group < last; group++, packed += group_bytes)
            in_groups<kStreamRows>(0, x.rows, [&](auto rows, uint64_t row) {
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
        worker.for_each(p.rows, 4, [&](uint64_t row) {
            run_before(call, row, p.in_features);
            const half *from = call.at<const half>(FERRUM_LINEAR_X) + row * p.input_stride;
            const auto to = item_of(row / kItemRows * kItemRows).at(0, row % kItemRows);
            if constexpr (F::bits > 8)
                for (uint32_t i = 0; i < p.in_features; i += kLanes)
                    store(to.at(i / 32, 0).values + i % 32, load_up_to(from + i, p.in_features - i));
            else
                to_fixed_point(from, p.in_features, to);
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
