// SIMD-group functions and barriers. Part of metal_shim.h.
//
// simd_sum and its like add in a fixed tree (lane i and i + 16, then i and i + 8 …); Apple does not say which order it
// uses. Every call names its place in the source, so that a divergent one can be reported; inside a wrapper function
// that place is the wrapper's, so wrap with a macro or not at all.
#pragma once

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) {
    return (mem_flags)((uint)a | (uint)b);
}

}  // namespace metal

#ifndef FERRUM_CHECK
#include "shim_runtime.h"

#define EMU_PLACE_ONLY const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMU_PLACE , EMU_PLACE_ONLY
// The areas are the emulator's, not the shader's: ThreadSanitizer must not look at them.
#define EMU_QUIET __attribute__((__no_sanitize__("thread")))

namespace emu {

// Brings `value` to a meeting and returns everybody's.
template <class T>
EMU_QUIET inline T *exchange(T value, const char *what, const char *file, int line,
                             void (*combine)(unsigned char *, unsigned) = nullptr) {
    static_assert(sizeof(T) * 32 <= area_bytes, "too wide for a SIMD-group function");
    T *const area = (T *)current->area;
    area[current->lane] = value;
    meet(what, file, line, combine);
    return area;
}
template <class T>
EMU_QUIET inline T taken(const T *from, unsigned lane) {
    return from[lane & 31];
}

template <class T, class Operation>
EMU_QUIET inline void reduce(unsigned char *area, unsigned lanes) {
    T *const value = (T *)area;
    if (lanes == 32) {
        for (int i = 0; i < 16; i++) value[i] = Operation::of(value[i], value[i + 16]);
        for (int i = 0; i < 8; i++) value[i] = Operation::of(value[i], value[i + 8]);
        for (int i = 0; i < 4; i++) value[i] = Operation::of(value[i], value[i + 4]);
        for (int i = 0; i < 2; i++) value[i] = Operation::of(value[i], value[i + 2]);
        value[0] = Operation::of(value[0], value[1]);
    } else {
        for (unsigned i = 1; i < lanes; i++) value[0] = Operation::of(value[0], value[i]);
    }
}

#define EMU_OPERATION(name, expression)          \
    struct name {                                \
        template <class T>                       \
        EMU_QUIET static inline T of(T a, T b) { \
            return expression;                   \
        }                                        \
    };
EMU_OPERATION(add, a + b)
EMU_OPERATION(multiply, a *b)
EMU_OPERATION(least, __builtin_elementwise_min(a, b))
EMU_OPERATION(largest, __builtin_elementwise_max(a, b))
EMU_OPERATION(bit_or, (T)(a | b))
EMU_OPERATION(bit_and, (T)(a & b))
EMU_OPERATION(bit_xor, (T)(a ^ b))
#undef EMU_OPERATION

}  // namespace emu

namespace metal {

#define EMU_REDUCTION(name, operation)                                                                         \
    template <class T>                                                                                         \
    inline T name(T value EMU_PLACE) {                                                                         \
        return ::emu::taken(::emu::exchange(value, #name, file, line, ::emu::reduce<T, ::emu::operation>), 0); \
    }
EMU_REDUCTION(simd_sum, add)
EMU_REDUCTION(simd_product, multiply)
EMU_REDUCTION(simd_min, least)
EMU_REDUCTION(simd_max, largest)
EMU_REDUCTION(simd_or, bit_or)
EMU_REDUCTION(simd_and, bit_and)
EMU_REDUCTION(simd_xor, bit_xor)
#undef EMU_REDUCTION
inline bool simd_any(bool value EMU_PLACE) {
    return simd_or((uint)value, file, line) != 0;
}
inline bool simd_all(bool value EMU_PLACE) {
    return simd_and((uint)value, file, line) != 0;
}

// From lane `from`; where that is no lane (up and down), the thread's own value.
#define EMU_SHUFFLE(name, argument, from)                         \
    template <class T>                                            \
    EMU_QUIET inline T name(T value, ushort argument EMU_PLACE) { \
        const unsigned lane = ::emu::current->lane;               \
        const unsigned source = (unsigned)(from);                 \
        T *const all = ::emu::exchange(value, #name, file, line); \
        return source < 32 ? ::emu::taken(all, source) : value;   \
    }
EMU_SHUFFLE(simd_shuffle, source_lane, ((void)lane, source_lane))
EMU_SHUFFLE(simd_broadcast, source_lane, ((void)lane, source_lane))
EMU_SHUFFLE(simd_shuffle_xor, mask, lane ^ mask)
EMU_SHUFFLE(simd_shuffle_down, delta, lane + delta)
EMU_SHUFFLE(simd_shuffle_up, delta, lane - delta)
EMU_SHUFFLE(simd_shuffle_rotate_down, delta, (lane + delta) & 31)
EMU_SHUFFLE(simd_shuffle_rotate_up, delta, (lane - delta) & 31)
#undef EMU_SHUFFLE
template <class T>
inline T simd_broadcast_first(T value EMU_PLACE) {
    return ::emu::taken(::emu::exchange(value, "simd_broadcast_first", file, line), 0);
}

template <class T>
EMU_QUIET inline T simd_prefix_inclusive_sum(T value EMU_PLACE) {
    const T *all = ::emu::exchange(value, "simd_prefix_inclusive_sum", file, line);
    T sum = all[0];
    for (unsigned i = 1; i <= ::emu::current->lane; i++) sum = sum + all[i];
    return sum;
}
template <class T>
EMU_QUIET inline T simd_prefix_exclusive_sum(T value EMU_PLACE) {
    const T *all = ::emu::exchange(value, "simd_prefix_exclusive_sum", file, line);
    T sum = (T)0;
    for (unsigned i = 0; i < ::emu::current->lane; i++) sum = sum + all[i];
    return sum;
}

inline void threadgroup_barrier(mem_flags flags EMU_PLACE) {
    ::emu::meet_threadgroup((unsigned)flags, file, line);
}
inline void simdgroup_barrier(mem_flags flags EMU_PLACE) {
    ::emu::meet_simdgroup((unsigned)flags, file, line);
}

}  // namespace metal

#else  // checked, not run: declarations suffice
#define EMU_PLACE
#define EMU_QUIET
namespace metal {

#define EMU_DECLARE(name) \
    template <class T>    \
    T name(T value);
EMU_DECLARE(simd_sum)
EMU_DECLARE(simd_product)
EMU_DECLARE(simd_min)
EMU_DECLARE(simd_max)
EMU_DECLARE(simd_or)
EMU_DECLARE(simd_and)
EMU_DECLARE(simd_xor)
EMU_DECLARE(simd_broadcast_first)
EMU_DECLARE(simd_prefix_inclusive_sum)
EMU_DECLARE(simd_prefix_exclusive_sum)
#undef EMU_DECLARE
bool simd_any(bool value);
bool simd_all(bool value);
#define EMU_DECLARE(name) \
    template <class T>    \
    T name(T value, ushort lane);
EMU_DECLARE(simd_shuffle)
EMU_DECLARE(simd_broadcast)
EMU_DECLARE(simd_shuffle_xor)
EMU_DECLARE(simd_shuffle_down)
EMU_DECLARE(simd_shuffle_up)
EMU_DECLARE(simd_shuffle_rotate_down)
EMU_DECLARE(simd_shuffle_rotate_up)
#undef EMU_DECLARE
void threadgroup_barrier(mem_flags flags);
void simdgroup_barrier(mem_flags flags);

}  // namespace metal
#endif

#include "metal_matrix.h"
