// One threadgroup at a time, on one OS thread: its GPU threads as fibers, scheduled from meeting to meeting.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <boost/context/detail/fcontext.hpp>

#include "call.h"
#include "emulator.h"
#include "shim_runtime.h"

namespace emu {

using boost::context::detail::fcontext_t;
using boost::context::detail::transfer_t;

struct Stack {
    char *bottom;
    size_t bytes;
};

// A place in a shader where threads meet, and who came first.
struct Place {
    const char *what;
    const char *file;
    int line;
    unsigned first;  // index of a thread
    bool same(const char *other_what, const char *other_file, int other_line) const;
};

struct SimdGroup {
    uint32_t all;         // mask of its lanes
    uint32_t ready;       // lanes that may run: not begun, or past their last meeting
    uint32_t meeting;     // lanes that wait for the others of the SIMD-group
    uint32_t at_barrier;  // lanes that wait for the threadgroup
    uint32_t done;
    Place place;  // of the meeting
    alignas(64) unsigned char areas[2][area_bytes];
};

struct Thread : shim_thread {
    unsigned index;
    SimdGroup *simdgroup;
    fcontext_t context;  // NULL: not begun
    Stack *stack;
    void *race_fiber;
    call arguments;
};

// Why a threadgroup cannot go on: two threads, and where they are.
struct Failure {
    enum Kind {
        none,
        two_meetings,         // different ones, in one SIMD-group
        meeting_and_end,      // one waits for lanes of which the other has ended
        meeting_and_barrier,  // … or waits for the threadgroup
        uneven_matrices,      // lanes did not load and store matrices together
        two_barriers,
        barrier_and_end,
        threadgroup_memory,  // one_at.what: the array that was too much
    };
    Kind kind;
    const Thread *one, *other;
    Place one_at, other_at;
};

// What all threadgroups of a dispatch share.
struct Dispatch {
    const linked_kernel *kernel;
    void *buffers[EMU_MAX_BUFFERS];
    uint32_t groups[3];
    uint32_t threads[3];
    uint32_t threadgroup_bytes;
    uint64_t seed;
};

class Threadgroup {
   public:
    Threadgroup();
    ~Threadgroup();
    // Runs threadgroup `index` to its end. False: it failed, and `message` says how.
    bool run(const Dispatch &dispatch, uint64_t index);
    // After the last threadgroup of a dispatch: whatever they did happened before whatever the caller does next.
    void settle();

    std::string message;

    // Called by the running GPU thread.
    void meet(const char *what, const char *file, int line, void (*combine)(unsigned char *, unsigned), bool ordered);
    void meet_threadgroup(unsigned flags, const char *file, int line);
    void *array(const void *place, size_t bytes, const char *name);

   private:
    struct Array {
        const void *place;
        size_t bytes;
        char *memory;
    };

    void prepare(const Dispatch &dispatch, uint64_t index);
    Stack *take_stack();
    Thread *next();  // who runs now; NULL: nobody can
    Thread *lane_of(SimdGroup &simdgroup);
    uint32_t random(uint32_t below);
    // Leaves the running thread, or run(), for `to`; NULL: for run().
    void go(Thread *to, bool for_good);
    static void arrived(transfer_t from);
    static void body(transfer_t from);
    Thread *end_of(Thread &thread);
    [[noreturn]] void fail(Failure::Kind kind, const Thread &one, const Place &one_at, const Thread &other,
                           const Place &other_at = {});
    [[noreturn]] void stuck(const SimdGroup &simdgroup);
    std::string describe() const;

    const Dispatch *dispatch_ = nullptr;
    std::vector<Thread> threads_;
    std::vector<SimdGroup> simdgroups_;
    std::vector<Stack> stacks_;
    std::vector<Stack *> free_stacks_;
    std::vector<void *> spent_race_fibers_;
    std::vector<Array> arrays_;
    char *memory_;  // of the threadgroup
    size_t memory_used_ = 0;
    size_t memory_asked_ = 0;
    uint32_t position_[3] = {};
    unsigned total_ = 0;
    unsigned simdgroup_count_ = 0;
    unsigned running_simdgroup_ = 0;
    unsigned waiting_ = 0;  // threads at the barrier
    Place barrier_ = {};
    uint64_t random_state_ = 0;
    uint32_t run_ahead_ = 0;  // after one meeting in how many another SIMD-group gets its turn; 0: never
    Failure failure_ = {};
    fcontext_t return_to_ = nullptr;
    [[maybe_unused]] Stack home_ = {};  // of run(), known once a fiber has started
    void *home_race_fiber_ = nullptr;
    // Objects whose address stands for an order of memory accesses.
    char barrier_begin_ = 0, barrier_end_ = 0, finished_ = 0;
    char simdgroup_begin_[EMU_MAX_THREADS / EMU_SIMD_WIDTH] = {}, simdgroup_end_[EMU_MAX_THREADS / EMU_SIMD_WIDTH] = {};
};

}  // namespace emu
