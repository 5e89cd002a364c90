#include "memory.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    GUARD = 1 << 20,      /* closed bytes before and behind a buffer */
    ALIGNMENT = 16,       /* of a buffer: it ends, up to this, where the guard begins */
    QUARANTINE = 1 << 12, /* freed buffers whose addresses stay taken */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static soft_range *ranges;
static soft_range *quarantine[QUARANTINE];
static uint64_t freed_ranges, bytes_alive;
static soft_range *opened[1 << 12];
static uint32_t opened_count;
static char first_fault[256];
static struct sigaction previous_handler;

static uint64_t round_up(uint64_t value, uint64_t to) {
    return (value + to - 1) / to * to;
}

/* ---- Ranges */

static soft_range *add_range(soft_range *range) {
    pthread_mutex_lock(&lock);
    range->references = 1;
    range->next = ranges;
    if (ranges) ranges->previous = range;
    ranges = range;
    if (!range->borrowed) bytes_alive += range->length;
    pthread_mutex_unlock(&lock);
    return range;
}

soft_range *soft_range_new(uint64_t length) {
    const uint64_t page = (uint64_t)getpagesize(), mapped = round_up(length, page);
    soft_range *range = calloc(1, sizeof(*range));
    const int file = memfd_create("softmetal", MFD_CLOEXEC);
    if (!range || file < 0 || ftruncate(file, (off_t)mapped)) goto failed;
    range->length = length;
    range->host_map_bytes = mapped + page;
    range->gpu_map_bytes = mapped + 2 * GUARD;
    const int hidden = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    range->host_map = mmap(NULL, range->host_map_bytes, PROT_NONE, hidden, -1, 0);
    range->gpu_map = mmap(NULL, range->gpu_map_bytes, PROT_NONE, hidden, -1, 0);
    if (range->host_map == MAP_FAILED || range->gpu_map == MAP_FAILED) goto failed;
    char *host = mmap(range->host_map, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    char *gpu = mmap(range->gpu_map + GUARD, mapped, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0);
    if (host == MAP_FAILED || gpu == MAP_FAILED) goto failed;
    close(file);
    memset(host, 0xff, mapped);
    const uint64_t before = mapped - round_up(length, ALIGNMENT);
    range->host = host + before;
    range->gpu = gpu + before;
    return add_range(range);

failed: /* what was mapped by then is lost: a test that runs out of memory has other troubles */
    if (file >= 0) close(file);
    free(range);
    return NULL;
}

soft_range *soft_range_borrow(void *data, uint64_t length, const char **reason) {
    const uint64_t page = (uint64_t)getpagesize();
    if ((uint64_t)data % page || length % page || !length) {
        *reason = "pointer and length have to be multiples of the page size";
        return NULL;
    }
    unsigned char *resident = malloc(length / page);
    const int mapped = resident && mincore(data, length, resident) == 0;
    free(resident);
    if (!mapped) {
        *reason = "the memory is not mapped";
        return NULL;
    }
    soft_range *range = calloc(1, sizeof(*range));
    range->length = length;
    range->borrowed = 1;
    range->host = range->gpu = data;
    return add_range(range);
}

void soft_range_retain(soft_range *range) {
    pthread_mutex_lock(&lock);
    range->references++;
    pthread_mutex_unlock(&lock);
}

static void drop(soft_range *range) {
    if (--range->references) return;
    if (range->next) range->next->previous = range->previous;
    if (range->previous) range->previous->next = range->next;
    if (ranges == range) ranges = range->next;
    if (range->gpu_map) munmap(range->gpu_map, range->gpu_map_bytes);
    free(range);
}

void soft_range_release(soft_range *range) {
    pthread_mutex_lock(&lock);
    drop(range);
    pthread_mutex_unlock(&lock);
}

static void protect(soft_range *range, int access) {
    range->open = access;
    if (range->borrowed || range->freed) return;
    const int protection = (access & SOFT_READ ? PROT_READ : 0) | (access & SOFT_WRITE ? PROT_READ | PROT_WRITE : 0);
    mprotect(range->gpu_map + GUARD, range->gpu_map_bytes - 2 * GUARD, protection);
}

void soft_range_free(soft_range *range) {
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < opened_count; i++)
        if (opened[i] == range) opened[i] = opened[--opened_count];
    range->freed = 1;
    range->open = 0;
    if (range->borrowed) {
        drop(range);
    } else {
        bytes_alive -= range->length;
        munmap(range->host_map, range->host_map_bytes);
        /* Bytes go, addresses stay. */
        mmap(range->gpu_map, range->gpu_map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
             -1, 0);
        soft_range **place = &quarantine[freed_ranges++ % QUARANTINE];
        if (*place) drop(*place);
        *place = range;
    }
    pthread_mutex_unlock(&lock);
}

uint64_t soft_memory_bytes(void) {
    pthread_mutex_lock(&lock);
    const uint64_t bytes = bytes_alive;
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* ---- Dispatches */

void soft_memory_open(const soft_access *list, uint32_t count) {
    pthread_mutex_lock(&lock);
    first_fault[0] = 0;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < opened_count; i++) {
        int wanted = 0;
        for (uint32_t j = 0; j < count; j++)
            if (list[j].range == opened[i]) wanted |= list[j].access;
        if (wanted != opened[i]->open) protect(opened[i], wanted);
        if (wanted) opened[kept++] = opened[i];
    }
    opened_count = kept;
    for (uint32_t j = 0; j < count; j++) {
        soft_range *range = list[j].range;
        if (range->freed || (range->open | list[j].access) == range->open) continue;
        if (!range->open && opened_count < sizeof(opened) / sizeof(opened[0])) opened[opened_count++] = range;
        protect(range, range->open | list[j].access);
    }
    pthread_mutex_unlock(&lock);
}

const char *soft_memory_fault(void) {
    return first_fault;
}

static void remember(const char *text) {
    if (!first_fault[0]) snprintf(first_fault, sizeof(first_fault), "%s", text);
}

/* Fresh memory of NaN where nothing is, so that a kernel can go on. */
static void put_page(char *address) {
    const uint64_t page = (uint64_t)getpagesize();
    char *start = address - (uint64_t)address % page;
    mmap(start, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    memset(start, 0xff, page);
}

/* Says what is wrong with touching `address`, and makes it possible. 0: the address is none of ours. */
static int explain(char *address) {
    for (soft_range *range = ranges; range; range = range->next) {
        /* The caller's memory: it has been unmapped, or a kernel writes where only reading is allowed. The latter is
         * nothing to go on from. */
        unsigned char resident;
        if (range->borrowed && address >= range->host && address < range->host + range->length &&
            mincore(address - (uint64_t)address % (uint64_t)getpagesize(), 1, &resident)) {
            remember("touches memory of the caller's that is gone");
            put_page(address);
            return 1;
        }
        if (!range->gpu_map || address < range->gpu_map || address >= range->gpu_map + range->gpu_map_bytes) continue;
        const char *name = range->label[0] ? range->label : "unnamed";
        char text[sizeof(first_fault)];
        const long long at = address - range->gpu;
        const int inside = address >= range->gpu_map + GUARD && address < range->gpu_map + range->gpu_map_bytes - GUARD;
        if (range->freed)
            snprintf(text, sizeof(text), "touches byte %lld of buffer \"%s\", which was freed", at, name);
        else if (!inside)
            snprintf(text, sizeof(text), "touches byte %lld of buffer \"%s\", which has %llu", at, name,
                     (unsigned long long)range->length);
        else if (range->open)
            snprintf(text, sizeof(text), "writes byte %lld of buffer \"%s\", which it may only read", at, name);
        else
            snprintf(text, sizeof(text),
                     "touches byte %lld of buffer \"%s\", which is neither bound nor declared with useResources", at,
                     name);
        remember(text);
        if (range->freed || !inside) {
            put_page(address);
        } else {
            if (!range->open && opened_count < sizeof(opened) / sizeof(opened[0])) opened[opened_count++] = range;
            protect(range, SOFT_READ | SOFT_WRITE);
        }
        return 1;
    }
    return 0;
}

static void on_fault(int number, siginfo_t *info, void *context) {
    /* A kernel's own access, never one of ours under the lock: waiting for it here is safe. */
    pthread_mutex_lock(&lock);
    const int ours = explain(info->si_addr);
    pthread_mutex_unlock(&lock);
    if (ours) return;
    if (previous_handler.sa_flags & SA_SIGINFO && previous_handler.sa_sigaction)
        previous_handler.sa_sigaction(number, info, context);
    else
        sigaction(number, &previous_handler, NULL); /* and fault again */
}

static void install(void) {
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &previous_handler);
}

void soft_memory_start_thread(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, install);
    /* A kernel runs on a small stack of the emulator's; its faults are handled on this one. */
    static char stack[1 << 16];
    stack_t alternative = {.ss_sp = stack, .ss_size = sizeof(stack)};
    sigaltstack(&alternative, NULL);
}
