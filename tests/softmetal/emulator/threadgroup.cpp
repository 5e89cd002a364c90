#include "threadgroup.h"

#include <cstring>

#include "stacks.h"

namespace emu {

thread_local shim_thread *current __attribute__((tls_model("initial-exec"))) = nullptr;
unsigned constants = 0;

// The threadgroup of this OS thread.
static thread_local Threadgroup *group __attribute__((tls_model("initial-exec"))) = nullptr;

static inline Thread &me() {
    return *static_cast<Thread *>(current);
}

void meet(const char *what, const char *file, int line, void (*combine)(unsigned char *, unsigned)) {
    group->meet(what, file, line, combine, false);
}
void meet_simdgroup(unsigned flags, const char *file, int line) {
    group->meet("simdgroup_barrier", file, line, nullptr, flags != 0);
}
void meet_threadgroup(unsigned flags, const char *file, int line) {
    group->meet_threadgroup(flags, file, line);
}
void *threadgroup_array(const void *place, unsigned long bytes, const char *name) {
    return group->array(place, bytes, name);
}

bool Place::same(const char *other_what, const char *other_file, int other_line) const {
    return line == other_line && (what == other_what || !strcmp(what, other_what)) &&
           (file == other_file || !strcmp(file, other_file));
}

Threadgroup::Threadgroup() : memory_(take_memory(memory_bytes)) {
    simdgroups_.resize(EMU_MAX_THREADS / EMU_SIMD_WIDTH);
    threads_.resize(EMU_MAX_THREADS);
    stacks_.reserve(EMU_MAX_THREADS);
    arrays_.reserve(max_arrays);
}

Threadgroup::~Threadgroup() {
    give_memory_back(memory_, memory_bytes);
    for (const Stack &stack : stacks_) give_memory_back(stack.bottom - guard_bytes, stack.bytes + guard_bytes);
}

Stack *Threadgroup::take_stack() {
    if (free_stacks_.empty()) {
        char *memory = take_memory(stack_bytes + guard_bytes);
        mprotect(memory, guard_bytes, PROT_NONE);
        stacks_.push_back({memory + guard_bytes, stack_bytes});
        return &stacks_.back();
    }
    Stack *stack = free_stacks_.back();
    free_stacks_.pop_back();
    return stack;
}

void Threadgroup::prepare(const Dispatch &dispatch, uint64_t index) {
    dispatch_ = &dispatch;
    failure_.kind = Failure::none;
    waiting_ = 0;
    arrays_.clear();
    const uint32_t *count = dispatch.groups, *threads = dispatch.threads;
    position_[0] = index % count[0], position_[1] = index / count[0] % count[1],
    position_[2] = index / count[0] / count[1];
    total_ = threads[0] * threads[1] * threads[2];
    simdgroup_count_ = (total_ + EMU_SIMD_WIDTH - 1) / EMU_SIMD_WIDTH;

    random_state_ = dispatch.seed ? (dispatch.seed * 0x9e3779b97f4a7c15u ^ (index + 1) * 0xbf58476d1ce4e5b9u) | 1 : 0;
    run_ahead_ = 0;
    if (random_state_) {
        const uint32_t choices[] = {0, 2, 16};
        for (int i = 0; i < 8; i++) random(2);
        run_ahead_ = choices[random(3)];
    }

    // Two threadgroups have nothing to do with each other, though they get the same memory here.
    if (races_checked) renew(memory_, memory_bytes);
    ASAN_UNPOISON_MEMORY_REGION(memory_, memory_bytes);
    memset(memory_, 0xff, memory_bytes);
    memory_asked_ = dispatch.threadgroup_bytes;
    memory_used_ = (dispatch.threadgroup_bytes + 63) / 64 * 64 + red_zone;
    ASAN_POISON_MEMORY_REGION(memory_ + dispatch.threadgroup_bytes, memory_bytes - dispatch.threadgroup_bytes);

    for (unsigned g = 0; g < simdgroup_count_; g++) {
        const unsigned lanes = g + 1 < simdgroup_count_ ? EMU_SIMD_WIDTH : total_ - g * EMU_SIMD_WIDTH;
        SimdGroup &simdgroup = simdgroups_[g];
        simdgroup.all = simdgroup.ready = lanes == 32 ? ~0u : (1u << lanes) - 1;
        simdgroup.meeting = simdgroup.at_barrier = simdgroup.done = 0;
    }
    for (unsigned i = 0; i < total_; i++) {
        Thread &thread = threads_[i];
        const unsigned g = i / EMU_SIMD_WIDTH;
        thread.simdgroup = &simdgroups_[g];
        thread.area = simdgroups_[g].areas[0];
        thread.lane = i % EMU_SIMD_WIDTH;
        thread.lanes = __builtin_popcount(simdgroups_[g].all);
        thread.matrix_moves = 0;
        thread.index = i;
        thread.context = nullptr;
        thread.stack = nullptr;
        call &to = thread.arguments;
        to.buffers = dispatch.buffers;
        to.threadgroup_memory = memory_;
        const uint32_t at[3] = {i % threads[0], i / threads[0] % threads[1], i / threads[0] / threads[1]};
        for (int d = 0; d < 3; d++) {
            to.threadgroup_position_in_grid[d] = position_[d];
            to.threadgroups_per_grid[d] = count[d];
            to.thread_position_in_threadgroup[d] = at[d];
            to.threads_per_threadgroup[d] = threads[d];
            to.thread_position_in_grid[d] = position_[d] * threads[d] + at[d];
        }
        to.thread_index_in_threadgroup = i;
        to.thread_index_in_simdgroup = thread.lane;
        to.simdgroup_index_in_threadgroup = g;
        to.simdgroups_per_threadgroup = simdgroup_count_;
        to.threads_per_simdgroup = EMU_SIMD_WIDTH;
        if (races_checked) {
            // A stack of its own, fresh memory to ThreadSanitizer; both made by the caller of run(), so that a thread
            // comes after what the caller did before, and after nothing else.
            thread.stack = take_stack();
            renew(thread.stack->bottom + stack_bytes - kernel_stack_bytes, kernel_stack_bytes);
            thread.race_fiber = new_race_fiber();
            spent_race_fibers_.push_back(thread.race_fiber);
        }
    }
}

bool Threadgroup::run(const Dispatch &dispatch, uint64_t index) {
    prepare(dispatch, index);
    group = this;
    running_simdgroup_ = 0;
    home_race_fiber_ = race_fiber_of_caller();
    current = nullptr;
    go(next(), false);  // comes back when everything is done, or has failed
    group = nullptr;
    // Stacks of a failed threadgroup are taken back in the middle of whatever they were doing.
    free_stacks_.clear();
    for (Stack &stack : stacks_) {
        free_stacks_.push_back(&stack);
        if (failure_.kind) ASAN_UNPOISON_MEMORY_REGION(stack.bottom, stack.bytes);
    }
    ASAN_UNPOISON_MEMORY_REGION(memory_, memory_bytes);
    if (failure_.kind) {
        message = describe();
        // What they have done so far is over too, for settle().
        for (unsigned i = 0; races_checked && i < total_; i++) {
            switch_race_fiber(threads_[i].race_fiber);
            release(&finished_);
        }
        switch_race_fiber(home_race_fiber_);
    }
    return !failure_.kind;
}

void Threadgroup::settle() {
    acquire(&finished_);
    for (void *fiber : spent_race_fibers_) delete_race_fiber(fiber);
    spent_race_fibers_.clear();
}

// ---- Who runs

uint32_t Threadgroup::random(uint32_t below) {
    random_state_ ^= random_state_ << 13;
    random_state_ ^= random_state_ >> 7;
    random_state_ ^= random_state_ << 17;
    return (uint32_t)((random_state_ >> 32) * below >> 32);
}

Thread *Threadgroup::lane_of(SimdGroup &simdgroup) {
    // The lane after the running one, or any.
    const unsigned from = random_state_ ? random(32) : current && me().simdgroup == &simdgroup ? me().lane + 1 : 0;
    const uint32_t later = from < 32 ? simdgroup.ready >> from << from : 0;
    const unsigned lane = __builtin_ctz(later ? later : simdgroup.ready);
    return &threads_[(&simdgroup - simdgroups_.data()) * EMU_SIMD_WIDTH + lane];
}

Thread *Threadgroup::next() {
    SimdGroup &running = simdgroups_[running_simdgroup_];
    if (running.ready) return lane_of(running);
    const unsigned from = random_state_ ? random(simdgroup_count_) : 0;
    for (unsigned i = 0; i < simdgroup_count_; i++) {
        const unsigned g = (from + i) % simdgroup_count_;
        if (!simdgroups_[g].ready) continue;
        running_simdgroup_ = g;
        return lane_of(simdgroups_[g]);
    }
    return nullptr;
}

// ---- Switching

void Threadgroup::go(Thread *to, bool for_good) {
    Thread *const from = static_cast<Thread *>(current);
    if (to && !to->context) {
        if (!to->stack) to->stack = take_stack();
        to->context =
            boost::context::detail::make_fcontext(to->stack->bottom + to->stack->bytes, to->stack->bytes, body);
    }
#ifdef EMU_ASAN
    void *unused;
    const Stack &stack = to ? *to->stack : home_;
    __sanitizer_start_switch_fiber(for_good ? nullptr : &unused, stack.bottom, stack.bytes);
#else
    (void)for_good;
#endif
    switch_race_fiber(to ? to->race_fiber : home_race_fiber_);
    current = to;
    arrived(boost::context::detail::jump_fcontext(to ? to->context : return_to_, from));
}

void Threadgroup::arrived(transfer_t from) {
#ifdef EMU_ASAN
    const void *bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (!from.data) group->home_ = {(char *)bottom, bytes};
#endif
    // Who jumped here is to be resumed where it stopped: a thread, or run().
    (from.data ? ((Thread *)from.data)->context : group->return_to_) = from.fctx;
}

// A fiber. A thread that ends leaves its stack to one that has not begun: so threads that never wait for each other are
// a plain loop.
void Threadgroup::body(transfer_t from) {
    arrived(from);
    for (;;) {
        Thread &thread = me();
        group->dispatch_->kernel->run(thread.arguments);
        Thread *to = group->end_of(thread);
        if (races_checked || !to || to->context) {
            if (to && !races_checked) group->free_stacks_.push_back(thread.stack);
            group->go(to, true);
        }
        to->stack = thread.stack;
        current = to;
    }
}

Thread *Threadgroup::end_of(Thread &thread) {
    SimdGroup &simdgroup = *thread.simdgroup;
    const uint32_t bit = 1u << thread.lane;
    release(&finished_);
    simdgroup.done |= bit;
    simdgroup.ready &= ~bit;
    if (!simdgroup.ready && simdgroup.meeting) stuck(simdgroup);
    Thread *to = next();
    if (!to && waiting_) fail(Failure::barrier_and_end, threads_[barrier_.first], barrier_, thread);
    return to;
}

// ---- Meetings

void Threadgroup::meet(const char *what, const char *file, int line, void (*combine)(unsigned char *, unsigned),
                       bool ordered) {
    Thread &thread = me();
    SimdGroup &simdgroup = *thread.simdgroup;
    const unsigned g = &simdgroup - simdgroups_.data();
    if (races_checked && (char *)__builtin_frame_address(0) < thread.stack->bottom + stack_bytes - kernel_stack_bytes)
        __builtin_trap();  // else reports of races on the stack itself would follow
    if (!simdgroup.meeting) {
        simdgroup.place = {what, file, line, thread.index};
    } else if (!simdgroup.place.same(what, file, line)) {
        fail(Failure::two_meetings, threads_[simdgroup.place.first], simdgroup.place, thread, {what, file, line, 0});
    }
    if (ordered) release(&simdgroup_begin_[g]);
    simdgroup.meeting |= 1u << thread.lane;
    simdgroup.ready &= ~(1u << thread.lane);
    if (simdgroup.meeting == simdgroup.all) {
        for (unsigned lane = 0; lane < thread.lanes; lane++) {
            Thread &other = threads_[g * EMU_SIMD_WIDTH + lane];
            if (other.matrix_moves == thread.matrix_moves) continue;
            fail(Failure::uneven_matrices, other, simdgroup.place, thread);
        }
        if (combine) combine(thread.area, thread.lanes);
        if (ordered) acquire(&simdgroup_begin_[g]), release(&simdgroup_end_[g]);
        simdgroup.meeting = 0;
        simdgroup.ready = simdgroup.all;
        if (run_ahead_ && !random(run_ahead_)) {
            running_simdgroup_ = random(simdgroup_count_);
            if (Thread *to = next(); to != &thread) go(to, false);
        }
    } else {
        if (!simdgroup.ready) stuck(simdgroup);
        go(next(), false);
    }
    if (ordered) acquire(&simdgroup_end_[g]);
    thread.area = simdgroup.areas[thread.area == simdgroup.areas[0]];
}

void Threadgroup::meet_threadgroup(unsigned flags, const char *file, int line) {
    Thread &thread = me();
    SimdGroup &simdgroup = *thread.simdgroup;
    const Place place = {"threadgroup_barrier", file, line, thread.index};
    if (!waiting_)
        barrier_ = place;
    else if (!barrier_.same(place.what, file, line))
        fail(Failure::two_barriers, threads_[barrier_.first], barrier_, thread, place);
    if (flags) release(&barrier_begin_);
    simdgroup.at_barrier |= 1u << thread.lane;
    simdgroup.ready &= ~(1u << thread.lane);
    if (!simdgroup.ready && simdgroup.meeting) stuck(simdgroup);
    if (++waiting_ == total_) {
        // Its end is another object than its beginning: who leaves late has not seen what others did since they left.
        if (flags) acquire(&barrier_begin_), release(&barrier_end_);
        for (unsigned g = 0; g < simdgroup_count_; g++) {
            simdgroups_[g].ready = simdgroups_[g].all;
            simdgroups_[g].at_barrier = 0;
        }
        waiting_ = 0;
        running_simdgroup_ = random_state_ ? random(simdgroup_count_) : 0;
    }
    Thread *to = next();
    if (!to) {
        for (unsigned i = 0; i < total_; i++)
            if (threads_[i].simdgroup->done >> threads_[i].lane & 1)
                fail(Failure::barrier_and_end, thread, barrier_, threads_[i]);
    }
    if (to != &thread) go(to, false);
    if (flags) acquire(&barrier_end_);
}

void *Threadgroup::array(const void *place, size_t bytes, const char *name) {
    for (const Array &array : arrays_)
        if (array.place == place) return array.memory;
    memory_asked_ += bytes;
    if (memory_asked_ > EMU_MAX_THREADGROUP_BYTES || arrays_.size() == max_arrays)
        fail(Failure::threadgroup_memory, me(), {name, "", 0, 0}, me());
    char *memory = memory_ + memory_used_;
    memory_used_ += (bytes + 63) / 64 * 64 + red_zone;
    ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
    arrays_.push_back({place, bytes, memory});
    return memory;
}

// ---- Failure

// Some lanes wait in a meeting, and the others will never come.
void Threadgroup::stuck(const SimdGroup &simdgroup) {
    const unsigned lane = __builtin_ctz(simdgroup.at_barrier | simdgroup.done);
    const Thread &absent = threads_[(&simdgroup - simdgroups_.data()) * EMU_SIMD_WIDTH + lane];
    const bool ended = simdgroup.done >> lane & 1;
    fail(ended ? Failure::meeting_and_end : Failure::meeting_and_barrier, threads_[simdgroup.place.first],
         simdgroup.place, absent, barrier_);
}

// Only takes notes: this fiber is left for good, with whatever lies on its stack.
void Threadgroup::fail(Failure::Kind kind, const Thread &one, const Place &one_at, const Thread &other,
                       const Place &other_at) {
    failure_.kind = kind;
    failure_.one = &one;
    failure_.other = &other;
    failure_.one_at = one_at;
    failure_.other_at = other_at;
    go(nullptr, true);
    __builtin_unreachable();
}

}  // namespace emu
