// Queues, command buffers and encoders: what is encoded is recorded and checked, and run later by gpu.m.
#include <stdlib.h>
#include <string.h>

#import "soft.h"

@implementation SoftQueue
- (void)setLabel:(NSString *)label {
    (void)label;
}
- (id<MTLCommandBuffer>)commandBufferWithDescriptor:(MTLCommandBufferDescriptor *)descriptor {
    SoftCommandBuffer *buffer = [[[SoftCommandBuffer alloc] init] autorelease];
    buffer->queue = [self retain];
    buffer->errorOptions = descriptor->errorOptions;
    if (descriptor->retainedReferences) buffer->held = [[NSMutableArray alloc] init];
    return buffer;
}
@end

@implementation MTLCommandBufferDescriptor
- (id)init {
    if ((self = [super init])) retainedReferences = YES;  // as Metal's are
    return self;
}
- (void)setRetainedReferences:(BOOL)value {
    retainedReferences = value;
}
- (void)setErrorOptions:(MTLCommandBufferErrorOption)value {
    errorOptions = value;
}
@end

@implementation SoftCommandBuffer
- (id)init {
    if ((self = [super init])) {
        encoders = [[NSMutableArray alloc] init];
        handlers = [[NSMutableArray alloc] init];
    }
    return self;
}
- (void)dealloc {
    for (NSValue *value in handlers) Block_release([value pointerValue]);
    [queue release];
    [encoders release];
    [handlers release];
    [held release];
    [mistake release];
    [failure release];
    [super dealloc];
}
- (void)mistake:(NSString *)format, ... {
    if (mistake) return;
    va_list arguments;
    va_start(arguments, format);
    mistake = [[NSString alloc] initWithFormat:format arguments:arguments];
    va_end(arguments);
    mistakeSignposts = [((SoftEncoder *)[encoders lastObject])->signposts count];
}
- (void)setLabel:(NSString *)label {
    (void)label;
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)dispatchType {
    SoftEncoder *last = [encoders lastObject];
    if (last && !last->ended) [self mistake:@"an encoder begins before the last one has ended"];
    SoftEncoder *encoder = [[[SoftEncoder alloc] init] autorelease];
    encoder->owner = self;
    encoder->concurrent = dispatchType == MTLDispatchTypeConcurrent;
    [encoders addObject:encoder];
    return encoder;
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)block {
    if (state >= MTLCommandBufferStatusCommitted) soft_complain(@"addCompletedHandler after commit");
    // Not [block copy]: gnustep-base has a copy of its own, which knows no other runtime's blocks.
    MTLCommandBufferHandler copy = Block_copy(block);
    [handlers addObject:[NSValue valueWithPointer:copy]];
}
- (void)commit {
    if (state >= MTLCommandBufferStatusCommitted) {
        soft_complain(@"a command buffer is committed twice");
        return;
    }
    SoftEncoder *last = [encoders lastObject];
    if (last && !last->ended) [self mistake:@"committed before its encoder has ended"];
    state = MTLCommandBufferStatusCommitted;
    soft_count(0, 1, 0);
    soft_gpu_enqueue([self retain]);
}
- (MTLCommandBufferStatus)status {
    return state;
}
- (NSError *)error {
    return failure;
}
@end

@implementation SoftEncoder
- (id)init {
    if ((self = [super init])) signposts = [[NSMutableArray alloc] init];
    return self;
}

static void forget_bindings(soft_dispatch *dispatch) {
    for (uint32_t i = 0; i < EMU_MAX_BUFFERS; i++) {
        if (dispatch->ranges[i]) soft_range_release(dispatch->ranges[i]);
        free(dispatch->bytes[i]);
        dispatch->ranges[i] = NULL;
        dispatch->bytes[i] = NULL;
    }
    dispatch->bound = 0;
}

- (void)dealloc {
    for (uint32_t i = 0; i < count; i++) {
        forget_bindings(&dispatches[i]);
        [dispatches[i].pipeline release];
    }
    forget_bindings(&next);
    for (uint32_t i = 0; i < declared; i++) soft_range_release(declarations[i].range);
    free(dispatches);
    free(declarations);
    [next.pipeline release];
    [signposts release];
    [name release];
    [super dealloc];
}

- (void)setLabel:(NSString *)label {
    [name autorelease];
    name = [label copy];
}

- (void)endEncoding {
    if (ended) [owner mistake:@"an encoder ends twice"];
    if (groupDepth) [owner mistake:@"an encoder ends inside of a debug group"];
    ended = YES;
}

- (void)insertDebugSignpost:(NSString *)string {
    [signposts addObject:string];
}

- (void)pushDebugGroup:(NSString *)string {
    (void)string;
    groupDepth++;
}

- (void)popDebugGroup {
    if (!groupDepth) {
        [owner mistake:@"popDebugGroup without a group"];
        return;
    }
    groupDepth--;
}

- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
    [next.pipeline autorelease];
    next.pipeline = [(SoftPipeline *)state retain];
}

- (BOOL)clearIndex:(NSUInteger)index {
    if (ended) [owner mistake:@"encoding goes on after endEncoding"];
    if (index >= EMU_MAX_BUFFERS) {
        [owner mistake:@"buffer index %lu: expected at most %d", (unsigned long)index, EMU_MAX_BUFFERS - 1];
        return NO;
    }
    if (next.ranges[index]) soft_range_release(next.ranges[index]);
    free(next.bytes[index]);
    next.ranges[index] = NULL;
    next.bytes[index] = NULL;
    next.bound |= (uint64_t)1 << index;
    return YES;
}

- (void)setBytes:(const void *)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
    if (![self clearIndex:index]) return;
    if (length == 0 || length > 4096) {
        [owner mistake:@"setBytes: expected 1…4096 bytes, got %lu", (unsigned long)length];
        return;
    }
    next.bytes[index] = memcpy(malloc(length), bytes, length);
    next.addresses[index] = next.bytes[index];
}

- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
    if (![self clearIndex:index]) return;
    soft_range *range = buffer ? ((SoftBuffer *)buffer)->range : NULL;
    if (!range || offset >= range->length) {
        [owner mistake:@"setBuffer at index %lu: expected a buffer longer than its offset, got offset %lu of %lu",
                       (unsigned long)index, (unsigned long)offset, range ? (unsigned long)range->length : 0];
        next.bound &= ~((uint64_t)1 << index);
        return;
    }
    soft_range_retain(range);
    [owner->held addObject:buffer];
    next.ranges[index] = range;
    next.addresses[index] = range->gpu + offset;
}

- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
    if (index != 0 || length % 16 || length > EMU_MAX_THREADGROUP_BYTES)
        [owner mistake:@"setThreadgroupMemoryLength: expected a multiple of 16 up to %d at index 0, got %lu at %lu",
                       EMU_MAX_THREADGROUP_BYTES, (unsigned long)length, (unsigned long)index];
    next.threadgroup_bytes = (uint32_t)length;
}

- (void)useResources:(const id<MTLResource> *)resources count:(NSUInteger)number usage:(MTLResourceUsage)usage {
    declarations = realloc(declarations, (declared + number) * sizeof(*declarations));
    for (NSUInteger i = 0; i < number; i++) {
        soft_range *range = ((SoftBuffer *)resources[i])->range;
        soft_range_retain(range);
        [owner->held addObject:resources[i]];
        declarations[declared].range = range;
        declarations[declared++].access =
            (usage & MTLResourceUsageRead ? SOFT_READ : 0) | (usage & MTLResourceUsageWrite ? SOFT_WRITE : 0);
    }
}

- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
    if (scope != MTLBarrierScopeBuffers) [owner mistake:@"memoryBarrierWithScope: expected buffers"];
    next.phase++;
}

// Bindings are checked against the kernel's signature. They do not last: Metal would take a forgotten one from the
// dispatch before, which is never what was meant.
- (void)checkNext {
    const emu_kernel *kernel = next.pipeline->kernel;
    uint64_t known = 0;
    for (uint32_t i = 0; i < kernel->buffer_count; i++) {
        const emu_buffer_argument *argument = &kernel->buffers[i];
        const uint32_t constant = argument->function_constant_plus_one;
        known |= (uint64_t)1 << argument->index;
        if (constant && !(next.pipeline->constants >> (constant - 1) & 1)) continue;
        if (!(next.bound >> argument->index & 1))
            [owner mistake:@"kernel %s: nothing is bound at index %u", kernel->name, argument->index];
        else if (argument->writes && next.bytes[argument->index])
            [owner mistake:@"kernel %s: writes index %u, which setBytes has set", kernel->name, argument->index];
    }
    if (next.bound & ~known)
        [owner mistake:@"kernel %s: has no argument at index %d", kernel->name, __builtin_ctzll(next.bound & ~known)];
    const uint64_t threads = (uint64_t)next.threads[0] * next.threads[1] * next.threads[2];
    if (threads == 0 || threads > [next.pipeline maxTotalThreadsPerThreadgroup])
        [owner mistake:@"kernel %s: expected 1…%lu threads a threadgroup, got %llu", kernel->name,
                       (unsigned long)[next.pipeline maxTotalThreadsPerThreadgroup], (unsigned long long)threads];
    else if (next.pipeline->wholeSimdgroups && threads % EMU_SIMD_WIDTH)
        [owner mistake:@"kernel %s: the pipeline was promised whole SIMD-groups, got %llu threads", kernel->name,
                       (unsigned long long)threads];
    if (!next.groups[0] || !next.groups[1] || !next.groups[2])
        [owner mistake:@"kernel %s: a grid of no threadgroups", kernel->name];
}

- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)threads {
    if (!next.pipeline) {
        [owner mistake:@"a dispatch without a pipeline"];
        return;
    }
    const NSUInteger sizes[6] = {groups.width,  groups.height,  groups.depth,
                                 threads.width, threads.height, threads.depth};
    for (int i = 0; i < 3; i++) {
        next.groups[i] = (uint32_t)sizes[i];
        next.threads[i] = (uint32_t)sizes[3 + i];
    }
    next.declared = declared;
    next.signposts = (uint32_t)[signposts count];
    if (!concurrent) next.phase++;
    [self checkNext];
    dispatches = realloc(dispatches, (count + 1) * sizeof(*dispatches));
    dispatches[count++] = next;
    memset(next.ranges, 0, sizeof(next.ranges));
    memset(next.bytes, 0, sizeof(next.bytes));
    next.bound = 0;
    next.threadgroup_bytes = 0;
    [next.pipeline retain];
}
@end
