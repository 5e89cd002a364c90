// y = x W^T + b, the weights multiplied as they are stored.
//
// Block formats. Each activation row is first turned into 16-bit fixed point, 32 elements at a time against their own
// largest magnitude: an error of at most 2^-16 of it, below the float16 rounding the activations already carry. Then a
// block's products and their sum are integers, exact, whatever the order; what is left in float is one multiply-add a
// block for its scale and one for its minimum, block after block. So an output depends on its own row and weights
// alone: not on how many rows come with it, on threads, on tiles, or on the instruction set.
//
// Dense formats. Sixteen float32 sums, lane j taking inputs j, j + 16, …, added in the order of simd.h's sum.
#include "blocks.h"
#include "kernels.h"

namespace ferrum::cpu::FERRUM_CPU_ISA {

namespace {

constexpr int kOutputs = 16;                             // outputs of a work item
constexpr int kTileRows = kRegisterLanes == 16 ? 8 : 4;  // rows a pass over a panel keeps in registers

void store_output(const Call &call, uint32_t row, uint32_t output, int count, f32x16 value) {
    const auto &p = call.params<ferrum_linear_params>();
    if (call.constant(FERRUM_CONSTANT_BIAS))
        value = value + (call.constant(FERRUM_CONSTANT_BIAS_F32)
                             ? load_up_to(call.at<const float>(FERRUM_LINEAR_BIAS) + output, count)
                             : load_up_to(call.at<const half>(FERRUM_LINEAR_BIAS) + output, count));
    const uint64_t at = (uint64_t)row * p.output_stride + output;
    if (call.constant(FERRUM_CONSTANT_OUTPUT_F32))
        store_up_to(call.at<float>(FERRUM_LINEAR_Y) + at, value, count);
    else
        store_up_to(call.at<half>(FERRUM_LINEAR_Y) + at, value, count);
}

// ---- Block formats

struct Activations {
    int16_t *values;  // [rows][width]
    float *scales;    // [rows][width / 32]
    float *sums;      // of a block's integers
};

void to_fixed_point(const half *x, uint32_t width, int16_t *values, float *scales, float *sums) {
    for (uint32_t b = 0; b < width / 32; b++) {
        const f32x16 low = load(x + 32 * b), high = load(x + 32 * b + 16);
        const f32x16 zero = splat(0.0f);
        const float most = largest(max(max(low, zero - low), max(high, zero - high)));
        // NaN and infinity have no fixed point: their block's scale is NaN, and so is every sum that meets it.
        const float check = sum((low - low) + (high - high));
        const float inverse = most > 0 ? 32767.0f / most : 0;
        float scaled[32];
        const f32x16 magic = splat(12582912.0f);  // rounds to nearest even, see simd.h
        store(scaled, (low * splat(inverse) + magic) - magic);
        store(scaled + 16, (high * splat(inverse) + magic) - magic);
        int32_t total = 0;
        for (int i = 0; i < 32; i++) {
            const int32_t q = check == 0 ? (int32_t)scaled[i] : 0;
            values[32 * b + i] = (int16_t)q;
            total += q;
        }
        scales[b] = check == 0 ? most / 32767.0f : __builtin_nanf("");
        sums[b] = (float)total;
    }
}

// A few rows: sixteen outputs' blocks are decoded into registers, met by every row's block, and their sums taken
// together, an output a lane.
template <class F, int kRows>
void multiply_few(const Call &call, const Activations &x, uint32_t first, int count) {
    const auto &p = call.params<ferrum_linear_params>();
    const uint32_t blocks = p.in_features / 32;
    constexpr int kGroups = 32 / F::group;
    const uint8_t *weights[kOutputs];
    for (int o = 0; o < kOutputs; o++)  // outputs past the last one repeat it; their sums are dropped
        weights[o] =
            call.at<const uint8_t>(FERRUM_LINEAR_WEIGHT) + (first + (o < count ? o : count - 1)) * p.weight_row_bytes;
    const uint64_t ahead = kOutputs * p.weight_row_bytes, block_bytes = p.weight_row_bytes / (blocks ? blocks : 1);
    f32x16 acc[kRows];
    for (int r = 0; r < kRows; r++) acc[r] = splat(0.0f);
    for (uint32_t b = 0; b < blocks; b++) {
        i32x16 values[kRows], dots[kRows][kGroups][kOutputs];
        float scales[kGroups][kOutputs], mins[kOutputs];
        FERRUM_UNROLL for (int r = 0; r < kRows; r++)
            memcpy(&values[r], x.values + (uint64_t)r * p.in_features + 32 * b, sizeof(i32x16));
        FERRUM_UNROLL for (int o = 0; o < kOutputs; o++) {
            Block w;
            F::decode(weights[o], b, w);
            // Sixteen rows are sixteen short streams, which the hardware does not follow: fetch the next sixteen.
            __builtin_prefetch(weights[o] + ahead + b * block_bytes);
            FERRUM_UNROLL for (int g = 0; g < kGroups; g++) {
                const i32x16 q = kGroups == 1 ? w.q : half_of(w.q, g);
                FERRUM_UNROLL for (int r = 0; r < kRows; r++) dots[r][g][o] =
                    dot_pairs(splat((int32_t)0), q, values[r]);
                scales[g][o] = w.scale[g];
            }
            if (F::has_min) mins[o] = w.min;
        }
        FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
            const f32x16 x_scale = splat(x.scales[(uint64_t)r * blocks + b]);
            FERRUM_UNROLL for (int g = 0; g < kGroups; g++) acc[r] =
                fma(to_float(sums_of(dots[r][g])), load(scales[g]) * x_scale, acc[r]);
            if (F::has_min) acc[r] = fma(load(mins) * x_scale, splat(x.sums[(uint64_t)r * blocks + b]), acc[r]);
        }
    }
    for (int r = 0; r < kRows; r++) store_output(call, r, first, count, acc[r]);
}

// Sixteen outputs' weights for up to kPanelWidth inputs: integers as [pair of inputs][output], scales as
// [group][output], minima as [block][output].
struct Panel {
    int32_t *pairs;
    float *scales;
    float *mins;
    float *acc;  // [kPanelRows][kOutputs]
};

template <class F>
void decode_panel(const Call &call, uint32_t first, int count, uint32_t first_block, uint32_t blocks,
                  const Panel &panel) {
    const auto &p = call.params<ferrum_linear_params>();
    const uint8_t *weights[kOutputs];
    for (int o = 0; o < kOutputs; o++)  // outputs past the last one repeat it; their sums are dropped
        weights[o] =
            call.at<const uint8_t>(FERRUM_LINEAR_WEIGHT) + (first + (o < count ? o : count - 1)) * p.weight_row_bytes;
    for (uint32_t b = 0; b < blocks; b++) {
        i32x16 pairs[kOutputs];
        FERRUM_UNROLL for (int o = 0; o < kOutputs; o++) {
            Block w;
            F::decode(weights[o], first_block + b, w);
            pairs[o] = w.q;
            for (int g = 0; g < 32 / F::group; g++) panel.scales[(b * (32 / F::group) + g) * kOutputs + o] = w.scale[g];
            if (F::has_min) panel.mins[b * kOutputs + o] = w.min;
        }
        transpose(pairs);
        memcpy(panel.pairs + b * 16 * kOutputs, pairs, sizeof(pairs));
    }
}

template <class F, int kRows>
void multiply_panel(const Panel &panel, const Activations &x, const ferrum_linear_params &p, uint32_t row,
                    uint32_t first_block, uint32_t blocks, float *acc_rows) {
    constexpr int kGroups = 32 / F::group;
    const uint32_t all_blocks = p.in_features / 32;
    const int16_t *values[kRows];
    const float *scales[kRows], *sums[kRows];
    f32x16 acc[kRows];
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
        values[r] = x.values + (uint64_t)(row + r) * p.in_features + 32 * first_block;
        scales[r] = x.scales + (uint64_t)(row + r) * all_blocks + first_block;
        sums[r] = x.sums + (uint64_t)(row + r) * all_blocks + first_block;
        acc[r] = load(acc_rows + r * kOutputs);
    }
    for (uint32_t b = 0; b < blocks; b++) {
        FERRUM_UNROLL for (int g = 0; g < kGroups; g++) {
            i32x16 dot[kRows];
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) dot[r] = splat((int32_t)0);
            FERRUM_UNROLL for (int s = 0; s < 16 / kGroups; s++) {
                const int pair = g * (16 / kGroups) + s;
                const i32x16 w = load(panel.pairs + (b * 16 + pair) * kOutputs);
                FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
                    int32_t two;
                    memcpy(&two, values[r] + 32 * b + 2 * pair, 4);
                    dot[r] = dot_pairs(dot[r], w, splat(two));
                }
            }
            const f32x16 scale = load(panel.scales + (b * kGroups + g) * kOutputs);
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) acc[r] =
                fma(to_float(dot[r]), scale * splat(scales[r][b]), acc[r]);
        }
        if (F::has_min) {
            const f32x16 min = load(panel.mins + b * kOutputs);
            FERRUM_UNROLL for (int r = 0; r < kRows; r++) acc[r] =
                fma(min * splat(scales[r][b]), splat(sums[r][b]), acc[r]);
        }
    }
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) store(acc_rows + r * kOutputs, acc[r]);
}

template <class F>
void multiply_many(const Call &call, const Activations &x, const Panel &panel, uint32_t first, int count) {
    const auto &p = call.params<ferrum_linear_params>();
    const uint32_t blocks = p.in_features / 32, step = kPanelWidth / 32;
    for (uint32_t row = 0; row < p.rows; row += kPanelRows) {
        const uint32_t rows = p.rows - row < kPanelRows ? p.rows - row : (uint32_t)kPanelRows;
        memset(panel.acc, 0, rows * kOutputs * sizeof(float));
        for (uint32_t b = 0; b < blocks; b += step) {
            const uint32_t some = blocks - b < step ? blocks - b : step;
            decode_panel<F>(call, first, count, b, some, panel);
            uint32_t r = 0;
            for (; r + kTileRows <= rows; r += kTileRows)
                multiply_panel<F, kTileRows>(panel, x, p, row + r, b, some, panel.acc + r * kOutputs);
            for (; r < rows; r++) multiply_panel<F, 1>(panel, x, p, row + r, b, some, panel.acc + r * kOutputs);
        }
        for (uint32_t r = 0; r < rows; r++) store_output(call, row + r, first, count, load(panel.acc + r * kOutputs));
    }
}

template <class F>
void linear_blocks(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_linear_params>();
    const LinearTemp temp = linear_temp(*call.launch, call.threads);
    const Activations x{(int16_t *)(call.temp + temp.values), (float *)(call.temp + temp.scales),
                        (float *)(call.temp + temp.sums)};
    const uint64_t blocks = p.in_features / 32;
    if (!call.temp_is_ready) {
        worker.for_each(p.rows, 4, [&](uint64_t r) {
            to_fixed_point(call.at<const half>(FERRUM_LINEAR_X) + r * p.input_stride, p.in_features,
                           x.values + r * p.in_features, x.scales + r * blocks, x.sums + r * blocks);
        });
        worker.barrier();
    }
    uint8_t *own = call.temp + temp.panels + worker.index() * temp.panel_bytes;
    const Panel panel{(int32_t *)own, (float *)(own + kPanelWidth * 32),
                      (float *)(own + kPanelWidth * 32 + kPanelWidth / 16 * 64),
                      (float *)(own + kPanelWidth * 32 + kPanelWidth / 16 * 64 + kPanelWidth / 32 * 64)};
    worker.for_each((p.out_features + kOutputs - 1) / kOutputs, p.rows == 1 ? 4 : 1, [&](uint64_t item) {
        const uint32_t first = (uint32_t)item * kOutputs;
        const int count = p.out_features - first < kOutputs ? (int)(p.out_features - first) : kOutputs;
        switch (p.rows) {  // up to 8 a panel of decoded weights costs more than it saves
            case 1:
                return multiply_few<F, 1>(call, x, first, count);
            case 2:
                return multiply_few<F, 2>(call, x, first, count);
            case 3:
                return multiply_few<F, 3>(call, x, first, count);
            case 4:
                return multiply_few<F, 4>(call, x, first, count);
            case 5:
                return multiply_few<F, 5>(call, x, first, count);
            case 6:
                return multiply_few<F, 6>(call, x, first, count);
            case 7:
                return multiply_few<F, 7>(call, x, first, count);
            case 8:
                return multiply_few<F, 8>(call, x, first, count);
            default:
                return multiply_many<F>(call, x, panel, first, count);
        }
    });
}

// ---- Dense formats

template <class F, int kRows, int kCols>
FERRUM_ALWAYS_INLINE void dense_tile(const float *x, uint64_t x_stride, const uint8_t *weights, uint64_t row_bytes,
                                     uint32_t width, float *out, int out_stride) {
    f32x16 acc[kRows][kCols];
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int c = 0; c < kCols; c++) acc[r][c] = splat(0.0f);
    for (uint32_t i = 0; i < width; i += kLanes) {
        f32x16 w[kCols];
        FERRUM_UNROLL for (int c = 0; c < kCols; c++) w[c] = F::elements(weights + c * row_bytes, i, width - i);
        FERRUM_UNROLL for (int r = 0; r < kRows; r++) {
            const f32x16 v = load(x + r * x_stride + i);
            FERRUM_UNROLL for (int c = 0; c < kCols; c++) acc[r][c] = fma(v, w[c], acc[r][c]);
        }
    }
    FERRUM_UNROLL for (int r = 0; r < kRows; r++) FERRUM_UNROLL for (int c = 0; c < kCols; c++)
        out[r * out_stride + c] = sum(acc[r][c]);
}

template <class F>
void linear_dense(const Call &call, Worker &worker) {
    const auto &p = call.params<ferrum_linear_params>();
    const uint64_t stride = align_up(p.in_features, kLanes);
    float *x = (float *)(call.temp + linear_temp(*call.launch, call.threads).values);
    if (!call.temp_is_ready) {
        worker.for_each(p.rows, 4, [&](uint64_t r) {
            const half *from = call.at<const half>(FERRUM_LINEAR_X) + r * p.input_stride;
            for (uint32_t i = 0; i < p.in_features; i += kLanes)
                store(x + r * stride + i, load_up_to(from + i, p.in_features - i));
        });
        worker.barrier();
    }
    constexpr int kRows = kRegisterLanes == 16 ? 4 : 2, kCols = kRegisterLanes == 16 ? 4 : 2;
    worker.for_each((p.out_features + kOutputs - 1) / kOutputs, 1, [&](uint64_t item) {
        const uint32_t first = (uint32_t)item * kOutputs;
        const int count = p.out_features - first < kOutputs ? (int)(p.out_features - first) : kOutputs;
        const uint8_t *weights = call.at<const uint8_t>(FERRUM_LINEAR_WEIGHT) + first * p.weight_row_bytes;
        for (uint32_t row = 0; row < p.rows;) {
            float out[kRows][kOutputs];
            const int rows = p.rows - row >= kRows ? kRows : 1;
            for (int o = 0; o < count;) {
                const uint8_t *w = weights + o * p.weight_row_bytes;
                const float *from = x + row * stride;
                const bool wide = count - o >= kCols;
                if (rows == kRows && wide)
                    dense_tile<F, kRows, kCols>(from, stride, w, p.weight_row_bytes, p.in_features, &out[0][o],
                                                kOutputs);
                else if (rows == kRows)
                    dense_tile<F, kRows, 1>(from, stride, w, p.weight_row_bytes, p.in_features, &out[0][o], kOutputs);
                else if (wide)
                    dense_tile<F, 1, kCols>(from, stride, w, p.weight_row_bytes, p.in_features, &out[0][o], kOutputs);
                else
                    dense_tile<F, 1, 1>(from, stride, w, p.weight_row_bytes, p.in_features, &out[0][o], kOutputs);
                o += wide ? kCols : 1;
            }
            for (int r = 0; r < rows; r++) store_output(call, row + r, first, count, load_some(out[r], count));
            row += rows;
        }
    });
}

}  // namespace

// The shapes that a plan tells apart are one kernel here: it looks at the rows itself, and no bit depends on them.
#define FERRUM_LINEAR(format, family)                               \
    void linear_vector_##format(const Call &call, Worker &worker) { \
        linear_##family<format>(call, worker);                      \
    }                                                               \
    void linear_rows_##format(const Call &call, Worker &worker) {   \
        linear_##family<format>(call, worker);                      \
    }                                                               \
    void linear_tiles_##format(const Call &call, Worker &worker) {  \
        linear_##family<format>(call, worker);                      \
    }
FERRUM_LINEAR(f32, dense)
FERRUM_LINEAR(f16, dense)
FERRUM_LINEAR(bf16, dense)
FERRUM_LINEAR(q4_0, blocks)
FERRUM_LINEAR(q4_1, blocks)
FERRUM_LINEAR(q5_0, blocks)
FERRUM_LINEAR(q5_1, blocks)
FERRUM_LINEAR(q8_0, blocks)
FERRUM_LINEAR(q4_k, blocks)
FERRUM_LINEAR(q5_k, blocks)
FERRUM_LINEAR(q6_k, blocks)

}  // namespace ferrum::cpu::FERRUM_CPU_ISA
