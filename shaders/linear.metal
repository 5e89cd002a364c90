// y = x W^T + b for one row and for a few, the weights read as they are stored.
//
// A SIMD-group takes four outputs. Its lanes stride over units of the weight rows (blocks.h); a lane decodes a unit
// once and multiplies it with every row of x, one running sum per row and output; simd_sum adds the lanes at the end.
// The order of a sum is that of the units and nothing else, so a row has the same bits in both kernels and in any
// company.
#include "linear.h"

constant constexpr uint kOutputs = 4;
static_assert(2 * kOutputs == FERRUM_LINEAR_VECTOR_OUTPUTS, "two SIMD-groups share a threadgroup");

// What lane `lane` adds to the sums for one unit. kWide: wide loads; else whatever the alignment, the first `count`
// elements of a unit.
template <typename F, uint kRows, bool kWide>
inline void multiply_unit(device const half *x, device const uchar *weight, thread const ulong (&weight_row)[kOutputs],
                          thread const uint (&row)[kRows], uint unit, uint count,
                          thread float (&sum)[kRows][kOutputs]) {
    typename F::bits bits[kOutputs];
    FERRUM_UNROLL for (uint o = 0; o < kOutputs; o++)
        F::template load<kWide>(weight + weight_row[o], unit, count, bits[o]);
    FERRUM_UNROLL for (uint octet = 0; octet < F::octets; octet++) {
        float4 low[kOutputs], high[kOutputs];
        FERRUM_UNROLL for (uint o = 0; o < kOutputs; o++) F::weights(bits[o], octet, low[o], high[o]);
        device const half *from = x + F::element(unit, octet);
        FERRUM_UNROLL for (uint r = 0; r < kRows; r++) {
            float4 x_low, x_high;
            if (kWide)
                load_octet(from + row[r], x_low, x_high);
            else
                load_octet(from + row[r], count, x_low, x_high);
            FERRUM_UNROLL for (uint o = 0; o < kOutputs; o++) {
                float s = sum[r][o];
                FERRUM_UNROLL for (uint i = 0; i < 4; i++) s = fma(low[o][i], x_low[i], s);
                FERRUM_UNROLL for (uint i = 0; i < 4; i++) s = fma(high[o][i], x_high[i], s);
                sum[r][o] = s;
            }
        }
    }
}

// Rows [first_row, first_row + rows), rows <= kRows, of outputs [first, first + 4). Rows that are not there repeat the
// last one, and are dropped; so do outputs.
template <typename F, uint kRows, bool kWide>
inline void multiply_rows(device const half *x, device const uchar *weight, device const uchar *bias, device uchar *y,
                          constant ferrum_linear_params &p, uint first, uint first_row, uint rows, uint lane) {
    x += ulong(first_row) * p.input_stride;
    ulong weight_row[kOutputs];
    uint row[kRows];
    float sum[kRows][kOutputs];
    FERRUM_UNROLL for (uint o = 0; o < kOutputs; o++) weight_row[o] =
        min(first + o, p.out_features - 1) * p.weight_row_bytes;
    FERRUM_UNROLL for (uint r = 0; r < kRows; r++) {
        row[r] = min(r, rows - 1) * p.input_stride;
        FERRUM_UNROLL for (uint o = 0; o < kOutputs; o++) sum[r][o] = 0.0f;
    }
    const uint units = p.in_features / F::unit, left = p.in_features % F::unit;
    for (uint unit = lane; unit < units; unit += FERRUM_SIMD_WIDTH)
        multiply_unit<F, kRows, kWide>(x, weight, weight_row, row, unit, 8, sum);
    if (F::dense && left != 0 && units % FERRUM_SIMD_WIDTH == lane)
        multiply_unit<F, kRows, false>(x, weight, weight_row, row, units, left, sum);
    FERRUM_UNROLL for (uint r = 0; r < kRows; r++) {
        FERRUM_UNROLL for (uint o = 0; o < kOutputs; o++) {
            const float total = simd_sum(sum[r][o]);
            if (lane == (r * kOutputs + o) % FERRUM_SIMD_WIDTH && r < rows && first + o < p.out_features)
                store_output(y, bias, p, first_row + r, first + o, total);
        }
    }
}

template <typename F>
inline void linear_vector(device const half *x, device const uchar *weight, device const uchar *bias, device uchar *y,
                          constant ferrum_linear_params &p, uint3 group, uint simdgroup, uint lane) {
    const uint first = group.x * FERRUM_LINEAR_VECTOR_OUTPUTS + simdgroup * kOutputs;
    if (first >= p.out_features) return;
    if (has_wide_rows<F>(x, weight, p))
        multiply_rows<F, 1, true>(x, weight, bias, y, p, first, 0, 1, lane);
    else
        multiply_rows<F, 1, false>(x, weight, bias, y, p, first, 0, 1, lane);
}

template <typename F>
inline void linear_rows(device const half *x, device const uchar *weight, device const uchar *bias, device uchar *y,
                        constant ferrum_linear_params &p, uint3 group, uint simdgroup, uint lane) {
    const uint first = group.x * FERRUM_LINEAR_VECTOR_OUTPUTS + simdgroup * kOutputs;
    const uint first_row = group.y * FERRUM_FEW_ROWS;
    if (first >= p.out_features || first_row >= p.rows) return;
    const uint rows = min(p.rows - first_row, uint(FERRUM_FEW_ROWS));
    if (!has_wide_rows<F>(x, weight, p)) {
        for (uint r = 0; r < rows; r++)
            multiply_rows<F, 1, false>(x, weight, bias, y, p, first, first_row + r, 1, lane);
    } else if (rows == 1) {
        multiply_rows<F, 1, true>(x, weight, bias, y, p, first, first_row, rows, lane);
    } else if (rows == 2) {
        multiply_rows<F, 2, true>(x, weight, bias, y, p, first, first_row, rows, lane);
    } else if (rows <= 4) {
        multiply_rows<F, 4, true>(x, weight, bias, y, p, first, first_row, rows, lane);
    } else if (rows <= 8) {
        multiply_rows<F, 8, true>(x, weight, bias, y, p, first, first_row, rows, lane);
    } else {
        multiply_rows<F, 16, true>(x, weight, bias, y, p, first, first_row, rows, lane);
    }
}

#define KERNEL_LINEAR(shape, format)                                                                                   \
    kernel void linear_##shape##_##format(                                                                             \
        device const half *x [[buffer(FERRUM_LINEAR_X)]], device const uchar *weight [[buffer(FERRUM_LINEAR_WEIGHT)]], \
        device const uchar *bias [[buffer(FERRUM_LINEAR_BIAS), function_constant(constant_bias)]],                     \
        device uchar *y [[buffer(FERRUM_LINEAR_Y)]],                                                                   \
        constant ferrum_linear_params &p [[buffer(FERRUM_LINEAR_PARAMS)]],                                             \
        uint3 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],               \
        uint lane [[thread_index_in_simdgroup]]) {                                                                     \
        linear_##shape<format>(x, weight, bias, y, p, group, simdgroup, lane);                                         \
    }
#define KERNELS_LINEAR(NAME, format, id, elements, bytes) KERNEL_LINEAR(vector, format) KERNEL_LINEAR(rows, format)
FERRUM_FORMATS(KERNELS_LINEAR)
