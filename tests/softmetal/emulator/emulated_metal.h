// The emulated side of shaders/common.h: address spaces, kernels, and the two macros that have to differ here.
//
// Address spaces. To run a shader they mean nothing. To check it (FERRUM_CHECK=1: C++17; FERRUM_CHECK=2: C++ for
// OpenCL) they are real ones, which may not be mixed, and `threadgroup` arrays are pointers to nowhere.
//
// FERRUM_GENERATE: only macros that generate.py does not want to see are expanded.
#pragma once

#ifdef FERRUM_GENERATE
#define FERRUM_CONSTANT(name, index) emu_constant(name, index);
#define FERRUM_THREADGROUP(type, name, count)
#define FERRUM_THREADGROUP_ARGUMENT [[threadgroup(0)]]
#else

#ifndef FERRUM_CHECK
#include "call.h"  // while `kernel` and `thread` are still names
#endif

#if defined(FERRUM_CHECK) && FERRUM_CHECK == 1
#define device __attribute__((__address_space__(1)))
#define constant const __attribute__((__address_space__(2)))
#define threadgroup __attribute__((__address_space__(3)))
#define thread
#define kernel
#elif defined(FERRUM_CHECK)
#define device __global
#define constant __constant const
#define threadgroup __local
#define thread __private
#define kernel
#else
#define device
#define constant const
#define threadgroup
#define thread
#define kernel static
#endif

#include "metal_shim.h"

// The attribute of memory whose size the dispatch gives: [[threadgroup(0)]], a word that is a macro here.
#define FERRUM_THREADGROUP_ARGUMENT

#ifdef FERRUM_CHECK
#define FERRUM_CONSTANT(name, index) constant bool name = false;
#define FERRUM_THREADGROUP(type, name, count) threadgroup type *name = (threadgroup type *)0;
#else
// Bit `index` of the running dispatch's constants.
#define FERRUM_CONSTANT(name, index) static constexpr ::emu::function_constant<index> name{};
// One array per threadgroup and place in the source; NaN when a threadgroup starts.
#define FERRUM_THREADGROUP(type, name, count)  \
    static const char emu_place_of_##name = 0; \
    type *const name = (type *)::emu::threadgroup_array(&emu_place_of_##name, sizeof(type) * (count), #name);
#endif

using namespace metal;

#endif
