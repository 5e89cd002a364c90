// The GPU: one thread that runs command buffers in the order of their commits, and tells who wants to know.
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#import "soft.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static SoftCommandBuffer **pending;
static uint32_t pending_count;
static volatile uint32_t delay;

void softmetal_set_delay(uint32_t microseconds) {
    delay = microseconds;
}

static void *gpu_thread(void *unused) {
    (void)unused;
    GSRegisterCurrentThread();
    soft_memory_start_thread();
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!pending_count) pthread_cond_wait(&work, &lock);
        SoftCommandBuffer *buffer = pending[0];
        pending_count--;
        for (uint32_t i = 0; i < pending_count; i++) pending[i] = pending[i + 1];
        pthread_mutex_unlock(&lock);
        if (delay) usleep(delay);
        @autoreleasepool {
            [buffer run];
            [buffer release];
        }
    }
    return NULL;
}

void soft_gpu_enqueue(SoftCommandBuffer *buffer) {
    static BOOL started;
    pthread_mutex_lock(&lock);
    pending = realloc(pending, (pending_count + 1) * sizeof(*pending));
    pending[pending_count++] = buffer;
    if (!started) {
        pthread_t thread;
        started = pthread_create(&thread, NULL, gpu_thread, NULL) == 0;
        if (started) pthread_detach(thread);
    }
    pthread_cond_signal(&work);
    pthread_mutex_unlock(&lock);
}

// ---- Command buffers

@implementation SoftEncoderInfo
- (void)dealloc {
    [name release];
    [signposts release];
    [super dealloc];
}
- (NSString *)label {
    return name;
}
- (NSArray *)debugSignposts {
    return signposts;
}
- (MTLCommandEncoderErrorState)errorState {
    return state;
}
@end

@implementation SoftCommandBuffer (Run)

- (void)fail:(NSString *)message in:(SoftEncoder *)culprit signposts:(NSUInteger)passed {
    NSMutableDictionary *details = [NSMutableDictionary dictionaryWithObject:message forKey:NSLocalizedDescriptionKey];
    if (errorOptions & MTLCommandBufferErrorOptionEncoderExecutionStatus) {
        NSMutableArray *infos = [NSMutableArray array];
        MTLCommandEncoderErrorState encoderState = MTLCommandEncoderErrorStateCompleted;
        for (SoftEncoder *encoder in encoders) {
            SoftEncoderInfo *info = [[[SoftEncoderInfo alloc] init] autorelease];
            info->name = [encoder->name copy];
            info->state = encoder == culprit ? MTLCommandEncoderErrorStateFaulted : encoderState;
            if (encoder == culprit) encoderState = MTLCommandEncoderErrorStatePending;
            const NSUInteger seen = encoder == culprit                                     ? passed
                                    : encoderState == MTLCommandEncoderErrorStateCompleted ? [encoder->signposts count]
                                                                                           : 0;
            info->signposts = [[encoder->signposts subarrayWithRange:NSMakeRange(0, seen)] retain];
            [infos addObject:info];
        }
        [details setObject:infos forKey:MTLCommandBufferEncoderInfoErrorKey];
    }
    failure = [[NSError alloc] initWithDomain:@"SoftMetal" code:1 userInfo:details];
}

- (void)run {
    if (mistake) [self fail:mistake in:[encoders lastObject] signposts:mistakeSignposts];
    for (SoftEncoder *encoder in encoders) {
        NSUInteger passed = 0;
        NSString *message = failure ? nil : [encoder runToSignposts:&passed];
        if (message) [self fail:message in:encoder signposts:passed];
    }
    state = failure ? MTLCommandBufferStatusError : MTLCommandBufferStatusCompleted;
    for (NSValue *value in handlers) {
        MTLCommandBufferHandler handler = (MTLCommandBufferHandler)[value pointerValue];
        handler(self);
        Block_release(handler);
    }
    [handlers removeAllObjects];
}

@end

// ---- Dispatches

// The dispatches of a phase, which no barrier orders: `order` holds their numbers.
static void arrange(uint32_t *order, uint32_t first, uint32_t count) {
    static uint64_t state;
    for (uint32_t i = 0; i < count; i++) order[i] = first + (softmetal_order == 1 ? count - 1 - i : i);
    if (softmetal_order < 2) return;
    for (uint32_t i = count; i > 1; i--) {
        state = (state ^ softmetal_order) * 6364136223846793005u + 1442695040888963407u;
        const uint32_t other = (uint32_t)(state >> 33) % i, taken = order[other];
        order[other] = order[i - 1];
        order[i - 1] = taken;
    }
}

@implementation SoftEncoder (Run)

// nil, or what went wrong.
- (NSString *)runOne:(const soft_dispatch *)dispatch {
    const SoftPipeline *pipeline = dispatch->pipeline;
    const emu_kernel *kernel = pipeline->kernel;
    soft_access *accesses = malloc((dispatch->declared + EMU_MAX_BUFFERS) * sizeof(*accesses));
    uint32_t accessed = dispatch->declared, bound = 0;
    emu_binding bindings[EMU_MAX_BUFFERS];
    NSString *failed = nil;
    for (uint32_t i = 0; i < dispatch->declared; i++) accesses[i] = declarations[i];
    for (uint32_t i = 0; i < kernel->buffer_count; i++) {
        const uint32_t index = kernel->buffers[i].index;
        if (!(dispatch->bound >> index & 1)) continue;
        bindings[bound].index = index;
        bindings[bound++].address = dispatch->addresses[index];
        if (!dispatch->ranges[index]) continue;
        accesses[accessed].range = dispatch->ranges[index];
        accesses[accessed++].access = kernel->buffers[i].writes ? SOFT_READ | SOFT_WRITE : SOFT_READ;
    }
    for (uint32_t i = 0; i < accessed; i++)
        if (accesses[i].range->freed && !failed)
            failed = [NSString stringWithFormat:@"kernel %s: buffer \"%s\" was freed before the GPU was done with it",
                                                kernel->name, accesses[i].range->label];
    if (!failed && soft_should_fail(kernel->name))
        failed = [NSString stringWithFormat:@"kernel %s: fails because a test wants it to", kernel->name];
    if (!failed) {
        char message[512] = "";
        soft_memory_open(accesses, accessed);
        const int rc = emu_dispatch(kernel, pipeline->constants, bindings, bound, dispatch->groups, dispatch->threads,
                                    dispatch->threadgroup_bytes, message, sizeof(message));
        soft_count(1, 0, 0);
        const char *fault = soft_memory_fault();
        if (*fault)
            failed = [NSString stringWithFormat:@"kernel %s: %s", kernel->name, fault];
        else if (rc)
            failed = [NSString stringWithUTF8String:message];
    }
    free(accesses);
    return failed;
}

- (NSString *)runToSignposts:(NSUInteger *)passed {
    uint32_t *order = malloc((count + 1) * sizeof(*order));
    NSString *failed = nil;
    for (uint32_t first = 0, end; first < count && !failed; first = end) {
        for (end = first + 1; end < count && dispatches[end].phase == dispatches[first].phase;) end++;
        arrange(order, first, end - first);
        for (uint32_t i = 0; i < end - first && !failed; i++) {
            *passed = dispatches[order[i]].signposts;
            failed = [self runOne:&dispatches[order[i]]];
        }
    }
    free(order);
    soft_memory_open(NULL, 0);
    return failed;
}

@end
