// y = x W^T + b, the weights' values exactly what their stored form says. packed.h has the layout they are read in.
//
// Block formats. Each activation row is first turned into 16-bit fixed point, 32 elements at a time against their own
// largest magnitude: an error of at most 2^-16 of it, below the float16 rounding the activations already carry. Then a
// block's products and their sum are integers, exact, whatever the order; what is left in float is one multiply-add a
// block for its scale and one for its minimum, block after block. So an output depends on its own row and weights
// alone: not on how many rows come with it, on threads, on tiles, or on the instruction set.
//
// Dense formats. Products are summed in float32 by one fused multiply-add after another over 32 inputs, and the sums of
// 32 added in order.
//
// The limit is the multiply-adds of pairs of 16-bit integers, two vectors a cycle: a tile keeps 6 rows by 32 outputs of
// sums in registers, so that loads and unpacking fit beside them. With one row it is the bytes of the weights.
#include "kernels.h"
#include "packed.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

constexpr bool kWide = kRegisterLanes == 16;
constexpr int kTileRows = kWide ? 6 : 3;
constexpr int kTileGroups = kWide ? 2 : 1;  // groups of outputs that a tile of many rows takes at once
constexpr uint64_t kItemRows = 96;          // rows of a work item
constexpr uint64_t kItemBytes = 48 << 10;   // of weights that an item of few rows takes at least
constexpr int kStreamRows = 4;              // up to so many, one group at a time: their pace is memory's
constexpr uint64_t kAhead = 4096;           // bytes fetched ahead of them

void store_output(const Call &call, uint64_t row, uint32_t group, f32x16 value) {
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

// ---- Block formats

// What a block of 32 activations in fixed point stands for.
struct BlockSums {
    float scale;       // of one unit
    float scaled_sum;  // scale * (the sum of the block's integers)
    int32_t half_sums[2];
};
static_assert(sizeof(BlockSums) == kBlockSumsBytes);

void to_fixed_point(const half *x, uint32_t width, int16_t *values, BlockSums *sums) {
    const f32x16 zero = splat(0.0f), magic = splat(12582912.0f);  // rounds to nearest even, see simd.h
    for (uint32_t b = 0; b < width / 32; b++) {
        const f32x16 low = load(x + 32 * b), high = load(x + 32 * b + 16);
        const float most = largest(max(max(low, zero - low), max(high, zero - high)));
        // NaN and infinity have no fixed point: their block's scale is NaN, and so is every sum that meets it.
        if (sum((low - low) + (high - high)) != 0) {
            memset(values + 32 * b, 0, 64);
            sums[b] = {__builtin_nanf(""), __builtin_nanf(""), {0, 0}};
            continue;
        }
        const f32x16 inverse = splat(most > 0 ? 32767.0f / most : 0);
        const i32x16 q0 = to_integer((low * inverse + magic) - magic),
                     q1 = to_integer((high * inverse + magic) - magic);
        store_shorts(values + 32 * b, q0);
        store_shorts(values + 32 * b + 16, q1);
        const int32_t s0 = sum(q0), s1 = sum(q1);
        const float scale = most / 32767.0f;
        sums[b] = {scale, scale * (float)(s0 + s1), {s0, s1}};
    }
}

struct FixedPoint {
    int16_t *values;  // [rows][width]
    BlockSums *sums;  // [rows][width / 32]
};

template <class F, int kRows, int kGroups>
void multiply_tile(const Call &call, const FixedPoint &x, uint64_t row, const uint8_t *packed, uint32_t group) {
    using P = Packed<F>;
    const auto &p = call.params<ferrum_linear_params>();
    const uint32_t width = p.in_features, blocks = width / 32;
    // Sums of one output wait for each other: few of them are kept in several parts.
    constexpr int kChains = kRows * kGroups >= 8 ? 1 : kRows * kGroups >= 4 ? 2 : 4;
    constexpr int kPairs = 16 / P::groups;
    P weights[kGroups];
    const int16_t *values[kRows];
    const BlockSums *sums[kRows];
    f32x16 acc[kRows][kGroups];
    FERRUM_UNROLL for (int g = 0; g < kGroups; g++) weights[g] = {packed + g * P::group_bytes(width)};
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
        values[r] = x.values + (row + r) * width;
        sums[r] = x.sums + (row + r) * blocks;
        FERRUM_UNROLL for (int g = 0; g < kGroups; g++) acc[r][g] = splat(0.0f);
    }
    for (uint32_t b = 0; b < blocks; b++) {
        f32x16 scale[kGroups][P::groups], min[kGroups];
        // A few rows wait for memory, which is one stream.
        if constexpr (kRows <= kStreamRows)
            FERRUM_UNROLL for (int g = 0; g < kGroups; g++) for (uint64_t i = 0; i < P::block_bytes; i += 64)
                __builtin_prefetch(weights[g].group + P::block_at(b) + kAhead + i);
        FERRUM_UNROLL for (int part = 0; part < P::groups; part++) {
            i32x16 dots[kRows][kGroups][kChains];
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int g = 0; g < kGroups; g++) {
                FERRUM_UNROLL for (int c = 0; c < kChains; c++) dots[r][g][c] = splat((int32_t)0);
                if constexpr (F::offset != 0) {
                    const int32_t *halves = sums[r][b].half_sums;
                    dots[r][g][0] = splat(-F::offset * (P::groups == 1 ? halves[0] + halves[1] : halves[part]));
                }
            }
            FERRUM_UNROLL for (int i = 0; i < kPairs; i++) {
                const int s = part * kPairs + i;
                i32x16 w[kGroups];
                FERRUM_UNROLL for (int g = 0; g < kGroups; g++) w[g] = weights[g].pair(b, s);
                FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                    int32_t two;
                    memcpy(&two, values[r] + 32 * b + 2 * s, 4);
                    const i32x16 both = splat(two);
                    FERRUM_UNROLL for (int g = 0; g < kGroups; g++) dots[r][g][i % kChains] =
                        dot_pairs(dots[r][g][i % kChains], w[g], both);
                }
            }
            if (part == 0) FERRUM_UNROLL for (int g = 0; g < kGroups; g++) weights[g].block_scales(b, scale[g], min[g]);
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                const f32x16 x_scale = splat(sums[r][b].scale);
                FERRUM_UNROLL for (int g = 0; g < kGroups; g++) {
                    i32x16 dot = dots[r][g][0];
                    FERRUM_UNROLL for (int c = 1; c < kChains; c++) dot = dot + dots[r][g][c];
                    acc[r][g] = fma(to_float(dot), scale[g][part] * x_scale, acc[r][g]);
                }
            }
        }
        if constexpr (F::has_min) FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                const f32x16 x_sum = splat(sums[r][b].scaled_sum);
                FERRUM_UNROLL for (int g = 0; g < kGroups; g++) acc[r][g] = fma(min[g], x_sum, acc[r][g]);
            }
    }
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int g = 0; g < kGroups; g++)
        store_output(call, row + r, group + g, acc[r][g]);
}

// ---- Dense formats

template <class F, int kRows, int kGroups>
void multiply_tile(const Call &call, const float *x, uint64_t row, const uint8_t *packed, uint32_t group) {
    using Element = typename F::Element;
    const auto &p = call.params<ferrum_linear_params>();
    const uint32_t width = p.in_features;
    const Element *weights[kGroups];
    f32x16 acc[kRows][kGroups];
    FERRUM_UNROLL for (int g = 0; g < kGroups; g++) {
        weights[g] = (const Element *)(packed + g * packed_group_bytes<F>(width));
        FERRUM_UNROLL for (int r = 0; r < kRows; r++) acc[r][g] = splat(0.0f);
    }
    for (uint32_t first = 0; first < width; first += 32) {
        const uint32_t end = width - first < 32 ? width : first + 32;
        f32x16 part[kRows][kGroups];
        FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int g = 0; g < kGroups; g++) part[r][g] =
            splat(0.0f);
        for (uint32_t k = first; k < end; k++) {
            f32x16 w[kGroups];
            FERRUM_UNROLL for (int g = 0; g < kGroups; g++) w[g] = load(weights[g] + (uint64_t)k * kOutputs);
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                const f32x16 v = splat(x[(row + r) * width + k]);
                FERRUM_UNROLL for (int g = 0; g < kGroups; g++) part[r][g] = fma(v, w[g], part[r][g]);
            }
        }
        FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int g = 0; g < kGroups; g++) acc[r][g] =
            acc[r][g] + part[r][g];
    }
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int g = 0; g < kGroups; g++)
        store_output(call, row + r, group + g, acc[r][g]);
}

// ---- What they share

// Rows [begin, end) against `groups` groups of outputs: tiles of kTileRows rows, then what is left in one.
template <class F, int kGroups, class X>
void multiply_rows(const Call &call, const X &x, uint64_t begin, uint64_t end, const uint8_t *packed, uint32_t group) {
    for (; begin + kTileRows <= end; begin += kTileRows)
        multiply_tile<F, kTileRows, kGroups>(call, x, begin, packed, group);
    switch (end - begin) {
        case 5:
            return multiply_tile<F, 5, kGroups>(call, x, begin, packed, group);
        case 4:
            return multiply_tile<F, 4, kGroups>(call, x, begin, packed, group);
        case 3:
            return multiply_tile<F, 3, kGroups>(call, x, begin, packed, group);
        case 2:
            return multiply_tile<F, 2, kGroups>(call, x, begin, packed, group);
        case 1:
            return multiply_tile<F, 1, kGroups>(call, x, begin, packed, group);
    }
}

// The same against groups [group, last) of outputs.
template <class F, class X>
void multiply_groups(const Call &call, const X &x, uint64_t begin, uint64_t end, const uint8_t *packed, uint32_t group,
                     uint32_t last) {
    const uint64_t group_bytes = packed_group_bytes<F>(call.params<ferrum_linear_params>().in_features);
    const bool streams = end - begin <= kStreamRows;
    for (; !streams && group + kTileGroups <= last; group += kTileGroups, packed += kTileGroups * group_bytes)
        multiply_rows<F, kTileGroups>(call, x, begin, end, packed, group);
    for (; group < last; group++, packed += group_bytes) multiply_rows<F, 1>(call, x, begin, end, packed, group);
}

template <class F, class X>
void multiply(const Call &call, Worker &worker, const X &x, const LinearTemp &temp) {
    const auto &p = call.params<ferrum_linear_params>();
    const uint64_t group_bytes = packed_group_bytes<F>(p.in_features);
    const uint32_t groups = (p.out_features + kOutputs - 1) / kOutputs,
                   items = (groups + kItemGroups - 1) / kItemGroups;
    const uint64_t row_items = (p.rows + kItemRows - 1) / kItemRows;
    // Where rows are few, items are small: several at a time, though every thread should get some.
    uint64_t grain = p.rows <= FERRUM_FEW_ROWS ? kItemBytes / (group_bytes * kItemGroups + 1) : 1;
    if (grain > items / (2 * call.threads)) grain = items / (2 * call.threads);
    uint8_t *own = call.temp + temp.groups + worker.index() * temp.thread_bytes;
    worker.for_each(items * row_items, grain > 1 ? grain : 1, [&](uint64_t item) {
        const uint64_t row = item / items * kItemRows, end = p.rows - row < kItemRows ? p.rows : row + kItemRows;
        uint32_t group = (uint32_t)(item % items) * kItemGroups;
        const uint32_t last = groups - group < (uint32_t)kItemGroups ? groups : group + kItemGroups;
        const uint8_t *packed = own;
        if (call.packed) {
            packed = call.packed + group * group_bytes;
        } else {
            for (uint32_t g = group; g < last; g++) {
                const uint32_t left = p.out_features - g * kOutputs;
                pack_group<F>(call.at<const uint8_t>(FERRUM_LINEAR_WEIGHT) + g * kOutputs * p.weight_row_bytes,
                              p.weight_row_bytes, left < kOutputs ? (int)left : kOutputs, p.in_features,
                              own + (g - group) * group_bytes);
            }
        }
        if constexpr (F::bits == 16)
            if (end - row > FERRUM_FEW_ROWS) {  // many rows: each weight becomes float32 once, not once a tile
                using Element = typename F::Element;
                float *wide = (float *)(own + temp.group_bytes * kItemGroups);
                const uint64_t count = (last - group) * p.in_features * kOutputs;
                for (uint64_t i = 0; i < count; i += kOutputs) store(wide + i, load((const Element *)packed + i));
                return multiply_groups<f32>(call, x, row, end, (const uint8_t *)wide, group, last);
            }
        multiply_groups<F>(call, x, row, end, packed, group, last);
    });
}

template <class F>
void linear(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_linear_params>();
    const LinearTemp temp = linear_temp(*call.launch, call.threads);
    if constexpr (F::bits > 8) {
        float *x = (float *)(call.temp + temp.values);
        if (!call.temp_is_ready) {
            worker.for_each(p.rows, 4, [&](uint64_t r) {
                const half *from = call.at<const half>(FERRUM_LINEAR_X) + r * p.input_stride;
                for (uint32_t i = 0; i < p.in_features; i += kLanes)
                    store_up_to(x + r * p.in_features + i, load_up_to(from + i, p.in_features - i), p.in_features - i);
            });
            worker.barrier();
        }
        multiply<F>(call, worker, (const float *)x, temp);
    } else {
        const FixedPoint x{(int16_t *)(call.temp + temp.values), (BlockSums *)(call.temp + temp.sums)};
        if (!call.temp_is_ready) {
            worker.for_each(p.rows, 4, [&](uint64_t r) {
                to_fixed_point(call.at<const half>(FERRUM_LINEAR_X) + r * p.input_stride, p.in_features,
                               x.values + r * p.in_features, x.sums + r * (p.in_features / 32));
            });
            worker.barrier();
        }
        multiply<F>(call, worker, x, temp);
    }
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
