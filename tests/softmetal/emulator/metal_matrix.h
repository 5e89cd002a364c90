// simdgroup_matrix, 8 x 8. Part of metal_shim.h.
//
// Lane l holds two elements of a matrix: row 4 * (l / 16) + (l / 2) % 4 and columns 4 * ((l / 8) % 2) + 2 * (l % 2) and
// the next one. Apple does not document it, but everybody's kernels rely on it. The products of one element are added
// in order, in float32.
#pragma once

namespace metal {

template <class T, int Columns = 8, int Rows = 8>
struct simdgroup_matrix {
    static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix is 8 x 8");
    typedef T pair __attribute__((__ext_vector_type__(2)));
    simdgroup_matrix() = default;
    explicit simdgroup_matrix(T diagonal);
#if defined(FERRUM_CHECK) && FERRUM_CHECK == 2
    // C++ for OpenCL has no temporary in private memory that could be copied: a filled matrix comes as a vector.
    simdgroup_matrix(pair filled) __private;
    simdgroup_matrix(const __private simdgroup_matrix &other) __private;
    __private simdgroup_matrix &operator=(pair filled) __private;
    __private simdgroup_matrix &operator=(const __private simdgroup_matrix &other) __private;
    __private pair &thread_elements() __private;
#else
    thread pair &thread_elements() { return elements; }
#endif

    pair elements;
};
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

#ifndef FERRUM_CHECK
EMU_QUIET inline void emu_matrix_moved() {
    ::emu::current->matrix_moves++;
}
inline unsigned emu_matrix_row() {
    const unsigned lane = ::emu::current->lane;
    return lane / 16 * 4 + lane / 2 % 4;
}
inline unsigned emu_matrix_column() {
    const unsigned lane = ::emu::current->lane;
    return lane / 8 % 2 * 4 + lane % 2 * 2;
}

template <class T, int Columns, int Rows>
inline simdgroup_matrix<T, Columns, Rows>::simdgroup_matrix(T diagonal) {
    const unsigned row = emu_matrix_row(), column = emu_matrix_column();
    elements[0] = row == column ? diagonal : (T)0;
    elements[1] = row == column + 1 ? diagonal : (T)0;
}

template <class T, int Columns, int Rows>
inline simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, Columns, Rows> filled;
    filled.elements[0] = filled.elements[1] = value;
    return filled;
}

// Element (row, column) of the matrix is at [row * elements_per_row + column] from `origin` = (column, row) on, or with
// the two exchanged. Every lane moves its own elements, so that races and overruns are seen per element.
template <class T, class Pointer>
inline void emu_matrix_load(simdgroup_matrix<T> &to, Pointer from, ulong elements_per_row, ulong2 origin,
                            bool transposed) {
    emu_matrix_moved();
    const ulong row = emu_matrix_row(), column = emu_matrix_column();
    for (ulong i = 0; i < 2; i++) {
        const ulong y = origin.y + (transposed ? column + i : row), x = origin.x + (transposed ? row : column + i);
        to.elements[i] = from[y * elements_per_row + x];
    }
}
template <class T>
inline void simdgroup_load(simdgroup_matrix<T> &to, const T *from, ulong elements_per_row = 8,
                           ulong2 origin = (ulong2)0ul, bool transposed = false) {
    emu_matrix_load(to, from, elements_per_row, origin, transposed);
}
template <class T>
inline void simdgroup_store(simdgroup_matrix<T> from, T *to, ulong elements_per_row = 8, ulong2 origin = (ulong2)0ul,
                            bool transposed = false) {
    emu_matrix_moved();
    const ulong row = emu_matrix_row(), column = emu_matrix_column();
    for (ulong i = 0; i < 2; i++) {
        const ulong y = origin.y + (transposed ? column + i : row), x = origin.x + (transposed ? row : column + i);
        to[y * elements_per_row + x] = from.elements[i];
    }
}

// The meeting of a product: three matrices in, the result in place of the third.
EMU_QUIET inline void emu_matrix_multiply(unsigned char *area, unsigned lanes) {
    typedef float row8 __attribute__((__ext_vector_type__(8)));
    const float *a = (const float *)area;
    const row8 *b = (const row8 *)(area + 256);
    row8 *sum = (row8 *)(area + 512);
    for (int y = 0; y < 8; y++) {
        row8 total = sum[y];
        for (int k = 0; k < 8; k++) total += a[8 * y + k] * b[k];
        sum[y] = lanes == 32 ? total : (row8)__builtin_nanf("");  // undefined in Metal
    }
}

template <class R, class A, class B, class C>
EMU_QUIET inline void simdgroup_multiply_accumulate(simdgroup_matrix<R> &result, simdgroup_matrix<A> a,
                                                    simdgroup_matrix<B> b, simdgroup_matrix<C> c EMU_PLACE) {
    float *const area = (float *)::emu::current->area;
    const unsigned at = 8 * emu_matrix_row() + emu_matrix_column();
    for (unsigned i = 0; i < 2; i++) {
        area[at + i] = (float)a.elements[i];
        area[64 + at + i] = (float)b.elements[i];
        area[128 + at + i] = (float)c.elements[i];
    }
    ::emu::meet("simdgroup_multiply_accumulate", file, line, emu_matrix_multiply);
    for (unsigned i = 0; i < 2; i++) result.elements[i] = (R)area[128 + at + i];
}
template <class R, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<R> &result, simdgroup_matrix<A> a, simdgroup_matrix<B> b EMU_PLACE) {
    simdgroup_multiply_accumulate(result, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f), file, line);
}

#else
#if FERRUM_CHECK == 2
template <class T, int Columns, int Rows>
typename simdgroup_matrix<T, Columns, Rows>::pair make_filled_simdgroup_matrix(T value);
#else
template <class T, int Columns, int Rows>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value);
#endif
// Memory is in one of two address spaces, named by the pointer.
#define EMU_DECLARE(space)                                                                                \
    template <class T>                                                                                    \
    void simdgroup_load(thread simdgroup_matrix<T> &to, const space T *from, ulong elements_per_row = 8,  \
                        ulong2 origin = (ulong2)0ul, bool transposed = false);                            \
    template <class T>                                                                                    \
    void simdgroup_store(const thread simdgroup_matrix<T> &from, space T *to, ulong elements_per_row = 8, \
                         ulong2 origin = (ulong2)0ul, bool transposed = false);
EMU_DECLARE(device)
EMU_DECLARE(threadgroup)
#undef EMU_DECLARE
template <class R, class A, class B, class C>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<R> &result, const thread simdgroup_matrix<A> &a,
                                   const thread simdgroup_matrix<B> &b, const thread simdgroup_matrix<C> &c);
template <class R, class A, class B>
void simdgroup_multiply(thread simdgroup_matrix<R> &result, const thread simdgroup_matrix<A> &a,
                        const thread simdgroup_matrix<B> &b);
#endif

}  // namespace metal
