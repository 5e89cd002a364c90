// What the kernels of linear have in common.
#ifndef FERRUM_LINEAR_H
#define FERRUM_LINEAR_H

#include "blocks.h"

// May rows of x and of the weight be read with wide loads, and do the offsets of few rows fit 32 bits?
template <typename F>
inline bool has_wide_rows(device const half *x, device const uchar *weight, constant ferrum_linear_params &p) {
    return is_aligned(x, 16) && p.input_stride % 8 == 0 && p.input_stride < 1u << 28 &&
           is_aligned(weight, F::alignment) && p.weight_row_bytes % F::alignment == 0;
}

// y[row, output] = value + bias[output]
inline void store_output(device uchar *y, device const uchar *bias, constant ferrum_linear_params &p, uint row,
                         uint output, float value) {
    const ulong at = ulong(row) * p.output_stride + output;
    if (constant_bias)
        value += constant_bias_f32 ? ((device const float *)bias)[output] : float(((device const half *)bias)[output]);
    if (constant_output_f32)
        ((device float *)y)[at] = value;
    else
        ((device half *)y)[at] = half(value);
}

#endif
